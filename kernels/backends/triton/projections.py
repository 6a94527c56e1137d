"""`backends.torch.projections` on a GPU. Memory bounds all of it. So sets that share an x read it once, and keys and
queries turn, and are scaled to unit length, in float32, before they are stored. A backward pass makes both of its
products in one pass over the tokens.

Forward, a program has a tile of tokens and goes through all channels. Backward, it goes through some tiles of tokens
with a block of channels, and keeps their sums for the projection in registers until the end. All sums are in a fixed
order. The kernels run on Hopper only: elsewhere nobody has timed them against torch.
"""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import ceil_div, power_of_2
from ..torch import projections as plain
from ..torch.rope import Turned
from ..torch.unit import EPS
from .finish import sum_parts, sum_rows
from .lanes import kernel, on_hopper, operand
from .rope import rotate, turn, turn_arguments
from .tuning import multiprocessors

_TOKENS = 64  # of a tile
_BACK_TOKENS = 32  # of a tile in `x_proj_backward`: small tiles leave room to load more of them ahead
_BLOCK = 64  # channels that any width is a multiple of
_STAGES = 3  # tiles that are being loaded: with 128 channels or more, `dt_proj_backward` fills the shared memory
_WIDEST = 64  # the most numbers of a token for which registers can hold sums
_PAD_BLOCK = 1024


