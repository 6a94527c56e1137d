"""The Triton kernels of the convolution over a grid; `backends.torch.grid_conv` says what they compute.

A program walks down the rows of a strip of columns, a block of channels at a time. The K x K neighbours of each token
move through registers, so that a step loads K of them, one step before their use. A neighbour's load by another lane
finds it in the cache. Backward, one kernel writes the gradients of the pre-activations, and a second one walks over
these for dx and the weight. Numbers outside the grid are read as zeros.
"""

from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import ceil_div, power_of_2
from .finish import sum_taps
from .lanes import LOG2E, all_lanes, fill, gate, kernel, reciprocal, takes_ptx, work_of
from .launch import aligned, refuse_float64, run
from .tuning import multiprocessors

_WARPS = 4
_CHANNELS = 64  # of a block at least, if there are as many: 128 bytes of 16-bit numbers, a line of the cache
_SHORTEST = 4  # rows of a segment: each repeats K - 1 rows of its neighbours
_PROGRAMS = 16  # for each multiprocessor: with fewer, the rows are cut into segments

_kernel = kernel(["weight_ptr", "bias_ptr"])


@triton.jit
def _weights(weight_ptr, d, ok, TAPS: tl.constexpr):
    """Loads the taps of channels d, each (1, BC), as float32."""
    weights = ()
    for n in tl.static_range(TAPS):
        weights = weights + (tl.load(weight_ptr + d * TAPS + n, mask=ok, other=0).to(tl.float32),)
    return weights


@triton.jit
def _load(ptrs, row, rows, line, ok):
    """Loads the numbers (BT, BC) of a row, as float32. Rows are `line` apart; a negative one is a huge unsigned one."""
    inside = all_lanes(row, 1, 1).to(tl.uint32) < rows.to(tl.uint32)
    return tl.load(ptrs + row.to(tl.int64) * line, mask=ok & inside, other=0).to(tl.float32)


