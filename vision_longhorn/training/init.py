"""The weights that a run starts from: `--init`."""

import os
from collections.abc import Sequence
from textwrap import shorten
from typing import Any

import timm
from timm.models import clean_state_dict

from vision_longhorn.checkpoint import load_checkpoint, stated_model
from vision_longhorn.class_names import difference
from vision_longhorn.errors import UserError, one_line
from vision_longhorn.loading import checkpoint_names, load_model
from vision_longhorn.model_arguments import SIZES
from vision_longhorn.models.create import create_model
from vision_longhorn.models.names import RENAMED, all_arguments
from vision_longhorn.runs import run_file, timm_source

# What a checkpoint states and another training decides anew
OF_TRAINING = frozenset(
    (
        *("num_classes", "in_chans", "drop_rate", "pos_drop_rate", "drop_path_rate"),
        *("save_states", "residual_in_fp32", "dynamic_img_size", "dynamic_img_pad"),
    )
)


def model_from_weights(
    name: str, path: str | os.PathLike[str], num_classes: int, class_names: Sequence[str] | None = None, **kwargs: Any
) -> tuple[Any, str]:
    """Makes a model that starts from the weights in a file.

    Position embedding and patches are resampled where the sizes differ, and a classifier of other classes starts anew.
    All other tensors of the file must match those of the model. `path` is a run's folder or checkpoint (its
    averaged weights, if it has any), bare weights, safetensors, or a source of `runs.timm_source`. If the file's model
    has the same `name`, its arguments are taken from the file, and `kwargs` override them. The `class_names` are the
    model's; where names are unknown (None), they are not compared.

    Returns:
        (model, text): the text says in one line what was loaded, what was resampled, and what starts anew.

    Raises:
        UserError: As for `create_model`, and for weights of another model.
    """
    if ":" in name:
        raise UserError(f"model is {name}, which has weights of its own: with init, give the name of an architecture")
    place, file = _open(path)
    name, kwargs = _as_stated(file, name, kwargs)
    kind = next((key for key in ("state_dict_ema", "model_ema") if isinstance(file.get(key), dict)), "state_dict")
    weights = clean_state_dict(file[kind])
    create_model(name, num_classes=num_classes, **kwargs)  # raises errors that have nothing to do with the file
    cfg: Any = timm.get_pretrained_cfg(name)
    classifier = cfg.classifier[0] if isinstance(cfg.classifier, (list, tuple)) else cfg.classifier
    head = weights.get(f"{classifier}.weight")
    # If the model has the file's number of classes, timm requires every tensor.
    of_file = num_classes if classifier is None else 0 if head is None else len(head)
    overlay = {"state_dict": dict(weights), "num_classes": of_file}
    size = file.get("config", {}).get("model_kwargs", {}).get("img_size")
    if size is not None and cfg.fixed_input_size:
        # timm takes this size of the file's position embedding for the model's, too, unless img_size is given.
        overlay["input_size"] = (3, *(size if isinstance(size, (list, tuple)) else (size, size)))
        kwargs.setdefault("img_size", cfg.input_size[-2:])
    try:
        model = create_model(name, pretrained=True, num_classes=of_file, **kwargs, pretrained_cfg_overlay=overlay)
    except UserError as error:
        raise UserError(
            f"{place} holds weights of another model ({file.get('arch') or 'of unknown name'}): "
            f"{shorten(one_line(error.__cause__ or error), 500)}; give the model and model_kwargs it was trained with"
        ) from error
    model.pretrained_cfg["input_size"] = cfg.input_size
    model.pretrained_cfg.pop("state_dict", None)
    own = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    theirs = {key: tuple(value.shape) for key, value in weights.items() if key in own}
    text = f"{'weights' if kind == 'state_dict' else 'EMA weights'} of {place}: {len(own)} tensors"
    if resampled := [f"{key} {size} -> {own[key]}" for key, size in theirs.items() if size != own[key]]:
        text += f", resampled {', '.join(resampled)}"
    return model, text + _fit_classifier(model, num_classes, of_file, class_names, checkpoint_names(file)[0])


def _as_stated(file: dict[str, Any], name: str, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the name and the arguments to build the model for a file's weights.

    If the file holds a model of this name, the file's arguments are used, but for those that only training has. Image
    and patch sizes are the name's, and `kwargs` override both.
    """
    found, stated = stated_model(file, name)
    if not found or not stated.get("all_arguments"):
        return name, kwargs
    sizes = {key: value for key, value in all_arguments(found, {}).items() if key in SIZES}
    own = {key: value for key, value in stated.items() if key not in SIZES and key not in OF_TRAINING}
    return found, {**own, **sizes, **kwargs}


def _fit_classifier(
    model: Any, num_classes: int, of_file: int, class_names: Sequence[str] | None, names: Sequence[str] | None
) -> str:
    """Replaces the classifier unless the file has the same classes, `names`. Returns what it did, in words."""
    other = difference(names, class_names, "the file", "the data") if names and class_names else ""
    if of_file != num_classes:
        other = f"the file has {of_file or 'none'}"
    if other:
        model.reset_classifier(num_classes)
        return f", classifier of {num_classes} classes anew ({other})"
    unknown = [place for place, known in (("the file's", names), ("the data's", class_names)) if not known]
    return f"; note: {' and '.join(unknown)} class names are unknown, so the classifier stays" if unknown else ""


def _open(path: str | os.PathLike[str]) -> tuple[str | os.PathLike[str], dict[str, Any]]:
    """Reads `path`, as in `model_from_weights`, into the form of a checkpoint. Also returns the file, for messages."""
    if not timm_source(path):
        file = run_file(path)
        return file, load_checkpoint(file)
    loaded = load_model(path)
    arch, saved = loaded.model.pretrained_cfg["architecture"], loaded.model.pretrained_model_args
    size = {"img_size": loaded.settings["input_size"][-2:]}
    if saved.get("all_arguments"):
        about = {"arch": arch, "model_args": saved, "config": {"model_kwargs": size}}
    else:  # of version 0.1
        arch = next((old for old, new in RENAMED.items() if new == arch), arch)
        about = {"arch": arch, "config": {"model_kwargs": {**saved, **size}}}
    return path, {"state_dict": loaded.model.state_dict(), "class_names": loaded.class_names, **about}
