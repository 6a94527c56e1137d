"""Decoded images in memory, for data that fit there: passes over them read no file and decode nothing."""

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
from torch.utils.data import DataLoader, Dataset

from vision_longhorn.errors import one_line
from vision_longhorn.signals import outlive_signals

from .images import EXTENSIONS, DataError, decode_tensor, too_dark
from .index import ShardSet
from .samples import PIXELS, RawSample, image_of, place

_log = logging.getLogger(__name__)
_GIB = 2**30
_UTF8 = "utf-8", "surrogatepass"  # gives back every str


def keep_in_memory(shards: ShardSet, num_workers: int = 0) -> ShardSet:
    """Decode all images and keep them, three bytes a pixel. Passes over the result give the same samples, to the bit.

    What cannot be decoded stays as it is, with its error. So do pictures with a colour profile, which is applied where
    there are fewer pixels, before or after resampling. A shard that cannot be read to its end is not kept: the next
    pass reads it again. On Linux a loader's workers share that memory; elsewhere each has its own copy.

    Args:
        shards: what `open_shards` found.
        num_workers: processes that decode, for this call; 0 decodes in the caller's.

    Returns:
        the same shards, for `train_loader` with a transform of PIL images or of `split_transform`, and for
        `eval_loader`.

    Raises:
        DataError: where the images would not fit, or a process that decodes them dies.
    """
    if shards.kept is not None:
        return shards
    count = len(shards.urls)
    lengths = shards.samples_per_shard or [1] * count
    kept: list[Kept | None] = []
    size = done = 0
    try:
        for one in _decoded(shards, min(num_workers, count)):
            done += lengths[len(kept)]
            if one and one.note and not any(before and before.note for before in kept):
                _log.warning("%s", one.note)
            kept.append(one)
            size += one.nbytes if one else 0
            whole, free = size / max(done, 1) * sum(lengths), psutil.virtual_memory().available
            # A few images tell little of the others' sizes. What is refused late still leaves some memory free.
            if whole - size > free * (4 if done < 1000 else 1.1):
                raise DataError(
                    f"keep_in_memory: the images of {shards.split or 'these shards'} would take about "
                    f"{whole / _GIB:.1f} GiB, and {free / _GIB:.1f} are left; leave it out, or give "
                    "--keep-in-memory false"
                )
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise DataError(
            f"keep_in_memory: a process that decodes images died, perhaps for want of memory ({one_line(error)})"
        ) from None
    return dataclasses.replace(shards, kept=kept)


def _decoded(shards: ShardSet, num_workers: int) -> Iterator["Kept | None"]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # the trainer's loaders say it, once
        found = iter(
            DataLoader(
                _ToDecode(shards),
                batch_size=None,
                num_workers=num_workers,
                collate_fn=_as_it_is,
                worker_init_fn=_start,
            )
        )
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """The samples of a shard. Arrays, and no lists: workers would copy lists as soon as they go through them.

    Attributes:
        url: their `__url__`.
        keys, labels: bytes arrays (N,), `__key__` and `cls` of each.
        sizes: int64 array (N, 2), height and width.
        pixels: uint8 array, all images one after the other, each (height, width, 3).
        others: by their numbers, samples that stay as they are; they have size 0 above.
        note: a line about one of them, or "".
    """

    url: str
    keys: np.ndarray
    labels: np.ndarray
    sizes: np.ndarray
    pixels: np.ndarray
    others: dict[int, RawSample]
    note: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the images."""
        files = (value for sample in self.others.values() for value in sample.values() if isinstance(value, bytes))
        return self.pixels.nbytes + sum(map(len, files))

    def samples(self) -> Iterator[RawSample]:
        """Yields what `tars.read_shard` does, with pixels in the place of the image's bytes."""
        stop = 0
        for number, (height, width) in enumerate(self.sizes.tolist()):
            start, stop = stop, stop + 3 * height * width
            if number in self.others:
                yield self.others[number]
                continue
            yield {
                "__key__": self.keys[number].decode(*_UTF8),
                "__url__": self.url,
                PIXELS: self.pixels[start:stop].reshape(height, width, 3),
                "cls": self.labels[number],
            }


class _ToDecode(Dataset):
    """The shards of a set, each as what is to be kept of it; None for one that cannot be read to its end."""

    def __init__(self, shards: ShardSet) -> None:
        self.shards = shards

    def __len__(self) -> int:
        return len(self.shards.urls)

    def __getitem__(self, number: int) -> Kept | None:
        if number >= len(self):
            raise IndexError(number)
        url = note = ""
        keys: list[bytes] = []
        labels: list[bytes] = []
        images: list[np.ndarray] = []
        others: dict[int, RawSample] = {}
        try:
            for sample in self.shards.read(number):
                pixels, dark = _pixels(sample)
                note = note or dark
                if pixels is None:
                    others[len(keys)] = _as_bytes(sample)
                url = sample["__url__"]
                keys.append(sample["__key__"].encode(*_UTF8))
                labels.append(b"" if pixels is None else sample["cls"])
                images.append(np.empty((0, 0, 3), np.uint8) if pixels is None else pixels)
        except DataError:
            return None
        sizes = np.array([image.shape[:2] for image in images], np.int64).reshape(-1, 2)
        pixels = np.concatenate([image.ravel() for image in images]) if images else np.empty(0, np.uint8)
        return Kept(url, np.array(keys), np.array(labels), sizes, pixels, others, note)


def _pixels(sample: RawSample) -> tuple[np.ndarray | None, str]:
    """Pixels of a sample's image, None where it is to stay as it is; and a line about it, or ""."""
    with contextlib.suppress(DataError):
        data = image_of(sample)
        image, correct = decode_tensor(data)
        # An array of bytes would lose a zero at a label's end.
        if correct is None and "cls" in sample and not sample["cls"].endswith(b"\0"):
            dark = too_dark(data, image)
            return image.permute(1, 2, 0).numpy(), f"{place(sample)}: {dark}" if dark else ""
    return None, ""


def _as_bytes(sample: RawSample) -> RawSample:
    """A sample with the names alone of what no loader reads, and with the bytes of its image in the place of a path."""
    kind = next((extension for extension in EXTENSIONS if extension in sample), None)
    if kind is None:
        return sample
    read = ("__key__", "__url__", "cls", kind)
    less = {name: value if name in read else b"" for name, value in sample.items()}
    with contextlib.suppress(DataError):  # a file that cannot be read is told of when it is asked for
        less[kind] = image_of(sample)
    return less


def _start(number: int) -> None:
    """For the processes that decode: they end with the caller's, however that ends. What they send may fill a pipe,
    whose other end they hold open for each other."""
    outlive_signals(number)
    parent = multiprocessing.parent_process()

    def end() -> None:
        if parent is not None:
            parent.join()
            os._exit(0)

    threading.Thread(target=end, daemon=True).start()


def _as_it_is(kept: Any) -> Any:
    return kept
