"""How fast a variant trains alone: the trainer's update on random images that are on the device already."""

import gc
import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any, cast

import torch

from lab.plan import Arm
from vision_longhorn.devices import make_accelerator
from vision_longhorn.errors import one_line
from vision_longhorn.training import setup
from vision_longhorn.training.config import Config
from vision_longhorn.training.folder import describe_environment
from vision_longhorn.training.updates import gradient_norm, step_if_finite

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
    accelerator = make_accelerator(device, arm.config.precision)
    found = {"variant": arm.label, "batch_size": arm.config.batch_size, "torch": str(torch.__version__)}
    found["commit"] = describe_environment()["commit"]
    on_gpu = accelerator.device.type == "cuda"
    if on_gpu:
        gc.collect()  # of the variant before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        rate = _rate(_make_update(arm, accelerator), arm.config.batch_size * arm.config.grad_accum, on_gpu)
    except torch.OutOfMemoryError as error:
        return {**found, "error": one_line(error)[:200]}
    found["images_per_s"] = float(f"{rate:.5g}")
    if on_gpu:
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return found


def _make_update(arm: Arm, accelerator: Any) -> Callable[[], None]:
    """An update as `Trainer.train_step` makes it, without loader, schedule and log."""
    cfg, device = cast(Config, arm.config), accelerator.device
    classes = cfg.num_classes or 1000
    model, ema = setup.build_model(cfg, classes, accelerator, resuming=False)
    mixup, criterion = setup.build_loss(cfg, classes)
    optimizer = setup.build_optimizer(cfg, model, cfg.lr)
    side = cfg.model_kwargs.get("img_size", 224)
    images = torch.randn(cfg.batch_size, 3, side, side, device=device)
    labels = torch.randint(classes, (cfg.batch_size,), device=device)
    setup.speed_up(cfg, model, images.shape[1:], accelerator)
    model.train()
    parameters = list(model.parameters())

    def update() -> None:
        for _ in range(cfg.grad_accum):
            # Mixing writes over the images, which would fade away.
            inputs, targets = mixup(images.clone(), labels) if mixup else (images, labels)
            with accelerator.autocast():
                scores = model(inputs)
            loss = criterion(scores.float(), targets) / cfg.grad_accum
            (loss * (1 + 0 * loss.detach())).backward()
        step_if_finite(optimizer, gradient_norm(parameters, cfg.clip_grad))
        optimizer.zero_grad()
        if ema:
            ema.update(model, step=1)

    return update


def _rate(update: Callable[[], None], images: int, on_gpu: bool) -> float:
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
