"""The index of a folder of shards: `_info.json`, which names the shards of each split and their numbers of samples.

It is the file that timm's `ReaderWds` reads, with `num_classes`, `class_names` and `display_names` added.
"""

import json
import os
import re
import reprlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from vision_longhorn.errors import one_line, reason
from vision_longhorn.files import written_aside

from .images import DataError

INDEX_NAMES = ("_info.json", "info.json")


def read_index(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read the index of a directory of shards: a dict with "splits" and perhaps "num_classes", "class_names" and
    "display_names"; None if there is none. Raises DataError if there is one that cannot be understood."""
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


def write_index(
    directory: str | os.PathLike[str],
    splits: Mapping[str, tuple[Sequence[str], Sequence[int], Mapping[str, Any]]],
    class_names: Sequence[str] | None = None,
    num_classes: int | None = None,
    display_names: Sequence[str] | None = None,
) -> None:
    """Write the index of a directory. `splits` has file names, samples per shard and further facts for each split;
    splits that it does not name stay as they are. `num_classes` counts only where there are no `class_names`."""
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


def check_index(index: Any) -> None:
    """Fill in the fields that follow from others. Raises DataError, which names the field, if one is wrong."""
    _check("it", index, dict, "an object with splits")
    _check("splits", index.get("splits"), dict, "an object with an entry for each split")
    for split, entry in index["splits"].items():
        _check_split(f" of split {_short(split)}", entry)
    if index.get("num_classes") is not None:
        _check_number("num_classes", index["num_classes"], 1, 10**7)
    for field in ("class_names", "display_names"):
        names = index.get(field)
        if names is None:
            continue
        _check_names(field, "", names)
        if index.get("num_classes") is None:
            index["num_classes"] = len(names)
        if len(names) != index["num_classes"]:
            raise DataError(f"{field} has {len(names)} names for {index['num_classes']} classes; give one for each")


def _check_split(of: str, entry: Any) -> None:
    _check(f"the entry{of}", entry, dict, "an object with filenames and shard_lengths")
    names, lengths = entry.get("filenames"), entry.get("shard_lengths")
    _check_names("filenames", of, names)
    _check(f"shard_lengths{of}", lengths, list, "a list, the number of samples in each shard")
    for number, length in enumerate(lengths):
        _check_number(f"shard_lengths[{number}]{of}", length, 0, 10**12)
    for field, kind, right in _OPTIONAL:
        if entry.get(field) is not None:
            _check(f"{field}{of}", entry[field], kind, right)
    _check_once(f"filenames{of}", names, "name each shard once")
    for name in names:
        if os.path.isabs(name) or re.match("pipe:", name, re.I) or "://" in name or ".." in re.split(r"[/\\]", name):
            raise DataError(f"filenames{of} name {_short(name)}, which is outside of its folder")
    if len(lengths) != len(names):
        raise DataError(f"there are {len(names)} filenames{of}, but {len(lengths)} shard_lengths; give each its own")
    total, right = entry.setdefault("num_samples", None), sum(lengths)
    if total is None:
        entry["num_samples"] = right
    elif type(total) is not int or total != right:
        raise DataError(
            f"num_samples{of} is {_short(total)}; it must be {right}, which is what shard_lengths add up to"
        )


_OPTIONAL = (
    ("name", str, "a text"),
    ("source", str, "a text"),
    ("made_with", dict, "an object"),
    ("skipped", list, "a list of names"),
)


def _check(field: str, value: Any, kind: type, right: str) -> None:
    if not isinstance(value, kind):
        raise _wrong(field, value, right)


def _check_names(field: str, of: str, names: Any) -> None:
    if not isinstance(names, list) or not names:
        raise _wrong(f"{field}{of}", names, "a list of names")
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise _wrong(f"{field}[{number}]{of}", name, "a name, in quotes")


def _check_number(field: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:  # isinstance would take true for 1
        raise _wrong(field, value, f"a whole number from {low} to {high:,}")


def _wrong(field: str, value: Any, right: str) -> DataError:
    return DataError(f"{field} is {'missing' if value is None else _short(value)}; it must be {right}")


def _check_once(field: str, names: Sequence[str], remedy: str) -> None:
    """Raises DataError if one of `names` stands there twice."""
    first: dict[str, int] = {}
    for number, name in enumerate(names):
        if first.setdefault(name, number) != number:
            raise DataError(f"{field} has {_short(name)} twice, as number {first[name]} and {number}; {remedy}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Python would silently take the last of two values with one key."""
    _check_once("an object", [key for key, _ in pairs], "give each key once")
    return dict(pairs)


def _short(value: Any) -> str:
    text = reprlib.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
