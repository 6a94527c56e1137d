"""`regions.resized_regions` as a Triton kernel: a pass over the columns of all regions, and one over their rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256  # points of a result that a program makes


@triton.jit
def _weight(distance, is_cubic):
    """Returns the filter at a distance in source pixels, or where the image shrinks in pixels of the result: Keys'
    cubic with a = -0.5, or a triangle."""
    t = tl.abs(distance)
    near = (1.5 * t - 2.5) * t * t + 1.0
    far = ((2.5 - 0.5 * t) * t - 4.0) * t + 2.0
    cubic = tl.where(t < 1.0, near, tl.where(t < 2.0, far, 0.0))
    return tl.where(is_cubic, cubic, tl.maximum(1.0 - t, 0.0))


@triton.jit
def _rounded(v):
    return tl.floor(tl.minimum(tl.maximum(v, 0.0), 255.0) + 0.5)


@triton.jit(do_not_specialize=["rows"])
def _resize_kernel(
    source_ptr, places_ptr, found_ptr, rows,
    H: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With COLUMNS, resamples each region to W columns: found (B, rows, W, 3), filled down to the region's height. Else
    resamples these to H rows: found (B, 3, H, W). A program makes BLOCK points of a view."""
    view = tl.program_id(1)
    place = places_ptr + view * 7
    height = tl.load(place + 4).to(tl.int32)
    is_cubic = tl.load(place + 6) != 0
    point = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y, x = point // W, point % W
    if COLUMNS:
        stride = tl.load(place + 1).to(tl.int32) * 3
        source_ptr += tl.load(place) + tl.load(place + 2) * stride + tl.load(place + 3) * 3
        line, along, step = y * stride, x, 3
        length = tl.load(place + 5).to(tl.int32)
        ok = y < height
    else:
        source_ptr += view.to(tl.int64) * rows * W * 3
        line, along, step = x * 3, y, W * 3
        length = height
        ok = y < H
    scale = length.to(tl.float32) / (W if COLUMNS else H)
    width = tl.maximum(scale, 1.0)  # of the filter
    reach = tl.where(is_cubic, 2.0, 1.0) * width
    centre = (along.to(tl.float32) + 0.5) * scale
    first = tl.maximum((centre - reach + 0.5).to(tl.int32), 0)
    last = tl.minimum((centre + reach + 0.5).to(tl.int32), length)
    red = tl.zeros([BLOCK], tl.float32)
    green = tl.zeros([BLOCK], tl.float32)
    blue = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    apart = 1.0 / width  # from one source pixel to the next
    distance = (first.to(tl.float32) + 0.5 - centre) * apart
    pixel = source_ptr + line + first * step
    for i in range(0, (2.0 * reach).to(tl.int32) + 2):
        inside = ok & (first + i < last)
        weight = tl.where(inside, _weight(distance, is_cubic), 0.0)
        red += weight * tl.load(pixel, mask=inside, other=0).to(tl.float32)
        green += weight * tl.load(pixel + 1, mask=inside, other=0).to(tl.float32)
        blue += weight * tl.load(pixel + 2, mask=inside, other=0).to(tl.float32)
        total += weight
        distance += apart
        pixel += step
    total = tl.where(ok, total, 1.0)
    if COLUMNS:
        found_ptr += (view.to(tl.int64) * rows + y) * W * 3 + x * 3
    else:
        found_ptr += view.to(tl.int64) * 3 * H * W + point
    plane: tl.constexpr = 1 if COLUMNS else H * W  # from one colour to the next
    tl.store(found_ptr, _rounded(red / total).to(tl.uint8), mask=ok)
    tl.store(found_ptr + plane, _rounded(green / total).to(tl.uint8), mask=ok)
    tl.store(found_ptr + 2 * plane, _rounded(blue / total).to(tl.uint8), mask=ok)


def resize(pixels: Tensor, places: Tensor, rows: int, size: tuple[int, int]) -> Tensor:
    """Do what `regions.resized_regions` says, with places on the GPU, too. No region is higher than `rows`."""
    (H, W), B = size, len(places)
    found = pixels.new_empty(B, 3, H, W)
    between = pixels.new_empty(B, rows, W, 3)
    with torch.cuda.device_of(pixels):
        for source, result, columns in (pixels, between, True), (between, found, False):
            grid = triton.cdiv((rows if columns else H) * W, _BLOCK), B
            _resize_kernel[grid](source, places, result, rows, H=H, W=W, COLUMNS=columns, BLOCK=_BLOCK)
    return found
