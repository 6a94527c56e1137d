"""Resamples position embeddings for other image sizes."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function
from torch import Tensor

from vision_longhorn.models.tokens import join_class, split_class


def resample_pos_embed(
    pos_embed: Tensor, class_token: str, old_grid: tuple[int, int], new_grid: tuple[int, int]
) -> Tensor:
    """Resample a position embedding (1, tokens, C) from one grid of patches (height, width) to another; the class
    token's entry is moved and not changed."""
    token, patches = split_class(pos_embed, class_token)
    return join_class(token, _resample_patches(patches, old_grid, new_grid), class_token)


@torch.fx.wrap
@register_notrace_function
def _resample_patches(patches: Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """Resample (1, patches, C) from `old_grid` to `new_grid`, as timm's `resample_abs_pos_embed` does.

    This multiplies by matrices. The gradient of torch's own resampling differs from run to run on a GPU, and takes no
    symbolic sizes, which a model compiled for every image size has.
    """
    if not torch.compiler.is_compiling() and old_grid[0] == new_grid[0] and old_grid[1] == new_grid[1]:
        return patches
    grid = patches.float().reshape(old_grid[0], old_grid[1], -1)  # (H, W, C)
    return _resize(_resize(grid, new_grid[0]), new_grid[1]).flatten(0, 1).unsqueeze(0).to(patches.dtype)


def _resize(grid: Tensor, size: int) -> Tensor:
    """Resample the first axis by antialiased bicubic, and make it the second: (old, n, C) to (n, size, C), float32."""
    old, n, _ = grid.shape
    # Not `old` channels of width 1: then torch (2.7 and 2.15) gives each row the values of the first.
    identity = torch.eye(old, device=grid.device)[None, None]
    weight = F.interpolate(identity, size=(size, old), mode="bicubic", antialias=True)[0, 0]
    # In place, because autocast lowers the precision of other products.
    return grid.new_zeros(size, n * grid.shape[2]).addmm_(weight, grid.flatten(1)).view(size, n, -1).transpose(0, 1)
