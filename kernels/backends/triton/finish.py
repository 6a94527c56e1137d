"""The sums that follow the scans' kernels: over blocks of channels, over sequences, over both directions. Each is in a
fixed order, so that gradients have the same bits in every run."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import ceil_div, power_of_2
from .lanes import offset_of


@triton.jit(do_not_specialize=["rows", "blocks"])
def _finish_rows_kernel(
    sums_ptr, dk_ptr, dq_ptr, dA_ptr, rows, blocks,
    GROUPS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    column = tl.arange(0, BLOCK)[None, :]  # of the groups side by side
    ok = (row < rows) & (column < GROUPS * N)
    at = sums_ptr + row * (GROUPS * N) + column
    total = tl.zeros([R, BLOCK], tl.float32)
    for j in range(blocks):
        total += tl.load(at + j * rows.to(tl.int64) * (GROUPS * N), mask=ok, other=0.0)
    at = row * N + column
    tl.store(dk_ptr + at, total.to(dk_ptr.dtype.element_ty), mask=ok & (column < N))
    tl.store(dq_ptr + at - N, total.to(dq_ptr.dtype.element_ty), mask=ok & (column >= N) & (column < 2 * N))
    if GROUPS == 3:
        tl.store(dA_ptr + at - 2 * N, total.to(dA_ptr.dtype.element_ty), mask=ok & (column >= 2 * N))


def sum_blocks(sums: Tensor, *grads: Tensor) -> None:
    """Two or three `grads` (rows, N), in any dtype, from their float32 parts `sums` (blocks, rows, len(grads) N)."""
    N = grads[0].shape[-1]
    rows = grads[0].numel() // N
    block = power_of_2(len(grads) * N)
    height = max(1, 1024 // block)
    with torch.cuda.device_of(sums):
        _finish_rows_kernel[(ceil_div(rows, height),)](
            sums, grads[0], grads[1], grads[-1], rows, len(sums), GROUPS=len(grads), N=N, BLOCK=block, R=height,
            num_warps=4)  # fmt: skip


@triton.jit(do_not_specialize=["parts", "D"])
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
    total = tl.zeros([R, C], tl.float32)
    for i in range(0, parts, R):
        part = i + tl.arange(0, R)[:, None]
        total += tl.load(source + (g * parts + part).to(tl.int64) * D + d, mask=(part < parts) & (d < D), other=0.0)
    tl.store(target + g * D + d, tl.sum(total, 0)[None, :], mask=d < D)


def sum_sequences(*values: Tensor) -> list[Tensor]:
    """Of one or two float32 tensors (G, ..., D) of one shape, contiguous, the sums over all axes between, (G, D)."""
    G, D = values[0].shape[0], values[0].shape[-1]
    sums = [value.new_empty(G, D) for value in values]
    parts = values[0].numel() // (G * D)
    with torch.cuda.device_of(sums[0]):
        _finish_columns_kernel[(ceil_div(D, 32), G, len(values))](
            values[0], values[-1], sums[0], sums[-1], parts, D, R=32, C=32, num_warps=4
        )
    return sums


@triton.jit(do_not_specialize=["tokens", "L", "out_b", "out_l"])
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
    """out (B, L, D), of any strides but the last, = pair[0] + pair[1]; torch.add takes twice as long."""
    B, L, D = out.shape
    block = power_of_2(D)
    with torch.cuda.device_of(out):
        _add_kernel[(B * L,)](
            pair, out, B * L, L, *out.stride()[:2], D=D, BLOCK=block, num_warps=min(4, max(1, block // 256)),
            ALIGNED=D % 16 == 0 and all(s % 16 == 0 for s in out.stride()[:2]))  # fmt: skip
