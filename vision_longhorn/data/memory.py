"""Keeps decoded images in memory, for data that fit there: passes over them read no file and decode nothing."""

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil

from .images import EXTENSIONS, DataError, decode_tensor, warn_if_dark
from .places import ShardSet
from .samples import PIXELS, RawSample, image_of, nbytes, place

_GIB = 2**30


def keep_in_memory(shards: ShardSet, num_workers: int = 0) -> ShardSet:
    """Decode all images and keep them, three bytes a pixel. Passes over the result give the same samples, to the bit.

    Images that cannot be decoded stay files, so each pass raises their errors. Pictures with a colour profile stay
    files, since the crop decides whether it is applied before or after resampling. A shard that cannot be read to its
    end is not kept: each pass reads it again. On Linux a loader's workers share the pixels; elsewhere each has a copy.

    Args:
        shards: the result of `open_shards`.
        num_workers: threads that decode; 0 decodes in the caller's thread.

    Raises:
        DataError: if the images would not fit.
    """
    if shards.kept is not None:
        return shards

    def decoded(number: int) -> list[RawSample] | None:
        try:
            return [_with_pixels(sample) for sample in shards.read(number)]
        except DataError:
            return None

    lengths = shards.samples_per_shard or [1] * len(shards.urls)
    kept: list[list[RawSample] | None] = []
    size = done = 0
    pool = ThreadPoolExecutor(max(num_workers, 1))  # decoders release the interpreter's lock
    try:
        for samples in (pool.map if num_workers else map)(decoded, range(len(shards.urls))):
            done += lengths[len(kept)]
            kept.append(samples)
            size += sum(map(nbytes, samples or ()))
            whole, free = size / max(done, 1) * sum(lengths), psutil.virtual_memory().available
            # The first images say little about the sizes of the others. A later refusal still finds memory free.
            if whole - size > free * (4 if done < 1000 else 1.1):
                raise DataError(
                    f"keep_in_memory: the images of {shards.split or 'these shards'} would take about "
                    f"{whole / _GIB:.1f} GiB, but only {free / _GIB:.1f} GiB are free; set keep_in_memory to false"
                )
    finally:
        pool.shutdown(cancel_futures=True)
    return dataclasses.replace(shards, kept=kept)


def _with_pixels(sample: RawSample) -> RawSample:
    """Replace the image file of a sample by its pixels. A sample that no loader can use, or with a colour profile,
    keeps the file's bytes. Members that no loader reads lose their contents."""
    try:
        data = image_of(sample)
    except DataError:  # it has no image, or one that cannot be read: the pass that needs it raises the error
        return sample
    wanted: RawSample = {name: sample[name] for name in ("__key__", "__url__", "cls") if name in sample}
    with contextlib.suppress(DataError):
        image, correct = decode_tensor(data)
        if correct is None and "cls" in sample:
            warn_if_dark(data, image, place(sample))
            return {**wanted, PIXELS: np.array(image.permute(1, 2, 0).numpy(), order="C")}
    kind = next(extension for extension in EXTENSIONS if extension in sample)
    return {**dict.fromkeys(sample, b""), **wanted, kind: data}
