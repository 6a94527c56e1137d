"""Batches for training and evaluation from shards, shared out over processes and workers.

Sharing out needs no talk between workers. Shards are laid end to end on a line, each as long as its number of samples
(all alike where the numbers are unknown), and sample `j` of a shard sits at the fraction `j * golden ratio mod 1` of
its length. Each worker owns a stretch of the line and takes the samples in it. Stretches that do not overlap and cover
the line give every sample to exactly one worker, whether a worker owns many shards or a shard has many workers; the
golden ratio spreads any number of samples evenly.
"""

import itertools
import random

import numpy as np
import torch
import webdataset as wds
from torch.utils.data import default_collate, get_worker_info

from .images import DataError, decode_image
from .index import image_of, label_of, place, read_shard

_UNIT = 1 << 32
_GOLDEN = 2654435769  # 2**32 / golden ratio


def train_loader(
    shards,
    transform,
    *,
    batch_size,
    num_workers,
    rank=0,
    world_size=1,
    seed=0,
    repeats=1,
    shuffle_buffer=2048,
    num_classes=None,
    pin_memory=False,
):
    """Endless variety for training: each epoch a new order of shards and samples, fixed by (seed, epoch).

    An epoch has `num_samples // (batch_size * world_size)` batches on each rank. No sample comes twice in it, but for
    the few that a worker may borrow from the next epoch when its share comes out short. With `repeats`, an epoch takes
    one part in `repeats` of the samples, the next epoch the next part.

    Args:
        shards: ShardSet.
        transform: from a PIL image (RGB) to a float tensor (3, H, W).
        batch_size: samples per batch and rank.
        num_workers: worker processes of this rank; 0 reads in the caller's process.
        rank, world_size: this process and the number of processes that train together.
        seed: of the order, and (with workers) of the transform's random numbers.
        repeats: views of each image in an epoch (repeated augmentation): it is decoded once and transformed anew for
            each view, and the views follow each other in the batch (batch augmentation, arXiv 1901.09335).
        shuffle_buffer: undecoded samples that each worker holds to draw from. ImageNet's files take 110 kB each.
        num_classes: labels must be below it; default is that of the shards.
        pin_memory: as in torch's DataLoader.

    Returns:
        Loader: `set_epoch(e)`, `len()`, iterates over (images (B, 3, H, W), targets (B,) int64).

    Raises:
        DataError: if there is not one batch per rank; while iterating, naming shard and sample, if one cannot be used.
    """
    if shards.num_samples // (batch_size * world_size) == 0:
        raise DataError(
            f"{shards.num_samples} samples do not make one batch of {batch_size} on each of {world_size} processes; "
            "lower batch_size"
        )
    if repeats < 1:
        raise DataError(f"repeats={repeats}; it must be at least 1")
    stream = _TrainStream(shards, transform, batch_size, rank, world_size, num_classes)
    stream.seed, stream.repeats, stream.shuffle_buffer = seed, repeats, shuffle_buffer
    return Loader(stream, num_workers, pin_memory, stream.num_batches)


def eval_loader(
    shards, transform, *, batch_size, num_workers, rank=0, world_size=1, num_classes=None, pin_memory=False
):
    """Every sample exactly once over all ranks and workers, undisturbed by how many there are.

    Ranks may get different numbers of batches, even none, and the last batch of a worker may be short.

    Args:
        shards, transform, batch_size, num_workers, rank, world_size, num_classes, pin_memory: as in `train_loader`.

    Returns:
        Loader: iterates over (images (B, 3, H, W), targets (B,) int64); has no `len()`.

    Raises:
        DataError: while iterating, naming shard and sample, if a sample cannot be used.
    """
    return Loader(_EvalStream(shards, transform, batch_size, rank, world_size, num_classes), num_workers, pin_memory)


class Loader(wds.WebLoader):
    """A WebLoader, which accelerate leaves alone, that knows its epoch and raises workers' errors as they were."""

    def __init__(self, stream, num_workers, pin_memory, num_batches=None):
        super().__init__(
            stream,
            batch_size=None,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
        )
        self.stream = stream
        self.num_batches = num_batches

    def set_epoch(self, epoch):
        """Choose the order of the next pass; call it before iterating."""
        self.stream.epoch.fill_(epoch)

    def __len__(self):
        if self.num_batches is None:
            raise TypeError("the number of evaluation batches depends on the shards; count the samples instead")
        return self.num_batches

    def __iter__(self):
        for batch in super().__iter__():
            if isinstance(batch, DataError):
                # A new one: this frame would form a cycle with `batch`, and workers freed by the garbage collector
                # hear no call to end and are waited for, five seconds each.
                raise DataError(*batch.args)
            yield tuple(batch)


