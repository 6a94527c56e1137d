"""How all tools go through folders, and what they pass over: hidden things, folders seen before, what is no file."""

import dataclasses
import os
import re
import stat
from collections import deque
from pathlib import Path

from .images import EXTENSIONS, DataError

# A leading dot, and what macOS, Windows, Linux, Synology and tar put beside people's files
_HIDDEN = re.compile(
    r"(?:^|/)(?:\.(?!\.?(?:/|$))|(?:__MACOSX|Thumbs\.db|desktop\.ini|\$RECYCLE\.BIN|System Volume Information|"
    r"lost\+found|@eaDir|PaxHeaders?(?:\.\d+)?)(?:/|$))",
    re.IGNORECASE,
)
FOLDER, FILE, HIDDEN, BROKEN = "a folder", "a file", "hidden", "a link that leads nowhere"
NO_IMAGE = "no image by its name"
_SHARD = re.compile(r"\.tar(\.(gz|bz2|xz))?$|\.t(gz|bz2?|xz)$")
_ABOVE, _AGAIN = "a link to a folder above it", "a folder that is read elsewhere"


def is_hidden(name: str) -> bool:
    """Whether a part of a path is hidden, or belongs to a system and not to a person."""
    return _HIDDEN.search(name) is not None


def extension(name: str) -> str:
    """Extension of a file name in lower case, without its dot."""
    return os.path.splitext(name)[1][1:].lower()


def is_image(name: str) -> bool:
    """Whether a file is an image by its name."""
    return extension(name) in EXTENSIONS


def shard_stem(name: str) -> str:
    """Name of a shard without its ending; "" if a file is no shard by its name."""
    return _SHARD.sub("", name) if _SHARD.search(name) else ""


def no_file(path: str | os.PathLike[str]) -> str:
    """The kind of thing at a path that could block its reader, such as "a pipe"; "" for files and folders. Raises
    OSError if it cannot be looked at."""
    mode = os.stat(path).st_mode
    kinds = {stat.S_IFREG: "", stat.S_IFDIR: "", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def scan(folder: str | os.PathLike[str]) -> list[tuple[os.DirEntry[str], str]]:
    """List a folder by name, each entry with its kind: FOLDER or FILE (or a link to one), HIDDEN, BROKEN, or the answer
    of `no_file`. Raises DataError if the folder cannot be read."""
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
        return FOLDER if entry.is_dir() else FILE if entry.is_file() else no_file(entry.path)
    except OSError:
        return BROKEN


@dataclasses.dataclass
class Walk:
    """What `walk` has found. Names are relative to its folder, with / between their parts."""

    folders: list[str]  # right in it
    # Sorted by their folder in `folders`, then by the whole folder, as torchvision's ImageFolder has them. Links that
    # lead nowhere are among them: reading them is an error.
    images: list[str]
    others: list[tuple[str, str]]  # (name, why) of what was left out, HIDDEN or NO_IMAGE files last; folders end in /


def walk(root: str | os.PathLike[str], deep: bool = True) -> Walk:
    """Go through a folder and all folders in it. Links are followed, but no folder is read twice. Of two ways to a
    folder, one right in `root` comes before a deeper one, and then a folder itself before a link to it. Without `deep`
    only the folders right in `root` are named. Raises DataError if a folder cannot be read."""
    found = Walk([], [], [])
    seen = {_identity(root)}
    parts: list[tuple[str, list[str]]] = []
    todo: deque[tuple[str, str]] = deque()
    links: deque[tuple[str, str]] = deque()

    def enter(prefix: str, folder: str | os.PathLike[str]) -> None:
        """Sort in what is right in `folder`, whose names begin with `prefix`."""
        images: list[str] = []
        parts.append((prefix, images))
        for entry, kind in scan(folder):
            name = prefix + entry.name
            if kind == FOLDER:
                (links if entry.is_symlink() else todo).append((f"{name}/", entry.path))
            elif kind in (FILE, BROKEN) and is_image(name):
                images.append(name)
            else:
                is_folder = kind == HIDDEN and entry.is_dir(follow_symlinks=False)
                found.others.append((f"{name}/" if is_folder else name, NO_IMAGE if kind == FILE else kind))

    def claim(prefix: str, folder: str) -> bool:
        """Whether a folder is to be read by this name."""
        why = _ABOVE if _is_above(folder, root) else _AGAIN if _identity(folder) in seen else ""
        if why:
            found.others.append((prefix, why))
        seen.add(_identity(folder))
        return not why

    enter("", root)
    top = [place for place in (*todo, *links) if claim(*place)]
    found.folders = sorted(prefix[:-1] for prefix, _ in top)
    todo, links = deque(top if deep else ()), deque()
    claimed = {prefix for prefix, _ in top}
    while todo or links:
        place = (todo or links).popleft()
        if place[0] in claimed or claim(*place):
            enter(*place)

    parts.sort(key=lambda part: (part[0].partition("/")[0], part[0][:-1]))
    found.images = [name for _, images in parts for name in images]
    found.others.sort(key=lambda other: (not is_notable(*other), other[0]))
    return found


def is_notable(name: str, why: str) -> bool:
    """Whether one of `Walk.others` is a folder, or looks like a file and is none."""
    return name.endswith("/") or why not in (HIDDEN, NO_IMAGE)


def _identity(path: str | os.PathLike[str]) -> tuple[int, int]:
    about = os.stat(path)
    return about.st_dev, about.st_ino


def _is_above(path: str, root: str | os.PathLike[str]) -> bool:
    """Whether a link leads to a folder that it lies in, or that `root` lies in."""
    if not os.path.islink(path):
        return False
    target = os.path.realpath(path)
    return any(Path(os.path.realpath(place)).is_relative_to(target) for place in (os.path.dirname(path), root))


def list_others(others: list[tuple[str, str]]) -> str:
    """List what a Walk left out, for a message: "2 (cat/z.jpg: a pipe, cat/a.gif: no image by its name)"."""
    named = [f"{name}: {why}" for name, why in others[:5]]
    return f"{len(others)} ({', '.join(named)}{', ...' if len(others) > 5 else ''})"
