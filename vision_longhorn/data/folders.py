"""Folders of images, one folder per class: which splits and classes they have, and their files as samples."""

import contextlib
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from .images import EXTENSIONS, DataError
from .samples import RawSample
from .walk import FILE, FOLDER, NO_IMAGE, extension, is_image, scan, walk

SPELLINGS = {
    "train": ("train", "training", "trn"),
    "val": ("val", "valid", "validation", "dev", "eval", "evaluation"),
    "test": ("test", "testing", "tst"),
}
_KNOWN = {spelling: split for split, spellings in SPELLINGS.items() for spelling in spellings}
_RUN = 16  # files that stay together in every order; a worker's shuffle buffer mixes many runs


def known_split(name: str) -> str:
    """Return the split that a name such as Training or test_set means, in upper or lower case; "" for other names."""
    return _KNOWN.get(re.sub(r"[-_ ]?set$", "", name.lower()), "")


def same_split(one: str, other: str) -> bool:
    """Tell whether two names mean the same split."""
    return (known_split(one) or one.lower()) == (known_split(other) or other.lower())


def alike(split: str, names: Iterable[str]) -> list[str]:
    """Return the `names` that mean `split`, or `split` alone if exactly this name is among them."""
    names = list(names)
    return [split] if split in names else [name for name in names if same_split(name, split)]


def find_splits(
    root: str | os.PathLike[str], split: str = "", class_names: Sequence[str] | None = None
) -> tuple[dict[str, str], list[str]]:
    """Find the splits of a folder ROOT/SPLIT/CLASS/IMAGE: folders spelt as in `SPELLINGS`, or that mean `split`.

    Folders that are named like splits but hold images themselves are classes if other classes lie beside them, or if
    all of them are among `class_names`. Returns the path of each split by the name of its folder (none if the folders
    are classes), and the names of the folders beside the splits. Raises DataError if there is no such folder, or if its
    folders could be splits or classes.
    """
    if not os.path.isdir(root):
        raise DataError(f"{root} is not a folder; check the path")
    folders = {entry.name: entry.path for entry, kind in scan(root) if kind == FOLDER}
    named = [name for name in folders if known_split(name) or split and same_split(name, split)]
    if not named:
        return {}, []
    inside = {name: _kinds(path) for name, path in folders.items()}
    paths = {name: folders[name] for name in named if FOLDER in inside[name]}
    flat = [name for name in named if inside[name] == {FILE}]
    classes = [name for name in folders if name not in named and FILE in inside[name]]
    if paths and classes or flat and not paths and not classes and not set(flat) <= set(class_names or ()):
        raise DataError(
            f"{root} has {', '.join([*paths, *flat, *classes][:5])} in it, which may be splits or classes; a split "
            f"holds a folder for each class ({os.path.join(root, named[0], 'CLASS', 'IMAGE.jpg')}), and beside a class "
            "with the name of a split there must be other classes, and no splits"
        )
    return paths, [name for name in folders if paths and name not in paths]


def _kinds(folder: str) -> set[str]:
    """Tell what a folder holds: FOLDER for folders, FILE for images, or both. One that cannot be read counts as empty,
    and is an error only when it is used."""
    with contextlib.suppress(DataError):
        return {kind for entry, kind in scan(folder) if kind == FOLDER or kind == FILE and is_image(entry.name)}
    return set()


