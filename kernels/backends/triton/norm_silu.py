"""`backends.torch.norm_silu` on a GPU. A program takes whole rows, so each tensor is read or written once. What
torch.compile makes of it takes three times as long when rows are short, as those of a stem's first convolution are."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import ceil_div, power_of_2
from .finish import sum_sequences
from .lanes import LOG2E, kernel, load_channels, tile_at
from .launch import refuse_float64
from .tuning import multiprocessors

_NUMBERS = 4096  # in a tile, if its rows are no wider
_BACK_NUMBERS = 2048  # in one of the backward pass
_PROGRAMS = 4  # of the backward pass for each multiprocessor
_WIDEST = 4096  # numbers of a row of which shared memory also holds the next ones


@triton.jit
def _normed(x, bias, ok, eps, D: tl.constexpr):
    """Returns (n, 1 / sqrt(variance + eps)) of a tile. Without an eps, rows that do not exist still have n = 0."""
    v = x.to(tl.float32) + bias
    v = tl.where(ok, v - tl.sum(v, 1)[:, None] * (1.0 / D), 0.0)
    total = tl.sum(v * v, 1)[:, None] * (1.0 / D) + eps
    scale = tl.rsqrt(tl.where(total == 0, 1.0, total))
    return v * scale, scale


@kernel()
def _norm_silu_kernel(
    x_ptr, bias_ptr, weight_ptr, shift_ptr, y_ptr, rows, eps, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    d = tl.arange(0, BLOCK)
    start, at, ok = tile_at(tl.program_id(0), d, rows, D, ROWS)
    n, _ = _normed(tl.load(x_ptr + start + at, mask=ok, other=0), load_channels(bias_ptr, d, D), ok, eps, D)
    u = n * load_channels(weight_ptr, d, D) + load_channels(shift_ptr, d, D)
    tl.store(y_ptr + start + at, (u / (1.0 + tl.exp2(u * -LOG2E))).to(y_ptr.dtype.element_ty), mask=ok)


@kernel()
def _norm_silu_backward_kernel(
    dy_ptr, x_ptr, bias_ptr, weight_ptr, shift_ptr, dx_ptr, sums_ptr, rows, eps,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Takes every `programs`-th tile of ROWS rows, and leaves its sums over them in sums (3, programs, D)."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    d = tl.arange(0, BLOCK)
    bias, weight, shift = load_channels(bias_ptr, d, D), load_channels(weight_ptr, d, D), load_channels(shift_ptr, d, D)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dshift = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.range(0, tl.cdiv(tl.cdiv(rows, ROWS) - program, programs), num_stages=STAGES):
        start, at, ok = tile_at(program + i * programs, d, rows, D, ROWS)
        x = tl.load(x_ptr + start + at, mask=ok, other=0)
        dy = tl.load(dy_ptr + start + at, mask=ok, other=0).to(tl.float32)
        n, scale = _normed(x, bias, ok, eps, D)
        u = n * weight + shift
        sigmoid = 1.0 / (1.0 + tl.exp2(u * -LOG2E))
        du = dy * sigmoid * (1.0 + u * (1.0 - sigmoid))
        dn = du * weight
        dx = scale * (dn - tl.sum(dn, 1)[:, None] * (1.0 / D) - n * (tl.sum(dn * n, 1)[:, None] * (1.0 / D)))
        tl.store(dx_ptr + start + at, dx.to(dx_ptr.dtype.element_ty), mask=ok)
        dbias += dx
        dweight += du * n
        dshift += du
    at = program * D + d
    size = programs * D
    tl.store(sums_ptr + at, tl.sum(dbias, 0), mask=d < D)
    tl.store(sums_ptr + size + at, tl.sum(dweight, 0), mask=d < D)
    tl.store(sums_ptr + 2 * size + at, tl.sum(dshift, 0), mask=d < D)


def _tiles(x: Tensor, numbers: int) -> tuple[int, int, dict[str, int]]:
    """Return (rows of x, rows of a tile, options of the kernels)."""
    refuse_float64(x)
    D = x.shape[-1]
    block = power_of_2(D)
    height = max(1, numbers // block)
    return x.numel() // D, height, dict(D=D, ROWS=height, BLOCK=block, num_warps=max(4, min(16, block // 512)))


def forward(x: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float) -> Tensor:
    """See `backends.torch.norm_silu.forward`."""
    y = torch.empty_like(x)
    if x.numel():
        rows, height, options = _tiles(x, _NUMBERS)
        with torch.cuda.device_of(x):
            _norm_silu_kernel[(ceil_div(rows, height),)](x, bias, norm_weight, norm_bias, y, rows, eps, **options)
    return y


def backward(
    dy: Tensor, x: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float
) -> tuple[Tensor, ...]:
    """See `backends.torch.norm_silu.backward`."""
    dx = torch.empty_like(x)
    if not x.numel():
        return dx, *(torch.zeros_like(value, dtype=torch.float32) for value in (bias, norm_weight, norm_bias))
    rows, height, options = _tiles(x, _BACK_NUMBERS)
    programs = min(ceil_div(rows, height), _PROGRAMS * multiprocessors(x.device))
    sums = x.new_empty(3, programs, options["D"], dtype=torch.float32)
    stages = 3 if options["BLOCK"] <= _WIDEST else 1
    with torch.cuda.device_of(x):
        _norm_silu_backward_kernel[(programs,)](
            dy, x, bias, norm_weight, norm_bias, dx, sums, rows, eps, **options, STAGES=stages
        )
    return dx, *(total[0] for total in (*sum_sequences(sums[:1], sums[1:2]), *sum_sequences(sums[2:])))
