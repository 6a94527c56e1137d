"""Pretrained weights for a model of another size, with another head, or with the features of some blocks only."""

import math
from collections.abc import Sequence
from typing import Any

from timm.layers import resample_patch_embed
from timm.models import clean_state_dict
from torch import Tensor, nn

from vision_longhorn.models.backbone import VisionLonghorn
from vision_longhorn.models.names import former_name
from vision_longhorn.models.patch_embed import check_stem, patch_grid
from vision_longhorn.models.pos_embed import resample_pos_embed

# Where checkpoints hold their weights, in timm's order: averaged weights before raw ones.
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")


def checkpoint_filter_fn(state_dict: dict[str, Any], model: VisionLonghorn) -> dict[str, Tensor]:
    """Fit weights of another image, patch or stride size to `model`: a checkpoint's averaged ones if it has any.

    Raises:
        RuntimeError: the grid of the weights' patches is not known, only one of the two has a class token, or their
            stems differ.
    """
    wrapper = next((key for key in _WRAPPERS if isinstance(state_dict.get(key), dict)), None)
    weights = clean_state_dict(state_dict[wrapper] if wrapper else state_dict)
    has, wants = "cls_token" in weights, model.cls_token is not None
    if "pos_embed" in weights and has != wants:
        raise RuntimeError(
            f"these weights have {'a' if has else 'no'} cls_token, and this model has {'one' if wants else 'none'}: "
            f"give create_model class_token={'none' if wants else 'middle'!r}, or other weights{former_name(model)}"
        )
    patch_embed, projection = model.patch_embed, "patch_embed.proj.weight"
    check_stem(patch_embed, weights, "patch_embed.")  # before the grid, which depends on it
    if "pos_embed" in weights:
        patch_size = weights[projection].shape[-2:] if projection in weights else patch_embed.patch_size
        old_grid = _grid_of_weights(weights["pos_embed"].shape[1] - model.num_prefix_tokens, patch_size, model)
        if old_grid != patch_embed.grid_size:
            weights["pos_embed"] = resample_pos_embed(
                weights["pos_embed"], model.class_token, old_grid, patch_embed.grid_size
            )
    if projection in weights:
        weights[projection] = resample_patch_embed(weights[projection], list(patch_embed.patch_size))
    return weights


def _grid_of_weights(num_patches: int, patch_size: Sequence[int], model: VisionLonghorn) -> tuple[int, int]:
    """Find the grid of the patches of pretrained weights: (rows, columns).

    It is that of the image size that timm knows of the weights, from their folder or their `pretrained_cfg`, if the
    number of patches agrees; otherwise the model's own if its number agrees; else a square.
    """
    patch_embed = model.patch_embed
    saved, cfg = getattr(model, "pretrained_model_args", {}), getattr(model, "pretrained_cfg", {})
    size = saved.get("img_size")
    # A configuration that did not come with the weights proves nothing, even if the numbers agree: 7 x 28 patches are
    # as many as 14 x 14.
    if size is None and (cfg.get("source") or num_patches != patch_embed.num_patches):
        size = cfg.get("input_size", (3, 0, 0))[-2:]
    side = math.isqrt(num_patches)
    grids = [patch_embed.grid_size, (side, side)]
    if size is not None:
        strides = (saved.get("patch_stride"), patch_size, patch_embed.patch_stride)
        grids = [patch_grid(size, patch_size, stride) for stride in strides if stride is not None] + grids
    for rows, columns in grids:
        if rows * columns == num_patches:
            return rows, columns
    raise RuntimeError(
        f"pos_embed of these weights has {num_patches} patches, which is no square, and the model has "
        f"{patch_embed.num_patches}: give the image size of these weights as "
        "input_size=(channels, height, width) in their pretrained_cfg"
    )


def fit_features(net: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any, depth: int) -> None:
    """Take the weights of a whole model, too: a hook before `load_state_dict` of a model with `features_only=True`.

    timm wraps such a model, which makes its names longer, and drops what the features do not need: the head, the norm,
    the blocks after the last one. `create_model(NAME, features_only=True, checkpoint_path=FILE)` still loads a file
    into the wrapper. This hook renames the file's weights, whose names are ours or the official ones, and drops those
    of the `depth` blocks of the whole model that `net` lacks.
    """
    ((child, _model),) = net.named_children()
    names = [name for name in state_dict if name.startswith(prefix)]
    if any(name.startswith(f"{prefix}{child}.") for name in names):
        return
    kept = {_part(name.removeprefix(f"{child}.")) for name in net.state_dict()}
    dropped = {"norm", "head", *(f"blocks.{i}" for i in range(depth))} - kept
    for name in names:
        value, own = state_dict.pop(name), name.removeprefix(prefix)
        if _part(own) not in dropped:
            state_dict[f"{prefix}{child}.{own}"] = value


def _part(name: str) -> str:
    """Return the part of a model that a parameter belongs to, such as "blocks.3", also by its official name."""
    first, second, *_ = *name.split("."), ""
    first = {"layers": "blocks", "norm_f": "norm"}.get(first, first)
    return f"blocks.{second}" if first == "blocks" else first
