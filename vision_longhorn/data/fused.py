"""`operations` as Triton kernels, with the same bits: one launch or two for all operations of a layer.

In torch they take some three hundred launches for a batch, and the host is busy with these for longer than the GPU.
Products and sums are never fused here, since a pixel would now and then differ by one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .operations import INDICES, Row

_BLOCK = 128  # pixels of a program, one a thread: with eight, bicubic resampling spills, and takes twice as long
_MANY = 1024  # pixels or numbers of a program that does little with each
_BY_TABLE = ("AutoContrast", "Contrast", "Equalize", "Brightness", "Invert", "Posterize", "Solarize", "SolarizeAdd")
_TABLES = [INDICES[kind] for kind in _BY_TABLE]
_AUTO_CONTRAST, _CONTRAST, _EQUALIZE, _BRIGHTNESS, _INVERT, _POSTERIZE, _SOLARIZE, _SOLARIZE_ADD = (
    tl.constexpr(index) for index in _TABLES
)
_HORIZONTAL, _VERTICAL, _BICUBIC, _BILINEAR, _COLOR, _SHARPNESS = (
    tl.constexpr(INDICES[kind]) for kind in ("Horizontal", "Vertical", "bicubic", "bilinear", "Color", "Sharpness")
)
_ROW = tl.constexpr(8)  # numbers of a row: image, kind, six arguments


@triton.jit
def _blend(value, other, factor):
    mixed = other + factor * (value - other)
    return tl.minimum(tl.maximum(mixed, 0.0), 255.0).to(tl.int32)


@triton.jit
def _gray(plane_ptr, at, area, ok):
    red = tl.load(plane_ptr + at, mask=ok, other=0).to(tl.int32)
    green = tl.load(plane_ptr + area + at, mask=ok, other=0).to(tl.int32)
    blue = tl.load(plane_ptr + 2 * area + at, mask=ok, other=0).to(tl.int32)
    return (red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16


@triton.jit(do_not_specialize=["start"])
def _tables_kernel(images_ptr, rows_ptr, start, tables_ptr, area, BLOCK: tl.constexpr):
    """Makes the tables (n, 3, 256) of those operations that map each number of a colour to another one."""
    one, channel = tl.program_id(0), tl.program_id(1)
    row_ptr = rows_ptr + (start + one) * _ROW
    image_ptr = images_ptr + tl.load(row_ptr).to(tl.int64) * 3 * area
    kind, argument = tl.load(row_ptr + 1).to(tl.int32), tl.load(row_ptr + 2)
    number = tl.arange(0, 256)
    value = number.to(tl.float32)
    found = number
    if kind == _INVERT:
        found = 255 - number
    elif kind == _BRIGHTNESS:
        found = _blend(value, 0.0, argument)
    elif kind == _POSTERIZE:
        lost = 8 - tl.minimum(tl.maximum(argument.to(tl.int32), 1), 8)
        found = (number >> lost) << lost
    elif kind == _SOLARIZE:
        found = tl.where(value < argument, number, 255 - number)
    elif kind == _SOLARIZE_ADD:
        found = tl.where(number < 128, tl.minimum(value + argument, 255.0).to(tl.int32), number)
    elif kind == _CONTRAST:
        total = tl.zeros([], tl.int64)
        for first in range(0, area, BLOCK):
            at = first + tl.arange(0, BLOCK)
            total += tl.sum(tl.where(at < area, _gray(image_ptr, at, area, at < area), 0), 0)
        mean = (2 * total + area) // (2 * area)
        found = _blend(value, mean.to(tl.float32), argument)
    elif (kind == _AUTO_CONTRAST) | (kind == _EQUALIZE):
        counts = tl.zeros([256], tl.int32)
        for first in range(0, area, BLOCK):
            at = first + tl.arange(0, BLOCK)
            counts += tl.histogram(tl.load(image_ptr + channel * area + at, mask=at < area, other=0).to(tl.int32), 256)
        counts -= tl.where(number == 0, tl.cdiv(area, BLOCK) * BLOCK - area, 0)
        high = tl.max(tl.where(counts > 0, number, 0), 0)
        if kind == _AUTO_CONTRAST:
            low = tl.min(tl.where(counts > 0, number, 255), 0)
            scale = tl.full([], 255.0, tl.float64) / tl.maximum(high - low, 1).to(tl.float64)
            spread = number.to(tl.float64) * scale - low.to(tl.float64) * scale
            spread = tl.minimum(tl.maximum(spread, 0.0), 255.0)
            found = tl.where(high > low, spread.to(tl.int32), number)
        else:
            step = (area - tl.sum(tl.where(number == high, counts, 0), 0)) // 255
            below = tl.cumsum(counts, 0) - counts
            even = tl.minimum((step // 2 + below) // tl.maximum(step, 1), 255)
            found = tl.where(step > 0, even, number)
    tl.store(tables_ptr + (one * 3 + channel) * 256 + number, found.to(tl.uint8))


@triton.jit
def _cubic(v0, v1, v2, v3, d):
    return v1 + d * (v2 - v0 + d * (2 * (v0 - v1) + v2 - v3 + d * (v1 - v0 + v3 - v2)))


@triton.jit
def _point(row_ptr, left, column: tl.constexpr, width):
    x = tl.minimum(tl.maximum(left + column, 0), width - 1)
    return tl.load(row_ptr + x).to(tl.float32)


@triton.jit
def _line(plane_ptr, top, row: tl.constexpr, left, dx, height, width, BICUBIC: tl.constexpr):
    y = tl.minimum(tl.maximum(top + row, 0), height - 1)
    row_ptr = plane_ptr + y * width
    v1, v2 = _point(row_ptr, left, 0, width), _point(row_ptr, left, 1, width)
    if BICUBIC:
        return _cubic(_point(row_ptr, left, -1, width), v1, v2, _point(row_ptr, left, 2, width), dx)
    else:
        return v1 + (v2 - v1) * dx


@triton.jit
def _resample(image_ptr, row_ptr, fill_ptr, out_ptr, at, ok, height, width, BICUBIC: tl.constexpr):
    row, column = at // width, at % width
    a, b, c = tl.load(row_ptr + 2), tl.load(row_ptr + 3), tl.load(row_ptr + 4)
    d, e, f = tl.load(row_ptr + 5), tl.load(row_ptr + 6), tl.load(row_ptr + 7)
    x, y = column.to(tl.float32) + 0.5, row.to(tl.float32) + 0.5
    u, v = a * x + b * y + c, d * x + e * y + f
    inside = (u >= 0) & (u < width) & (v >= 0) & (v < height)
    left, top = tl.floor(u - 0.5), tl.floor(v - 0.5)
    du, dv = (u - 0.5) - left, (v - 0.5) - top
    # A pixel from outside takes the fill, and its place may be too far away for an integer.
    left, top = tl.where(inside, left, 0).to(tl.int32), tl.where(inside, top, 0).to(tl.int32)
    for channel in range(3):
        plane_ptr = image_ptr + channel * height * width
        v1 = _line(plane_ptr, top, 0, left, du, height, width, BICUBIC)
        v2 = _line(plane_ptr, top, 1, left, du, height, width, BICUBIC)
        if BICUBIC:
            v0 = _line(plane_ptr, top, -1, left, du, height, width, BICUBIC)
            v3 = _line(plane_ptr, top, 2, left, du, height, width, BICUBIC)
            value = _cubic(v0, v1, v2, v3, dv)
        else:
            value = v1 + (v2 - v1) * dv
        value = tl.minimum(tl.maximum(value, 0.0), 255.0)
        value = tl.where(inside, value, tl.load(fill_ptr + channel))
        tl.store(out_ptr + channel * height * width + at, value.to(tl.int32).to(tl.uint8), mask=ok)


@triton.jit(do_not_specialize=["start"])
def _operate_kernel(
    images_ptr, rows_ptr, start, tables_ptr, fill_ptr, out_ptr, height, width, BLOCK: tl.constexpr
):  # fmt: skip
    one = tl.program_id(1)
    row_ptr = rows_ptr + (start + one) * _ROW
    area = height * width
    before = tl.load(row_ptr).to(tl.int64) * 3 * area
    image_ptr, out_ptr = images_ptr + before, out_ptr + before
    kind, argument = tl.load(row_ptr + 1).to(tl.int32), tl.load(row_ptr + 2)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < area
    row, column = at // width, at % width
    if kind == _BICUBIC:
        _resample(image_ptr, row_ptr, fill_ptr, out_ptr, at, ok, height, width, True)
    elif kind == _BILINEAR:
        _resample(image_ptr, row_ptr, fill_ptr, out_ptr, at, ok, height, width, False)
    elif (kind == _HORIZONTAL) | (kind == _VERTICAL):
        other = tl.where(kind == _HORIZONTAL, row * width + width - 1 - column, (height - 1 - row) * width + column)
        for channel in range(3):
            value = tl.load(image_ptr + channel * area + other, mask=ok)
            tl.store(out_ptr + channel * area + at, value, mask=ok)
    elif kind == _COLOR:
        gray = _gray(image_ptr, at, area, ok).to(tl.float32)
        for channel in range(3):
            value = tl.load(image_ptr + channel * area + at, mask=ok, other=0).to(tl.float32)
            tl.store(out_ptr + channel * area + at, _blend(value, gray, argument).to(tl.uint8), mask=ok)
    elif kind == _SHARPNESS:
        inner = ok & (row > 0) & (row < height - 1) & (column > 0) & (column < width - 1)
        for channel in range(3):
            value = tl.load(image_ptr + channel * area + at, mask=ok, other=0).to(tl.int32)
            total = 4 * value
            for near in tl.static_range(9):
                place = at + (near // 3 - 1) * width + near % 3 - 1
                total += tl.load(image_ptr + channel * area + place, mask=inner, other=0).to(tl.int32)
            smooth = tl.where(inner, (2 * total + 13) // 26, value).to(tl.float32)  # a thirteenth, rounded
            mixed = _blend(value.to(tl.float32), smooth, argument)
            tl.store(out_ptr + channel * area + at, mixed.to(tl.uint8), mask=ok)
    else:
        for channel in range(3):
            value = tl.load(image_ptr + channel * area + at, mask=ok, other=0).to(tl.int32)
            value = tl.load(tables_ptr + (one * 3 + channel) * 256 + value)
            tl.store(out_ptr + channel * area + at, value, mask=ok)


def operate(images: Tensor, layer: list[Row], rows: Tensor, start: int, fill: Tensor) -> Tensor:
    """Do what `operations.operate` says, on a GPU."""
    n, (height, width) = len(layer), images.shape[2:]
    out, area = images.clone(), height * width
    tables = images.new_empty(n, 3, 256)
    with torch.cuda.device_of(images):
        if any(kind in _TABLES for _, kind, *_ in layer):
            _tables_kernel[(n, 3)](images, rows, start, tables, area, BLOCK=_MANY, enable_fp_fusion=False)
        args = images, rows, start, tables, fill, out, height, width
        _operate_kernel[(triton.cdiv(area, _BLOCK), n)](*args, BLOCK=_BLOCK, enable_fp_fusion=False)
    return out


@triton.jit
def _normalize_kernel(images_ptr, scale_ptr, shift_ptr, out_ptr, area, BLOCK: tl.constexpr):
    at = tl.program_id(1).to(tl.int64) * 3 * area
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for channel in range(3):
        scale, shift = tl.load(scale_ptr + channel), tl.load(shift_ptr + channel)
        value = tl.load(images_ptr + at + pixel, mask=pixel < area).to(tl.float32)
        tl.store(out_ptr + at + pixel, value * scale + shift, mask=pixel < area)
        at += area


def normalize(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Do what `operations.normalize` says, on a GPU."""
    out, area = torch.empty_like(images, dtype=torch.float32), images[0, 0].numel()
    with torch.cuda.device_of(images):
        args = images, scale, shift, out, area
        _normalize_kernel[(triton.cdiv(area, _MANY), len(images))](*args, BLOCK=_MANY, enable_fp_fusion=False)
    return out


