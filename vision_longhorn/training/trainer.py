"""The training loop: one process or many, CPU or GPU, from a `Config` to a run's folder.

`Trainer.train` reads from top to bottom: epochs of updates, an evaluation, a checkpoint. What a run carries from update
to update is the trainer's state, which `state_dict` gives and `load_state_dict` takes; resuming is loading it.
"""

import contextlib
import json
import math
import os
import random
import signal
import sys
import time
from itertools import islice
from pathlib import Path

import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, GradScalerKwargs, set_seed
from timm.data import Mixup, create_transform
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from tqdm import tqdm

from vision_longhorn.checkpoint import (
    create_model, load_checkpoint, load_weights, model_from_weights, save_run, write_run_files, write_summary,
    write_text,
)
from vision_longhorn.demo import DIGITS
from vision_longhorn.training.config import Config
from vision_longhorn.curves import plot_runs
from vision_longhorn.data import (
    default_workers, device_batches, eval_loader, open_shards, split_transform, train_loader,
)
from vision_longhorn.errors import UserError, bad_input
from vision_longhorn.data.transforms import input_settings, train_transform
from vision_longhorn.demo import locate_data
from vision_longhorn.devices import make_accelerator
from vision_longhorn.evaluation.evaluate import describe, evaluate
from vision_longhorn.training.fsdp import compile_blocks, load_optimizer_state, shard, whole_optimizer_state, whole_weights
from vision_longhorn.training.lock import RunLock
from vision_longhorn.training.runlog import RunLog, check_tracker
from vision_longhorn.command_line.signals import StopSignals
from vision_longhorn.training.updates import Watch, step_if_finite

FUSED = ("adam", "adamw", "momentum", "nesterov", "sgd")  # torch's optimisers that can skip an update on the device
FUSED_SHARDED = ("adam", "adamw")  # those of them that can do it with shards
SCALE = 2.0**10  # of the loss in fp16 at the start: torch's 2**16 would cost the first updates
WRITTEN = ("config.yaml", "env.json", "metrics.json", "summary.csv", "bad_steps.json", "curves.png", "best.pt", "last.pt",
           "update-*.pt")  # in a run's folder, each aside first
SCHEDULE = "warm-up, then a whole cosine"


def train(cfg, name):
    """Trains as `cfg` says and returns the run's folder, whose default is called after `name`.

    Raises:
        UserError: For whatever of the config, the data or the run's folder does not fit.
    """
    with contextlib.ExitStack() as held:
        trainer = Trainer(cfg, name, held)
        trainer.train()
    leave(trainer.accelerator)
    return trainer.run_dir