@triton.jit
def _plain(i, ROWS: tl.constexpr, INNER: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr):
    """Returns which of the numbers i of a wide tensor (.., ROWS, INNER) are in the plain one, and where: rows R to
    WIDTH are not."""
    GAP: tl.constexpr = WIDTH - R
    row = i // INNER % ROWS
    after = row >= WIDTH
    return after | (row < R), i - (i // (ROWS * INNER) * GAP + tl.where(after, GAP, 0)) * INNER


@triton.jit
def _widen(plain_ptr, wide_ptr, i, size, ROWS: tl.constexpr, INNER: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr):
    """Copies numbers i of a wide tensor from the plain one, or makes them zero."""
    there, at = _plain(i, ROWS, INNER, R, WIDTH)
    value = tl.load(plain_ptr + at, mask=there & (i < size), other=0).to(tl.float32)
    tl.store(wide_ptr + i, value.to(wide_ptr.dtype.element_ty), mask=i < size)


@kernel(specialized=["x_size", "dt_size", "x_blocks"])
def _pad_kernel(
    x_ptr, dt_ptr, wide_x_ptr, wide_dt_ptr, x_size, dt_size, x_blocks,
    ROWS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Takes both matrices at once: they are so small that a launch costs more than the copy."""
    block = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if block < x_blocks:
        _widen(x_ptr, wide_x_ptr, block * BLOCK + i, x_size, ROWS, D, R, WIDTH)
    else:
        _widen(dt_ptr, wide_dt_ptr, (block - x_blocks) * BLOCK + i, dt_size, WIDTH, 1, R, WIDTH)


def pad(x_proj: Tensor, dt_proj: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `backends.torch.projections.pad`."""
    (S, rows, D), R = x_proj.shape, dt_proj.shape[2]
    if width == R and x_proj.dtype == dt_proj.dtype == dtype:
        return x_proj, dt_proj
    wide_x = x_proj.new_empty(S, width - R + rows, D, dtype=dtype)
    wide_dt = dt_proj.new_empty(S, dt_proj.shape[1], width, dtype=dtype)
    x_blocks, dt_blocks = (ceil_div(wide.numel(), _PAD_BLOCK) for wide in (wide_x, wide_dt))
    with torch.cuda.device_of(wide_x):
        _pad_kernel[(x_blocks + dt_blocks,)](
            x_proj, dt_proj, wide_x, wide_dt, wide_x.numel(), wide_dt.numel(), x_blocks, ROWS=wide_x.shape[1], D=D, R=R,
            WIDTH=width, BLOCK=_PAD_BLOCK, num_warps=4)  # fmt: skip
    return wide_x, wide_dt


@triton.jit
def _narrow(
    plain_ptr, wide_ptr, s, parts, i, SIZE: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, R: tl.constexpr,
    WIDTH: tl.constexpr, HEIGHT: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Writes the sums of the parts of set s to the plain tensor, columns i of the wide one."""
    total = sum_parts(wide_ptr + (s * parts).to(tl.int64) * SIZE, i, parts, SIZE, HEIGHT, C)  # (1, C)
    there, at = _plain(s * SIZE + i, ROWS, INNER, R, WIDTH)
    tl.store(plain_ptr + at, total.to(plain_ptr.dtype.element_ty), mask=there & (i < SIZE))


@kernel(specialized=["x_blocks"])
def _unpad_kernel(
    x_ptr, dt_ptr, wide_x_ptr, wide_dt_ptr, x_parts, dt_parts, x_blocks,
    ROWS: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Takes both gradients of set s, and sums their parts in a fixed order."""
    block = tl.program_id(0)
    s = tl.program_id(1)
    i = tl.arange(0, C)[None, :]
    if block < x_blocks:
        _narrow(x_ptr, wide_x_ptr, s, x_parts, block * C + i, ROWS * D, ROWS, D, R, WIDTH, HEIGHT, C)
    else:
        i += (block - x_blocks) * C
        _narrow(dt_ptr, wide_dt_ptr, s, dt_parts, i, STEPS * WIDTH, WIDTH, 1, R, WIDTH, HEIGHT, C)


def unpad(wide_x: Tensor, wide_dt: Tensor, x_proj: Tensor, dt_proj: Tensor) -> tuple[Tensor, Tensor]:
    """See `backends.torch.projections.unpad`. Here the gradients may be in parts, (S, parts, ..), to be summed."""
    pairs = (wide_x, x_proj), (wide_dt, dt_proj)
    if all(wide.shape == plain.shape and wide.dtype == plain.dtype for wide, plain in pairs):
        return wide_x, wide_dt
    dx_proj, ddt_proj = x_proj.new_empty(x_proj.shape), dt_proj.new_empty(dt_proj.shape)
    (S, steps, R), (rows, D), width = dt_proj.shape, wide_x.shape[-2:], wide_dt.shape[-1]
    parts = [1 if wide.ndim == 3 else wide.shape[1] for wide in (wide_x, wide_dt)]
    height = 4 if max(parts) <= 4 else 32  # few parts leave most rows of a high block empty
    columns = 1024 // height
    x_blocks = ceil_div(rows * D, columns)
    with torch.cuda.device_of(wide_x):
        _unpad_kernel[(x_blocks + ceil_div(steps * width, columns), S)](
            dx_proj, ddt_proj, wide_x, wide_dt, *parts, x_blocks, ROWS=rows, D=D, STEPS=steps, R=R, WIDTH=width,
            HEIGHT=height, C=columns, num_warps=4)  # fmt: skip
    return dx_proj, ddt_proj


@triton.jit
def _unit(low, vector, eps, COUNT: tl.constexpr):
    """Scales COUNT vectors in each row of low (tokens, C) to unit length. `vector` (C) has the number of each column's
    vector, and -1 where it is in none."""
    scale = tl.zeros(low.shape, tl.float32)
    for i in tl.static_range(COUNT):
        own = (vector == i)[None, :]
        square = tl.sum(tl.where(own, low * low, 0.0), 1)
        scale = tl.where(own, (1.0 / tl.sqrt(square + eps))[:, None], scale)
    return low * scale


@kernel()
def _x_proj_forward_kernel(
    x_ptr, proj_ptr, low_ptr, tokens, L, columns, fastest, octaves, eps,
    D: tl.constexpr, M: tl.constexpr, MB: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, SHARED: tl.constexpr,
    FIRST: tl.constexpr, N: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Takes BT tokens of SHARED sets with one x. The sets' columns stand side by side, MB for each, of which M exist.
    With N > 0 keys and queries of N columns turn. With UNITS > 0 those of UNITS columns, the last ones, are stored a
    second time at unit length."""
    s = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    there = (token < tokens)[:, None]
    column = tl.arange(0, SHARED * MB)
    m = column % MB
    exists = m < M
    d = tl.arange(0, BD)[None, :]
    x_at = x_ptr + (s * tokens + token)[:, None] * D + d
    proj_at = proj_ptr + ((s + column // MB) * M + m)[:, None] * D + d
    low = tl.zeros([BT, SHARED * MB], tl.float32)
    for first in tl.range(0, D, BD, num_stages=STAGES):
        x = operand(tl.load(x_at + first, mask=there, other=0))  # (BT, BD)
        proj = operand(tl.load(proj_at + first, mask=exists[:, None], other=0))  # (SHARED MB, BD)
        low = tl.dot(x, tl.trans(proj), low)
    if N > 0:
        low = turn(low, token % L, columns, fastest, octaves, FIRST, N, MB)
    at = (((s + column // MB) * tokens)[None, :] + token[:, None]) * (M + 2 * UNITS) + m[None, :]
    tl.store(low_ptr + at, low.to(low_ptr.dtype.element_ty), mask=there & exists[None, :])
    if UNITS > 0:
        BEFORE: tl.constexpr = M - 2 * UNITS
        ours = exists & (m >= BEFORE)
        vector = tl.where(ours, column // MB * 2 + (m - BEFORE) // UNITS, -1)
        unit = _unit(low, vector, eps, 2 * SHARED).to(low_ptr.dtype.element_ty)
        tl.store(low_ptr + at + 2 * UNITS, unit, mask=there & ours[None, :])


@kernel()
def _x_proj_backward_kernel(
    dlow_ptr, x_ptr, proj_ptr, dx_ptr, sums_ptr, tokens, parts,
    D: tl.constexpr, M: tl.constexpr, MB: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, SHARED: tl.constexpr,
    ADD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Takes tiles part, part + parts, .. of SHARED sets with one x, BT tokens each, and of these BD channels. The sets'
    columns stand side by side, as in the forward pass. sums is (S, parts, M, D). With ADD dx is added to,
    else written."""
    part = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)[None, :]
    s = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, SHARED * MB)
    m = column % MB
    exists = m < M
    of_set = s + column // MB
    proj_at = proj_ptr + (of_set * M + m)[:, None] * D + d
    proj = operand(tl.load(proj_at, mask=exists[:, None], other=0))  # (SHARED MB, BD)
    dlow_at = dlow_ptr + (of_set * tokens * M + m)[None, :]
    sums = tl.zeros([BD, SHARED * MB], tl.float32)
    for tile in tl.range(part, (tokens + BT - 1) // BT, parts, num_stages=STAGES):
        token = tile * BT + tl.arange(0, BT)
        there = (token < tokens)[:, None]
        row = (s * tokens + token)[:, None]  # (BT, 1), int64
        x = operand(tl.load(x_ptr + row * D + d, mask=there, other=0))  # (BT, BD)
        if ADD:
            dx = tl.load(dx_ptr + row * D + d, mask=there, other=0).to(tl.float32)
            for j in tl.static_range(1, SHARED):
                dx += tl.load(dx_ptr + (row + j * tokens) * D + d, mask=there, other=0).to(tl.float32)
        else:
            dx = tl.zeros([BT, BD], tl.float32)
        at = dlow_at + token[:, None].to(tl.int64) * M
        dlow = operand(tl.load(at, mask=there & exists[None, :], other=0))  # (BT, SHARED MB)
        sums = tl.dot(tl.trans(x), dlow, sums)
        dx = tl.dot(dlow, proj, dx)
        tl.store(dx_ptr + row * D + d, dx.to(dx_ptr.dtype.element_ty), mask=there)
    at = sums_ptr + ((of_set * parts + part) * M + m)[:, None] * D + d
    tl.store(at, tl.trans(sums), mask=exists[:, None])


def _suits(like: Tensor, D: int) -> bool:
    """Tell whether kernels are for such tokens of D channels: on Hopper, 16-bit numbers in whole blocks of channels."""
    return like.dtype.itemsize == 2 and D % _BLOCK == 0 and on_hopper(like.device)


def _takes(tokens: Tensor, *others: Tensor) -> bool:
    """Tell whether a kernel can take these, all contiguous."""
    return _suits(tokens, tokens.shape[2]) and all(value.is_contiguous() for value in (tokens, *others))


def _parts(tokens: Tensor, blocks: int, programs: int = 1) -> int:
    """Return the number of parts of a set's tokens: as many as give each multiprocessor so many `programs`, and at
    least one, which writes zeros where there is no token."""
    S, T, _ = tokens.shape
    return max(1, min(ceil_div(T, _TOKENS), programs * multiprocessors(tokens.device) // (S * blocks)))


def appends_units(x: Tensor, D: int, M: int, turned: Optional[Turned]) -> bool:
    """See `backends.torch.projections.appends_units`. The forward kernel takes what this is true of."""
    return M <= _WIDEST and (turned is None or power_of_2(turned.N) == turned.N) and _suits(x, D)


def x_proj_forward(x: Tensor, projection: Tensor, turned: Optional[Turned] = None, units: int = 0) -> Tensor:
    """See `backends.torch.projections.x_proj_forward`."""
    (S, M, D), T = projection.shape, x.shape[1]
    if not appends_units(x, D, M, turned):
        low = plain.x_proj_forward(x, projection)
        if turned:
            rotate(turned.of(low), turned.rows)
        return low
    low = x.new_empty(S, T, M + 2 * units)
    stages = _STAGES if D % 128 == 0 else 2
    if T:
        with torch.cuda.device_of(x):
            _x_proj_forward_kernel[(ceil_div(T, _TOKENS), len(x))](
                x.contiguous(), projection.contiguous(), low, T, eps=EPS, D=D, M=M, MB=max(16, power_of_2(M)),
                BD=_BLOCK, BT=_TOKENS, SHARED=S // len(x), UNITS=units, STAGES=stages, **turn_arguments(turned),
                num_warps=4)  # fmt: skip
    return low


def x_proj_backward(dlow: Tensor, x: Tensor, projection: Tensor, dx: Tensor, add: bool = True) -> Tensor:
    """See `backends.torch.projections.x_proj_backward`; here the gradient of the projection may be in float32 parts for
    `unpad`, (S, parts, M, D)."""
    (S, T, M), D = dlow.shape, x.shape[2]
    if M > _WIDEST or not _takes(x, dlow, dx):
        return plain.x_proj_backward(dlow, x, projection, dx, add)
    # Where blocks are narrow, two programs of a multiprocessor take turns.
    channels, stages, warps, programs = (128, 4, 8, 1) if D % 128 == 0 else (_BLOCK, 3, 4, 2)
    blocks = D // channels
    parts = _parts(x, blocks, programs)
    sums = x.new_empty(S, parts, M, D, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _x_proj_backward_kernel[(parts, blocks, len(x))](
            dlow, x, projection.contiguous(), dx, sums, T, parts, D=D, M=M, MB=max(16, power_of_2(M)), BD=channels,
            BT=_BACK_TOKENS, SHARED=S // len(x), ADD=add, STAGES=stages, num_warps=warps)  # fmt: skip
    return sums


@kernel()
def _dt_proj_backward_kernel(
    dstep_ptr, low_ptr, proj_ptr, partial_ptr, sums_ptr, tokens, parts,
    D: tl.constexpr, R: tl.constexpr, RB: tl.constexpr, STRIDE: tl.constexpr, OUT: tl.constexpr, BD: tl.constexpr,
    COUNT: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Takes tiles part, part + parts, .. of a set, BT tokens each, and of these COUNT times BD channels. What they add
    to dlow goes to partial, (blocks, S, T, OUT), and is summed over the blocks afterwards; with one block that is dlow.
    RB is R or more, STRIDE how far the tokens of low are apart. sums is (S, parts, D, R)."""
    part = tl.program_id(0)
    d = tl.program_id(1) * (BD * COUNT) + tl.arange(0, BD)
    s = tl.program_id(2).to(tl.int64)
    sets = tl.num_programs(2)
    r = tl.arange(0, RB)[None, :]
    projs = ()
    sums = ()
    for i in tl.static_range(COUNT):
        proj_at = proj_ptr + (s * D + i * BD + d[:, None]) * R + r
        projs = projs + (operand(tl.load(proj_at, mask=r < R, other=0)),)  # (BD, RB)
        sums = sums + (tl.zeros([BD, RB], tl.float32),)
    for tile in tl.range(part, (tokens + BT - 1) // BT, parts, num_stages=STAGES):
        token = tile * BT + tl.arange(0, BT)[:, None]
        there = token < tokens
        row = s * tokens + token  # (BT, 1), int64
        low = operand(tl.load(low_ptr + row * STRIDE + r, mask=there & (r < R), other=0))  # (BT, RB)
        partial = tl.zeros([BT, RB], tl.float32)
        new = ()
        for i in tl.static_range(COUNT):
            dstep = operand(tl.load(dstep_ptr + row * D + i * BD + d[None, :], mask=there, other=0))  # (BT, BD)
            # In the other order the tensor cores would wait: sums are still in the making when partial is cleared.
            new = new + (tl.dot(tl.trans(dstep), low, sums[i]),)
            partial = tl.dot(dstep, projs[i], partial)
        sums = new
        at = partial_ptr + (tl.program_id(1) * sets * tokens.to(tl.int64) + row) * OUT + r
        tl.store(at, partial.to(partial_ptr.dtype.element_ty), mask=there & (r < R))
    for i in tl.static_range(COUNT):
        at = sums_ptr + ((s * parts + part) * D + i * BD + d[:, None]) * R + r
        tl.store(at, sums[i], mask=r < R)


def dt_proj_backward(dstep: Tensor, low: Tensor, projection: Tensor, dlow: Tensor) -> Tensor:
    """See `backends.torch.projections.dt_proj_backward`; here the gradient of the projection may be in float32 parts
    for `unpad`, (S, parts, D, R)."""
    (S, T, D), R = dstep.shape, projection.shape[2]
    if not T or not 0 < R <= _WIDEST or not _takes(dstep, low, dlow):
        return plain.dt_proj_backward(dstep, low, projection, dlow)
    channels, warps, programs = (128, 8, 1) if D % 128 == 0 else (_BLOCK, 4, 2)
    most = 3 if R <= 32 else 2  # shared memory also holds their projections
    count = next(count for count in range(most, 0, -1) if D % (count * channels) == 0)
    blocks = D // (count * channels)
    parts = _parts(dstep, blocks, programs)
    partial = dlow if blocks == 1 else dstep.new_empty(blocks, S, T, R, dtype=torch.float32)
    sums = dstep.new_empty(S, parts, D, R, dtype=torch.float32)
    with torch.cuda.device_of(dstep):
        _dt_proj_backward_kernel[(parts, blocks, S)](
            dstep, low, projection.contiguous(), partial, sums, T, parts, D=D, R=R, RB=max(16, power_of_2(R)),
            STRIDE=low.shape[2], OUT=partial.shape[-1], BD=channels, COUNT=count, BT=_TOKENS, STAGES=_STAGES,
            num_warps=warps)  # fmt: skip
    if blocks > 1:
        sum_rows(partial, dlow[..., :R])
    return sums
