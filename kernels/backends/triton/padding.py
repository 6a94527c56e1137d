"""`backends.torch.padding` on a GPU: both matrices by one kernel, since each is so small that a launch is what it
costs, and in torch's parts they are seven."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import ceil_div

_BLOCK = 1024


@triton.jit
def _move(plain_ptr, wide_ptr, i, size, ROWS: tl.constexpr, INNER: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr,
          BACK: tl.constexpr):  # fmt: skip
    """Numbers i of the wide tensor (.., ROWS, INNER) from or (BACK) to the plain one, which has no rows R to WIDTH."""
    GAP: tl.constexpr = WIDTH - R
    row = i // INNER % ROWS
    after = row >= WIDTH
    plain = plain_ptr + i - (i // (ROWS * INNER) * GAP + tl.where(after, GAP, 0)) * INNER
    ok = i < size
    both = ok & (after | (row < R))
    if BACK:
        value = tl.load(wide_ptr + i, mask=both, other=0).to(tl.float32)
        tl.store(plain, value.to(plain_ptr.dtype.element_ty), mask=both)
    else:
        value = tl.load(plain, mask=both, other=0).to(tl.float32)
        tl.store(wide_ptr + i, value.to(wide_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _pad_kernel(
    x_ptr, dt_ptr, wide_x_ptr, wide_dt_ptr, x_size, dt_size, x_blocks,
    ROWS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if block < x_blocks:
        _move(x_ptr, wide_x_ptr, block * BLOCK + i, x_size, ROWS, D, R, WIDTH, BACK)
    else:
        _move(dt_ptr, wide_dt_ptr, (block - x_blocks) * BLOCK + i, dt_size, WIDTH, 1, R, WIDTH, BACK)


def _launch(x_proj: Tensor, dt_proj: Tensor, wide_x: Tensor, wide_dt: Tensor, back: bool) -> None:
    _, rows, D = wide_x.shape
    blocks = ceil_div(wide_x.numel(), _BLOCK)
    with torch.cuda.device_of(wide_x):
        _pad_kernel[(blocks + ceil_div(wide_dt.numel(), _BLOCK),)](
            x_proj, dt_proj, wide_x, wide_dt, wide_x.numel(), wide_dt.numel(), blocks, ROWS=rows, D=D,
            R=dt_proj.shape[2], WIDTH=wide_dt.shape[2], BACK=back, BLOCK=_BLOCK, num_warps=4)  # fmt: skip


def forward(x_proj: Tensor, dt_proj: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `backends.torch.padding.forward`."""
    (S, rows, D), R = x_proj.shape, dt_proj.shape[2]
    if width == R and x_proj.dtype == dt_proj.dtype == dtype:
        return x_proj, dt_proj
    wide_x = x_proj.new_empty(S, width - R + rows, D, dtype=dtype)
    wide_dt = dt_proj.new_empty(S, dt_proj.shape[1], width, dtype=dtype)
    _launch(x_proj, dt_proj, wide_x, wide_dt, False)
    return wide_x, wide_dt


def backward(wide_x: Tensor, wide_dt: Tensor, x_proj: Tensor, dt_proj: Tensor) -> tuple[Tensor, Tensor]:
    """As `backends.torch.padding.backward`."""
    if wide_dt.shape == dt_proj.shape and wide_x.dtype == x_proj.dtype and wide_dt.dtype == dt_proj.dtype:
        return wide_x, wide_dt
    dx_proj, ddt_proj = x_proj.new_empty(x_proj.shape), dt_proj.new_empty(dt_proj.shape)
    _launch(dx_proj, ddt_proj, wide_x, wide_dt, True)
    return dx_proj, ddt_proj
