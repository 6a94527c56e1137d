"""Reads each update of a run: loss, gradient norm and signals, for the curves and the decision to stop."""

import collections
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from vision_longhorn.data.samples import place
from vision_longhorn.errors import UserError
from vision_longhorn.files import write_text
from vision_longhorn.runs import Run
from vision_longhorn.signals import SIGNALS, StopSignals
from vision_longhorn.training.config import Config
from vision_longhorn.training.runlog import RunLog

QUIET = 30  # seconds between two lines about how far a run without a bar is


class UpdateMonitor:
    """Reads each update when the next one has been queued, so the device never waits for the host.

    All processes read the same values of the same update, and so decide alike. An update has `images` samples over all
    processes. `say` prints now and then how far the run is, where no bar shows it.

    Attributes:
        log: `RunLog` of the run, on the first process once the run has a folder; else None.
        stop: A signal that one of the processes has received, or 0.
        last: The latest entry's "train_loss", "lr" and "images_per_s".
    """

    def __init__(
        self,
        cfg: Config,
        accelerator: Accelerator,
        signals: StopSignals,
        run: Run,
        images: int,
        updates_per_epoch: int,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.accelerator, self.signals, self.run = accelerator, signals, run
        self.log: RunLog | None = None
        self.say, self._said = say, time.monotonic()
        self.images, self.updates_per_epoch = images, updates_per_epoch
        self.log_interval, self.max_bad_steps = cfg.log_interval, min(cfg.max_bad_steps, updates_per_epoch)
        self.stop, self.last = 0, dict[str, float]()
        self._loss_sum, self._losses, self._skipped = 0.0, 0, 0
        self._bad: list[dict[str, Any]] = []  # the updates since the last good one, with this process's "places"
        # The begin and end of each wait for a batch, and the places of the samples, in the update that is being made
        self._waits: list[tuple[Any, Any]] = []
        self._places: list[tuple[str, str]] = []
        self._queue: collections.deque[tuple] = collections.deque()
        self.start_clock()

    def state_dict(self) -> dict[str, Any]:
        """The part of the curves that is still to be written. Call `read_all` first."""
        bad = [{key: value for key, value in one.items() if key != "places"} for one in self._bad]
        counts = dict(loss_sum=self._loss_sum, losses=self._losses, skipped=self._skipped)
        return {**counts, "bad": bad, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loss_sum, self._losses, self._skipped = state["loss_sum"], state["losses"], state["skipped"]
        self._bad, self.last = [{**bad, "before_resuming": True} for bad in state["bad"]], dict(state["last"])

    def start_clock(self) -> None:
        """Begins to measure the speed now."""
        self._since, self._updates, self._waited = self._now(), 0, 0.0

    def next_batch(self, batches: Iterator[tuple[Any, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns images and targets of the next batch, and notes its places and how long the device waited for it."""
        begin = self._now()
        images, targets, places = next(batches)
        self._waits.append((begin, self._now()))
        self._places += places
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
        self._queue.append((number, lr, facts, self._waits, self._places, self._now()))
        self._waits, self._places = [], []
        self._read(leave=1)

    def read_all(self) -> None:
        """Reads the last update too, which waits for the device."""
        self._read(leave=0)

    def _read(self, leave: int) -> None:
        world_size = self.accelerator.num_processes
        while len(self._queue) > leave:
            number, lr, facts, waits, places, end = self._queue.popleft()
            if not isinstance(end, float):
                end.synchronize()
            *facts, grad_norm = facts.tolist()
            losses, signals = facts[:world_size], facts[world_size:]
            self.stop = self.stop or next((int(name) for name, count in zip(SIGNALS, signals, strict=True) if count), 0)
            self._updates += 1
            self._waited += sum(_seconds(*wait) for wait in waits)
            if math.isfinite(grad_norm):
                self._loss_sum += sum(losses) / world_size
                self._losses += 1
                self._bad = []
            else:
                self._skipped += 1
                self._bad.append(dict(update=number, losses=losses, grad_norm=grad_norm, lr=lr, places=places))
            if number % self.log_interval == 0 or number % self.updates_per_epoch == 0:
                self._log(number, lr, grad_norm, end)
            if len(self._bad) >= self.max_bad_steps:
                self._give_up()

    def _log(self, number: int, lr: float, grad_norm: float, end: Any) -> None:
        seconds = _seconds(self._since, end)
        loss = self._loss_sum / self._losses if self._losses else math.nan
        self.last = {"train_loss": loss, "lr": lr, "images_per_s": self._updates * self.images / seconds}
        epoch, done = divmod(number, self.updates_per_epoch)
        if self.say and done and time.monotonic() > self._said + QUIET:
            self._said = time.monotonic()
            speed = f"{self.last['images_per_s']:,.0f} images/s"
            self.say(f"update {done} of {self.updates_per_epoch}, epoch {epoch + 1}  loss {loss:.4f}  {speed}")
        if self.log:
            scalars = dict(loss=loss, lr=lr, images_per_s=self.last["images_per_s"], grad_norm=grad_norm)
            scalars.update(epoch=number / self.updates_per_epoch, data_wait=self._waited / seconds)
            scalars.update(skipped=self._skipped, **self._memory())
            self.log.add({f"train/{tag}": value for tag, value in scalars.items()}, number)
        self._loss_sum, self._losses = 0.0, 0
        self._since, self._updates, self._waited = end, 0, 0.0

    def _memory(self) -> dict[str, float]:
        """Memory on the host of this process with its loader's workers, and the device's peak, in GiB."""
        host = 0
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it may have ended
                host += process.memory_info().rss
        memory = {"host_gib": host / 2**30}
        if self.accelerator.device.type == "cuda":
            memory["device_gib"] = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        return memory

    def _give_up(self) -> None:
        """Writes the bad updates with the samples of every process, and raises UserError."""
        own = [bad.pop("places", None) for bad in self._bad]  # a checkpoint does not keep them
        named = [places and [place({"__url__": shard, "__key__": key}) for shard, key in places] for places in own]
        for bad in self._bad:
            bad["epoch"], bad["update_of_epoch"] = divmod(bad["update"] - 1, self.updates_per_epoch)
        self._write_evidence()  # without samples first, as another process may have ended
        with contextlib.suppress(RuntimeError):
            for bad, samples in zip(self._bad, zip(*gather_object([named]), strict=True), strict=True):
                bad["samples"] = samples
            self._write_evidence()
        first, last = self._bad[0], self._bad[-1]
        raise UserError(
            f"{len(self._bad)} updates in a row, {first['update']} to {last['update']}, were skipped, as loss or "
            f"gradients were not finite (loss {sum(last['losses']) / len(last['losses'])}, gradient norm "
            f"{last['grad_norm']}): --resume goes on with the weights before them; give a lower lr, or "
            f"--clip-grad 1.0; {self.run.bad_steps_file} tells more"
        )

    def _write_evidence(self) -> None:
        if self.accelerator.is_main_process:
            evidence = {"skipped": self._skipped, "updates_per_epoch": self.updates_per_epoch, "updates": self._bad}
            write_text(self.run.bad_steps_file, json.dumps(evidence, indent=2) + "\n")

    def _now(self) -> Any:
        """The time: in seconds on a CPU, and on a GPU as an event for which the host need not wait."""
        if self.accelerator.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin: Any, end: Any) -> float:
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3
