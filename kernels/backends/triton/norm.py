"""`backends.torch.norm` on a GPU. A program takes whole rows, so each tensor is read and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import power_of_2
from .lanes import LOG2E, kernel, row_at
from .tuning import multiprocessors


@triton.jit
def _normed(o_ptr, at, ok, D: tl.constexpr, eps):
    o = tl.load(o_ptr + at, mask=ok, other=0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(o * o, 0) / D + eps)
    return o * scale, scale


@kernel()
def _gated_norm_kernel(
    o_ptr, z_ptr, weight_ptr, y_ptr, rows, L, z_b, z_l, eps, D: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    ok = d < D
    at = row * D + d
    z = tl.load(z_ptr + row_at(row, L, z_b, z_l, ALIGNED) + d, mask=ok, other=0).to(tl.float32)
    first, _ = _normed(o_ptr, at, ok, D, eps)
    second, _ = _normed(o_ptr + rows.to(tl.int64) * D, at, ok, D, eps)
    total = first * tl.load(weight_ptr + d, mask=ok, other=0).to(tl.float32) + second * tl.load(
        weight_ptr + D + d, mask=ok, other=0
    ).to(tl.float32)
    y = total * z / (1.0 + tl.exp2(z * -LOG2E))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=ok)


@kernel()
def _gated_norm_backward_kernel(
    dy_ptr, o_ptr, z_ptr, weight_ptr, do_ptr, dz_ptr, dweight_ptr, rows, L, dy_b, dy_l, z_b, z_l, dz_b, dz_l, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Takes every `programs`-th row, and leaves its sum over them in dweight (programs, 2, D)."""
    d = tl.arange(0, BLOCK)
    ok = d < D
    second_at = rows.to(tl.int64) * D
    weight_0 = tl.load(weight_ptr + d, mask=ok, other=0).to(tl.float32)
    weight_1 = tl.load(weight_ptr + D + d, mask=ok, other=0).to(tl.float32)
    dweight_0 = tl.zeros([BLOCK], tl.float32)
    dweight_1 = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    for i in tl.range(0, (rows - first + programs - 1) // programs, num_stages=1):
        row = first + i * programs
        at = row * D + d
        z = tl.load(z_ptr + row_at(row, L, z_b, z_l, ALIGNED) + d, mask=ok, other=0).to(tl.float32)
        dy = tl.load(dy_ptr + row_at(row, L, dy_b, dy_l, ALIGNED) + d, mask=ok, other=0).to(tl.float32)
        n_0, scale_0 = _normed(o_ptr, at, ok, D, eps)
        n_1, scale_1 = _normed(o_ptr + second_at, at, ok, D, eps)
        sigmoid = 1.0 / (1.0 + tl.exp2(z * -LOG2E))
        silu = z * sigmoid
        dz = dy * (n_0 * weight_0 + n_1 * weight_1) * (sigmoid + silu * (1.0 - sigmoid))
        tl.store(dz_ptr + row_at(row, L, dz_b, dz_l, ALIGNED) + d, dz.to(dz_ptr.dtype.element_ty), mask=ok)
        dsum = dy * silu
        dweight_0 += dsum * n_0
        dweight_1 += dsum * n_1
        dn_0 = dsum * weight_0
        dn_1 = dsum * weight_1
        do_0 = scale_0 * (dn_0 - n_0 * (tl.sum(dn_0 * n_0, 0) / D))
        do_1 = scale_1 * (dn_1 - n_1 * (tl.sum(dn_1 * n_1, 0) / D))
        tl.store(do_ptr + at, do_0.to(do_ptr.dtype.element_ty), mask=ok)
        tl.store(do_ptr + second_at + at, do_1.to(do_ptr.dtype.element_ty), mask=ok)
    out = first * (2 * D) + d
    tl.store(dweight_ptr + out, dweight_0, mask=ok)
    tl.store(dweight_ptr + out + D, dweight_1, mask=ok)


def _options(*views: Tensor) -> dict[str, int]:
    D = views[0].shape[-1]
    block = power_of_2(D)
    aligned = D % 16 == 0 and all(s % 16 == 0 for view in views for s in view.stride()[:2])
    return dict(D=D, BLOCK=block, ALIGNED=aligned, num_warps=min(8, max(1, block // 256)))


def forward(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `backends.torch.norm.forward`."""
    B, L, D = z.shape
    y = z.new_empty(B, L, D)
    if y.numel():
        with torch.cuda.device_of(o):
            _gated_norm_kernel[(B * L,)](o, z, weight, y, B * L, L, *z.stride()[:2], eps, **_options(z))
    return y


def backward(dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, eps: float, dz: Tensor) -> tuple[Tensor, Tensor]:
    """See `backends.torch.norm.backward`."""
    B, L, D = z.shape
    do = torch.empty_like(o)
    programs = min(B * L, 16 * multiprocessors(o.device))
    dweight = o.new_empty(programs, 2, D, dtype=torch.float32)
    if programs:
        with torch.cuda.device_of(o):
            _gated_norm_backward_kernel[(programs,)](
                dy, o, z, weight, do, dz, dweight, B * L, L, *dy.stride()[:2], *z.stride()[:2], *dz.stride()[:2], eps,
                **_options(dy, z, dz))  # fmt: skip
    return do, dweight.sum(0)
