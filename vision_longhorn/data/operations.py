"""Operations of timm's policies on whole batches, on any device; they give PIL's results, most of them to the bit.

A row says what is done to an image, in float32: the image's number in the batch, the operation's index in `OPERATIONS`,
and six arguments, of which most operations use only the first. Each operation takes images, uint8 (n, 3, H, W), and
their arguments (n, 6), and returns new images. `fill`, (3, 1, 1), is the colour of pixels from outside the image.
"""

import functools
import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Row = list[float]


def make_layer(table: list[list[float]], first: int, height: int, width: int) -> list[Row]:
    """Make the rows of a layer, by kind, from the operations at column `first` of a table (see `augment`)."""
    layer = []
    for number, (index, argument, bilinear) in enumerate(row[first : first + 3] for row in table):
        if not index:
            continue
        kind, arguments = KINDS[int(index)], [argument, 0.0, 0.0, 0.0, 0.0, 0.0]
        if kind in AFFINE:
            arguments = AFFINE[kind](argument, height, width)
            kind = "bilinear" if bilinear else "bicubic"
        layer.append([number, INDICES[kind], *arguments])
    return sorted(layer, key=_kind)


def _kind(row: Row) -> float:
    return row[1]


def operate(images: Tensor, layer: list[Row], rows: Tensor, start: int, fill: Tensor) -> Tensor:
    """Apply a layer, which has one operation at most for each image.

    Args:
        images: uint8 (B, 3, H, W); they may change.
        layer: what `make_layer` gives.
        rows: the same numbers on the device of the images, from row `start` on.

    Returns:
        (B, 3, H, W) uint8
    """
    for kind, same in itertools.groupby(layer, _kind):
        stop = start + len(list(same))
        numbers, arguments = rows[start:stop, 0].long(), rows[start:stop, 2:]
        images.index_copy_(0, numbers, _FORMS[int(kind)](images[numbers], arguments, fill))
        start = stop
    return images


def normalize(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return uint8 images (B, 3, H, W) times `scale`, (3, 1, 1), plus `shift`, (3, 1, 1), in float32."""
    return torch.mul(images, scale).add_(shift)


def erase(images: Tensor, rows: Tensor, start: int, noise: Tensor) -> None:
    """Fill a box of some images, float32 (B, 3, H, W), with `noise`, (n, 3, H, W) or (n, 3, 1, 1). From row `start` on
    `rows` has n rows of which the arguments are the box's top, left, bottom and right."""
    height, width = images.shape[2:]
    numbers, box = rows[start : start + len(noise), 0].long(), rows[start : start + len(noise), 2:6]
    top, left, bottom, right = box.view(-1, 4, 1, 1).unbind(1)
    y, x = torch.arange(height, device=images.device)[:, None], torch.arange(width, device=images.device)
    inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)  # (n, H, W)
    images.index_copy_(0, numbers, torch.where(inside[:, None], noise, images[numbers]))


def _rotation(degrees: float, height: int, width: int) -> list[float]:
    angle = math.radians(degrees)
    cos, sin = math.cos(angle), math.sin(angle)
    x, y = width / 2, height / 2
    return [cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y]


# A point (x, y) of the result lies at (a x + b y + c, d x + e y + f) in the source, as in PIL's AFFINE.
AFFINE: dict[str, Callable[[float, int, int], list[float]]] = {
    "Rotate": _rotation,
    "ShearX": lambda factor, height, width: [1, factor, 0, 0, 1, 0],
    "ShearY": lambda factor, height, width: [1, 0, 0, factor, 1, 0],
    "TranslateX": lambda pixels, height, width: [1, 0, pixels, 0, 1, 0],
    "TranslateY": lambda pixels, height, width: [1, 0, 0, 0, 1, pixels],
    "TranslateXRel": lambda part, height, width: [1, 0, part * width, 0, 1, 0],
    "TranslateYRel": lambda part, height, width: [1, 0, 0, 0, 1, part * height],
}


def _resampled(images: Tensor, maps: Tensor, fill: Tensor, bilinear: bool) -> Tensor:
    """Resample uint8 images (n, 3, H, W) by maps (n, 6) with PIL's kernels; the bicubic one has a = -1."""
    n, _, height, width = images.shape
    a, b, c, d, e, f = maps.view(n, 6, 1, 1).unbind(1)
    x = torch.arange(width, device=images.device) + 0.5
    y = torch.arange(height, device=images.device)[:, None] + 0.5
    x, y = a * x + b * y + c, d * x + e * y + f  # (n, H, W)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    left, top = (x - 0.5).floor(), (y - 0.5).floor()
    dx, dy = ((x - 0.5) - left)[:, None], ((y - 0.5) - top)[:, None]
    blend: Callable[..., Tensor] = _linear if bilinear else _cubic
    taps = range(0, 2) if bilinear else range(-1, 3)
    flat = images.flatten(2)

    def pixel(row: int, column: int) -> Tensor:
        index = (top + row).clamp(0, height - 1) * width + (left + column).clamp(0, width - 1)
        return flat.gather(2, index.long().view(n, 1, -1).expand(-1, 3, -1)).view_as(images).float()

    result = blend(*(blend(*(pixel(row, column) for column in taps), dx) for row in taps), dy)
    return torch.where(inside[:, None], result.clamp(0, 255), fill).to(torch.uint8)


