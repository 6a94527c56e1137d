"""Trains a Vision Longhorn, or any other timm model, on image shards: ImageNet, CIFAR-10, or the built-in digits.

    accelerate launch train_imagenet.py                                                 # demo: handwritten digits
    accelerate launch train_imagenet.py --config configs/vlonghorn_tiny.yaml --data DIR # ImageNet shards in DIR
    accelerate launch train_imagenet.py --resume runs/NAME                              # go on after the last epoch

One process or many, CPU or GPU: `accelerate launch` decides. `--help` lists every value, vision_longhorn/config.py
defines them. The run's folder gets config.yaml, env.json, TensorBoard events, last.pt, best.pt, metrics.json and
curves.png.
"""

import json
import math
import sys
import time
from itertools import islice
from pathlib import Path

import torch
from accelerate.utils import set_seed
from timm.data import Mixup, create_transform
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from vision_longhorn.checkpoint import (
    create_model, load_checkpoint, load_weights, save_checkpoint, write_run_files, write_text,
)
from vision_longhorn.config import DIGITS, load_config
from vision_longhorn.curves import plot_runs
from vision_longhorn.data import eval_loader, open_shards, train_loader
from vision_longhorn.errors import UserError, bad_input, run_cli
from vision_longhorn.evaluate import (
    describe, evaluate, input_settings, locate_data, make_accelerator, train_transform,
)