class Trainer:
    """A run, from its set-up to its end.

    Args:
        cfg: The `Config`.
        name: What the run's folder is called by default, with the time after it.
        held: `ExitStack` that closes what the run holds open, and lets others have its folder.
    """

    def __init__(self, cfg, name, held):
        self.cfg, self.held = cfg, held
        if cfg.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS wants to be told before its first use
        torch.use_deterministic_algorithms(cfg.deterministic)
        check_tracker(cfg.track)
        self.run_dir = Path(cfg.run_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        self.accelerator = make_accelerator(
            cfg.device, cfg.precision, gradient_accumulation_steps=cfg.grad_accum, log_with=cfg.track,
            project_dir=str(self.run_dir), kwargs_handlers=[
                GradScalerKwargs(init_scale=SCALE),
                DistributedDataParallelKwargs(
                    gradient_as_bucket_view=True,
                    static_graph=cfg.grad_accum == 1,  # torch has no static graph with accumulation
                    comm_hook=DDPCommunicationHookType.BF16 if cfg.compress_gradients else DDPCommunicationHookType.NO,
                )])
        self.scaler = self.accelerator.scaler  # of the loss in fp16, else None
        self.rank, self.world_size = self.accelerator.process_index, self.accelerator.num_processes
        self.device, self.is_main = self.accelerator.device, self.accelerator.is_main_process
        self.global_batch = cfg.batch_size * self.world_size * cfg.grad_accum
        self.sharded = cfg.fsdp and self.world_size > 1
        self.resuming = bool(cfg.resume) and Path(cfg.resume).exists()
        self.lock = self.log = None
        for note in cfg.notes:
            self.say(f"Note: {note}.")
        self._claim_folder()

        # What the run carries from update to update, beside model, averages and optimiser.
        self.epoch, self.updates, self.best, self.history, self.results = 0, 0, -1.0, [], {}
        self.started, self._watched = time.strftime("%Y%m%d-%H%M%S"), None

        self._open_data()
        self._make_model()
        self._make_loaders()
        self._make_optimizer()
        if self.resuming:
            self.load_state_dict(load_checkpoint(cfg.resume))
        elif cfg.resume:
            self.say(f"{self.run_dir} has no checkpoint yet: it starts anew.")
        self.scheduler.step_update(self.updates)
        self._describe()
        self._wrap()

    def say(self, text):
        self.accelerator.print(text)

    # ------------------------------------------------------------------------------------------------- setting up

    def _claim_folder(self):
        """Refuses a folder that holds another run, or that another process writes to."""
        self._refuse_others_run()
        self.accelerator.wait_for_everyone()  # all have looked before the first one writes
        if self.run_dir.exists():
            self._lock_folder()

    def _refuse_others_run(self):
        if not self.cfg.resume and any(self.run_dir.glob("*.pt")):
            raise UserError(f"{self.run_dir} holds a run: go on with it by --resume {self.run_dir}, or give another "
                            "--run-dir")
        if not self.resuming and (self.run_dir / "config.yaml").exists() and not (self.run_dir / "env.json").exists():
            raise UserError(f"{self.run_dir} holds a config.yaml that no run has written: give another --run-dir")

    def _lock_folder(self):
        if self.is_main and not self.lock:
            self.lock = RunLock(self.run_dir)
            self.held.callback(self.lock.release)
            if self.lock.note:
                self.say(f"Note: {self.lock.note}.")

    def _open_data(self):
        """An epoch is as many samples as the training split holds, in whole updates."""
        cfg = self.cfg
        if cfg.data is None:
            raise UserError("no data: give --data DIR, a folder of shards, or of images as train/CLASS/IMAGE and "
                            "val/CLASS/IMAGE")
        if cfg.data == DIGITS:
            self.say("No data named by --data DIR: this is the demo, which learns scikit-learn's handwritten digits.")
        self.data = locate_data(cfg.data, self.accelerator)
        self.train_shards = open_shards(self.data, cfg.train_split, cfg.train_samples, cfg.num_classes, cfg.allow_pipe,
                                        samples_option="--train-samples")
        if not cfg.val_data and not os.path.isdir(self.data):
            raise UserError(f"data is {self.data!r}, which names training shards only: give --val-data, or a folder of "
                            "both")
        self.val_shards = open_shards(cfg.val_data or self.data, cfg.val_split, cfg.val_samples, cfg.num_classes,
                                      cfg.allow_pipe, train=self.train_shards, samples_option="--val-samples")
        same_classes(self.train_shards, self.val_shards)
        self.num_classes = cfg.num_classes or self.train_shards.num_classes
        if self.num_classes is None:
            raise UserError(f"the shards in {self.data} do not say how many classes they have: give --num-classes")

    def _make_model(self):
        """The averaged weights (EMA) start as a copy of the model, made before it is wrapped for several processes."""
        cfg = self.cfg
        set_seed(cfg.seed)
        kwargs = dict(num_classes=self.num_classes, drop_path_rate=cfg.drop_path or None, **cfg.model_kwargs)
        if cfg.init and not self.resuming:
            self.model, loaded = model_from_weights(cfg.model, cfg.init, **kwargs)
            self.say(f"init    {loaded}")
        else:
            self.model = create_model(cfg.model, **kwargs)
        self.model.to(self.device)
        self.settings = input_settings(self.model, cfg.values())
        # How far the decay reaches depends on the number of updates, which is known when the loaders are.
        self.ema = ModelEmaV3(self.model, decay=cfg.ema_decay) if cfg.ema_decay else None
        self.evaluated = {"val": self.model, "val_ema": self.ema.module} if self.ema else {"val": self.model}
        if self.sharded:
            if self.scaler:
                raise UserError("precision fp16 does not go together with fsdp: use bf16 or fp32")
            shard(self.accelerator, *self.evaluated.values(), compress_gradients=cfg.compress_gradients)
        elif cfg.fsdp:
            self.say("Note: fsdp has nothing to share out with one process.")

    def _make_loaders(self):
        """Repeated augmentation happens in the training stream; what follows the crop, on the GPU."""
        cfg = self.cfg
        if cfg.workers is None:
            cfg.workers = default_workers()
        transform, self.finish = train_transform(self.settings, cfg), None
        if self.device.type == "cuda":
            try:
                transform, self.finish = split_transform(transform)
            except UserError as error:
                self.say(f"Note: {error}; all of the augmentation stays in the loader's processes.")
        share = dict(batch_size=cfg.batch_size, num_workers=cfg.workers, rank=self.rank, world_size=self.world_size,
                     num_classes=self.num_classes, pin_memory=self.device.type == "cuda")
        self.train_batches = train_loader(self.train_shards, transform, seed=cfg.seed, repeats=cfg.repeats,
                                          max_bad_samples=cfg.max_bad_samples, **share)
        self.val_batches = eval_loader(self.val_shards, create_transform(**self.settings), **share)
        self.held.callback(self._end_loaders)
        self.updates_per_epoch = len(self.train_batches) // cfg.grad_accum
        if self.updates_per_epoch == 0:
            raise UserError(f"grad_accum is {cfg.grad_accum}, but an epoch has only {len(self.train_batches)} batches "
                            "per process: give a smaller grad_accum or batch_size")

    def _end_loaders(self):
        """Ends the loaders' processes with the run, not when Python gets round to freeing it."""
        self.train_batches = self.val_batches = self.watch = None

    def _make_optimizer(self):
        cfg = self.cfg
        self.mixup, self.criterion = None, LabelSmoothingCrossEntropy(cfg.smoothing)
        if cfg.mixup or cfg.cutmix:
            self.mixup = Mixup(cfg.mixup, cfg.cutmix, prob=cfg.mixup_prob, label_smoothing=cfg.smoothing,
                               num_classes=self.num_classes)
            self.criterion = SoftTargetCrossEntropy()
        self.peak_lr = cfg.lr * self.global_batch / cfg.lr_base_batch if cfg.lr_base_batch else cfg.lr
        if cfg.min_lr > self.peak_lr:
            text = (f"min_lr is {cfg.min_lr}, above the peak of {self.peak_lr:.2e} (lr {cfg.lr} at a batch of "
                    f"{cfg.lr_base_batch}, here {self.global_batch}): give a smaller min_lr, or a larger lr")
            if not self.resuming:
                raise UserError(text)
            self.say(f"Note: {text}.")
        with bad_input(f"opt={cfg.opt}"):
            fused = {"fused": True} if cfg.opt in (FUSED_SHARDED if self.sharded else FUSED) else {}
            self.optimizer = create_optimizer_v2(self.model, cfg.opt, lr=self.peak_lr, weight_decay=cfg.weight_decay,
                                                 layer_decay=cfg.layer_decay, **fused)
        cosine = max(cfg.epochs - cfg.warmup_epochs, 1 / self.updates_per_epoch)
        self.scheduler, _ = create_scheduler_v2(
            self.optimizer, "cosine", num_epochs=cosine, warmup_epochs=cfg.warmup_epochs,
            warmup_prefix=True, warmup_lr=min(cfg.warmup_lr, self.peak_lr), min_lr=cfg.min_lr, step_on_epochs=False,
            updates_per_epoch=self.updates_per_epoch,
        )
        if self.ema:
            self._choose_ema_warmup()

    def _choose_ema_warmup(self):
        """An average that is still near the weights it started from says nothing of the run."""
        cfg, updates = self.cfg, self.cfg.epochs * self.updates_per_epoch
        start_left = cfg.ema_decay ** updates
        if cfg.ema_warmup is None:
            cfg.ema_warmup = start_left > 0.05
            if cfg.ema_warmup:
                self.say(f"Note: an EMA of decay {cfg.ema_decay} averages over {1 / (1 - cfg.ema_decay):,.0f} updates "
                         f"and this run has {updates:,}, so its decay grows from 0 (ema_warmup).")
        elif not cfg.ema_warmup and start_left > 0.05:
            self.say(f"Note: {start_left:.0%} of the averaged weights will be those at the start, after {updates:,} "
                     f"updates with an EMA of decay {cfg.ema_decay}: give --ema-warmup, or --ema-decay "
                     f"{max(0.0, 1 - 20 / updates):.4g}; best.pt goes by these weights.")
        self.ema.use_warmup = cfg.ema_warmup

    def _describe(self):
        cfg, mixed = self.cfg, self.accelerator.mixed_precision
        size = "x".join(map(str, self.settings["input_size"]))
        self.say(f"model   {cfg.model}, {sum(p.numel() for p in self.model.parameters()):,} parameters, input {size}, "
                 f"{self.num_classes} classes")
        self.say(f"data    {self.data}: {self.train_shards.num_samples:,} samples to train on, "
                 f"{self.val_shards.num_samples:,} to evaluate")
        if self.train_shards.hint:
            self.say(f"        {self.train_shards.hint}")
        self.say(f"run     {self.world_size} process(es) on {self.device.type} in {'fp32' if mixed == 'no' else mixed}, "
                 f"{cfg.epochs} epochs of {self.updates_per_epoch} updates of {self.global_batch} samples, peak lr "
                 f"{self.peak_lr:.2e}")
        self.say(f"folder  {self.run_dir}")

    def _wrap(self):
        """`net` trains, wrapped where there are several processes; `model` is the same weights, for all else."""
        # The others stay out of prepare(): it would step the scheduler once per process, and feed every process from
        # the first one's stream. A sharded model sums over the processes by itself, and gets no more than autocast.
        cfg = self.cfg
        self.net = (self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
                    if self.sharded else self.accelerator.prepare(self.model))
        if cfg.compile:
            compile_blocks(self.model) if self.sharded else self.model.compile()
        if self.world_size > 1 and not self.sharded:
            settle_buckets(self.accelerator, self.net, self.optimizer,
                           torch.zeros(cfg.batch_size, *self.settings["input_size"], device=self.device))

    def facts(self):
        """What the run's bits depend on beside its config."""
        cpu = self.device.type == "cpu"
        return {"processes": self.world_size, "global_batch": self.global_batch,
                "updates_per_epoch": self.updates_per_epoch, "peak_lr": self.peak_lr, "num_classes": self.num_classes,
                "schedule": SCHEDULE, "torch": str(torch.__version__),
                "device": "cpu" if cpu else torch.cuda.get_device_name(),
                **({"threads": torch.get_num_threads()} if cpu else {})}

    # --------------------------------------------------------------------------------------------------- the run

    def train(self):
        """Trains to the end, or to a signal."""
        cfg = self.cfg
        shown = self.is_main and sys.stderr.isatty()  # in a file, the bar's many lines would run into the others
        self.progress = tqdm(initial=self.updates * self.global_batch, unit="img", unit_scale=True, dynamic_ncols=True,
                             total=cfg.epochs * self.updates_per_epoch * self.global_batch, disable=not shown)
        with self.progress, StopSignals(self.run_dir) as signals:
            self.watch = Watch(
                self.accelerator, signals, self.run_dir, images=self.global_batch,
                updates_per_epoch=self.updates_per_epoch, log_interval=cfg.log_interval,
                max_bad_steps=cfg.max_bad_steps, loader=self.train_batches, grad_accum=cfg.grad_accum,
                say=None if shown else self.accelerator.print)
            if self.resuming:
                self.watch.load_state_dict(self._watched)
                self._open_folder()
            for epoch in range(self.epoch, cfg.epochs):
                self.train_epoch(epoch)
                is_best = self.evaluate_epoch(epoch + 1)
                self.save(epoch + 1, is_best)
                if self.is_main:
                    write_text(self.run_dir / "metrics.json", json.dumps(self.history, indent=2) + "\n")
                    write_summary(self.run_dir / "summary.csv", self.history)
        if self.is_main:
            self.log.finish(cfg, self.results, self.best)
            plot_runs([self.run_dir], self.run_dir / "curves.png")
        for tag, result in self.results.items():
            self.say(f"{'raw weights' if tag == 'val' else 'EMA weights'}  {describe(result)} of "
                     f"{self.val_shards.num_samples}")
        self.say(f"best epoch   top-1 {self.best:.2f} %, saved as {self.run_dir / 'best.pt'}")
        self.say(f"curves       {self.run_dir / 'curves.png'}, or live: tensorboard --logdir {self.run_dir.parent}")

    def train_epoch(self, epoch):
        """The updates of an epoch (counted from 0) that are left."""
        cfg, end = self.cfg, (epoch + 1) * self.updates_per_epoch
        self.train_batches.set_epoch(epoch, start_batch=(self.updates - epoch * self.updates_per_epoch)
                                     * cfg.grad_accum)
        batches = device_batches(islice(self.train_batches, (end - self.updates) * cfg.grad_accum), self.device,
                                 self.finish)
        self.net.train()
        self.progress.set_description(f"epoch {epoch + 1}/{cfg.epochs}")
        self.watch.start_clock()
        while self.updates < end:
            self.train_step(batches)
            self._open_folder()
            if self.watch.stop or self.updates % cfg.checkpoint_interval == 0 and self.updates < end:
                self.watch.read_all()
                self.save(epoch)
            if self.watch.stop:
                self.stop()
        self.watch.read_all()
        if self.watch.stop:
            self.save(epoch)
            self.stop()

    def train_step(self, batches):
        """One update, of `grad_accum` batches."""
        cfg, accelerator, loss_sum = self.cfg, self.accelerator, 0
        for part in range(cfg.grad_accum):
            images, targets = self.watch.next_batch(batches)
            # All randomness follows from seed, batch and process, so a resumed run goes on as if it had never stopped.
            # The loader sees to its own.
            set_seed(random.Random(f"{cfg.seed} {self.updates} {part} {self.rank}").getrandbits(32))
            if self.mixup:
                images, targets = self.mixup(images, targets)
            with accelerator.accumulate(self.net):
                loss = self.criterion(self.net(images), targets)
                loss_sum += loss.detach()
                # A loss that is not finite makes all gradients so, and those all processes' sums.
                accelerator.backward(loss * (1 + 0 * loss.detach()))
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        grad_norm = accelerator.clip_grad_norm_(self.net.parameters(), math.inf if cfg.clip_grad is None
                                                else cfg.clip_grad)
        if self.sharded:
            grad_norm = grad_norm.full_tensor()
        step_if_finite(self.optimizer, grad_norm)
        if self.scaler:
            self.scaler.update()
        self.optimizer.zero_grad()

        self.updates += 1
        lr = max(group["lr"] for group in self.optimizer.param_groups)  # with layer_decay, others have a share of it
        self.scheduler.step_update(self.updates)
        if self.ema:
            self.ema.update(self.model, step=self.updates)
        self.progress.update(self.global_batch)
        self.watch.update(self.updates, loss_sum / cfg.grad_accum, grad_norm, lr)

    def evaluate_epoch(self, done):
        """Evaluates raw and averaged weights in one pass, if it is time to, and notes the epoch.

        Returns:
            Whether its weights, averaged ones where there are any, are the best so far.
        """
        cfg, is_best = self.cfg, False
        self.results = {}
        if done % cfg.eval_interval == 0 or done == cfg.epochs:
            self.results = evaluate(self.evaluated, self.val_batches, self.accelerator, self.val_shards.num_samples,
                                    cfg.batch_size)
            top1 = self.results["val_ema" if self.ema else "val"]["top1"]
            is_best, self.best = top1 > self.best, max(top1, self.best)
        skipped = self.accelerator.reduce(torch.tensor(self.train_batches.num_skipped, device=self.device)).item()
        last = self.watch.last
        self.history.append({"epoch": done, **last, "skipped_samples": skipped, **self.results})
        if self.is_main:
            accuracies = "".join(f"  {tag} top-1 {result['top1']:.2f} %" for tag, result in self.results.items())
            self.progress.write(f"epoch {done:3d}  loss {last['train_loss']:.4f}  {last['images_per_s']:,.0f} images/s"
                                f"{accuracies}{f'  {skipped} samples skipped' if skipped else ''}")
            self.log.add({f"{tag}/{key}": result[key] for tag, result in self.results.items()
                          for key in ("top1", "top5", "loss")}, self.updates)
        return is_best

    def stop(self):
        """Ends the process by the code that a shell gives to one ended by this signal."""
        self.say(f"Stopped by {signal.Signals(self.watch.stop).name} after update {self.updates}, --resume "
                 f"{self.run_dir} goes on.")
        leave(self.accelerator)
        sys.exit(128 + self.watch.stop)

    # ------------------------------------------------------------------------------------------ the run's folder

    def _open_folder(self):
        """Makes the folder once there is something to put into it, so that a command that fails at once leaves none."""
        if self.log or not self.is_main:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock_folder()
        self._refuse_others_run()  # one that began and ended since the first look
        for litter in (path for name in WRITTEN for path in self.run_dir.glob(f"{name}.tmp")):
            litter.unlink()  # of a process that was killed while it wrote
        if not self.resuming and (aside := set_aside(self.run_dir)):
            self.say(f"Note: what a run without a checkpoint left in {self.run_dir} is in {aside} now.")
        write_run_files(self.run_dir, self.cfg, self.facts())
        self.log = self.watch.log = RunLog(self.accelerator, self.run_dir, self.cfg, self.started,
                                           purge_step=self.updates + 1 if self.resuming else None)
        self.held.callback(self.log.close)

    def save(self, epoch, is_best=False):
        """Saves all that a resumed run needs, with `epoch` finished epochs. The curves up to here come first."""
        state = self.state_dict(epoch)
        if self.is_main:
            self.log.flush()
            save_run(self.run_dir, state, self.cfg.keep_checkpoints, is_best)
        self.accelerator.wait_for_everyone()

    def state_dict(self, epoch):
        """The checkpoint, with `epoch` finished epochs. All processes take part, the first one gets whole tensors."""
        state = dict(
            arch=self.cfg.model, num_classes=self.num_classes, class_names=names_of(self.train_shards.class_names, self),
            display_names=names_of(self.train_shards.display_names, self), config=self.cfg.values(),
            facts=self.facts(), epoch=epoch, updates=self.updates, watch=self.watch.state_dict(),
            state_dict=whole_weights(self.model), optimizer=whole_optimizer_state(self.model, self.optimizer),
            best_metric=self.best, history=self.history, started=self.started, scaler=self.scaler and self.scaler.state_dict(),
        )
        if self.ema:
            state["state_dict_ema"] = whole_weights(self.ema.module)
        return state

    def load_state_dict(self, state):
        """Goes on where the checkpoint `state` stopped, and says what has changed since.

        The schedule needs no state but the number of updates, the data none but the place in the epoch.
        """
        cfg = self.cfg
        load_weights(self.model, state, cfg.resume)
        if self.ema:
            load_weights(self.ema.module, state, cfg.resume, ema=True)
        load_optimizer(self.model, self.optimizer, state, cfg)
        if self.scaler and state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])
        self.epoch, self.best, self.history = state["epoch"], state["best_metric"], state["history"]
        if self.epoch >= cfg.epochs:
            raise UserError(f"{self.run_dir} has finished its {self.epoch} epochs: give more by --epochs to go on")
        before = state["facts"]["updates_per_epoch"]
        done = (state["updates"] - self.epoch * before) * self.updates_per_epoch // before
        self.started = state.get("started", self.started)
        self.updates, self._watched = self.epoch * self.updates_per_epoch + done, state["watch"]
        self.say(f"Going on with {cfg.resume} after epoch {self.epoch} and {done} of {self.updates_per_epoch} updates.")
        # What the checkpoint's time did not know yet was as it is by default.
        new = {**cfg.values(), **self.facts()}
        old = {"threads": new.get("threads"), "schedule": "a cosine that counts the warm-up", **Config().values(),
               **state["config"], **state["facts"]}
        changes = [f"{key} {old.get(key)} -> {new[key]}" for key in new if old.get(key) != new[key]]
        if changes:
            self.say(f"Note: since it stopped these have changed, so it may go on another way: {', '.join(changes)}.")


