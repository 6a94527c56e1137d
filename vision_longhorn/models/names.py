"""Defines our models by name. This file needs no torch, so that tools can read names before they import it."""

from collections.abc import Mapping
from typing import Any

_TEST: dict[str, Any] = dict(img_size=96, embed_dim=64, depth=4)
_TINY: dict[str, Any] = dict(embed_dim=192, depth=24)
_SMALL: dict[str, Any] = dict(embed_dim=384, depth=24)
_BASE: dict[str, Any] = dict(embed_dim=768, depth=24)
_MAMBA: dict[str, Any] = dict(mixer="mamba")
# The trunk around the mixers and Longhorn's options with the best results so far. A change here changes what names
# mean, but no saved file, because files store all arguments. Names with "paper", and vim_* without "best", stay.
_MLP: dict[str, Any] = dict(depth=12, expand=1, mlp_ratio=4, mlp_conv=0)
_POOLED: dict[str, Any] = dict(scan_order="rows_columns", class_token="none", global_pool="avg")
_TRUNK: dict[str, Any] = dict(stem="conv", conv="grid", rope=True, **_MLP, **_POOLED)
# Each mixer has what suits it: Longhorn does as well without a gate and without a convolution in the MLPs, and Mamba
# does not.
_BEST: dict[str, Any] = dict(rule="exact", qk_norm=True, beta_min=1e-3, beta_max=0.9, gate="none", **_TRUNK)
_MAMBA_BEST: dict[str, Any] = _MAMBA | _TRUNK | dict(gate="skip", mlp_conv=3)
_FAST: dict[str, Any] = dict(wiring="alternate", **_BEST)
# Options that a name may set for its mixer: Longhorn's own, and those that Mamba takes, too. `all_arguments` leaves
# them out for another mixer. All of our mixers take `expand`.
LONGHORN_OPTIONS = "rule", "qk_norm", "beta_min", "beta_max"
SCAN_OPTIONS = "wiring", "conv", "d_conv", "rope", "gate"

# Arguments of each model that timm lists
MODELS: dict[str, dict[str, Any]] = {
    "vlonghorn_test": _TEST,
    "vlonghorn_tiny": _TINY | _BEST,
    "vlonghorn_tiny_fast": _TINY | _FAST,
    "vlonghorn_tiny_paper": _TINY,
    "vlonghorn_small": _SMALL | _BEST,
    "vlonghorn_small_fast": _SMALL | _FAST,
    "vlonghorn_small_paper": _SMALL,
    "vlonghorn_base": _BASE | _BEST,
    "vlonghorn_base_fast": _BASE | _FAST,
    "vlonghorn_base_paper": _BASE,
    "vim_test": _TEST | _MAMBA,
    "vim_tiny": _TINY | _MAMBA,
    "vim_tiny_best": _TINY | _MAMBA_BEST,
    "vim_tiny_stride8": _TINY | _MAMBA | dict(patch_stride=8),
    "vim_small": _SMALL | _MAMBA,
    "vim_small_best": _SMALL | _MAMBA_BEST,
    "vim_small_stride8": _SMALL | _MAMBA | dict(patch_stride=8),
    "vim_base": _BASE | _MAMBA,
    "vim_base_best": _BASE | _MAMBA_BEST,
}
# Names that version 0.1 listed or made, and timm does not list: for each, the listed name and the arguments that make
# the same model. Old checkpoints, model folders and configs use them, and a model made by one keeps it.
OLD_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "vlonghorn_tiny_cross": ("vlonghorn_tiny_paper", dict(rule="exact", **_POOLED)),
    "vlonghorn_tiny_exact": ("vlonghorn_tiny_paper", dict(rule="exact")),
    "vlonghorn_tiny_shared": ("vlonghorn_tiny_paper", dict(wiring="shared")),
    "vlonghorn_small_cross": ("vlonghorn_small_paper", dict(rule="exact", **_POOLED)),
    "vlonghorn_small_exact": ("vlonghorn_small_paper", dict(rule="exact")),
    "vlonghorn_small_shared": ("vlonghorn_small_paper", dict(wiring="shared")),
    "vlonghorn_base_cross": ("vlonghorn_base_paper", dict(rule="exact", **_POOLED)),
    "vlonghorn_base_exact": ("vlonghorn_base_paper", dict(rule="exact")),
    "vlonghorn_base_shared": ("vlonghorn_base_paper", dict(wiring="shared")),
    "vim_tiny_cross": ("vim_tiny", _POOLED),
    "vim_small_cross": ("vim_small", _POOLED),
    "vim_base_cross": ("vim_base", _POOLED),
}
# Names that meant another model in version 0.1, whose files state no arguments, and what that model is called now
RENAMED = {
    "vlonghorn_tiny": "vlonghorn_tiny_paper",
    "vlonghorn_small": "vlonghorn_small_paper",
    "vlonghorn_base": "vlonghorn_base_paper",
}
# What each name stands for
DEFINITIONS = MODELS | {old: MODELS[name] | arguments for old, (name, arguments) in OLD_NAMES.items()}


def all_arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of the model that `name` makes with the arguments `given`, for files to store.

    The result has `all_arguments=True`. If `given` has it already, or the model is not ours, `given` is returned
    without its None values. So a stored model stays the same when its name gets a new meaning. Options that the name
    sets for its own mixer and rule are left out if `given` names another mixer or rule.
    """
    given = {key: value for key, value in given.items() if value is not None}  # as timm does
    own = DEFINITIONS.get(name.partition(".")[0])
    if own is None or given.get("all_arguments"):
        return given
    mixers = [arguments.get("mixer", "longhorn") for arguments in (own, {**own, **given})]
    left_out: tuple[str, ...] = ()
    if mixers[0] != mixers[1] or given.get("rule", own.get("rule")) != own.get("rule"):
        others = {
            "longhorn": (),
            "mamba": (),
            "mamba2": ("wiring", "rope", "gate"),
            "attention": SCAN_OPTIONS,
            "conv": ("wiring", "conv", "rope", "gate"),
        }
        left_out = (*LONGHORN_OPTIONS, *others.get(mixers[1], (*SCAN_OPTIONS, "expand")))
    # In the order of the definition, so that files of one model are alike.
    kept = {key: value for key, value in own.items() if key not in left_out}
    return {**kept, **given, "all_arguments": True}


def former_name(model: Any) -> str:
    """Return a clause for error messages about weights that do not fit `model`: what its name in version 0.1 is called
    now; "" if that has not changed."""
    name = getattr(model, "pretrained_cfg", {}).get("architecture")
    return f"; weights that version 0.1 called {name} are those of {RENAMED[name]}" if name in RENAMED else ""
