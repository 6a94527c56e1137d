"""The training loop: one process or many, CPU or GPU, from a `Config` to a run's folder.

`Trainer.train` reads from top to bottom: epochs of updates, an evaluation, a checkpoint. Beside it stand setup.py (the
parts of a run), step.py (one update), updates.py (what is read of each update) and folder.py (what is left on disk).
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
from accelerate.utils import broadcast_object_list
from timm.models import get_model_args
from tqdm import tqdm

from vision_longhorn.checkpoint import load_checkpoint, load_weights, stated_model
from vision_longhorn.data import DataError, device_batches
from vision_longhorn.data.transforms import input_settings
from vision_longhorn.devices import leave, seed_generators
from vision_longhorn.errors import UserError
from vision_longhorn.evaluation.evaluate import describe, evaluate
from vision_longhorn.plots import plot_runs
from vision_longhorn.signals import StopSignals
from vision_longhorn.training import setup
from vision_longhorn.training.config import Config
from vision_longhorn.training.folder import RunFolder
from vision_longhorn.training.fsdp import shard, whole
from vision_longhorn.training.step import TrainStep
from vision_longhorn.training.updates import UpdateMonitor


def train(cfg: Config, name: str) -> Path:
    """Trains as `cfg` says and returns the run's folder, which by default is named after `name`."""
    with contextlib.ExitStack() as held:
        trainer = Trainer(cfg, name, held)
        trainer.train()
    leave(trainer.accelerator)
    return trainer.folder.path


