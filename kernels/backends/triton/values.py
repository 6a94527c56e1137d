"""`backends.torch.values` on a GPU: each tensor is read and written once."""

import torch
import triton.language as tl
from torch import Tensor

from ...contract import ceil_div
from .lanes import LOG2E, kernel, row_at
from .launch import row_options

_NUMBERS = 2048  # of a tensor, that a program holds at once


@kernel()
def _values_kernel(
    z_ptr, v_ptr, rows, L, z_b, z_l, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr
):
    d = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok = (row < rows)[:, None] & (d < D)
    z = tl.load(z_ptr + row_at(row, L, z_b, z_l, ALIGNED)[:, None] + d, mask=ok, other=0).to(tl.float32)
    v = z / (1.0 + tl.exp2(z * -LOG2E))
    tl.store(v_ptr + row[:, None] * D + d, v.to(v_ptr.dtype.element_ty), mask=ok)


@kernel()
def _values_backward_kernel(
    dv_ptr, z_ptr, dz_ptr, rows, L, z_b, z_l, dz_b, dz_l,
    D: tl.constexpr, SCANS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok = (row < rows)[:, None] & (d < D)
    at = row[:, None] * D + d
    dv = tl.load(dv_ptr + at, mask=ok, other=0).to(tl.float32)
    if SCANS == 2:
        dv += tl.load(dv_ptr + rows.to(tl.int64) * D + at, mask=ok, other=0).to(tl.float32)
    z = tl.load(z_ptr + row_at(row, L, z_b, z_l, ALIGNED)[:, None] + d, mask=ok, other=0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp2(z * -LOG2E))
    dz = dv * sigmoid * (1.0 + z * (1.0 - sigmoid))
    tl.store(dz_ptr + row_at(row, L, dz_b, dz_l, ALIGNED)[:, None] + d, dz.to(dz_ptr.dtype.element_ty), mask=ok)


def forward(z: Tensor) -> Tensor:
    """See `backends.torch.values.forward`."""
    (B, L, _), options = z.shape, row_options(_NUMBERS, z)
    v = z.new_empty(z.shape)
    if v.numel():
        with torch.cuda.device_of(z):
            _values_kernel[(ceil_div(B * L, options["ROWS"]),)](z, v, B * L, L, *z.stride()[:2], **options)
    return v


def backward(dv: Tensor, z: Tensor, dz: Tensor) -> None:
    """See `backends.torch.values.backward`."""
    (B, L, _), options = z.shape, row_options(_NUMBERS, z, dz)
    if z.numel():
        with torch.cuda.device_of(z):
            _values_backward_kernel[(ceil_div(B * L, options["ROWS"]),)](
                dv, z, dz, B * L, L, *z.stride()[:2], *dz.stride()[:2], SCANS=len(dv), **options)  # fmt: skip
