"""How fast a variant trains alone: the trainer's update on random images that are on the device already."""

import gc
import math
import time
from collections.abc import Callable, Iterator
from statistics import median
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

WINDOWS = 5


def measure(arm: Arm, device: str) -> dict[str, Any]:
    """Times the update of a variant: median of a few windows, after a warm-up.

    Args:
        arm: The variant in its setting.
        device: "auto", "cuda" or "cpu".

    Returns:
        Dict with "images_per_s", "batch_size" (of a pass), "variant", "torch", "commit", and on a GPU "peak_gib"; where
        it does not fit into memory, "error" in their place.
    """
    cfg = cast(Config, arm.config)
    accelerator = make_accelerator(device, cfg.precision, cfg.grad_accum)
    found = {"variant": arm.label, "batch_size": cfg.batch_size, "torch": str(torch.__version__)}
    found["commit"] = find_commit()[0]
    on_gpu = accelerator.device.type == "cuda"
    if on_gpu:
        gc.collect()  # of the variant before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        rate = _rate(_make_update(arm, accelerator), cfg.batch_size * cfg.grad_accum, on_gpu)
    except torch.OutOfMemoryError as error:
        return {**found, "error": one_line(error)[:200]}
    found["images_per_s"] = float(f"{rate:.5g}")
    if on_gpu:
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return found


def _make_update(arm: Arm, accelerator: Accelerator) -> Callable[[], Any]:
    """The trainer's update without loader, schedule and log."""
    cfg, device = cast(Config, arm.config), accelerator.device
    classes = cfg.num_classes or 1000
    model, ema = setup.build_model(cfg, classes, accelerator, resuming=False)
    mixup, criterion = setup.build_loss(cfg, classes)
    optimizer = setup.build_optimizer(cfg, model, cfg.lr)
    side = cfg.model_kwargs.get("img_size", 224)
    images = torch.randn(cfg.batch_size, 3, side, side, device=device)
    labels = torch.randint(classes, (cfg.batch_size,), device=device)
    net = setup.wrap(cfg, model, optimizer, images.shape[1:], accelerator).train()
    step = TrainStep(accelerator, model, net, criterion, optimizer, ema, cfg.clip_grad)

    def passes() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(cfg.grad_accum):
            # Mixing writes over the images, which would fade away.
            yield mixup(images.clone(), labels) if mixup else (images, labels)

    return lambda: step(passes())


def _rate(update: Callable[[], Any], images: int, on_gpu: bool) -> float:
    """Images/s of an update that takes `images`."""

    def seconds(updates: int) -> float:
        start = time.perf_counter()
        for _ in range(updates):
            update()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(10 if on_gpu else 1)  # kernels are compiled and tuned
    updates = max(1, math.ceil((1.0 if on_gpu else 0.2) / seconds(1)))
    return images / median(seconds(updates) / updates for _ in range(WINDOWS))
