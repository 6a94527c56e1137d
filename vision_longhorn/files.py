"""Files and folders that are written aside: whole under their name, or not there. What a tool may write over, and
whether a file still is as it was written."""

import contextlib
import csv
import hashlib
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from vision_longhorn.errors import UserError, one_line

# What a run leaves beside checkpoints and curves
RUN_FILES = "config.yaml", "env.json", "metrics.json", "summary.csv", "bad_steps.json"
# Endings that say what a file is. Any other, or none, may be that of whatever a user likes.
ENDINGS = set(
    ".bin .csv .gif .gz .jpeg .jpg .json .onnx .pdf .png .pt .pt2 .pth .py .safetensors .sha256 .svg .tar .tiff .webp "
    ".yaml .yml .zip".split()
)


def check_output(
    option: str,
    path: str | os.PathLike[str],
    endings: Sequence[str],
    is_own: Callable[[Path], bool] = lambda _: False,
    others: Iterable[str | os.PathLike[str]] = (),
) -> None:
    """Checks, before any work, that a tool may write a file to `path`: the one rule for what all of them write.

    Args:
        option: What gave the path, for messages.
        path: Where the file is to be.
        endings: Those that fit what the tool writes.
        is_own: Whether a file that is there is an earlier one of the same tool, which the new one may replace.
        others: What the same command reads, or writes as well.

    Raises:
        UserError: Where the file would take the place of one that the tool has not written, or has the name of another
            kind of file.
    """
    path, text = Path(path), os.fspath(path)
    if not text or path.is_dir():
        raise UserError(f"{option} {text or repr(text)} cannot be written: it is a folder, name a file")
    if any(_is_same(path, other) for other in others):
        raise UserError(f"{option} {text} is named twice in this command: name another file to write")
    _check_name(option, text, f"let it end in {' or '.join(endings)}", endings)
    if path.is_symlink() or os.path.lexists(path) and not (path.is_file() and is_own(path)):
        raise UserError(f"{option} {text} is there already and was not written by this tool: name another file")


def check_new_folder(option: str, path: str | os.PathLike[str], others: Iterable[str | os.PathLike[str]] = ()) -> None:
    """Checks, before any work, that a tool may make a folder at `path`. An empty one may be there.

    Raises:
        UserError: Where anything is there, or it is one of the `others`, which the same command writes as well.
    """
    if any(_is_same(path, other) for other in others):
        raise UserError(f"{option} {path} is named twice in this command: name another folder to write")
    _check_name(option, os.fspath(path), "it is to be a folder")
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path) or os.listdir(path)):
        raise UserError(f"{option} {path} is there already: remove it, or name another folder")


def _check_name(option: str, text: str, remedy: str, endings: Sequence[str] = ()) -> None:
    path = Path(text)
    if path.suffix.lower() in ENDINGS - set(endings):
        raise UserError(f"{option} {text} has the name of another kind of file: {remedy}")
    if path.name in RUN_FILES and (path.parent / "config.yaml").exists():
        raise UserError(f"{option} {text} is what a run calls a file of its own: name another")


def _is_same(path: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    with contextlib.suppress(OSError):
        return os.path.realpath(path) == os.path.realpath(other) or os.path.samefile(path, other)
    return False


@contextlib.contextmanager
def written_aside(
    path: str | os.PathLike[str], ending: str = "", lasting: bool = False, hashed: bool = False
) -> Iterator[Path]:
    """The path of a file or folder beside `path`, for the caller to make.

    It is renamed to `path` in the end, and removed where writing fails. Folders above it that are missing are made.

    Args:
        path: What it is called when it is whole. A folder takes the place of none but an empty one.
        ending: What its name has to end in until then.
        lasting: Bring the file and its name to the disk, so that they outlive a power cut.
        hashed: Write the file's hash beside it, by which `check_whole` knows it.

    Raises:
        OSError: Where it cannot be written. What stood at `path` still does.
    """
    aside = Path(f"{os.fspath(path)}.{os.getpid()}.tmp{ending}")
    aside.parent.mkdir(parents=True, exist_ok=True)
    _remove(aside)  # of a process of this number that was killed
    try:
        yield aside
        if lasting:
            _sync(aside, os.O_RDWR)
        if hashed:
            hash_file(path).unlink(missing_ok=True)  # first: a hash must never stand beside another file than its own
        os.replace(aside, path)
        if hashed:
            write_hash(path)
        if lasting and os.name == "posix":
            _sync(aside.parent, os.O_RDONLY)
    except OSError as error:
        _name(error, path, aside)
        raise
    finally:
        _remove(aside)


def _name(error: OSError, path: str | os.PathLike[str], aside: Path | None = None) -> None:
    """Lets an error tell the file `path`, where the system gave no name, as on a full disk, or that of `aside`."""
    if error.errno is not None and error.filename in (None, str(aside)):
        error.filename = os.fspath(path)


def append(path: str | os.PathLike[str], data: bytes) -> None:
    """Adds `data` to the end of a file. Raises OSError, which names it, where that fails."""
    try:
        with open(path, "ab") as file:
            file.write(data)
    except OSError as error:
        _name(error, path)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def left_aside(path: Path) -> Iterator[Path]:
    """What processes that were killed left of writing `path`, whose name may be a pattern."""
    for pattern in f"{path.name}.tmp", f"{path.name}.[0-9]*.tmp":  # the first is of runs of the first version
        yield from path.parent.glob(pattern)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hash_file(path: str | os.PathLike[str]) -> Path:
    """Where the hash of a file stands, as `sha256sum` writes and checks it."""
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
    """Whether a file is the one whose hash stands beside it."""
    return hash_file(path).is_file() and _sha256(path) in hash_file(path).read_text(errors="replace").lower().split()


def check_whole(path: str | os.PathLike[str]) -> None:
    """Compares a file with the hash beside it, or the members of a zip file with their CRC, where it has them.

    torch writes the CRC and does not look at it when it reads. A zip file in which every CRC is 0 was written without
    (`torch.serialization.set_crc32_options`), and nothing can be said of it, as of files of any other kind.

    Raises:
        UserError: Where the file is not as it was written.
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
        # All but BadZipFile are of a damaged directory, by which a member is compressed or encrypted
        raise UserError(f"{path} is damaged ({one_line(error)})") from error


@contextlib.contextmanager
def text_file(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """A text file to write to, UTF-8, that gets its name `path` when it is whole."""
    with written_aside(path) as aside:
        # Names of files need not be UTF-8.
        with open(aside, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            yield file


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes `text` to a file that no reader ever sees half of."""
    with text_file(path) as file:
        file.write(text)


@contextlib.contextmanager
def csv_file(path: str | os.PathLike[str]) -> Iterator[Any]:
    """A csv.writer whose file gets its name `path` when it is whole."""
    with text_file(path) as file:
        yield csv.writer(file, lineterminator="\n")
