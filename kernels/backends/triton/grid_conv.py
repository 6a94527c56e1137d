"""The Triton kernels of the convolution over a grid; `backends.torch.grid_conv` says what they compute.

A program is one warp that walks over the columns of bands of R rows, channels along its lanes. A column of R + K - 1
numbers is loaded one step before its use, and adds its part to the sums of the K columns around it, of which one then
is complete. So registers hold K columns of R sums, and a number is loaded (R + K - 1) / R times. Numbers outside the
grid are read as zeros.

Backward, one walk writes the gradients of the pre-activations and sums those of the weight and the bias; a second one
is the transposed convolution of what the first wrote. Where registers hold enough, and bands alone fill the GPU, one
kernel makes both walks. Channels beyond D repeat the last one, and nothing of them is stored.
"""

from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import ceil_div
from .finish import sum_taps
from .lanes import (
    LOG2E,
    all_from,
    all_lanes,
    channels_of,
    copies,
    fill,
    gate,
    kernel,
    load_floats,
    reciprocal,
    takes_ptx,
    warp_lanes,
    work_of,
)
from .launch import aligned, refuse_float64, run
from .tuning import multiprocessors

# For each walk and K, the rows of a band at most, 1 where K is not named. More rows load a number less often and take
# more registers: plain walks, those that also sum the weight's gradient, and those of the whole backward pass.
_ROWS = {"plain": {1: 8, 3: 5, 5: 4, 7: 4}, "grad": {1: 8, 3: 5, 5: 4, 7: 2}, "whole": {1: 8, 3: 7}}
_CHANNELS = {1: 2, 3: 2}  # of a lane, for each K; 1 where it is not named
_PROGRAMS = {"plain": 24, "grad": 12, "whole": 8}  # for each multiprocessor: about as many as run at once
_REGISTERS = {("plain", 3): 80}  # at most, so that 24 run at once
_SHORTEST = 8  # columns of a segment at least: each repeats K - 1 columns of its neighbours

_kernel = kernel(["weight_ptr", "bias_ptr"])


@triton.jit
def _load_column(at, row, rows, column, columns, step, COUNT: tl.constexpr, BC: tl.constexpr):
    """Loads COUNT numbers of a column from `row` on, each (1, BC), as float32. A negative index is a huge unsigned one,
    so that one comparison tells what is outside."""
    there = all_lanes(column, 1, BC).to(tl.uint32) < columns.to(tl.uint32)
    ptrs = at + (row * columns + column).to(tl.int64) * step
    line = columns.to(tl.int64) * step
    numbers = ()
    for i in tl.static_range(COUNT):
        ok = there & (all_lanes(row + i, 1, BC).to(tl.uint32) < rows.to(tl.uint32))
        numbers = numbers + (tl.load(ptrs, mask=ok, other=0).to(tl.float32),)
        ptrs += line
    return numbers


@triton.jit
def _store_column(at, row, rows, column, columns, step, values, ok, BC: tl.constexpr):
    """Stores a column's numbers from `row` on, except for those beyond the last row."""
    ptrs = at + (row * columns + column).to(tl.int64) * step
    line = columns.to(tl.int64) * step
    for i in tl.static_range(len(values)):
        there = ok & (all_lanes(row + i, 1, BC) < rows)
        tl.store(ptrs, values[i].to(at.dtype.element_ty), mask=there)
        ptrs += line


@triton.jit
def _first(values, COUNT: tl.constexpr):
    few = ()
    for n in tl.static_range(COUNT):
        few = few + (values[n],)
    return few


@triton.jit
def _spread(sums, column, weights, start, R: tl.constexpr, K: tl.constexpr, BACK: tl.constexpr):
    """Adds what a column of R + K - 1 numbers gives to the K columns of R sums around it, of which `sums` lacks the
    last: that begins with `start`. The first one is complete then. BACK: by the transposed convolution."""
    found = ()
    for j in tl.static_range(K):
        for r in tl.static_range(R):
            total = start
            if j < K - 1:
                total = sums[j * R + r]
            for i in tl.static_range(K):
                total += weights[(K - 1 - i) * K + j if BACK else i * K + K - 1 - j] * column[r + i]
            found = found + (total,)
    return found


