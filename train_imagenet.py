"""Trains a Vision Longhorn, or any other timm model, on image shards: ImageNet, CIFAR-10, or the built-in digits.

    accelerate launch train_imagenet.py                                                 # demo: handwritten digits
    accelerate launch train_imagenet.py --config configs/vlonghorn_tiny.yaml --data DIR # ImageNet shards in DIR
    accelerate launch train_imagenet.py --resume runs/NAME                              # go on where it stopped

One process or many, CPU or GPU: `accelerate launch` decides. `--help` lists every value, vision_longhorn/config.py
defines them. The run's folder gets config.yaml, env.json, TensorBoard events, checkpoints (update-NUMBER.pt, last.pt,
best.pt), metrics.json, summary.csv and curves.png.
"""

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
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, set_seed
from timm.data import Mixup, create_transform
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from vision_longhorn.checkpoint import (
    create_model, load_checkpoint, load_weights, save_run, write_run_files, write_summary, write_text,
)
from vision_longhorn.config import DIGITS, Config, load_config
from vision_longhorn.curves import plot_runs
from vision_longhorn.data import device_batches, eval_loader, open_shards, split_transform, train_loader
from vision_longhorn.errors import UserError, bad_input, run_cli
from vision_longhorn.evaluate import (
    describe, evaluate, input_settings, locate_data, make_accelerator, train_transform,
)
from vision_longhorn.fsdp import compile_blocks, load_optimizer_state, shard, whole_optimizer_state, whole_weights
from vision_longhorn.signals import StopSignals
from vision_longhorn.watch import Watch, step_if_finite

FUSED = ("adam", "adamw", "momentum", "nesterov", "sgd")  # torch's optimisers that can skip an update on the device
FUSED_SHARDED = ("adam", "adamw")  # those of them that can do it with shards


