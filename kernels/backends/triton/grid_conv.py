"""The Triton kernels of the convolution over a grid; `backends.torch.grid_conv` says what they compute.

A program walks through a segment of a sequence, a tile of tokens by channels at a time, and loads the K x K neighbours
of each token: all but the first load of a number find it in the cache. Backward, one kernel writes the gradients of the
pre-activations, and a second one takes those of the neighbours for dx and the weight.
"""

from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import ceil_div, power_of_2
from .finish import sum_taps
from .lanes import LOG2E, fill, gate, kernel, reciprocal, takes_ptx, work_of
from .launch import aligned, refuse_float64, run
from .tuning import multiprocessors

_WARPS = 4
_CHANNELS = 64  # of a tile at most: 128 bytes of 16-bit numbers, a line of the cache
_SHORTEST = 32  # tokens of a segment
_PROGRAMS = 16  # for each multiprocessor: with fewer, time is cut into segments

_kernel = kernel(["weight_ptr", "bias_ptr"])


@triton.jit
def _weights(weight_ptr, d, ok, TAPS: tl.constexpr):
    """Loads the taps of channels d, each (1, BC), as float32."""
    weights = ()
    for n in tl.static_range(TAPS):
        weights = weights + (tl.load(weight_ptr + d * TAPS + n, mask=ok, other=0).to(tl.float32),)
    return weights


@triton.jit
def _neighbours(ptrs, row, column, ok, rows, columns, step, K: tl.constexpr):
    """Loads the K x K numbers around those at `ptrs` row by row, each (BT, BC), as float32; zeros outside the grid.
    Tokens are `step` apart."""
    found = ()
    for n in tl.static_range(K * K):
        down = n // K - K // 2
        right = n % K - K // 2
        # A negative number is a huge unsigned one.
        inside = ((row + down).to(tl.uint32) < rows.to(tl.uint32)) & (
            (column + right).to(tl.uint32) < columns.to(tl.uint32)
        )
        at = ptrs + (columns * down + right) * step
        found = found + (tl.load(at, mask=ok & inside, other=0).to(tl.float32),)
    return found


@_kernel
def _grid_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, dy_ptr, y_ptr, sums_ptr, rows, columns, blocks, segments, span, x_b, x_l,
    D: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, GRAD: tl.constexpr, UNIT: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Writes silu(pre) to y, or (GRAD) the gradient of pre, and its sums over each segment to the last row of `sums`,
    (B segments, K K + 1, D)."""
    block, segment, b, _ = work_of(blocks, segments)
    d = block * BC + tl.arange(0, BC)[None, :]
    ok = d < D
    tokens = rows * columns
    x_step = x_l.to(tl.int64) * UNIT
    x_row = x_ptr + b * x_b * UNIT + d
    weights = _weights(weight_ptr, d, ok, K * K)
    bias = tl.load(bias_ptr + d, mask=ok, other=0).to(tl.float32)
    total = tl.zeros([BT, BC], tl.float32)
    for i in tl.range(0, tl.minimum(span, tokens - segment * span), BT):
        token = segment * span + i + tl.arange(0, BT)[:, None]
        row = token // columns
        there = ok & (token < tokens)
        near = _neighbours(x_row + token * x_step, row, token - row * columns, there, rows, columns, x_step, K)
        pre = tl.zeros([BT, BC], tl.float32) + bias
        for n in tl.static_range(K * K):
            pre += weights[n] * near[n]
        at = (b * tokens + token) * D + d
        if GRAD:
            silu, out = gate(tl.load(dy_ptr + at, mask=there, other=0).to(tl.float32), pre, PTX)
            total += out
        else:
            out = pre * reciprocal(1.0 + tl.exp2(pre * -LOG2E), PTX)
        tl.store(y_ptr + at, out.to(y_ptr.dtype.element_ty), mask=there)
    if GRAD:
        at = sums_ptr + ((b * segments + segment) * (K * K + 1) + K * K) * D + d
        tl.store(at, tl.sum(total, 0)[None, :], mask=ok)


@_kernel
def _grid_conv_backward_kernel(
    dpre_ptr, x_ptr, weight_ptr, dx_ptr, sums_ptr, rows, columns, blocks, segments, span, x_b, x_l, dx_b, dx_l,
    D: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Writes dx, and each segment's part of the weight's gradient to the first K K rows of its `sums`."""
    block, segment, b, _ = work_of(blocks, segments)
    d = block * BC + tl.arange(0, BC)[None, :]
    ok = d < D
    tokens = rows * columns
    x_step = x_l.to(tl.int64) * UNIT
    x_row = x_ptr + b * x_b * UNIT + d
    dx_step = dx_l.to(tl.int64) * UNIT
    dx_row = dx_ptr + b * dx_b * UNIT + d
    weights = _weights(weight_ptr, d, ok, K * K)
    sums = fill(0.0, K * K, BT, BC)
    for i in tl.range(0, tl.minimum(span, tokens - segment * span), BT):
        token = segment * span + i + tl.arange(0, BT)[:, None]
        row = token // columns
        there = ok & (token < tokens)
        at = dpre_ptr + (b * tokens + token) * D + d
        near = _neighbours(at, row, token - row * columns, there, rows, columns, D, K)
        x = tl.load(x_row + token * x_step, mask=there, other=0).to(tl.float32)
        dx = tl.zeros([BT, BC], tl.float32)
        new = ()
        for n in tl.static_range(K * K):
            grad = near[K * K - 1 - n]  # of the token that tap n connects with this one
            dx += weights[n] * grad
            new = new + (sums[n] + x * grad,)
        sums = new
        tl.store(dx_row + token * dx_step, dx.to(dx_ptr.dtype.element_ty), mask=there)
    for n in tl.static_range(K * K):
        at = sums_ptr + ((b * segments + segment) * (K * K + 1) + n) * D + d
        tl.store(at, tl.sum(sums[n], 0)[None, :], mask=ok)


