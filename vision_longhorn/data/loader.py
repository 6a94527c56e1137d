"""Batches for training and evaluation from shards, divided among processes and workers (see `streams`)."""

import logging
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import webdataset as wds
from torch.utils.data import DataLoader

from vision_longhorn.cores import share_of_cores
from vision_longhorn.signals import outlive_signals, signals_blocked

from .images import DataError
from .places import ShardSet
from .sharing import PREFETCH, SharedMemory
from .streams import Batch, EvalStream, Faults, Stream, TrainStream, to_tensors

_log = logging.getLogger(__name__)


def train_loader(
    shards: ShardSet,
    transform: Callable[[Any], Any],
    *,
    batch_size: int,
    num_workers: int,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    repeats: int = 1,
    shuffle_buffer: int = 2048,
    pin_memory: bool = False,
    max_bad_samples: float = 0,
    keys: bool = False,
) -> "Loader":
    """Make a loader of batches to train on. Each epoch has a new order, fixed by seed, epoch, batch, ranks and workers.

    An epoch has `num_samples // (batch_size * world_size)` batches on each rank. No image is taken twice in an epoch,
    except for the few that a worker borrows from the next epoch when its own share is too small.

    Args:
        shards: the result of `open_shards`.
        transform: maps a PIL image (RGB) to a float tensor (3, H, W). If it has a method `decode`, it gets what that
            makes of the file's bytes (or of pixels, with `keep_in_memory`), and may return any structure of tensors. A
            method `collate(views, memory)` makes the inputs of a batch out of what it returned, as a tensor or in a
            list. It may call `memory(n)` once, for n bytes that it shares with this process.
        batch_size: samples per batch and rank.
        num_workers: worker processes of this rank, never more than there are batches; 0 reads in the caller's process.
        rank, world_size: this process and the number of processes that train together.
        seed: seed of the order, and of the transform's random numbers.
        repeats: views of each image in an epoch, next to each other in a batch (batch augmentation, arXiv 1901.09335).
            An image is decoded once for all its views. Each epoch then covers the next of `repeats` parts of the data.
        shuffle_buffer: undecoded samples from which each worker draws at random. An ImageNet file takes 110 kB.
        pin_memory: as in torch's DataLoader, except for small tensors of int64 and float64, such as the targets. On a
            GPU each worker keeps the memory of two batches, in /dev/shm on Linux, if the transform has `collate`.
        max_bad_samples: how many unusable samples each rank may skip in an epoch; below 1, a share of num_samples /
            world_size. The next sample takes the place of a skipped one.
        keys: add to each batch a list of B pairs (shard, key), the places of its samples.

    Returns:
        Loader of (images (B, 3, H, W), targets (B,) int64), with `keys` also the places.

    Raises:
        DataError: if the samples do not make one batch per rank. While iterating: if more samples than
            `max_bad_samples` cannot be used.
    """
    if shards.num_samples < batch_size * world_size:
        most, where = shards.num_samples // world_size, f" on each of {world_size} processes" if world_size > 1 else ""
        remedy = f"lower batch_size to {most} at most" if most else "start fewer processes"
        raise DataError(f"{shards.num_samples} samples do not make one batch of {batch_size}{where}; {remedy}")
    for name, value, least in ("repeats", repeats, 1), ("max_bad_samples", max_bad_samples, 0):
        if value < least:
            raise DataError(f"{name}={value}; it must be at least {least}")
    common = shards, transform, batch_size, rank, world_size, keys
    stream = TrainStream(*common, seed=seed, repeats=repeats, shuffle_buffer=shuffle_buffer)
    share = max_bad_samples * shards.num_samples / world_size if max_bad_samples < 1 else max_bad_samples
    stream.faults = Faults(math.ceil(share), "; max_bad_samples says how many of an epoch may be skipped")
    # Workers beyond the number of batches would be idle; each batch has the same samples without them.
    return Loader(stream, min(num_workers, stream.num_batches), pin_memory, stream.num_batches)


