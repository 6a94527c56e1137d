"""Folders of images, one folder per class: which splits and classes they have, and their files as samples."""

import dataclasses
import os
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
from torchvision.datasets.folder import find_classes, make_dataset

from .images import EXTENSIONS, DataError
from .samples import RawSample

SPLITS = ("train", "val", "validation", "test")
NAMES_FILE = "names.txt"
_RUN = 16  # files that keep together when a new order is drawn; a worker's buffer mixes many times as many


def find_splits(root: str | os.PathLike[str], names: Collection[str] = SPLITS) -> dict[str, str]:
    """The splits of a folder ROOT/SPLIT/CLASS/IMAGE.

    Args:
        root: the folder.
        names: what splits may be called.

    Returns:
        split name -> path, empty where the folders in `root` are classes themselves

    Raises:
        DataError: if there is no such folder, or some in it look like splits and others like classes.
    """
    if not os.path.isdir(root):
        raise DataError(f"{root} is not a folder; check the path")
    with os.scandir(root) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    splits = {
        name: os.path.join(root, name) for name in folders if name in names and _has(root, name, os.DirEntry.is_dir)
    }
    others = [name for name in folders if name not in names and _has(root, name, _is_image)] if splits else []
    if others:
        raise DataError(
            f"{root} has both splits ({', '.join(splits)}) and classes ({', '.join(others[:3])}) in it; "
            f"name one folder of classes, like {os.path.join(root, next(iter(splits)))}, or part them"
        )
    return splits


def _has(root: str | os.PathLike[str], name: str, kind: Callable[[os.DirEntry[str]], bool]) -> bool:
    with os.scandir(os.path.join(root, name)) as entries:
        return any(kind(entry) for entry in entries if not entry.name.startswith("."))


def _is_image(entry: os.DirEntry[str]) -> bool:
    return extension(entry.name) in EXTENSIONS


def extension(name: str) -> str:
    """Extension of a file name in lower case, without its dot."""
    return os.path.splitext(name)[1][1:].lower()


def class_folders(folder: str) -> list[str]:
    """Names of the class folders in `folder`, sorted; hidden ones are none."""
    try:
        return [name for name in find_classes(folder)[0] if not name.startswith(".")]
    except FileNotFoundError:  # torchvision's, where there are no folders
        return []


def list_images(
    folder: str | os.PathLike[str], class_names: Sequence[str] | None = None
) -> tuple[list[tuple[str, int]], list[str], list[str]]:
    """List a folder of one folder per class, as torchvision's ImageFolder does: classes are sorted by name.

    Args:
        folder: where the class folders lie.
        class_names: the classes by index, where another split has fixed them already; some may be without images.

    Returns:
        (file name relative to `folder`, class index) of each, none where there are no images at all; class_names;
        and names of the files left out: hidden ones and those that are not images by name

    Raises:
        DataError: if there is no such folder, a class without images, or one that is not in `class_names`.
    """
    folder = os.fspath(folder)
    if not os.path.isdir(folder):
        raise DataError(f"{folder} is not a folder; check the path")
    found = class_folders(folder)
    if not found:
        return [], [], []
    known = list(class_names or found)
    labels = {name: label for label, name in enumerate(known)}
    for name in found:
        if name not in labels:
            raise DataError(
                f"class {name!r} of {folder} is not among the {len(known)} classes of the other splits; "
                "the first of them, as a rule train, has to have every class"
            )
    others: list[str] = []
    start = len(os.path.join(folder, ""))

    def relative(path: str) -> str:
        return path[start:].replace(os.sep, "/")

    def is_image(path: str) -> bool:
        if extension(path) in EXTENSIONS and not os.path.basename(path).startswith("."):
            return True
        others.append(relative(path))
        return False

    listed = make_dataset(folder, {name: labels[name] for name in found}, is_valid_file=is_image, allow_empty=True)
    empty = set(range(len(known))) - {label for _, label in listed}
    if listed and empty and class_names is None:
        raise DataError(
            f"class {known[min(empty)]!r} of {folder} has no images ({', '.join(EXTENSIONS)}); remove it or fill it"
        )
    return [(relative(path), label) for path, label in listed], known, others


@dataclasses.dataclass(frozen=True, eq=False)
class ImageFiles:
    """Labelled image files, in runs that serve as shards. Nothing is read before `samples.image_of` wants it.

    Arrays, and no lists: each worker has its own copy of lists as soon as it goes through them.

    Attributes:
        folder: where they lie.
        names: bytes array (N,), their names relative to `folder`.
        labels: int32 array (N,), their class indices.
    """

    folder: str
    names: np.ndarray
    labels: np.ndarray

    @classmethod
    def mixed(cls, folder: str, listed: list[tuple[str, int]]) -> "ImageFiles":
        """Those of `list_images`, in an order that mixes the classes and is always the same."""
        listed = random.Random(0).sample(listed, len(listed))
        names, labels = zip(*listed, strict=True)
        return cls(folder, np.array([os.fsencode(name) for name in names]), np.array(labels, np.int32))

    @property
    def lengths(self) -> list[int]:
        """Number of files in each run."""
        return [len(self.names[start : start + _RUN]) for start in range(0, len(self.names), _RUN)]

    def samples(self, run: int) -> Iterator[RawSample]:
        """Yields the samples of one run, as `tars.read_shard` does, but with the Path of the image for its bytes."""
        for number in range(run * _RUN, min((run + 1) * _RUN, len(self.names))):
            name = os.fsdecode(self.names[number])
            yield {
                "__key__": name,
                "__url__": self.folder,
                extension(name): Path(self.folder, name),
                "cls": b"%d" % self.labels[number],
            }


def read_names(path: str | os.PathLike[str], class_names: Sequence[str] | None = None) -> list[str]:
    """Read what people call the classes.

    Args:
        path: text file (UTF-8). Each line is a class, a tab and its readable name; or all are readable names, in the
            order of the classes.
        class_names: the classes by index, None if only their number is known.

    Returns:
        readable names by class index

    Raises:
        DataError: if it cannot be read, or does not name every class.
    """
    lines = read_lines(path)
    pairs = [[part.strip() for part in line.split("\t", 1)] for line in lines if "\t" in line]
    if not pairs:
        if not lines or class_names is not None and len(lines) != len(class_names):
            wanted = "" if class_names is None else f" for {len(class_names)} classes"
            raise DataError(
                f"{path} has {len(lines)} names{wanted}; give one a line for every class, or lines of a "
                "class, a tab and its name"
            )
        return lines
    if len(pairs) < len(lines):
        without = next(line for line in lines if "\t" not in line)
        raise DataError(f"{path}: {without!r} has no tab, but other lines have; write a class, a tab and its name")
    if class_names is None:
        raise DataError(
            f"{path} names classes, but which class has which index is unknown; give their order "
            "by --classes, or names alone, one a line in this order"
        )
    names = dict(pairs)
    missing = [name for name in class_names if name not in names]
    if missing:
        raise DataError(
            f"{path} lacks a name for {len(missing)} of {len(class_names)} classes; the first of these is "
            f"{missing[0]!r}"
        )
    return [names[name] for name in class_names]


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Lines of a text file (UTF-8) without the space around them, and without empty ones. Raises DataError."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return [line.strip() for line in file if line.strip()]
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not a text file in UTF-8") from None
