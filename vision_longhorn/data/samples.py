"""What is in a raw sample: a dict of "__key__", "__url__" and the bytes of each of its files by extension."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vision_longhorn.errors import reason

from .images import EXTENSIONS, DataError

RawSample = dict[str, Any]
PIXELS = "__pixels__"  # in the place of a file: key of a decoded image, (H, W, 3) uint8


def image_of(sample: RawSample) -> bytes:
    """Bytes of a sample's image.

    Raises:
        DataError: if it has none, or its file cannot be read.
    """
    for extension in EXTENSIONS:
        if extension in sample:
            image = sample[extension]
            # Members of a shard are bytes, whatever they hold: only `ImageFiles` can name a file.
            if not isinstance(image, Path):
                return image
            try:
                return image.read_bytes()
            except OSError as error:
                raise DataError(f"{place(sample)} cannot be read ({reason(error)}); mend or remove it") from None
    raise DataError(f"{place(sample)}: no image ({', '.join(EXTENSIONS)}){_found_instead(sample, EXTENSIONS)}")


def label_of(sample: RawSample, num_classes: int | None = None) -> int:
    """Class index of a sample.

    Raises:
        DataError: if it has none, or one outside 0 <= label < num_classes.
    """
    text = sample.get("cls")
    if text is None:
        raise DataError(f"{place(sample)}: no label (cls, with the class index){_found_instead(sample, ('cls',))}")
    try:
        label = int(text)
    except ValueError:
        raise DataError(f"{place(sample)}: label {text[:20]!r} is not a number; the class index is needed") from None
    if label < 0 or (num_classes is not None and label >= num_classes):
        known = "; labels start at 0" if num_classes is None else f" for {num_classes} classes; check both"
        raise DataError(f"{place(sample)}: label {label} is out of range{known}")
    return label


def _found_instead(sample: RawSample, wanted: Sequence[str]) -> str:
    """Which members a sample has where it lacks one that ends in one of `wanted`, and why that may be so."""
    members = {name: f"{sample['__key__']}.{name}" for name in sample if not name.startswith("__")}
    shown = ", ".join(map(_shorter, list(members.values())[:5])) + (", ..." if len(members) > 5 else "")
    remedy = "the members of a sample have one name and follow each other in the tar, as `tar --sort=name` puts them"
    for name, member in members.items():
        more, _, ending = name.rpartition(".")
        if ending in wanted:
            key = os.path.basename(sample["__key__"])
            better = f"{key}.{ending} or {key}_{more.replace('.', '_')}.{ending}"
            remedy = f"the ending of a member begins at its first dot: rename {_shorter(member)} to {_shorter(better)}"
            break
    return f", only {shown}; {remedy}"


def _shorter(name: str) -> str:
    return name if len(name) <= 60 else f"...{name[-57:]}"


def place(sample: RawSample) -> str:
    """Where a sample lies, for messages: its "__url__" and "__key__" are enough."""
    if os.path.isdir(sample["__url__"]):  # an image folder
        return f"image {os.path.join(sample['__url__'], sample['__key__'])}"
    return f"shard {sample['__url__']}, sample {sample['__key__']}"
