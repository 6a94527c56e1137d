"""`backends.torch.dt_proj` on a GPU. Its backward pass is bound by bytes, so both products share one pass over the
gradient of the step sizes.

A program goes through some tiles of tokens with some channels. Their sums for the projection stay in registers until
the end; what they add to the low rank is written, in float32, and summed over channels afterwards. All sums are in a
fixed order. The kernel is for Hopper, like that of `x_proj`: it would run on others, but nobody has timed it beside
their libraries.
"""

import torch
import triton.language as tl
from torch import Tensor

from ...contract import ceil_div, power_of_2
from ..torch import dt_proj as plain
from .finish import sum_blocks, sum_sequences
from .lanes import kernel, on_hopper, operand
from .tuning import multiprocessors

forward = plain.forward

# Of a tile, channels and tokens: the first that fits. And how many tiles are on their way.
_TILES, _STAGES = ((256, 64), (128, 128)), 3
_WIDEST = 64  # low rank that registers hold sums for


@kernel()
def _dt_proj_backward_kernel(
    dstep_ptr, low_ptr, proj_ptr, partial_ptr, sums_ptr, tokens, parts,
    D: tl.constexpr, R: tl.constexpr, RB: tl.constexpr, STRIDE: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles part, part + parts, .. of a set, BT tokens each, and of these BD channels. RB is R or more, STRIDE how far
    the tokens of low are apart. partial is (blocks, S, T, R), sums (S, parts, D, R)."""
    part = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    s = tl.program_id(2).to(tl.int64)
    sets = tl.num_programs(2)
    r = tl.arange(0, RB)[None, :]
    proj = operand(tl.load(proj_ptr + (s * D + d[:, None]) * R + r, mask=r < R, other=0))  # (BD, RB)
    sums = tl.zeros([BD, RB], tl.float32)
    for tile in tl.range(part, (tokens + BT - 1) // BT, parts, num_stages=STAGES):
        token = tile * BT + tl.arange(0, BT)[:, None]
        there = token < tokens
        row = s * tokens + token  # (BT, 1), int64
        low = operand(tl.load(low_ptr + row * STRIDE + r, mask=there & (r < R), other=0))  # (BT, RB)
        dstep = operand(tl.load(dstep_ptr + row * D + d[None, :], mask=there, other=0))  # (BT, BD)
        partial = tl.dot(dstep, proj)
        at = partial_ptr + (tl.program_id(1) * sets * tokens.to(tl.int64) + row) * R + r
        tl.store(at, partial, mask=there & (r < R))
        sums = tl.dot(tl.trans(dstep), low, sums)
    tl.store(sums_ptr + ((s * parts + part) * D + d[:, None]) * R + r, sums, mask=r < R)


def _takes(dstep: Tensor, low: Tensor, dlow: Tensor, R: int) -> bool:
    """Whether the kernel is for these: 16-bit numbers in whole blocks of channels, contiguous, on Hopper."""
    fits = dstep.dtype.itemsize == 2 and dstep.shape[2] % _TILES[-1][0] == 0 and 0 < R <= _WIDEST and R % 2 == 0
    return on_hopper(dstep.device) and fits and all(value.is_contiguous() for value in (dstep, low, dlow))


def backward(dstep: Tensor, low: Tensor, dt_proj: Tensor, dlow: Tensor) -> Tensor:
    """As `backends.torch.dt_proj.backward`; the gradient of dt_proj may be float32."""
    (S, T, D), R = dstep.shape, dt_proj.shape[2]
    if not T or not _takes(dstep, low, dlow, R):
        return plain.backward(dstep, low, dt_proj, dlow)
    channels, tokens = next(tile for tile in _TILES if D % tile[0] == 0)
    blocks = D // channels
    parts = max(1, min(ceil_div(T, tokens), multiprocessors(dstep.device) // (S * blocks)))
    partial = dstep.new_empty(blocks, S, 1, T, R, dtype=torch.float32)
    sums = dstep.new_empty(S, parts, D * R, dtype=torch.float32)
    with torch.cuda.device_of(dstep):
        _dt_proj_backward_kernel[(parts, blocks, S)](
            dstep, low, dt_proj.contiguous(), partial, sums, T, parts, D=D, R=R, RB=max(16, power_of_2(R)),
            STRIDE=low.shape[2], BD=channels, BT=tokens, STAGES=_STAGES, num_warps=8)  # fmt: skip
    left, right = dlow[:, None, :, :R].chunk(2, -1)  # sum_blocks writes two tensors: the halves of the columns
    sum_blocks(partial, left, right, dkq=(left, right))
    return sum_sequences(sums)[0].view(S, D, R)