def _linear(v0: Tensor, v1: Tensor, d: Tensor) -> Tensor:
    return v0 + (v1 - v0) * d


def _cubic(v0: Tensor, v1: Tensor, v2: Tensor, v3: Tensor, d: Tensor) -> Tensor:
    # Written in differences, so that areas of one colour keep it to the bit.
    return v1 + d * (v2 - v0 + d * (2 * (v0 - v1) + v2 - v3 + d * (v1 - v0 + v3 - v2)))


def _blend(images: Tensor, other: Tensor, arguments: Tensor) -> Tensor:
    """Mix `other` (factor 0) with the image (factor 1), and truncate to whole numbers as PIL does."""
    images, other = images.float(), other.float()
    return (other + arguments[:, :1, None, None] * (images - other)).clamp(0, 255).to(torch.uint8)


def _gray(images: Tensor) -> Tensor:
    red, green, blue = images.int().split(1, dim=1)
    return (red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16  # (n, 1, H, W)


def _contrast(images: Tensor, arguments: Tensor, fill: Tensor) -> Tensor:
    gray = _gray(images)
    mean = (gray.sum((1, 2, 3), keepdim=True).double() / gray[0].numel() + 0.5).floor()
    return _blend(images, mean, arguments)


def _sharpness(images: Tensor, arguments: Tensor, fill: Tensor) -> Tensor:
    if min(images.shape[2:]) < 3:  # all pixels lie at an edge, and stay as they are
        return images
    kernel = torch.ones(3, 1, 3, 3, device=images.device)
    kernel[:, :, 1, 1] = 5
    smooth = images.float()
    sums = F.conv2d(smooth, kernel, groups=3)  # whole numbers: exact
    smooth[:, :, 1:-1, 1:-1] = (sums / 13 + 0.5).floor()
    return _blend(images, smooth, arguments)


def _auto_contrast(images: Tensor, arguments: Tensor, fill: Tensor) -> Tensor:
    low, high = images.amin((2, 3), keepdim=True).double(), images.amax((2, 3), keepdim=True).double()
    scale = torch.full_like(high, 255) / (high - low)  # 255 / tensor multiplies by the rounded reciprocal
    spread = (images * scale - low * scale).clamp(0, 255)
    return torch.where(high > low, spread, images.double()).to(torch.uint8)


def _equalize(images: Tensor, arguments: Tensor, fill: Tensor) -> Tensor:
    flat = images.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = 255 - (counts > 0).int().flip(2).argmax(2, keepdim=True)
    step = (flat.shape[2] - counts.gather(2, last)) // 255
    table = (step // 2 + counts.cumsum(2) - counts) // step.clamp(min=1)
    table = torch.where(step > 0, table.clamp(max=255), torch.arange(256, device=images.device))
    return table.to(torch.uint8).gather(2, flat).view_as(images)


def _posterize(images: Tensor, arguments: Tensor, fill: Tensor) -> Tensor:
    lost = 8 - arguments[:, :1, None, None].int().clamp(1, 8)  # PIL wants one bit at least
    return ((images.int() >> lost) << lost).to(torch.uint8)


def _solarize(images: Tensor, arguments: Tensor, fill: Tensor) -> Tensor:
    return torch.where(images < arguments[:, :1, None, None], images, 255 - images)


def _solarize_add(images: Tensor, arguments: Tensor, fill: Tensor) -> Tensor:
    lighter = (images + arguments[:, :1, None, None]).clamp(max=255).to(torch.uint8)
    return torch.where(images < 128, lighter, images)


OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "Horizontal": lambda images, arguments, fill: images.flip(3),
    "Vertical": lambda images, arguments, fill: images.flip(2),
    "bicubic": functools.partial(_resampled, bilinear=False),
    "bilinear": functools.partial(_resampled, bilinear=True),
    "AutoContrast": _auto_contrast,
    "Equalize": _equalize,
    "Invert": lambda images, arguments, fill: 255 - images,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "SolarizeAdd": _solarize_add,
    "Brightness": lambda images, arguments, fill: _blend(images, torch.zeros_like(images), arguments),
    "Color": lambda images, arguments, fill: _blend(images, _gray(images), arguments),
    "Contrast": _contrast,
    "Sharpness": _sharpness,
}
INDICES, _FORMS = {name: index for index, name in enumerate(OPERATIONS)}, list(OPERATIONS.values())
# A name's index stands for the operation in the table of `augment`; 0 does nothing.
KINDS = ("", *AFFINE, *(name for name in OPERATIONS if name[0].isupper()))
