"""The training loop: one process or many, CPU or GPU, from a `Config` to a run's folder.

`Trainer.train` reads from top to bottom: epochs of updates, an evaluation, a checkpoint. Beside it stand setup.py (what
a run is made of), state.py (what it carries from update to update, by which it resumes), folder.py (what it leaves on
disk) and updates.py (what watches over its updates).
"""

import contextlib
import random
import signal
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils import set_seed
from tqdm import tqdm

from vision_longhorn.checkpoint import load_checkpoint
from vision_longhorn.data import DataError, device_batches
from vision_longhorn.data.transforms import input_settings
from vision_longhorn.devices import leave
from vision_longhorn.errors import UserError
from vision_longhorn.evaluation.evaluate import describe, evaluate
from vision_longhorn.plots import plot_runs
from vision_longhorn.signals import StopSignals
from vision_longhorn.training import setup
from vision_longhorn.training.config import Config
from vision_longhorn.training.folder import RunFolder
from vision_longhorn.training.state import SCHEDULE, RunState, changes_since
from vision_longhorn.training.step import TrainStep
from vision_longhorn.training.updates import UpdateMonitor


def train(cfg: Config, name: str) -> Path:
    """Trains as `cfg` says and returns the run's folder, whose default is called after `name`.

    Raises:
        UserError: For whatever of the config, the data or the run's folder does not fit.
    """
    with contextlib.ExitStack() as held:
        trainer = Trainer(cfg, name, held)
        trainer.train()
    leave(trainer.accelerator)
    return trainer.folder.path