def _prepare(x: Tensor, weight: Tensor, rows: int, **others: Tensor) -> tuple[int, dict[str, Any]]:
    """Return (programs, arguments). `others` are y, dy and dx."""
    refuse_float64(x)
    B, L, D = x.shape
    K = weight.shape[-1]
    # Strides in units of 16, if they can be: then the compiler sees that neighbouring numbers may be loaded together.
    unit = 16 if D % 16 == 0 and all(map(aligned, (x, *others.values()))) else 1
    # A lane keeps a weight and a sum for each tap and number of its part of a tile.
    numbers = 32 * _WARPS * (8 if K <= 3 else 2 if K <= 5 else 1)
    channels = min(_CHANNELS, power_of_2(D))
    tile = numbers // channels
    blocks = ceil_div(D, channels)
    segments = max(1, min(ceil_div(L, _SHORTEST), _PROGRAMS * multiprocessors(x.device) // max(1, blocks * B)))
    span = ceil_div(ceil_div(L, segments), tile) * tile
    segments = ceil_div(L, span)
    args = dict(
        weight_ptr=weight, rows=rows, columns=L // rows, blocks=blocks, segments=segments, span=span, D=D, K=K, BT=tile,
        BC=channels, UNIT=unit, PTX=takes_ptx(x.device), num_warps=_WARPS, enable_fp_fusion=True)  # fmt: skip
    for name, value in dict(x=x, **others).items():
        args |= {f"{name}_ptr": value, f"{name}_b": value.stride(-3) // unit, f"{name}_l": value.stride(-2) // unit}
    return blocks * segments * B, args


def forward(x: Tensor, weight: Tensor, bias: Tensor, rows: int, out: Optional[Tensor] = None) -> Tensor:
    """See `backends.torch.grid_conv.forward`."""
    y = x.new_empty(1, *x.shape) if out is None else out
    programs, args = _prepare(x, weight, rows, y=y)
    if programs:
        with torch.cuda.device_of(x):
            run(_grid_conv_kernel, (programs,), args | dict(bias_ptr=bias, dy_ptr=x, sums_ptr=y, GRAD=False))
    return y


def backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, dx: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """See `backends.torch.grid_conv.backward`."""
    (B, _, D), K = x.shape, weight.shape[-1]
    dpre = torch.empty_like(dy)
    programs, args = _prepare(x, weight, rows, dy=dy, dx=dx, y=dpre)
    sums = x.new_empty(B * args["segments"], 1, K * K + 1, D, dtype=torch.float32)
    args |= dict(bias_ptr=bias, dpre_ptr=dpre, sums_ptr=sums, GRAD=True)
    if programs:
        with torch.cuda.device_of(x):
            run(_grid_conv_kernel, (programs,), args)
            run(_grid_conv_backward_kernel, (programs,), args)
    dweight, dbias = sum_taps(sums)  # no atomics, but a fixed order: the same bits in every run
    return dweight.view_as(weight), dbias
