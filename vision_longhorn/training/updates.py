"""What watches over a training run: its updates read late, those that are not finite skipped, a curve of each value."""

import collections
import json
import math
import threading
import time
from pathlib import Path

import psutil
import torch
from accelerate.utils import gather_object

from vision_longhorn.checkpoint import write_text
from vision_longhorn.data.index import place
from vision_longhorn.errors import UserError, one_line
from vision_longhorn.command_line.signals import SIGNALS

QUIET = 30  # seconds without a line, where no bar shows how far it is
PATIENCE = 300  # seconds to look for the samples of bad updates; NCCL lets a process wait for others twice as long


def step_if_finite(optimizer, grad_norm):
    """`optimizer.step()`, but weights, moments and step counts stay as they are where the gradient is not finite.

    torch's fused optimisers decide that on the device. The others are told by the host, which waits for the device.

    Args:
        optimizer: The optimiser.
        grad_norm: Norm of the whole gradient, () float32 on the device.
    """
    # The first update has to create the moments, and where it is left out on the device, SGD's are never filled.
    if getattr(optimizer, "_step_supports_amp_scaling", False) and optimizer.state:
        optimizer.grad_scale, optimizer.found_inf = None, (~grad_norm.isfinite()).float()
        optimizer.step()
    elif grad_norm.isfinite():
        optimizer.step()


