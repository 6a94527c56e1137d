"""What is in a raw sample: a dict of "__key__", "__url__" and the bytes of each of its files by extension."""

import os
from pathlib import Path
from typing import Any

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
                raise DataError(f"{place(sample)} cannot be read ({error.strerror}); mend or remove it") from None
    has = ", ".join(name for name in sample if not name.startswith("__")) or "nothing"
    raise DataError(f"{place(sample)}: no image ({', '.join(EXTENSIONS)}), only {has}")


def label_of(sample: RawSample, num_classes: int | None = None) -> int:
    """Class index of a sample.

    Raises:
        DataError: if it has none, or one outside 0 <= label < num_classes.
    """
    text = sample.get("cls")
    if text is None:
        raise DataError(f"{place(sample)}: no label; a .cls member with the class index is needed")
    try:
        label = int(text)
    except ValueError:
        raise DataError(f"{place(sample)}: label {text[:20]!r} is not a number") from None
    if label < 0 or (num_classes is not None and label >= num_classes):
        known = "; labels start at 0" if num_classes is None else f" for {num_classes} classes; check both"
        raise DataError(f"{place(sample)}: label {label} is out of range{known}")
    return label


def place(sample: RawSample) -> str:
    """Where a sample lies, for messages: its "__url__" and "__key__" are enough."""
    if os.path.isdir(sample["__url__"]):  # an image folder
        return f"image {os.path.join(sample['__url__'], sample['__key__'])}"
    return f"shard {sample['__url__']}, sample {sample['__key__']}"
