"""From a training run, or a model folder in the hub's layout, to its model: the one way that all commands take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision_longhorn.errors import UserError

# What takes long to import is imported where it is used: the command line is read before.
if TYPE_CHECKING:
    from vision_longhorn.checkpoint import TimmModel


def run_file(path: str | os.PathLike[str]) -> Path:
    """The checkpoint that `path` stands for: a folder's best.pt, or the file itself."""
    return Path(path, "best.pt") if Path(path).is_dir() else Path(path)


def is_model_folder(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a folder in the hub's layout, which timm knows as local-dir:FOLDER, and not a run's."""
    return Path(path, "config.json").is_file() and not Path(path, "best.pt").is_file()


def timm_source(path: str | os.PathLike[str]) -> str | None:
    """timm's name of the model, with weights, that `path` stands for: a folder in the hub's layout, also written
    "local-dir:FOLDER", or "hf-hub:USER/MODEL". None where it stands for a run's folder or file."""
    name = os.fspath(path)
    if name.startswith(("local-dir:", "hf-hub:")):
        return name
    return f"local-dir:{name}" if is_model_folder(name) else None


def load_model(path: str | os.PathLike[str], **model_kwargs: Any) -> tuple[TimmModel, dict[str, Any] | None]:
    """The model of a run, as `load_run` gives it, or of a folder in the hub's layout, or on the hub.

    Args:
        path: As of `load_run`, or of `timm_source`.
        **model_kwargs: Arguments of the model beside its own, and before them.

    Returns:
        (model, checkpoint): the checkpoint is None where there is no run.

    Raises:
        UserError: Where `path` holds no such model.
    """
    name = timm_source(path)
    if name is None:
        return load_run(path, **model_kwargs)
    from vision_longhorn.checkpoint import create_model

    return create_model(name, pretrained=True, **model_kwargs), None


def model_of_checkpoint(
    checkpoint: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    arch: str | None = None,
    num_classes: int | None = None,
    ema: bool | None = None,
    **model_kwargs: Any,
) -> tuple[TimmModel, str]:
    """The model whose weights a checkpoint holds.

    Args:
        checkpoint: What `load_checkpoint` read.
        path: Where from, for messages.
        arch, num_classes: timm's name of the model and its number of classes, where the checkpoint's are not meant.
        ema: Take the averaged weights, or the raw ones; None: the averaged ones where there are any.
        **model_kwargs: Arguments of the model beside the checkpoint's own, and before them.

    Returns:
        (model, weights): the model in training mode on the CPU; "EMA" or "raw".

    Raises:
        UserError: Where nothing says which model it is, or the weights do not fit it.
    """
    from vision_longhorn.checkpoint import create_model, load_weights

    arch = arch or checkpoint.get("arch")
    if arch is None:
        raise UserError(f"{path} does not say which model it holds: give --model NAME")
    own = checkpoint.get("config", {}).get("model_kwargs", {})
    classes = checkpoint.get("num_classes") if num_classes is None else num_classes
    model = create_model(arch, **{**own, **model_kwargs, "num_classes": classes})
    ema = "state_dict_ema" in checkpoint if ema is None else ema
    load_weights(model, checkpoint, path, ema)
    return model, "EMA" if ema else "raw"


def load_run(path: str | os.PathLike[str], **model_kwargs: Any) -> tuple[TimmModel, dict[str, Any]]:
    """The model of a training run, with its averaged weights if it has any, and the checkpoint.

    Its `pretrained_cfg` gets the run's input size, normalisation, resampling and crop, so that
    `timm.data.resolve_data_config(model=model)` gives the run's evaluation transform. It names no licence.

    Args:
        path: A run's folder (then its best.pt), or a checkpoint of train_imagenet.py.
        **model_kwargs: Arguments of the model beside the run's own, and before them.

    Returns:
        (model, checkpoint): the model in training mode on the CPU, the dict as `load_checkpoint` reads it.

    Raises:
        UserError: Where `path` holds no such checkpoint.
    """
    from vision_longhorn.checkpoint import load_checkpoint
    from vision_longhorn.data.transforms import input_settings

    path = run_file(path)
    checkpoint = load_checkpoint(path)
    if not {"arch", "num_classes", "config"} <= checkpoint.keys():
        raise UserError(f"{path} does not say which model it holds: give a checkpoint of train_imagenet.py")
    model, _ = model_of_checkpoint(checkpoint, path, **model_kwargs)
    # What timm knows of other weights of this architecture holds for none that a run has made.
    model.pretrained_cfg.update(
        input_settings(model, checkpoint["config"]),
        num_classes=model.num_classes,
        tag=None,
        license=None,
        origin_url=None,
    )
    return model, checkpoint
