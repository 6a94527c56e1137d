"""Decoded images in memory, for data that fit there: passes over them read no file and decode nothing."""

import contextlib
import dataclasses
import logging
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil

from .images import EXTENSIONS, DataError, decode_tensor, too_dark
from .places import ShardSet
from .samples import UTF8, Kept, RawSample, image_of, place

_log = logging.getLogger(__name__)
_GIB = 2**30


def keep_in_memory(shards: ShardSet, num_workers: int = 0) -> ShardSet:
    """Decode all images and keep them, three bytes a pixel. Passes over the result give the same samples, to the bit.

    Images that do not decode stay files, with their errors. So do pictures with a colour profile: whether it is applied
    before or after resampling depends on the crop. A shard that cannot be read to its end is not kept: each pass reads
    it again. On Linux a loader's workers share the memory; elsewhere each has its own copy.

    Args:
        shards: the result of `open_shards`.
        num_workers: threads that decode; 0 decodes in the caller's.

    Returns:
        the same shards, for `train_loader` with a transform of PIL images or of `split_transform`, and for
        `eval_loader`.

    Raises:
        DataError: if the images would not fit.
    """
    if shards.kept is not None:
        return shards
    lengths = shards.samples_per_shard or [1] * len(shards.urls)
    kept: list[Kept | None] = []
    size = done = 0
    has_warned = False
    with contextlib.closing(_decoded(shards, num_workers)) as found:
        for one, dark in found:
            if dark and not has_warned:
                has_warned = True
                _log.warning("%s", dark)
            done += lengths[len(kept)]
            kept.append(one)
            size += one.nbytes if one else 0
            whole, free = size / max(done, 1) * sum(lengths), psutil.virtual_memory().available
            # The first images say little about the sizes of the others. A late refusal still leaves some memory free.
            if whole - size > free * (4 if done < 1000 else 1.1):
                raise DataError(
                    f"keep_in_memory: the images of {shards.split or 'these shards'} would take about "
                    f"{whole / _GIB:.1f} GiB, and {free / _GIB:.1f} are left; set keep_in_memory to false"
                )
    return dataclasses.replace(shards, kept=kept)


def _decoded(shards: ShardSet, num_workers: int) -> Generator[tuple[Kept | None, str], None, None]:
    """Yields `_decode_shard` of each shard, in order."""
    numbers = range(len(shards.urls))
    if not num_workers:
        yield from (_decode_shard(shards, number) for number in numbers)
        return
    pool = ThreadPoolExecutor(num_workers)  # decoders release the interpreter's lock
    try:
        yield from pool.map(lambda number: _decode_shard(shards, number), numbers)
    finally:
        pool.shutdown(cancel_futures=True)


def _decode_shard(shards: ShardSet, number: int) -> tuple[Kept | None, str]:
    """(the samples of a shard, None if it cannot be read to its end; a warning about one of its images, or "")."""
    url = warning = ""
    keys: list[bytes] = []
    labels: list[bytes] = []
    images: list[np.ndarray] = []
    others: dict[int, RawSample] = {}
    try:
        for sample in shards.read(number):
            pixels, dark = _pixels(sample)
            warning = warning or dark
            if pixels is None:
                others[len(keys)] = _as_bytes(sample)
            url = sample["__url__"]
            keys.append(sample["__key__"].encode(*UTF8))
            labels.append(b"" if pixels is None else sample["cls"])
            images.append(np.empty((0, 0, 3), np.uint8) if pixels is None else pixels)
    except DataError:
        return None, ""
    sizes = np.array([image.shape[:2] for image in images], np.int64).reshape(-1, 2)
    joined = np.concatenate([image.ravel() for image in images]) if images else np.empty(0, np.uint8)
    return Kept(url, np.array(keys), np.array(labels), sizes, joined, others), warning


def _pixels(sample: RawSample) -> tuple[np.ndarray | None, str]:
    """(pixels of a sample's image, None where it stays a file; a warning about the image, or "")."""
    with contextlib.suppress(DataError):
        data = image_of(sample)
        image, correct = decode_tensor(data)
        # An array of bytes would lose a zero at a label's end.
        if correct is None and "cls" in sample and not sample["cls"].endswith(b"\0"):
            dark = too_dark(data, image)
            return image.permute(1, 2, 0).numpy(), f"{place(sample)}: {dark}" if dark else ""
    return None, ""


def _as_bytes(sample: RawSample) -> RawSample:
    """A sample with its image as bytes, not as a path, and without the contents that no loader reads."""
    kind = next((extension for extension in EXTENSIONS if extension in sample), None)
    if kind is None:
        return sample
    read = ("__key__", "__url__", "cls", kind)
    less = {name: value if name in read else b"" for name, value in sample.items()}
    with contextlib.suppress(DataError):  # a file that cannot be read is an error of the pass that wants it
        less[kind] = image_of(sample)
    return less
