"""The gated skip of gate="skip": what the scans read from their states goes on as it is, and only D x is gated.

y += sum_i weight[i] x[i] silu(z), with one convolved x for both directions (over the grid), or one for each
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...contract import wide


def forward(y: Tensor, x: Tensor, z: Tensor, weight: Tensor) -> None:
    """Add the gated skip to y in place, in float32 (float64 if y is).

    Args:
        y: (B, L, D), contiguous; the output of the scans.
        x: (n, B, L, D), contiguous, n = 1 or 2; what was scanned.
        z: (B, L, D) gate, its last axis contiguous.
        weight: (n, D), of any float dtype.
    """
    dtype = wide(y)
    y.copy_(y.to(dtype) + _weighted(x, weight, dtype) * F.silu(z.to(dtype)))


def backward(dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, dx: Tensor, dz: Tensor) -> Tensor:
    """Return the gradient of weight, (n, D) in float32 (float64). That of z is written to `dz`, and that of x is added
    to `dx`, (n, B, L, D) and contiguous. dy and dz are (B, L, D), and their last axes are contiguous."""
    dtype = wide(dy)
    dy, z = dy.to(dtype), z.to(dtype)
    sigmoid = torch.sigmoid(z)
    silu = z * sigmoid
    dz.copy_(dy * _weighted(x, weight, dtype) * (sigmoid + silu * (1 - sigmoid)))
    dsum = dy * silu
    dx.copy_(dx.to(dtype) + weight.to(dtype)[:, None, None] * dsum)
    return (x.to(dtype) * dsum).sum((1, 2))


def _weighted(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return (weight.to(dtype)[:, None, None] * x.to(dtype)).sum(0)
