"""The gradients of a residual stream x and of the weight of its RMS norm (Zhang and Sennrich, arXiv 1910.07467),
h = n weight with n = x / sqrt(mean(x^2) + eps), the mean over the channels."""

import torch
from torch import Tensor

from ...contract import Pair, wide


def gradients(dh: Tensor, dx: Tensor, x: Tensor, weight: Tensor, eps: float, rows: int) -> Pair:
    """Return what `backward` fills its tensors with. Autograd can differentiate it."""
    dtype, (B, L, D) = wide(x), x.shape
    if rows:
        dh = dh.reshape(B, L // rows, rows, D).transpose(1, 2).reshape(B, L, D)
    v, dh = x.to(dtype), dh.to(dtype)
    scale = torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    n, dn = v * scale, dh * weight.to(dtype)
    total = scale * (dn - n * (dn * n).mean(-1, keepdim=True)) + dx.to(dtype)
    return total.to(x.dtype), (dh * n).sum((0, 1)).to(weight.dtype)


def backward(
    dh: Tensor, dx: Tensor, x: Tensor, weight: Tensor, total: Tensor, dweight: Tensor, eps: float, rows: int
) -> None:
    """Add the gradient of x that comes through its norm to the one that does not. All tensors are contiguous and have
    any float dtype.

    Args:
        dh: (B, L, D), the gradient of the norm. With `rows` its tokens are patches, column by column, where those of x
            are row by row.
        dx: (B, L, D), the other gradient of x.
        x: (B, L, D)
        weight: (D,)
        total: (B, L, D), is filled with the whole gradient of x.
        dweight: (D,), is filled with the gradient of the weight.
        eps: added to the mean square.
        rows: of the grid of patches, or 0.
    """
    for out, value in zip((total, dweight), gradients(dh, dx, x, weight, eps, rows), strict=True):
        out.copy_(value)
