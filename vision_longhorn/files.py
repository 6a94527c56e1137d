"""Files that are written as they come, and are whole or not there."""

import contextlib
import csv
import os
from pathlib import Path


@contextlib.contextmanager
def written_aside(path):
    """The path of a file beside `path`, which is renamed to it in the end, or removed where writing fails. Folders that
    are missing are made."""
    aside = Path(f"{path}.{os.getpid()}.tmp")
    aside.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def text_file(path):
    """A text file to write to, UTF-8, that gets its name `path` when it is whole."""
    with written_aside(path) as aside:
        # Names of files need not be UTF-8.
        with open(aside, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            yield file


@contextlib.contextmanager
def csv_file(path):
    """A csv.writer whose file gets its name `path` when it is whole."""
    with text_file(path) as file:
        yield csv.writer(file, lineterminator="\n")
