"""`backends.torch.gelu` on a GPU. Each number is read or written once, which should take longer than the arithmetic. So
Φ is a polynomial in an exponent: CUDA's own error function would take longer than that."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import Pair, ceil_div, power_of_2
from .finish import sum_sequences
from .lanes import kernel, load_channels, tile_at
from .launch import refuse_float64

_NUMBERS = 4096  # in a tile
_WIDTH = 128  # channels of a tile
_TILES = 4  # that a program of the backward pass takes, one below the other


@triton.jit
def _tail(v):
    """Returns a, which is |v| up to 5.5, and Φ(-a) = 2^p(a)."""
    # The coefficients of p are a fit by least squares, with Lawson's weights for the least greatest error of a Φ(-a):
    # 2.4e-7 with float32's rounding. Beyond 5.5, a Φ(-a) stays at 1e-7.
    a = tl.minimum(tl.abs(v), 5.5)
    p = a * -2.90048572e-08 + 8.45554553e-07
    p = p * a - 1.06335328e-05
    p = p * a + 7.33756679e-05
    p = p * a - 0.000265017792
    p = p * a - 3.92159127e-05
    p = p * a + 0.00700689573
    p = p * a - 0.052492179
    p = p * a - 0.459198654
    p = p * a - 1.15110838
    p = p * a - 0.999999762
    return a, tl.exp2(p)


@triton.jit
def _work(D: tl.constexpr, WIDTH: tl.constexpr):
    """Returns (how many programs stand above this one, its channels). Programs side by side come one after the other,
    so that they read memory in its order."""
    BLOCKS: tl.constexpr = (D + WIDTH - 1) // WIDTH
    return tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * WIDTH + tl.arange(0, WIDTH)


@kernel()
def _gelu_kernel(x_ptr, bias_ptr, y_ptr, rows, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    above, d = _work(D, WIDTH)
    start, at, ok = tile_at(above, d, rows, D, ROWS)
    v = tl.load(x_ptr + start + at, mask=ok, other=0).to(tl.float32) + load_channels(bias_ptr, d, D)
    a, tail = _tail(v)
    # max(v, 0) - a Φ(-a) has no rounding error of 1 - Φ(-a), and keeps infinities and NaN as they are.
    y = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL) - a * tail
    tl.store(y_ptr + start + at, y.to(y_ptr.dtype.element_ty), mask=ok)


@kernel()
def _gelu_backward_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, sums_ptr, rows,
    D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Takes TILES tiles of ROWS rows, and leaves the sum of dx over them in sums (programs, D)."""
    above, d = _work(D, WIDTH)
    bias = load_channels(bias_ptr, d, D)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for tile in tl.range(0, TILES, num_stages=3):
        start, at, ok = tile_at(above * TILES + tile, d, rows, D, ROWS)
        v = tl.load(x_ptr + start + at, mask=ok, other=0).to(tl.float32) + bias
        dy = tl.load(dy_ptr + start + at, mask=ok, other=0).to(tl.float32)
        _a, tail = _tail(v)
        density = tl.exp2(v * v * -0.72134752) * 0.39894228  # e^(-v^2 / 2) / (2 π)^(1/2)
        dx = dy * (tl.where(v < 0, tail, 1.0 - tail) + v * density)
        tl.store(dx_ptr + start + at, dx.to(dx_ptr.dtype.element_ty), mask=ok)
        total += dx
    tl.store(sums_ptr + above.to(tl.int64) * D + d, tl.sum(total, 0), mask=d < D)


def _tiles(x: Tensor, tiles: int) -> tuple[int, int, dict[str, int]]:
    """Return (rows of x, how many programs stand one above the other, options of the kernels)."""
    refuse_float64(x)
    D = x.shape[-1]
    width = min(_WIDTH, power_of_2(D))
    rows, height = x.numel() // D, _NUMBERS // width
    return rows, ceil_div(rows, height * tiles), dict(D=D, ROWS=height, WIDTH=width, num_warps=4)


def forward(x: Tensor, bias: Tensor) -> Tensor:
    """See `backends.torch.gelu.forward`."""
    y = torch.empty_like(x)
    if x.numel():
        rows, programs, options = _tiles(x, 1)
        with torch.cuda.device_of(x):
            _gelu_kernel[(programs * ceil_div(options["D"], options["WIDTH"]),)](x, bias, y, rows, **options)
    return y


def backward(dy: Tensor, x: Tensor, bias: Tensor) -> Pair:
    """See `backends.torch.gelu.backward`."""
    dx = torch.empty_like(x)
    if not x.numel():
        return dx, torch.zeros_like(bias, dtype=torch.float32)
    rows, programs, options = _tiles(x, _TILES)
    sums = x.new_empty(1, programs, options["D"], dtype=torch.float32)
    with torch.cuda.device_of(x):
        _gelu_backward_kernel[(programs * ceil_div(options["D"], options["WIDTH"]),)](
            dy, x, bias, dx, sums, rows, **options, TILES=_TILES
        )
    return dx, sum_sequences(sums)[0][0]
