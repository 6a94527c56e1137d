"""The samples of one worker as batches: which they are, in which order, and what becomes of those that are bad.

Sharing out needs no talk between workers. Shards are laid end to end on a line, each as long as its number of samples
(all alike where the numbers are unknown), and sample `j` of a shard sits at the fraction `j * golden ratio mod 1` of
its length. Each worker owns a stretch of the line and takes the samples in it. Stretches that do not overlap and cover
the line give every sample to exactly one worker, whether a worker owns many shards or a shard has many workers; the
golden ratio spreads any number of samples evenly.
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

from .images import DataError, decode_image, too_dark
from .index import ShardSet
from .samples import PIXELS, RawSample, image_of, label_of, place

_UNIT = 1 << 32
_GOLDEN = 2654435769  # 2**32 / golden ratio

Batch = tuple[Any, ...]  # inputs, targets (B,) int64 and, where they are wanted, a list of B places (shard, key)


class Faults:
    """What was skipped in one pass, and how much of it is too much.

    Args:
        limit: Samples that may be skipped.
        remedy: What to say where that is none, and one cannot be used.
    """

    def __init__(self, limit: int = 0, remedy: str = "") -> None:
        self.limit, self.remedy = limit, remedy
        self.count = 0
        self.notes: list[tuple[str, int]] = []

    def add(self, note: DataError | str, count: int = 1) -> None:
        """Raises DataError where `note` (an error, or its text) is one too many."""
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

    def take(self) -> list[tuple[str, int]]:
        """The notes since the last call."""
        notes, self.notes = self.notes, []
        return notes


@dataclasses.dataclass
class News:
    """What a worker tells with a batch. Pinning memory would go through tuples and lists, string by string."""

    skipped: list[tuple[str, int]]  # since its last batch
    counts: dict[int, int]  # samples in each shard that it has read to its end since then
    dry: int | None  # its number, where it could not fill its batches from its share of the epoch
    places: list[tuple[str, str]]  # shard and key of each sample in the batch, where they are wanted
    note: str  # about a sample that is used, once


def light(value: Any) -> Any:
    """Small tensors, among those of a batch, as arrays: each tensor that a worker sends in shared memory costs the
    receiver a connection to that worker. `heavy` undoes it."""
    if isinstance(value, list):
        return [light(part) for part in value]
    is_small = isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.float64) and value.nbytes < 2**16
    return value.numpy() if is_small else value


def heavy(value: Any) -> Any:
    """What was given to `light`."""
    if isinstance(value, list):
        return [heavy(part) for part in value]
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


class Stream(IterableDataset):
    """Batches of one worker."""

    def __init__(
        self,
        shards: ShardSet,
        transform: Callable[[Any], Any] | None,
        batch_size: int,
        rank: int,
        world_size: int,
        num_classes: int | None,
        keys: bool,
    ) -> None:
        self.shards = shards
        self.transform: Any = transform
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.keys = keys
        self.lengths = shards.samples_per_shard or [1] * len(shards.urls)
        self.num_classes = shards.num_classes if num_classes is None else num_classes
        self.decode_image = getattr(transform, "decode", decode_image)
        self.faults = Faults()
        self.counts: dict[int, int] = {}  # samples in each shard that was read to its end
        self.dry = False
        self.note: str | None = None  # "" once it was told
        # In shared memory: workers outlive an epoch, and must learn the number of the next one.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self.start = torch.zeros((), dtype=torch.int64).share_memory_()  # batches of the epoch that were taken before

    def batches(self, worker: int, num_workers: int) -> Iterator[Batch]:
        """Those that a worker makes."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[Batch | DataError, News]]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        self.faults, self.counts, self.dry = Faults(self.faults.limit, self.faults.remedy), {}, False

        def news(places: list[tuple[str, str]]) -> News:
            counts, self.counts = self.counts, {}
            note, self.note = self.note or "", "" if self.note else self.note
            return News(self.faults.take(), counts, worker if self.dry else None, places, note)

        try:
            for inputs, targets, *places in self.batches(worker, num_workers):
                inputs, targets = light(inputs), light(targets)
                yield (inputs, targets), news(*places or [[]])
        except DataError as error:
            # Raised here, torch would wrap it into a traceback of many lines.
            yield error, news([])

    def samples(self, order: Iterable[int], start: int, stop: int) -> Iterator[RawSample]:
        """Samples on the stretch [start, stop) of the line on which the shards lie in `order`."""
        end = 0
        for shard in order:
            length = self.lengths[shard]
            begin, end = end, end + length * _UNIT
            if end <= start or begin >= stop:
                continue
            count = 0
            expected = self.shards.samples_per_shard[shard] if self.shards.samples_per_shard else None

            def mine(number: int, begin: int = begin, length: int = length) -> bool:
                return start <= begin + length * (number * _GOLDEN % _UNIT) < stop

            try:
                for sample in self.shards.read(shard):
                    if mine(count):
                        yield sample
                    count += 1
                if expected is not None and count != expected:
                    raise DataError(
                        f"shard {self.shards.urls[shard]} has {count} samples where the index says {expected}; make "
                        "or fetch it again, or index the folder anew"
                    )
                if expected is None:
                    self.counts[shard] = count
            except DataError as error:
                # Each lost sample has one owner. Without an index nobody knows how many there are.
                lost = 1 if expected is None or count >= expected else sum(map(mine, range(count, expected)))
                self.faults.add(error, lost)

    def decode(self, sample: RawSample) -> tuple[Any, int]:
        """(PIL image, label) of a raw sample."""
        label = label_of(sample, self.num_classes)
        data = sample[PIXELS] if PIXELS in sample else image_of(sample)
        try:
            image = self.decode_image(data)
            if self.note is None and (dark := too_dark(data, image)):
                self.note = f"{place(sample)}: {dark}"
            return image, label
        except DataError as error:
            raise DataError(f"{place(sample)}: {error}") from None

    def decoded(self, samples: Iterable[RawSample], repeats: int) -> Iterator[tuple[RawSample, Any, int, int]]:
        """(sample, PIL image, label, number of views) of each raw sample that is not bad.

        The views of a sample that is skipped are filled with the next one's, so that view `n` is always one of raw
        sample `n // repeats` or, where that is bad, of the first good one after it.
        """
        wanted = 0
        for sample in samples:
            wanted += repeats
            try:
                image, label = self.decode(sample)
            except DataError as error:
                self.faults.add(error)
                continue
            yield sample, image, label, wanted
            wanted = 0

    def views(self, samples: Iterable[RawSample], repeats: int = 1) -> Iterator[tuple[Any, int, tuple[str, str]]]:
        """(transformed image, label, place), `repeats` times for each sample: decoding costs more than augmenting."""
        for sample, image, label, count in self.decoded(samples, repeats):
            for _ in range(count):
                yield self.transform(image), label, (sample["__url__"], sample["__key__"])

    def collated(self, views: list[tuple[Any, int, tuple[str, str]]]) -> Batch:
        batch = default_collate([(inputs, label) for inputs, label, _ in views])
        return (*batch, [place for *_, place in views]) if self.keys else tuple(batch)


