"""Raw samples: dicts of "__key__", "__url__" and the bytes of each file by its extension."""

import os
from pathlib import Path
from typing import Any

from vision_longhorn.errors import reason

from .images import EXTENSIONS, DataError

RawSample = dict[str, Any]
PIXELS = "__pixels__"  # key of a decoded image, (H, W, 3) uint8, that a sample has instead of the file


def nbytes(sample: RawSample) -> int:
    """Bytes of a sample's pixels and files."""
    sizes = (getattr(value, "nbytes", len(value)) for value in sample.values() if not isinstance(value, (str, Path)))
    return sum(sizes)


def image_of(sample: RawSample) -> bytes:
    """Bytes of a sample's image. Raises DataError if it has none, or its file cannot be read."""
    for extension in EXTENSIONS:
        if extension in sample:
            image = sample[extension]
            # Members of a shard are always bytes; only an `ImageFiles` gives a Path.
            if not isinstance(image, Path):
                return image
            try:
                return image.read_bytes()
            except OSError as error:
                raise DataError(f"{place(sample)} cannot be read ({reason(error)}); mend or remove it") from None
    raise DataError(f"{place(sample)}: no image ({', '.join(EXTENSIONS)}){_found_instead(sample)}")


def label_of(sample: RawSample, num_classes: int | None = None) -> int:
    """Class index of a sample. Raises DataError if it has none, or one outside 0 <= label < num_classes."""
    text = sample.get("cls")
    if text is None:
        raise DataError(f"{place(sample)}: no label (cls, with the class index){_found_instead(sample)}")
    try:
        label = int(text)
    except ValueError:
        raise DataError(f"{place(sample)}: label {text[:20]!r} is not a number; the class index is needed") from None
    if label < 0 or (num_classes is not None and label >= num_classes):
        known = "; labels start at 0" if num_classes is None else f" for {num_classes} classes; check both"
        raise DataError(f"{place(sample)}: label {label} is out of range{known}")
    return label


def _found_instead(sample: RawSample) -> str:
    """What a sample holds that lacks its image or label, for a message."""
    members = [f"{sample['__key__']}.{name}" for name in sample if not name.startswith("__")]
    shown = [name if len(name) <= 60 else f"...{name[-57:]}" for name in members[:5]] + ["..."] * (len(members) > 5)
    return (
        f", only {', '.join(shown)}; the members of a sample have one name up to its first dot and follow each other "
        "in the tar, as `tar --sort=name` puts them"
    )


def place(sample: RawSample) -> str:
    """Where a sample lies, for messages; only "__url__" and "__key__" are used."""
    if os.path.isdir(sample["__url__"]):  # an image folder
        return f"image {os.path.join(sample['__url__'], sample['__key__'])}"
    return f"shard {sample['__url__']}, sample {sample['__key__']}"
