"""Weights of the official Vision Mamba code (github.com/hustvl/Vim) under the names that the models here use.

That code holds each direction of a mixer in parameters of its own, the backward ones marked by "_b"; here both are
stacked along a leading axis, forward first.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["from_official", "rename_official"]

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


def from_official(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename the state dict of an official `VisionMamba` with bidirectional mixers ("v2") and RMS norms for `model`,
    whose head may differ, or be absent.

    Raises:
        RuntimeError: a tensor is missing, has no place in `model`, or its directions do not fit. timm does not ask for
            all tensors when the number of classes changes, so this function does.
    """
    out: dict[str, Tensor] = {}
    pairs: dict[str, dict[int, Tensor]] = {}
    for theirs, value in weights.items():
        name = re.sub(r"^layers\.", "blocks.", re.sub(r"^norm_f\.", "norm.", theirs))
        block, mixer, part = name.partition(".mixer.")
        if mixer and part in _PART_OF:
            own, direction = _PART_OF[part]
            # A depthwise convolution's weight has an axis of length 1 for its only input channel.
            value = value.squeeze(1) if own == "conv_weight" and value.ndim == 3 else value
            pairs.setdefault(f"{block}.mixer.{own}", {})[direction] = value
        else:
            out[name] = value

    here, unknown = model.state_dict(), list[str]()
    for name, pair in pairs.items():
        if len(pair) == 2 and pair[0].shape == pair[1].shape and len(here.get(name, pair)) == 2:
            out[name] = torch.stack([pair[0], pair[1]])
        else:
            unknown.append(f"the two directions of {name}")

    def body(names: Iterable[str]) -> set[str]:
        return {name for name in names if not name.startswith("head.")}

    missing = sorted(body(here) - out.keys())
    unknown += sorted(body(out) - here.keys())
    if missing or unknown:
        raise RuntimeError(
            "these weights of the official Vision Mamba are not those of this model: "
            f"{len(missing)} tensors missing ({', '.join(missing[:3]) or 'none'}), "
            f"{len(unknown)} without a place ({', '.join(unknown[:3]) or 'none'}); "
            "it takes vim_* of the same width and depth, wiring='vim' and a class token"
        )
    return out


def rename_official(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Hook before `load_state_dict`: if `state_dict` holds official weights, put them there under our names."""
    weights = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
    if any(name.startswith("layers.") for name in weights):
        for name in weights:
            del state_dict[prefix + name]
        state_dict.update({prefix + name: value for name, value in from_official(weights, model).items()})
