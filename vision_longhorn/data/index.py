"""Finding shards, and the index file that says how much is in them.

A shard is a tar file (plain or packed) whose samples are runs of members with one name: `KEY.jpg`, `KEY.cls` (the class
index in ASCII) and perhaps `KEY.json`. The index, `_info.json`, is the one that timm's `ReaderWds` reads, with
`num_classes`, `class_names` and `display_names` added. An image folder that is read as it is stands for shards as well.
"""

import contextlib
import dataclasses
import glob
import json
import os
import re
import reprlib
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import braceexpand

from vision_longhorn.errors import one_line, reason
from vision_longhorn.files import written_aside

from .folders import (
    NAMES_FILE,
    ImageFiles,
    alike,
    find_splits,
    known_split,
    list_images,
    read_names,
    same_split,
    splits_beside,
)
from .images import DataError
from .samples import RawSample
from .tars import read_shard
from .walk import BROKEN, FOLDER, HIDDEN, list_others, scan, subfolders, walk

if TYPE_CHECKING:
    from .memory import Kept

INDEX_NAMES = ("_info.json", "info.json")
_MOST_SAMPLES, _MOST_CLASSES = 10**12, 10**7
# What a split may say besides, for people and for `make_shards`.
_FACTS: dict[str, tuple[type, str]] = {
    "name": (str, "a text"),
    "source": (str, "a text"),
    "made_with": (dict, "an object"),
    "skipped": (list, "a list of names"),
}
_SHARD = re.compile(r"\.tar(\.(gz|bz2|xz))?$|\.t(gz|bz2?|xz)$")