def names_of(names, trainer):
    """Names of classes, if there is one for each class of the model."""
    return list(names) if names and len(names) == trainer.num_classes else None


def same_classes(train_shards, val_shards):
    """Raises UserError where both say what their classes are called, and not the same."""
    names = train_shards.class_names, val_shards.class_names
    if all(names) and list(names[0]) != list(names[1]):
        i = next((i for i, pair in enumerate(zip(*names)) if pair[0] != pair[1]), min(map(len, names)))
        first, second = (repr(some[i]) if i < len(some) else "missing" for some in names)
        raise UserError(f"class {i} is {first} in the training data and {second} in that for evaluation: give data with "
                        "the same classes")


def set_aside(run_dir):
    """Moves what a run that never came to a checkpoint left in its folder into a folder within, where it stays.

    Returns:
        That folder, None where there was nothing.
    """
    if not (run_dir / "env.json").exists():  # none of ours
        return None
    aside = next(path for n in range(1, 1 << 30) if not (path := run_dir / f"before-{n}").exists())
    aside.mkdir()
    for path in sorted(run_dir.iterdir()):
        if path.name in ("config.yaml", "env.json", "bad_steps.json") or "tfevents" in path.name:
            path.rename(aside / path.name)
    return aside


def load_optimizer(model, optimizer, checkpoint, cfg):
    """Moments and step counts of a checkpoint; the settings are those of the config, which may have changed."""
    if checkpoint["config"]["opt"] != cfg.opt:
        raise UserError(f"opt is {cfg.opt!r}, but {cfg.resume} has the moments of {checkpoint['config']['opt']!r}")
    saved = checkpoint["optimizer"]
    # Some of timm's optimisers count their steps among the settings; a new one has no count yet.
    groups = [{**group, **own, "params": group["params"]}
              for own, group in zip(optimizer.param_groups, saved["param_groups"])]
    with bad_input(f"resuming with weight_decay={cfg.weight_decay}"):  # 0 makes one group of what else is two
        load_optimizer_state(model, optimizer, {"state": saved["state"], "param_groups": groups})


def settle_buckets(accelerator, net, optimizer, images):
    """Two forward and backward passes that change nothing, for DistributedDataParallel.

    It sorts the gradients into its buckets anew after its first pass, or with a static graph after the second, by the
    order in which they came. The order in which a gradient is summed over the processes depends on its place in there,
    so without these passes a resumed run's first updates would differ, in the last bit, from those of a run that never
    stopped.
    """
    before = [buffer.clone() for buffer in net.buffers()]
    for _ in range(2):
        accelerator.backward(net(images).sum())
        optimizer.zero_grad()
    for buffer, value in zip(net.buffers(), before):
        buffer.copy_(value)


def leave(accelerator):
    """Leaves the group of processes, where that does more good than harm."""
    if accelerator.device.type == "cuda":
        accelerator.end_training()  # NCCL wants it; with gloo, torch 2.7 can wait in it for itself, for ever
