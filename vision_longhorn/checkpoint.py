"""Models by timm name, and the checkpoints of their weights.

A checkpoint is a dict that loads with `weights_only=True`: "arch" (timm's name of the model), "num_classes",
"state_dict", "state_dict_ema" (where weights are averaged), "optimizer", "epoch" and "updates" (finished ones),
"watch" (state of the curves), "best_metric" (top-1), "history" (results by epoch), "config" (the run's values),
"facts" (what else a run's bits depend on), "scaler" (of the loss in fp16, else None), "class_names" and "display_names"
(the classes as the data calls them and as people do, in the order of their numbers; None where the data does not say).
The names are timm's, so `timm.create_model(NAME, checkpoint_path=FILE)` takes the file as it is, and of the weights the
averaged ones.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any, TypeAlias

import timm
import torch
from safetensors.torch import load_file
from timm.models import clean_state_dict
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import vision_longhorn.models.vlonghorn  # noqa: F401, registers the models
from vision_longhorn.errors import UserError, nearest, one_line
from vision_longhorn.files import written_aside
from vision_longhorn.model_arguments import check_values

TimmModel: TypeAlias = Any  # an nn.Module with timm's own attributes, pretrained_cfg and num_classes among them


def create_model(name: str, /, **kwargs: Any) -> TimmModel:
    """`timm.create_model` that explains a wrong name, argument or size in one line.

    Args:
        name: Name in timm's registry, or one of its "hf-hub:" and "local-dir:" sources.
        **kwargs: Arguments of `timm.create_model`.

    Raises:
        UserError: For an unknown name, or arguments that the model refuses.
    """
    if ":" not in name and not timm.is_model(name):
        near = nearest(name, timm.list_models(), n=3)
        hint = f"the nearest names are {', '.join(near)}; " if near else ""
        raise UserError(f"unknown model {name!r}: {hint}timm.list_models() has them all")
    try:
        check_values(kwargs)
        return timm.create_model(name, **kwargs)
    except UserError as error:
        raise UserError(f"model {name} cannot be made: {error}") from error
    except Exception as error:  # of whatever kind, by what a model makes of an argument that it does not take
        given = " ".join(f"{key}={value}" for key, value in kwargs.items() if key != "pretrained_cfg_overlay")
        raise UserError(f"model {name} cannot be made with {given}: {one_line(error)}") from error


def model_from_weights(
    name: str, path: str | os.PathLike[str], num_classes: int, **kwargs: Any
) -> tuple[TimmModel, str]:
    """A model that starts from the weights in a file.

    Position embedding and patches are resampled where the sizes differ, and a classifier of another number of classes
    starts anew. All other tensors of the file and of the model have to be the same ones.

    Args:
        name, **kwargs: As of `create_model`.
        path: A checkpoint of the trainer (its averaged weights, if it has any), bare weights, or safetensors.
        num_classes: Number of classes of the model.

    Returns:
        (model, text): the text says in one line what was loaded, what was resampled, and what starts anew.

    Raises:
        UserError: As of `create_model`, and for weights of another model.
    """
    if ":" in name:
        raise UserError(f"model {name} brings weights of its own: leave init out, or name the architecture")
    checkpoint = load_checkpoint(path)
    averaged = next((key for key in ("state_dict_ema", "model_ema") if isinstance(checkpoint.get(key), dict)), None)
    weights = clean_state_dict(checkpoint[averaged or "state_dict"])
    create_model(name, num_classes=num_classes, **kwargs)  # whose errors have nothing to do with the file
    cfg: Any = timm.get_pretrained_cfg(name)
    classifier = cfg.classifier[0] if isinstance(cfg.classifier, (list, tuple)) else cfg.classifier
    head = weights.get(f"{classifier}.weight")
    # With the classifier of the file, timm insists on every tensor.
    of_file = num_classes if classifier is None else 0 if head is None else len(head)
    overlay = dict(file=str(path), num_classes=of_file)
    config = checkpoint.get("config")
    size = (config.get("model_kwargs") or {}).get("img_size") if isinstance(config, dict) else None
    if size is not None and cfg.fixed_input_size:
        # A run says what size its positions are of, which timm would take for the model's as well.
        overlay["input_size"] = (3, *(size if isinstance(size, (list, tuple)) else (size, size)))
        kwargs.setdefault("img_size", cfg.input_size[-2:])
    try:
        model = create_model(name, pretrained=True, num_classes=of_file, **kwargs, pretrained_cfg_overlay=overlay)
    except UserError as error:
        arch = checkpoint.get("arch")
        raise UserError(
            f"{path} holds weights of another model{f' ({arch})' if arch else ''}: "
            f"{_mismatch(error.__cause__)}; give the model and model_kwargs it was trained with"
        ) from error
    model.pretrained_cfg["input_size"] = cfg.input_size
    own = model.state_dict()
    resampled = [key for key, value in weights.items() if key in own and value.shape != own[key].shape]
    text = f"{'EMA weights' if averaged else 'weights'} of {path}: {len(own)} tensors"
    if resampled:
        text += ", resampled " + ", ".join(
            f"{key} {tuple(weights[key].shape)} -> {tuple(own[key].shape)}" for key in resampled
        )
    if of_file != num_classes:
        model.reset_classifier(num_classes)
        text += f", classifier of {num_classes} classes anew (the file has {of_file or 'none'})"
    return model, text


def _mismatch(error: BaseException | None) -> str:
    """What torch says of tensors that do not fit, without the list of them all."""
    parts = []
    for what, text in re.findall(r"(Missing|Unexpected) key\(s\) in state_dict: (.*?)\.(?:\s|$)", str(error)):
        names = re.findall(r'"([^"]+)"', text)
        parts.append(
            f"{len(names)} tensors {'absent from' if what == 'Missing' else 'only in'} the file, such as {names[0]}"
        )
    sizes = re.findall(
        r"size mismatch for (\S+): copying a param with shape torch.Size\((\S.*?)\) from checkpoint, "
        r"the shape in current model is torch.Size\((\S.*?)\)",
        str(error),
    )
    if sizes:
        name, theirs, ours = sizes[0]
        parts.append(f"{len(sizes)} of another size, such as {name}, {theirs} in the file, {ours} in the model")
    return "; ".join(parts) or (one_line(error) if error else "")


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Writes the dict `state` to `path`, down to the disk, so that `path` is always whole.

    Raises:
        UserError: Where the file cannot be written, on a full disk for instance. What stood at `path` still does.
    """
    try:
        with written_aside(path, lasting=True) as aside:
            with open(aside, "wb") as file:
                torch.save(state, file)
    except (OSError, RuntimeError) as error:
        # torch reports the failed write that it has met as a RuntimeError about file positions.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise UserError(
            f"{path} cannot be written ({cause.strerror or cause}); checkpoints from before are untouched, "
            "--resume goes on with the last one"
        ) from error


