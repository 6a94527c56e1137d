"""The projection of the step sizes' low rank to channels."""

from typing import Optional

import torch
from torch import Tensor

from .x_proj import weight_grad


def forward(low: Tensor, dt_proj: Tensor, out: Optional[Tensor] = None) -> Tensor:
    """
    Args:
        low: (S, T, at least R), of which the first R columns count.
        dt_proj: (S, D, R), in the dtype of low.
        out: Where the result is written, if given.

    Returns:
        (S, T, D).
    """
    return torch.bmm(low[..., : dt_proj.shape[2]], dt_proj.transpose(1, 2), out=out)


def backward(dstep: Tensor, low: Tensor, dt_proj: Tensor, dlow: Tensor) -> Tensor:
    """
    Args:
        dstep: (S, T, D), the gradient of what `forward` returns.
        low, dt_proj: As there.
        dlow: As low; the gradient of its first R columns is written into them.

    Returns:
        The gradient of dt_proj, (S, D, R).
    """
    R = dt_proj.shape[2]
    torch.bmm(dstep, dt_proj, out=dlow[..., :R])
    return weight_grad(dstep, low[..., :R])
