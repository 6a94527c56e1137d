"""Files and folders that are whole or not there, have one writer, and can be checked for damage."""

import contextlib
import csv
import hashlib
import json
import os
import shutil
import socket
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from vision_longhorn.errors import UserError, one_line

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = "run.lock"


@contextlib.contextmanager
def written_aside(
    path: str | os.PathLike[str], ending: str = "", lasting: bool = False, hashed: bool = False
) -> Iterator[Path]:
    """Yields a temporary path beside `path`, whose name ends in `ending`, for the caller to make a file or folder.

    At the end it is renamed to `path`; a folder replaces only an empty one. Missing parent folders are made. If writing
    fails, the temporary file is removed, `path` stays as it was, and an OSError names `path`. If `lasting`, the file
    survives a power cut. If `hashed`, its hash is written beside it, for `check_whole`.
    """
    aside = Path(f"{os.fspath(path)}.{os.getpid()}.tmp{ending}")
    aside.parent.mkdir(parents=True, exist_ok=True)
    _remove(aside)  # left by a killed process with the same number
    try:
        yield aside
        if lasting:
            _sync(aside, os.O_RDWR)
        if hashed:
            hash_file(path).unlink(missing_ok=True)  # first, so that a hash is never beside another file
        os.replace(aside, path)
        if hashed:
            write_hash(path)
        if lasting and os.name == "posix":
            _sync(aside.parent, os.O_RDONLY)
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(aside)):  # none, as on a full disk
            error.filename = os.fspath(path)
        raise
    finally:
        _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def clear_aside(path: Path) -> None:
    """Removes temporary files left by processes killed while writing `path`, whose name may be a pattern."""
    for file in path.parent.glob(f"{path.name}.[0-9]*.tmp"):
        file.unlink()


def second_name(file: Path, name: Path) -> None:
    """Gives a file a second name, which takes no space if the file system supports hard links."""
    with written_aside(name, lasting=True) as aside:
        try:
            os.link(file, aside)
        except OSError:
            shutil.copyfile(file, aside)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hash_file(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a file's hash, which `sha256sum -c` checks."""
    return Path(f"{os.fspath(path)}.sha256")


def write_hash(path: str | os.PathLike[str]) -> None:
    write_text(hash_file(path), f"{_sha256(path)}  {Path(path).name}\n")


def _sha256(path: str | os.PathLike[str]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def is_as_hashed(path: Path) -> bool:
    """Tells whether a file has a hash beside it, and matches it."""
    return hash_file(path).is_file() and _sha256(path) in hash_file(path).read_text(errors="replace").lower().split()


def check_whole(path: str | os.PathLike[str]) -> None:
    """Raises UserError for a file that does not fit the hash beside it or, without one, a zip file's own checksums.

    torch writes these CRCs, but does not compare them when it reads. If all are 0, the file was written without them
    (`torch.serialization.set_crc32_options`).
    """
    if hash_file(path).is_file():
        if not is_as_hashed(Path(path)):
            raise UserError(
                f"{path} does not match its hash in {hash_file(path)}: one of them is damaged, or the file was changed "
                "on purpose; then remove the hash"
            )
        return
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
                for member in members if any(member.CRC for member in members) else ():
                    if member.external_attr & 0x10 and not member.is_dir():
                        raise zipfile.BadZipFile(f"{member.filename} is marked as a folder")  # torch would read zeros
                    with archive.open(member) as file:  # not by its name, as testzip() does, which may be another's
                        while file.read(1 << 20):
                            pass
    except (EOFError, RuntimeError, ValueError, struct.error, zipfile.BadZipFile, zlib.error) as error:
        # A damaged zip directory may call a member compressed or encrypted, which raises types beside BadZipFile.
        raise UserError(f"{path} is damaged ({one_line(error)}): copy or download it again") from error


@contextlib.contextmanager
def text_file(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """Opens a file for text in UTF-8. It gets its name `path` when it is whole."""
    with written_aside(path) as aside:
        # Text may have names of files in it, which need not be UTF-8.
        with open(aside, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            yield file


def write_text(path: str | os.PathLike[str], text: str) -> None:
    with text_file(path) as file:
        file.write(text)


def read_json(file: Path) -> Any:
    """Reads a JSON file; None if there is none, or it is damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def csv_file(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Opens a csv.writer; its file gets its name `path` when it is whole."""
    with text_file(path) as file:
        yield csv.writer(file, lineterminator="\n")


def lock_folder(folder: str | os.PathLike[str]) -> TextIO:
    """Locks an existing folder for this process, until it closes the file that is returned, or ends in any way.

    The system locks the file run.lock, whose text names the process and its host. NFS and most cluster file systems
    pass POSIX locks on to other machines, and a forked process does not inherit them.

    Raises:
        UserError: Where another process holds the folder, or it is a file.
    """
    path = Path(folder, LOCK)
    if path.parent.is_file():
        raise UserError(f"{folder} is a file: name a folder for the run")
    file = open(path, "a+", encoding="utf-8")
    try:
        if sys.platform == "win32":
            file.seek(1 << 30)  # behind the text, so that others can read the text
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        holder = path.read_text(encoding="utf-8").strip() or "another process"
        raise UserError(
            f"{folder} is being written by {holder}: end that one first, it saves on SIGTERM; if that "
            f"machine is gone, remove {path}"
        ) from None
    except OSError as error:  # a file system without locks
        print(f"Note: {path} cannot be locked ({error.strerror}): make sure that no other process writes there.")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