@dataclasses.dataclass(frozen=True)
class ShardSet:
    """The shards of one split.

    Attributes:
        urls: paths or http(s) URLs of the shards, or `pipe:COMMAND`; for an image folder its path, once for each run of
            files that serves as a shard.
        num_samples: samples in all shards together.
        num_classes: number of classes, None if unknown.
        class_names: name of each class by its index, None if unknown.
        split: name of the split.
        samples_per_shard: samples in each of `urls`, None if unknown.
        pipes: whether `urls` are commands, to be run for what they print. Nothing in a shard or an index can set it.
        display_names: what people call each class, by its index, None if unknown.
        files: the `ImageFiles` of an image folder, None for shards.
        hint: a line for whoever reads an image folder, how to make shards of it; else "".
        left_out: a line that tells what might have been meant as well but is not read, "" where there is nothing.
        kept: the samples of each of `urls`, as `keep_in_memory` has decoded them: None for one, or for all, that are
            read anew.
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
    hint: str = ""
    left_out: str = ""
    kept: "list[Kept | None] | None" = dataclasses.field(default=None, repr=False)

    def read(self, number: int) -> Iterator[RawSample]:
        """The samples of shard `number`, as `read_shard` yields them. Raises DataError as it does."""
        kept = self.kept[number] if self.kept is not None else None
        if kept is not None:
            return kept.samples()
        return self.files.samples(number) if self.files else read_shard(self.urls[number], self.pipes)


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

    A folder without shards is read as it is: `spec/SPLIT/CLASS/IMAGE`, or `spec/CLASS/IMAGE` for whatever split.

    Args:
        spec: a directory of shards or of images; or a path, glob or brace pattern (`train-{000000..000015}.tar`), local
            or http(s); or with `allow_pipe` a shell command that prints a shard, `pipe:COMMAND`, with brace patterns as
            well.
        split: which split of a directory, in any of `folders.SPELLINGS`.
        num_samples: number of samples, where no index tells it.
        num_classes: number of classes, where neither index nor folder tells it (or to use a model with more).
        allow_pipe: run the command of a `pipe:` in `spec`.
        train: ShardSet that is trained on, where this one is to evaluate: it has the same classes. An image folder
            without splits cannot be both.
        class_names: the classes by index that labels are to follow; default those of `train`. Without either, those of
            an image folder are its folders by name: of `spec/train`, where there is one.

    Raises:
        DataError: if shards are missing, the count is unknown, the classes are not those that they should be, or the
            URL is of a kind that could run commands.
    """
    spec = os.fspath(spec)
    class_names = class_names or (train.class_names if train else None)
    if num_classes is not None and num_classes < 1:
        raise DataError(f"num_classes={num_classes}; it must be at least 1")
    pipes = allow_pipe and _is_pipe(spec)
    index: dict[str, Any] | None = None
    counts: list[int] | None = None
    left_out: list[str] = []
    if pipes:
        urls = _expand_command(spec)
    elif "://" not in spec and os.path.isdir(spec):
        index = read_index(spec)
        if index is None:
            found = find_shards(spec)
            if not alike(split, found) and (not found or _is_among_folders(split, spec)):
                return _open_folder(spec, split, num_samples, num_classes, train, class_names, found)
            split = _pick(split, found, spec)
            urls = found[split]
            left_out = _twins(split, found, spec)
        else:
            split = _pick(split, index["splits"], spec)
            entry = index["splits"][split]
            urls = [os.path.join(spec, name) for name in entry["filenames"]]
            counts = list(entry["shard_lengths"])
            left_out = _twins(split, index["splits"], spec)
    else:
        urls = _expand(spec)
    if index is None and not pipes and "://" not in urls[0]:
        index = read_index(os.path.dirname(urls[0]) or ".")
        counts = _look_up(urls)
    missing = [url for url in urls if not pipes and "://" not in url and not os.path.isfile(url)]
    if missing:
        if missing == [spec]:
            raise DataError(f"there is no file or folder {spec!r}; check the path")
        raise DataError(f"shard {missing[0]} is missing ({len(missing)} of {len(urls)} in {spec!r}); check the path")
    if counts is not None:
        if num_samples not in (None, sum(counts)):
            raise DataError(f"num_samples={num_samples}, but the index of {spec!r} says {sum(counts)}; drop one")
        num_samples = sum(counts)
    if num_samples is None:
        if pipes or "://" in urls[0]:
            remedy = f", which no index tells of a {'command' if pipes else 'URL'}"
        else:
            folder = spec if os.path.isdir(spec) else os.path.dirname(urls[0]) or "."
            remedy = f", or write an index with `python -m vision_longhorn.shards index {shlex.quote(folder)}`"
        raise DataError(f"the number of samples in {spec!r} ({split}) is unknown; give num_samples{remedy}")
    if num_samples < 1:
        raise DataError(f"num_samples={num_samples} for {spec!r}; it must be at least 1")
    index = index or {}
    _compare_classes(spec, index.get("class_names"), class_names)
    _check_number(spec, index.get("num_classes"), num_classes)
    return ShardSet(
        urls,
        num_samples,
        num_classes or index.get("num_classes"),
        index.get("class_names"),
        split,
        counts,
        pipes,
        index.get("display_names"),
        left_out="; ".join(left_out),
    )


def _compare_classes(spec: str, names: list[str] | None, wanted: list[str] | None) -> None:
    """Raises DataError where a class of `wanted` has another index in `names`. Other names may be other words only."""
    for number, name in enumerate(names or ()):
        if wanted and name in wanted and wanted[number : number + 1] != [name]:
            raise DataError(
                f"class {name!r} has index {number} in {spec!r}, but {wanted.index(name)} in the training "
                "data; make the shards of both in one folder, so that their classes agree"
            )


def _check_number(spec: str, found: int | None, num_classes: int | None) -> None:
    """Raises DataError where data have more classes than `num_classes`."""
    if found and num_classes and num_classes < found:
        raise DataError(f"num_classes={num_classes}, but {spec} has {found} classes; drop it, or give {found} or more")


