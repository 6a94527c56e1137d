"""Exact evaluation, and what it shares with training: the device, the data's place, the image transforms."""

from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from timm.data import auto_augment, create_transform, resolve_data_config

from vision_longhorn.config import DIGITS
from vision_longhorn.errors import UserError, bad_input
from vision_longhorn.fsdp import is_sharded
from vision_longhorn.sharding import make_digits


def make_accelerator(device="auto", precision="auto", **kwargs):
    """Accelerator for `device` (auto, cuda, cpu) and `precision` (auto, bf16, fp16, fp32).

    Args:
        device: auto takes CUDA where there is one.
        precision: auto is bf16 autocast on a GPU that has bf16 in hardware, fp16 autocast on one that has not, which is
            said, and fp32 on a CPU.
        **kwargs: Further arguments of `Accelerator`.

    Raises:
        UserError: Where CUDA is asked for and there is none, or fp16 for a CPU.
    """
    # The scans run on CUDA and on the CPU; accelerate on its own would pick Apple's GPU, too.
    cpu = device == "cpu" or not torch.cuda.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
    if device == "cuda" and cpu:
        raise UserError("device is 'cuda', but PyTorch finds no CUDA GPU here, or the launcher was given --cpu: "
                        "use --device auto or --device cpu")
    if precision == "fp16" and cpu:
        raise UserError("precision is 'fp16', which needs a GPU: use --precision fp32, or bf16")
    # NVIDIA's GPUs before the A100 (T4, V100, RTX 2080) only imitate bf16, at the price of conversions.
    plain = cpu or torch.cuda.is_bf16_supported(including_emulation=False)
    auto = "no" if cpu else "bf16" if plain else "fp16"
    mixed_precision = {"auto": auto, "fp32": "no"}.get(precision, precision)
    accelerator = Accelerator(cpu=cpu, mixed_precision=mixed_precision, **kwargs)
    if precision == "auto" and not plain:
        accelerator.print(f"Note: {torch.cuda.get_device_name()} has no bf16 in hardware: it runs in fp16.")
    return accelerator


def locate_data(spec, accelerator):
    """`spec` itself, or the folder of the built-in digits, which are made in ./data/digits where they are missing."""
    if spec != DIGITS:
        return spec
    folder = Path("data", DIGITS)
    if accelerator.is_local_main_process:
        make_digits(folder)
    accelerator.wait_for_everyone()
    return str(folder)


def input_settings(model, values):
    """Input size, normalisation, resampling and crop, as `timm.data.create_transform` takes them for evaluation.

    Args:
        model: The timm model; its default_cfg fills in what `values` leaves open.
        values: Dict, such as a config's; read are mean, std, interpolation, crop_pct, and img_size of model_kwargs.

    Returns:
        Dict of keyword arguments, with input_size (3, height, width).

    Raises:
        UserError: For a model of another number of channels.
    """
    channels = (values.get("model_kwargs") or {}).get("in_chans", 3)
    if channels != 3:
        raise UserError(f"in_chans is {channels}: images are read in colour, with 3 channels; leave it out")
    wanted = {key: values.get(key) for key in ("mean", "std", "interpolation", "crop_pct")}
    size = (values.get("model_kwargs") or {}).get("img_size")
    if size is not None:
        wanted["input_size"] = (3, *size) if isinstance(size, (list, tuple)) else (3, size, size)
    return resolve_data_config(wanted, model=model)


def train_transform(settings, config):
    """timm's training transform: from a PIL image to a tensor (3, height, width).

    Args:
        settings: Dict of `input_settings`; the crop is for evaluation and not used.
        config: The `Config`.
    """
    for name in ("Posterize", "PosterizeIncreasing", "PosterizeOriginal"):
        auto_augment.NAME_TO_OP[name] = _posterize
    with bad_input(f"auto_augment={config.auto_augment}"):
        return create_transform(
            settings["input_size"], is_training=True, interpolation=settings["interpolation"], mean=settings["mean"],
            std=settings["std"], scale=config.scale, ratio=config.ratio, hflip=config.hflip,
            color_jitter=config.color_jitter, auto_augment=config.auto_augment, re_prob=config.re_prob,
            re_mode=config.re_mode,
        )


def _posterize(image, bits, **_):
    # At full magnitude timm keeps 0 bits. That is an error since Pillow 13, and was a black image before.
    return auto_augment.posterize(image, max(1, bits))