class Trainer:
    """A run, from its set-up to its end.

    Args:
        cfg: The `Config`.
        name: What the run's folder is called by default, with the time after it.
        held: Closes what the run holds open, and lets others have its folder.

    Attributes:
        state: The `RunState`, all that changes from update to update.
        net: The network that trains, wrapped where there are several processes; `state.model` is the same weights.
    """

    def __init__(self, cfg: Config, name: str, held: contextlib.ExitStack) -> None:
        self.cfg = cfg
        run_dir = Path(cfg.run_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        self.accelerator = accelerator = setup.start_processes(cfg, run_dir)
        self.say, self.device = accelerator.print, accelerator.device
        self.global_batch = cfg.batch_size * accelerator.num_processes * cfg.grad_accum
        for note in cfg.notes:
            self.say(f"Note: {note}.")
        resuming = bool(cfg.resume) and Path(str(cfg.resume)).exists()
        self.folder = RunFolder(run_dir, cfg, resuming, accelerator, held)

        self.data = setup.open_data(cfg, accelerator)
        names = self.data.names()["class_names"]
        model, ema = setup.build_model(cfg, self.data.num_classes, accelerator, resuming, names)
        self.settings = input_settings(model, cfg.values())
        self.evaluated = {"val": model, "val_ema": ema.module} if ema else {"val": model}
        setup.share_out(cfg, list(self.evaluated.values()), accelerator)
        self.loaders = setup.build_loaders(cfg, self.data, self.settings, accelerator)
        held.callback(self.end_loaders)
        self.mixup, criterion = setup.build_loss(cfg, self.data.num_classes)

        per_epoch = self.loaders.updates_per_epoch
        self.peak_lr = setup.peak_rate(cfg, self.global_batch, resuming, self.say)
        optimizer = setup.build_optimizer(cfg, model, self.peak_lr)
        self.scheduler = setup.build_scheduler(cfg, optimizer, self.peak_lr, per_epoch)
        if ema:
            setup.choose_ema_warmup(cfg, ema, cfg.epochs * per_epoch, self.say)

        # In a file, the bar's many lines would run into the others.
        self.shows_bar = accelerator.is_main_process and sys.stderr.isatty()
        self.signals = StopSignals(run_dir)
        monitor = UpdateMonitor(
            accelerator,
            self.signals,
            run_dir,
            images=self.global_batch,
            updates_per_epoch=per_epoch,
            log_interval=cfg.log_interval,
            max_bad_steps=cfg.max_bad_steps,
            say=None if self.shows_bar else self.say,
        )
        self.state = RunState(model, ema, optimizer, accelerator.scaler, monitor, per_epoch)
        if resuming:
            self.resume()
        elif cfg.resume:
            self.say(f"{run_dir} has no checkpoint yet: it starts anew.")
        self.scheduler.step_update(self.state.updates)
        self.describe()
        self.net = setup.wrap(cfg, model, optimizer, self.settings["input_size"], accelerator)
        self.step = TrainStep(accelerator, model, self.net, criterion, optimizer, ema, cfg.clip_grad)

    def resume(self) -> None:
        """Goes on where the checkpoint stopped, and says what has changed since."""
        checkpoint, state = load_checkpoint(str(self.cfg.resume)), self.state
        names = self.data.names()["class_names"]
        setup.check_classes(checkpoint.get("class_names"), names, str(self.cfg.resume), "the data")
        state.load_state_dict(checkpoint, self.cfg)
        if state.epoch >= self.cfg.epochs:
            raise UserError(f"{self.folder.path} has finished its {state.epoch} epochs: give more by --epochs to go on")
        done = state.updates - state.epoch * state.updates_per_epoch
        self.say(
            f"Going on with {self.cfg.resume} after epoch {state.epoch} and {done} of {state.updates_per_epoch} "
            "updates."
        )
        if changes := changes_since(checkpoint, self.cfg, self.facts()):
            self.say(f"Note: since it stopped these have changed, so it may go on another way: {', '.join(changes)}.")

    # --------------------------------------------------------------------------------------------------- the loop

    def train(self) -> None:
        """Trains to the end, or to a signal."""
        cfg, state = self.cfg, self.state
        self.progress = tqdm(
            initial=state.updates * self.global_batch,
            unit="img",
            unit_scale=True,
            dynamic_ncols=True,
            total=cfg.epochs * state.updates_per_epoch * self.global_batch,
            disable=not self.shows_bar,
        )
        with self.progress, self.signals:
            if self.folder.resuming:
                self.open_folder()
                if state.history:
                    self.folder.write_history(state.history)
                if not self.folder.run.best.exists():  # the run has gone back behind it, say
                    state.best = -1.0
            while state.epoch < cfg.epochs:
                self.train_epoch()
                is_best = state.end_epoch(self.epoch_facts(), self.evaluate())
                self.report_epoch()
                self.save(is_best)
                self.folder.write_history(state.history)
        self.finish()

    def train_epoch(self) -> None:
        """The updates of an epoch that are left, with a checkpoint now and then, and where a signal stops the run."""
        cfg, state, monitor = self.cfg, self.state, self.state.monitor
        first, end = state.epoch * state.updates_per_epoch, (state.epoch + 1) * state.updates_per_epoch
        self.loaders.train.set_epoch(state.epoch, start_batch=(state.updates - first) * cfg.grad_accum)
        left = islice(self.loaders.train, (end - state.updates) * cfg.grad_accum)
        batches = device_batches(left, self.device, self.loaders.finish)
        self.net.train()
        self.progress.set_description(f"epoch {state.epoch + 1}/{cfg.epochs}")
        monitor.start_clock()
        while state.updates < end:
            self.train_step(batches)
            self.open_folder()
            if monitor.stop or state.updates == end or state.updates % cfg.checkpoint_interval == 0:
                monitor.read_all()
                if monitor.stop or state.updates < end:  # at the epoch's end, the evaluation comes first
                    self.save()
            if monitor.stop:
                self.stop()

    def train_step(self, batches: Iterator[Any]) -> None:
        """Makes an update, moves the schedule on, and notes both."""
        state = self.state
        lr = max(group["lr"] for group in state.optimizer.param_groups)  # with layer_decay, others have a share of it
        loss, grad_norm = self.step(self.passes(batches), state.updates + 1)
        state.updates += 1
        self.scheduler.step_update(state.updates)
        self.progress.update(self.global_batch)
        state.monitor.update(state.updates, loss, grad_norm, lr)

    def passes(self, batches: Iterator[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The batches of the next update, mixed. Each is drawn just before its pass.

        All randomness follows from seed, batch and process, so a resumed run goes on as if it had never stopped. The
        loader draws its own.
        """
        cfg, state, rank = self.cfg, self.state, self.accelerator.process_index
        for part in range(cfg.grad_accum):
            images, targets = state.monitor.next_batch(batches)
            set_seed(random.Random(f"{cfg.seed} {state.updates} {part} {rank}").getrandbits(32))
            yield self.mixup(images, targets) if self.mixup else (images, targets)

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Results of raw and averaged weights, "val" and "val_ema", in one pass over the data, if it is time for it."""
        done = self.state.epoch + 1
        if done % self.cfg.eval_interval and done != self.cfg.epochs:
            return {}
        try:
            return evaluate(
                self.evaluated, self.loaders.val, self.accelerator, self.data.val.num_samples, self.cfg.batch_size
            )
        except DataError as error:
            raise DataError(
                f"{error} (an evaluation leaves nothing out: mend or remove that one; --resume {self.folder.path} goes "
                "on from the last checkpoint)"
            ) from None

    def save(self, is_best: bool = False) -> None:
        """Saves a checkpoint, with all that a resumed run needs."""
        self.folder.save(self.state_dict(), is_best)

    def state_dict(self) -> dict[str, Any]:
        """The checkpoint: what the run is, and its state. All processes take part, the first one gets whole tensors."""
        return dict(
            arch=self.cfg.model,
            num_classes=self.data.num_classes,
            **self.data.names(),
            config=self.cfg.values(),
            facts=self.facts(),
            **self.state.state_dict(),
        )

    def stop(self) -> NoReturn:
        """Ends the process by the code that a shell gives to one ended by the signal that came."""
        number = self.state.monitor.stop
        self.say(
            f"Stopped by {signal.Signals(number).name} after update {self.state.updates}, --resume "
            f"{self.folder.path} goes on."
        )
        leave(self.accelerator)
        sys.exit(128 + number)

    def open_folder(self) -> None:
        """Makes the run's folder, unless it is open."""
        self.folder.open(self.facts(), self.state.started, self.state.updates)
        self.state.monitor.log = self.folder.log

    def end_loaders(self) -> None:
        """Ends the loaders' processes with the run, not when Python gets round to freeing it."""
        del self.loaders

    # ------------------------------------------------------------------------------------------- what the run says

    def facts(self) -> dict[str, Any]:
        """What the run's bits depend on beside its config."""
        cpu = self.device.type == "cpu"
        return {
            "processes": self.accelerator.num_processes,
            "global_batch": self.global_batch,
            "updates_per_epoch": self.loaders.updates_per_epoch,
            "peak_lr": self.peak_lr,
            "num_classes": self.data.num_classes,
            "schedule": SCHEDULE,
            "torch": str(torch.__version__),
            "device": "cpu" if cpu else torch.cuda.get_device_name(),
            **({"threads": torch.get_num_threads()} if cpu else {}),
        }

    def epoch_facts(self) -> dict[str, Any]:
        """What the history says of an epoch beside its evaluation."""
        skipped = torch.tensor(self.loaders.train.num_skipped, device=self.device)
        return {**self.state.monitor.last, "skipped_samples": self.accelerator.reduce(skipped).item()}

    def describe(self) -> None:
        """Says what is going to happen."""
        cfg, mixed = self.cfg, self.accelerator.mixed_precision
        size = "x".join(map(str, self.settings["input_size"]))
        count = sum(parameter.numel() for parameter in self.state.model.parameters())
        self.say(f"model   {cfg.model}, {count:,} parameters, input {size}, {self.data.num_classes} classes")
        self.say(
            f"data    {self.data.place}: {self.data.train.num_samples:,} samples to train on, "
            f"{self.data.val.num_samples:,} to evaluate"
        )
        if self.data.train.hint:
            self.say(f"        {self.data.train.hint}")
        for left_out in dict.fromkeys((self.data.train.left_out, self.data.val.left_out)):
            if left_out:
                self.say(f"        left out {left_out}")
        if self.cfg.keep_in_memory:
            self.say(f"        kept in the memory of each process: {self.loaders.kept_bytes / 1e6:,.1f} MB")
        self.say(
            f"run     {self.accelerator.num_processes} process(es) on {self.device.type} in "
            f"{'fp32' if mixed == 'no' else mixed}, {cfg.epochs} epochs of {self.loaders.updates_per_epoch} "
            f"updates of {self.global_batch} samples, peak lr {self.peak_lr:.2e}"
        )
        self.say(f"folder  {self.folder.path}")

    def report_epoch(self) -> None:
        """Says how the last epoch went, and adds its evaluation to the curves."""
        if not self.folder.log:
            return
        entry = self.state.history[-1]
        results, skipped = {tag: entry[tag] for tag in self.evaluated if tag in entry}, entry["skipped_samples"]
        accuracies = "".join(f"  {tag} top-1 {result['top1']:.2f} %" for tag, result in results.items())
        self.progress.write(
            f"epoch {entry['epoch']:3d}  loss {entry['train_loss']:.4f}  {entry['images_per_s']:,.0f} "
            f"images/s{accuracies}{f'  {skipped} samples skipped' if skipped else ''}"
        )
        self.folder.log.add_results(results, self.state.updates)

    def finish(self) -> None:
        """Draws the curves, and says what came of the run: its last epoch is always evaluated."""
        run, best, last = self.folder.run, self.state.best, self.state.history[-1]
        results = {tag: last[tag] for tag in self.evaluated}
        if self.folder.log:
            self.folder.log.finish(self.cfg, best)
            plot_runs([run.path], run.curves_file)
        for tag, result in results.items():
            self.say(
                f"{'raw weights' if tag == 'val' else 'EMA weights'}  {describe(result)} of {self.data.val.num_samples}"
            )
        self.say(f"best epoch   top-1 {best:.2f} %, saved as {run.best}")
        self.say(f"curves       {run.curves_file}, or live: tensorboard --logdir {run.path.parent}")
