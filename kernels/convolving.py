"""The convolution over the grid of patches and its SiLU as an operator of its own, for what is not a mixer."""

import torch
from torch import Tensor

from .checks import check_tensors
from .dispatch import backend_for
from .operators import define, define_gradients


def grid_conv(x: Tensor, weight: Tensor, bias: Tensor, rows: int, backend: str = "auto") -> Tensor:
    """Convolve each channel of the patches over their grid, padded with zeros, and apply SiLU.

        y[r, c] = silu(bias + sum_ij weight[:, i, j] x[r + i - K // 2, c + j - K // 2])

    Sums are in float32 (float64), whatever the dtypes. There are no atomics, so all runs give the same bits.

    Args:
        x: (B, L, D), the patches row by row, of any float dtype.
        weight: (D, K, K) of any float dtype; K is odd, and small.
        bias: (D,) of any float dtype.
        rows: number of rows of the grid, which divides L.
        backend: "auto" (triton on a GPU, else torch), "torch", "triton" or "numba".

    Returns:
        (B, L, D) in the dtype of x.

    Raises:
        ValueError: a shape, dtype or backend is not as above.
        RuntimeError: a backend was forced that cannot run on this device.
    """
    y: Tensor = torch.ops.vision_longhorn.grid_conv(x, weight, bias, rows, backend)
    return y


def _check(x: Tensor, weight: Tensor, bias: Tensor, rows: int) -> None:
    D, K = x.shape[-1] if x.ndim else 0, weight.shape[-1] if weight.ndim else 0
    if x.ndim != 3 or tuple(weight.shape) != (D, K, K) or K % 2 == 0 or tuple(bias.shape) != (D,):
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and bias {tuple(bias.shape)}: they must be (B, L, D), "
            "(D, K, K) with an odd K, and (D,)"
        )
    if x.shape[1] < 1 or D < 1:
        raise ValueError(f"x has {x.shape[1]} tokens and {D} channels; give at least 1 of each")
    check_tensors(dict(x=x, weight=weight, bias=bias))
    if rows < 1 or x.shape[1] % rows:
        raise ValueError(
            f"rows={rows} with {x.shape[1]} tokens: give the number of the grid's rows, which divides them"
        )


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _forward(x: Tensor, weight: Tensor, bias: Tensor, rows: int, backend: str) -> Tensor:
    _check(x, weight, bias, rows)
    taps = weight.contiguous()[None], bias.contiguous()[None]
    return backend_for(backend, x).grid_conv_forward(_last_contiguous(x), *taps, rows)[0]


def _shape(x: Tensor, weight: Tensor, bias: Tensor, rows: int, backend: str) -> Tensor:
    _check(x, weight, bias, rows)
    return x.new_empty(x.shape)


def _backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, rows: int, backend: str) -> tuple[Tensor, ...]:
    dx = x.new_empty(x.shape)
    given = dy.contiguous()[None], _last_contiguous(x), weight.contiguous()[None], bias.contiguous()[None], dx
    dweight, dbias = backend_for(backend, x).grid_conv_backward(*given, rows)
    return dx, dweight[0].to(weight.dtype), dbias[0].to(bias.dtype)


_ARGUMENTS = "Tensor x, Tensor weight, Tensor bias, SymInt rows, str backend"
_operator = define("grid_conv", _ARGUMENTS, 1, _forward, _shape)
define_gradients("grid_conv", _operator, f"Tensor dy, {_ARGUMENTS}", 1, 3, _backward)