def _open_folder(
    spec: str,
    split: str,
    num_samples: int | None,
    num_classes: int | None,
    train: ShardSet | None,
    class_names: list[str] | None,
    shards: Mapping[str, list[str]],
) -> ShardSet:
    """The ShardSet of an image folder, beside which there may be `shards` of other splits."""
    home, folder, (splits, left_out) = spec, spec, find_splits(spec, split, class_names)
    if splits:
        split = _pick(split, splits, spec, left_out)
        folder = splits[split]
        left_out = _twins(split, splits) + left_out
        left_out += [f"shards of {name}" for name in shards if not known_split(name)]
    else:
        splits, above = splits_beside(spec), os.path.dirname(os.path.abspath(spec))
        home = above if splits else spec
        if train and train.files and os.path.samefile(train.files.folder, folder):
            remedy = (
                f"{above}, which has {', '.join(splits)}"
                if len(splits) > 1
                else (
                    f"--val-data, or part its images into {os.path.join(spec, 'train')} and {os.path.join(spec, 'val')}"
                )
            )
            raise DataError(
                f"{spec} has no splits but classes ({', '.join((train.class_names or [])[:2])}, ...), and "
                f"all of it is trained on; give {remedy}"
            )
    trained_on = alike("train", splits)[:1]
    if class_names is None and trained_on and not os.path.samefile(splits[trained_on[0]], folder):
        class_names = subfolders(splits[trained_on[0]])
    listed, names, others = list_images(folder, class_names)
    if not listed:
        raise DataError(
            f"{folder} holds no shards and no folders of images{_what_is_there(folder)}; give a folder with "
            "train/CLASS/IMAGE.jpg and val/CLASS/IMAGE.jpg, or of shards, which `python -m vision_longhorn.shards "
            "imagefolder IMAGES OUT` makes"
        )
    if len(names) == 1 and class_names is None:
        raise DataError(f"{folder} has one class only, {names[0]!r}; give the folder whose folders are the classes")
    if train is not None and class_names is None and train.num_classes not in (None, len(names)):
        raise DataError(
            f"{folder} has {len(names)} classes, the training data {train.num_classes}, whose names are "
            "unknown; give the training data an index with class names"
        )
    _check_number(spec, len(names), num_classes)
    if num_samples not in (None, len(listed)):
        raise DataError(
            f"num_samples={num_samples}, but {folder} holds {len(listed)} images; drop it, or give {len(listed)}"
        )
    command = f"python -m vision_longhorn.shards imagefolder {shlex.quote(home)} OUT"
    hint = f"{folder} is read image by image, and shards load faster: {command}{'' if splits else f' --split {split}'}"
    left_out = [f"beside {folder}: {', '.join(left_out)}"] if left_out else []
    left_out += [f"in {folder}: {list_others(others)}"] if others else []
    file = os.path.join(home, NAMES_FILE)
    display_names = read_names(file, names) if os.path.isfile(file) else None
    files = ImageFiles.mixed(folder, listed)
    return ShardSet(
        [folder] * len(files.lengths),
        len(listed),
        num_classes or len(names),
        names,
        split,
        files.lengths,
        display_names=display_names,
        files=files,
        hint=hint,
        left_out="; ".join(left_out),
    )


def _is_pipe(spec: str) -> bool:
    return spec[:5].lower() == "pipe:"


def _is_among_folders(split: str, spec: str) -> bool:
    """Whether `spec`, which holds shards of other names, an archive of its images, say, has a folder for `split`."""
    with contextlib.suppress(DataError):
        return bool(alike(split, find_splits(spec, split).paths))
    return False


def _what_is_there(folder: str) -> str:
    """What a folder without folders of images holds, for a message."""
    found = walk(folder)
    shards = [name for name, _ in found.others if _SHARD.search(name)]
    if shards:
        return f", but shards in {os.path.join(folder, os.path.dirname(min(shards)))}"
    if found.images:
        return f", but {len(found.images)} images right in it"
    return next((f", but {name}, {why}" for name, why in found.others if why == BROKEN), "")


