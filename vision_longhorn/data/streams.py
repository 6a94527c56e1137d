"""One worker's samples as batches: which samples it takes, in which order, and what happens to bad ones.

Workers divide the samples among themselves without communicating. Shards lie end to end on a line, each as long as its
number of samples (all of length 1 where the numbers are unknown), and sample `j` of a shard sits at the fraction
`j * golden ratio mod 1` of its length. Each worker owns a stretch of the line and takes the samples in it. The
stretches cover the line and do not overlap, so each sample has exactly one worker, whether a worker owns many shards or
a shard has many workers. The golden ratio spreads any number of samples evenly.
"""

import collections
import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import webdataset as wds
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from .images import DataError, decode_image
from .places import ShardSet
from .samples import RawSample, decoded
from .sharing import SharedMemory

_UNIT = 1 << 32
_GOLDEN = 2654435769  # 2**32 / golden ratio

Batch = tuple[Any, ...]  # inputs, targets (B,) int64 and, with `keys`, a list of B places (shard, key)


@dataclasses.dataclass
class Faults:
    """Counts the samples that one pass skips, up to a limit."""

    limit: int = 0
    remedy: str = ""  # what to add to the error where the limit is 0
    count: int = 0
    notes: list[tuple[str, int]] = dataclasses.field(default_factory=list)  # text, number of samples lost

    def add(self, note: DataError | str, count: int = 1) -> None:
        """Note that `count` samples are lost. Raises DataError above the limit; where it is 0, for any note."""
        self.count += count
        if self.limit == 0:
            raise DataError(f"{note}{self.remedy}")
        if self.count > self.limit:
            raise DataError(
                f"{self.count} samples cannot be used, and max_bad_samples allows {self.limit} in an epoch; the last: "
                f"{note}"
            )
        if count:
            self.notes.append((str(note), count))


@dataclasses.dataclass
class Report:
    """What a worker reports with a batch. It is not a tuple, in which torch would look for tensors to pin."""

    notes: list[tuple[str, int]]  # those of `Faults` since the last report
    places: list[tuple[str, str]]  # shard and key of each sample in the batch, if they are wanted


def to_arrays(value: Any) -> Any:
    """Turn the small tensors of a batch into arrays, which are pickled. A tensor would go through shared memory, for
    which the receiver connects to the worker. `to_tensors` undoes this."""
    if isinstance(value, list):
        return [to_arrays(part) for part in value]
    is_small = isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.float64) and value.nbytes < 2**16
    return value.numpy() if is_small else value


def to_tensors(value: Any) -> Any:
    """Turn arrays back into the tensors that were given to `to_arrays`."""
    if isinstance(value, list):
        return [to_tensors(part) for part in value]
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


class Stream(IterableDataset):
    """The batches of one worker."""

    def __init__(
        self, shards: ShardSet, transform: Callable[[Any], Any], batch_size: int, rank: int, world_size: int, keys: bool
    ) -> None:
        self.shards, self.transform, self.batch_size, self.keys = shards, transform, batch_size, keys
        self.rank, self.world_size = rank, world_size
        self.lengths = shards.samples_per_shard or [1] * len(shards.urls)
        self.decode_image = getattr(transform, "decode", decode_image)
        self.faults = Faults()
        self.memory = SharedMemory(is_pinned=False)
        # In shared memory, because workers outlive an epoch and must learn the number of the next one.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self.start = torch.zeros((), dtype=torch.int64).share_memory_()  # number of the first batch to make

    def batches(self, worker: int, num_workers: int) -> Iterator[Batch]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[Batch | DataError, Report]]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        self.faults = Faults(self.faults.limit, self.faults.remedy)

        def report(places: list[tuple[str, str]]) -> Report:
            found, self.faults.notes = Report(self.faults.notes, places), []
            return found

        try:
            for inputs, targets, *places in self.batches(worker, num_workers):
                yield (to_arrays(inputs), to_arrays(targets)), report(*places or [[]])
        except DataError as error:
            # If it were raised here, torch would wrap it in a traceback of many lines. It is the answer to all later
            # requests, too: torch would pass them on to other workers, whose memory may still be in use.
            while True:
                yield error, report([])

    def samples(self, order: Iterable[int], start: int, stop: int) -> Iterator[RawSample]:
        """Yield the samples in the stretch [start, stop) of the line on which the shards lie in `order`."""
        indexed, end = self.shards.samples_per_shard is not None, 0
        for shard in order:
            length = self.lengths[shard]
            begin, end = end, end + length * _UNIT
            if end <= start or begin >= stop:
                continue
            count = 0

            def mine(number: int, begin: int = begin, length: int = length) -> bool:
                return start <= begin + length * (number * _GOLDEN % _UNIT) < stop

            try:
                for sample in self.shards.read(shard):
                    if mine(count):
                        yield sample
                    count += 1
                if indexed and count != length:
                    raise DataError(
                        f"shard {self.shards.urls[shard]} has {count} samples where the index says {length}; make "
                        "or fetch it again, or index the folder again"
                    )
            except DataError as error:
                # Each worker counts those lost samples that are its own. Without an index their number is unknown.
                self.faults.add(error, sum(map(mine, range(count, length))) if indexed and count < length else 1)

    def views(self, samples: Iterable[RawSample], repeats: int = 1) -> Iterator[tuple[Any, int, tuple[str, str]]]:
        """Yield (transformed image, label, place), `repeats` times for each sample. The next good sample also takes the
        views of a bad one, so view `n` always belongs to sample `n // repeats` or the first good one after it."""
        wanted = 0
        for sample in samples:
            wanted += repeats
            try:
                image, label = decoded(sample, self.shards.num_classes, self.decode_image)
            except DataError as error:
                self.faults.add(error)
                continue
            for _ in range(wanted):
                yield self.transform(image), label, (sample["__url__"], sample["__key__"])
            wanted = 0

    def collated(self, views: list[tuple[Any, int, tuple[str, str]]]) -> Batch:
        inputs, labels, places = map(list, zip(*views, strict=True))
        own = getattr(self.transform, "collate", None)
        batch = own(inputs, self.memory) if own else default_collate(inputs), default_collate(labels)
        return (*batch, places) if self.keys else batch


