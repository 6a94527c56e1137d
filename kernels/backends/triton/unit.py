"""`backends.torch.unit` on a GPU: one launch takes keys and queries."""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import Pair, ceil_div, power_of_2
from ..torch.rope import FASTEST, Turned, octaves_per_point
from ..torch.unit import EPS
from .lanes import kernel
from .rope import angles, turn_points

_NUMBERS = 2048  # in a tile
_BACK_NUMBERS = 1024  # the same in the backward pass
_SEQUENCES = 8  # of a tile whose vectors were turned, which share the angles of their tokens


@triton.jit
def _places(stride, rows, n, ok, N: tl.constexpr):
    """Returns where vectors of N numbers are, and which exist: `rows` and `ok` are (S, T), and n is (BLOCK)."""
    return rows[:, :, None] * stride + n[None, None, :], ok[:, :, None] & (n < N)[None, None, :]


@triton.jit
def _load(ptr, stride, rows, n, ok, N: tl.constexpr):
    at, ok = _places(stride, rows, n, ok, N)
    return tl.load(ptr + at, mask=ok, other=0).to(tl.float32)


@triton.jit
def _store(ptr, v, stride, rows, n, ok, N: tl.constexpr):
    at, ok = _places(stride, rows, n, ok, N)
    tl.store(ptr + at, v.to(ptr.dtype.element_ty), mask=ok)


@triton.jit
def _normed(ptr, stride, rows, n, ok, eps, N: tl.constexpr):
    v = _load(ptr, stride, rows, n, ok, N)
    scale = 1.0 / tl.sqrt(tl.sum(v * v, 2) + eps)
    return v * scale[:, :, None], scale


@triton.jit
def _write(v_ptr, unit_ptr, stride, rows, n, count, eps, N: tl.constexpr):
    unit, _ = _normed(v_ptr, stride, rows, n, rows < count, eps, N)
    _store(unit_ptr, unit, N, rows, n, rows < count, N)


@triton.jit
def _change(v_ptr, dv_ptr, dv, stride, dv_stride, rows, n, there, eps, cos, sin, N: tl.constexpr, TURNED: tl.constexpr):
    """Stores the gradient of v, from that of v^."""
    unit, scale = _normed(v_ptr, stride, rows, n, there, eps, N)
    if N == 1:
        across = dv * (eps * scale * scale)[:, :, None]
    else:
        across = dv - unit * tl.sum(unit * dv, 2)[:, :, None]
    dv = across * scale[:, :, None]
    if TURNED:
        dv = turn_points(dv, cos, sin)
    _store(dv_ptr, dv, dv_stride, rows, n, there, N)


