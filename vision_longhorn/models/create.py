"""Makes models by their name in timm, with one-line errors."""

from pathlib import Path
from textwrap import shorten
from typing import Any, TypeAlias

import timm
from PIL import Image
from timm.data import create_transform, resolve_data_config

import vision_longhorn.models.vlonghorn  # noqa: F401, registers the models
from vision_longhorn.errors import UserError, nearest, one_line
from vision_longhorn.files import check_whole
from vision_longhorn.model_arguments import check_values

TimmModel: TypeAlias = Any  # an nn.Module with timm's own attributes, such as pretrained_cfg and num_classes


def create_model(name: str, /, **kwargs: Any) -> TimmModel:
    """Call `timm.create_model`, and explain in one line what is wrong.

    Models that take images of any size, such as ResNets, have no `img_size`. They are made without it.

    Raises:
        UserError: For an unknown name, arguments that the model refuses, or a damaged model folder.
    """
    source, _, folder = name.rpartition(":")
    if not source and not timm.is_model(name):
        near = nearest(name, timm.list_models(), n=3)
        hint = f"the nearest names are {', '.join(near)}; " if near else ""
        raise UserError(f"unknown model {name!r}: {hint}timm.list_models() has them all")
    try:
        check_values(kwargs)
        for file in Path(folder).iterdir() if source.lower() == "local-dir" else ():
            if file.suffix in (".safetensors", ".bin", ".pth"):
                check_whole(file)
        model = _make(name, kwargs)
        if source and (wrong := _wrong_in_config(model, "num_classes" in kwargs)):
            raise UserError(f"its config.json is damaged ({wrong} cannot be right): fetch or make it again")
        return model
    except UserError as error:
        raise UserError(f"model {name} cannot be made: {error}") from error
    except Exception as error:  # a model may raise any type for a wrong argument
        given = [f"{key}={value}" for key, value in kwargs.items() if key != "pretrained_cfg_overlay"]
        given += ["its config.json"] if source else []
        why = shorten(one_line(error), 500)
        raise UserError(f"model {name} cannot be made with {', '.join(given)}: {why}") from error


def _make(name: str, kwargs: dict[str, Any]) -> TimmModel:
    """Make a model. If it takes no `img_size`, remove that from `kwargs`, so that errors name what was tried."""
    try:
        return timm.create_model(name, **kwargs)
    except TypeError as error:
        if "unexpected keyword argument 'img_size'" not in str(error):
            raise
    del kwargs["img_size"]
    return timm.create_model(name, **kwargs)


def _wrong_in_config(model: TimmModel, other_classes: bool) -> str:
    """Return the fields of a config.json that timm would silently misuse; "" if there are none."""
    cfg, transform = getattr(model, "pretrained_cfg", {}), create_transform(**resolve_data_config(model=model))
    black, white = (transform(Image.new("RGB", (8, 8), colour)).amax((1, 2)) for colour in ("black", "white"))
    names, texts, classes = cfg.get("label_names") or [], cfg.get("label_descriptions") or {}, cfg.get("num_classes")
    words = [*(names.values() if isinstance(names, dict) else names), *texts.values()]
    right = {
        "mean or std": (white > black).all(),
        "label_names or label_descriptions": all(isinstance(word, str) for word in words),
        "num_classes": other_classes or getattr(model, "num_classes", classes) == classes,
    }
    return next((name for name, is_right in right.items() if not is_right), "")