class Trainer:
    """A run, from its set-up to its end. The end of `held` closes its files and unlocks its folder.

    Attributes:
        model, ema: The model, and its averaged weights if it has any. `net` is the model as it trains, wrapped.
        epoch, updates: How many are finished; the updates are those of all epochs.
        best: The best top-1 so far, in per cent.
        history: The results of each epoch.
        started: When the run first started.
    """

    def __init__(self, cfg: Config, name: str, held: contextlib.ExitStack) -> None:
        self.cfg = cfg
        self.epoch = self.updates = 0
        self.best, self.history = -1.0, list[dict[str, Any]]()
        self.started = time.strftime("%Y%m%d-%H%M%S")

        # The processes, and the run's folder
        run_dir = Path(cfg.run_dir or f"runs/{name}-{self.started}")
        self.accelerator = accelerator = setup.start_processes(cfg, run_dir)
        self.started, run_dir = broadcast_object_list([self.started, run_dir])  # another may have started later
        self.say, self.device = accelerator.print, accelerator.device
        for note in cfg.notes:
            self.say(f"Note: {note}.")
        self.folder = RunFolder(run_dir, cfg, accelerator, held)
        resuming = self.folder.checkpoint is not None
        checkpoint = load_checkpoint(str(cfg.resume)) if resuming else None
        self.global_batch = cfg.batch_size * accelerator.num_processes * cfg.grad_accum
        self.peak_lr = setup.peak_rate(cfg, self.global_batch, resuming)

        # Data and model
        *self.splits, self.num_classes, self.names = setup.open_data(cfg, accelerator)
        names = self.names["class_names"]
        self.model, self.ema = setup.build_model(cfg, self.num_classes, accelerator, checkpoint, names)
        self.evaluated = {"val": self.model, **({"val_ema": self.ema.module} if self.ema else {})}
        self.settings = input_settings(self.model, cfg.values())
        setup.check_scores(cfg, self.model, self.settings["input_size"], self.num_classes, accelerator)
        if cfg.fsdp:
            shard(accelerator, *self.evaluated.values(), compress_gradients=cfg.compress_gradients)
        self.loader, self.val_loader, self.finish_images = setup.build_loaders(
            cfg, self.splits, self.settings, accelerator
        )
        held.callback(self.end_loaders)
        self.mixup, criterion = setup.build_loss(cfg, self.num_classes)

        # Optimiser and schedule
        self.updates_per_epoch = len(self.loader) // cfg.grad_accum
        self.optimizer = setup.build_optimizer(cfg, self.model, self.peak_lr)
        self.scheduler = setup.build_scheduler(cfg, self.optimizer, self.peak_lr, self.updates_per_epoch)
        if self.ema:
            setup.choose_ema_warmup(cfg, self.ema, cfg.epochs * self.updates_per_epoch, accelerator)

        # Signals, and the reading of each update. In a file, the many lines of a bar would run into the others.
        shows_bar = accelerator.is_main_process and sys.stderr.isatty()
        self.signals, say = StopSignals(), None if shows_bar else self.say
        self.monitor = UpdateMonitor(self.folder, self.signals, self.global_batch, self.updates_per_epoch, say)

        # A checkpoint is loaded before compiling and capturing, which take the weights as they are.
        if checkpoint:
            self.resume(checkpoint)
        elif cfg.resume:
            self.say(f"{run_dir} has no checkpoint yet: it starts anew.")
        self.scheduler.step_update(self.updates)
        self.describe()
        self.net = setup.wrap(cfg, self.model, self.optimizer, self.settings["input_size"], accelerator)
        options: dict[str, Any] = dict(clip_grad=cfg.clip_grad, compress=cfg.compress_gradients)
        self.step = TrainStep(accelerator, self.model, self.net, criterion, self.optimizer, self.ema, **options)
        self.progress = tqdm(
            initial=self.updates * self.global_batch,
            unit="img",
            unit_scale=True,
            dynamic_ncols=True,
            total=cfg.epochs * self.updates_per_epoch * self.global_batch,
            disable=not shows_bar,
        )

    # --------------------------------------------------------------------------------------------------- the loop

    def train(self) -> None:
        """Trains to the end, or to a signal."""
        cfg, monitor = self.cfg, self.monitor
        with self.progress, self.signals:
            if self.folder.checkpoint:
                self.folder.open(self.facts(), self.started, self.updates)
                if self.history:
                    self.folder.write_history(self.history)
                if not self.folder.run.best.exists():  # the run may have gone back to before its best epoch
                    self.best = -1.0
            while self.epoch < cfg.epochs:
                batches, end = self.open_epoch(), (self.epoch + 1) * self.updates_per_epoch
                while self.updates < end:
                    self.train_step(batches)
                    self.folder.open(self.facts(), self.started, self.updates)
                    if monitor.stop or self.updates == end or self.updates % cfg.checkpoint_interval == 0:
                        monitor.read_all()
                        if monitor.stop or self.updates < end:  # at the epoch's end, the evaluation comes first
                            self.folder.save(self.state_dict(), is_best=False)
                    if monitor.stop:
                        self.stop()

                skipped = self.accelerator.reduce(torch.tensor(self.loader.num_skipped, device=self.device))
                facts = {**monitor.state["last"], "skipped_samples": skipped.item()}
                is_best = self.end_epoch(facts, self.evaluate())
                self.report_epoch()
                self.folder.save(self.state_dict(), is_best)
                self.folder.write_history(self.history)
        self.finish()

    def open_epoch(self) -> Iterator[Any]:
        """Returns the rest of this epoch's batches, on the device."""
        done = self.updates - self.epoch * self.updates_per_epoch
        self.loader.set_epoch(self.epoch, start_batch=done * self.cfg.grad_accum)
        left = islice(self.loader, (self.updates_per_epoch - done) * self.cfg.grad_accum)
        batches = device_batches(left, self.device, self.finish_images)
        self.net.train()
        self.progress.set_description(f"epoch {self.epoch + 1}/{self.cfg.epochs}")
        self.monitor.start_clock()
        return batches

    def train_step(self, batches: Iterator[Any]) -> None:
        """Makes an update, moves the schedule on, and notes both."""
        lr = max(group["lr"] for group in self.optimizer.param_groups)  # with layer_decay, others have a fraction of it
        loss, grad_norm = self.step(self.passes(batches), self.updates + 1)
        self.updates += 1
        self.scheduler.step_update(self.updates)
        self.progress.update(self.global_batch)
        self.monitor.update(self.updates, loss, grad_norm, lr)

    def passes(self, batches: Iterator[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the batches of the next update, mixed, each just before its pass.

        All random numbers follow from seed, batch and process, so a resumed run goes on as if it had never stopped.
        """
        seed, rank = self.cfg.seed, self.accelerator.process_index
        for part in range(self.cfg.grad_accum):
            images, targets = self.monitor.next_batch(batches)
            seed_generators(random.Random(f"{seed} {self.updates} {part} {rank}").getrandbits(32), self.device)
            yield self.mixup(images, targets) if self.mixup else (images, targets)

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Evaluates raw and averaged weights, "val" and "val_ema", in one pass; {} where it is not yet time for it."""
        done = self.epoch + 1
        if done % self.cfg.eval_interval and done != self.cfg.epochs:
            return {}
        count = self.splits[1].num_samples
        try:
            return evaluate(self.evaluated, self.val_loader, self.accelerator, count, self.cfg.batch_size)
        except DataError as error:
            raise DataError(
                f"{error} (an evaluation skips nothing: repair or remove that one; --resume {self.folder.path} goes "
                "on from the last checkpoint)"
            ) from None

    def end_epoch(self, facts: dict[str, Any], results: dict[str, dict[str, float]]) -> bool:
        """Adds an epoch to the history. Returns whether its weights, averaged if possible, are the best so far."""
        self.epoch += 1
        self.history.append({"epoch": self.epoch, **facts, **results})
        if not results:
            return False
        top1 = results["val_ema" if self.ema else "val"]["top1"]
        is_best, self.best = top1 > self.best, max(top1, self.best)
        return is_best

    def stop(self) -> NoReturn:
        """Ends the process with the exit code that a shell gives for the signal."""
        number = self.monitor.stop
        name = signal.Signals(number).name
        self.say(f"Stopped by {name} after update {self.updates}, --resume {self.folder.path} goes on.")
        leave(self.accelerator)
        sys.exit(128 + number)

    def end_loaders(self) -> None:
        """Ends the loaders' processes with the run; Python may free them much later."""
        del self.loader, self.val_loader

    # ------------------------------------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns the checkpoint. All processes must call this; only the first one gets whole tensors."""
        scaler, keep = self.accelerator.scaler, self.accelerator.is_main_process
        return dict(
            arch=self.cfg.model,
            model_args=get_model_args(self.model),
            num_classes=self.num_classes,
            **self.names,
            config=self.cfg.values(),
            facts=self.facts(),
            epoch=self.epoch,
            updates=self.updates,
            step_shift=self.folder.step_shift,
            watch=self.monitor.state,
            state_dict=whole(self.model.state_dict(), keep),
            optimizer=whole(self.optimizer.state_dict(), keep),
            best_metric=self.best,
            history=self.history,
            started=self.started,
            scaler=scaler and scaler.state_dict(),
            **({"state_dict_ema": whole(self.ema.module.state_dict(), keep)} if self.ema else {}),
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a checkpoint stopped, or at that fraction of the epoch if its number of updates has changed."""
        path = str(self.cfg.resume)
        load_weights(self.model, state, path)
        if self.ema:
            load_weights(self.ema.module, state, path, ema=True)
        setup.load_optimizer(self.cfg, self.optimizer, state)
        if self.accelerator.scaler and state.get("scaler"):
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.monitor.load(state["watch"])
        self.epoch, self.best, self.history = state["epoch"], state["best_metric"], state["history"]
        self.started = state.get("started", self.started)
        before = state["facts"]["updates_per_epoch"]
        done = (state["updates"] - self.epoch * before) * self.updates_per_epoch // before
        self.updates = self.epoch * self.updates_per_epoch + done
        self.folder.step_shift = max(0, state["updates"] + state.get("step_shift", 0) - self.updates)

    def resume(self, checkpoint: dict[str, Any]) -> None:
        """Goes on where the checkpoint stopped, and says what has changed since."""
        cfg = self.cfg
        setup.check_classes(checkpoint.get("class_names"), self.names["class_names"], str(cfg.resume), "the data")
        self.load_state_dict(checkpoint)
        if self.epoch >= cfg.epochs:
            raise UserError(f"{self.folder.path} has finished its {self.epoch} epochs: give more by --epochs to go on")
        done = self.updates - self.epoch * self.updates_per_epoch
        self.say(f"Going on with {cfg.resume} after epoch {self.epoch} and {done} of {self.updates_per_epoch} updates.")
        now = {**cfg.decisive(cfg.values()), **self.facts()}
        # An older checkpoint lacks newer fields; it was trained with their defaults.
        then = {
            "threads": now.get("threads"),
            "schedule": "a cosine that counts the warm-up",
            **cfg.decisive({**Config().values(), **checkpoint["config"], "model": stated_model(checkpoint)[0]}),
            **checkpoint["facts"],
        }
        if changes := [f"{key} {then.get(key)} -> {now[key]}" for key in now if then.get(key) != now[key]]:
            self.say(f"Note: these have changed since it stopped, so its results may differ: {', '.join(changes)}.")

    # ------------------------------------------------------------------------------------------- what the run says

    def facts(self) -> dict[str, Any]:
        """Returns the circumstances that the run's bits depend on, beside its config."""
        cpu = self.device.type == "cpu"
        return {
            "processes": self.accelerator.num_processes,
            "global_batch": self.global_batch,
            "updates_per_epoch": self.updates_per_epoch,
            "peak_lr": self.peak_lr,
            "num_classes": self.num_classes,
            "schedule": "warm-up, then a whole cosine",
            "torch": str(torch.__version__),
            "device": "cpu" if cpu else torch.cuda.get_device_name(),
            **({"threads": torch.get_num_threads()} if cpu else {}),
        }

    def describe(self) -> None:
        cfg, (train, val), precision = self.cfg, self.splits, self.accelerator.mixed_precision
        size = "x".join(map(str, self.settings["input_size"]))
        count = sum(parameter.numel() for parameter in self.model.parameters())
        left_out = dict.fromkeys(f"left out {one}" for one in (train.left_out, val.left_out) if one)
        counts = f"{train.num_samples:,} samples to train on, {val.num_samples:,} to evaluate"
        precision = "fp32" if precision == "no" else precision
        lines = [
            f"model   {cfg.model}, {count:,} parameters, input {size}, {self.num_classes} classes",
            f"data    {cfg.data}: {counts}",
            *(f"        {line}" for line in left_out),
            f"run     {self.accelerator.num_processes} process(es) on {self.device.type} in {precision}, {cfg.epochs} "
            f"epochs of {self.updates_per_epoch} updates of {self.global_batch} samples, peak lr {self.peak_lr:.2e}",
            f"folder  {self.folder.path}",
        ]
        self.say("\n".join(lines))

    def report_epoch(self) -> None:
        """Says how the last epoch went, and adds its evaluation to the curves."""
        entry = self.history[-1]
        results, skipped = {tag: entry[tag] for tag in self.evaluated if tag in entry}, entry["skipped_samples"]
        accuracies = "".join(f"  {tag} top-1 {result['top1']:.2f} %" for tag, result in results.items())
        if self.accelerator.is_main_process:
            self.progress.write(
                f"epoch {entry['epoch']:3d}  loss {entry['train_loss']:.4f}  {entry['images_per_s']:,.0f} "
                f"images/s{accuracies}{f'  {skipped} samples skipped' if skipped else ''}"
            )
        self.folder.add_results(results, self.updates)

    def finish(self) -> None:
        """Draws the curves, and says what came of the run."""
        run, last = self.folder.run, self.history[-1]
        self.folder.finish(self.best)
        if self.accelerator.is_main_process:
            plot_runs([run.path], run.curves_file)
        for tag in self.evaluated:  # the last epoch always has an evaluation
            weights = "raw weights" if tag == "val" else "EMA weights"
            self.say(f"{weights}  {describe(last[tag])} of {self.splits[1].num_samples}")
        self.say(f"best epoch   top-1 {self.best:.2f} %, saved as {run.best}")
        self.say(f"curves       {run.curves_file}, or live: tensorboard --logdir {run.path.parent}")