def main(argv=None):
    """Trains as the command line `argv` says (default: the process's own) and returns the run's folder."""
    cfg, name = load_config(argv)
    accelerator = make_accelerator(cfg.device, cfg.precision, gradient_accumulation_steps=cfg.grad_accum)
    rank, world_size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    is_main, say = accelerator.is_main_process, accelerator.print
    global_batch = cfg.batch_size * world_size * cfg.grad_accum
    run_dir = Path(cfg.run_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    last = run_dir / "last.pt"
    if (run_dir / "config.yaml").exists() and not cfg.resume:
        remedy = f"go on with it by --resume {run_dir}" if last.exists() else "remove it, it stopped in its first epoch"
        raise UserError(f"{run_dir} holds a run: {remedy}, or give another --run-dir")
    accelerator.wait_for_everyone()  # all have looked before the first one writes

    # Data. An epoch is as many samples as the training split holds, in whole updates.
    if cfg.data is None:
        raise UserError("no data: give --data DIR, a folder of shards; `python -m vision_longhorn.shards` makes them")
    if cfg.data == DIGITS:
        say("No shards named by --data DIR: this is the demo, which learns scikit-learn's handwritten digits.")
    data = locate_data(cfg.data, accelerator)
    train_shards = open_shards(data, cfg.train_split, cfg.train_samples, cfg.num_classes)
    if not cfg.val_data and not Path(data).is_dir():
        raise UserError(f"data is {data!r}, which names training shards only: give --val-data, or a folder of both")
    val_shards = open_shards(cfg.val_data or data, cfg.val_split, cfg.val_samples, cfg.num_classes)
    num_classes = cfg.num_classes or train_shards.num_classes
    if num_classes is None:
        raise UserError(f"the shards in {data} do not say how many classes they have: give --num-classes")

    # Model. The averaged weights (EMA) start as a copy of it, made before it is wrapped for several processes.
    set_seed(cfg.seed)
    model = create_model(cfg.model, num_classes=num_classes, drop_path_rate=cfg.drop_path or None, **cfg.model_kwargs)
    model.to(device)
    ema = ModelEmaV3(model, decay=cfg.ema_decay, use_warmup=cfg.ema_warmup) if cfg.ema_decay else None
    evaluated = {"val": model, "val_ema": ema.module} if ema else {"val": model}

    # Transforms and loaders. Repeated augmentation happens in the training stream.
    settings = input_settings(model, cfg.values())
    share = dict(batch_size=cfg.batch_size, num_workers=cfg.workers, rank=rank, world_size=world_size,
                 num_classes=num_classes, pin_memory=device.type == "cuda")
    train_batches = train_loader(train_shards, train_transform(settings, cfg), seed=cfg.seed, repeats=cfg.repeats,
                                 **share)
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
        optimizer = create_optimizer_v2(model, cfg.opt, lr=peak_lr, weight_decay=cfg.weight_decay)
    scheduler, _ = create_scheduler_v2(
        optimizer, "cosine", num_epochs=cfg.epochs, warmup_epochs=cfg.warmup_epochs, warmup_lr=cfg.warmup_lr,
        min_lr=cfg.min_lr, step_on_epochs=False, updates_per_epoch=updates_per_epoch,
    )

    # Resuming goes on after the last finished epoch. The schedule needs no state but the number of updates.
    first_epoch, best, history = 0, -1.0, []
    if cfg.resume:
        if not last.exists():
            raise UserError(f"{run_dir} has no last.pt, as it stopped in its first epoch: remove it and start anew")
        checkpoint = load_checkpoint(last)
        load_weights(model, checkpoint, last)
        if ema:
            load_weights(ema.module, checkpoint, last, ema=True)
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_epoch, best, history = checkpoint["epoch"], checkpoint["best_metric"], checkpoint["history"]
        if first_epoch >= cfg.epochs:
            raise UserError(f"{run_dir} has finished its {first_epoch} epochs: give more by --epochs to go on")
        say(f"Going on with {run_dir} after epoch {first_epoch}.")
        if checkpoint["updates"] != first_epoch * updates_per_epoch:
            say(f"Note: epochs had {checkpoint['updates'] // first_epoch} updates and now have {updates_per_epoch}, as "
                "the global batch is another; learning rate and curves follow the new count.")
    updates = first_epoch * updates_per_epoch
    scheduler.step_update(updates)

    if is_main:
        run_dir.mkdir(parents=True, exist_ok=True)
        facts = {"processes": world_size, "global_batch": global_batch, "peak_lr": peak_lr, "num_classes": num_classes}
        write_run_files(run_dir, cfg, facts)
        writer = SummaryWriter(run_dir, purge_step=updates + 1 if cfg.resume else None)
    precision = "fp32" if accelerator.mixed_precision == "no" else accelerator.mixed_precision
    say(f"model   {cfg.model}, {sum(p.numel() for p in model.parameters()):,} parameters, input "
        f"{'x'.join(map(str, settings['input_size']))}, {num_classes} classes")
    say(f"data    {data}: {train_shards.num_samples:,} samples to train on, {val_shards.num_samples:,} to evaluate")
    say(f"run     {world_size} process(es) on {device.type} in {precision}, {cfg.epochs} epochs of {updates_per_epoch} "
        f"updates of {global_batch} samples, peak lr {peak_lr:.2e}")
    say(f"folder  {run_dir}")

    # `net` trains, wrapped where there are several processes; `model` is the same weights, for all else. The scheduler
    # and the loaders stay out of prepare(): it would step the one once per process, and feed every process from
    # the first one's stream.
    net, optimizer = accelerator.prepare(model, optimizer)
    if cfg.compile:
        model.compile()
    progress = tqdm(initial=updates * global_batch, total=cfg.epochs * updates_per_epoch * global_batch, unit="img",
                    unit_scale=True, dynamic_ncols=True, mininterval=0.2 if sys.stderr.isatty() else 30,
                    disable=not is_main)

    with progress:
        for epoch in range(first_epoch, cfg.epochs):
            # All randomness follows from seed, epoch and process, so a resumed run goes on as if it had never stopped.
            set_seed((cfg.seed * 10_007 + epoch) * 1_009 + rank)
            train_batches.set_epoch(epoch)
            net.train()
            progress.set_description(f"epoch {epoch + 1}/{cfg.epochs}")
            loss_sum, batches, since = torch.zeros((), device=device), 0, time.perf_counter()

            for images, targets in islice(train_batches, updates_per_epoch * cfg.grad_accum):
                images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
                if mixup:
                    images, targets = mixup(images, targets)
                with accelerator.accumulate(net):
                    loss = criterion(net(images), targets)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        grad_norm = accelerator.clip_grad_norm_(net.parameters(), cfg.clip_grad or math.inf)
                    optimizer.step()
                    optimizer.zero_grad()
                loss_sum += loss.detach()
                batches += 1
                if not accelerator.sync_gradients:
                    continue

                updates += 1
                lr = optimizer.param_groups[0]["lr"]
                scheduler.step_update(updates)
                if ema:
                    ema.update(model, step=updates)
                progress.update(global_batch)

                # Reading a value waits for the device, so it happens here alone.
                if updates % cfg.log_interval == 0 or updates % updates_per_epoch == 0:
                    train_loss = accelerator.reduce(loss_sum / batches, "mean").item()
                    rate = batches * cfg.batch_size * world_size / (time.perf_counter() - since)
                    if not math.isfinite(train_loss):
                        raise UserError(f"the loss is {train_loss} at update {updates}: lower lr, or clip_grad to 1.0")
                    if is_main:
                        scalars = {"loss": train_loss, "lr": lr, "images_per_s": rate, "grad_norm": grad_norm.item(),
                                   "epoch": updates / updates_per_epoch}
                        for tag, value in scalars.items():
                            writer.add_scalar(f"train/{tag}", value, updates)
                    loss_sum, batches, since = torch.zeros((), device=device), 0, time.perf_counter()

            # Raw and averaged weights are evaluated in one pass over the data; best.pt goes by the averaged ones.
            done = epoch + 1
            results, is_best = {}, False
            if done % cfg.eval_interval == 0 or done == cfg.epochs:
                results = evaluate(evaluated, val_batches, accelerator, val_shards.num_samples, cfg.batch_size)
                top1 = results["val_ema" if ema else "val"]["top1"]
                is_best, best = top1 > best, max(top1, best)
            history.append({"epoch": done, "train_loss": train_loss, "lr": lr, "images_per_s": rate, **results})
            if is_main:
                accuracies = "".join(f"  {tag} top-1 {result['top1']:.2f} %" for tag, result in results.items())
                progress.write(f"epoch {done:3d}  loss {train_loss:.4f}  {rate:,.0f} images/s{accuracies}")
                for tag, result in results.items():
                    for key in ("top1", "top5", "loss"):
                        writer.add_scalar(f"{tag}/{key}", result[key], updates)
                writer.flush()
                state = dict(
                    arch=cfg.model, num_classes=num_classes, config=cfg.values(), epoch=done, updates=updates,
                    state_dict=model.state_dict(), optimizer=optimizer.state_dict(), best_metric=best, history=history,
                )
                if ema:
                    state["state_dict_ema"] = ema.module.state_dict()
                if is_best:  # first, so that last.pt never promises a best.pt that is not there
                    save_checkpoint(run_dir / "best.pt", state)
                save_checkpoint(last, state)
                write_text(run_dir / "metrics.json", json.dumps(history, indent=2) + "\n")

    if is_main:
        writer.close()
        plot_runs([run_dir], run_dir / "curves.png")
    for tag, result in results.items():
        say(f"{'raw weights' if tag == 'val' else 'EMA weights'}  {describe(result)} of {val_shards.num_samples}")
    say(f"best epoch   top-1 {best:.2f} %, saved as {run_dir / 'best.pt'}")
    say(f"curves       {run_dir / 'curves.png'}, or live: tensorboard --logdir {run_dir.parent}")
    if accelerator.device.type == "cuda":
        accelerator.end_training()  # NCCL wants it; with gloo, torch 2.7 can wait in it for itself, for ever
    return run_dir


if __name__ == "__main__":
    run_cli(main, stopped="stopped; --resume RUN goes on after the last finished epoch")
