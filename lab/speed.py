"""Measures how fast a variant trains alone, by the trainer's update on random images that are already on the device."""

import gc
from collections.abc import Callable
from typing import Any, cast

import torch
from accelerate import Accelerator

from lab.plan import Arm
from vision_longhorn.devices import make_accelerator
from vision_longhorn.environment import find_commit
from vision_longhorn.errors import one_line
from vision_longhorn.training import setup
from vision_longhorn.training.config import Config
from vision_longhorn.training.step import TrainStep


def measure(arm: Arm, device: str) -> dict[str, Any]:
    """Times the update of a variant, after a warm-up.

    Returns:
        Dict with "images_per_s", "batch_size" (of a pass), "variant", "torch", "commit", and on a GPU "peak_gib"; or
        with "error" instead if it does not fit into memory.
    """
    cfg = cast(Config, arm.config)
    accelerator = make_accelerator(device, cfg.precision, cfg.grad_accum)
    on_gpu = accelerator.device.type == "cuda"
    found = {"variant": arm.label, "batch_size": cfg.batch_size, "torch": str(torch.__version__)}
    found["commit"] = find_commit()[0]
    if on_gpu:
        gc.collect()  # the previous variant may still hold memory
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        images_per_s = time_update(cfg, accelerator)
    except torch.OutOfMemoryError as error:
        return {**found, "error": one_line(error)[:200]}
    memory = {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)} if on_gpu else {}
    return {**found, "images_per_s": float(f"{images_per_s:.5g}"), **memory}


def time_update(cfg: Config, accelerator: Accelerator) -> float:
    """Measures the images per second of the trainer's update, after a warm-up."""
    on_gpu = accelerator.device.type == "cuda"
    update = _make_update(cfg, accelerator)
    for _ in range(10 if on_gpu else 1):  # meanwhile kernels are compiled and tuned
        update()
    from torch.utils.benchmark import Timer  # its import complains if there is no CUDA toolkit

    timer = Timer("update()", globals={"update": update}, num_threads=torch.get_num_threads())
    return cfg.batch_size * cfg.grad_accum / timer.blocked_autorange(min_run_time=5 if on_gpu else 1).median


def _make_update(cfg: Config, accelerator: Accelerator) -> Callable[[], Any]:
    """Makes the trainer's update, without loader, schedule and log."""
    classes, side = cfg.num_classes or 1000, cfg.model_kwargs.get("img_size", 224)
    model, ema = setup.build_model(cfg, classes, accelerator, checkpoint=None)
    mixup, criterion = setup.build_loss(cfg, classes)
    optimizer = setup.build_optimizer(cfg, model, cfg.lr)
    images = torch.randn(cfg.batch_size, 3, side, side, device=accelerator.device)
    labels = torch.randint(classes, (cfg.batch_size,), device=accelerator.device)
    net = setup.wrap(cfg, model, optimizer, images.shape[1:], accelerator).train()
    step = TrainStep(accelerator, model, net, criterion, optimizer, ema, cfg.clip_grad, cfg.compress_gradients)
    # Mixing overwrites the images, so that they would fade over the updates.
    make = (lambda: mixup(images.clone(), labels)) if mixup else (lambda: (images, labels))
    return lambda: step(make() for _ in range(cfg.grad_accum))
