"""`backends.torch.skip` on a GPU. A program takes whole rows, so each tensor is read and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import ceil_div
from .lanes import LOG2E, kernel, row_at
from .launch import row_options
from .tuning import multiprocessors

_NUMBERS = 2048  # of a tensor, that a program holds at once


@triton.jit
def _load_sets(x_ptr, at, set_at, ok, SETS: tl.constexpr):
    """Loads the numbers at `at` of each set, as float32; sets are `set_at` apart."""
    xs = ()
    for i in tl.static_range(SETS):
        xs = xs + (tl.load(x_ptr + i * set_at + at, mask=ok, other=0).to(tl.float32),)
    return xs


@kernel()
def _skip_kernel(
    y_ptr, x_ptr, z_ptr, weight_ptr, rows, L, z_b, z_l,
    D: tl.constexpr, SETS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok = (row < rows)[:, None] & (d < D)
    at = row[:, None] * D + d
    weights = _load_sets(weight_ptr, d, D, d < D, SETS)
    xs = _load_sets(x_ptr, at, rows.to(tl.int64) * D, ok, SETS)
    total = weights[0] * xs[0]
    if SETS == 2:
        total += weights[1] * xs[1]
    z = tl.load(z_ptr + row_at(row, L, z_b, z_l, ALIGNED)[:, None] + d, mask=ok, other=0).to(tl.float32)
    y = tl.load(y_ptr + at, mask=ok, other=0).to(tl.float32) + total * z / (1.0 + tl.exp2(z * -LOG2E))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=ok)


@kernel()
def _skip_backward_kernel(
    dy_ptr, x_ptr, z_ptr, weight_ptr, dx_ptr, dz_ptr, dweight_ptr, rows, L, dy_b, dy_l, z_b, z_l, dz_b, dz_l,
    D: tl.constexpr, SETS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Takes every `programs`-th group of ROWS rows, and leaves its sum over them in dweight (programs, SETS, D)."""
    d = tl.arange(0, BLOCK)[None, :]
    set_at = rows.to(tl.int64) * D
    weights = _load_sets(weight_ptr, d, D, d < D, SETS)
    sums = ()
    for _ in tl.static_range(SETS):
        sums = sums + (tl.zeros([ROWS, BLOCK], tl.float32),)
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    groups = (rows + ROWS - 1) // ROWS
    for i in tl.range(0, (groups - program + programs - 1) // programs, num_stages=1):
        row = (program + i * programs) * ROWS + tl.arange(0, ROWS)
        ok = (row < rows)[:, None] & (d < D)
        at = row[:, None] * D + d
        z = tl.load(z_ptr + row_at(row, L, z_b, z_l, ALIGNED)[:, None] + d, mask=ok, other=0).to(tl.float32)
        dy = tl.load(dy_ptr + row_at(row, L, dy_b, dy_l, ALIGNED)[:, None] + d, mask=ok, other=0).to(tl.float32)
        xs = _load_sets(x_ptr, at, set_at, ok, SETS)
        sigmoid = 1.0 / (1.0 + tl.exp2(z * -LOG2E))
        silu = z * sigmoid
        dsum = dy * silu
        total = weights[0] * xs[0]
        if SETS == 2:
            total += weights[1] * xs[1]
        dz = dy * total * (sigmoid + silu * (1.0 - sigmoid))
        tl.store(dz_ptr + row_at(row, L, dz_b, dz_l, ALIGNED)[:, None] + d, dz.to(dz_ptr.dtype.element_ty), mask=ok)
        more = ()
        for s in tl.static_range(SETS):
            place = dx_ptr + s * set_at + at
            dx = tl.load(place, mask=ok, other=0).to(tl.float32) + weights[s] * dsum
            tl.store(place, dx.to(dx_ptr.dtype.element_ty), mask=ok)
            more = more + (sums[s] + xs[s] * dsum,)
        sums = more
    first = tl.arange(0, BLOCK)
    for s in tl.static_range(SETS):
        tl.store(dweight_ptr + (program * SETS + s) * D + first, tl.sum(sums[s], 0), mask=first < D)


def forward(y: Tensor, x: Tensor, z: Tensor, weight: Tensor) -> None:
    """See `backends.torch.skip.forward`."""
    B, L, _ = z.shape
    if y.numel():
        options = row_options(_NUMBERS, z) | dict(SETS=len(x))
        with torch.cuda.device_of(y):
            _skip_kernel[(ceil_div(B * L, options["ROWS"]),)](y, x, z, weight, B * L, L, *z.stride()[:2], **options)


def backward(dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, dx: Tensor, dz: Tensor) -> Tensor:
    """See `backends.torch.skip.backward`."""
    B, L, D = z.shape
    options = row_options(_NUMBERS, dy, z, dz) | dict(SETS=len(x))
    programs = min(ceil_div(B * L, options["ROWS"]), 4 * multiprocessors(z.device))
    dweight = x.new_empty(programs, len(x), D, dtype=torch.float32)
    if programs:
        with torch.cuda.device_of(x):
            _skip_backward_kernel[(programs,)](
                dy, x, z, weight, dx, dz, dweight, B * L, L, *dy.stride()[:2], *z.stride()[:2], *dz.stride()[:2],
                **options)  # fmt: skip
    return dweight.sum(0)
