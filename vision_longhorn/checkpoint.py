"""Models by timm name, and the checkpoints of their weights.

A checkpoint is a dict that loads with `weights_only=True`: "arch" (timm's name of the model), "num_classes",
"state_dict", "state_dict_ema" (where weights are averaged), "optimizer", "epoch" and "updates" (finished ones),
"watch" (state of the curves), "best_metric" (top-1), "history" (results by epoch), "config" (the run's values),
"facts" (what else a run's bits depend on), "scaler" (of the loss in fp16, else None), "class_names" and "display_names"
(the classes as the data calls them and as people do, in the order of their numbers; None where the data does not say).
The names are timm's, so `timm.create_model(NAME, checkpoint_path=FILE)` takes the file as it is, and of the weights the
averaged ones.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import timm
import torch
from safetensors.torch import load_file
from timm.data import create_transform, resolve_data_config
from timm.models import clean_state_dict
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import vision_longhorn.models.vlonghorn  # noqa: F401, registers the models
from vision_longhorn.class_names import checkpoint_names, difference, model_names
from vision_longhorn.errors import UserError, nearest, one_line
from vision_longhorn.files import check_whole, written_aside
from vision_longhorn.model_arguments import check_values
from vision_longhorn.runs import run_file, timm_source

TimmModel: TypeAlias = Any  # an nn.Module with timm's own attributes, pretrained_cfg and num_classes among them


def create_model(name: str, /, **kwargs: Any) -> TimmModel:
    """`timm.create_model` that explains a wrong name, argument or size in one line.

    Args:
        name: Name in timm's registry, or one of its "hf-hub:" and "local-dir:" sources.
        **kwargs: Arguments of `timm.create_model`.

    Raises:
        UserError: For an unknown name, arguments that the model refuses, or a damaged model folder.
    """
    source, _, folder = name.rpartition(":")
    if source.lower() == "local-dir":
        check_model_folder(Path(folder))
    if ":" not in name and not timm.is_model(name):
        near = nearest(name, timm.list_models(), n=3)
        hint = f"the nearest names are {', '.join(near)}; " if near else ""
        raise UserError(f"unknown model {name!r}: {hint}timm.list_models() has them all")
    try:
        check_values(kwargs)
        model = timm.create_model(name, **kwargs)
        if source:
            create_transform(**resolve_data_config(model=model))  # what no table of types knows, such as interpolation
        return model
    except UserError as error:
        raise UserError(f"model {name} cannot be made: {error}") from error
    except Exception as error:  # of whatever kind, by what a model makes of an argument that it does not take
        given = " ".join(f"{key}={value}" for key, value in kwargs.items() if key != "pretrained_cfg_overlay")
        raise UserError(f"model {name} cannot be made with {given}: {_mismatch(error)}") from error


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def check_model_folder(folder: Path) -> None:
    """Checks what of a folder in the hub's layout timm would take on trust: its weights, and types in its config.json.

    Raises:
        UserError: Where one of them is missing or damaged.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_bytes())
        args, settings = config.get("model_args", {}), config.get("pretrained_cfg", config)
        classes = config.get("num_classes", settings.get("num_classes"))
        found = {**settings, "num_classes": classes, "label_names": config.get("label_names")}
        wrong = [key for key, fits in _SETTINGS.items() if found.get(key) is not None and not fits(found[key])]
        wrong += [] if isinstance(config.get("architecture"), str) else ["architecture"]
        wrong += [] if args.get("num_classes", classes) == classes else ["model_args.num_classes"]
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): give a folder in the hub's layout") from error
    except (AttributeError, TypeError, ValueError) as error:  # no JSON, or a list where a dict should be
        raise UserError(f"{file} is damaged ({one_line(error)}): fetch or make the folder again") from error
    if wrong:
        given = args.get("num_classes") if "." in wrong[0] else found.get(wrong[0], config.get(wrong[0]))
        raise UserError(f"{file} is damaged ({wrong[0]} is {given!r}): fetch or make the folder again")
    for weights in folder.iterdir():
        if weights.suffix in (".safetensors", ".bin", ".pth"):
            check_whole(weights)


def _numbers(count: int | None = None, above: float = -math.inf, kind: Any = (int, float)) -> Callable[[Any], bool]:
    """Whether a value is a list of `count` numbers; None: of one or more, or a number by itself."""

    def fits(value: Any) -> bool:
        values = [value] if count is None and not isinstance(value, list) else value
        return (
            isinstance(values, list)
            and len(values) == (count or max(len(values), 1))
            and all(isinstance(one, kind) and one is not True and above < one < math.inf for one in values)
        )

    return fits


