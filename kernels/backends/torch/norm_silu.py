"""Layer norm (Ba et al., arXiv 1607.06450) after a bias, and SiLU: y = silu(n norm_weight + norm_bias), where
n = (v - mean) / sqrt(variance + eps) over the channels of v = x + bias."""

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ...contract import wide


def forward(x: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float) -> Tensor:
    """Add `bias`, normalise over the channels and apply SiLU.

    Args:
        x: (.., D), contiguous, of any float dtype.
        bias: (D,) of any float dtype, as the next two.
        norm_weight: (D,)
        norm_bias: (D,)
        eps: added to the variance.

    Returns:
        (.., D) in the dtype of x, computed in float32 (float64).
    """
    dtype = wide(x)
    v = x.to(dtype) + bias.to(dtype)
    return F.silu(F.layer_norm(v, v.shape[-1:], norm_weight.to(dtype), norm_bias.to(dtype), eps)).to(x.dtype)


def backward(
    dy: Tensor, x: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float
) -> tuple[Tensor, ...]:
    """Return the gradient of x, in its dtype, and those of `bias`, `norm_weight` and `norm_bias`, (D,) in float32
    (float64). `dy`, the gradient of what `forward` returns, is contiguous."""
    dtype = wide(x)
    v = x.to(dtype) + bias.to(dtype)
    scale = torch.rsqrt(v.var(-1, correction=0, keepdim=True) + eps)
    n = (v - v.mean(-1, keepdim=True)) * scale
    u = n * norm_weight.to(dtype) + norm_bias.to(dtype)
    sigmoid = torch.sigmoid(u)
    du = dy.to(dtype) * sigmoid * (1 + u * (1 - sigmoid))
    dn = du * norm_weight.to(dtype)
    dv = scale * (dn - dn.mean(-1, keepdim=True) - n * (dn * n).mean(-1, keepdim=True))
    rows = prod(x.shape[:-1])
    return dv.to(x.dtype), *(part.reshape(rows, len(bias)).sum(0) for part in (dv, du * n, du))
