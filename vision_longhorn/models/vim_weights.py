"""Weights of the official Vision Mamba code (github.com/hustvl/Vim) under the names that the models here use.

That code holds each direction of a mixer in parameters of its own, the backward ones marked by "_b"; here both are
stacked along a leading axis, forward first.
"""

from collections.abc import Iterable
from typing import Any

import torch
from timm.models import clean_state_dict
from torch import Tensor, nn

__all__ = ["fit_features", "from_official", "rename_official", "unwrap"]

# Parameter here: its forward and its backward part there.
_PAIRS = {
    "conv_weight": ("conv1d.weight", "conv1d_b.weight"),
    "conv_bias": ("conv1d.bias", "conv1d_b.bias"),
    "x_proj": ("x_proj.weight", "x_proj_b.weight"),
    "dt_proj": ("dt_proj.weight", "dt_proj_b.weight"),
    "dt_bias": ("dt_proj.bias", "dt_proj_b.bias"),
    "A_log": ("A_log", "A_b_log"),
    "D": ("D", "D_b"),
}
_PART_OF = {part: (name, i) for name, parts in _PAIRS.items() for i, part in enumerate(parts)}
# In timm's order: averaged weights before raw ones.
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")


def unwrap(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """The weights in a checkpoint, averaged ones if it has them; bare weights come back as they are."""
    for key in _WRAPPERS:
        if isinstance(checkpoint.get(key), dict):
            checkpoint = checkpoint[key]
            break
    return clean_state_dict(checkpoint)


def from_official(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Official weights under the names of `model`.

    Args:
        weights: state dict of the official `VisionMamba` with bidirectional mixers ("v2") and RMS norms.
        model: where they are to go; its head may differ, or be absent.

    Raises:
        RuntimeError: a tensor is missing or has no place in `model`. timm does not ask for all of them when the
            number of classes changes, so it is done here.
    """
    out: dict[str, Tensor] = {}
    parts: dict[str, dict[int, tuple[str, Tensor]]] = {}
    unknown: list[str] = []
    for name, value in weights.items():
        if name.startswith("norm_f."):
            out["norm." + name.removeprefix("norm_f.")] = value
        elif name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            own, direction = _PART_OF.get(rest.removeprefix("mixer."), ("", 0))
            if own and rest.startswith("mixer."):
                # A depthwise convolution's weight has an axis of length 1 for its only input channel.
                value = value.squeeze(1) if own == "conv_weight" and value.ndim == 3 else value
                parts.setdefault(f"blocks.{index}.mixer.{own}", {})[direction] = (name, value)
            else:
                out[f"blocks.{index}.{rest}"] = value
        else:
            out[name] = value
    for name, pair in parts.items():
        if len(pair) == 2 and pair[0][1].shape == pair[1][1].shape:
            out[name] = torch.stack([pair[0][1], pair[1][1]])
        else:
            unknown += [f"{key} without a counterpart of its shape" for key, _ in pair.values()]

    here = model.state_dict()

    def body(names: Iterable[str]) -> set[str]:
        return {name for name in names if not name.startswith("head.")}

    wanted = body(here)
    missing = sorted(wanted - out.keys())
    unknown += sorted(body(out) - wanted)
    unknown += [f"the two directions of {name}" for name in parts if name in here and len(here[name]) == 1]
    if missing or unknown:
        raise RuntimeError(
            "these weights of the official Vision Mamba are not those of this model: "
            f"{len(missing)} tensors missing ({', '.join(missing[:3]) or 'none'}), "
            f"{len(unknown)} without a place ({', '.join(unknown[:3]) or 'none'}); "
            "it takes vim_* of the same width and depth, wiring='vim' and a class token"
        )
    return out


def rename_official(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Hook before `load_state_dict`: puts official weights among `state_dict`, if it holds any, under our names."""
    weights = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
    if any(name.startswith("layers.") for name in weights):
        for name in weights:
            del state_dict[prefix + name]
        state_dict.update({prefix + name: value for name, value in from_official(weights, model).items()})


def fit_features(
    net: nn.Module,
    state_dict: dict[str, Tensor],
    prefix: str,
    _: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
    *,
    depth: int,
) -> None:
    """Hook before `load_state_dict` of what `features_only=True` gives: takes the weights of a whole model as well.

    timm wraps the model, so its weights have longer names there, and drops what the features do not need: the head,
    the norm, the blocks after the last one. Its `create_model(NAME, features_only=True, checkpoint_path=FILE)` loads
    the file into the wrapper all the same.

    Args:
        net: the wrapper, with the model as its only child.
        state_dict: what is loaded; weights of a whole model in it, of ours or official ones, are renamed, and those
            that `net` lacks dropped.
        prefix: before the names of `net` in it.
        strict, errors: as torch gives them; weights of another number of blocks are an error.
        depth: blocks of the whole model.
    """
    ((child, _),) = net.named_children()
    inner = f"{prefix}{child}."
    names = [name for name in state_dict if name.startswith(prefix)]
    if any(name.startswith(inner) for name in names):
        return
    kept = {_part(name.removeprefix(f"{child}.")) for name in net.state_dict()}
    whole = {f"blocks.{i}" for i in range(depth)} | {"norm", "head"}
    given = {_part(name.removeprefix(prefix)) for name in names}
    absent = {part for part in whole - given if part.startswith("blocks.")}
    if strict and names and absent and given & whole != kept & whole:
        errors.append(f"these weights are of {depth - len(absent)} blocks, the model has {depth}")
    for name in names:
        value, part = state_dict.pop(name), _part(name.removeprefix(prefix))
        if part in kept or part not in whole:
            state_dict[inner + name.removeprefix(prefix)] = value


def _part(name: str) -> str:
    """The part of a model that a parameter belongs to, "blocks.3" for instance, also by its official name."""
    first, second, *_ = *name.split("."), ""
    first = {"layers": "blocks", "norm_f": "norm"}.get(first, first)
    return f"blocks.{second}" if first == "blocks" else first
