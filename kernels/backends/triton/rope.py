"""`backends.torch.rope` on a GPU."""

from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import ceil_div, power_of_2
from ..torch.rope import FASTEST, Turned, octaves_per_point
from .lanes import kernel
from .launch import refuse_float64

_NUMBERS = 2048  # in a tile
_SEQUENCES = 8  # of a tile, which share the angles of their tokens


@triton.jit
def angles(t, p, columns, fastest, octaves, N: tl.constexpr):
    """Returns the angles of points p, of vectors of N numbers, at the places of tokens t."""
    place = tl.where(p % (N // 2) < N // 4, t // columns, t % columns)
    return place.to(tl.float32) * (fastest * tl.exp2(-octaves * (p % (N // 4)).to(tl.float32)))


@triton.jit
def turn_points(v, cos, sin):
    """Returns v (sequences, tokens, C) with the points 2 p and 2 p + 1 turned; cos and sin are (1, tokens, C / 2)."""
    x, y = tl.split(tl.reshape(v, [v.shape[0], v.shape[1], v.shape[2] // 2, 2]))
    return tl.reshape(tl.join(x * cos - y * sin, x * sin + y * cos), v.shape)


@triton.jit
def turn(v, t, columns, fastest, octaves, FIRST: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr):
    """Returns v (tokens, C) with the key and query turned that begin at column FIRST of each WIDTH columns. t (tokens)
    are places in the grid. N and WIDTH are powers of two, so that every N columns turn by the same angles."""
    POINTS: tl.constexpr = N // 2
    GROUPS: tl.constexpr = v.shape[1] // N
    i = tl.arange(0, POINTS)[None, :]
    angle = angles(t[:, None], (i + POINTS - FIRST // 2 % POINTS) % POINTS, columns, fastest, octaves, N)
    cos, sin = tl.cos(angle)[:, None, :], tl.sin(angle)[:, None, :]  # (tokens, 1, POINTS)
    point = ((tl.arange(0, GROUPS) * POINTS)[:, None] + i) % (WIDTH // 2) - FIRST // 2  # of the key, then of the query
    turns = ((point >= 0) & (point < N))[None, :, :]
    x, y = tl.split(tl.reshape(v, [v.shape[0], GROUPS, POINTS, 2]))
    turned = tl.join(tl.where(turns, x * cos - y * sin, x), tl.where(turns, x * sin + y * cos, y))
    return tl.reshape(turned, v.shape)


def turn_arguments(turned: Optional[Turned]) -> dict[str, Any]:
    """Return the arguments with which a kernel calls `turn`; where nothing turns, N is 0."""
    L, rows, first, N = turned or (1, 1, 0, 0)
    return dict(L=L, columns=L // rows, fastest=FASTEST, octaves=octaves_per_point(N), FIRST=first, N=N)


@kernel()
def _rotate_kernel(
    kq_ptr, stride, sequences, L, columns, fastest, octaves,
    N: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Turns the N points, of key and query, of TOKENS tokens in SEQUENCES sequences; back if `fastest` is negative."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    s = tl.program_id(1) * SEQUENCES + tl.arange(0, SEQUENCES)
    angle = angles(t[:, None], tl.arange(0, BLOCK)[None, :], columns, fastest, octaves, N)
    cos, sin = tl.cos(angle)[None], tl.sin(angle)[None]  # (1, TOKENS, BLOCK)
    n = tl.arange(0, 2 * BLOCK)[None, None, :]
    rows = s[:, None, None].to(tl.int64) * L + t[None, :, None]
    ok = (s < sequences)[:, None, None] & (t < L)[None, :, None] & (n < 2 * N)
    kq = tl.load(kq_ptr + rows * stride + n, mask=ok, other=0).to(tl.float32)
    turned = turn_points(kq, cos, sin)
    tl.store(kq_ptr + rows * stride + n, turned.to(kq_ptr.dtype.element_ty), mask=ok)


def rotate(kq: Tensor, rows: int, back: bool = False) -> None:
    """See `backends.torch.rope.rotate`. Tokens are evenly spaced, as those of a product's columns are."""
    refuse_float64(kq)
    L, N = kq.shape[-2], kq.shape[-1] // 2
    tokens = kq.view(-1, 2 * N)
    block = power_of_2(N)
    per = max(1, _NUMBERS // (2 * block * _SEQUENCES))
    if kq.numel():
        sequences = len(tokens) // L
        with torch.cuda.device_of(kq):
            _rotate_kernel[(ceil_div(L, per), ceil_div(sequences, _SEQUENCES))](
                tokens, tokens.stride(0), sequences, L, L // rows, -FASTEST if back else FASTEST,
                octaves_per_point(N), N=N, BLOCK=block, TOKENS=per, SEQUENCES=_SEQUENCES, num_warps=4)  # fmt: skip