class EvalStream(Stream):
    """Batches of an evaluation, in which each sample comes once."""

    def batches(self, worker: int, num_workers: int) -> Iterator[Batch]:
        shares = self.world_size * num_workers
        share = self.rank * num_workers + worker
        line = sum(self.lengths) * _UNIT
        samples = self.samples(range(len(self.lengths)), line * share // shares, line * (share + 1) // shares)
        views = self.views(samples)
        while batch := list(itertools.islice(views, self.batch_size)):
            yield self.collated(batch)


class TrainStream(Stream):
    """An epoch of full batches, in the order that `train_loader` fixes."""

    def __init__(self, *args: Any, seed: int, repeats: int, shuffle_buffer: int) -> None:
        super().__init__(*args)
        self.seed, self.repeats, self.shuffle_buffer = seed, repeats, shuffle_buffer

    @property
    def num_batches(self) -> int:
        return self.shards.num_samples // (self.batch_size * self.world_size)

    def batches(self, worker: int, num_workers: int) -> Iterator[Batch]:
        epoch, start = int(self.epoch), int(self.start)
        # torch takes batches from the workers in turn, beginning with worker 0. So worker 0 acts as the one whose turn
        # it is at batch `start`.
        worker = (worker + start) % num_workers
        samples = self.samples_of_worker(epoch, worker, num_workers)
        # Samples of the batches before `start` are read again, to keep the order, but not decoded.
        taken = len(range(worker, start, num_workers))
        images, views_of_next = divmod(taken * self.batch_size, self.repeats)
        views = self.views(itertools.islice(samples, images, None), self.repeats)
        with _random_state(0):
            collections.deque(itertools.islice(views, views_of_next), maxlen=0)
        for batch in range(worker, self.num_batches, num_workers)[taken:]:
            with _random_state(f"{self.seed} {epoch} {self.rank} {batch}"):
                collated = self.collated(list(itertools.islice(views, self.batch_size)))
            yield collated

    def samples_of_worker(self, epoch: int, worker: int, num_workers: int) -> Iterator[RawSample]:
        """Yield the raw samples of the worker's share of the epoch, then of the epochs after it, without end. One order
        of shards serves `repeats` epochs, each of which takes the next part of every worker's stretch. Raises DataError
        if 100 epochs in a row have no sample."""
        owed = [len(range(w, self.num_batches, num_workers)) for w in range(num_workers)]
        first = self.rank * self.num_batches + sum(owed[:worker])  # among the batches of all ranks
        rng = random.Random(f"{self.seed} {epoch} {self.rank} {worker}")
        line = sum(self.lengths) * _UNIT
        parts = self.num_batches * self.world_size * self.repeats
        idle = 0
        while idle < 100:
            lap, part = divmod(epoch, self.repeats)
            order = list(range(len(self.lengths)))
            random.Random(f"{self.seed} {lap}").shuffle(order)
            start = first * self.repeats + owed[worker] * part
            samples = self.samples(order, line * start // parts, line * (start + owed[worker]) // parts)
            idle += 1
            for sample in wds.shuffle(self.shuffle_buffer, initial=self.shuffle_buffer // 4, rng=rng)(samples):
                idle = 0
                yield sample
            epoch += 1
        raise DataError(f"shard {self.shards.urls[0]} and the others hold no samples for a worker; use fewer workers")


@contextlib.contextmanager
def _random_state(seed: int | str) -> Iterator[None]:
    """Seed the global generators within this context, and restore their states after it."""
    before, numpys = random.getstate(), np.random.get_state()
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        random.seed(rng.getrandbits(32))
        np.random.seed(rng.getrandbits(32))
        torch.default_generator.manual_seed(rng.getrandbits(32))  # torch.manual_seed() would reseed the GPUs as well
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(numpys)
