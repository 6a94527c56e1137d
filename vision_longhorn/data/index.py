"""The index of a folder of shards: `_info.json`, which names the shards of each split and their numbers of samples.

It is the file that timm's `ReaderWds` reads, with `num_classes`, `class_names` and `display_names` added.
"""

import json
import os
import re
import reprlib
import shlex
from collections.abc import Mapping
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
                f"{path} is not an index of shards ({why}); repair it, or remove it and write a new one with "
                f"`vision-longhorn shards index {shlex.quote(os.fspath(directory))}`"
            ) from None
        return index
    return None


def write_index(
    directory: str | os.PathLike[str],
    splits: Mapping[str, Mapping[str, Any]],
    class_names: list[str] | None = None,
    num_classes: int | None = None,
    display_names: list[str] | None = None,
) -> None:
    """Write the index of a directory. `splits` has "filenames", "shard_lengths" and further facts for each split; other
    splits stay as they are in the index. `num_classes` is used only if there are no `class_names`."""
    index = read_index(directory) or {"splits": {}}
    for name, entry in splits.items():
        index["splits"][name] = {"name": name, "num_samples": sum(entry["shard_lengths"]), **entry}
    if class_names is not None:
        num_classes = len(class_names)
        if index.get("class_names") != class_names:
            index.pop("display_names", None)
    about = {"class_names": class_names, "num_classes": num_classes, "display_names": display_names}
    index |= {field: value for field, value in about.items() if value is not None}
    check_index(index)
    with written_aside(os.path.join(directory, INDEX_NAMES[0])) as aside:
        aside.write_bytes(json.dumps(index, indent=1).encode())


def check_index(index: Any) -> None:
    """Check an index, and fill in fields that follow from others. Raises DataError, which names the wrong field."""
    _need(isinstance(index, dict), "it", index, "an object with splits")
    splits, count = index.get("splits"), index.get("num_classes")
    _need(isinstance(splits, dict), "splits", splits, "an object with an entry for each split")
    for split, entry in splits.items():
        _check_split(f"splits.{split[:40]}", entry)
    if count is not None:
        _need_number("num_classes", count, 1, 10**7)
    for field in "class_names", "display_names":
        if (names := index.get(field)) is not None:
            _need_names(field, names)
            count = index["num_classes"] = count or len(names)
            if len(names) != count:
                raise DataError(f"{field} has {len(names)} names for {count} classes; give one for each")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of a JSON object. Python would silently take the last of two values with one key."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise DataError(f"an object has {max(keys, key=keys.count)!r} twice; give each key once")
    return dict(pairs)


def _check_split(field: str, entry: Any) -> None:
    _need(isinstance(entry, dict), field, entry, "an object with filenames and shard_lengths")
    names, lengths = entry.get("filenames"), entry.get("shard_lengths")
    _need_names(f"{field}.filenames", names)
    _need(isinstance(lengths, list), f"{field}.shard_lengths", lengths, "a list, the number of samples in each shard")
    for i, length in enumerate(lengths):
        _need_number(f"{field}.shard_lengths[{i}]", length, 0, 10**12)
    for name in names:
        if os.path.isabs(name) or re.match("pipe:", name, re.I) or "://" in name or ".." in re.split(r"[/\\]", name):
            raise DataError(f"{field}.filenames has {reprlib.repr(name)}, which is outside of its folder")
    if len(set(names)) < len(names):
        raise DataError(f"{field}.filenames has {max(names, key=names.count)!r} twice; name each shard once")
    if len(lengths) != len(names):
        raise DataError(f"{field} has {len(names)} filenames and {len(lengths)} shard_lengths; give each file one")
    for key, kind, right in ("made_with", dict, "an object"), ("skipped", list, "a list of names"):
        _need(isinstance(entry.get(key) or kind(), kind), f"{field}.{key}", entry.get(key), right)
    total, known = entry.get("num_samples"), sum(lengths)
    is_right = total is None or type(total) is int and total == known
    _need(is_right, f"{field}.num_samples", total, f"{known}, which is what shard_lengths add up to")
    entry["num_samples"] = known


def _need_names(field: str, names: Any) -> None:
    _need(isinstance(names, list) and names, field, names, "a list of names")
    for i, name in enumerate(names):
        _need(isinstance(name, str) and name, f"{field}[{i}]", name, "a name, in quotes")


def _need_number(field: str, value: Any, low: int, high: int) -> None:
    is_right = type(value) is int and low <= value <= high  # isinstance would take true for 1
    _need(is_right, field, value, f"a whole number from {low} to {high:,}")


def _need(is_right: Any, field: str, value: Any, right: str) -> None:
    if not is_right:
        raise DataError(f"{field} is {'missing' if value is None else reprlib.repr(value)[:80]}; it must be {right}")
