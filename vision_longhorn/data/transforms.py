"""timm's input settings and transforms, which turn an image into what the model sees."""

from collections.abc import Mapping
from typing import Any

from PIL import Image
from timm.data import auto_augment, create_transform, resolve_data_config
from timm.data.transforms import RandomResizedCropAndInterpolation, ResizeKeepRatio
from torch import nn
from torchvision.transforms import AutoAugment, AutoAugmentPolicy, InterpolationMode, RandomCrop

from vision_longhorn.errors import UserError, bad_input

CIFAR_POLICY = "cifar10"  # what a config calls it


def input_settings(model: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Find input size, normalisation, resampling and crop, as `timm.data.create_transform` takes them for evaluation.

    Args:
        model: the timm model; its default_cfg fills in what `values` leaves open.
        values: such as a config's; used are mean, std, interpolation, crop_pct, and img_size of model_kwargs.

    Raises:
        UserError: for a model whose number of channels is not 3.
    """
    size = (values.get("model_kwargs") or {}).get("img_size")
    first = getattr(model, "pretrained_cfg", {}).get("first_conv")
    layer = dict(model.named_modules()).get(first) if isinstance(first, str) else None
    if (channels := getattr(layer, "in_channels", 3)) != 3:
        raise UserError(f"the model's in_chans is {channels}: images are read in colour, with 3 channels")
    wanted = {key: values.get(key) for key in ("mean", "std", "interpolation", "crop_pct")}
    if size is not None:
        wanted["input_size"] = (3, *size) if isinstance(size, (list, tuple)) else (3, size, size)
    settings: dict[str, Any] = resolve_data_config(wanted, model=model)
    if settings["interpolation"] == "random":  # for training only
        settings["interpolation"] = "bilinear"
    return settings


def train_transform(settings: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """Make timm's training transform, from a PIL image to a tensor (3, height, width), with the `settings` of
    `input_settings` and the augmentation of a config's `values`. Raises UserError for a policy that timm refuses."""
    mend_posterize()
    policy, is_cifar = values["auto_augment"], values["auto_augment"] == CIFAR_POLICY
    options: dict[str, Any] = {key: settings[key] for key in ("input_size", "mean", "std")}
    options |= {key: values[key] for key in ("scale", "ratio", "hflip", "color_jitter", "re_prob", "re_mode")}
    is_lanczos = values["interpolation"] == "lanczos"  # Pillow crops by it, but does not rotate or shear
    options["interpolation"] = "bicubic" if is_lanczos else values["interpolation"]
    with bad_input(f"auto_augment={policy}"):
        transform: Any = create_transform(is_training=True, auto_augment="original" if is_cifar else policy, **options)
    steps = transform.transforms
    for number, step in enumerate(steps):
        if isinstance(step, auto_augment.AutoAugment) and is_cifar:
            step.policy = _cifar_policy(step.policy[0][0].hparams)
        if isinstance(step, RandomResizedCropAndInterpolation) and is_lanczos:
            step.interpolation = InterpolationMode.LANCZOS
        if isinstance(step, RandomResizedCropAndInterpolation) and values["crop_padding"] is not None:
            size = settings["input_size"][-2:]
            resize = ResizeKeepRatio(size, interpolation=settings["interpolation"])
            steps[number : number + 1] = [resize, RandomCrop(size, padding=values["crop_padding"])]
    return transform


def _cifar_policy(hparams: dict[str, Any]) -> list[list[auto_augment.AugmentOp]]:
    """Make AutoAugment's policy for CIFAR-10 (arXiv 1805.09501): torchvision's table in timm's operations."""

    def operation(name: str, probability: float, magnitude: int | None) -> auto_augment.AugmentOp:
        level = (magnitude or 0) * 10 / 9  # timm's levels go to 10, torchvision's to 9
        if name.startswith("Translate"):
            name = f"{name}Rel"
        elif name in ("Brightness", "Color", "Contrast", "Sharpness"):
            name = f"{name}Increasing"
        elif name == "Posterize":  # 8 bits to 4
            name, level = "PosterizeOriginal", 10 - round(level * 0.4) * 2.5
        elif name == "Solarize":
            level = 10 - level
        return auto_augment.AugmentOp(name, probability, level, hparams)

    table = AutoAugment(AutoAugmentPolicy.CIFAR10).policies
    return [[operation(*one) for one in pair] for pair in table]


def mend_posterize() -> None:
    """Make timm's posterize keep at least one bit. Pillow 13 refuses to keep none; older versions gave black."""
    for name in ("Posterize", "PosterizeIncreasing", "PosterizeOriginal"):
        auto_augment.NAME_TO_OP[name] = _posterize


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    return auto_augment.posterize(image, max(1, bits))
