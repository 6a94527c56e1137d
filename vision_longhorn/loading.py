"""Loads models with their weights, for all commands: from a run, a model folder, the hub or timm."""

import contextlib
import os
from pathlib import Path
from typing import Any, NamedTuple

from vision_longhorn.class_names import Names, model_names
from vision_longhorn.errors import UserError
from vision_longhorn.runs import run_file, timm_source
from vision_longhorn.settings import DIGITS


class Loaded(NamedTuple):
    """A model with its weights, and what is known about both, as `load_model` returns it."""

    model: Any  # timm's, in training mode on the CPU
    name: str  # timm's
    weights: str  # "EMA", "raw" or "pretrained"
    settings: dict[str, Any]  # of its input, as `timm.data.create_transform` takes them for evaluation
    class_names: list[str] | None  # by index; None: unknown
    display_names: list[str] | None  # what people call the classes, by index; None: unknown
    model_kwargs: dict[str, Any]
    checkpoint: dict[str, Any]  # {} where the model is not a run's
    file: Path | None  # the checkpoint's

    def check_classes(self) -> None:
        """Raises UserError for a model without a classifier."""
        if not self.model.num_classes:
            raise UserError(f"{self.name} has no classifier: give a model with classes")


def load_model(
    source: str | os.PathLike[str] | None = None,
    name: str | None = None,
    *,
    num_classes: int | None = None,
    ema: bool | None = None,
    **model_kwargs: Any,
) -> Loaded:
    """Loads a model and its weights onto the CPU.

    Args:
        source: A run's folder (then its best.pt), a checkpoint, or a source of `runs.timm_source`.
        name: timm's name of the model, where there is no source, or the source does not tell it.
        num_classes: Number of classes of a checkpoint; default: what it says.
        ema: Whether to take a checkpoint's averaged weights or the raw ones; None: the averaged ones if there are any.
        **model_kwargs: Arguments of the model; they override the source's.

    Returns:
        The model, in training mode; `timm.data.create_transform(**loaded.settings)` is its evaluation transform.

    Raises:
        UserError: There is no such file or model, the file is damaged, or its weights do not fit the model.
    """
    # Commands import this module before they read their command line, which need not wait for torch.
    from vision_longhorn.checkpoint import load_checkpoint, load_weights, stated_model
    from vision_longhorn.data.transforms import input_settings
    from vision_longhorn.models.create import create_model

    if source is not None and name is None and (name := timm_source(source)):
        source = None
    if source is None:
        if name is None:
            raise UserError("no model: give a run's folder or a checkpoint, or the name of a model")
        model = create_model(name, pretrained=True, **model_kwargs)
        settings = input_settings(model, {"model_kwargs": model_kwargs})
        return Loaded(model, name, "pretrained", settings, *model_names(model, name), model_kwargs, {}, None)
    file = run_file(source)
    checkpoint = load_checkpoint(file)
    config, (name, stated) = checkpoint.get("config", {}), stated_model(checkpoint, name)
    if name is None:
        raise UserError(
            f"{file} does not say which model it holds: give a checkpoint of train_imagenet.py, or its --model NAME"
        )
    stated, model_kwargs = {**stated, **model_kwargs}, {**config.get("model_kwargs", {}), **model_kwargs}
    classes = checkpoint.get("num_classes") if num_classes is None else num_classes
    model = create_model(name, **{**stated, "num_classes": classes})
    ema = "state_dict_ema" in checkpoint if ema is None else ema
    load_weights(model, checkpoint, file, ema)
    settings = input_settings(model, {**config, "model_kwargs": model_kwargs})
    # What timm knows about other weights of this architecture does not hold for these.
    model.pretrained_cfg.update(settings, num_classes=model.num_classes, tag=None, license=None, origin_url=None)
    names, weights = checkpoint_names(checkpoint), "EMA" if ema else "raw"
    return Loaded(model, name, weights, settings, *names, model_kwargs, checkpoint, file)


def load_run(path: str | os.PathLike[str], **model_kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Loads the model of a run's folder (then of its best.pt) or checkpoint, and the checkpoint.

    The weights are the averaged ones where there are any. `model_kwargs` override the run's own.
    """
    loaded = load_model(path, **model_kwargs)
    if not {"arch", "num_classes", "config"} <= loaded.checkpoint.keys():
        raise UserError(f"{path} is no run of train_imagenet.py: give its folder, or one of its checkpoints")
    return loaded.model, loaded.checkpoint


def checkpoint_names(checkpoint: dict[str, Any]) -> Names:
    """Reads the names of a run's classes from its checkpoint or, if that is older, from the index of the run's data."""
    from vision_longhorn.data.index import read_index

    if "class_names" in checkpoint:
        return checkpoint["class_names"], checkpoint.get("display_names")
    index = None
    if data := checkpoint.get("config", {}).get("data"):
        with contextlib.suppress(UserError):  # a broken index does not matter to the model
            index = read_index(Path("data", DIGITS) if data == DIGITS else data)
    names = index.get("class_names") if index else None
    if not index or not names or len(names) > (checkpoint.get("num_classes") or 0):
        return None, None
    return names, index.get("display_names")
