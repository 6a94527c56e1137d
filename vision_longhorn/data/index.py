"""The index of a folder of shards: `_info.json`, which names the shards of each split and their numbers of samples.

It is the file that timm's `ReaderWds` reads, with `num_classes`, `class_names` and `display_names` added.
"""

import dataclasses
import json
import os
import re
import reprlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vision_longhorn.errors import one_line, reason
from vision_longhorn.files import written_aside

from .images import DataError

INDEX_NAMES = ("_info.json", "info.json")


def read_index(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read the index of a directory of shards.

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


def write_index(
    directory: str | os.PathLike[str],
    splits: Mapping[str, tuple[Sequence[str], Sequence[int], Mapping[str, Any]]],
    class_names: Sequence[str] | None = None,
    num_classes: int | None = None,
    display_names: Sequence[str] | None = None,
) -> None:
    """Write the index of a directory. Splits that are not named stay as they are.

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


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A kind of value in an index: a test, the words for what passes it, and the kind of a list's items."""

    fits: Callable[[Any], bool]
    right: str
    required: bool = False
    items: "_Kind | None" = None

    def check(self, field: str, value: Any, of: str = "") -> None:
        """Raises DataError, which calls the value `field`, if it is of another kind."""
        if value is None and not self.required:
            return
        if not self.fits(value):
            raise DataError(f"{field}{of} is {'missing' if value is None else _short(value)}; it must be {self.right}")
        for number, item in enumerate(value if self.items else ()):
            self.items.check(f"{field}[{number}]", item, of)  # type: ignore[union-attr]


def _whole(low: int, high: int, required: bool = False) -> _Kind:
    # isinstance would take true for 1.
    return _Kind(
        lambda value: type(value) is int and low <= value <= high, f"a whole number from {low} to {high:,}", required
    )


def _is(kind: type, right: str, required: bool = False, items: _Kind | None = None) -> _Kind:
    return _Kind(lambda value: isinstance(value, kind), right, required, items)


_NAME = _Kind(lambda value: isinstance(value, str) and value != "", "a name, in quotes", required=True)
_NAMES = _Kind(lambda value: isinstance(value, list) and value != [], "a list of names", items=_NAME)
_INDEX = {
    "splits": _is(dict, "an object with an entry for each split", required=True),
    "num_classes": _whole(1, 10**7),
    "class_names": _NAMES,
    "display_names": _NAMES,
}
_SPLIT = {
    "filenames": dataclasses.replace(_NAMES, required=True),
    "shard_lengths": _is(
        list, "a list, the number of samples in each shard", required=True, items=_whole(0, 10**12, required=True)
    ),
    "name": _is(str, "a text"),
    "source": _is(str, "a text"),
    "made_with": _is(dict, "an object"),
    "skipped": _is(list, "a list of names"),
}


def check_index(index: Any) -> None:
    """Fill in the fields that follow from others. Raises DataError, which names the field, if one is wrong."""
    _is(dict, "an object with splits", required=True).check("it", index)
    for field, kind in _INDEX.items():
        kind.check(field, index.get(field))
    for split, entry in index["splits"].items():
        of = f" of split {_short(split)}"
        _is(dict, "an object with filenames and shard_lengths", required=True).check("the entry", entry, of)
        for field, kind in _SPLIT.items():
            kind.check(field, entry.get(field), of)
        names, lengths = entry["filenames"], entry["shard_lengths"]
        _check_once(f"filenames{of}", names, "name each shard once")
        for name in names:
            if (
                os.path.isabs(name)
                or re.match("pipe:", name, re.I)
                or "://" in name
                or ".." in re.split(r"[/\\]", name)
            ):
                raise DataError(f"filenames{of} name {_short(name)}, which is outside of its folder")
        if len(lengths) != len(names):
            raise DataError(
                f"there are {len(names)} filenames{of}, but {len(lengths)} shard_lengths; give each its own"
            )
        if entry.get("num_samples") is None:
            entry["num_samples"] = sum(lengths)
        total = entry["num_samples"]
        if type(total) is not int or total != sum(lengths):
            right = f"{sum(lengths)}, which is what shard_lengths add up to"
            raise DataError(f"num_samples{of} is {_short(total)}; it must be {right}")
    for field in ("class_names", "display_names"):
        if names := index.get(field):
            if index.get("num_classes") is None:
                index["num_classes"] = len(names)
            if len(names) != index["num_classes"]:
                raise DataError(f"{field} has {len(names)} names for {index['num_classes']} classes; give one for each")


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
