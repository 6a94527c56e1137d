"""Raw samples: dicts of "__key__", "__url__" and the bytes of each file by its extension."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vision_longhorn.errors import reason

from .images import EXTENSIONS, DataError, warn_if_dark

RawSample = dict[str, Any]
PIXELS = "__pixels__"  # key of a decoded image, (H, W, 3) uint8, that a sample has instead of the file


def nbytes(sample: RawSample) -> int:
    """Count the bytes of a sample's pixels and files."""
    sizes = (getattr(value, "nbytes", len(value)) for value in sample.values() if not isinstance(value, (str, Path)))
    return sum(sizes)


def image_of(sample: RawSample) -> bytes:
    """Return the bytes of a sample's image. Raises DataError if it has none, or its file cannot be read."""
    for extension in EXTENSIONS:
        if extension in sample:
            image = sample[extension]
            # Members of a shard are always bytes; only an `ImageFiles` gives a Path.
            if not isinstance(image, Path):
                return image
            try:
                return image.read_bytes()
            except OSError as error:
                raise DataError(f"{place(sample)} cannot be read ({reason(error)}); repair or remove it") from None
    raise _lacks(sample, f"image ({', '.join(EXTENSIONS)})")


def label_of(sample: RawSample, num_classes: int | None = None) -> int:
    """Return a sample's class index. Raises DataError if it has none, or one outside 0 <= label < num_classes."""
    text = sample.get("cls")
    if text is None:
        raise _lacks(sample, "label (cls, with the class index)")
    try:
        label = int(text)
    except ValueError:
        raise DataError(f"{place(sample)}: label {text[:20]!r} is not a number; write the class index") from None
    if label < 0 or (num_classes is not None and label >= num_classes):
        known = "; labels start at 0" if num_classes is None else f" for {num_classes} classes; check both"
        raise DataError(f"{place(sample)}: label {label} is out of range{known}")
    return label


def decoded(sample: RawSample, num_classes: int | None, decode: Callable[[Any], Any]) -> tuple[Any, int]:
    """Decode a sample's image by `decode`, and return it with the label. Raises DataError, which names the sample."""
    label = label_of(sample, num_classes)
    data = sample[PIXELS] if PIXELS in sample else image_of(sample)
    try:
        image = decode(data)
    except DataError as error:
        raise DataError(f"{place(sample)}: {error}") from None
    warn_if_dark(data, image, place(sample))
    return image, label


def _lacks(sample: RawSample, what: str) -> DataError:
    members = [f"{sample['__key__']}.{name}" for name in sample if not name.startswith("__")]
    return DataError(
        f"{place(sample)}: no {what}, only {', '.join(members)[:300]}; the members of a sample must have one name "
        "up to its first dot and follow each other in the tar, as `tar --sort=name` puts them"
    )


def place(sample: RawSample) -> str:
    """Say where a sample lies, for messages; only "__url__" and "__key__" are used."""
    if os.path.isdir(sample["__url__"]):  # an image folder
        return f"image {os.path.join(sample['__url__'], sample['__key__'])}"
    return f"shard {sample['__url__']}, sample {sample['__key__']}"
