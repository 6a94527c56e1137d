"""Checkpoints: weights in files, and what else a run saves with them.

A checkpoint is a dict that loads with `weights_only=True`: "arch" (timm's name of the model), "model_args" (all its
arguments, those that the name stood for included), "num_classes", "state_dict", "state_dict_ema" (where weights are
averaged), "class_names" and "display_names" (by index; None where the data have none), "config" (the run's settings),
"facts" (what else its bits depend on), and `Trainer`'s own state. The names of weights are timm's, so
`timm.create_model(arch, **model_args, checkpoint_path=FILE)` takes the file as it is, with its averaged weights.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from timm.models import clean_state_dict
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from vision_longhorn.errors import UserError, reason
from vision_longhorn.files import check_whole, read_json, written_aside
from vision_longhorn.models.names import RENAMED, all_arguments, former_name


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Writes `state` to `path` and waits for the disk, so that `path` is always a whole file. Raises UserError."""
    try:
        with written_aside(path, lasting=True) as aside, open(aside, "wb") as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        # After a failed write, torch raises a RuntimeError about file positions.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise UserError(
            f"{path} cannot be written ({cause.strerror or cause}); earlier checkpoints are untouched, "
            "--resume goes on with the last one"
        ) from error


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a checkpoint, or a bare state dict, onto the CPU, as a dict with at least "state_dict".

    Code inside the file is never run. Raises UserError where it holds anything but tensors and plain values.
    """
    path = Path(path)
    if not path.is_file():
        hint = "give a .pt file, such as RUN/best.pt" if path.parent.is_dir() else f"there is no folder {path.parent}"
        raise UserError(f"no checkpoint at {path}: {hint}")
    try:
        check_whole(path)
        if path.suffix == ".safetensors":
            config = read_json(path.parent / "config.json")  # of a model folder in the hub's layout
            names = config.get("label_names") if isinstance(config, dict) else None
            known = {"class_names": names} if isinstance(names, list) else {}
            return {"state_dict": load_file(path), **known}
        with torch.serialization.safe_globals([argparse.Namespace]):  # in which timm's train.py keeps its arguments
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen types for damaged files
        if isinstance(error, UserError):
            raise
        # torch's own message advises to run what it finds.
        why = "it is none of torch's files, damaged, or holds more than tensors and plain values, which could run code"
        raise UserError(f"{path} is no checkpoint: {reason(error) if isinstance(error, OSError) else why}") from error
    if not isinstance(checkpoint, dict):
        raise UserError(f"{path} holds a {type(checkpoint).__name__}, not a checkpoint: give a .pt file of a run")
    if "state_dict" not in checkpoint:
        checkpoint = {"state_dict": checkpoint.get("model", checkpoint)}
    if isinstance(arguments := checkpoint.get("args"), argparse.Namespace):
        checkpoint.setdefault("num_classes", getattr(arguments, "num_classes", None))
    config = checkpoint.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("model_kwargs"), dict):  # not one of our runs'
        checkpoint = {key: value for key, value in checkpoint.items() if key != "config"}
    weights = checkpoint["state_dict"]
    if not isinstance(weights, dict) or not any(map(torch.is_tensor, weights.values())):
        raise UserError(f"{path} holds no weights: give a .pt file of a run, or a state dict")
    return checkpoint


def stated_model(checkpoint: dict[str, Any], name: str | None = None) -> tuple[str | None, dict[str, Any]]:
    """Returns a checkpoint's model as (name, arguments) for `create_model`; the name is None if it is unknown.

    The arguments are those that the checkpoint states. One of version 0.1 states none, so its name is taken as 0.1
    meant it. A `name` is returned as it is, with the `model_kwargs` of the run's config, unless it is the name of a
    run's own model.
    """
    arch, config = checkpoint.get("arch"), checkpoint.get("config")
    given = config["model_kwargs"] if config else {}
    if name is not None and (name != arch or config is None):
        return name, given
    stated = checkpoint.get("model_args")
    if isinstance(stated, dict) and stated.get("all_arguments"):
        return arch, stated
    if not isinstance(arch, str):
        return None, given
    name = RENAMED.get(arch.partition(".")[0], arch)
    return name, all_arguments(name, given)


def load_weights(model: nn.Module, checkpoint: dict[str, Any], path: str | os.PathLike[str], ema: bool = False) -> None:
    """Loads the raw weights of `checkpoint`, or with `ema` the averaged ones, into `model`, which must not be wrapped.

    `path` is the checkpoint's file, for messages. Where the model is sharded (`fsdp.shard`), all processes have to do
    this. Raises UserError where not every tensor fits.
    """
    weights = checkpoint.get("state_dict_ema") if ema else checkpoint["state_dict"]
    if weights is None:
        raise UserError(
            f"{path} has no averaged weights (EMA): use the raw ones, by --raw in eval.py or --ema-decay 0 in training"
        )
    weights = clean_state_dict(weights)
    theirs, ours = (
        {key: tuple(getattr(value, "shape", ())) for key, value in state.items()}
        for state in (weights, model.state_dict())
    )
    stated = checkpoint.get("model_args")
    former = "" if isinstance(stated, dict) and stated.get("all_arguments") else former_name(model)
    if wrong := [key for key in sorted(theirs | ours) if theirs.get(key) != ours.get(key)]:
        key = wrong[0]
        raise UserError(
            f"{path} holds another model ({checkpoint.get('arch', 'of unknown name')}): {len(wrong)} tensors do not "
            f"fit, such as {key}, {theirs.get(key, 'absent')} in the file, {ours.get(key, 'absent')} in the model; "
            f"give the model and model_kwargs it was trained with{former}"
        )
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