class _Stream(torch.utils.data.IterableDataset):
    """Batches of one worker."""

    def __init__(self, shards, transform, batch_size, rank, world_size, num_classes):
        self.shards = shards
        self.transform = transform
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.lengths = shards.samples_per_shard or [1] * len(shards.urls)
        self.num_classes = shards.num_classes if num_classes is None else num_classes
        # In shared memory: workers outlive an epoch, and must learn the number of the next one.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __iter__(self):
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        try:
            yield from self.batches(worker, num_workers)
        except DataError as error:
            # Raised here, torch would wrap it into a traceback of many lines.
            yield error

    def samples(self, order, start, stop):
        """Samples on the stretch [start, stop) of the line on which the shards lie in `order`."""
        end = 0
        for shard in order:
            length = self.lengths[shard]
            begin, end = end, end + length * _UNIT
            if end <= start or begin >= stop:
                continue
            count = 0
            for sample in read_shard(self.shards.urls[shard]):
                if start <= begin + length * (count * _GOLDEN % _UNIT) < stop:
                    yield sample
                count += 1
            expected = self.shards.samples_per_shard
            if expected is not None and count != expected[shard]:
                raise DataError(
                    f"shard {self.shards.urls[shard]} has {count} samples where the index says {expected[shard]}; make "
                    "or fetch it again, or index the folder anew"
                )

    def decode(self, sample):
        """(PIL image, label) of a raw sample."""
        label = label_of(sample, self.num_classes)
        data = image_of(sample)
        try:
            return decode_image(data), label
        except DataError as error:
            raise DataError(f"{place(sample)}: {error}") from None


class _EvalStream(_Stream):
    def batches(self, worker, num_workers):
        shares = self.world_size * num_workers
        share = self.rank * num_workers + worker
        line = sum(self.lengths) * _UNIT
        samples = self.samples(range(len(self.lengths)), line * share // shares, line * (share + 1) // shares)
        views = ((self.transform(image), label) for image, label in map(self.decode, samples))
        while batch := list(itertools.islice(views, self.batch_size)):
            yield default_collate(batch)


class _TrainStream(_Stream):
    @property
    def num_batches(self):
        return self.shards.num_samples // (self.batch_size * self.world_size)

    def batches(self, worker, num_workers):
        epoch = int(self.epoch)
        rng = random.Random(f"{self.seed} {epoch} {self.rank} {worker}")
        if get_worker_info():  # in the caller's own process its random state is not ours to set
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(rng.getrandbits(32))
        # The loader takes batches from the workers in turn, so the first ones may owe one more.
        owed = [len(range(w, self.num_batches, num_workers)) for w in range(num_workers)]
        first = self.rank * self.num_batches + sum(owed[:worker])
        # Decoding costs more than augmenting: each image is decoded once for all of its views.
        views = (
            (self.transform(image), label)
            for image, label in map(self.decode, self.shuffled(epoch, first, owed[worker], rng))
            for _ in range(self.repeats)
        )
        for _ in range(owed[worker]):
            yield default_collate(list(itertools.islice(views, self.batch_size)))

    def shuffled(self, epoch, first, owed, rng):
        """Endless samples for the batches [first, first + owed) of all ranks' batches, going on into later epochs.

        One order of shards serves `repeats` epochs, each of which takes the next part of every worker's stretch.
        """
        line = sum(self.lengths) * _UNIT
        parts = self.num_batches * self.world_size * self.repeats
        idle = 0
        while idle < 100:
            lap, part = divmod(epoch, self.repeats)
            order = list(range(len(self.lengths)))
            random.Random(f"{self.seed} {lap}").shuffle(order)
            start = first * self.repeats + owed * part
            samples = self.samples(order, line * start // parts, line * (start + owed) // parts)
            idle += 1
            for sample in wds.shuffle(self.shuffle_buffer, initial=self.shuffle_buffer // 4, rng=rng)(samples):
                idle = 0
                yield sample
            epoch += 1
        raise DataError(f"shard {self.shards.urls[0]} and its like hold no samples for a worker; use fewer workers")
