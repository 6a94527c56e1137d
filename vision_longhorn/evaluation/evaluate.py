"""Exact evaluation: each sample counts once, over any number of processes."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from vision_longhorn.class_names import ClassMap
from vision_longhorn.errors import UserError
from vision_longhorn.training.fsdp import is_sharded


@torch.no_grad()
def evaluate(
    models: dict[str, nn.Module],
    loader: Iterable[Any],
    accelerator: Accelerator,
    num_samples: int,
    batch_size: int,
    class_map: ClassMap | None = None,
    on_batch: Callable[..., Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Evaluates several models in one pass over the data, and counts each sample once over all processes.

    Args:
        models: Dict of name to model, each from (B, 3, H, W) to (B, classes). None is wrapped for distributed training.
        loader: This process's share of the split: images (B, 3, H, W) float32, targets (B,) int64 and, where the
            loader gives them, a list of B places (shard, key).
        accelerator: Gives device, precision, and the sum over the processes.
        num_samples: Size of the whole split.
        batch_size: Shorter batches are filled up to this size. In low precision a sample's scores can depend on the
            shape of its batch, and so the counts would depend on how the processes share the samples.
        class_map: Only its classes take part, and samples of others are left out.
        on_batch: Called as `on_batch(logits, targets, rank, places)` for each model and batch, with float32 (B, C),
            int64 (B,) and (B,) on the device, and the places or None. Classes are numbered as in `class_map`.

    Returns:
        Dict of name to {"top1", "top5" (per cent), "loss" (mean cross-entropy), "count", "top1_count", "top5_count"}.

    Raises:
        UserError: The processes saw another number of samples than `num_samples`, or none of the model's classes.
    """
    device = accelerator.device
    # top-1, top-5, loss, count, samples seen; in float64, so that the split over processes does not show in the loss
    sums = torch.zeros(len(models), 5, dtype=torch.float64, device=device)
    for model in models.values():
        model.eval()
    if any(map(is_sharded, models.values())):
        loader = _in_step(loader, accelerator)
    columns = slice(None) if class_map is None else torch.tensor(class_map.columns, device=device)
    for batch in loader:
        sums[:, 4] += len(batch[1])
        images, targets, places = (*batch, None)[:3]
        if class_map is not None:
            targets = torch.tensor(class_map.targets)[targets]
            kept = targets >= 0
            images, targets = images[kept], targets[kept]
            places = places and [place for place, keep in zip(places, kept.tolist(), strict=True) if keep]
        images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        images = F.pad(images, (0, 0) * (images.ndim - 1) + (0, batch_size - len(targets)))  # (batch_size, 3, H, W)
        for row, model in zip(sums, models.values(), strict=True):
            with accelerator.autocast():
                logits = model(images)
            logits = logits[: len(targets)].float()[:, columns]  # (B, C)
            rank = ranks(logits, targets)
            loss = F.cross_entropy(logits, targets, reduction="none").double().sum()
            hits = [(rank < min(k, logits.shape[1])).sum() for k in (1, 5)]
            row[:4] += torch.stack([*hits, loss, torch.tensor(len(targets), device=device)])
            if on_batch is not None:
                on_batch(logits, targets, rank, places)
    return {name: _result(row, num_samples) for name, row in zip(models, accelerator.reduce(sums).tolist())}


def ranks(logits: Tensor, targets: Tensor) -> Tensor:
    """Counts for each sample the classes that score higher than its own, or as high with a smaller index: (B,) int64.

    So ties, frequent in bf16, do not depend on the batch, and a score that is not a number is never a hit.
    """
    own = logits.gather(1, targets[:, None])  # (B, 1)
    index = torch.arange(logits.shape[1], device=logits.device)
    return (~(logits <= own) | (logits == own) & (index < targets[:, None])).sum(1)


def _result(sums: list[float], num_samples: int) -> dict[str, Any]:
    top1, top5, loss, count, seen = sums
    if seen != num_samples:
        raise UserError(
            f"evaluation saw {seen:.0f} samples, but the split should hold {num_samples}: index the shards again, or "
            "give their true number"
        )
    if not count:
        raise UserError(f"none of the {num_samples} samples has a class of the model: give another split or data")
    return {
        "top1": 100 * top1 / count,
        "top5": 100 * top5 / count,
        "loss": loss / count,
        "count": int(count),
        "top1_count": int(top1),
        "top5_count": int(top5),
    }


def _in_step(loader: Iterable[Any], accelerator: Accelerator) -> Iterator[Any]:
    """Yields the batches of `loader`, then empty ones until no process has any: a sharded model must run in all."""
    batches = iter(loader)
    while True:
        batch = next(batches, None)
        shape = (0, 0, 0, 0) if batch is None else batch[0].shape
        shape = accelerator.gather(torch.tensor([shape], device=accelerator.device)).amax(0).tolist()
        if not shape[0]:
            return
        yield batch or (torch.empty(0, *shape[1:]), torch.empty(0, dtype=torch.int64))


def describe(result: dict[str, Any]) -> str:
    """Describes a result of `evaluate` in one line."""
    return (
        f"top-1 {result['top1']:.2f} % ({result['top1_count']})  top-5 {result['top5']:.2f} % "
        f"({result['top5_count']})  loss {result['loss']:.4f}  count {result['count']}"
    )
