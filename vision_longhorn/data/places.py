"""Finds the shards of a split, or the images of a folder, from the path, pattern or URL that a user gives.

A shard is a tar file (plain or packed) whose samples are runs of members with one name: `KEY.jpg`, `KEY.cls` (the class
index in ASCII) and perhaps `KEY.json`. The image files of a folder are read in runs, each of which serves as a shard.
"""

import contextlib
import dataclasses
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import braceexpand

from .folders import ImageFiles, alike, find_splits, known_split, list_images, read_names
from .images import DataError
from .index import read_index
from .samples import RawSample, nbytes
from .tars import read_shard
from .walk import FOLDER, HIDDEN, list_others, scan, shard_stem, walk


@dataclasses.dataclass(frozen=True)
class ShardSet:
    """The shards of one split.

    Attributes:
        urls: paths or http(s) URLs of the shards, or `pipe:COMMAND`; for an image folder, its path per run of files.
        num_samples: samples in all shards together.
        num_classes: number of classes, None if unknown.
        class_names: name of each class by its index, None if unknown.
        split: name of the split.
        samples_per_shard: samples in each of `urls`, None if unknown.
        pipes: whether `urls` are commands to run for their output. Nothing in a shard or an index can set it.
        display_names: what people call each class, by its index, None if unknown.
        files: the `ImageFiles` of an image folder, None for shards.
        left_out: a line about what lies in an image folder but is not read, or "".
        kept: the samples of each of `urls` in memory (see `keep_in_memory`), None for what is read in each pass.
    """

    urls: list[str]
    num_samples: int
    num_classes: int | None = None
    class_names: list[str] | None = None
    split: str = ""
    samples_per_shard: list[int] | None = None
    pipes: bool = False
    display_names: list[str] | None = None
    files: ImageFiles | None = None
    left_out: str = ""
    kept: list[list[RawSample] | None] | None = dataclasses.field(default=None, repr=False)

    def read(self, number: int) -> Iterator[RawSample]:
        """Iterate over the samples of shard `number`. Raises DataError if it cannot be read to its end."""
        kept = self.kept[number] if self.kept is not None else None
        if kept is not None:
            return iter(kept)
        return self.files.samples(number) if self.files else read_shard(self.urls[number], self.pipes)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the images in memory."""
        return sum(nbytes(sample) for samples in self.kept or () for sample in samples or ())


def open_shards(
    spec: str | os.PathLike[str],
    split: str = "train",
    num_samples: int | None = None,
    num_classes: int | None = None,
    allow_pipe: bool = False,
    *,
    train: ShardSet | None = None,
    class_names: list[str] | None = None,
) -> ShardSet:
    """Find the shards of a split, or the images of a folder, and learn how many samples and classes they hold.

    Args:
        spec: a directory of shards, or of images (`spec/SPLIT/CLASS/IMAGE`, or `spec/CLASS/IMAGE` for any split); a
            path, glob or brace pattern (`train-{000000..000015}.tar`), local or http(s); or with `allow_pipe` a shell
            command that prints a shard, `pipe:COMMAND`, with brace patterns as well.
        split: which split of a directory, in any of `folders.SPELLINGS`.
        num_samples: number of samples, if no index gives it.
        num_classes: number of classes, if neither index nor folder gives it (or to use a model with more).
        allow_pipe: run the command of a `pipe:` in `spec`.
        train: the ShardSet to train on, if this one is for evaluation; both have the same classes.
        class_names: the classes by index; default those of `train`, or the folders of an image folder by name.

    Raises:
        DataError: if shards are missing, the number of samples is unknown, the classes do not match, or the URL is of a
            kind that could run commands.
    """
    spec = os.fspath(spec)
    class_names = class_names or (train.class_names if train else None)
    if num_classes is not None and num_classes < 1:
        raise DataError(f"num_classes={num_classes}; it must be at least 1")
    if allow_pipe and spec[:5].lower() == "pipe:":
        if not spec[5:].strip():
            raise DataError(f"{spec!r} names no command; write 'pipe:cat train-{{000000..000015}}.tar'")
        # Backslashes, and braces without a pattern in them, are left to the shell.
        found = ShardSet(_expand_braces(spec, escape=False), 0, split=split, pipes=True)
    elif "://" not in spec and os.path.isdir(spec):
        found = _in_directory(spec, split, train, class_names)
    else:
        found = _at_paths(_expand(spec), split)
    missing = [url for url in found.urls if not (found.pipes or "://" in url or os.path.exists(url))]
    if missing == [spec]:
        raise DataError(f"there is no file or folder {spec!r}; check the path")
    if missing:
        raise DataError(
            f"shard {missing[0]} is missing ({len(missing)} of {len(found.urls)} in {spec!r}); check the path"
        )
    _check_classes(spec, found, num_classes, class_names)
    return dataclasses.replace(
        found,
        num_samples=_count_samples(spec, found, num_samples),
        # The number of the training data comes first: a model knows no more classes than it was trained on.
        num_classes=num_classes or (train.num_classes if train else None) or found.num_classes,
    )


def _in_directory(spec: str, split: str, train: ShardSet | None, class_names: list[str] | None) -> ShardSet:
    if index := read_index(spec):
        splits = {
            name: [os.path.join(spec, file) for file in entry["filenames"]] for name, entry in index["splits"].items()
        }
        return _at_paths(splits[_pick(split, splits, spec)], split, spec)
    splits = find_shards(spec)
    # A tar beside class folders may be no shard but, say, an archive of the images.
    if not alike(split, splits) and (not splits or alike(split, find_splits(spec, split)[0])):
        return _in_image_folder(spec, split, train, class_names)
    return _at_paths(splits[_pick(split, splits, spec)], split)


def _at_paths(urls: list[str], split: str, folder: str = "") -> ShardSet:
    """Describe the shards at `urls` by the index in `folder`, or else by the indexes in their own folders."""
    if "://" in urls[0]:
        return ShardSet(urls, 0, split=split)
    folders = [folder] if folder else list(dict.fromkeys(map(os.path.dirname, urls)))
    indexes = [read_index(folder or ".") or {"splits": {}} for folder in folders]
    counts: dict[str, int] = {}
    for folder, index in zip(folders, indexes, strict=True):
        for entry in index["splits"].values():
            paths = [os.path.join(folder, name) for name in entry["filenames"]]
            counts.update(zip(paths, entry["shard_lengths"], strict=True))
    about: dict[str, Any] = {name: indexes[0].get(name) for name in ("num_classes", "class_names", "display_names")}
    known = [counts[url] for url in urls] if all(url in counts for url in urls) else None
    return ShardSet(urls, 0, split=split, samples_per_shard=known, **about)


def _in_image_folder(spec: str, split: str, train: ShardSet | None, class_names: list[str] | None) -> ShardSet:
    """Find the images of `spec/SPLIT`, or of `spec` if it holds classes."""
    folder, (splits, others) = spec, find_splits(spec, split, class_names)
    if splits:
        split = _pick(split, splits, spec, others)
        folder = splits[split]
        trained_on = alike("train", splits)[:1]
        if class_names is None and trained_on and trained_on != [split]:
            class_names = walk(splits[trained_on[0]], deep=False).folders
    elif train and train.files and os.path.samefile(train.files.folder, spec):
        raise DataError(
            f"{spec} has no splits, only classes ({', '.join((train.class_names or [])[:2])}, ...), and all of it is "
            "trained on; give val_data, or a folder that has train and val in it"
        )
    listed, names, passed_over = list_images(folder, class_names)
    if len(names) == 1 and class_names is None:
        raise DataError(f"{folder} has only one class, {names[0]!r}; give the folder whose folders are the classes")
    if train is not None and class_names is None and train.num_classes not in (None, len(names)):
        raise DataError(
            f"{folder} has {len(names)} classes, but the training data have {train.num_classes}, whose names "
            "are unknown; give the training data an index with class names"
        )
    files = ImageFiles(folder, listed)
    left_out = [f"beside {folder}: {', '.join(others)}"] if others else []
    left_out += [f"in {folder}: {list_others(passed_over)}"] if passed_over else []
    return ShardSet(
        [folder] * len(files.lengths),
        0,
        len(names),
        names,
        split,
        files.lengths,
        display_names=read_names(spec, names),
        files=files,
        left_out="; ".join(left_out),
    )


def _count_samples(spec: str, found: ShardSet, num_samples: int | None) -> int:
    """Return the number of samples, from an index, a folder or the user. Raises DataError if it is unknown or wrong."""
    if found.samples_per_shard is not None:
        count = sum(found.samples_per_shard)
        if num_samples not in (None, count):
            what = f"{found.files.folder} holds" if found.files else f"the index of {spec!r} says"
            raise DataError(f"num_samples={num_samples}, but {what} {count}; drop it, or give {count}")
        num_samples = count
    if num_samples is None:
        raise DataError(
            f"the number of samples in {spec!r} ({found.split}) is unknown; give num_samples, or write the index of a "
            "local folder with `vision-longhorn shards index FOLDER`"
        )
    if num_samples < 1:
        raise DataError(f"num_samples={num_samples} for {spec!r}; it must be at least 1")
    return num_samples


def _check_classes(spec: str, found: ShardSet, num_classes: int | None, wanted: list[str] | None) -> None:
    """Raise DataError if a class has another index than in `wanted`, or there are more classes than `num_classes`.
    Names that are not in `wanted` may be other words for the same classes."""
    for number, name in enumerate(found.class_names or ()):
        if wanted and name in wanted and wanted[number : number + 1] != [name]:
            raise DataError(
                f"class {name!r} has index {number} in {spec!r}, but {wanted.index(name)} in the training "
                "data; make the shards of both in one folder, so that their classes agree"
            )
    if (most := found.num_classes) and num_classes and num_classes < most:
        raise DataError(f"num_classes={num_classes}, but {spec} has {most} classes; drop it, or give {most} or more")


def _pick(split: str, splits: Iterable[str], spec: str, others: Sequence[str] = ()) -> str:
    """Pick the name in `splits` that means `split`. Raises DataError if there is none, or more than one."""
    found = alike(split, splits)
    if len(found) == 1:
        return found[0]
    if found:
        raise DataError(f"{spec!r} has {', '.join(found)}, each of which may be {split!r}; name one of these")
    option = f" (as {split}_split in training)" if split in ("train", "val") else ""
    raise DataError(
        f"{spec!r} has no split {split!r}; it has {', '.join([*sorted(splits), *others]) or 'no shards'}; "
        f"name one of these{option}, or other data for {split!r}"
    )


def _expand(spec: str) -> list[str]:
    """Expand a pattern into the local paths and http(s) URLs that it stands for, in order."""
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+):", spec)  # two letters at least: C: is a drive
    if scheme and scheme[1].lower() not in ("http", "https") and not os.path.exists(spec):
        raise DataError(
            f"{spec!r}: {scheme[1]}: is refused, as it may run commands; give a path or an http(s) URL, or for a "
            "pipe: give --allow-pipe (in Python allow_pipe=True), also to resume or evaluate a checkpoint"
        )
    found = []
    for url in _expand_braces(spec):
        is_pattern = "://" not in url and glob.has_magic(url) and not os.path.exists(url)
        found += sorted(glob.glob(url)) if is_pattern else [url]
    if not found:
        raise DataError(f"no file matches {spec!r}; check the pattern")
    return found


def _expand_braces(spec: str, **options: bool) -> list[str]:
    try:
        return list(braceexpand.braceexpand(spec, **options))
    except braceexpand.UnbalancedBracesError:  # type: ignore[attr-defined]  # its stub lacks it
        raise DataError(f"{spec!r} has unbalanced braces; write train-{{000000..000015}}.tar") from None


def find_shards(directory: str | os.PathLike[str]) -> dict[str, list[str]]:
    """Find the shards of a directory by split, which their file names tell, else their folder's name; else it is train.

    `train-000000.tar`, `imagenet1k-validation-00.tar` and `val_3.tar.gz` belong to train, validation and val,
    `test/0.tar` to test, also if `directory` is the folder test. A split's folder is searched only if it holds no
    folders (which would be classes) and `directory` itself holds no shard of that split. Returns sorted paths by split.
    Raises DataError if there is no such directory.
    """
    if not os.path.isdir(directory):
        raise DataError(f"{directory} is not a folder; check the path")
    splits: dict[str, list[str]] = {}
    inside = scan(directory)
    own = os.path.basename(os.path.abspath(directory))
    for entry, kind in inside:
        if kind in (HIDDEN, FOLDER) or not (stem := shard_stem(entry.name)):
            continue
        words = [word for word in re.split(r"[-_.]", stem) if not word.isdigit()]
        known = [word.lower() for word in words if known_split(word)]
        split = (known or words or [own if known_split(own) else "train"])[-1]
        splits.setdefault(split, []).append(entry.path)
    for entry, kind in inside:
        if kind == FOLDER and known_split(entry.name) and not alike(entry.name, splits):
            with contextlib.suppress(DataError):  # an unreadable folder is an error only when it is asked for
                members = [(member, what) for member, what in scan(entry.path) if what != HIDDEN]
                shards = [member.path for member, _ in members if shard_stem(member.name)]
                if shards and all(what != FOLDER for _, what in members):
                    splits[entry.name] = shards
    return splits
