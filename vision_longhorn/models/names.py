"""What the names of our models stand for. This needs no torch, so that tools can read names before they import it."""

from collections.abc import Mapping
from typing import Any

_TEST: dict[str, Any] = dict(img_size=96, embed_dim=64, depth=4)
_SIZES: dict[str, dict[str, Any]] = {
    "tiny": dict(embed_dim=192, depth=24),
    "small": dict(embed_dim=384, depth=24),
    "base": dict(embed_dim=768, depth=24),
}
# What names may say of a mixer: of Longhorn, and of what Mamba has, too
OF_LONGHORN, OF_SCANS = ("rule", "qk_norm", "beta_min", "beta_max"), ("wiring", "conv", "d_conv")
_MAMBA: dict[str, Any] = dict(mixer="mamba")
# The best that is known to stand around a mixer, and the best Longhorn in it. Whoever changes them changes what some
# names below mean, but no file, as files state all arguments. Names that say paper, and vim without best, stay.
_TRUNK: dict[str, Any] = dict(scan_order="rows_columns", class_token="none", global_pool="avg")
_BEST: dict[str, Any] = dict(rule="exact", qk_norm=True, beta_min=1e-3, beta_max=1e-1, **_TRUNK)
# The trunk of the names with cross, which version 0.1 listed
_CROSS: dict[str, Any] = dict(scan_order="rows_columns", class_token="none", global_pool="avg")

# Arguments of each model that timm lists
MODELS: dict[str, dict[str, Any]] = {"vlonghorn_test": _TEST, "vim_test": _TEST | _MAMBA}
# Older names, which timm does not list: for each, the listed name and the arguments that make the same model. Old
# checkpoints, model folders and configs use them, and a model made by one keeps it.
OLD_NAMES: dict[str, tuple[str, dict[str, Any]]] = {}
# Names that meant another model in version 0.1, whose files state no arguments of names: what that model is called now
RENAMED: dict[str, str] = {}
for _size, _own in _SIZES.items():
    MODELS |= {
        f"vlonghorn_{_size}": _own | _BEST,
        f"vlonghorn_{_size}_fast": _own | _BEST | dict(wiring="alternate"),
        f"vlonghorn_{_size}_paper": _own,
        f"vim_{_size}": _own | _MAMBA,
        f"vim_{_size}_best": _own | _MAMBA | _TRUNK,
    }
    OLD_NAMES |= {
        f"vlonghorn_{_size}_cross": (f"vlonghorn_{_size}_paper", dict(rule="exact", **_CROSS)),
        f"vlonghorn_{_size}_exact": (f"vlonghorn_{_size}_paper", dict(rule="exact")),
        f"vlonghorn_{_size}_shared": (f"vlonghorn_{_size}_paper", dict(wiring="shared")),
        f"vim_{_size}_cross": (f"vim_{_size}", _CROSS),
    }
    RENAMED[f"vlonghorn_{_size}"] = f"vlonghorn_{_size}_paper"
for _size in "tiny", "small":
    MODELS[f"vim_{_size}_stride8"] = _SIZES[_size] | _MAMBA | dict(patch_stride=8)
# What each name stands for
DEFINITIONS = MODELS | {old: MODELS[name] | arguments for old, (name, arguments) in OLD_NAMES.items()}


def all_arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments of the model that `name` makes with those `given`: what files state.

    With `all_arguments=True` among them the name adds none of its own, so that they make the same model even if the
    name has another meaning by then. Of a model that is not ours they are those given. What the name says of its mixer
    is meant for this mixer and its rule: another one has the usual options.
    """
    given = {key: value for key, value in given.items() if value is not None}  # as timm does
    own = DEFINITIONS.get(name.partition(".")[0])
    if own is None or given.get("all_arguments"):
        return given
    mixers = [arguments.get("mixer", "longhorn") for arguments in (own, {**own, **given})]
    left_out: tuple[str, ...] = ()
    if mixers[0] != mixers[1] or given.get("rule", own.get("rule")) != own.get("rule"):
        left_out = OF_LONGHORN if mixers[1] in ("longhorn", "mamba") else (*OF_LONGHORN, *OF_SCANS)
    return {**{key: own[key] for key in own.keys() - left_out}, **given, "all_arguments": True}


def former_name(model: Any) -> str:
    """Returns an end for messages about weights that do not fit `model`: where those of version 0.1 do, or ""."""
    name = getattr(model, "pretrained_cfg", {}).get("architecture")
    return f"; weights that version 0.1 called {name} are those of {RENAMED[name]}" if name in RENAMED else ""