def eval_loader(
    shards: ShardSet,
    transform: Callable[[Any], Any],
    *,
    batch_size: int,
    num_workers: int,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
    keys: bool = False,
) -> "Loader":
    """Make a loader that gives every sample exactly once over all ranks and workers, however many there are.

    Ranks may get different numbers of batches, even none, and the last batch of a worker may be short. The arguments
    and the batches are those of `train_loader`; the Loader has no `len()`.

    Raises:
        DataError: while iterating, naming shard and sample, if a sample cannot be used.
    """
    batches = -(-shards.num_samples // (batch_size * world_size))
    stream = EvalStream(shards, transform, batch_size, rank, world_size, keys)
    return Loader(stream, min(num_workers, batches), pin_memory)


class _Workers(DataLoader):
    def __iter__(self) -> Any:
        with signals_blocked():
            return super().__iter__()


class Loader(wds.WebLoader):
    """Iterates over the batches of one rank. accelerate leaves a WebLoader as it is.

    Attributes:
        skipped: what this or the last pass skipped, (reason, number of samples), logged, too. A restart counts as 1.
    """

    def __init__(self, stream: Stream, num_workers: int, pin_memory: bool, num_batches: Any = None) -> None:
        self.options: dict[str, Any] = {
            "batch_size": None,
            "num_workers": num_workers,
            "persistent_workers": num_workers > 0,
            "prefetch_factor": PREFETCH if num_workers else None,
            "pin_memory": pin_memory,
            "worker_init_fn": outlive_signals,
            "collate_fn": tuple,  # leaves batches as they are; torch's would make tensors of the arrays of `to_arrays`
        }
        if stream.shards.kept is not None and num_workers and sys.platform == "linux":
            self.options["multiprocessing_context"] = "fork"  # the only way to share that memory
        self.stream = stream
        is_pinned = pin_memory and torch.cuda.is_available()
        # Workers of an evaluation, whose batches are not counted, end one by one.
        stream.memory = SharedMemory(is_pinned and num_batches is not None)
        self.num_batches = num_batches
        self.skipped: list[tuple[str, int]] = []
        wds.DataPipeline.__init__(self, _Workers(stream, **self.options))

    @property
    def num_skipped(self) -> int:
        """The sum of the numbers in `skipped`, which are those of this rank."""
        return sum(count for _, count in self.skipped)

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Choose the order of the next pass, and leave out its first `start_batch` batches. Call it before iterating.
        The remaining batches are the same, to the bit, as in a whole pass."""
        self.stream.epoch.fill_(epoch)
        self.stream.start.fill_(start_batch)

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("the number of evaluation batches depends on the shards; count the samples instead")
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        total = Faults(self.stream.faults.limit)  # those of all workers together; each also counts its own
        self.skipped = total.notes

        def note(text: str, count: int = 1) -> None:
            total.add(text, count)
            _log.warning("%d skipped, at most %d an epoch: %s", total.count, total.limit, text)

        start, taken, last_death = int(self.stream.start), 0, -1
        while True:
            try:
                for batch, report in super().__iter__():
                    _raise_here_only()
                    for text, count in report.notes:
                        note(text, count)
                    if isinstance(batch, DataError):
                        # Raise a new error. `batch` itself would form a reference cycle with this frame, and workers
                        # that the garbage collector frees are not told to end: each costs a wait of five seconds.
                        raise DataError(*batch.args)
                    batch = tuple(map(to_tensors, batch))
                    yield (*batch, report.places) if self.stream.keys else batch
                    taken += 1
                break
            except (RuntimeError, OSError, EOFError) as error:
                if not self._means_death(error):
                    raise
                why = " ".join(f"{type(error).__name__}: {error}".split())
            text = f"a process that loads data died, perhaps because memory ran out ({why})"
            if taken == last_death:
                raise DataError(f"{text}; it was restarted and died again; use fewer workers")
            # All workers start again after the last batch that came; the batches that follow are the same.
            note(text)
            last_death = taken
            wds.DataPipeline.__init__(self, _Workers(self.stream, **self.options))
            self.stream.start.fill_(start + taken)
        if last_death >= 0:
            self.stream.start.fill_(start)

    def _means_death(self, error: Exception) -> bool:
        """Tell whether an error means that a worker has died. Errors raised by a worker's own code name the worker."""
        if isinstance(error, RuntimeError):
            # The thread that pins dies, too, if it was reading what the worker had sent.
            return str(error).startswith(("DataLoader worker", "Pin memory thread exited"))
        return self.options["num_workers"] > 0 and " in DataLoader worker process " not in str(error)


def _raise_here_only() -> None:
    """Remove torch's handler of SIGCHLD, which raises an error for a dead worker anywhere in the caller's code. While
    it waits for a batch, torch notices the death by itself within five seconds."""
    if not hasattr(signal, "SIGCHLD"):  # as on Windows
        return
    is_torchs = getattr(signal.getsignal(signal.SIGCHLD), "__module__", "") == "torch.utils.data._utils.signal_handling"
    if is_torchs and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def default_workers() -> int:
    """Choose the workers of each process that a launcher started on this machine: its share of the cores, 1 to 8."""
    return share_of_cores(8)
