"""Reads each update of a run: loss, gradient norm and signals, for the curves and the decision to stop."""

import collections
import contextlib
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from accelerate.utils import gather_object

from vision_longhorn.data.samples import place
from vision_longhorn.errors import UserError
from vision_longhorn.files import write_text
from vision_longhorn.signals import SIGNALS

QUIET = 30  # seconds between two lines about how far a run without a bar is


class UpdateMonitor:
    """Reads each update when the next one has been queued, so the device never waits for the host.

    All processes read the same values of the same update, and so decide alike. An update has `images` samples over all
    processes. Without a progress bar, the function `say` prints now and then how far the run in `folder` is.

    Attributes:
        stop: A signal that one of the processes has received, or 0.
        state: What a checkpoint keeps, after `read_all`. Since the latest entry: "loss_sum" and number of "losses".
            "skipped" counts all skipped updates, "bad" has those since the last good one. "epoch" has sum and number
            of losses, seconds and images of the epoch so far; "last" its "train_loss", "lr" and "images_per_s" at
            the latest entry.
    """

    def __init__(self, folder: Any, signals: Any, images: int, updates_per_epoch: int, say: Any = None) -> None:
        self.folder, self.accelerator, self.signals = folder, folder.accelerator, signals
        self.say, self.said = say, time.monotonic()
        self.images, self.updates_per_epoch = images, updates_per_epoch
        self.log_interval = folder.cfg.log_interval
        self.max_bad_steps = min(folder.cfg.max_bad_steps, updates_per_epoch)
        self.stop = 0
        self.state: dict[str, Any] = dict(loss_sum=0.0, losses=0, skipped=0, bad=[], epoch=[0.0, 0, 0.0, 0], last={})
        self.bad_places: list[Any] = []  # of this process's samples in the bad updates; no checkpoint keeps them
        # For the update in progress: begin and end of each wait for a batch, and the places of its samples
        self.waits: list[tuple[Any, Any]] = []
        self.places: list[tuple[str, str]] = []
        self.queue: collections.deque[tuple] = collections.deque()
        self.start_clock()

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from the `state` in a checkpoint."""
        self.state = {**self.state, **state, "bad": [{**bad, "before_resuming": True} for bad in state["bad"]]}
        self.bad_places = [None] * len(state["bad"])

    def start_clock(self) -> None:
        """Begins to measure the speed now."""
        self.since, self.updates, self.waited = self._now(), 0, 0.0

    def next_batch(self, batches: Iterator[tuple[Any, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns images and targets of the next batch, and notes its places and how long the device waited for it."""
        begin = self._now()
        images, targets, places = next(batches)
        self.waits.append((begin, self._now()))
        self.places += places
        return images, targets

    def update(self, number: int, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float) -> None:
        """Notes the update `number`, from 1, with the results of `TrainStep`, and reads the one before.

        Raises:
            UserError: Too many updates in a row were skipped; bad_steps.json tells which.
        """
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        facts = torch.zeros(world_size + len(SIGNALS), device=self.accelerator.device)
        facts[rank] = loss
        if self.signals.received:
            facts[world_size + SIGNALS.index(self.signals.received)].fill_(1)  # `= 1` would wait for the device
        facts = torch.cat([self.accelerator.reduce(facts, "sum"), grad_norm.reshape(1)])
        facts = facts.to("cpu", non_blocking=True)
        self.queue.append((number, lr, facts, self.waits, self.places, self._now()))
        self.waits, self.places = [], []
        self.read_all(but=1)

    def read_all(self, but: int = 0) -> None:
        """Reads all queued updates but the last `but` ones. To read the last one, it waits for the device."""
        state, world_size = self.state, self.accelerator.num_processes
        while len(self.queue) > but:
            number, lr, facts, waits, places, end = self.queue.popleft()
            if not isinstance(end, float):
                end.synchronize()
            *facts, grad_norm = facts.tolist()
            losses, signals = facts[:world_size], facts[world_size:]
            self.stop = self.stop or next((int(name) for name, count in zip(SIGNALS, signals, strict=True) if count), 0)
            self.updates += 1
            self.waited += sum(_seconds(*wait) for wait in waits)
            if math.isfinite(grad_norm):
                state["loss_sum"] += sum(losses) / world_size
                state["losses"] += 1
                state["bad"], self.bad_places = [], []
            else:
                state["skipped"] += 1
                state["bad"] = [*state["bad"], dict(update=number, losses=losses, grad_norm=grad_norm, lr=lr)]
                self.bad_places.append(places)
            if number % self.log_interval == 0 or number % self.updates_per_epoch == 0:
                self._log(number, lr, grad_norm, end)
            if len(state["bad"]) >= self.max_bad_steps:
                self._give_up()

    def _log(self, number: int, lr: float, grad_norm: float, end: Any) -> None:
        state, seconds, (epoch, done) = self.state, _seconds(self.since, end), divmod(number, self.updates_per_epoch)
        loss = state["loss_sum"] / state["losses"] if state["losses"] else math.nan
        rate = self.updates * self.images / seconds
        if self.say and done and time.monotonic() > self.said + QUIET:
            self.said = time.monotonic()
            where = f"update {done} of {self.updates_per_epoch}, epoch {epoch + 1}"
            self.say(f"{where}  loss {loss:.4f}  {rate:,.0f} images/s")
        if self.folder.writer:
            scalars = dict(loss=loss, lr=lr, images_per_s=rate, grad_norm=grad_norm, skipped=state["skipped"])
            scalars.update(epoch=number / self.updates_per_epoch, data_wait=self.waited / seconds, **self._memory())
            self.folder.add({f"train/{tag}": value for tag, value in scalars.items()}, number)
        entry = state["loss_sum"], state["losses"], seconds, self.updates * self.images
        total, losses, seconds, images = whole = [a + b for a, b in zip(state["epoch"], entry, strict=True)]
        last = {"train_loss": total / losses if losses else math.nan, "lr": lr, "images_per_s": images / seconds}
        state.update(loss_sum=0.0, losses=0, last=last, epoch=whole if done else [0.0, 0, 0.0, 0])
        self.since, self.updates, self.waited = end, 0, 0.0

    def _memory(self) -> dict[str, float]:
        """Measures the host memory of this process with its loader's workers, and the device's peak, in GiB."""
        host = 0
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it may have ended
                host += process.memory_info().rss
        if self.accelerator.device.type != "cuda":
            return {"host_gib": host / 2**30}
        device = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return {"host_gib": host / 2**30, "device_gib": device / 2**30}

    def _give_up(self) -> None:
        """Writes the bad updates with the samples of every process, and raises UserError."""
        bad, file = self.state["bad"], self.folder.run.bad_steps_file
        for one in bad:
            one["epoch"], one["update_of_epoch"] = divmod(one["update"] - 1, self.updates_per_epoch)
        evidence = {"skipped": self.state["skipped"], "updates_per_epoch": self.updates_per_epoch, "updates": bad}

        def write() -> None:
            if self.accelerator.is_main_process:
                write_text(file, json.dumps(evidence, indent=2) + "\n")

        write()  # without samples first: if another process has ended, they cannot be gathered
        named = [one and [place({"__url__": shard, "__key__": key}) for shard, key in one] for one in self.bad_places]
        with contextlib.suppress(RuntimeError):
            for one, samples in zip(bad, zip(*gather_object([named]), strict=True), strict=True):
                one["samples"] = samples
            write()
        first, last = bad[0], bad[-1]
        raise UserError(
            f"{len(bad)} updates in a row, {first['update']} to {last['update']}, were skipped, as loss or "
            f"gradients were not finite (loss {sum(last['losses']) / len(last['losses'])}, gradient norm "
            f"{last['grad_norm']}): --resume goes on with the weights before them; give a lower lr, or "
            f"--clip-grad 1.0; {file} tells more"
        )

    def _now(self) -> Any:
        """Notes the time: in seconds on a CPU, and on a GPU as an event for which the host need not wait."""
        if self.accelerator.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin: Any, end: Any) -> float:
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3