class Watch:
    """Follows the updates of a run on the host, each when the next one has been queued, so the device never waits.

    All processes read the same values at the same update, and so take the same decisions.

    Args:
        accelerator: Gives device, rank, number of processes, and the sum over them.
        signals: `StopSignals` of this process.
        run_dir: Folder of the run, for evidence.
        images: Samples in an update, over all processes.
        updates_per_epoch: Updates in an epoch; the last one always gets an entry in the curves.
        log_interval: Updates between two entries in the curves.
        max_bad_steps: So many skipped updates in a row, or all of an epoch's, are an error.
        loader: This process's `train_loader`, to name the samples of skipped updates; None: they are not named.
        grad_accum: Batches in an update.
        say: Takes a line about how far it is, now and then, where no bar shows it; None: nothing is said.

    Attributes:
        log: `RunLog` of the run; None on all processes but one, and there until the run has a folder.
        stop: A signal that one of the processes has received, or 0.
        last: Dict with the latest entry's "train_loss", "lr" and "images_per_s".
    """

    def __init__(self, accelerator, signals, run_dir, *, images, updates_per_epoch, log_interval, max_bad_steps,
                 loader=None, grad_accum=1, say=None):
        self.accelerator, self.signals, self.run_dir, self.log = accelerator, signals, Path(run_dir), None
        self.say, self._said = say, time.monotonic()
        self.images, self.updates_per_epoch = images, updates_per_epoch
        self.log_interval, self.max_bad_steps = log_interval, min(max_bad_steps, updates_per_epoch)
        self.loader, self.grad_accum = loader, grad_accum
        self.stop, self.last = 0, {}
        self._loss_sum, self._losses, self._skipped, self._bad = 0.0, 0, 0, []
        self._queue, self._waits = collections.deque(), []
        self.start_clock()

    def state_dict(self):
        """What a resumed run needs, so that its curves go on as well. `read_all` comes first."""
        return {"loss_sum": self._loss_sum, "losses": self._losses, "skipped": self._skipped, "bad": self._bad,
                "last": self.last}

    def load_state_dict(self, state):
        self._loss_sum, self._losses, self._skipped = state["loss_sum"], state["losses"], state["skipped"]
        # Their batches were those of another run, if it goes on with other settings.
        self._bad, self.last = [{**bad, "before_resuming": True} for bad in state["bad"]], dict(state["last"])

    def start_clock(self):
        """Leaves the time since the last update out of the speed."""
        self._since, self._updates, self._waited = self._now(), 0, 0.0

    def next_batch(self, batches):
        """The next batch of the iterator; the time for which the device had to wait for it is noted."""
        begin = self._now()
        batch = next(batches, None)
        if batch is None:
            raise UserError("the training data ended within an epoch: check the shards by `python -m "
                            "vision_longhorn.shards verify DIR`")
        self._waits.append((begin, self._now()))
        return batch

    def update(self, number, loss, grad_norm, lr):
        """Notes update `number` (from 1) and reads the one before.

        Args:
            number: Updates so far.
            loss: This process's mean loss, () on the device.
            grad_norm: Norm of the gradient averaged over the processes, () on the device; not finite where the update
                was skipped.
            lr: Learning rate.

        Raises:
            UserError: Where too many updates in a row were skipped. The evidence is in bad_steps.json.
        """
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        facts = torch.zeros(world_size + len(SIGNALS), device=self.accelerator.device)
        facts[rank] = loss
        if self.signals.received:
            facts[world_size + SIGNALS.index(self.signals.received)].fill_(1)  # without waiting, unlike an assignment
        facts = torch.cat([self.accelerator.reduce(facts, "sum"), grad_norm.reshape(1)])
        facts = facts.to("cpu", non_blocking=True)
        self._queue.append((number, lr, facts, self._waits, self._now()))
        self._waits = []
        self._read(leave=1)

    def read_all(self):
        """Reads the last update too, which waits for the device."""
        self._read(leave=0)

    def _read(self, leave):
        world_size = self.accelerator.num_processes
        while len(self._queue) > leave:
            number, lr, facts, waits, end = self._queue.popleft()
            if not isinstance(end, float):
                end.synchronize()
            *facts, grad_norm = facts.tolist()
            losses, signals = facts[:world_size], facts[world_size:]
            self.stop = self.stop or next((int(name) for name, count in zip(SIGNALS, signals) if count), 0)
            self._updates += 1
            self._waited += sum(_seconds(*wait) for wait in waits)
            if math.isfinite(grad_norm):
                self._loss_sum += sum(losses) / world_size
                self._losses += 1
                self._bad = []
            else:
                self._skipped += 1
                self._bad.append({"update": number, "losses": losses, "grad_norm": grad_norm, "lr": lr})
            if number % self.log_interval == 0 or number % self.updates_per_epoch == 0:
                self._log(number, lr, grad_norm, end)
            if len(self._bad) >= self.max_bad_steps:
                self._give_up()

    def _log(self, number, lr, grad_norm, end):
        seconds = _seconds(self._since, end)
        loss = self._loss_sum / self._losses if self._losses else math.nan
        self.last = {"train_loss": loss, "lr": lr, "images_per_s": self._updates * self.images / seconds}
        if self.say and time.monotonic() > self._said + QUIET and number % self.updates_per_epoch:
            self._said = time.monotonic()
            self.say(f"update {number % self.updates_per_epoch} of {self.updates_per_epoch}, epoch "
                     f"{number // self.updates_per_epoch + 1}  loss {loss:.4f}  {self.last['images_per_s']:,.0f} "
                     "images/s")
        if self.log:
            scalars = {"loss": loss, "lr": lr, "images_per_s": self.last["images_per_s"], "grad_norm": grad_norm,
                       "epoch": number / self.updates_per_epoch, "data_wait": self._waited / seconds,
                       "skipped": self._skipped, **self._memory()}
            self.log.add({f"train/{tag}": value for tag, value in scalars.items()}, number)
        self._loss_sum, self._losses = 0.0, 0
        self._since, self._updates, self._waited = end, 0, 0.0

    def _memory(self):
        """GiB: the host's for this process and its loader's workers, the device's peak since the last entry."""
        host = 0
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            try:
                host += process.memory_info().rss
            except psutil.Error:  # it has just ended
                pass
        memory = {"host_gib": host / 2**30}
        if self.accelerator.device.type == "cuda":
            memory["device_gib"] = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        return memory

    def _give_up(self):
        first, last = self._bad[0], self._bad[-1]
        file = self.run_dir / "bad_steps.json"
        for bad in self._bad:
            bad["epoch"], bad["update_of_epoch"] = divmod(bad["update"] - 1, self.updates_per_epoch)
        evidence = {"skipped": self._skipped, "updates_per_epoch": self.updates_per_epoch, "updates": self._bad}

        def write():
            if self.accelerator.is_main_process:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                write_text(file, json.dumps(evidence, indent=2) + "\n")
        write()  # at once, as finding the samples takes its time and may fail
        if self.loader:
            self.accelerator.print(f"Updates were skipped: looking for their samples, {PATIENCE} s at most.")
            evidence["samples_unknown"] = self._name_samples()
            write()
        loss = sum(last["losses"]) / len(last["losses"])
        raise UserError(
            f"{len(self._bad)} updates in a row, {first['update']} to {last['update']}, were skipped, as loss or "
            f"gradients were not finite (loss {loss}, gradient norm {last['grad_norm']}): --resume goes on with the "
            f"weights before them; give a lower lr, or --clip-grad 1.0; {file} tells more"
        )

    def _name_samples(self):
        """Adds the samples of its batches, for each process, to every bad update.

        Returns:
            Dict of process number to why it could not say them.
        """
        found = [f"not found within {PATIENCE} s"]

        def look():
            try:
                found[0] = self._samples()
            except Exception as error:  # whatever it is, the run has something else to say
                found[0] = f"{type(error).__name__}: {one_line(error)}"

        # A thread, as a server that hangs cannot be left in another way.
        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        end = time.monotonic() + PATIENCE
        while thread.is_alive() and time.monotonic() < end and not self.signals.received:
            thread.join(0.2)
        try:
            parts = gather_object(found[:])
        except Exception as error:  # as above; another process may be gone
            parts = [f"{type(error).__name__}: {one_line(error)}"] * self.accelerator.num_processes
        for bad in self._bad:
            bad["samples"] = [part.get(bad["update"]) if isinstance(part, dict) else None for part in parts]
        return {rank: part for rank, part in enumerate(parts) if isinstance(part, str)}

    def _samples(self):
        """Dict of bad update to the samples of this process, in the order of its batches."""
        batches = {}  # by epoch
        for bad in self._bad:
            first = bad["update_of_epoch"] * self.grad_accum
            if "before_resuming" not in bad:
                batches.setdefault(bad["epoch"], {})[bad["update"]] = range(first, first + self.grad_accum)
        samples = {}
        for epoch, of_updates in batches.items():
            found = self.loader.samples_of(epoch, [batch for numbers in of_updates.values() for batch in numbers])
            for update, numbers in of_updates.items():
                samples[update] = [place({"__url__": shard, "__key__": key})
                                   for batch in numbers for shard, key in found[batch]]
        return samples

    def _now(self):
        """Time on the device's own line, which the host need not wait for; on a CPU that of the host."""
        if self.accelerator.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin, end):
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3