@triton.jit(do_not_specialize=["start"])
def _erase_kernel(
    images_ptr, rows_ptr, start, noise_ptr, height, width, PER_PIXEL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    one = tl.program_id(1)
    row_ptr = rows_ptr + (start + one) * _ROW
    area = height * width
    image_ptr = images_ptr + tl.load(row_ptr).to(tl.int64) * 3 * area
    top, left = tl.load(row_ptr + 2), tl.load(row_ptr + 3)
    bottom, right = tl.load(row_ptr + 4), tl.load(row_ptr + 5)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // width, at % width
    inside = (row >= top) & (row < bottom) & (column >= left) & (column < right)
    for channel in range(3):
        plane = one.to(tl.int64) * 3 + channel
        noise = tl.load(noise_ptr + plane * area + at, mask=inside) if PER_PIXEL else tl.load(noise_ptr + plane)
        tl.store(image_ptr + channel * area + at, noise, mask=inside)


def erase(images: Tensor, rows: Tensor, start: int, noise: Tensor) -> None:
    """Do what `operations.erase` says, on a GPU."""
    height, width = images.shape[2:]
    grid = triton.cdiv(height * width, _MANY), len(noise)
    per_pixel = noise.shape[2:] == images.shape[2:]
    with torch.cuda.device_of(images):
        _erase_kernel[grid](images, rows, start, noise, height, width, PER_PIXEL=per_pixel, BLOCK=_MANY)