@torch.no_grad()
def evaluate(models, loader, accelerator, num_samples, batch_size, class_map=None, on_batch=None):
    """Evaluates several models in one pass over the data, each sample counted once over all processes.

    A sample's rank is the number of classes that score higher than its own, or as high with a smaller index. So
    ties, frequent in bf16, do not depend on the batch, and a score that is not a number is never a hit.

    Args:
        models: Dict of name to model, sharded, or not wrapped for distributed training; each maps (B, 3, H, W) to
            (B, classes).
        loader: This process's share of the split: images (B, 3, H, W) float32, targets (B,) int64 and, where the
            loader gives them, a list of B places (shard, key); may be empty.
        accelerator: Gives device, precision, and the sum over the processes.
        num_samples: Size of the split, in samples.
        batch_size: Largest batch of the loader. Shorter ones are filled up to it: in low precision a sample's scores
            can depend on the shape of its batch, and the counts would depend on how samples fall to the processes.
        class_map: `names.ClassMap`: only these classes take part, and samples of others are left out.
        on_batch: Called as `on_batch(name, logits, targets, rank, places)` for each model and batch, with float32
            (B, C) and int64 (B,), (B,) on the accelerator's device, and the places or None. With `class_map`, classes
            are numbered as they stand there.

    Returns:
        Dict of name to {"top1", "top5" (per cent), "loss" (mean cross-entropy), "count", "top1_count", "top5_count"}.
        With fewer than five classes "top5" looks at all of them.

    Raises:
        UserError: Where the processes together saw another number of samples than `num_samples`, or `class_map` leaves
            none of them.
    """
    # The loss is summed in float64, so that the split over processes does not show in it.
    sums = torch.zeros(len(models), 5, dtype=torch.float64, device=accelerator.device)
    for model in models.values():
        model.eval()
    if any(map(is_sharded, models.values())):
        loader = _in_step(loader, accelerator)
    if class_map is not None:
        columns = torch.tensor(class_map.columns, device=accelerator.device)
        place_of_class = torch.tensor(class_map.targets)
    for images, targets, *places in loader:
        places = places[0] if places else None
        sums[:, 4] += len(targets)
        if class_map is not None:
            targets = place_of_class[targets]
            kept = targets >= 0
            images, targets = images[kept], targets[kept]
            places = places and [place for place, keep in zip(places, kept.tolist()) if keep]
        images = images.to(accelerator.device, non_blocking=True)
        targets = targets.to(accelerator.device, non_blocking=True)
        images = F.pad(images, (0, 0) * (images.ndim - 1) + (0, batch_size - len(targets)))  # (batch_size, 3, H, W)
        for row, (name, model) in zip(sums, models.items()):
            with accelerator.autocast():
                logits = model(images)
            logits = logits[:len(targets)].float()  # (B, C)
            if class_map is not None:
                logits = logits[:, columns]
            own = logits.gather(1, targets[:, None])  # (B, 1)
            index = torch.arange(logits.shape[1], device=logits.device)
            rank = (~(logits <= own) | (logits == own) & (index < targets[:, None])).sum(1)  # (B,)
            loss = F.cross_entropy(logits, targets, reduction="none").double().sum()
            hits = [(rank < min(k, logits.shape[1])).sum() for k in (1, 5)]
            row[:4] += torch.stack([*hits, loss, torch.tensor(len(targets), device=loss.device)])
            if on_batch is not None:
                on_batch(name, logits, targets, rank, places)

    results = {}
    for name, (top1, top5, loss, count, seen) in zip(models, accelerator.reduce(sums).tolist()):
        if seen != num_samples:
            raise UserError(f"evaluation saw {seen:.0f} samples, but the split should hold {num_samples}: "
                            "index the shards anew, or give their true number")
        if not count:
            raise UserError(f"none of the {num_samples} samples has a class of the model: give another split or data")
        results[name] = {
            "top1": 100 * top1 / count, "top5": 100 * top5 / count, "loss": loss / count,
            "count": int(count), "top1_count": int(top1), "top5_count": int(top5),
        }
    return results


def _in_step(loader, accelerator):
    """Batches of `loader`, then empty ones as long as another process has some: all have to run a sharded model."""
    batches = iter(loader)
    while True:
        batch = next(batches, None)
        shape = (0, 0, 0, 0) if batch is None else batch[0].shape
        shape = accelerator.gather(torch.tensor([shape], device=accelerator.device)).amax(0).tolist()
        if not shape[0]:
            return
        yield batch or (torch.empty(0, *shape[1:]), torch.empty(0, dtype=torch.int64))


def describe(result):
    """One line for a person, of one of `evaluate`'s results."""
    return (f"top-1 {result['top1']:.2f} % ({result['top1_count']})  top-5 {result['top5']:.2f} % "
            f"({result['top5_count']})  loss {result['loss']:.4f}  count {result['count']}")
