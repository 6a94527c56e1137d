"""The sums that follow the kernels: over blocks of channels, over sequences, over both directions. They are added in a
fixed order, so gradients have the same bits in every run."""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import Pair, ceil_div, power_of_2
from ..torch.unit import Raw
from . import unit
from .lanes import kernel, offset_of


@kernel()
def _finish_rows_kernel(
    sums_ptr, dk_ptr, dq_ptr, dA_ptr, rows, blocks,
    GROUPS: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Sums the blocks' rows. STRIDE, between rows of dk and dq, is a constant; else numbers are stored one by one."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    column = tl.arange(0, BLOCK)[None, :]  # the groups stand side by side
    ok = (row < rows) & (column < GROUPS * N)
    at = sums_ptr + row * (GROUPS * N) + column
    total = tl.zeros([R, BLOCK], tl.float32)
    for j in range(blocks):
        total += tl.load(at + j * rows.to(tl.int64) * (GROUPS * N), mask=ok, other=0.0)
    at = row * STRIDE + column
    tl.store(dk_ptr + at, total.to(dk_ptr.dtype.element_ty), mask=ok & (column < N))
    if GROUPS > 1:
        tl.store(dq_ptr + at - N, total.to(dq_ptr.dtype.element_ty), mask=ok & (column >= N) & (column < 2 * N))
    if GROUPS == 3:
        tl.store(dA_ptr + row * N + column - 2 * N, total.to(dA_ptr.dtype.element_ty), mask=ok & (column >= 2 * N))


def sum_blocks(
    sums: Tensor, k: Tensor, q: Tensor, *A: Tensor, dkq: Optional[Pair] = None, raw: Optional[Raw] = None
) -> list[Tensor]:
    """Return the gradients (G, B, L, N) of k, q and perhaps a token's A, from their float32 parts `sums`
    (blocks, G, B, L, 2 N or 3 N). Those of k and q are written to `dkq`, if given, or with `raw` those of `raw`."""
    if dkq and raw and not A:
        unit.backward(raw.k, raw.q, *dkq, raw.turned, sums)
        return [*dkq]
    (_, G, B, L, _), N = sums.shape, k.shape[-1]
    # If directions are summed afterwards, all digits are kept.
    grads = [
        sums.new_empty(G, B, L, N, dtype=value.dtype if value.ndim == 4 or G == 1 else torch.float32)
        for value in ((k, q, *A) if dkq is None else A)
    ]
    grads = [*(dkq or ()), *grads]
    sum_rows(sums, *grads)
    if dkq and raw:
        unit.backward(raw.k, raw.q, *dkq, raw.turned)
    return grads


def sum_rows(sums: Tensor, *out: Tensor) -> None:
    """Write the sums over the first axis of contiguous float32 `sums` to one to three tensors, whose columns stand side
    by side in it. The rows of the first two are evenly spaced, those of the third contiguous."""
    N = out[0].shape[-1]
    block = power_of_2(len(out) * N)
    height = max(1, 1024 // block)
    rows = out[0].numel() // N
    with torch.cuda.device_of(sums):
        _finish_rows_kernel[(ceil_div(rows, height),)](
            sums, out[0], out[min(1, len(out) - 1)], out[-1], rows, len(sums), GROUPS=len(out), N=N,
            STRIDE=out[0].stride(-2), BLOCK=block, R=height, num_warps=4)  # fmt: skip


@triton.jit
def sum_parts(row, d, parts, D, R: tl.constexpr, C: tl.constexpr):
    """Sums columns d (1, C) of `parts` rows of D numbers, the first at `row`."""
    total = tl.zeros([R, C], tl.float32)
    for i in range(0, parts, R):
        part = i + tl.arange(0, R)[:, None]
        total += tl.load(row + part.to(tl.int64) * D + d, mask=(part < parts) & (d < D), other=0.0)
    return tl.sum(total, 0)[None, :]


@kernel()
def _finish_columns_kernel(
    first_ptr, last_ptr, first_out_ptr, last_out_ptr, parts, D, R: tl.constexpr, C: tl.constexpr
):
    d = tl.program_id(0) * C + tl.arange(0, C)[None, :]
    g = tl.program_id(1)
    source = first_ptr
    target = first_out_ptr
    if tl.program_id(2) == 1:
        source = last_ptr
        target = last_out_ptr
    total = sum_parts(source + (g * parts).to(tl.int64) * D, d, parts, D, R, C)
    tl.store(target + g * D + d, total.to(target.dtype.element_ty), mask=d < D)


def sum_sequences(*values: Tensor, out: Optional[list[Tensor]] = None) -> list[Tensor]:
    """Sum one or two contiguous float32 tensors (G, ..., D) of one shape over all axes between: (G, D) each, which may
    be given as `out`."""
    G, D = values[0].shape[0], values[0].shape[-1]
    sums = [value.new_empty(G, D) for value in values] if out is None else out
    parts = values[0].numel() // (G * D)
    height, width = (4, 256) if parts <= 4 else (256, 8)  # few parts leave most rows of a high block empty
    with torch.cuda.device_of(sums[0]):
        _finish_columns_kernel[(ceil_div(D, width), G, len(values))](
            values[0], values[-1], sums[0], sums[-1], parts, D, R=height, C=width, num_warps=8
        )
    return sums


@kernel()
def _finish_taps_kernel(
    sums_ptr, dweight_ptr, dbias_ptr, parts, D: tl.constexpr, K: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = G * (K + 1) * D
    column = tl.program_id(0) * C + tl.arange(0, C)[None, :]
    total = sum_parts(sums_ptr, column, parts, SIZE, R, C)
    ok = column < SIZE
    d, tap = column % D, column // D % (K + 1)
    channel = column // (D * (K + 1)) * D + d  # counted over all directions
    tl.store(dweight_ptr + channel * K + tap, total, mask=ok & (tap < K))
    tl.store(dbias_ptr + channel, total, mask=ok & (tap == K))


def sum_taps(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of a convolution's weight, (G, D, K), and bias, (G, D), from their float32 parts
    (parts, G, K + 1, D)."""
    parts, G, taps, D = sums.shape
    dweight, dbias = sums.new_empty(G, D, taps - 1), sums.new_empty(G, D)
    with torch.cuda.device_of(sums):
        _finish_taps_kernel[(ceil_div(G * taps * D, 16),)](
            sums, dweight, dbias, parts, D=D, K=taps - 1, G=G, R=64, C=16, num_warps=4
        )
    return dweight, dbias


@kernel()
def _add_kernel(
    pair_ptr, out_ptr, tokens, L, out_b, out_l, D: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    ok = d < D
    first = tl.load(pair_ptr + token * D + d, mask=ok, other=0).to(tl.float32)
    second = tl.load(pair_ptr + (token + tokens) * D + d, mask=ok, other=0).to(tl.float32)
    at = offset_of(token // L, out_b, ALIGNED) + offset_of(token % L, out_l, ALIGNED)
    tl.store(out_ptr + at + d, (first + second).to(out_ptr.dtype.element_ty), mask=ok)


def add_directions(pair: Tensor, out: Tensor) -> None:
    """Write pair[0] + pair[1] to `out` (B, L, D), whose last axis is contiguous; torch.add takes twice as long."""
    B, L, D = out.shape
    block = power_of_2(D)
    with torch.cuda.device_of(out):
        _add_kernel[(B * L,)](
            pair, out, B * L, L, *out.stride()[:2], D=D, BLOCK=block, num_warps=min(4, max(1, block // 256)),
            ALIGNED=D % 16 == 0 and all(s % 16 == 0 for s in out.stride()[:2]))  # fmt: skip
