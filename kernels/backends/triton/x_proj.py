"""`backends.torch.x_proj` on a GPU. Its backward pass is bound by bytes, so both products share one pass over the
tokens: x and its gradient are read, and the gradient written, once.

A program goes through some tiles of tokens with a block of channels, whose sums for the projection stay in registers
until the end. The parts of the programs are added in a fixed order.

The kernel is for Hopper: it would run on others, but nobody has timed it beside their libraries.
"""

import torch
import triton.language as tl
from torch import Tensor

from ...contract import ceil_div, power_of_2
from ..torch import x_proj as plain
from .finish import sum_sequences
from .lanes import kernel, on_hopper, operand
from .tuning import multiprocessors

forward = plain.forward

# Of a tile, and how many are on their way: a program fills most of a multiprocessor's shared memory.
_TOKENS, _CHANNELS, _STAGES = 64, 128, 3
_WIDEST = 64  # numbers of a token that registers hold sums for


@kernel()
def _x_proj_backward_kernel(
    dlow_ptr, x_ptr, proj_ptr, dx_ptr, sums_ptr, tokens, parts,
    D: tl.constexpr, M: tl.constexpr, MB: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles part, part + parts, .. of a set, BT tokens each, and of these BD channels. MB is M or more; sums is
    (S, parts, M, D)."""
    part = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)[None, :]
    s = tl.program_id(2).to(tl.int64)
    m = tl.arange(0, MB)
    proj = operand(tl.load(proj_ptr + (s * M + m[:, None]) * D + d, mask=m[:, None] < M, other=0))  # (MB, BD)
    sums = tl.zeros([BD, MB], tl.float32)
    for tile in tl.range(part, (tokens + BT - 1) // BT, parts, num_stages=STAGES):
        token = tile * BT + tl.arange(0, BT)[:, None]
        there = token < tokens
        row = s * tokens + token  # (BT, 1), int64
        dlow = operand(tl.load(dlow_ptr + row * M + m[None, :], mask=there & (m[None, :] < M), other=0))  # (BT, MB)
        x = operand(tl.load(x_ptr + row * D + d, mask=there, other=0))  # (BT, BD)
        sums = tl.dot(tl.trans(x), dlow, sums)
        dx = tl.load(dx_ptr + row * D + d, mask=there, other=0).to(tl.float32)
        dx = tl.dot(dlow, proj, dx)
        tl.store(dx_ptr + row * D + d, dx.to(dx_ptr.dtype.element_ty), mask=there)
    at = sums_ptr + ((s * parts + part) * M + m[:, None]) * D + d
    tl.store(at, tl.trans(sums), mask=m[:, None] < M)


def _takes(dlow: Tensor, x: Tensor, dx: Tensor) -> bool:
    """Whether the kernel is for these: 16-bit numbers in whole blocks of channels, contiguous, on Hopper."""
    fits = x.dtype.itemsize == 2 and x.shape[2] % _CHANNELS == 0 and dlow.shape[2] <= _WIDEST
    return on_hopper(x.device) and fits and all(value.is_contiguous() for value in (dlow, x, dx))


def backward(dlow: Tensor, x: Tensor, x_proj: Tensor, dx: Tensor) -> Tensor:
    """As `backends.torch.x_proj.backward`; the gradient of x_proj may be float32."""
    (S, T, D), M = x.shape, dlow.shape[2]
    if not _takes(dlow, x, dx):
        return plain.backward(dlow, x, x_proj, dx)
    blocks = D // _CHANNELS
    # One program on each multiprocessor, and at least one part, which writes zeros where there is no token.
    parts = max(1, min(ceil_div(T, _TOKENS), multiprocessors(x.device) // (S * blocks)))
    sums = x.new_empty(S, parts, M * D, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _x_proj_backward_kernel[(parts, blocks, S)](
            dlow, x, x_proj.contiguous(), dx, sums, T, parts, D=D, M=M, MB=max(16, power_of_2(M)), BD=_CHANNELS,
            BT=_TOKENS, STAGES=_STAGES, num_warps=8)  # fmt: skip
    return sum_sequences(sums)[0].view(S, M, D)
