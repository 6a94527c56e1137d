"""Raw samples: dicts of "__key__", "__url__" and the bytes of each file by its extension."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vision_longhorn.errors import reason

from .images import EXTENSIONS, DataError

RawSample = dict[str, Any]
PIXELS = "__pixels__"  # key of a decoded image, (H, W, 3) uint8, that a sample has instead of the file
UTF8 = "utf-8", "surrogatepass"  # encodes every str, so that it can be decoded again


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """The decoded samples of one shard, made by `keep_in_memory`.

    They are arrays because workers would copy lists: going through a list writes to each object's reference count.

    Attributes:
        url: their `__url__`.
        keys, labels: bytes arrays (N,), `__key__` and `cls` of each.
        sizes: int64 array (N, 2), height and width.
        pixels: uint8 array, all images one after the other, each (height, width, 3).
        others: by their numbers, samples whose image stays a file; they have size 0 above.
    """

    url: str
    keys: np.ndarray
    labels: np.ndarray
    sizes: np.ndarray
    pixels: np.ndarray
    others: dict[int, RawSample]

    @property
    def nbytes(self) -> int:
        """Bytes of the images."""
        files = (value for sample in self.others.values() for value in sample.values() if isinstance(value, bytes))
        return self.pixels.nbytes + sum(map(len, files))

    def samples(self) -> Iterator[RawSample]:
        """Yields the samples as `tars.read_shard` does, with pixels instead of the image's bytes."""
        stop = 0
        for number, (height, width) in enumerate(self.sizes.tolist()):
            start, stop = stop, stop + 3 * height * width
            if number in self.others:
                yield self.others[number]
                continue
            yield {
                "__key__": self.keys[number].decode(*UTF8),
                "__url__": self.url,
                PIXELS: self.pixels[start:stop].reshape(height, width, 3),
                "cls": self.labels[number],
            }


def image_of(sample: RawSample) -> bytes:
    """Bytes of a sample's image.

    Raises:
        DataError: if it has none, or its file cannot be read.
    """
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
    """For the message about a sample without a member of the `wanted` endings: which it has, and what to do."""
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
    """Where a sample lies, for messages; only "__url__" and "__key__" are used."""
    if os.path.isdir(sample["__url__"]):  # an image folder
        return f"image {os.path.join(sample['__url__'], sample['__key__'])}"
    return f"shard {sample['__url__']}, sample {sample['__key__']}"
