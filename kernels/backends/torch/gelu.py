"""GELU after a bias: y = v Φ(v), v = x + bias, with Φ the normal distribution's function."""

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ...contract import Pair, wide


def forward(x: Tensor, bias: Tensor) -> Tensor:
    """Add `bias` (D,) to x (.., D) and apply GELU. Both have any float dtype; x is contiguous.

    Returns:
        (.., D) in the dtype of x, computed in float32 (float64).
    """
    return F.gelu(x.to(wide(x)) + bias.to(wide(x))).to(x.dtype)


def backward(dy: Tensor, x: Tensor, bias: Tensor) -> Pair:
    """Return the gradient of x, in its dtype, and that of `bias`, (D,) in float32 (float64). `dy`, the gradient of what
    `forward` returns, is contiguous."""
    dv = torch.ops.aten.gelu_backward(dy.to(wide(x)), x.to(wide(x)) + bias.to(wide(x)))
    return dv.to(x.dtype), dv.reshape(prod(x.shape[:-1]), len(bias)).sum(0)
