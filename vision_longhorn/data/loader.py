"""Batches for training and evaluation from shards, shared out over processes and workers (see `streams`)."""

import contextlib
import copy
import logging
import math
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import webdataset as wds

from vision_longhorn.signals import outlive_signals

from .images import DataError
from .index import ShardSet
from .streams import Batch, EvalStream, Faults, Stream, TrainStream, heavy

_log = logging.getLogger(__name__)
_warned = False


def train_loader(
    shards: ShardSet,
    transform: Callable[[Any], Any] | None,
    *,
    batch_size: int,
    num_workers: int,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    repeats: int = 1,
    shuffle_buffer: int = 2048,
    num_classes: int | None = None,
    pin_memory: bool = False,
    max_bad_samples: float = 0,
    keys: bool = False,
) -> "Loader":
    """Endless variety for training: each epoch a new order of shards and samples, fixed by (seed, epoch).

    An epoch has `num_samples // (batch_size * world_size)` batches on each rank. No sample comes twice in it, but for
    the few that a worker may borrow from the next epoch when its share comes out short. With `repeats`, an epoch takes
    one part in `repeats` of the samples, the next epoch the next part.

    Args:
        shards: what `open_shards` found.
        transform: from a PIL image (RGB) to a float tensor (3, H, W); one that brings its own `decode` gets what that
            makes of the file's bytes (of pixels, where `shards` come from `keep_in_memory`), and may give any structure
            of tensors (see `augment.split_transform`).
        batch_size: samples per batch and rank.
        num_workers: worker processes of this rank, never more than there are batches; 0 reads in the caller's process.
        rank, world_size: this process and the number of processes that train together.
        seed: of the order, and of the transform's random numbers.
        repeats: views of each image in an epoch (repeated augmentation): it is decoded once and transformed anew for
            each view, and the views follow each other in the batch (batch augmentation, arXiv 1901.09335).
        shuffle_buffer: undecoded samples that each worker holds to draw from. ImageNet's files take 110 kB each.
        num_classes: labels must be below it; default is that of the shards.
        pin_memory: as in torch's DataLoader, for all but small tensors of int64 and float64, such as the targets.
        max_bad_samples: how many samples of an epoch each rank may skip because they cannot be used: a number, or below
            1 a share of its samples. A batch stays full: the next sample stands in for one that was skipped.
        keys: give with each batch where its samples lie.

    Returns:
        Loader: `set_epoch(e)`, `len()`, `skipped`, iterates over (images (B, 3, H, W), targets (B,) int64), with `keys`
        and a list of B pairs (shard, key).

    Raises:
        DataError: if there is not one batch per rank; while iterating, naming shard and sample, if more samples cannot
            be used than `max_bad_samples`, or if shards without an index turn out to hold fewer than `num_samples`.
    """
    if shards.num_samples // (batch_size * world_size) == 0:
        most = shards.num_samples // world_size
        raise DataError(
            f"{shards.num_samples} samples do not make one batch of {batch_size}"
            + (f" on each of {world_size} processes" if world_size > 1 else "")
            + (f"; lower batch_size to {most} at most" if most else "; start fewer processes")
        )
    if repeats < 1:
        raise DataError(f"repeats={repeats}; it must be at least 1")
    stream = TrainStream(
        shards,
        transform,
        batch_size,
        rank,
        world_size,
        num_classes,
        keys,
        seed=seed,
        repeats=repeats,
        shuffle_buffer=shuffle_buffer,
    )
    if max_bad_samples < 0:
        raise DataError(f"max_bad_samples={max_bad_samples}; it must be at least 0")
    share = max_bad_samples * shards.num_samples / world_size if max_bad_samples < 1 else max_bad_samples
    stream.faults = Faults(math.ceil(share), "; max_bad_samples says how many of an epoch may be skipped")
    # Workers without a batch change nothing: the samples of every batch are the same without them.
    return Loader(stream, min(num_workers, stream.num_batches), pin_memory, stream.num_batches)


