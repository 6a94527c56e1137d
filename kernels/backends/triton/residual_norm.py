"""`backends.torch.residual_norm` on a GPU. A program takes whole rows, so each tensor is read or written once, and it
keeps the weight's sums in registers. What torch.compile makes of it takes half as long again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import ceil_div, power_of_2
from .finish import sum_sequences
from .lanes import kernel, load_channels, tile_at
from .launch import refuse_float64
from .tuning import multiprocessors

_NUMBERS = 2048  # in a tile, if its rows are no wider: then shared memory has room for the next tiles
_PROGRAMS = 4  # for each multiprocessor


@triton.jit
def _turned_back(row, L, grid_rows):
    """Returns where the patches `row`, counted row by row, stand if they are counted column by column."""
    columns = L // grid_rows
    token = row % L
    return row - token + token % columns * grid_rows + token // columns


@kernel()
def _residual_norm_backward_kernel(
    dh_ptr, dx_ptr, x_ptr, weight_ptr, total_ptr, sums_ptr, rows, eps, L, grid_rows,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Takes every `programs`-th tile of ROWS rows, and leaves its sums over them in sums (programs, D)."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    d = tl.arange(0, BLOCK)
    weight = load_channels(weight_ptr, d, D)
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.range(0, tl.cdiv(tl.cdiv(rows, ROWS) - program, programs), num_stages=STAGES):
        tile = program + i * programs
        start, at, ok = tile_at(tile, d, rows, D, ROWS)
        x = tl.load(x_ptr + start + at, mask=ok, other=0).to(tl.float32)
        dx = tl.load(dx_ptr + start + at, mask=ok, other=0).to(tl.float32)
        if TURNED:
            row = _turned_back(tile * ROWS + tl.arange(0, ROWS), L, grid_rows)
            dh = tl.load(dh_ptr + row[:, None].to(tl.int64) * D + d[None, :], mask=ok, other=0)
        else:
            dh = tl.load(dh_ptr + start + at, mask=ok, other=0)
        dh = dh.to(tl.float32)
        square = tl.sum(x * x, 1)[:, None] * (1.0 / D) + eps
        scale = tl.rsqrt(tl.where(square == 0, 1.0, square))  # without an eps, rows that do not exist have n = 0
        n = x * scale
        dn = dh * weight
        dx += scale * (dn - n * (tl.sum(dn * n, 1)[:, None] * (1.0 / D)))
        tl.store(total_ptr + start + at, dx.to(total_ptr.dtype.element_ty), mask=ok)
        dweight += dh * n
    tl.store(sums_ptr + program * D + d, tl.sum(dweight, 0), mask=d < D)


def backward(
    dh: Tensor, dx: Tensor, x: Tensor, weight: Tensor, total: Tensor, dweight: Tensor, eps: float, rows: int
) -> None:
    """See `backends.torch.residual_norm.backward`."""
    refuse_float64(x)
    if not x.numel():
        dweight.zero_()
        return
    D = x.shape[-1]
    tokens, block = x.numel() // D, power_of_2(D)
    height = max(1, _NUMBERS // block)
    programs = min(ceil_div(tokens, height), _PROGRAMS * multiprocessors(x.device))
    sums = x.new_empty(1, programs, D, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _residual_norm_backward_kernel[(programs,)](
            dh, dx, x, weight, total, sums, tokens, eps, x.shape[-2], rows, D=D, ROWS=height, BLOCK=block,
            STAGES=3 if block <= _NUMBERS else 1, TURNED=rows > 0, num_warps=max(4, min(16, block // 512)))  # fmt: skip
    sum_sequences(sums, out=[dweight.unsqueeze(0)])
