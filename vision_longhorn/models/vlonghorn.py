"""The models by name, registered with timm: Vision Longhorn and Vision Mamba (ViM), with their configurations."""

from functools import partial
from typing import Any, cast

import torch
from timm.models import _registry, build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import FeatureGetterNet
from timm.models._input import update_model_args

from vision_longhorn.models.backbone import Block, VisionLonghorn
from vision_longhorn.models.names import DEFINITIONS, OLD_NAMES, RENAMED, all_arguments, former_name
from vision_longhorn.models.pretrained import checkpoint_filter_fn, fit_features

__all__ = ["Block", "VisionLonghorn", "checkpoint_filter_fn"]

# Repository on the Hugging Face hub and file of the weights that the authors of Vision Mamba published
_WEIGHTS = {
    "vim_tiny": ("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_76p1acc.pth"),
    "vim_tiny_stride8": ("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_ft_78p3acc.pth"),
    "vim_small": ("hustvl/Vim-small-midclstok", "vim_s_midclstok_80p5acc.pth"),
    "vim_small_stride8": ("hustvl/Vim-small-midclstok", "vim_s_midclstok_ft_81p6acc.pth"),
    "vim_base": ("hustvl/Vim-base-midclstok", "vim_b_midclstok_81p9acc.pth"),
}


def _first_conv(stem: str = "patch", **_: Any) -> str:
    """Name the layer whose weights timm fits to images of other channels."""
    return "patch_embed.proj.0" if stem == "conv" else "patch_embed.proj"


def _cfg(name: str, img_size: int = 224, **others: Any) -> dict[str, Any]:
    cfg: dict[str, Any] = dict(
        input_size=(3, img_size, img_size), fixed_input_size=True, first_conv=_first_conv(**others), classifier="head"
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


class Features(FeatureGetterNet):
    """The feature maps of a model (`features_only=True`), whose parameters timm's optimisers treat as the model's."""

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Name, with wildcards, what timm's optimisers must not decay."""
        return {name if name.startswith("*") else f"model.{name}" for name in cast(Any, self.model).no_weight_decay()}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that group parameters by depth, for layer-wise learning-rate decay."""
        return cast(Any, self.model).group_matcher(coarse)


def _create(variant: str, pretrained: bool, **kwargs: Any) -> VisionLonghorn:
    cfg = kwargs.get("pretrained_cfg")
    if isinstance(cfg, dict) and cfg.get("source") and "all_arguments" not in kwargs:  # a model folder of version 0.1
        variant = RENAMED.get(variant, variant)
    kwargs = all_arguments(variant, kwargs)
    stated = {key: value for key, value in kwargs.items() if key in DEFINITIONS[variant] or key == "all_arguments"}
    del kwargs["all_arguments"]
    overlay = kwargs.get("pretrained_cfg_overlay") or {}
    kwargs["pretrained_cfg_overlay"] = {"first_conv": _first_conv(**kwargs), **overlay}
    out_indices = kwargs.pop("out_indices", min(3, kwargs.setdefault("depth", 24)))
    model = build_model_with_cfg(
        VisionLonghorn,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls=Features),
        **kwargs,
    )
    if not isinstance(model, VisionLonghorn):  # features_only=True
        model.register_load_state_dict_pre_hook(partial(fit_features, depth=kwargs["depth"]))
    if variant in RENAMED:
        model.register_load_state_dict_pre_hook(_tell_former_name)
    update_model_args(model, **stated)  # beside these, timm keeps what a user gives, for the folders that it writes
    return model


def _tell_former_name(model: Any, state_dict: dict[str, Any], prefix: str, _: Any, strict: bool, *__: Any) -> None:
    """Raise RuntimeError for weights with a class token, which the model lacks: a hook before `load_state_dict`, and
    before the stem's own."""
    foreign = state_dict.keys() - model.state_dict(prefix=prefix).keys()
    if strict and any(name.endswith("cls_token") for name in foreign):
        raise RuntimeError(f"these weights have a cls_token, and this model has none{former_name(model)}")


def _register(name: str) -> None:
    def model(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
        return _create(name, pretrained, **kwargs)

    model.__name__ = model.__qualname__ = name
    globals()[name] = register_model(model)


for _name in DEFINITIONS:
    _register(_name)
# timm lists no deprecated names. Its own function for them, `register_model_deprecations`, hands on no arguments.
getattr(_registry, "_deprecated_models", {}).update({old: name for old, (name, _) in OLD_NAMES.items()})
