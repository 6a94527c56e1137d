"""Models by timm name, and what a run leaves on disk: checkpoints, its config, its environment.

A checkpoint is a dict that loads with `weights_only=True`: "arch" (timm's name of the model), "num_classes",
"state_dict", "state_dict_ema" (where weights are averaged), "optimizer", "epoch" and "updates" (finished ones),
"watch" (state of the curves), "best_metric" (top-1), "history" (results by epoch), "config" (the run's values),
"facts" (what else a run's bits depend on), "scaler" (of the loss in fp16, else None), "class_names" and "display_names"
(the classes as the data calls them and as people do, in the order of their numbers; None where the data does not say).
The names are timm's, so `timm.create_model(NAME, checkpoint_path=FILE)` takes the file as it is, and of the weights the
averaged ones.
"""

import csv
import difflib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import timm
import torch
import yaml
from safetensors.torch import load_file
from timm.models import clean_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import vision_longhorn.models.vlonghorn  # noqa: F401, registers the models
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
        given = " ".join(f"{key}={value}" for key, value in kwargs.items() if key != "pretrained_cfg_overlay")
        raise UserError(f"model {name} cannot be made with {given}: {one_line(error)}") from error


def model_from_weights(name, path, num_classes, **kwargs):
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
    cfg = timm.get_pretrained_cfg(name)
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
        raise UserError(f"{path} holds weights of another model{f' ({arch})' if arch else ''}: "
                        f"{_mismatch(error.__cause__)}; give the model and model_kwargs it was trained with") from error
    model.pretrained_cfg["input_size"] = cfg.input_size
    own = model.state_dict()
    resampled = [key for key, value in weights.items() if key in own and value.shape != own[key].shape]
    text = f"{'EMA weights' if averaged else 'weights'} of {path}: {len(own)} tensors"
    if resampled:
        text += ", resampled " + ", ".join(
            f"{key} {tuple(weights[key].shape)} -> {tuple(own[key].shape)}" for key in resampled)
    if of_file != num_classes:
        model.reset_classifier(num_classes)
        text += f", classifier of {num_classes} classes anew (the file has {of_file or 'none'})"
    return model, text


def _mismatch(error):
    """What torch says of tensors that do not fit, without the list of them all."""
    parts = []
    for what, text in re.findall(r"(Missing|Unexpected) key\(s\) in state_dict: (.*?)\.(?:\s|$)", str(error)):
        names = re.findall(r'"([^"]+)"', text)
        parts.append(f"{len(names)} tensors {'absent from' if what == 'Missing' else 'only in'} the file, such as "
                     f"{names[0]}")
    sizes = re.findall(r"size mismatch for (\S+): copying a param with shape torch.Size\((\S.*?)\) from checkpoint, "
                       r"the shape in current model is torch.Size\((\S.*?)\)", str(error))
    if sizes:
        name, theirs, ours = sizes[0]
        parts.append(f"{len(sizes)} of another size, such as {name}, {theirs} in the file, {ours} in the model")
    return "; ".join(parts) or one_line(error)


def save_checkpoint(path, state):
    """Writes the dict `state` to `path`: aside first, down to the disk, then renamed, so that `path` is always whole.

    Raises:
        UserError: Where the file cannot be written, on a full disk for instance. What stood at `path` still does.
    """
    path = Path(path)
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with open(aside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        # torch reports the failed write that it has met as a RuntimeError about file positions.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise UserError(f"{path} cannot be written ({cause.strerror or cause}); checkpoints from before are untouched, "
                        "--resume goes on with the last one") from error
    finally:
        aside.unlink(missing_ok=True)


def save_run(run_dir, state, keep, is_best=False):
    """Saves a run's state as update-NUMBER.pt, under the second name last.pt, and best.pt where it is the best.

    The latest `keep` checkpoints stay; best.pt does so beside them.

    Raises:
        UserError: As of `save_checkpoint`.
    """
    newest = Path(run_dir, f"update-{state['updates']:07d}.pt")
    save_checkpoint(newest, state)
    for name in ("best.pt", "last.pt") if is_best else ("last.pt",):  # last.pt never promises a best.pt that is not
        _name_also(newest, newest.with_name(name))
    # By time, not by number: a run may have gone back to an earlier one.
    for old in sorted(newest.parent.glob("update-*.pt"), key=lambda file: file.stat().st_mtime_ns)[:-keep]:
        old.unlink()


def _name_also(path, name):
    """Gives the file a second name, at no cost of space where the file system can do that."""
    aside = name.with_name(f"{name.name}.tmp")
    try:
        aside.unlink(missing_ok=True)
        try:
            os.link(path, aside)
        except OSError:  # the file system knows no links
            shutil.copyfile(path, aside)
        os.replace(aside, name)
        _sync_folder(name.parent)
    finally:
        aside.unlink(missing_ok=True)


def _sync_folder(folder):
    """Brings a rename to the disk."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


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


def _why_unreadable(path, error):
    """torch's reason without its advice, which is to run the code in the file."""
    if not path.stat().st_size:
        return "it is empty"
    foreign = re.search(r"(?:GLOBAL|global:?|function|class) [`']?([\w.]+\.\w+)", str(error))
    if foreign and not isinstance(error, OSError):
        return f"it holds {foreign[1]}, and only tensors and plain values are read, as others could run code"
    if isinstance(error, OSError):
        return error.strerror or one_line(error)
    return "it is none of torch's files, or damaged"


def load_weights(model, checkpoint, path, ema=False):
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
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))


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
    try:
        aside.write_text(text)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_summary(path, history):
    """Writes the results of all epochs as a CSV table, a row per epoch.

    Args:
        path: The file.
        history: List of dicts, one per epoch; a nested dict's keys get its own key before them, as in "val_top1". An
            epoch may lack what others have, such as an evaluation.
    """
    rows = []
    for entry in history:
        nested = [({f"{key}_{inner}": number for inner, number in value.items()} if isinstance(value, dict)
                   else {key: value}) for key, value in entry.items()]
        rows.append({key: value for part in nested for key, value in part.items()})
    table = io.StringIO()
    writer = csv.DictWriter(table, dict.fromkeys(key for row in rows for key in row), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, table.getvalue())


def write_run_files(run_dir, config, extra):
    """Saves config.yaml and env.json (the environment and the dict `extra`) in a run's folder."""
    write_text(Path(run_dir, "config.yaml"), yaml.safe_dump(config.values(), sort_keys=False))
    write_text(Path(run_dir, "env.json"), json.dumps({**describe_environment(), **extra}, indent=2) + "\n")