def _twins(split: str, splits: Iterable[str], spec: str | None = None) -> list[str]:
    """What else may be `split`, by its name, among `splits` and the folders in `spec`."""
    twins = [name for name in splits if name != split and same_split(name, split)]
    if spec is not None:
        own = [entry.name for entry, kind in scan(spec) if kind == FOLDER and entry.name not in splits]
        twins += [f"the folder {name} in {spec}" for name in own if same_split(name, split)]
    return [f"{name}, which may be {split} as well" for name in twins]


def _pick(split: str, splits: Mapping[str, Any], spec: str, others: Sequence[str] | None = None) -> str:
    """The name in `splits` that means `split`. `others` is what else is in the folder, for the message: by default
    its folders, and shards that an index lacks. Raises DataError where there is none, or more than one."""
    found = alike(split, splits)
    if len(found) == 1:
        return found[0]
    if found:
        raise DataError(f"{spec!r} has {', '.join(found)}, each of which may be {split!r}; name one of these")
    if others is None:
        unlisted = [name for name in find_shards(spec) if name not in splits]
        others = [f"shards of {name}, of which the index does not know" for name in unlisted]
        folders = [e.name for e, kind in scan(spec) if kind in (FOLDER, BROKEN) and not _SHARD.search(e.name)]
        others += [f"the folder {name}" for name in folders[:8] if name not in splits]
    have = ", ".join([*sorted(splits), *others]) or "no shards"
    raise DataError(f"{spec!r} has no split {split!r}; it has {have}; name one of these, or other data for {split!r}")


def _expand(spec: str) -> list[str]:
    """Local paths and http(s) URLs that a pattern stands for, in order."""
    if _is_pipe(spec) and not os.path.exists(spec):
        raise DataError(
            f"{spec!r} is not read, as pipe: runs a command; where that is meant, --allow-pipe (in Python "
            "allow_pipe=True) has to be given, each time, also to resume a run or to evaluate a checkpoint"
        )
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+):", spec)  # two letters at least: C: is a drive
    if scheme and scheme[1].lower() not in ("http", "https") and not os.path.exists(spec):
        raise DataError(f"{spec!r}: {scheme[1]}: is not read, as it may run commands; give a path or an http(s) URL")
    urls = _expand_braces(spec)
    if any("{" in url or "}" in url for url in urls):
        raise DataError(f"{spec!r} has an empty brace range; write train-{{000000..000015}}.tar")
    found = []
    for url in urls:
        if "://" in url or not glob.has_magic(url) or os.path.exists(url):
            found.append(url)
        else:
            found += sorted(glob.glob(url))
    if not found:
        raise DataError(f"no file matches {spec!r}; check the pattern")
    return found


def _expand_command(spec: str) -> list[str]:
    """The `pipe:` commands that a pattern stands for, in order. Backslashes, and braces without a pattern in them, are
    left to the shell."""
    if not spec[5:].strip():
        raise DataError(f"{spec!r} names no command; write 'pipe:cat train-{{000000..000015}}.tar'")
    return _expand_braces(spec, escape=False)


def _expand_braces(spec: str, **options: bool) -> list[str]:
    for low, high in re.findall(r"\{(\d+)\.\.(\d+)[^}]*\}", spec):
        if int(low) > int(high):
            raise DataError(f"{spec!r}: the range {low}..{high} is empty; write the smaller number first")
    try:
        return list(braceexpand.braceexpand(spec, **options))
    except braceexpand.UnbalancedBracesError:  # type: ignore[attr-defined]  # its stub lacks it
        raise DataError(f"{spec!r} has unbalanced braces; write train-{{000000..000015}}.tar") from None


def _look_up(urls: list[str]) -> list[int] | None:
    """The counts of `urls` from the indexes in their folders, None unless these have every one."""
    counts: dict[str, int] = {}
    for folder in {os.path.dirname(url) for url in urls}:
        for entry in (read_index(folder or ".") or {"splits": {}})["splits"].values():
            paths = [os.path.join(folder, name) for name in entry["filenames"]]
            counts.update(zip(paths, entry["shard_lengths"], strict=True))
    return [counts[url] for url in urls] if all(url in counts for url in urls) else None