def main(argv=None):
    """Trains as the command line `argv` says (default: the process's own) and returns the run's folder."""
    cfg, name = load_config(argv)
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS wants to be told before its first use
    torch.use_deterministic_algorithms(cfg.deterministic)
    ddp = DistributedDataParallelKwargs(
        gradient_as_bucket_view=True, static_graph=cfg.grad_accum == 1,  # torch has no static graph with accumulation
        comm_hook=DDPCommunicationHookType.BF16 if cfg.compress_gradients else DDPCommunicationHookType.NO,
    )
    accelerator = make_accelerator(cfg.device, cfg.precision, gradient_accumulation_steps=cfg.grad_accum,
                                   kwargs_handlers=[ddp])
    rank, world_size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    is_main, say = accelerator.is_main_process, accelerator.print
    global_batch = cfg.batch_size * world_size * cfg.grad_accum
    run_dir = Path(cfg.run_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if (run_dir / "config.yaml").exists() and not cfg.resume:
        raise UserError(f"{run_dir} holds a run: go on with it by --resume {run_dir}, or give another --run-dir")
    accelerator.wait_for_everyone()  # all have looked before the first one writes

    # Data. An epoch is as many samples as the training split holds, in whole updates.
    if cfg.data is None:
        raise UserError("no data: give --data DIR, a folder of shards; `python -m vision_longhorn.shards` makes them")
    if cfg.data == DIGITS:
        say("No shards named by --data DIR: this is the demo, which learns scikit-learn's handwritten digits.")
    data = locate_data(cfg.data, accelerator)
    train_shards = open_shards(data, cfg.train_split, cfg.train_samples, cfg.num_classes, cfg.allow_pipe)
    if not cfg.val_data and not os.path.isdir(data):
        raise UserError(f"data is {data!r}, which names training shards only: give --val-data, or a folder of both")
    val_shards = open_shards(cfg.val_data or data, cfg.val_split, cfg.val_samples, cfg.num_classes, cfg.allow_pipe)
    num_classes = cfg.num_classes or train_shards.num_classes
    if num_classes is None:
        raise UserError(f"the shards in {data} do not say how many classes they have: give --num-classes")

    # Model. The averaged weights (EMA) start as a copy of it, made before it is wrapped for several processes.
    set_seed(cfg.seed)
    model = create_model(cfg.model, None if cfg.resume else cfg.init, num_classes=num_classes,
                         drop_path_rate=cfg.drop_path or None, **cfg.model_kwargs)
    model.to(device)
    ema = ModelEmaV3(model, decay=cfg.ema_decay, use_warmup=cfg.ema_warmup) if cfg.ema_decay else None
    evaluated = {"val": model, "val_ema": ema.module} if ema else {"val": model}
    sharded = cfg.fsdp and world_size > 1
    if sharded:
        shard(accelerator, *evaluated.values(), compress_gradients=cfg.compress_gradients)
    elif cfg.fsdp:
        say("Note: fsdp has nothing to share out with one process.")

    # Transforms and loaders. Repeated augmentation happens in the training stream; what follows the crop, on the GPU.
    settings = input_settings(model, cfg.values())
    transform, finish = train_transform(settings, cfg), None
    if device.type == "cuda":
        try:
            transform, finish = split_transform(transform)
        except UserError as error:
            say(f"Note: {error}; all of the augmentation stays in the loader's processes.")
    share = dict(batch_size=cfg.batch_size, num_workers=cfg.workers, rank=rank, world_size=world_size,
                 num_classes=num_classes, pin_memory=device.type == "cuda")
    train_batches = train_loader(train_shards, transform, seed=cfg.seed, repeats=cfg.repeats,
                                 max_bad_samples=cfg.max_bad_samples, **share)
    val_batches = eval_loader(val_shards, create_transform(**settings), **share)
    updates_per_epoch = len(train_batches) // cfg.grad_accum
    if updates_per_epoch == 0:
        raise UserError(f"grad_accum is {cfg.grad_accum}, but an epoch has only {len(train_batches)} batches per "
                        "process: give a smaller grad_accum or batch_size")

    # Loss, optimiser, schedule
    mixup, criterion = None, LabelSmoothingCrossEntropy(cfg.smoothing)
    if cfg.mixup or cfg.cutmix:
        mixup = Mixup(cfg.mixup, cfg.cutmix, prob=cfg.mixup_prob, label_smoothing=cfg.smoothing,
                      num_classes=num_classes)
        criterion = SoftTargetCrossEntropy()
    peak_lr = cfg.lr * global_batch / cfg.lr_base_batch if cfg.lr_base_batch else cfg.lr
    with bad_input(f"opt={cfg.opt}"):
        fused = {"fused": True} if cfg.opt in (FUSED_SHARDED if sharded else FUSED) else {}
        optimizer = create_optimizer_v2(model, cfg.opt, lr=peak_lr, weight_decay=cfg.weight_decay,
                                        layer_decay=cfg.layer_decay, **fused)
    scheduler, _ = create_scheduler_v2(
        optimizer, "cosine", num_epochs=cfg.epochs, warmup_epochs=cfg.warmup_epochs, warmup_lr=cfg.warmup_lr,
        min_lr=cfg.min_lr, step_on_epochs=False, updates_per_epoch=updates_per_epoch,
    )

    # Resuming. The schedule needs no state but the number of updates, the data none but the place in the epoch.
    facts = {"processes": world_size, "global_batch": global_batch, "updates_per_epoch": updates_per_epoch,
             "peak_lr": peak_lr, "num_classes": num_classes, "torch": str(torch.__version__),
             "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    first_epoch, updates, best, history, watched = 0, 0, -1.0, [], None
    if cfg.resume and not Path(cfg.resume).exists():
        say(f"{run_dir} has no checkpoint yet: it starts anew.")
    elif cfg.resume:
        checkpoint = load_checkpoint(cfg.resume)
        load_weights(model, checkpoint, cfg.resume)
        if ema:
            load_weights(ema.module, checkpoint, cfg.resume, ema=True)
        load_optimizer(model, optimizer, checkpoint, cfg)
        first_epoch, best, history = checkpoint["epoch"], checkpoint["best_metric"], checkpoint["history"]
        if first_epoch >= cfg.epochs:
            raise UserError(f"{run_dir} has finished its {first_epoch} epochs: give more by --epochs to go on")
        before = checkpoint["facts"]["updates_per_epoch"]
        done = (checkpoint["updates"] - first_epoch * before) * updates_per_epoch // before
        updates, watched = first_epoch * updates_per_epoch + done, checkpoint["watch"]
        say(f"Going on with {cfg.resume} after epoch {first_epoch} and {done} of {updates_per_epoch} updates.")
        # What the checkpoint's time did not know yet was as it is by default.
        old = {**Config().values(), **checkpoint["config"], **checkpoint["facts"]}
        new = {**cfg.values(), **facts}
        changes = [f"{key} {old.get(key)} -> {new[key]}" for key in new if old.get(key) != new[key]]
        if changes:
            say(f"Note: since it stopped these have changed, so it may go on another way: {', '.join(changes)}.")
    scheduler.step_update(updates)

    if is_main:
        run_dir.mkdir(parents=True, exist_ok=True)
        for litter in run_dir.glob("*.tmp"):  # of a process that was killed while it wrote
            litter.unlink()
        write_run_files(run_dir, cfg, facts)
    writer = SummaryWriter(run_dir, purge_step=updates + 1 if cfg.resume else None) if is_main else None
    precision = "fp32" if accelerator.mixed_precision == "no" else accelerator.mixed_precision
    say(f"model   {cfg.model}, {sum(p.numel() for p in model.parameters()):,} parameters, input "
        f"{'x'.join(map(str, settings['input_size']))}, {num_classes} classes")
    say(f"data    {data}: {train_shards.num_samples:,} samples to train on, {val_shards.num_samples:,} to evaluate")
    say(f"run     {world_size} process(es) on {device.type} in {precision}, {cfg.epochs} epochs of {updates_per_epoch} "
        f"updates of {global_batch} samples, peak lr {peak_lr:.2e}")
    say(f"folder  {run_dir}")

    # `net` trains, wrapped where there are several processes; `model` is the same weights, for all else. The others
    # stay out of prepare(): it would step the scheduler once per process, and feed every process from the first one's
    # stream.
    # A sharded model sums over the processes by itself, and gets no more than autocast here.
    net = (accelerator.prepare_model(model, device_placement=False, evaluation_mode=True) if sharded
           else accelerator.prepare(model))
    if cfg.compile:
        compile_blocks(model) if sharded else model.compile()
    if world_size > 1 and not sharded:
        settle_buckets(accelerator, net, optimizer,
                       torch.zeros(cfg.batch_size, *settings["input_size"], device=device))
    progress = tqdm(initial=updates * global_batch, total=cfg.epochs * updates_per_epoch * global_batch, unit="img",
                    unit_scale=True, dynamic_ncols=True, mininterval=0.2 if sys.stderr.isatty() else 30,
                    disable=not is_main)

    with progress, StopSignals() as signals:
        watch = Watch(accelerator, signals, run_dir, writer, images=global_batch, updates_per_epoch=updates_per_epoch,
                      log_interval=cfg.log_interval, max_bad_steps=cfg.max_bad_steps, loader=train_batches,
                      grad_accum=cfg.grad_accum)
        if watched:
            watch.load_state_dict(watched)

        def save(epoch, is_best=False):
            """Saves all that a resumed run needs, with `epoch` finished epochs. The curves up to here come first."""
            state = dict(
                arch=cfg.model, num_classes=num_classes, config=cfg.values(), facts=facts, epoch=epoch,
                updates=updates, watch=watch.state_dict(), state_dict=whole_weights(model),
                optimizer=whole_optimizer_state(model, optimizer), best_metric=best, history=history,
            )
            if ema:
                state["state_dict_ema"] = whole_weights(ema.module)
            if is_main:
                writer.flush()
                save_run(run_dir, state, cfg.keep_checkpoints, is_best)
            accelerator.wait_for_everyone()

        def stop():
            """Ends the process by the code that a shell gives to one ended by this signal."""
            say(f"Stopped by {signal.Signals(watch.stop).name} after update {updates}, --resume {run_dir} goes on.")
            leave(accelerator)
            sys.exit(128 + watch.stop)

        for epoch in range(first_epoch, cfg.epochs):
            epoch_end = (epoch + 1) * updates_per_epoch
            train_batches.set_epoch(epoch, start_batch=(updates - epoch * updates_per_epoch) * cfg.grad_accum)
            left = (epoch_end - updates) * cfg.grad_accum
            batches = device_batches(islice(train_batches, left), device, finish)
            net.train()
            progress.set_description(f"epoch {epoch + 1}/{cfg.epochs}")
            watch.start_clock()

            while updates < epoch_end:
                loss_sum = 0
                for part in range(cfg.grad_accum):
                    images, targets = watch.next_batch(batches)
                    # All randomness follows from seed, batch and process, so a resumed run goes on as if it had never
                    # stopped. The loader sees to its own.
                    set_seed(random.Random(f"{cfg.seed} {updates} {part} {rank}").getrandbits(32))
                    if mixup:
                        images, targets = mixup(images, targets)
                    with accelerator.accumulate(net):
                        loss = criterion(net(images), targets)
                        loss_sum += loss.detach()
                        # A loss that is not finite makes all gradients so, and those all processes' sums.
                        accelerator.backward(loss * (1 + 0 * loss.detach()))
                grad_norm = accelerator.clip_grad_norm_(net.parameters(), cfg.clip_grad or math.inf)
                if sharded:
                    grad_norm = grad_norm.full_tensor()
                step_if_finite(optimizer, grad_norm)
                optimizer.zero_grad()

                updates += 1
                lr = optimizer.param_groups[0]["lr"]
                scheduler.step_update(updates)
                if ema:
                    ema.update(model, step=updates)
                progress.update(global_batch)
                watch.update(updates, loss_sum / cfg.grad_accum, grad_norm, lr)
                if watch.stop or updates % cfg.checkpoint_interval == 0 and updates < epoch_end:
                    watch.read_all()
                    save(epoch)
                if watch.stop:
                    stop()
            watch.read_all()
            if watch.stop:
                save(epoch)
                stop()

            # Raw and averaged weights are evaluated in one pass over the data; best.pt goes by the averaged ones.
            done = epoch + 1
            results, is_best = {}, False
            if done % cfg.eval_interval == 0 or done == cfg.epochs:
                results = evaluate(evaluated, val_batches, accelerator, val_shards.num_samples, cfg.batch_size)
                top1 = results["val_ema" if ema else "val"]["top1"]
                is_best, best = top1 > best, max(top1, best)
            skipped = accelerator.reduce(torch.tensor(train_batches.num_skipped, device=device)).item()
            history.append({"epoch": done, **watch.last, "skipped_samples": skipped, **results})
            if is_main:
                accuracies = "".join(f"  {tag} top-1 {result['top1']:.2f} %" for tag, result in results.items())
                progress.write(f"epoch {done:3d}  loss {watch.last['train_loss']:.4f}  "
                               f"{watch.last['images_per_s']:,.0f} images/s{accuracies}"
                               f"{f'  {skipped} samples skipped' if skipped else ''}")
                for tag, result in results.items():
                    for key in ("top1", "top5", "loss"):
                        writer.add_scalar(f"{tag}/{key}", result[key], updates)
            save(done, is_best)
            if is_main:
                write_text(run_dir / "metrics.json", json.dumps(history, indent=2) + "\n")
                write_summary(run_dir / "summary.csv", history)

    if is_main:
        writer.close()
        plot_runs([run_dir], run_dir / "curves.png")
    for tag, result in results.items():
        say(f"{'raw weights' if tag == 'val' else 'EMA weights'}  {describe(result)} of {val_shards.num_samples}")
    say(f"best epoch   top-1 {best:.2f} %, saved as {run_dir / 'best.pt'}")
    say(f"curves       {run_dir / 'curves.png'}, or live: tensorboard --logdir {run_dir.parent}")
    leave(accelerator)
    return run_dir


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


if __name__ == "__main__":
    run_cli(main, stopped="stopped; --resume RUN goes on from the last checkpoint")