def save_run(run_dir: str | os.PathLike[str], state: dict[str, Any], keep: int, is_best: bool = False) -> None:
    """Saves a run's state as update-NUMBER.pt, under the second name last.pt, and best.pt where it is the best.

    The latest `keep` checkpoints stay; best.pt does so beside them.

    Raises:
        UserError: As of `save_checkpoint`.
    """
    newest = Path(run_dir, f"update-{state['updates']:07d}.pt")
    save_checkpoint(newest, state)
    for name in ("best.pt", "last.pt") if is_best else ("last.pt",):  # last.pt never promises a best.pt that is not
        with written_aside(newest.with_name(name), lasting=True) as aside:
            try:
                os.link(newest, aside)  # costs no space
            except OSError:  # the file system knows no links
                shutil.copyfile(newest, aside)
    # By time, not by number: a run may have gone back to an earlier one.
    for old in sorted(newest.parent.glob("update-*.pt"), key=lambda file: file.stat().st_mtime_ns)[:-keep]:
        old.unlink()


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a checkpoint, or a bare state dict, onto the CPU; code inside the file is never run.

    Returns:
        Dict with at least "state_dict".

    Raises:
        UserError: Where the file is missing, is no checkpoint, or holds anything but tensors and plain values.
    """
    path = Path(path)
    if not path.is_file():
        hint = "give a .pt file, such as RUN/best.pt"
        if path.name == "best.pt" and (last := path.with_name("last.pt")).is_file():
            hint = f"the run has not been evaluated yet; {last} has its newest weights"
        elif not path.parent.is_dir():
            hint = f"there is no folder {path.parent}"
        raise UserError(f"no checkpoint at {path}: {hint}")
    try:
        if path.suffix == ".safetensors":
            return {"state_dict": load_file(path)}
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen types here, by what is wrong with the file
        raise UserError(f"{path} is no checkpoint: {_why_unreadable(path, error)}") from error
    if not isinstance(checkpoint, dict):
        raise UserError(f"{path} holds a {type(checkpoint).__name__}, not a checkpoint: give a .pt file of a run")
    if "state_dict" not in checkpoint:
        checkpoint = {"state_dict": checkpoint.get("model", checkpoint)}
    weights = checkpoint["state_dict"]
    if not isinstance(weights, dict) or not any(map(torch.is_tensor, weights.values())):
        raise UserError(f"{path} holds no weights: give a .pt file of a run, or a state dict")
    return checkpoint


def _why_unreadable(path: Path, error: Exception) -> str:
    """torch's reason without its advice, which is to run the code in the file."""
    if not path.stat().st_size:
        return "it is empty"
    foreign = re.search(r"(?:GLOBAL|global:?|function|class) [`']?([\w.]+\.\w+)", str(error))
    if foreign and not isinstance(error, OSError):
        return f"it holds {foreign[1]}, and only tensors and plain values are read, as others could run code"
    if isinstance(error, OSError):
        return error.strerror or one_line(error)
    return "it is none of torch's files, or damaged"


def load_weights(model: nn.Module, checkpoint: dict[str, Any], path: str | os.PathLike[str], ema: bool = False) -> None:
    """Loads the raw or the averaged weights of `checkpoint` into `model`; every tensor must fit.

    Args:
        model: The model, not wrapped; where it is sharded (`fsdp.shard`), all processes have to do this.
        checkpoint: Dict of `load_checkpoint`.
        path: Where it came from, for messages.
        ema: Take the averaged weights.

    Raises:
        UserError: Where the weights belong to another model, or there are no averaged ones.
    """
    weights = checkpoint.get("state_dict_ema") if ema else checkpoint["state_dict"]
    if weights is None:
        raise UserError(
            f"{path} has no averaged weights (EMA): use the raw ones, by --raw in eval.py or --ema-decay 0 in training"
        )
    weights, own = clean_state_dict(weights), model.state_dict()
    shapes = {key: tuple(value.shape) for key, value in weights.items() if torch.is_tensor(value)}
    wrong = sorted(
        key for key in own.keys() | weights.keys() if key not in own or shapes.get(key) != tuple(own[key].shape)
    )
    if wrong:
        key = wrong[0]
        raise UserError(
            f"{path} holds another model ({checkpoint.get('arch', 'of unknown name')}): {len(wrong)} tensors do not "
            f"fit, such as {key}, {shapes.get(key, 'absent')} in the file, "
            f"{tuple(own[key].shape) if key in own else 'absent'} in the model; give the model and model_kwargs it was "
            "trained with"
        )
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
