"""Files and folders that are whole under their name or not there, and whether a file still is as it was written."""

import contextlib
import csv
import hashlib
import json
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from vision_longhorn.errors import UserError, one_line


@contextlib.contextmanager
def written_aside(
    path: str | os.PathLike[str], ending: str = "", lasting: bool = False, hashed: bool = False
) -> Iterator[Path]:
    """Gives the path of a file or folder beside `path`, for the caller to make; in the end it is renamed to `path`.

    Folders above it that are missing are made. A folder replaces only an empty one. Where writing fails, nothing is
    left, what stood at `path` still does, and an OSError names `path`.

    Args:
        ending: The end of its name until then.
        lasting: Bring the file and its name to the disk, so that they outlive a power cut.
        hashed: Write the file's hash beside it, for `check_whole`.
    """
    aside = Path(f"{os.fspath(path)}.{os.getpid()}.tmp{ending}")
    aside.parent.mkdir(parents=True, exist_ok=True)
    _remove(aside)  # left by a process of the same number that was killed
    try:
        with _named(path, aside):
            yield aside
            if lasting:
                _sync(aside, os.O_RDWR)
            if hashed:
                hash_file(path).unlink(missing_ok=True)  # first, as a hash must never stand beside another file
            os.replace(aside, path)
            if hashed:
                write_hash(path)
            if lasting and os.name == "posix":
                _sync(aside.parent, os.O_RDONLY)
    finally:
        _remove(aside)


@contextlib.contextmanager
def _named(path: str | os.PathLike[str], aside: Path | None = None) -> Iterator[None]:
    """Names the file `path` in an error that names `aside` or, as on a full disk, no file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(aside)):
            error.filename = os.fspath(path)
        raise


def append(path: str | os.PathLike[str], data: bytes) -> None:
    """Adds `data` to the end of a file. Raises an OSError that names the file where that fails."""
    with _named(path), open(path, "ab") as file:
        file.write(data)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def left_aside(path: Path) -> Iterator[Path]:
    """Temporary files left by processes that were killed while writing `path`, whose name may be a pattern."""
    return path.parent.glob(f"{path.name}.[0-9]*.tmp")


def second_name(file: Path, name: Path) -> None:
    """Gives a file a second name, which costs no space where the file system knows links."""
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
    """The path of a file's hash, as `sha256sum` writes and checks it."""
    return Path(f"{os.fspath(path)}.sha256")


def write_hash(path: str | os.PathLike[str]) -> None:
    """Writes the hash of a file beside it."""
    write_text(hash_file(path), f"{_sha256(path)}  {Path(path).name}\n")


def _sha256(path: str | os.PathLike[str]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def is_as_hashed(path: Path) -> bool:
    """Whether a file has a hash beside it that is its own."""
    return hash_file(path).is_file() and _sha256(path) in hash_file(path).read_text(errors="replace").lower().split()


def check_whole(path: str | os.PathLike[str]) -> None:
    """Raises UserError for a file that does not fit the hash beside it or, without one, a zip file's own checksums.

    torch writes these CRCs, but does not compare them when it reads. If all are 0, the file was written without
    (`torch.serialization.set_crc32_options`).
    """
    if hash_file(path).is_file():
        if not is_as_hashed(Path(path)):
            raise UserError(
                f"{path} is not the file of which {hash_file(path)} has the hash: one of them is damaged, or the file "
                "was changed since; then remove the hash"
            )
        return
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
                for member in members if any(member.CRC for member in members) else ():
                    if member.external_attr & 0x10 and not member.is_dir():
                        raise zipfile.BadZipFile(f"{member.filename} is marked as a folder")  # torch would read zeros
                    with archive.open(member) as file:
                        while file.read(1 << 20):
                            pass
    except (EOFError, RuntimeError, ValueError, struct.error, zipfile.BadZipFile, zlib.error) as error:
        # A damaged directory may call a member compressed or encrypted, which raises all types but BadZipFile.
        raise UserError(f"{path} is damaged ({one_line(error)})") from error


@contextlib.contextmanager
def text_file(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """Opens a text file, UTF-8, that gets its name `path` when it is whole."""
    with written_aside(path) as aside:
        # Text may have names of files in it, which need not be UTF-8.
        with open(aside, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            yield file


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes `text` to a file that no reader ever sees half of."""
    with text_file(path) as file:
        file.write(text)


def read_json(file: Path) -> Any:
    """The content of a JSON file; None where there is none, or it is damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def csv_file(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Opens a csv.writer whose file gets its name `path` when it is whole."""
    with text_file(path) as file:
        yield csv.writer(file, lineterminator="\n")