# What may stand in a model folder's config.json
_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "num_classes": lambda value: type(value) is int and value >= 0,
    "label_names": lambda value: isinstance(value, dict) or _are_names(value),
    "label_descriptions": lambda value: isinstance(value, dict),
    **dict.fromkeys(("input_size", "test_input_size", "min_input_size"), _numbers(3, 0, int)),
    **dict.fromkeys(("crop_pct", "test_crop_pct", "std"), _numbers(above=0)),
    "mean": _numbers(),
    **dict.fromkeys(("interpolation", "crop_mode"), _is_text),
}


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
        name, **kwargs: As of `create_model`.
        path: A checkpoint of the trainer (its averaged weights, if it has any) or a run's folder, bare weights,
            safetensors, or what `runs.timm_source` takes.
        num_classes: Number of classes of the model.
        class_names: What the data call them, None if that is unknown. Where the file or the data have no names, only
            the numbers of classes are compared.

    Returns:
        (model, text): the text says in one line what was loaded, what was resampled, and what starts anew.

    Raises:
        UserError: As of `create_model`, and for weights of another model.
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
    model.pretrained_cfg.pop("state_dict", None)
    own = model.state_dict()
    resampled = [key for key, value in weights.items() if key in own and value.shape != own[key].shape]
    text = f"{'EMA weights' if averaged else 'weights'} of {path}: {len(own)} tensors"
    if resampled:
        text += ", resampled " + ", ".join(
            f"{key} {tuple(weights[key].shape)} -> {tuple(own[key].shape)}" for key in resampled
        )
    names, _ = checkpoint_names(checkpoint)
    other = difference(names, class_names, "the file", "the data") if names and class_names else ""
    if of_file != num_classes or other:
        model.reset_classifier(num_classes)
        why = other if of_file == num_classes else f"the file has {of_file or 'none'}"
        text += f", classifier of {num_classes} classes anew ({why})"
    elif not (names and class_names):
        unknown = [place for place, known in (("the file's", names), ("the data's", class_names)) if not known]
        text += f"; note: {' and '.join(unknown)} class names are unknown, so the classifier stays"
    return model, text


def _as_checkpoint(source: str) -> dict[str, Any]:
    """What a checkpoint would say of a model with weights, by timm's name of it (`runs.timm_source`)."""
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
        second_name(newest, newest.with_name(name))
    # By number, as clocks go back. Where a run itself has gone back, those beyond it are set aside when it resumes.
    earlier = [file for updates, file in update_files(run_dir).items() if updates < state["updates"]]
    for old in earlier[: max(0, len(earlier) + 1 - keep)]:
        old.unlink()


def second_name(file: Path, name: Path) -> None:
    """Gives a checkpoint a second name, which costs no space where the file system knows links."""
    with written_aside(name, lasting=True) as aside:
        try:
            os.link(file, aside)
        except OSError:
            shutil.copyfile(file, aside)


def described(path: Path) -> dict[str, Any]:
    """What a checkpoint of a run says beside its tensors, which stay on the disk; {} where it cannot be read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # as in `load_checkpoint`
        return {}


def epochs_made(path: Path) -> float:
    """Epochs that a run had made at a checkpoint, in whose updates runs on other machines differ. A checkpoint that
    cannot be read counts as one of the future."""
    state = described(path)
    return state["updates"] / state.get("facts", {}).get("updates_per_epoch", 1) if "updates" in state else math.inf


def update_files(run_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """The checkpoints update-NUMBER.pt of a run by their number, the earliest first."""
    found = {int(file.stem[7:]): file for file in Path(run_dir).glob("update-*.pt") if file.stem[7:].isdecimal()}
    return dict(sorted(found.items()))


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
        check_whole(path)
        if path.suffix == ".safetensors":
            return {"state_dict": load_file(path), **_folder_names(path.parent)}
        with torch.serialization.safe_globals([argparse.Namespace]):  # what timm's train.py keeps its arguments in
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen types here, by what is wrong with the file
        why = str(error)
        if not isinstance(error, UserError):
            why = f"{path} is no checkpoint: {_why_unreadable(path, error)}"
        whole = _whole_beside(path)
        raise UserError(f"{why}{f'; {whole} is whole' if whole else ''}") from error
    if not isinstance(checkpoint, dict):
        raise UserError(f"{path} holds a {type(checkpoint).__name__}, not a checkpoint: give a .pt file of a run")
    if "state_dict" not in checkpoint:
        checkpoint = {"state_dict": checkpoint.get("model", checkpoint)}
    if isinstance(args := checkpoint.get("args"), argparse.Namespace):
        checkpoint.setdefault("num_classes", getattr(args, "num_classes", None))
    weights = checkpoint["state_dict"]
    if not isinstance(weights, dict) or not any(map(torch.is_tensor, weights.values())):
        raise UserError(f"{path} holds no weights: give a .pt file of a run, or a state dict")
    return checkpoint


def _folder_names(folder: Path) -> dict[str, Any]:
    """Names of classes as a checkpoint has them, where a model folder in the hub's layout says them."""
    try:
        config = json.loads(Path(folder, "config.json").read_bytes())
        return dict(class_names=config["label_names"], display_names=None) if _are_names(config["label_names"]) else {}
    except (KeyError, OSError, TypeError, ValueError):
        return {}


def _whole_beside(path: Path) -> Path | None:
    """The newest checkpoint beside a damaged one that is not damaged."""
    names = path.with_name("last.pt"), path.with_name("best.pt")
    for other in (*reversed(update_files(path.parent).values()), *names):
        with contextlib.suppress(OSError, UserError, zipfile.BadZipFile):
            if not other.samefile(path) and zipfile.is_zipfile(other):
                check_whole(other)
                return other
    return None


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
