"""The depthwise convolution over a grid of tokens and its SiLU: with the tokens row by row, and zeros outside the grid,

    y = silu(pre),     pre[r, c] = bias + sum_ij weight[:, i, j] x[r + i - K // 2, c + j - K // 2]

It has no direction, so one result serves the scans in both. `backward` computes the pre-activations again.
"""

import contextlib
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ...contract import wide


def _grid(x: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """View tokens (B, L, D) as (B, D, rows, columns), channels last in memory."""
    return x.to(dtype).unflatten(1, (rows, x.shape[1] // rows)).permute(0, 3, 1, 2)


def _tokens(grid: Tensor) -> Tensor:
    return grid.permute(0, 2, 3, 1).flatten(1, 2)


def _pre_activation(x: Tensor, weight: Tensor, bias: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pre-activations and x, (B, D, rows, columns), and the weight as torch takes it, (D, 1, K, K)."""
    grid, taps = _grid(x, rows, wide(x)), weight[0, :, None].to(wide(x))
    return F.conv2d(grid, taps, bias[0].to(wide(x)), padding=taps.shape[-1] // 2, groups=len(taps)), grid, taps


def _plain_torch(x: Tensor) -> Any:
    """Return a context without cuDNN, whose gradient of a depthwise weight may differ from run to run."""
    return torch.backends.cudnn.flags(enabled=False) if x.is_cuda else contextlib.nullcontext()


def forward(x: Tensor, weight: Tensor, bias: Tensor, rows: int, out: Optional[Tensor] = None) -> Tensor:
    """Convolve and apply SiLU.

    Args:
        x: (B, L, D), of any float dtype (not float64 with Triton); its last axis is contiguous.
        weight: (1, D, K, K), of any float dtype, contiguous; K is odd and small.
        bias: (1, D), of any float dtype, contiguous.
        rows: of the grid; they divide L.
        out: where the result is written, if given.

    Returns:
        (1, B, L, D), contiguous, dtype of x; sums are in float32 (float64).
    """
    y = x.new_empty(1, *x.shape) if out is None else out
    with _plain_torch(x):
        pre, _, _ = _pre_activation(x, weight, bias, rows)
    y[0].copy_(_tokens(F.silu(pre, inplace=True)))
    return y


def backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, dx: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight, (1, D, K, K), and bias, (1, D), in float32 (float64). `dy`, the gradient of what
    `forward` returns, is contiguous. That of x is written to `dx`, whose last axis is contiguous."""
    with _plain_torch(x):
        pre, grid, taps = _pre_activation(x, weight, bias, rows)
        dpre = torch.ops.aten.silu_backward(_grid(dy[0], rows, pre.dtype), pre)
        D, pad = len(taps), taps.shape[-1] // 2
        dgrid, dtaps, dbias = torch.ops.aten.convolution_backward(
            dpre, grid, taps, [D], [1, 1], [pad, pad], [1, 1], False, [0, 0], D, [True] * 3
        )
    dx.copy_(_tokens(dgrid))
    return dtaps[:, 0][None], dbias[None]
