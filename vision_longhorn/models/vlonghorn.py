"""The models by name, registered with timm: Vision Longhorn and Vision Mamba (ViM), with their configurations."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from timm.models import _registry, build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._input import update_model_args

from vision_longhorn.models.backbone import Block, VisionLonghorn
from vision_longhorn.models.pretrained import checkpoint_filter_fn, fit_features

__all__ = ["Block", "VisionLonghorn", "checkpoint_filter_fn"]

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
# Repository on the Hugging Face hub and file of the weights that the authors of Vision Mamba published
_WEIGHTS = {
    "vim_tiny": ("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_76p1acc.pth"),
    "vim_tiny_stride8": ("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_ft_78p3acc.pth"),
    "vim_small": ("hustvl/Vim-small-midclstok", "vim_s_midclstok_80p5acc.pth"),
    "vim_small_stride8": ("hustvl/Vim-small-midclstok", "vim_s_midclstok_ft_81p6acc.pth"),
    "vim_base": ("hustvl/Vim-base-midclstok", "vim_b_midclstok_81p9acc.pth"),
}


def _cfg(name: str, img_size: int = 224, **_: Any) -> dict[str, Any]:
    cfg: dict[str, Any] = dict(
        input_size=(3, img_size, img_size), fixed_input_size=True, first_conv="patch_embed.proj", classifier="head"
    )
    if name in _WEIGHTS:
        cfg |= dict(zip(("hf_hub_id", "hf_hub_filename"), _WEIGHTS[name]))
        cfg |= dict(license="apache-2.0", paper_ids="arXiv:2401.09417", origin_url="https://github.com/hustvl/Vim")
    return cfg


default_cfgs = generate_default_cfgs(
    {
        f"{name}.{'in1k' if name in _WEIGHTS else 'untrained'}": _cfg(name, **arguments)
        for name, arguments in DEFINITIONS.items()
    }
)


def all_arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments of the model that `name` makes with those `given`: what files state.

    With `all_arguments=True` among them the name adds none of its own, so that they make the same model even if the
    name has another meaning by then. Of a model that is not ours they are those given.
    """
    given = {key: value for key, value in given.items() if value is not None}  # as timm does
    own = DEFINITIONS.get(name.partition(".")[0])
    return given if own is None or given.get("all_arguments") else {**own, **given, "all_arguments": True}


def _create(variant: str, pretrained: bool, **kwargs: Any) -> VisionLonghorn:
    cfg = kwargs.get("pretrained_cfg")
    if isinstance(cfg, dict) and cfg.get("source") and "all_arguments" not in kwargs:  # a model folder of version 0.1
        variant = RENAMED.get(variant, variant)
    kwargs = all_arguments(variant, kwargs)
    stated = {key: value for key, value in kwargs.items() if key in DEFINITIONS[variant] or key == "all_arguments"}
    del kwargs["all_arguments"]
    out_indices = kwargs.pop("out_indices", min(3, kwargs.setdefault("depth", 24)))
    model = build_model_with_cfg(
        VisionLonghorn,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls="getter"),
        **kwargs,
    )
    if not isinstance(model, VisionLonghorn):  # features_only=True
        model.register_load_state_dict_pre_hook(partial(fit_features, depth=kwargs["depth"]))
    update_model_args(model, **stated)  # beside these, timm keeps what a user gives, for the folders that it writes
    return model


def _register(name: str) -> None:
    def model(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
        return _create(name, pretrained, **kwargs)

    model.__name__ = model.__qualname__ = name
    globals()[name] = register_model(model)


for _name in DEFINITIONS:
    _register(_name)
# timm lists no deprecated names. Its own function for them, `register_model_deprecations`, hands on no arguments.
getattr(_registry, "_deprecated_models", {}).update({old: name for old, (name, _) in OLD_NAMES.items()})