def list_images(
    folder: str | os.PathLike[str], class_names: Sequence[str] | None = None
) -> tuple[list[tuple[str, int]], list[str], list[tuple[str, str]]]:
    """List the images of a folder with one folder per class, sorted by class name as torchvision's ImageFolder does.

    `class_names` are the classes by index, if another split has fixed them; some of these may have no images. Returns
    (file name relative to `folder`, class index) of each image; class_names; and what is left out, as in `Walk.others`.
    Raises DataError if there are no images in class folders, or if the folders do not match the classes.
    """
    if not os.path.isdir(folder):
        raise DataError(f"{folder} is not a folder; check the path")
    found = walk(folder)
    known = list(class_names or found.folders)
    labels = {name: label for label, name in enumerate(known)}
    times = Counter(known)
    if wrong := [name for name in found.folders if times[name] != 1]:
        raise DataError(
            f"class {wrong[0]!r} of {folder} is not among the {len(known)} classes of the other splits, or is "
            "there twice; the first split, usually train, must have every class"
        )
    listed = [(name, labels[name.partition("/")[0]]) for name in found.images if "/" in name]
    if not listed:
        raise DataError(
            f"{folder} holds no shards and no class folders with images ({', '.join(EXTENSIONS)}); give a folder with "
            "train/CLASS/IMAGE.jpg and val/CLASS/IMAGE.jpg, or one of shards"
        )
    empty = set(range(len(known))) - {label for _, label in listed}
    if empty and class_names is None:
        raise DataError(
            f"class {known[min(empty)]!r} of {folder} has no images ({', '.join(EXTENSIONS)}); remove it or add some"
        )
    loose = [(name, "not in a class folder") for name in found.images if "/" not in name]
    # Other files beside the class folders, such as a list of the classes or a README, are not reported.
    return listed, known, loose + [(name, why) for name, why in found.others if why != NO_IMAGE or "/" in name]


class ImageFiles:
    """Labelled image files, in runs that serve as shards. `samples.image_of` reads a file when it is needed."""

    def __init__(self, folder: str, listed: list[tuple[str, int]]) -> None:
        """Take the files of `list_images`, in an order that mixes the classes and is always the same."""
        names, labels = zip(*random.Random(0).sample(listed, len(listed)), strict=True)
        # Arrays, because forked workers share them; of a list each would soon have its own copy
        self.folder, self.names = folder, np.array([os.fsencode(name) for name in names])
        self.labels = np.array(labels, np.int32)

    @property
    def lengths(self) -> list[int]:
        """Number of files in each run."""
        return [len(self.names[start : start + _RUN]) for start in range(0, len(self.names), _RUN)]

    def samples(self, run: int) -> Iterator[RawSample]:
        """Yield the samples of one run as `tars.read_shard` does, but with the image's Path in place of its bytes."""
        for number in range(run * _RUN, min((run + 1) * _RUN, len(self.names))):
            name = os.fsdecode(self.names[number])
            yield {
                "__key__": name,
                "__url__": self.folder,
                extension(name): Path(self.folder, name),
                "cls": b"%d" % self.labels[number],
            }


def read_names(folder: str | os.PathLike[str], class_names: Sequence[str] | None) -> list[str] | None:
    """Read the readable names of the classes, by class index, from names.txt in a folder; None if it is not there.

    Each line is a class, a tab and its readable name; or all are readable names, in the order of the classes.
    `class_names` are the classes by index, None if only their number is known. Raises DataError if the file cannot be
    read, or does not name every class.
    """
    path = os.path.join(folder, "names.txt")
    if not os.path.isfile(path):
        return None
    lines = read_lines(path)
    if class_names and lines and all("\t" in line for line in lines):
        names = {name.strip(): text.strip() for name, text in (line.split("\t", 1) for line in lines)}
        if missing := [name for name in class_names if name not in names]:
            raise DataError(f"{path} lacks a name for class {missing[0]!r}; give each class one")
        return [names[name] for name in class_names]
    wanted = len(class_names or lines)
    if not lines or len(lines) != wanted or any("\t" in line for line in lines):
        raise DataError(
            f"{path} has {len(lines)} lines for {wanted} classes; give the name of each class in their order, or, "
            "if the data name their classes, a class, a tab and its readable name on each line"
        )
    return lines


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Read the lines of a text file (UTF-8), stripped, without empty ones. Raises DataError if it cannot be read."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return [line.strip() for line in file if line.strip()]
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not a text file in UTF-8") from None
