"""How all tools go through folders, and what they skip: hidden files, folders seen before, pipes and devices."""

import os
import re
from collections import deque
from pathlib import Path
from typing import NamedTuple

from .images import EXTENSIONS, DataError

# A leading dot, and what macOS, Windows, Linux, Synology and tar put beside people's files
_HIDDEN = re.compile(
    r"(?:^|/)(?:\.(?!\.?(?:/|$))|(?:__MACOSX|Thumbs\.db|desktop\.ini|\$RECYCLE\.BIN|System Volume Information|"
    r"lost\+found|@eaDir|PaxHeaders?(?:\.\d+)?)(?:/|$))",
    re.IGNORECASE,
)
FOLDER, FILE, HIDDEN, NO_FILE = "a folder", "a file", "hidden", "a pipe, a socket or a device"
NO_IMAGE, AGAIN = f"none of {', '.join(EXTENSIONS)}", "a folder that is read elsewhere"
_SHARD = re.compile(r"\.tar(\.(gz|bz2|xz))?$|\.t(gz|bz2?|xz)$")


def is_hidden(name: str) -> bool:
    """Tell whether a part of a path is hidden, or was put there by an operating system."""
    return _HIDDEN.search(name) is not None


def extension(name: str) -> str:
    """Return the extension of a file name in lower case, without its dot."""
    return os.path.splitext(name)[1][1:].lower()


def is_image(name: str) -> bool:
    """Tell by its name whether a file is an image."""
    return extension(name) in EXTENSIONS


def shard_stem(name: str) -> str:
    """Return the name of a shard without its ending; "" if the file is not named like a shard."""
    return _SHARD.sub("", name) if _SHARD.search(name) else ""


def no_file(path: str | os.PathLike[str]) -> bool:
    """Tell whether what is at a path could block its reader, as a pipe does."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def scan(folder: str | os.PathLike[str]) -> list[tuple[os.DirEntry[str], str]]:
    """List a folder sorted by name, each entry with its kind: FOLDER or FILE (or a link to one), HIDDEN, or NO_FILE. A
    link that leads nowhere is a FILE, which cannot be read. Raises DataError if the folder cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return [(entry, _kind(entry)) for entry in sorted(entries, key=lambda entry: entry.name)]
    except OSError as error:
        raise DataError(
            f"folder {folder} cannot be read ({error.strerror}); check the path and its permissions"
        ) from None


def _kind(entry: os.DirEntry[str]) -> str:
    if is_hidden(entry.name):
        return HIDDEN
    try:
        return FOLDER if entry.is_dir() else NO_FILE if not entry.is_file() and no_file(entry.path) else FILE
    except OSError:  # a link to itself, say
        return FILE


class Walk(NamedTuple):
    """What `walk` has found. Names are relative to its folder, with / between their parts."""

    folders: list[str]  # those directly in it
    images: list[str]  # sorted by their folder in `folders`, then by the whole folder, as in torchvision's ImageFolder
    others: list[tuple[str, str]]  # (name, why) of what was left out and is not hidden, NO_IMAGE last; folders end in /


def walk(root: str | os.PathLike[str], deep: bool = True) -> Walk:
    """Go through a folder and all folders in it. Links are followed, but no folder is read twice. If two paths lead to
    a folder, one directly in `root` is preferred to a deeper one, and then the folder itself to a link to it. Without
    `deep` only what is directly in `root` is listed. Raises DataError if a folder cannot be read."""
    seen = {_identity(place) for place in (root, *Path(root).resolve().parents)}
    parts: list[tuple[str, list[str]]] = []
    others: list[tuple[str, str]] = []
    todo: deque[tuple[str, str]] = deque()
    links: deque[tuple[str, str]] = deque()

    def enter(prefix: str, folder: str | os.PathLike[str]) -> None:
        """Sort out the entries of `folder`, whose names begin with `prefix`."""
        images: list[str] = []
        parts.append((prefix, images))
        for entry, kind in scan(folder):
            name = prefix + entry.name
            if kind == FOLDER and entry.is_symlink():
                links.append((f"{name}/", entry.path))
            elif kind == FOLDER:
                claim(f"{name}/", entry.path)
            elif kind == FILE and is_image(name):
                images.append(name)
            elif kind != HIDDEN:
                others.append((name, NO_IMAGE if kind == FILE else kind))

    def claim(prefix: str, folder: str) -> None:
        """Queue a folder to be read under this name, unless it is read under another."""
        if _identity(folder) in seen:
            others.append((prefix, AGAIN))
        else:
            seen.add(_identity(folder))
            todo.append((prefix, folder))

    enter("", root)
    while links:
        claim(*links.popleft())
    folders = sorted(prefix[:-1] for prefix, _ in todo)
    while deep and (todo or links):
        if todo:
            enter(*todo.popleft())
        else:
            claim(*links.popleft())
    parts.sort(key=lambda part: (part[0].partition("/")[0], part[0][:-1]))
    others.sort(key=lambda other: (other[1] == NO_IMAGE, other[0]))
    return Walk(folders, [name for _, images in parts for name in images], others)


def _identity(path: str | os.PathLike[str]) -> tuple[int, int]:
    about = os.stat(path)
    return about.st_dev, about.st_ino


def list_others(others: list[tuple[str, str]]) -> str:
    """List what a Walk left out, for a message: "2 (cats/: a folder that is read elsewhere, a.gif: none of jpg)"."""
    named = [f"{name}: {why}" for name, why in others[:5]]
    return f"{len(others)} ({', '.join(named)}{', ...' if len(others) > 5 else ''})"
