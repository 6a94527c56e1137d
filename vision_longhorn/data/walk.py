"""How all tools go through folders, and what they pass over: hidden things, folders seen before, what is no file."""

import dataclasses
import os
import re
import stat
from collections import deque
from pathlib import Path

from .images import EXTENSIONS, DataError

# What has a dot in front, and what macOS, Windows, Linux, Synology and tar put beside the files of people
_HIDDEN = re.compile(
    r"(?:^|/)(?:\.(?!\.?(?:/|$))|(?:__MACOSX|Thumbs\.db|desktop\.ini|\$RECYCLE\.BIN|System Volume Information|"
    r"lost\+found|@eaDir|PaxHeaders?(?:\.\d+)?)(?:/|$))",
    re.IGNORECASE,
)
FOLDER, FILE, HIDDEN, BROKEN = "a folder", "a file", "hidden", "a link that leads nowhere"
NO_IMAGE = "no image by its name"
_ABOVE, _AGAIN = "a link to a folder above it", "a folder that is read elsewhere"


def is_hidden(name: str) -> bool:
    """Whether a part of a path is hidden, or what a system puts beside the files of people."""
    return _HIDDEN.search(name) is not None


def extension(name: str) -> str:
    """Extension of a file name in lower case, without its dot."""
    return os.path.splitext(name)[1][1:].lower()


def is_image(name: str) -> bool:
    """Whether a file is an image by its name."""
    return extension(name) in EXTENSIONS


def no_file(path: str | os.PathLike[str]) -> str:
    """What is at a path that is neither a file nor a folder, and could block whoever reads it; "" where nothing is.

    Raises:
        OSError: where it cannot be looked at.
    """
    mode = os.stat(path).st_mode
    kinds = {stat.S_IFREG: "", stat.S_IFDIR: "", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def scan(folder: str | os.PathLike[str]) -> list[tuple[os.DirEntry[str], str]]:
    """What is in a folder, by name, and the kind of each: FOLDER and FILE (or links to these), HIDDEN, BROKEN, or what
    `no_file` says. Raises DataError where it cannot be read."""
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
    """What `walk` has found. Names are relative to its folder, with / between their parts.

    Attributes:
        folders: names of the folders right in it.
        images: names of the images by name, sorted by their folder in `folders`, then by the whole folder, as
            torchvision's ImageFolder has them. Links that lead nowhere are among these: reading them is an error.
        others: (name, why) of what was left out, HIDDEN or NO_IMAGE files last. The names of folders end in /.
    """

    folders: list[str]
    images: list[str]
    others: list[tuple[str, str]]


def walk(root: str | os.PathLike[str]) -> Walk:
    """Go through a folder and all folders in it. Links are followed, but no folder is read twice: what lies in it
    itself comes before what is linked to, and a folder right in it before one deeper.

    Raises:
        DataError: if there is a folder that cannot be read.
    """
    top, found = _top(root)
    seen = {_identity(root), *(_identity(path) for path, _ in top.values())}
    through_links = {_identity(path) for path, is_link in top.values() if is_link}
    parts = [("", found.images)]
    todo = [(f"{name}/", path, is_link) for name, (path, is_link) in top.items()]
    links: deque[tuple[str, str]] = deque()
    while todo or links:
        if todo:
            prefix, folder, linked = todo.pop()
        else:
            (prefix, folder), linked = links.popleft(), True
            if why := _ABOVE if _is_above(folder, root) else _AGAIN if _identity(folder) in seen else "":
                found.others.append((prefix, why))
                continue
            seen.add(_identity(folder))
            through_links.add(_identity(folder))
        found.images = []
        parts.append((prefix, found.images))
        for entry, kind in scan(folder):
            name = prefix + entry.name
            if kind != FOLDER:
                _sort_in(found, name, entry, kind)
            elif entry.is_symlink():
                links.append((f"{name}/", entry.path))
            elif (identity := _identity(entry.path)) in (seen if linked else through_links):
                found.others.append((f"{name}/", _AGAIN))
            else:
                seen.add(identity)
                if linked:
                    through_links.add(identity)
                todo.append((f"{name}/", entry.path, linked))
    parts.sort(key=lambda part: (part[0].partition("/")[0], part[0][:-1]))
    found.images = [name for _, names in parts for name in names]
    found.others.sort(key=lambda other: (not is_notable(*other), other[0]))
    return found


def subfolders(root: str | os.PathLike[str]) -> list[str]:
    """`walk(root).folders` without going into them."""
    return _top(root)[1].folders


def _top(root: str | os.PathLike[str]) -> tuple[dict[str, tuple[str, bool]], Walk]:
    """(path, whether it is a link) of each folder right in `root`, by name; and a Walk of what else is right in it."""
    top: dict[str, tuple[str, bool]] = {}
    found = Walk([], [], [])
    links = []
    for entry, kind in scan(root):
        if kind != FOLDER:
            _sort_in(found, entry.name, entry, kind)
        elif entry.is_symlink():
            links.append(entry)
        else:
            top[entry.name] = entry.path, False
    if links:
        seen = {_identity(path) for path, _ in top.values()}
        for entry in links:
            if why := _ABOVE if _is_above(entry.path, root) else _AGAIN if _identity(entry.path) in seen else "":
                found.others.append((f"{entry.name}/", why))
            else:
                top[entry.name] = entry.path, True
                seen.add(_identity(entry.path))
    found.folders = sorted(top)
    return top, found


def _sort_in(found: Walk, name: str, entry: os.DirEntry[str], kind: str) -> None:
    if kind in (FILE, BROKEN) and is_image(name):
        found.images.append(name)
    else:
        is_folder = kind == HIDDEN and entry.is_dir(follow_symlinks=False)
        found.others.append((f"{name}/" if is_folder else name, NO_IMAGE if kind == FILE else kind))


def is_notable(name: str, why: str) -> bool:
    """Whether one of `Walk.others` is a folder, or what might be taken for a file."""
    return name.endswith("/") or why not in (HIDDEN, NO_IMAGE)


def _identity(path: str | os.PathLike[str]) -> tuple[int, int]:
    about = os.stat(path)
    return about.st_dev, about.st_ino


def _is_above(link: str, root: str | os.PathLike[str]) -> bool:
    """Whether a link leads to a folder that it lies in, or that `root` lies in."""
    target = os.path.realpath(link)
    return any(Path(os.path.realpath(place)).is_relative_to(target) for place in (os.path.dirname(link), root))


def list_others(others: list[tuple[str, str]], most: int = 5) -> str:
    """What a Walk left out, for a message: "2 (cat/z.jpg: a pipe, cat/a.gif: no image by its name)"."""
    named = [f"{name}: {why}" for name, why in others[:most]]
    return f"{len(others)} ({', '.join(named)}{', ...' if len(others) > most else ''})"
