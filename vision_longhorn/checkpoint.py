"""Models by timm name, and what a run leaves on disk: checkpoints, its config, its environment.

A checkpoint is a dict that loads with `weights_only=True`: "arch" (timm's name of the model), "num_classes",
"state_dict", "state_dict_ema" (where weights are averaged), "optimizer", "epoch" and "updates" (finished ones),
"best_metric" (top-1), "history" (results by epoch) and "config" (the run's values). The names are timm's, so
`timm.create_model(NAME, checkpoint_path=FILE)` takes the file as it is, and of the weights the averaged ones.
"""

import difflib
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import timm
import torch
import yaml
from timm.models import clean_state_dict

import vision_longhorn  # noqa: F401, registers the models
from vision_longhorn.errors import UserError, one_line


def create_model(name, **kwargs):
    """`timm.create_model` that explains a wrong name, argument or size in one line.

    Args:
        name: Name in timm's registry, or one of its "hf-hub:" and "local-dir:" sources.
        **kwargs: Arguments of `timm.create_model`.

    Raises:
        UserError: For an unknown name, or arguments that the model refuses.
    """
    if ":" not in name and not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.4)
        raise UserError(f"unknown model {name!r}: the nearest names are {', '.join(near) or 'none'}; "
                        "timm.list_models() has them all")
    try:
        return timm.create_model(name, **kwargs)
    except (AssertionError, OSError, RuntimeError, TypeError, ValueError) as error:
        given = " ".join(f"{key}={value}" for key, value in kwargs.items())
        raise UserError(f"model {name} cannot be made with {given}: {one_line(error)}") from error


def save_checkpoint(path, state):
    """Writes the dict `state` to `path`: aside first, then renamed, so that `path` is never half written."""
    aside = Path(f"{path}.tmp")
    try:
        torch.save(state, aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def load_checkpoint(path):
    """Reads a checkpoint, or a bare state dict, onto the CPU; code inside the file is never run.

    Returns:
        Dict with at least "state_dict".

    Raises:
        UserError: Where the file is missing, is no checkpoint, or holds anything but tensors and plain values.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no checkpoint at {path}: give a .pt file, such as RUN/best.pt")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen types here, by what is wrong with the file
        raise UserError(f"{path} is no checkpoint of tensors and plain values: {str(error).splitlines()[0]}") from error
    if not isinstance(checkpoint, dict):
        raise UserError(f"{path} holds a {type(checkpoint).__name__}, not a checkpoint: give a .pt file of a run")
    if "state_dict" not in checkpoint:
        checkpoint = {"state_dict": checkpoint.get("model", checkpoint)}
    return checkpoint


def load_weights(model, checkpoint, path, ema=False):
    """Loads the raw or the averaged weights of `checkpoint` into `model`; every tensor must fit.

    Args:
        model: The model, not wrapped.
        checkpoint: Dict of `load_checkpoint`.
        path: Where it came from, for messages.
        ema: Take the averaged weights.

    Raises:
        UserError: Where the weights belong to another model, or there are no averaged ones.
    """
    weights = checkpoint.get("state_dict_ema") if ema else checkpoint["state_dict"]
    if weights is None:
        raise UserError(f"{path} has no averaged weights (EMA): use the raw ones, by --raw in eval.py or --ema-decay 0 "
                        "in training")
    weights, own = clean_state_dict(weights), model.state_dict()
    shapes = {key: tuple(value.shape) for key, value in weights.items() if torch.is_tensor(value)}
    wrong = sorted(key for key in own.keys() | weights.keys()
                   if key not in own or shapes.get(key) != tuple(own[key].shape))
    if wrong:
        key = wrong[0]
        raise UserError(
            f"{path} holds another model ({checkpoint.get('arch', 'of unknown name')}): {len(wrong)} tensors do not "
            f"fit, such as {key}, {shapes.get(key, 'absent')} in the file, "
            f"{tuple(own[key].shape) if key in own else 'absent'} in the model; give the model and model_kwargs it was "
            "trained with"
        )
    model.load_state_dict(weights)


def describe_environment():
    """What a run depended on beside its config: command, commit, versions, machine. A dict fit for JSON."""

    def git(*arguments):
        try:
            here = Path(__file__).resolve().parent
            answer = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True)
        except FileNotFoundError:  # no git on this machine
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    versions = {}
    for name in ("torch", "torchvision", "triton", "timm", "accelerate", "webdataset", "numpy", "pillow"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    changed = git("status", "--porcelain")
    return {
        "command": sys.argv,
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": None if changed is None else bool(changed),
        "python": platform.python_version(),
        "versions": versions,
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cpus": os.cpu_count(),
    }


def write_text(path, text):
    """Writes `text` aside and renames it, so that no reader ever sees half a file."""
    aside = Path(f"{path}.tmp")
    aside.write_text(text)
    os.replace(aside, path)


def write_run_files(run_dir, config, extra):
    """Saves config.yaml and env.json (the environment and the dict `extra`) in a run's folder."""
    write_text(Path(run_dir, "config.yaml"), yaml.safe_dump(config.values(), sort_keys=False))
    write_text(Path(run_dir, "env.json"), json.dumps({**describe_environment(), **extra}, indent=2) + "\n")
