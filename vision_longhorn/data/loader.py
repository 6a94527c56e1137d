"""Batches for training and evaluation from shards, shared out over processes and workers.

Sharing out needs no talk between workers. Shards are laid end to end on a line, each as long as its number of samples
(all alike where the numbers are unknown), and sample `j` of a shard sits at the fraction `j * golden ratio mod 1` of
its length. Each worker owns a stretch of the line and takes the samples in it. Stretches that do not overlap and cover
the line give every sample to exactly one worker, whether a worker owns many shards or a shard has many workers; the
golden ratio spreads any number of samples evenly.
"""

import collections
import contextlib
import copy
import itertools
import logging
import math
import os
import random
import signal
import threading
import warnings

import numpy as np
import torch
import webdataset as wds
from torch.utils.data import default_collate, get_worker_info

from vision_longhorn.command_line.signals import outlive_signals
from .images import DataError, decode_image
from .index import image_of, label_of, place

_UNIT = 1 << 32
_GOLDEN = 2654435769  # 2**32 / golden ratio

_log = logging.getLogger(__name__)
_warned = False


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
    max_bad_samples=0,
):
    """Endless variety for training: each epoch a new order of shards and samples, fixed by (seed, epoch).

    An epoch has `num_samples // (batch_size * world_size)` batches on each rank. No sample comes twice in it, but for
    the few that a worker may borrow from the next epoch when its share comes out short. With `repeats`, an epoch takes
    one part in `repeats` of the samples, the next epoch the next part.

    Args:
        shards: ShardSet.
        transform: from a PIL image (RGB) to a float tensor (3, H, W); one that brings its own `decode` gets what that
            makes of the file's bytes, and may give any structure of tensors (see `augment.split_transform`).
        batch_size: samples per batch and rank.
        num_workers: worker processes of this rank, never more than there are batches; 0 reads in the caller's process.
        rank, world_size: this process and the number of processes that train together.
        seed: of the order, and of the transform's random numbers.
        repeats: views of each image in an epoch (repeated augmentation): it is decoded once and transformed anew for
            each view, and the views follow each other in the batch (batch augmentation, arXiv 1901.09335).
        shuffle_buffer: undecoded samples that each worker holds to draw from. ImageNet's files take 110 kB each.
        num_classes: labels must be below it; default is that of the shards.
        pin_memory: as in torch's DataLoader.
        max_bad_samples: how many samples of an epoch each rank may skip because they cannot be used: a number, or below
            1 a share of its samples. A batch stays full: the next sample stands in for one that was skipped.

    Returns:
        Loader: `set_epoch(e)`, `len()`, `skipped`, iterates over (images (B, 3, H, W), targets (B,) int64).

    Raises:
        DataError: if there is not one batch per rank; while iterating, naming shard and sample, if more samples cannot
            be used than `max_bad_samples`, or if shards without an index turn out to hold fewer than `num_samples`.
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
    if max_bad_samples < 0:
        raise DataError(f"max_bad_samples={max_bad_samples}; it must be at least 0")
    share = max_bad_samples * shards.num_samples / world_size if max_bad_samples < 1 else max_bad_samples
    stream.faults.limit = math.ceil(share)
    # Workers without a batch change nothing: the samples of every batch are the same without them.
    return Loader(stream, min(num_workers, stream.num_batches), pin_memory, stream.num_batches)


def eval_loader(
    shards, transform, *, batch_size, num_workers, rank=0, world_size=1, num_classes=None, pin_memory=False, keys=False
):
    """Every sample exactly once over all ranks and workers, undisturbed by how many there are.

    Ranks may get different numbers of batches, even none, and the last batch of a worker may be short.

    Args:
        shards, transform, batch_size, num_workers, rank, world_size, num_classes, pin_memory: as in `train_loader`.
        keys: give with each batch where its samples lie.

    Returns:
        Loader: iterates over (images (B, 3, H, W), targets (B,) int64), with `keys` and a list of B pairs (shard, key);
        has no `len()`.

    Raises:
        DataError: while iterating, naming shard and sample, if a sample cannot be used.
    """
    batches = -(-shards.num_samples // (batch_size * world_size))
    stream = _EvalStream(shards, transform, batch_size, rank, world_size, num_classes)
    stream.keys = keys
    return Loader(stream, min(num_workers, batches), pin_memory)


class Loader(wds.WebLoader):
    """A WebLoader, which accelerate leaves alone, that knows its epoch and raises workers' errors as they were.

    Attributes:
        skipped: what was skipped in the current or last pass: pairs of a text that names shard and sample, and the
            number of samples that were lost by it. Each is logged as a warning, too.
    """

    def __init__(self, stream, num_workers, pin_memory, num_batches=None):
        self.options = {
            "batch_size": None,
            "num_workers": num_workers,
            "persistent_workers": num_workers > 0,
            "pin_memory": pin_memory,
            "worker_init_fn": outlive_signals,
        }
        self.stream = stream
        self.num_batches = num_batches
        self.skipped = []
        self._counts = _Counts(stream.shards)
        if stream.rank == 0:
            _look_at_workers(num_workers)
        self._start()

    def _start(self):
        # torch warns of many workers here and at the start of a pass. `_look_at_workers` says it once, and shorter.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")
            super().__init__(self.stream, **self.options)
        self.pipeline[0].check_worker_number_rationality = lambda: None

    @property
    def num_skipped(self):
        """Samples that were skipped in the current or last pass, on this rank."""
        return sum(count for _, count in self.skipped)

    def samples_of(self, epoch, batches):
        """Find out of which samples batches are made, by reading this rank's shards again; no pass is disturbed.

        Which of them were skipped is told by decoding, so the answer is exact as long as the shards read as they did.

        Args:
            epoch: the batches' epoch.
            batches: numbers of batches in it, from 0.

        Returns:
            dict of number -> [(shard, key)] of the batch's views in their order; with `repeats`, those of one sample
            stand together.

        Raises:
            DataError: if an epoch has no such batch, or the shards do not give its samples any more.
        """
        for batch in batches:
            if batch not in range(len(self)):
                raise DataError(f"batch {batch} is none of an epoch, which has {len(self)}; give 0 to {len(self) - 1}")
        return self.stream.samples_of(epoch, batches, max(self.options["num_workers"], 1))

    def set_epoch(self, epoch, start_batch=0):
        """Choose the order of the next pass, which leaves out its first `start_batch` batches; call it before
        iterating. The batches that follow are the same, to the bit, as in a whole pass."""
        self.stream.epoch.fill_(epoch)
        self.stream.start.fill_(start_batch)

    def __len__(self):
        if self.num_batches is None:
            raise TypeError("the number of evaluation batches depends on the shards; count the samples instead")
        return self.num_batches

    def __iter__(self):
        total = _Faults(self.stream.faults.limit)  # of all workers; each has an eye on its own as well
        self.skipped = total.notes

        def note(text, count=1):
            total.add(text, count)
            _log.warning("%d skipped, at most %d an epoch: %s", total.count, total.limit, text)

        start, taken, last_death = int(self.stream.start), 0, -1
        dry = set()  # workers that could not fill their batches from their share of the epoch
        while True:
            dead = None
            try:
                for batch, notes, counts, dry_worker in super().__iter__():
                    _raise_here_only()
                    for text, count in notes:
                        note(text, count)
                    dry |= {dry_worker} - {None}
                    if self.num_batches is not None:
                        self._counts.learn(counts, all_dry=len(dry) == max(self.options["num_workers"], 1))
                    if isinstance(batch, DataError):
                        # A new one: this frame would form a cycle with `batch`, and workers freed by the garbage
                        # collector hear no call to end and are waited for, five seconds each.
                        raise DataError(*batch.args)
                    yield tuple(batch)
                    taken += 1
            except (RuntimeError, OSError, EOFError) as error:
                if not self._means_death(error):
                    raise
                dead = " ".join(f"{type(error).__name__}: {error}".split())
            if dead is None:
                break
            text = f"a process that loads data died, perhaps for want of memory ({dead})"
            if taken == last_death:
                raise DataError(f"{text}; it was started anew and died again; use fewer workers")
            # All start anew after the last batch that came, and what follows is the same as if none had died.
            note(text)
            last_death = taken
            self._start()
            self.stream.start.fill_(start + taken)
        if last_death >= 0:
            self.stream.start.fill_(start)

    def _means_death(self, error):
        if isinstance(error, RuntimeError):
            return str(error).startswith("DataLoader worker")
        # A batch was on its way, and its sender is gone. What workers raise themselves says so.
        return self.options["num_workers"] > 0 and " in DataLoader worker process " not in str(error)


def _raise_here_only():
    """Take back torch's handler of SIGCHLD, which raises for a dead worker wherever the caller is by then. The loader
    sees to it on its own when it waits for a batch, within five seconds."""
    handler = signal.getsignal(signal.SIGCHLD)
    if getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling":
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class _Faults:
    """What was skipped in one pass, and how much of it is too much."""

    def __init__(self, limit=0):
        self.limit = limit
        self.count = 0
        self.notes = []

    def add(self, note, count=1):
        """Raises DataError where `note` (an error, or its text) is one too many."""
        self.count += count
        if self.limit == 0:
            raise DataError(str(note))
        if self.count > self.limit:
            raise DataError(
                f"{self.count} samples cannot be used, and max_bad_samples allows {self.limit} in an epoch; the last: "
                f"{note}"
            )
        if count:
            self.notes.append((str(note), count))

    def take(self):
        """The notes since the last call."""
        notes, self.notes = self.notes, []
        return notes


class _Counts:
    """How many samples shards without an index hold, as far as it is known, against the number that was given."""

    def __init__(self, shards):
        self.shards = shards
        self.known = {}  # by the number of the shard
        self.others = None  # those that this rank has not read, counted aside
        self.counting = None

    def learn(self, counts, all_dry):
        """Takes in the `counts` of shards that were read to their end.

        No worker of this rank could fill its batches (`all_dry`): where in addition the shards that others read would
        have to be larger than any that was read here, they are counted, once. That goes on beside the training, for
        which ranks wait for each other, where it takes long.

        Raises:
            DataError: if all counts are known, and are less than the number that was given.
        """
        self.known.update(counts)
        if self.shards.samples_per_shard:
            return
        claimed, missing = self.shards.num_samples, len(self.shards.urls) - len(self.known)
        if missing and all_dry and not self.counting:
            if claimed - sum(self.known.values()) > missing * max(self.known.values(), default=0):
                self.counting = threading.Thread(target=self._count, daemon=True)
                self.counting.start()
                self.counting.join(60)
        self.known.update(self.others or {})
        held = sum(self.known.values())
        if len(self.known) == len(self.shards.urls) and held < claimed:
            raise DataError(f"the shards hold {held or 'no'} samples, but {self.shards.samples_option} says {claimed}; "
                            + (f"give {held}" if held else "make or fetch them again"))

    def _count(self):
        others = set(range(len(self.shards.urls))) - set(self.known)
        with contextlib.suppress(DataError):  # a shard that cannot be read leaves the sum unknown
            self.others = {shard: sum(1 for _ in self.shards.read(shard)) for shard in others}


def cores():
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers(most=8):
    """Loader processes for each of the processes that a launcher started on this machine: one to a core, `most` at
    most."""
    return max(1, min(most, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def _look_at_workers(num_workers):
    """Warns, once in a process, of more workers than the machine can run."""
    global _warned
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    # Some more than cores may pay, where they wait for a disk or a server.
    if num_workers * processes > 2 * cores() and not _warned:
        _warned = True
        of_each = f" for each of {processes} processes" if processes > 1 else ""
        _log.warning("%d workers%s on %d cores hold each other up: %d would do", num_workers, of_each, cores(),
                     default_workers(num_workers))


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
        self.decode_image = getattr(transform, "decode", decode_image)
        self.faults = _Faults()
        self.counts = {}  # samples in each shard that was read to its end
        self.dry = False
        # In shared memory: workers outlive an epoch, and must learn the number of the next one.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self.start = torch.zeros((), dtype=torch.int64).share_memory_()  # batches of the epoch that were taken before

    def __iter__(self):
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        self.faults, self.counts, self.dry = _Faults(self.faults.limit), {}, False

        def with_news(batch):
            counts, self.counts = self.counts, {}
            return batch, self.faults.take(), counts, worker if self.dry else None

        try:
            for batch in self.batches(worker, num_workers):
                yield with_news(batch)
        except DataError as error:
            # Raised here, torch would wrap it into a traceback of many lines.
            yield with_news(error)

    def samples(self, order, start, stop):
        """Samples on the stretch [start, stop) of the line on which the shards lie in `order`."""
        end = 0
        for shard in order:
            length = self.lengths[shard]
            begin, end = end, end + length * _UNIT
            if end <= start or begin >= stop:
                continue
            count = 0
            expected = self.shards.samples_per_shard and self.shards.samples_per_shard[shard]

            def mine(number):
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

    def decode(self, sample):
        """(PIL image, label) of a raw sample."""
        label = label_of(sample, self.num_classes)
        data = image_of(sample)
        try:
            return self.decode_image(data), label
        except DataError as error:
            raise DataError(f"{place(sample)}: {error}") from None

    def decoded(self, samples, repeats=1):
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

    def views(self, samples, repeats=1):
        """(transformed image, label), `repeats` times of each raw sample: decoding costs more than augmenting."""
        for _, image, label, count in self.decoded(samples, repeats):
            for _ in range(count):
                yield self.transform(image), label


class _EvalStream(_Stream):
    def batches(self, worker, num_workers):
        shares = self.world_size * num_workers
        share = self.rank * num_workers + worker
        line = sum(self.lengths) * _UNIT
        samples = self.samples(range(len(self.lengths)), line * share // shares, line * (share + 1) // shares)
        decoded = self.decoded(samples)
        while batch := list(itertools.islice(decoded, self.batch_size)):
            places = [[(sample["__url__"], sample["__key__"]) for sample, *_ in batch]] if self.keys else []
            yield [*default_collate([(self.transform(image), label) for _, image, label, _ in batch]), *places]


class _TrainStream(_Stream):
    @property
    def num_batches(self):
        return self.shards.num_samples // (self.batch_size * self.world_size)

    def batches(self, worker, num_workers):
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
                collated = default_collate(list(itertools.islice(views, self.batch_size)))
            yield collated

    def samples_of(self, epoch, batches, num_workers):
        """What `Loader.samples_of` returns."""
        again = copy.copy(self)  # a pass of this process goes on with its own faults
        found = {}
        for worker in sorted({batch % num_workers for batch in batches}):
            mine = sorted({batch for batch in batches if batch % num_workers == worker})
            before, views = divmod(mine[0] // num_workers * self.batch_size, self.repeats)
            # The run's own budget may have started anew within the epoch. Some end there must be.
            again.faults = _Faults(self.shards.num_samples)
            samples = itertools.islice(again.samples_of_worker(epoch, worker, num_workers), before, None)
            places = ((sample["__url__"], sample["__key__"])
                      for sample, _, _, count in again.decoded(samples, self.repeats) for _ in range(count))
            collections.deque(itertools.islice(places, views), maxlen=0)
            for batch in range(mine[0], mine[-1] + 1, num_workers):
                found[batch] = list(itertools.islice(places, self.batch_size))
        return {batch: found[batch] for batch in batches}

    def samples_of_worker(self, epoch, worker, num_workers):
        """Endless raw samples of an epoch, in the order in which a worker takes them."""
        owed = [len(range(w, self.num_batches, num_workers)) for w in range(num_workers)]
        first = self.rank * self.num_batches + sum(owed[:worker])
        rng = random.Random(f"{self.seed} {epoch} {self.rank} {worker}")
        return self.shuffled(epoch, first, owed[worker], rng)

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
            self.dry = True
            epoch += 1
        raise DataError(f"shard {self.shards.urls[0]} and its like hold no samples for a worker; use fewer workers")


@contextlib.contextmanager
def _random_state(seed):
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
