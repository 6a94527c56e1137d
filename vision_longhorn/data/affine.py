"""Resamples images by affine maps in one Triton kernel, with the bits of the plain form, `operations.resampled`.

The plain form makes a tensor of each of the 16 points around a pixel, and a GPU writes all of them to memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128  # pixels of a program, one a thread: with eight a thread, registers spill, and it takes twice as long


@triton.jit
def _cubic(v0, v1, v2, v3, d):
    return v1 + d * (v2 - v0 + d * (2 * (v0 - v1) + v2 - v3 + d * (v1 - v0 + v3 - v2)))


@triton.jit
def _point(row_ptr, left, column: tl.constexpr, width):
    x = tl.minimum(tl.maximum(left + column, 0), width - 1)
    return tl.load(row_ptr + x).to(tl.float32)


@triton.jit
def _row(image_ptr, top, row: tl.constexpr, left, dx, height, width, BICUBIC: tl.constexpr):
    y = tl.minimum(tl.maximum(top + row, 0), height - 1)
    row_ptr = image_ptr + y * width
    v1, v2 = _point(row_ptr, left, 0, width), _point(row_ptr, left, 1, width)
    if BICUBIC:
        return _cubic(_point(row_ptr, left, -1, width), v1, v2, _point(row_ptr, left, 2, width), dx)
    else:
        return v1 + (v2 - v1) * dx


@triton.jit
def _resample_kernel(
    images_ptr, maps_ptr, fill_ptr, out_ptr, height, width, BICUBIC: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    image = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < height * width
    row, column = at // width, at % width
    map_ptr = maps_ptr + image * 6
    a, b, c = tl.load(map_ptr), tl.load(map_ptr + 1), tl.load(map_ptr + 2)
    d, e, f = tl.load(map_ptr + 3), tl.load(map_ptr + 4), tl.load(map_ptr + 5)
    x, y = column.to(tl.float32) + 0.5, row.to(tl.float32) + 0.5
    u, v = a * x + b * y + c, d * x + e * y + f
    inside = (u >= 0) & (u < width) & (v >= 0) & (v < height)
    left, top = tl.floor(u - 0.5), tl.floor(v - 0.5)
    du, dv = (u - 0.5) - left, (v - 0.5) - top
    # A pixel from outside takes the fill, and its place may be too far away for an integer.
    left, top = tl.where(inside, left, 0).to(tl.int32), tl.where(inside, top, 0).to(tl.int32)
    for channel in range(3):
        plane = (image * 3 + channel) * height * width
        plane_ptr = images_ptr + plane
        v1 = _row(plane_ptr, top, 0, left, du, height, width, BICUBIC)
        v2 = _row(plane_ptr, top, 1, left, du, height, width, BICUBIC)
        if BICUBIC:
            v0 = _row(plane_ptr, top, -1, left, du, height, width, BICUBIC)
            v3 = _row(plane_ptr, top, 2, left, du, height, width, BICUBIC)
            value = _cubic(v0, v1, v2, v3, dv)
        else:
            value = v1 + (v2 - v1) * dv
        value = tl.minimum(tl.maximum(value, 0.0), 255.0)
        value = tl.where(inside, value, tl.load(fill_ptr + channel))
        tl.store(out_ptr + plane + at, value.to(tl.int32).to(tl.uint8), mask=ok)


def resample(images: Tensor, maps: Tensor, fill: Tensor, bilinear: bool) -> Tensor:
    """Resample uint8 images (n, 3, H, W) on a GPU by maps (n, 6), float32; `fill` is (3, 1, 1), float32."""
    n, _, height, width = images.shape
    out = torch.empty_like(images)
    grid = triton.cdiv(height * width, _BLOCK), n
    args = images.contiguous(), maps.contiguous(), fill, out, height, width, not bilinear, _BLOCK
    with torch.cuda.device_of(images):
        # Where the compiler fused products and sums, a pixel would now and then differ by one.
        _resample_kernel[grid](*args, enable_fp_fusion=False)
    return out
