"""What the names of our models stand for. This needs no torch, so that tools can read names before they import it."""

from collections.abc import Mapping
from typing import Any

_TEST: dict[str, Any] = dict(img_size=96, embed_dim=64, depth=4)
_TINY: dict[str, Any] = dict(embed_dim=192, depth=24)
_SMALL: dict[str, Any] = dict(embed_dim=384, depth=24)
_BASE: dict[str, Any] = dict(embed_dim=768, depth=24)
_MAMBA: dict[str, Any] = dict(mixer="mamba")
# The trunk that docs/study.md found better for every mixer tried in it
_TRUNK: dict[str, Any] = dict(scan_order="rows_columns", class_token="none", global_pool="avg")
_CROSS: dict[str, Any] = dict(rule="exact", **_TRUNK)

# Arguments of each model that timm lists
MODELS: dict[str, dict[str, Any]] = {
    "vlonghorn_test": _TEST,
    "vlonghorn_tiny": _TINY,
    "vlonghorn_tiny_cross": _TINY | _CROSS,
    "vlonghorn_small": _SMALL,
    "vlonghorn_small_cross": _SMALL | _CROSS,
    "vlonghorn_base": _BASE,
    "vlonghorn_base_cross": _BASE | _CROSS,
    "vim_test": _TEST | _MAMBA,
    "vim_tiny": _TINY | _MAMBA,
    "vim_tiny_cross": _TINY | _MAMBA | _TRUNK,
    "vim_tiny_stride8": _TINY | _MAMBA | dict(patch_stride=8),
    "vim_small": _SMALL | _MAMBA,
    "vim_small_cross": _SMALL | _MAMBA | _TRUNK,
    "vim_small_stride8": _SMALL | _MAMBA | dict(patch_stride=8),
    "vim_base": _BASE | _MAMBA,
    "vim_base_cross": _BASE | _MAMBA | _TRUNK,
}
# Older names, which timm does not list: for each, the listed name and the arguments that make the same model. Old
# checkpoints, model folders and configs use them, and a model made by one keeps it.
OLD_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "vlonghorn_tiny_exact": ("vlonghorn_tiny", dict(rule="exact")),
    "vlonghorn_tiny_shared": ("vlonghorn_tiny", dict(wiring="shared")),
    "vlonghorn_small_exact": ("vlonghorn_small", dict(rule="exact")),
    "vlonghorn_small_shared": ("vlonghorn_small", dict(wiring="shared")),
    "vlonghorn_base_exact": ("vlonghorn_base", dict(rule="exact")),
    "vlonghorn_base_shared": ("vlonghorn_base", dict(wiring="shared")),
}
# What each name stands for
DEFINITIONS = MODELS | {old: MODELS[name] | arguments for old, (name, arguments) in OLD_NAMES.items()}
# Names that meant another model in version 0.1, whose files state no arguments of names: what that model is called now
RENAMED: dict[str, str] = {}


def all_arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments of the model that `name` makes with those `given`: what files state.

    With `all_arguments=True` among them the name adds none of its own, so that they make the same model even if the
    name has another meaning by then. Of a model that is not ours they are those given.
    """
    given = {key: value for key, value in given.items() if value is not None}  # as timm does
    own = DEFINITIONS.get(name.partition(".")[0])
    return given if own is None or given.get("all_arguments") else {**own, **given, "all_arguments": True}
