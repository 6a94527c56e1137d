"""Weights of the official Vision Mamba code (github.com/hustvl/Vim) under the names that the models here use.

That code holds each direction of a mixer in parameters of its own, the backward ones marked by "_b"; here both are
stacked along a leading axis, forward first.
"""

from typing import Any

import torch
from timm.models import clean_state_dict
from torch import Tensor, nn

__all__ = ["from_official", "rename_official", "unwrap"]

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
    out, parts, unknown = {}, {}, []
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

    def body(names):
        return {name for name in names if not name.startswith("head.")}

    wanted = body(model.state_dict())
    missing = sorted(wanted - out.keys())
    unknown += sorted(body(out) - wanted)
    if missing or unknown:
        raise RuntimeError(
            "these weights of the official Vision Mamba are not those of this model: "
            f"{len(missing)} tensors missing ({', '.join(missing[:3]) or 'none'}), "
            f"{len(unknown)} without a place ({', '.join(unknown[:3]) or 'none'}); "
            "it takes vim_* of the same width and depth, wiring='vim' and a class token")
    return out


def rename_official(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
    """Hook before `load_state_dict`: puts official weights among `state_dict`, if it holds any, under our names."""
    weights = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
    if any(name.startswith("layers.") for name in weights):
        for name in weights:
            del state_dict[prefix + name]
        state_dict.update({prefix + name: value for name, value in from_official(weights, model).items()})
