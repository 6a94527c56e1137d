"""Models by their name in timm, with one-line errors."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import timm
from timm.data import create_transform, resolve_data_config

import vision_longhorn.models.vlonghorn  # noqa: F401, registers the models
from vision_longhorn.errors import UserError, nearest, one_line
from vision_longhorn.files import check_whole
from vision_longhorn.model_arguments import check_values

TimmModel: TypeAlias = Any  # an nn.Module with timm's own attributes, such as pretrained_cfg and num_classes


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
    if not source and not timm.is_model(name):
        near = nearest(name, timm.list_models(), n=3)
        hint = f"the nearest names are {', '.join(near)}; " if near else ""
        raise UserError(f"unknown model {name!r}: {hint}timm.list_models() has them all")
    try:
        check_values(kwargs)
        model = timm.create_model(name, **kwargs)
        if source:  # whose configuration may hold a value that timm takes and its transforms do not
            create_transform(**resolve_data_config(model=model))
        return model
    except UserError as error:
        raise UserError(f"model {name} cannot be made: {error}") from error
    except Exception as error:  # models raise any type for an argument that they do not take
        given = " ".join(f"{key}={value}" for key, value in kwargs.items() if key != "pretrained_cfg_overlay")
        raise UserError(f"model {name} cannot be made with {given}: {mismatch(error)}") from error


def mismatch(error: BaseException) -> str:
    """The message of torch about tensors that do not fit, with an example in place of the list of them all."""
    text, parts = str(error), []
    for kind, keys in re.findall(r"(Missing|Unexpected) key\(s\) in state_dict: (.*?)\.(?:\s|$)", text):
        names = re.findall(r'"([^"]+)"', keys)
        where = "absent from" if kind == "Missing" else "only in"
        parts.append(f"{len(names)} tensors {where} the file, such as {names[0]}")
    sizes = re.findall(r"mismatch for (\S+): .*? shape torch.Size\((\S.*?)\) from .*? is torch.Size\((\S.*?)\)", text)
    if sizes:
        name, theirs, ours = sizes[0]
        parts.append(f"{len(sizes)} of another size, such as {name}, {theirs} in the file, {ours} in the model")
    return "; ".join(parts) or one_line(error)


def check_model_folder(folder: Path) -> None:
    """Checks what timm does not in a folder in the hub's layout: its weights, and the types in its config.json.

    Raises:
        UserError: Where one of them is missing or damaged.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_bytes())
        arguments, settings = config.get("model_args", {}), config.get("pretrained_cfg", config)
        classes = config.get("num_classes", settings.get("num_classes"))
        found = {key: settings[key] for key in _SETTINGS.keys() & settings.keys()}
        found |= {"num_classes": classes, "label_names": config.get("label_names")}
        wrong = {key: value for key, value in found.items() if value is not None and not _SETTINGS[key](value)}
        if not isinstance(config.get("architecture"), str):
            wrong["architecture"] = config.get("architecture")
        if arguments.get("num_classes", classes) != classes:
            wrong["model_args.num_classes"] = arguments["num_classes"]
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): give a folder in the hub's layout") from error
    except (AttributeError, TypeError, ValueError) as error:  # no JSON, or a list where a dict should be
        raise UserError(f"{file} is damaged ({one_line(error)}): fetch or make the folder again") from error
    for key, value in wrong.items():
        raise UserError(f"{file} is damaged ({key} is {value!r}): fetch or make the folder again")
    for weights in folder.iterdir():
        if weights.suffix in (".safetensors", ".bin", ".pth"):
            check_whole(weights)


def are_names(value: Any) -> bool:
    """Whether a value is a list of texts."""
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_size(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(type(one) is int and one > 0 for one in value)


def _are_numbers(value: Any) -> bool:
    """Whether a value is a number or a list of numbers, all of them finite."""
    numbers = value if isinstance(value, list) else [value]
    return numbers != [] and all(type(one) in (int, float) and -math.inf < one < math.inf for one in numbers)


def _are_positive(value: Any) -> bool:
    return _are_numbers(value) and min(value if isinstance(value, list) else [value]) > 0


# What may stand in a model folder's config.json
_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "num_classes": lambda value: type(value) is int and value >= 0,
    "label_names": lambda value: isinstance(value, dict) or are_names(value),
    "label_descriptions": lambda value: isinstance(value, dict),
    **dict.fromkeys(("input_size", "test_input_size", "min_input_size"), _is_size),
    **dict.fromkeys(("crop_pct", "test_crop_pct", "std"), _are_positive),
    "mean": _are_numbers,
    **dict.fromkeys(("interpolation", "crop_mode"), lambda value: isinstance(value, str)),
}