class EvalStream(Stream):
    """Each sample once."""

    def batches(self, worker: int, num_workers: int) -> Iterator[Batch]:
        shares = self.world_size * num_workers
        share = self.rank * num_workers + worker
        line = sum(self.lengths) * _UNIT
        samples = self.samples(range(len(self.lengths)), line * share // shares, line * (share + 1) // shares)
        views = self.views(samples)
        while batch := list(itertools.islice(views, self.batch_size)):
            yield self.collated(batch)


class TrainStream(Stream):
    """An epoch of full batches, in an order that follows from seed and epoch."""

    def __init__(self, *args: Any, seed: int, repeats: int, shuffle_buffer: int) -> None:
        super().__init__(*args)
        self.seed, self.repeats, self.shuffle_buffer = seed, repeats, shuffle_buffer

    @property
    def num_batches(self) -> int:
        return self.shards.num_samples // (self.batch_size * self.world_size)

    def batches(self, worker: int, num_workers: int) -> Iterator[Batch]:
        epoch, start = int(self.epoch), int(self.start)
        # The loader takes batches from the workers in turn, from the first on: here every one of them stands for the
        # worker that would be next. The first of those may owe one more.
        worker = (worker + start) % num_workers
        samples = self.samples_of_worker(epoch, worker, num_workers)
        # What was taken before is read again, for the order's sake, but not decoded.
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
        """Endless raw samples of an epoch, in the order in which a worker takes them."""
        owed = [len(range(w, self.num_batches, num_workers)) for w in range(num_workers)]
        first = self.rank * self.num_batches + sum(owed[:worker])
        rng = random.Random(f"{self.seed} {epoch} {self.rank} {worker}")
        return self.shuffled(epoch, first, owed[worker], rng)

    def shuffled(self, epoch: int, first: int, owed: int, rng: random.Random) -> Iterator[RawSample]:
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
            self.dry = True
            epoch += 1
        raise DataError(f"shard {self.shards.urls[0]} and its like hold no samples for a worker; use fewer workers")


@contextlib.contextmanager
def _random_state(seed: int | str) -> Iterator[None]:
    """Draws from the global generators that follow from `seed` alone, and leaves those as they were."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    rng = random.Random(seed)
    random.seed(rng.getrandbits(32))
    np.random.seed(rng.getrandbits(32))
    torch.default_generator.manual_seed(rng.getrandbits(32))  # torch.manual_seed() would reseed the GPUs as well
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])
