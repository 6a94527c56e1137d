"""`backends.torch.rope` on a GPU."""

import torch
import triton.language as tl
from torch import Tensor

from ...contract import ceil_div, power_of_2
from ..torch.rope import FASTEST, octaves_per_point
from .lanes import kernel
from .launch import refuse_float64

_POINTS = 1024  # in a tile


@kernel()
def _rotate_kernel(
    kq_ptr, stride, count, L, columns, fastest, octaves, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Turns the N points of ROWS tokens, key and query. A negative `fastest` turns them back."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    p = tl.arange(0, BLOCK)[None, :]
    place = (rows % L)[:, None]
    place = tl.where(p % (N // 2) < N // 4, place // columns, place % columns)
    angle = place.to(tl.float32) * (fastest * tl.exp2(-octaves * (p % (N // 4)).to(tl.float32)))
    cos, sin = tl.cos(angle), tl.sin(angle)
    at = kq_ptr + rows[:, None].to(tl.int64) * stride + 2 * p
    ok = (rows < count)[:, None] & (p < N)
    x = tl.load(at, mask=ok, other=0).to(tl.float32)
    y = tl.load(at + 1, mask=ok, other=0).to(tl.float32)
    tl.store(at, (x * cos - y * sin).to(kq_ptr.dtype.element_ty), mask=ok)
    tl.store(at + 1, (x * sin + y * cos).to(kq_ptr.dtype.element_ty), mask=ok)


def rotate(kq: Tensor, rows: int, back: bool = False) -> None:
    """See `backends.torch.rope.rotate`. Tokens are evenly spaced, as those of a product's columns are."""
    refuse_float64(kq)
    L, N = kq.shape[-2], kq.shape[-1] // 2
    tokens = kq.view(-1, 2 * N)
    block = power_of_2(N)
    per = max(1, _POINTS // block)
    if kq.numel():
        with torch.cuda.device_of(kq):
            _rotate_kernel[(ceil_div(len(tokens), per),)](
                tokens, tokens.stride(0), len(tokens), L, L // rows, -FASTEST if back else FASTEST,
                octaves_per_point(N), N=N, ROWS=per, BLOCK=block, num_warps=4)  # fmt: skip
