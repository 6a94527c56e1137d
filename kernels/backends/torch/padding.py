"""The small projections as matrix products take them: in the dtype of the tokens, with zeros after the rank of the step
size up to a width with which whole vectors may be loaded; and the gradients of what was padded so."""

import torch
from torch import Tensor


def forward(x_proj: Tensor, dt_proj: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """
    Args:
        x_proj: (S, R + n, D), contiguous.
        dt_proj: (S, D, R), contiguous; or of another length than D.
        width: at least R.
        dtype: of the results.

    Returns:
        (S, width + n, D) and (S, D, width); the inputs themselves where nothing of them changes.
    """
    R = dt_proj.shape[2]
    if width == R:
        return x_proj.to(dtype), dt_proj.to(dtype)
    S, rows, D = x_proj.shape
    wide_x = x_proj.new_zeros(S, width - R + rows, D, dtype=dtype)
    wide_x[:, :R] = x_proj[:, :R]
    wide_x[:, width:] = x_proj[:, R:]
    wide_dt = dt_proj.new_zeros(S, dt_proj.shape[1], width, dtype=dtype)
    wide_dt[..., :R] = dt_proj
    return wide_x, wide_dt


def backward(wide_x: Tensor, wide_dt: Tensor, x_proj: Tensor, dt_proj: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `x_proj` and `dt_proj`, in their dtypes, from those of what `forward` returns, contiguous."""
    R, width = dt_proj.shape[2], wide_dt.shape[2]
    if width != R:
        wide_x = torch.cat([wide_x[:, :R], wide_x[:, width:]], 1)
    return wide_x.to(x_proj.dtype), wide_dt[..., :R].to(dt_proj.dtype)
