"""The depthwise short convolution over tokens and its SiLU, for either direction or both: forward and backward.

The first direction runs from the first token to the last and sees the past, the second one from the last to the first:

    y[g] = silu(pre[g])
    pre[0][t] = bias[0] + sum_i weight[0][:, i] x[t - (K - 1) + i]
    pre[1][t] = bias[1] + sum_i weight[1][:, i] x[t + (K - 1) - i]

with zeros outside the sequence. Neither function knows autograd; `backward` finds the pre-activations again, so that
nothing but x is kept for it.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor


def forward(x: Tensor, weight: Tensor, bias: Tensor, reversed: bool = False, out: Optional[Tensor] = None) -> Tensor:
    """Convolution and SiLU in each direction.

    Args:
        x: (B, L, D), bfloat16, float16 or float32 (or float64 with the torch backend); its last axis is contiguous,
            the others may have any strides.
        weight: (G, D, K), of any float dtype, contiguous; G is 1 (one direction alone) or 2; K is a few, as a GPU
            keeps that many tokens in registers.
        bias: (G, D), of any float dtype, contiguous.
        reversed: the direction that is alone is the second one; with G = 2 it must be False.
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
    """Gradients of x, weight and bias.

    Args:
        dy: (G, B, L, D), contiguous, dtype of x; the gradient of what `forward` returns.
        x, weight, bias, reversed: as given to `forward`.
        dx: (B, L, D), dtype of x; its last axis is contiguous, the others may have any strides. The gradient of x is
            written here, whatever it held before.

    Returns:
        The gradients of weight, (G, D, K), and bias, (G, D), in float32 (float64 for float64), the same bits in every
        run.

    Raises:
        ValueError: the Triton backend is given float64.
    """
    padded, taps, bias = _operands(x, weight, bias, reversed)
    L = x.shape[1]
    K = taps.shape[1]
    dpadded = torch.zeros_like(padded)
    dtaps, dbias = torch.empty_like(taps), torch.empty_like(bias)
    for g in range(len(taps)):
        pre = _pre_activation(padded, taps[g], bias[g], g == 1 or reversed)
        dpre = torch.ops.aten.silu_backward(dy[g].to(pre.dtype), pre)
        dbias[g] = dpre.sum((0, 1))
        for i in range(K):
            start = (K - 1 if g == 1 or reversed else 0) + i
            dtaps[g, i] = torch.mul(dpre, padded[:, start : start + L], out=pre).sum((0, 1))
            dpadded[:, start : start + L].addcmul_(dpre, taps[g, i])
    dx.copy_(dpadded[:, K - 1 : K - 1 + L])
    return _flipped(dtaps, reversed).transpose(1, 2).contiguous(), dbias


# The torch backend. Sums of shifted tokens, in place and with the channels last as they lie, take a half to a quarter
# of the time of the library's convolution on a CPU, which wants them in another order and back.


def _operands(x: Tensor, weight: Tensor, bias: Tensor, reversed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x with K - 1 zeros on both sides, (B, L + 2 (K - 1), D), the weights, (G, K, D), each direction's in the order of
    the sequence, and the bias: all in the dtype of the sums."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    past = weight.shape[2] - 1
    taps = _flipped(weight.to(wide).transpose(1, 2), reversed).contiguous()
    return F.pad(x.to(wide), [0, 0, past, past]), taps, bias.to(wide)


def _flipped(taps: Tensor, reversed: bool) -> Tensor:
    """(G, K, D) with the second direction's weights in the opposite order."""
    if len(taps) == 2:
        return torch.stack([taps[0], taps[1].flip(0)])
    return taps.flip(1) if reversed else taps


def _pre_activation(padded: Tensor, taps: Tensor, bias: Tensor, second: bool) -> Tensor:
    """(B, L, D) of the first or the second direction, from its part of `_operands`."""
    past = len(taps) - 1
    L = padded.shape[1] - 2 * past
    start = past if second else 0
    pre = torch.addcmul(bias, padded[:, start : start + L], taps[0])
    for i in range(1, past + 1):
        pre.addcmul_(padded[:, start + i : start + i + L], taps[i])
    return pre
