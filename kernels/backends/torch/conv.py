"""The depthwise short convolution over tokens and its SiLU, for either direction or both.

The first direction runs from the first token to the last and sees the past, the second one from the last to the first:

    y[g] = silu(pre[g])
    pre[0][t] = bias[0] + sum_i weight[0][:, i] x[t - (K - 1) + i]
    pre[1][t] = bias[1] + sum_i weight[1][:, i] x[t + (K - 1) - i]

with zeros outside the sequence. `backward` finds the pre-activations again, so that only x is kept for it. On a CPU,
sums of shifted tokens, in place and channels last, take a half to a quarter of the time of torch's own convolution.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ...contract import wide


def forward(x: Tensor, weight: Tensor, bias: Tensor, reversed: bool = False, out: Optional[Tensor] = None) -> Tensor:
    """Convolution and SiLU in each direction.

    Args:
        x: (B, L, D), bfloat16, float16 or float32 (or float64 with the torch backend); its last axis is contiguous,
            the others may have any strides.
        weight: (G, D, K), of any float dtype, contiguous; G is 1 (one direction alone) or 2; K is a few, as a GPU
            keeps that many tokens in registers.
        bias: (G, D), of any float dtype, contiguous.
        reversed: with G = 1, the direction is the second one; with G = 2 it must be False.
        out: where the result is written, if given.

    Returns:
        (G, B, L, D), contiguous, dtype of x; sums are in float32 (float64).

    Raises:
        ValueError: the Triton backend is given float64.
    """
    padded, taps, bias = _operands(x, weight, bias, reversed)
    y = x.new_empty(len(taps), *x.shape) if out is None else out
    for g in range(len(taps)):
        y[g].copy_(F.silu(_pre_activation(padded, taps[g], bias[g], g == 1 or reversed), inplace=True))
    return y


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, dx: Tensor, reversed: bool = False
) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias; that of x is written to `dx`.

    Args:
        dy: (G, B, L, D), contiguous, dtype of x; the gradient of what `forward` returns.
        x, weight, bias, reversed: as given to `forward`.
        dx: (B, L, D), dtype of x; its last axis is contiguous, the others may have any strides.

    Returns:
        The gradients of weight, (G, D, K), and bias, (G, D), in float32 (float64), the same bits in every run.

    Raises:
        ValueError: the Triton backend is given float64.
    """
    padded, taps, bias = _operands(x, weight, bias, reversed)
    L, K = x.shape[1], taps.shape[1]
    dpadded = torch.zeros_like(padded)
    dtaps, dbias = torch.empty_like(taps), torch.empty_like(bias)
    for g in range(len(taps)):
        second = g == 1 or reversed
        pre = _pre_activation(padded, taps[g], bias[g], second)
        dpre = torch.ops.aten.silu_backward(dy[g].to(pre.dtype), pre)
        dbias[g] = dpre.sum((0, 1))
        for i in range(K):
            start = (K - 1 if second else 0) + i
            dtaps[g, i] = torch.mul(dpre, padded[:, start : start + L], out=pre).sum((0, 1))
            dpadded[:, start : start + L].addcmul_(dpre, taps[g, i])
    dx.copy_(dpadded[:, K - 1 : K - 1 + L])
    return _in_order(dtaps, reversed).transpose(1, 2).contiguous(), dbias


def _operands(x: Tensor, weight: Tensor, bias: Tensor, reversed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """In the dtype of sums: x with K - 1 zeros on both sides, (B, L + 2 (K - 1), D), the weights (G, K, D) in the order
    of the sequence, and the bias."""
    past = weight.shape[2] - 1
    taps = _in_order(weight.to(wide(x)).transpose(1, 2), reversed).contiguous()
    return F.pad(x.to(wide(x)), [0, 0, past, past]), taps, bias.to(wide(x))


def _in_order(taps: Tensor, reversed: bool) -> Tensor:
    """(G, K, D) with the second direction's weights turned round."""
    if len(taps) == 2:
        return torch.stack([taps[0], taps[1].flip(0)])
    return taps.flip(1) if reversed else taps


def _pre_activation(padded: Tensor, taps: Tensor, bias: Tensor, second: bool) -> Tensor:
    """(B, L, D) of one direction, from its part of `_operands`."""
    past = len(taps) - 1
    L = padded.shape[1] - 2 * past
    start = past if second else 0
    pre = torch.addcmul(bias, padded[:, start : start + L], taps[0])
    for i in range(1, past + 1):
        pre.addcmul_(padded[:, start + i : start + i + L], taps[i])
    return pre