def eval_loader(
    shards: ShardSet,
    transform: Callable[[Any], Any],
    *,
    batch_size: int,
    num_workers: int,
    rank: int = 0,
    world_size: int = 1,
    num_classes: int | None = None,
    pin_memory: bool = False,
    keys: bool = False,
) -> "Loader":
    """Every sample exactly once over all ranks and workers, undisturbed by how many there are.

    Ranks may get different numbers of batches, even none, and the last batch of a worker may be short.

    Args:
        shards, transform, batch_size, num_workers, rank, world_size, num_classes, pin_memory, keys: as in
            `train_loader`.

    Returns:
        Loader: iterates over (images (B, 3, H, W), targets (B,) int64), with `keys` and a list of B pairs (shard, key);
        has no `len()`.

    Raises:
        DataError: while iterating, naming shard and sample, if a sample cannot be used.
    """
    batches = -(-shards.num_samples // (batch_size * world_size))
    stream = EvalStream(shards, transform, batch_size, rank, world_size, num_classes, keys)
    return Loader(stream, min(num_workers, batches), pin_memory)


class Loader(wds.WebLoader):
    """A WebLoader, which accelerate leaves alone, that knows its epoch and raises workers' errors as they were.

    Attributes:
        skipped: what was skipped in the current or last pass: pairs of a text that names shard and sample, and the
            number of samples that were lost by it. Each is logged as a warning, too.
    """

    def __init__(self, stream: Stream, num_workers: int, pin_memory: bool, num_batches: int | None = None) -> None:
        self.options: dict[str, Any] = {
            "batch_size": None,
            "num_workers": num_workers,
            "persistent_workers": num_workers > 0,
            "pin_memory": pin_memory,
            "worker_init_fn": outlive_signals,
            "collate_fn": _as_it_is,  # torch would make tensors of small arrays, see `light`
        }
        if stream.shards.kept is not None and num_workers and sys.platform == "linux":
            self.options["multiprocessing_context"] = "fork"  # which shares that memory, as no other does
        self.stream = stream
        self.num_batches = num_batches
        self.skipped: list[tuple[str, int]] = []
        self._has_noted = False
        self._counts = _Counts(stream.shards)
        if stream.rank == 0:
            _look_at_workers(num_workers)
        self._start()

    def _start(self) -> None:
        # torch warns of many workers here and at the start of a pass. `_look_at_workers` says it once, and shorter.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")
            super().__init__(self.stream, **self.options)
        self.pipeline[0].check_worker_number_rationality = lambda: None

    @property
    def num_skipped(self) -> int:
        """Samples that were skipped in the current or last pass, on this rank."""
        return sum(count for _, count in self.skipped)

    def samples_of(self, epoch: int, batches: Iterable[int]) -> dict[int, list[tuple[str, str]]]:
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
        numbers = list(batches)
        for number in numbers:
            if number not in range(len(self)):
                raise DataError(f"batch {number} is none of an epoch, which has {len(self)}; give 0 to {len(self) - 1}")
        workers, found = max(self.options["num_workers"], 1), {}
        for worker in {number % workers for number in numbers}:
            mine = [number for number in numbers if number % workers == worker]
            again = copy.copy(self.stream)  # a pass of this process goes on with its own faults
            again.transform, again.keys = lambda image: 0, True
            # The run's own budget may have started anew within the epoch. Some end there must be.
            again.faults = Faults(again.shards.num_samples)
            again.epoch, again.start = torch.tensor(epoch), torch.tensor(min(mine))
            # A pass that starts at a batch of this worker's has it for its first one.
            for number, batch in zip(range(min(mine), max(mine) + 1, workers), again.batches(0, workers), strict=False):
                found[number] = batch[-1]
        return {number: found[number] for number in numbers}

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Choose the order of the next pass, which leaves out its first `start_batch` batches; call it before
        iterating. The batches that follow are the same, to the bit, as in a whole pass."""
        self.stream.epoch.fill_(epoch)
        self.stream.start.fill_(start_batch)

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("the number of evaluation batches depends on the shards; count the samples instead")
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        total = Faults(self.stream.faults.limit)  # of all workers; each has an eye on its own as well
        self.skipped = total.notes

        def note(text: str, count: int = 1) -> None:
            total.add(text, count)
            _log.warning("%d skipped, at most %d an epoch: %s", total.count, total.limit, text)

        start, taken, last_death = int(self.stream.start), 0, -1
        dry: set[int] = set()  # workers that could not fill their batches from their share of the epoch
        while True:
            dead = None
            try:
                for batch, news in super().__iter__():
                    _raise_here_only()
                    for text, count in news.skipped:
                        note(text, count)
                    if news.note and not self._has_noted:
                        self._has_noted = True
                        _log.warning("%s", news.note)
                    if news.dry is not None:
                        dry.add(news.dry)
                    if self.num_batches is not None:
                        self._counts.learn(news.counts, all_dry=len(dry) == max(self.options["num_workers"], 1))
                    if isinstance(batch, DataError):
                        # A new one: this frame would form a cycle with `batch`, and workers freed by the garbage
                        # collector hear no call to end and are waited for, five seconds each.
                        raise DataError(*batch.args)
                    batch = tuple(map(heavy, batch))
                    yield (*batch, news.places) if self.stream.keys else batch
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

    def _means_death(self, error: Exception) -> bool:
        if isinstance(error, RuntimeError):
            return str(error).startswith("DataLoader worker")
        # A batch was on its way, and its sender is gone. What workers raise themselves says so.
        return self.options["num_workers"] > 0 and " in DataLoader worker process " not in str(error)


def _as_it_is(batch: Any) -> Any:
    return batch


def _raise_here_only() -> None:
    """Take back torch's handler of SIGCHLD, which raises for a dead worker wherever the caller is by then. The loader
    sees to it on its own when it waits for a batch, within five seconds."""
    handler = signal.getsignal(signal.SIGCHLD)
    if getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling":
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers(most: int = 8) -> int:
    """Loader processes for each of the processes that a launcher started on this machine: one to a core, `most` at
    most."""
    return max(1, min(most, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def _look_at_workers(num_workers: int) -> None:
    """Warns, once in a process, of more workers than the machine can run."""
    global _warned
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    # Some more than cores may pay, where they wait for a disk or a server.
    if num_workers * processes > 2 * cores() and not _warned:
        _warned = True
        of_each = f" for each of {processes} processes" if processes > 1 else ""
        _log.warning(
            "%d workers%s on %d cores hold each other up: %d would do",
            num_workers,
            of_each,
            cores(),
            default_workers(num_workers),
        )


class _Counts:
    """How many samples shards without an index hold, as far as it is known, against the number that was given."""

    def __init__(self, shards: ShardSet) -> None:
        self.shards = shards
        self.known: dict[int, int] = {}  # by the number of the shard
        self.others: dict[int, int] = {}  # those that this rank has not read, counted aside
        self.counting: threading.Thread | None = None

    def learn(self, counts: dict[int, int], all_dry: bool) -> None:
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
        self.known.update(self.others)
        held = sum(self.known.values())
        if len(self.known) == len(self.shards.urls) and held < claimed:
            raise DataError(
                f"the shards hold {held or 'no'} samples, but num_samples says {claimed}; "
                + (f"give {held}" if held else "make or fetch them again")
            )

    def _count(self) -> None:
        others = set(range(len(self.shards.urls))) - set(self.known)
        with contextlib.suppress(DataError):  # a shard that cannot be read leaves the sum unknown
            self.others = {shard: sum(1 for _ in self.shards.read(shard)) for shard in others}
