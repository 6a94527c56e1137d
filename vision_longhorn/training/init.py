"""The weights that a run starts from: `--init`."""

import os
from collections.abc import Sequence
from typing import Any

import timm
from timm.models import clean_state_dict

from vision_longhorn.checkpoint import load_checkpoint
from vision_longhorn.class_names import difference, model_names
from vision_longhorn.errors import UserError
from vision_longhorn.loading import checkpoint_names
from vision_longhorn.models.create import TimmModel, create_model, mismatch
from vision_longhorn.runs import run_file, timm_source


def model_from_weights(
    name: str,
    path: str | os.PathLike[str],
    num_classes: int,
    class_names: Sequence[str] | None = None,
    **kwargs: Any,
) -> tuple[TimmModel, str]:
    """A model that starts from the weights in a file.

    Position embedding and patches are resampled where the sizes differ, and a classifier of other classes starts anew.
    All other tensors of the file and of the model have to be the same ones.

    Args:
        name, **kwargs: As for `create_model`.
        path: A checkpoint of the trainer (its averaged weights, if it has any) or a run's folder, bare weights,
            safetensors, or a source of `runs.timm_source`.
        num_classes: Number of classes of the model.
        class_names: Their names in the data, None if unknown. Where the file or the data have no names, only the
            numbers of classes are compared.

    Returns:
        (model, text): the text says in one line what was loaded, what was resampled, and what starts anew.

    Raises:
        UserError: As for `create_model`, and for weights of another model.
    """
    if ":" in name:
        raise UserError(f"model {name} brings weights of its own: leave init out, or name the architecture")
    source = timm_source(path)
    path = path if source else run_file(path)
    checkpoint = _as_checkpoint(source) if source else load_checkpoint(path)
    averaged = next((key for key in ("state_dict_ema", "model_ema") if isinstance(checkpoint.get(key), dict)), None)
    weights = clean_state_dict(checkpoint[averaged or "state_dict"])
    create_model(name, num_classes=num_classes, **kwargs)  # whose errors have nothing to do with the file
    cfg: Any = timm.get_pretrained_cfg(name)
    classifier = cfg.classifier[0] if isinstance(cfg.classifier, (list, tuple)) else cfg.classifier
    head = weights.get(f"{classifier}.weight")
    # With the classifier of the file, timm insists on every tensor.
    of_file = num_classes if classifier is None else 0 if head is None else len(head)
    place: dict[str, Any] = dict(state_dict=dict(weights)) if source else dict(file=str(path))
    overlay = dict(**place, num_classes=of_file)
    config = checkpoint.get("config")
    size = (config.get("model_kwargs") or {}).get("img_size") if isinstance(config, dict) else None
    if size is not None and cfg.fixed_input_size:
        # The size that the file's positions are for, which timm would take for the model's as well
        overlay["input_size"] = (3, *(size if isinstance(size, (list, tuple)) else (size, size)))
        kwargs.setdefault("img_size", cfg.input_size[-2:])
    try:
        model = create_model(name, pretrained=True, num_classes=of_file, **kwargs, pretrained_cfg_overlay=overlay)
    except UserError as error:
        arch = f" ({checkpoint['arch']})" if checkpoint.get("arch") else ""
        raise UserError(
            f"{path} holds weights of another model{arch}: {mismatch(error.__cause__ or error)}; give the model and "
            "model_kwargs it was trained with"
        ) from error
    model.pretrained_cfg["input_size"] = cfg.input_size
    model.pretrained_cfg.pop("state_dict", None)
    own = model.state_dict()
    text = f"{'EMA weights' if averaged else 'weights'} of {path}: {len(own)} tensors"
    resampled = [
        f"{key} {tuple(value.shape)} -> {tuple(own[key].shape)}"
        for key, value in weights.items()
        if key in own and value.shape != own[key].shape
    ]
    if resampled:
        text += f", resampled {', '.join(resampled)}"
    names, _ = checkpoint_names(checkpoint)
    other = difference(names, class_names, "the file", "the data") if names and class_names else ""
    if of_file != num_classes:
        other = f"the file has {of_file or 'none'}"
    if other:
        model.reset_classifier(num_classes)
        text += f", classifier of {num_classes} classes anew ({other})"
    elif not (names and class_names):
        unknown = [place for place, known in (("the file's", names), ("the data's", class_names)) if not known]
        text += f"; note: {' and '.join(unknown)} class names are unknown, so the classifier stays"
    return model, text


def _as_checkpoint(source: str) -> dict[str, Any]:
    """A model that timm loads with its weights, as a checkpoint would have it."""
    model = create_model(source, pretrained=True)
    cfg = model.pretrained_cfg
    names, shown = model_names(model, source)
    return dict(
        arch=cfg["architecture"],
        num_classes=model.num_classes,
        config=dict(model_kwargs=dict(img_size=tuple(cfg["input_size"][-2:]))),
        state_dict=model.state_dict(),
        class_names=names,
        display_names=shown,
    )