def find_shards(directory: str | os.PathLike[str]) -> dict[str, list[str]]:
    """Shards of a directory by split name, read from their file names, or from the folders that they lie in.

    `train-000000.tar`, `imagenet1k-validation-00.tar` and `val_3.tar.gz` belong to train, validation and val,
    `test/0.tar` to test, also where `directory` is the folder test. A folder of a split is looked into where no shard
    beside it is of that split, and where it holds no folders: else they are classes, and it is one of images.

    Returns:
        dict of split name -> sorted paths

    Raises:
        DataError: if there is no such directory.
    """
    if not os.path.isdir(directory):
        raise DataError(f"{directory} is not a folder; check the path")
    splits: dict[str, list[str]] = {}
    inside = scan(directory)
    own = os.path.basename(os.path.abspath(directory))
    for entry, kind in inside:
        if kind in (HIDDEN, FOLDER) or not _SHARD.search(entry.name):
            continue
        words = [word for word in re.split(r"[-_.]", _SHARD.sub("", entry.name)) if not word.isdigit()]
        known = [word.lower() for word in words if known_split(word)]
        split = (known or words or [own if known_split(own) else "train"])[-1]
        splits.setdefault(split, []).append(entry.path)
    for entry, kind in inside:
        if kind == FOLDER and known_split(entry.name) and not any(same_split(entry.name, name) for name in splits):
            with contextlib.suppress(DataError):  # that it cannot be read is told where it is asked for
                members = [(member, what) for member, what in scan(entry.path) if what != HIDDEN]
                shards = [member.path for member, _ in members if _SHARD.search(member.name)]
                if shards and all(what != FOLDER for _, what in members):
                    splits[entry.name] = shards
    return splits