@triton.jit
def _sum_taps(found, grad, window, first: tl.constexpr, HIGH: tl.constexpr, K: tl.constexpr):
    """Adds to the gradients of the taps and the bias what the gradient of a pre-activation gives. The K x K numbers
    under it are in `window`, K columns of HIGH rows, from row `first` on."""
    new = ()
    for n in tl.static_range(K * K):
        new = new + (found[n] + grad * window[n % K * HIGH + first + n // K],)
    return new + (found[K * K] + grad,)


@_kernel
def _grid_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, dy_ptr, y_ptr, sums_ptr, rows, columns, blocks, programs, items, bands, segments,
    span, x_b, x_l, y_b, y_l,
    D: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr,
    PTX: tl.constexpr, GRAD: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Writes silu(pre) to y; or (GRAD) the gradient of pre, and the program's part of those of the weight and the bias
    to `sums`, (programs, K K + 1, D); or (BACK) the transposed convolution of x without bias."""
    block, program, _b, _g = work_of(blocks, programs)
    d, d_ok, _n = channels_of(block, D, 1, 1, BC, WHOLE)
    NEAR: tl.constexpr = K // 2
    HIGH: tl.constexpr = R + K - 1
    DYS: tl.constexpr = R if GRAD else 0
    x_step = x_l.to(tl.int64) * UNIT
    y_step = y_l.to(tl.int64) * UNIT
    weights = load_floats(weight_ptr + d * (K * K), K * K, 1)
    start = tl.zeros([1, BC], tl.float32)
    if not BACK:
        start += tl.load(bias_ptr + d).to(tl.float32)
    found = fill(0.0, K * K + 1 if GRAD else 0, 1, BC)
    for item in tl.range(program, items, programs, num_stages=1):
        first = item % bands * R
        begin = item // bands % segments * span
        b = (item // bands // segments).to(tl.int64)
        x_at = x_ptr + b * x_b * UNIT + d
        dy_at = dy_ptr + b * rows * columns * D + d
        y_at = y_ptr + b * y_b * UNIT + d
        sums = copies(start, (K - 1) * R)
        window = fill(0.0, (K - 1) * HIGH if GRAD else 0, 1, BC)
        for column in tl.range(tl.maximum(begin - NEAR, 0), begin + NEAR, num_stages=1):
            x = _load_column(x_at, first - NEAR, rows, column, columns, x_step, HIGH, BC)
            sums = all_from(_spread(sums, x, weights, start, R, K, BACK), R)
            if GRAD:
                window = all_from(window + x, HIGH)
        x = _load_column(x_at, first - NEAR, rows, begin + NEAR, columns, x_step, HIGH, BC)
        dy = _load_column(dy_at, first, rows, begin, columns, D, DYS, BC)
        for column in tl.range(begin, tl.minimum(begin + span, columns), num_stages=1):
            next_x = _load_column(x_at, first - NEAR, rows, column + (1 + NEAR), columns, x_step, HIGH, BC)
            next_dy = _load_column(dy_at, first, rows, column + 1, columns, D, DYS, BC)
            sums = _spread(sums, x, weights, start, R, K, BACK)
            if GRAD:
                window = window + x
            outs = ()
            for r in tl.static_range(R):
                out = sums[r]
                if GRAD:
                    silu, out = gate(dy[r], out, PTX)  # 0 beyond the last row, as dy is
                    found = _sum_taps(found, out, window, r, HIGH, K)
                elif not BACK:
                    out = out * reciprocal(1.0 + tl.exp2(out * -LOG2E), PTX)
                outs = outs + (out,)
            _store_column(y_at, first, rows, column, columns, y_step, outs, d_ok, BC)
            sums = all_from(sums, R)
            if GRAD:
                window = all_from(window, HIGH)
            x = next_x
            dy = next_dy
    for n in tl.static_range(len(found)):
        tl.store(sums_ptr + (program * len(found) + n) * D + d, found[n], mask=d_ok)


@_kernel
def _grid_conv_backward_kernel(
    x_ptr, weight_ptr, bias_ptr, dy_ptr, y_ptr, sums_ptr, rows, columns, blocks, programs, items, bands, x_b, x_l, y_b,
    y_l,
    D: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Makes both walks of the backward pass in one, and writes the gradient of x to y. The gradients of the
    pre-activations stay in registers; those of the K - 1 rows around the band are computed for this band alone."""
    block, program, _b, _g = work_of(blocks, programs)
    d, d_ok, _n = channels_of(block, D, 1, 1, BC, WHOLE)
    NEAR: tl.constexpr = K // 2
    HIGH: tl.constexpr = R + K - 1  # gradients of a column
    TALL: tl.constexpr = HIGH + K - 1  # numbers of x in a column
    x_step = x_l.to(tl.int64) * UNIT
    y_step = y_l.to(tl.int64) * UNIT
    weights = load_floats(weight_ptr + d * (K * K), K * K, 1)
    bias = tl.load(bias_ptr + d).to(tl.float32)
    zero = tl.zeros([1, BC], tl.float32)
    found = fill(0.0, K * K + 1, 1, BC)
    for item in tl.range(program, items, programs, num_stages=1):
        first = item % bands * R
        b = (item // bands).to(tl.int64)
        x_at = x_ptr + b * x_b * UNIT + d
        dy_at = dy_ptr + b * rows * columns * D + d
        y_at = y_ptr + b * y_b * UNIT + d
        pres = copies(bias, (K - 1) * HIGH)
        dxs = fill(0.0, (K - 1) * R, 1, BC)
        window = fill(0.0, (K - 1) * HIGH, 1, BC)
        for column in tl.range(0, NEAR, num_stages=1):
            x = _load_column(x_at, first - 2 * NEAR, rows, column, columns, x_step, TALL, BC)
            pres = all_from(_spread(pres, x, weights, bias, HIGH, K, False), HIGH)
            window = all_from(window + _first(all_from(x, NEAR), HIGH), HIGH)
        x = _load_column(x_at, first - 2 * NEAR, rows, NEAR, columns, x_step, TALL, BC)
        dy = _load_column(dy_at, first - NEAR, rows, 0, columns, D, HIGH, BC)
        for column in tl.range(0, columns, num_stages=1):
            next_x = _load_column(x_at, first - 2 * NEAR, rows, column + (1 + NEAR), columns, x_step, TALL, BC)
            next_dy = _load_column(dy_at, first - NEAR, rows, column + 1, columns, D, HIGH, BC)
            window = window + _first(all_from(x, NEAR), HIGH)
            pres = _spread(pres, x, weights, bias, HIGH, K, False)
            grads = ()
            for r in tl.static_range(HIGH):
                silu, grad = gate(dy[r], pres[r], PTX)  # 0 outside the grid, as dy is
                grads = grads + (grad,)
            dxs = _spread(dxs, grads, weights, zero, R, K, True)
            there = d_ok & (all_lanes(column, 1, BC) >= NEAR)
            _store_column(y_at, first, rows, column - NEAR, columns, y_step, _first(dxs, R), there, BC)
            for r in tl.static_range(R):
                found = _sum_taps(found, grads[NEAR + r], window, r, HIGH, K)
            pres = all_from(pres, HIGH)
            dxs = all_from(dxs, R)
            window = all_from(window, HIGH)
            x = next_x
            dy = next_dy
        for j in tl.static_range(NEAR):  # complete, since columns beyond the last would add zeros
            there = d_ok & (all_lanes(columns + j, 1, BC) >= NEAR)
            _store_column(y_at, first, rows, columns - NEAR + j, columns, y_step, _first(dxs, R), there, BC)
            dxs = all_from(dxs, R)
    for n in tl.static_range(len(found)):
        tl.store(sums_ptr + (program * len(found) + n) * D + d, found[n], mask=d_ok)


def _prepare(walk: str, x: Tensor, weight: Tensor, rows: int, y: Tensor) -> tuple[int, dict[str, Any]]:
    """Return (programs, arguments) of a walk over x that writes y."""
    refuse_float64(x)
    B, L, D = x.shape
    columns, K = L // rows, weight.shape[-1]
    # Strides in units of 16, if they can be: then the compiler sees that neighbouring numbers may be loaded together.
    unit = 16 if D % 16 == 0 and aligned(x) and aligned(y) else 1
    lanes = warp_lanes(x.device)
    wide = _CHANNELS.get(K, 1) * lanes
    width = wide if unit > 1 and D % wide == 0 else lanes
    # The fewest rows that are loaded, then the fewest bands
    R = min(range(_ROWS[walk].get(K, 1), 0, -1), key=lambda R: ceil_div(rows, R) * (R + K // 2))
    blocks, bands = ceil_div(D, width), ceil_div(rows, R)
    wanted = max(1, _PROGRAMS[walk] * multiprocessors(x.device) // blocks)
    # With few bands the columns are cut into segments.
    span = ceil_div(columns, max(1, min(columns // _SHORTEST, wanted // max(1, B * bands))))
    segments = ceil_div(columns, span)
    items = B * bands * segments
    programs = min(items, wanted)
    args = dict(
        x_ptr=x, weight_ptr=weight, y_ptr=y, rows=rows, columns=columns, blocks=blocks, programs=programs, items=items,
        bands=bands, segments=segments, span=span, x_b=x.stride(0) // unit, x_l=x.stride(1) // unit,
        y_b=y.stride(-3) // unit, y_l=y.stride(-2) // unit, D=D, K=K, R=R, BC=width, WHOLE=D % width == 0, UNIT=unit,
        PTX=takes_ptx(x.device), GRAD=walk == "grad", BACK=False, num_warps=1, num_stages=1,
        enable_fp_fusion=True)  # fmt: skip
    if args["PTX"] and (walk, K) in _REGISTERS:
        args["maxnreg"] = _REGISTERS[walk, K]
    return blocks * programs, args


def forward(x: Tensor, weight: Tensor, bias: Tensor, rows: int, out: Optional[Tensor] = None) -> Tensor:
    """See `backends.torch.grid_conv.forward`."""
    y = x.new_empty(1, *x.shape) if out is None else out
    programs, args = _prepare("plain", x, weight, rows, y)
    if programs:
        with torch.cuda.device_of(x):
            run(_grid_conv_kernel, (programs,), args | dict(bias_ptr=bias, dy_ptr=x, sums_ptr=y))
    return y


def backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, dx: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """See `backends.torch.grid_conv.backward`."""
    D, K = weight.shape[1], weight.shape[-1]
    programs, args = _prepare("whole", x, weight, rows, dx)
    whole = K in _ROWS["whole"] and args["segments"] == 1
    if not whole:
        dpre = torch.empty_like(dy)
        programs, args = _prepare("grad", x, weight, rows, dpre)
    sums = x.new_empty(args["programs"], 1, K * K + 1, D, dtype=torch.float32)
    args |= dict(bias_ptr=bias, dy_ptr=dy, sums_ptr=sums)
    if programs:
        with torch.cuda.device_of(x):
            run(_grid_conv_backward_kernel if whole else _grid_conv_kernel, (programs,), args)
            if not whole:
                programs, more = _prepare("plain", dpre[0], weight, rows, dx)
                run(_grid_conv_kernel, (programs,), args | more | dict(BACK=True))
    dweight, dbias = sum_taps(sums)  # no atomics, but a fixed order: the same bits in every run
    return dweight.view_as(weight), dbias