# Strides are constants of both kernels; else numbers would be loaded one by one.
@kernel()
def _unit_kernel(
    k_ptr, q_ptr, unit_k_ptr, unit_q_ptr, k_rows, q_rows, eps, k_stride: tl.constexpr, q_stride: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[None, :]
    n = tl.arange(0, BLOCK)
    _write(k_ptr, unit_k_ptr, k_stride, rows, n, k_rows, eps, N)
    _write(q_ptr, unit_q_ptr, q_stride, rows, n, q_rows, eps, N)


@kernel()
def _unit_backward_kernel(
    k_ptr, q_ptr, dk_ptr, dq_ptr, parts_ptr, k_rows, q_rows, blocks, eps, L, columns, fastest, octaves,
    k_stride: tl.constexpr, q_stride: tl.constexpr, dk_stride: tl.constexpr, dq_stride: tl.constexpr, N: tl.constexpr,
    TOKENS: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Takes TOKENS tokens in SEQUENCES sequences of L. If nothing was turned, all rows are one sequence. With PARTS the
    gradients are sums over `blocks`, in their order."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    s = tl.program_id(1) * SEQUENCES + tl.arange(0, SEQUENCES)
    rows = s[:, None].to(tl.int64) * L + t[None, :]
    there = (t < L)[None, :]
    n = tl.arange(0, BLOCK)
    cos = 0.0
    sin = 0.0
    if TURNED:
        angle = angles(t[:, None], tl.arange(0, BLOCK // 2)[None, :], columns, fastest, octaves, N)
        cos, sin = tl.cos(angle)[None], tl.sin(angle)[None]  # (1, TOKENS, BLOCK / 2)
    of_k = there & (rows < k_rows)
    of_q = there & (rows < q_rows)
    if PARTS:
        dk = tl.zeros([SEQUENCES, TOKENS, BLOCK], tl.float32)
        dq = dk
        for j in range(blocks):
            part_ptr = parts_ptr + j * k_rows.to(tl.int64) * (2 * N)
            dk += _load(part_ptr, 2 * N, rows, n, of_k, N)
            dq += _load(part_ptr + N, 2 * N, rows, n, of_q, N)
    else:
        dk = _load(dk_ptr, dk_stride, rows, n, of_k, N)
        dq = _load(dq_ptr, dq_stride, rows, n, of_q, N)
    _change(k_ptr, dk_ptr, dk, k_stride, dk_stride, rows, n, of_k, eps, cos, sin, N, TURNED)
    _change(q_ptr, dq_ptr, dq, q_stride, dq_stride, rows, n, of_q, eps, cos, sin, N, TURNED)


def _rows(v: Tensor) -> Tensor:
    """Flatten (.., N) to (rows, N): a view if rows are evenly spaced, as those of a product's columns are."""
    v = v.reshape(-1, v.shape[-1])
    return v if v.stride(1) == 1 else v.contiguous()


def forward(k: Tensor, q: Tensor) -> Pair:
    """See `backends.torch.unit.forward`."""
    unit_k, unit_q = k.new_empty(k.shape), q.new_empty(q.shape)
    k, q = _rows(k), _rows(q)
    N, block = k.shape[1], power_of_2(k.shape[1])
    rows = max(1, _NUMBERS // block)
    if k.numel() + q.numel():
        with torch.cuda.device_of(k):
            _unit_kernel[(ceil_div(max(len(k), len(q)), rows),)](
                k, q, unit_k, unit_q, len(k), len(q), EPS, k.stride(0), q.stride(0), N=N, ROWS=rows, BLOCK=block,
                num_warps=4)  # fmt: skip
    return unit_k, unit_q


def backward(
    k: Tensor, q: Tensor, dk: Tensor, dq: Tensor, turned: Optional[Turned] = None, parts: Optional[Tensor] = None
) -> None:
    """See `backends.torch.unit.backward`. The rows of `dk` and `dq` are evenly spaced. With contiguous float32 `parts`
    (blocks, .., 2 N) the gradients of k^ and q^ are the sums of these over the blocks, and `dk` and `dq`, of as many
    rows, are only written."""
    k, q, dk, dq = tensors = _rows(k), _rows(q), dk.view(-1, dk.shape[-1]), dq.view(-1, dq.shape[-1])
    N, block, most = k.shape[1], power_of_2(k.shape[1]), max(len(k), len(q))
    L, columns, sequences = (turned.L, turned.L // turned.rows, _SEQUENCES) if turned else (most, 1, 1)
    tokens = max(1, _BACK_NUMBERS // (block * sequences))
    if k.numel() + q.numel():
        with torch.cuda.device_of(k):
            _unit_backward_kernel[(ceil_div(L, tokens), ceil_div(most // L, sequences))](
                *tensors, dk if parts is None else parts, len(k), len(q), 0 if parts is None else len(parts), EPS, L,
                columns, -FASTEST, octaves_per_point(N), *(one.stride(0) for one in tensors), N=N, TOKENS=tokens,
                SEQUENCES=sequences, BLOCK=block, PARTS=parts is not None, TURNED=turned is not None,
                num_warps=4)  # fmt: skip