@triton.jit
def _load_near(ptrs, row, rows, column, columns, step, ok, K: tl.constexpr):
    """Loads a row's K numbers around each column, each (BT, BC)."""
    near = ()
    for j in tl.static_range(K):
        inside = (column + (j - K // 2)).to(tl.uint32) < columns.to(tl.uint32)
        near = near + (_load(ptrs + (j - K // 2) * step, row, rows, columns * step, ok & inside),)
    return near


@triton.jit
def _below(window, K: tl.constexpr):
    """Drops the first row of the window."""
    rest = ()
    for n in tl.static_range(K, len(window)):
        rest = rest + (window[n],)
    return rest


@_kernel
def _grid_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, dy_ptr, y_ptr, sums_ptr, rows, columns, blocks, strips, segments, span, x_b, x_l,
    D: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, GRAD: tl.constexpr, UNIT: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Writes silu(pre) to y, or (GRAD) the gradient of pre, and its sum over the program's tokens to the last row of
    its `sums`, (B strips segments, K K + 1, D)."""
    block, part, b, _ = work_of(blocks, strips * segments)
    d = block * BC + tl.arange(0, BC)[None, :]
    column = part % strips * BT + tl.arange(0, BT)[:, None]
    first = part // strips * span
    ok = d < D
    there = ok & (column < columns)
    step = x_l.to(tl.int64) * UNIT
    x_at = x_ptr + b * x_b * UNIT + column * step + d
    at = (b * rows * columns + column) * D + d
    weights = _weights(weight_ptr, d, ok, K * K)
    bias = tl.load(bias_ptr + d, mask=ok, other=0).to(tl.float32)
    total = tl.zeros([BT, BC], tl.float32)
    window = ()
    for i in tl.static_range(K - 1):
        window = window + _load_near(x_at, first + (i - K // 2), rows, column, columns, step, there, K)
    near = _load_near(x_at, first + K // 2, rows, column, columns, step, there, K)
    dy = tl.zeros([BT, BC], tl.float32)
    if GRAD:
        dy = _load(dy_ptr + at, first, rows, columns * D, there)
    for i in tl.range(0, tl.minimum(span, rows - first), num_stages=1):
        row = first + i
        next_near = _load_near(x_at, row + (1 + K // 2), rows, column, columns, step, there, K)
        next_dy = dy
        if GRAD:
            next_dy = _load(dy_ptr + at, row + 1, rows, columns * D, there)
        window = window + near
        pre = tl.zeros([BT, BC], tl.float32) + bias
        for n in tl.static_range(K * K):
            pre += weights[n] * window[n]
        if GRAD:
            silu, out = gate(dy, pre, PTX)
            total += out  # 0 beyond the last column, as dy is
        else:
            out = pre * reciprocal(1.0 + tl.exp2(pre * -LOG2E), PTX)
        tl.store(y_ptr + at + row.to(tl.int64) * (columns * D), out.to(y_ptr.dtype.element_ty), mask=there)
        window = _below(window, K)
        near = next_near
        dy = next_dy
    if GRAD:
        sums = sums_ptr + ((b * strips * segments + part) * (K * K + 1) + K * K) * D + d
        tl.store(sums, tl.sum(total, 0)[None, :], mask=ok)


@_kernel
def _grid_conv_backward_kernel(
    dpre_ptr, x_ptr, weight_ptr, dx_ptr, sums_ptr, rows, columns, blocks, strips, segments, span, x_b, x_l, dx_b, dx_l,
    D: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Writes dx, and the program's part of the weight's gradient to the first K K rows of its `sums`."""
    block, part, b, _ = work_of(blocks, strips * segments)
    d = block * BC + tl.arange(0, BC)[None, :]
    column = part % strips * BT + tl.arange(0, BT)[:, None]
    first = part // strips * span
    ok = d < D
    there = ok & (column < columns)
    step = x_l.to(tl.int64) * UNIT
    x_at = x_ptr + b * x_b * UNIT + column * step + d
    dx_step = dx_l.to(tl.int64) * UNIT
    dx_at = dx_ptr + b * dx_b * UNIT + column * dx_step + d
    dpre_at = dpre_ptr + (b * rows * columns + column) * D + d
    weights = _weights(weight_ptr, d, ok, K * K)
    found = fill(0.0, K * K, BT, BC)
    window = ()
    for i in tl.static_range(K - 1):
        window = window + _load_near(dpre_at, first + (i - K // 2), rows, column, columns, D, there, K)
    near = _load_near(dpre_at, first + K // 2, rows, column, columns, D, there, K)
    x = _load(x_at, first, rows, columns * step, there)
    for i in tl.range(0, tl.minimum(span, rows - first), num_stages=1):
        row = first + i
        next_near = _load_near(dpre_at, row + (1 + K // 2), rows, column, columns, D, there, K)
        next_x = _load(x_at, row + 1, rows, columns * step, there)
        window = window + near
        dx = tl.zeros([BT, BC], tl.float32)
        new = ()
        for n in tl.static_range(K * K):
            grad = window[K * K - 1 - n]  # of the token that tap n connects with this one
            dx += weights[n] * grad
            new = new + (found[n] + x * grad,)
        found = new
        tl.store(dx_at + row.to(tl.int64) * (columns * dx_step), dx.to(dx_ptr.dtype.element_ty), mask=there)
        window = _below(window, K)
        near = next_near
        x = next_x
    for n in tl.static_range(K * K):
        sums = sums_ptr + ((b * strips * segments + part) * (K * K + 1) + n) * D + d
        tl.store(sums, tl.sum(found[n], 0)[None, :], mask=ok)


def _prepare(x: Tensor, weight: Tensor, rows: int, **others: Tensor) -> tuple[int, dict[str, Any]]:
    """Return (programs, arguments). `others` are y, dy and dx."""
    refuse_float64(x)
    B, L, D = x.shape
    columns, K = L // rows, weight.shape[-1]
    # Strides in units of 16, if they can be: then the compiler sees that neighbouring numbers may be loaded together.
    unit = 16 if D % 16 == 0 and all(map(aligned, (x, *others.values()))) else 1
    # For each number of its part of a tile, a lane keeps K K weights, neighbours and sums.
    numbers = 32 * _WARPS * (4 if K <= 3 else 2 if K <= 5 else 1)
    tile = min(numbers // min(_CHANNELS, power_of_2(D)), power_of_2(columns))
    channels = min(numbers // tile, power_of_2(D))
    blocks, strips = ceil_div(D, channels), ceil_div(columns, tile)
    wanted = _PROGRAMS * multiprocessors(x.device) // max(1, blocks * strips * B)
    span = ceil_div(rows, max(1, min(ceil_div(rows, _SHORTEST), wanted)))
    segments = ceil_div(rows, span)
    args = dict(
        weight_ptr=weight, rows=rows, columns=columns, blocks=blocks, strips=strips, segments=segments, span=span, D=D,
        K=K, BT=tile, BC=channels, UNIT=unit, PTX=takes_ptx(x.device), num_warps=_WARPS, num_stages=1,
        enable_fp_fusion=True)  # fmt: skip
    for name, value in dict(x=x, **others).items():
        args |= {f"{name}_ptr": value, f"{name}_b": value.stride(-3) // unit, f"{name}_l": value.stride(-2) // unit}
    return blocks * strips * segments * B, args


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
    sums = x.new_empty(B * args["strips"] * args["segments"], 1, K * K + 1, D, dtype=torch.float32)
    args |= dict(bias_ptr=bias, dpre_ptr=dpre, sums_ptr=sums, GRAD=True)
    if programs:
        with torch.cuda.device_of(x):
            run(_grid_conv_kernel, (programs,), args)
            run(_grid_conv_backward_kernel, (programs,), args)
    dweight, dbias = sum_taps(sums)  # no atomics, but a fixed order: the same bits in every run
    return dweight.view_as(weight), dbias