def read_index(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The index of a directory of shards.

    Returns:
        dict with "splits" and perhaps "num_classes", "class_names" and "display_names"; None if there is none.

    Raises:
        DataError: if there is one that cannot be understood.
    """
    for name in INDEX_NAMES:
        path = os.path.join(directory, name)
        if not os.path.isfile(path):
            continue
        try:
            with open(path, encoding="utf-8-sig") as file:
                index = json.load(file, object_pairs_hook=_object)
            check_index(index)
        except OSError as error:
            raise DataError(f"{path} cannot be read ({reason(error)})") from None
        except (ValueError, RecursionError) as error:
            why = str(error) if isinstance(error, DataError) else f"it is not JSON in UTF-8: {one_line(error)}"
            raise DataError(
                f"{path} is not an index of shards ({why}); mend it, or remove it and write a new one with "
                f"`python -m vision_longhorn.shards index {shlex.quote(os.fspath(directory))}`"
            ) from None
        return index
    return None


def check_index(index: Any) -> None:
    """Fills in what an index lacks and other fields tell. Raises DataError, which names the field, where it is none."""
    _expect("it", index, isinstance(index, dict), "an object with splits")
    splits = index.get("splits")
    _expect("splits", splits, isinstance(splits, dict), "an object with an entry for each split")
    for split, entry in splits.items():
        of = f" of split {_short(split)}"
        _expect(f"the entry{of}", entry, isinstance(entry, dict), "an object with filenames and shard_lengths")
        names, lengths = entry.get("filenames"), entry.get("shard_lengths")
        check_names(f"filenames{of}", names, "name each shard once")
        for name in names:
            outside = os.path.isabs(name) or "://" in name or _is_pipe(name) or ".." in re.split(r"[/\\]", name)
            if outside:
                raise DataError(f"filenames{of} name {_short(name)}, which is outside of its folder")
        _expect(f"shard_lengths{of}", lengths, isinstance(lengths, list), "a list, the number of samples in each shard")
        for number, length in enumerate(lengths):
            _expect_number(f"shard_lengths[{number}]{of}", length, 0, _MOST_SAMPLES)
        if len(lengths) != len(names):
            raise DataError(
                f"there are {len(names)} filenames{of}, but {len(lengths)} shard_lengths; give each its own"
            )
        if entry.get("num_samples") is None:
            entry["num_samples"] = sum(lengths)
        total, right = entry["num_samples"], f"{sum(lengths)}, which is what shard_lengths add up to"
        _expect(f"num_samples{of}", total, type(total) is int and total == sum(lengths), right)
        for fact, (kind, right) in _FACTS.items():
            _expect(f"{fact}{of}", entry.get(fact), isinstance(entry.get(fact), (kind, type(None))), right)
    if index.get("num_classes") is not None:
        _expect_number("num_classes", index["num_classes"], 1, _MOST_CLASSES)
    for field in ("class_names", "display_names"):
        if index.get(field) is not None:
            check_names(field, index[field])
            if index.get("num_classes") is None:
                index["num_classes"] = len(index[field])
            if len(index[field]) != index["num_classes"]:
                raise DataError(
                    f"{field} has {len(index[field])} names for {index['num_classes']} classes; give one for each"
                )


def check_names(field: str, names: Any, twice: str = "") -> None:
    """Raises DataError, which calls the list `field`, where `names` are not names. With `twice`, which says what would
    be right, it is an error, too, that one of them stands there twice."""
    _expect(field, names, isinstance(names, list) and names != [], "a list of names")
    first: dict[str, int] = {}
    name_of, _, of = field.partition(" ")
    for number, name in enumerate(names):
        _expect(f"{name_of}[{number}] {of}".rstrip(), name, isinstance(name, str) and name != "", "a name, in quotes")
        if twice and first.setdefault(name, number) != number:
            raise DataError(f"{field} has {_short(name)} twice, as number {first[name]} and {number}; {twice}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Of a key that stands there twice, Python would take the last in silence."""
    if pairs:
        check_names("an object", [key for key, _ in pairs], "give each key once")
    return dict(pairs)


def _expect(field: str, value: Any, fits: bool, right: str) -> None:
    if not fits:
        raise DataError(f"{field} is {'missing' if value is None else _short(value)}; it must be {right}")


def _expect_number(field: str, value: Any, low: int, high: int) -> None:
    fits = type(value) is int and low <= value <= high  # isinstance would take true for 1
    _expect(field, value, fits, f"a whole number from {low} to {high:,}")


def _short(value: Any) -> str:
    text = reprlib.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def write_index(
    directory: str | os.PathLike[str],
    splits: Mapping[str, tuple[Sequence[str], Sequence[int], Mapping[str, Any]]],
    class_names: Sequence[str] | None = None,
    num_classes: int | None = None,
    display_names: Sequence[str] | None = None,
) -> None:
    """Write the index of a directory, replacing the splits named and keeping the others.

    Args:
        directory: where the shards lie.
        splits: dict of split name -> (file names, samples per shard, dict of further facts to keep).
        class_names: name of each class by its index, if known.
        num_classes: number of classes, if there are no names.
        display_names: what people call each class, by its index, if known.
    """
    index = read_index(directory) or {"splits": {}}
    for name, (filenames, lengths, facts) in splits.items():
        index["splits"][name] = {
            "name": name,
            "num_samples": sum(lengths),
            "filenames": list(filenames),
            "shard_lengths": list(lengths),
            **facts,
        }
    if class_names is not None:
        num_classes = len(class_names)
        if index.get("class_names") != list(class_names):
            index.pop("display_names", None)
        index["class_names"] = list(class_names)
    if num_classes is not None:
        index["num_classes"] = num_classes
    if display_names is not None:
        index["display_names"] = list(display_names)
    check_index(index)
    with written_aside(os.path.join(directory, INDEX_NAMES[0])) as aside:
        aside.write_bytes(json.dumps(index, indent=1).encode())
