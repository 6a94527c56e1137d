"""Weights of the official Vision Mamba code (github.com/hustvl/Vim) under the names that the models here use.

That code holds each direction of a mixer in parameters of its own, the backward ones marked by "_b"; here both are
stacked along a leading axis, forward first.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

# Our parameters, and their forward and backward parts in the official code.
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


def rename_official(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Put weights of an official `VisionMamba` with bidirectional mixers ("v2") and RMS norms under our names: a hook
    before `load_state_dict`. Their head may differ from the model's, or be absent.

    Raises:
        RuntimeError: a tensor is missing, has no place in `model`, or its directions do not fit. timm does not demand
            all tensors when the number of classes changes, so this function does.
    """
    theirs = [name for name in state_dict if name.startswith(prefix)]
    if not any(name.startswith(f"{prefix}layers.") for name in theirs):
        return
    out: dict[str, Tensor] = {}
    pairs: dict[str, dict[int, Tensor]] = {}
    for name in theirs:
        value = state_dict.pop(name)
        name = re.sub(r"^layers\.", "blocks.", re.sub(r"^norm_f\.", "norm.", name.removeprefix(prefix)))
        block, mixer, part = name.partition(".mixer.")
        if mixer and part in _PART_OF:
            own, direction = _PART_OF[part]
            # A depthwise convolution's weight has an axis of length 1 for its only input channel.
            value = value.squeeze(1) if own == "conv_weight" and value.ndim == 3 else value
            pairs.setdefault(f"{block}.mixer.{own}", {})[direction] = value
        else:
            out[name] = value

    here, wrong = model.state_dict(), list[str]()
    for name, pair in pairs.items():
        if len(pair) == 2 and pair[0].shape == pair[1].shape and len(here.get(name, pair)) == 2:
            out[name] = torch.stack([pair[0], pair[1]])
        else:
            wrong.append(f"the two directions of {name}")
    wrong += sorted(name for name in here.keys() ^ out.keys() if not name.startswith("head."))
    if wrong:
        raise RuntimeError(
            f"these weights of the official Vision Mamba are not those of this model: {len(wrong)} tensors do not fit "
            f"or are missing in one of the two, such as {', '.join(wrong[:3])}; "
            "use a vim_* model of the same width and depth, with wiring='vim', a class token and stem='patch'"
        )
    state_dict.update({prefix + name: value for name, value in out.items()})
