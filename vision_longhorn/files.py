"""Files and folders that are written aside: whole under their name, or not there."""

import contextlib
import csv
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO


@contextlib.contextmanager
def written_aside(path: str | os.PathLike[str], ending: str = "", lasting: bool = False) -> Iterator[Path]:
    """The path of a file or folder beside `path`, for the caller to make.

    It is renamed to `path` in the end, and removed where writing fails. Folders above it that are missing are made.

    Args:
        path: What it is called when it is whole. A folder takes the place of none but an empty one.
        ending: What its name has to end in until then.
        lasting: Bring the file and its name to the disk, so that they outlive a power cut.

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
        os.replace(aside, path)
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
