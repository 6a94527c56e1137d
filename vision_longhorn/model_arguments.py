"""Checks of a model's keyword arguments before it is built: their names and their values."""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from vision_longhorn.errors import UserError
from vision_longhorn.settings import COUNT, POSITIVE, Range

RATE = Range(0, below=1)
# The numbers that models here and in timm take. A list has one number for each stage of a model.
NUMBERS = {
    **dict.fromkeys(("depth", "embed_dim", "num_heads", "in_chans", "d_state", "d_conv", "dt_rank", "head_dim"), COUNT),
    **dict.fromkeys(("drop_rate", "pos_drop_rate", "drop_path_rate", "attn_drop_rate", "proj_drop_rate"), RATE),
    **dict.fromkeys(("expand", "norm_eps"), POSITIVE),
    "mlp_ratio": Range(0),
    "num_classes": Range(0, kind=int),
}
SIZES = ("img_size", "patch_size", "patch_stride")
FLAGS = (
    *("dynamic_img_size", "dynamic_img_pad", "residual_in_fp32", "save_states", "A_per_token", "all_arguments"),
    *("qk_norm", "rope", "causal"),
)
# Arguments that configs and commands take elsewhere, and where
ELSEWHERE = {
    "num_classes": "num_classes",
    "device": "device",
    "dtype": "precision",
    "checkpoint_path": "the checkpoint in its own place",
    "features_only": "a model with classes",
    **dict.fromkeys(("name", "model_name", "arch"), "model"),
    **dict.fromkeys(("self", "path", "checkpoint", "ema", "pretrained_cfg_overlay"), "arguments of the model"),
}


def check_names(kwargs: Mapping[str, Any], options: Mapping[str, str]) -> None:
    """Raises UserError for an argument that is given elsewhere.

    Args:
        kwargs: Arguments of a model.
        options: Where to give them instead, if it is not as in ELSEWHERE; "" allows the argument.
    """
    for key in kwargs:
        if instead := {**ELSEWHERE, **options}.get(key):
            raise UserError(f"model_kwargs has {key}: leave it out and give {instead}")


def check_values(kwargs: Mapping[str, Any]) -> None:
    """Raises UserError for a wrong number, size or switch; other arguments are left to the model."""
    for key, value in kwargs.items():
        if value is None:
            continue
        items = value if isinstance(value, (list, tuple)) else [value]
        if key in SIZES and not (all(is_in(COUNT, item) for item in items) and (items != value or len(items) == 2)):
            raise UserError(f"{key} is {value!r}: give {COUNT}, or two of them, [height, width]")
        allowed = NUMBERS.get(key)
        if allowed and not all(isinstance(item, (list, tuple)) or is_in(allowed, item) for item in items):
            raise UserError(f"{key} is {value!r}: give {allowed}")
        if key in FLAGS and value not in (True, False):
            raise UserError(f"{key} is {value!r}: give true or false")


def is_in(allowed: Range, value: Any) -> bool:
    """Tells whether any value, such as one from JSON, is a number in a range."""
    kind = Integral if allowed.kind is int else Real
    if isinstance(value, bool) or not isinstance(value, kind):
        return False
    number: Any = value
    return bool(abs(number) < 1 << 31) and number in allowed
