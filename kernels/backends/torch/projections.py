"""The small projections of a mixing, with their gradients: from the convolved x to what the scan reads of each token
(`x_proj`), and from the low rank of the step sizes to channels (`dt_proj`).

Products are in the dtype of the tokens. Zeros follow the rank R, up to a width that can be loaded in whole vectors:
`pad` puts them in, `unpad` takes them out of the gradients.
"""

from typing import Optional

import torch
from torch import Tensor

from .rope import Turned, rotate


def pad(x_proj: Tensor, dt_proj: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pad (S, R + n, D) and (S, H, R) to (S, width + n, D) and (S, H, width) in `dtype`. If there is nothing to change,
    return the inputs themselves."""
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


def unpad(wide_x: Tensor, wide_dt: Tensor, x_proj: Tensor, dt_proj: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x_proj` and `dt_proj`, in their dtypes, from contiguous ones of what `pad` returns."""
    R, width = dt_proj.shape[2], wide_dt.shape[2]
    if width != R:
        wide_x = torch.cat([wide_x[:, :R], wide_x[:, width:]], 1)
    return wide_x.to(x_proj.dtype), wide_dt[..., :R].to(dt_proj.dtype)


def appends_units(x: Tensor, D: int, M: int, turned: Optional[Turned]) -> bool:
    """Tell whether `x_proj_forward` can append unit keys and queries to the M numbers of each token. x has D channels
    there; here only its dtype and device count."""
    return False


def x_proj_forward(x: Tensor, projection: Tensor, turned: Optional[Turned] = None, units: int = 0) -> Tensor:
    """Return the product (S, T, M) of the contiguous x (S, T, D), or of one x (1, T, D) that all sets share, with the
    projection (S, M, D). Its keys and queries are turned if `turned` says where they are.

    With `units` the last columns of the product are keys and queries of so many numbers, and the same at unit length
    (`unit.unit`) follow them: (S, T, M + 2 units). Only where `appends_units` says so."""
    low = torch.bmm(x.expand(len(projection), -1, -1), projection.transpose(1, 2))
    if turned:
        rotate(turned.of(low), turned.rows)
    return low


def x_proj_backward(dlow: Tensor, x: Tensor, projection: Tensor, dx: Tensor, add: bool = True) -> Tensor:
    """Return the gradient of the projection, (S, M, D), from that of the product, dlow (S, T, M). The gradient of x
    (S, T, D) is added to dx (S, T, D). If all sets share one x (1, T, D), the sum of their dx comes to stand in the
    first. Without `add` dx has the shape of x, and only takes the gradient. All are contiguous."""
    S = len(projection)
    if add:
        dx.baddbmm_(dlow, projection)
        for other in dx[len(x) :]:
            dx[0].add_(other)
    else:
        torch.bmm(dlow[: len(x)], projection[: len(x)], out=dx)
        for i in range(len(x), S):
            dx[0].addmm_(dlow[i], projection[i])
    return _weight_grad(dlow, x.expand(S, -1, -1))


def dt_proj_backward(dstep: Tensor, low: Tensor, projection: Tensor, dlow: Tensor) -> Tensor:
    """Return the gradient of the padded projection (S, H, R) from that of the product, dstep (S, T, H). The gradient of
    low is written to the first R columns of dlow."""
    R = projection.shape[2]
    torch.bmm(dstep, projection, out=dlow[..., :R])
    return _weight_grad(dstep, low[..., :R])


def _weight_grad(left: Tensor, right: Tensor) -> Tensor:
    """Return left^T right for each set: (S, T, n) and (S, T, m) to (S, n, m). The products are separate, because only
    then does the library split the long sums of a small result."""
    products = left.new_empty(len(left), left.shape[2], right.shape[2])
    for a, b, product in zip(left, right, products):
        torch.mm(a.t(), b, out=product)
    return products
