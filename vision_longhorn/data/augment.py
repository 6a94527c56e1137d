"""timm's training transform in two halves: workers decode and crop, a device does the rest to whole batches.

All that is random is drawn in the worker by timm's own code, which is handed a notebook in the place of an image. The
notes travel with the batch as a table of numbers, so they follow the worker's seed and not the device's.

A row of the table, float64: a seed for noise; top, left, bottom, right of the erased box; 1 for a picture to be turned
left to right, 2 for top to bottom, 3 for both; then for each operation its number in `_KINDS`, its argument, and 1 for
bilinear in the place of bicubic resampling. An operation 0 is none.
"""

import copy
import functools
import math
import random

import torch
import torch.nn.functional as F
from timm.data import auto_augment
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import MaybeToTensor, RandomResizedCropAndInterpolation
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from vision_longhorn.errors import UserError
from .images import decode_tensor

_RESAMPLING = (InterpolationMode.BICUBIC, InterpolationMode.BILINEAR)
_HEAD = 6
_BITS = {"PosterizeIncreasing": "Posterize", "PosterizeOriginal": "Posterize", "SolarizeIncreasing": "Solarize"}


def split_transform(transform):
    """Split a training transform of `timm.data.create_transform`.

    Args:
        transform: random resized crop, flips, RandAugment or AutoAugment or colour jitter, normalisation, erasing.

    Returns:
        (crops, finish): `crops` is the transform for `train_loader`, `finish` the argument of `device_batches`.

    Raises:
        UserError: for a step that has no form for a batch, such as AugMix; use `transform` as it is then.
    """
    crop, flips, policies, finish = None, [], [], {"eraser": None}
    for step in transform.transforms:
        if isinstance(step, RandomResizedCropAndInterpolation) and crop is None:
            crop = step
            _check(step, set(_as_list(step.interpolation)) <= set(_RESAMPLING))
        elif isinstance(step, (transforms.RandomHorizontalFlip, transforms.RandomVerticalFlip)):
            flips.append((1 if isinstance(step, transforms.RandomHorizontalFlip) else 2, step.p))
        elif isinstance(step, (auto_augment.RandAugment, auto_augment.AutoAugment)):
            policies.append(_noting(step))
        elif isinstance(step, transforms.ColorJitter) and step.hue is None:
            policies.append(functools.partial(_jitter, step))
        elif isinstance(step, transforms.Normalize):
            finish.update(mean=step.mean, std=step.std)
        elif isinstance(step, RandomErasing) and step.max_count == 1:
            finish["eraser"] = step
        else:
            _check(step, isinstance(step, MaybeToTensor))
    if crop is None or "mean" not in finish:
        raise UserError("the transform lacks a random resized crop or a normalisation; make it with timm's "
                        "create_transform(is_training=True)")
    fill = next((op.kwargs["fillcolor"] for policy in policies for op in getattr(policy, "all_ops", ())), (0, 0, 0))
    return Crops(crop, flips, policies, finish["eraser"]), Finish(fill=fill, **finish)


def _check(step, fine):
    if not fine:
        raise UserError(f"{step} has no form for batches on a device; use the transform unsplit")


def _as_list(value):
    return value if isinstance(value, (list, tuple)) else [value]


def _noting(policy):
    """A copy of a policy of timm whose operations write down what they would do."""
    policy = copy.deepcopy(policy)
    policy.all_ops = list(getattr(policy, "ops", None) or [op for ops in policy.policy for op in ops])
    for op in policy.all_ops:
        name = _BITS.get(op.name, op.name.removesuffix("Increasing"))
        if name not in _KINDS:
            raise UserError(f"{op.name} has no form for batches on a device; use the transform unsplit")
        op.aug_fn = functools.partial(_note, name)
    return policy


def _note(name, notes, argument=0.0, *, fillcolor=None, resample=None):
    resample = random.choice(resample) if isinstance(resample, (list, tuple)) else resample
    bilinear = resample is not None and resample == auto_augment.Image.Resampling.BILINEAR
    return notes + [_KINDS.index(name), float(argument), float(bilinear)]


def _jitter(step, notes):
    order, *factors, _ = step.get_params(step.brightness, step.contrast, step.saturation, step.hue)
    for number in order.tolist():
        if number < 3 and factors[number] is not None:
            notes = _note(("Brightness", "Contrast", "Color")[number], notes, factors[number])
    return notes


class _Box:
    """Stands in for an image where timm erases, and remembers the place."""

    dtype = torch.float32

    def __init__(self, height, width):
        self.shape, self.box = (3, height, width), [0, 0, 0, 0]

    def size(self):
        return self.shape

    def __setitem__(self, place, value):
        _, rows, columns = place
        self.box = [rows.start, columns.start, rows.stop, columns.stop]


class Crops:
    """The worker's half: from a file's bytes to a crop and its row of the table. Made by `split_transform`."""

    decode = staticmethod(decode_tensor)

    def __init__(self, crop, flips, policies, eraser):
        self.crop, self.flips, self.policies = crop, flips, policies
        self.length = sum(_longest(policy) for policy in policies)
        self.eraser = copy.copy(eraser)
        if eraser is not None:
            self.eraser.per_pixel = self.eraser.rand_color = False  # only the place is wanted

    def __call__(self, decoded):
        """
        Args:
            decoded: what `decode` gave.

        Returns:
            uint8 tensor (height, width, 3), float64 tensor (6 + 3 * operations,)
        """
        image, correct = decoded
        top, left, height, width = self.crop.get_params(image, self.crop.scale, self.crop.ratio)
        height, width = max(height, 1), max(width, 1)  # of a picture one pixel high it can be none
        top, left = min(top, image.shape[1] - height), min(left, image.shape[2] - width)
        image = image[:, top:top + height, left:left + width]
        # Colours are corrected pixel by pixel: before or after resampling, where there are fewer pixels.
        late = correct and height * width > self.crop.size[0] * self.crop.size[1]
        if correct and not late:
            image = correct(image)
        mode = random.choice(_as_list(self.crop.interpolation)).value
        # Decoders give the colours of a pixel side by side. Resampling is faster with these than with planes.
        image = image[None].contiguous(memory_format=torch.channels_last)
        image = F.interpolate(image, self.crop.size, mode=mode, antialias=True)[0]
        if late:
            image = correct(image)
        turned = 0
        for bit, probability in self.flips:
            if torch.rand(1).item() < probability:  # as torchvision draws it
                turned ^= bit
        notes = []
        for policy in self.policies:
            notes = policy(notes)
        box = _Box(*image.shape[1:])
        if self.eraser is not None:
            self.eraser(box)
        row = [random.getrandbits(48), *box.box, turned, *notes, *[0] * (3 * self.length - len(notes))]
        return image.permute(1, 2, 0).contiguous(), torch.tensor(row, dtype=torch.float64)


def _longest(policy):
    if isinstance(policy, auto_augment.RandAugment):
        return policy.num_layers
    return max(map(len, policy.policy)) if isinstance(policy, auto_augment.AutoAugment) else 3


class Finish:
    """The device's half: flips, policy, normalisation and erasing of a whole batch, without waiting for the device.

    The operations give PIL's results (most to the bit, see tests/test_augment.py). Made by `split_transform`.
    """

    def __init__(self, mean, std, eraser, fill):
        self.mean, self.std, self.eraser = torch.as_tensor(mean), torch.as_tensor(std), eraser
        self.fill = torch.tensor(fill, dtype=torch.float32)

    def __call__(self, batch, device):
        """
        Args:
            batch: images, uint8 (B, H, W, 3), and table, float64 (B, 6 + 3 * operations), on the CPU.
            device: where to work.

        Returns:
            float32 tensor (B, 3, H, W) on `device`, normalised.
        """
        images, table = batch
        rows = table.tolist()
        height, width = images.shape[1:3]
        plan = [group for first in range(_HEAD, table.shape[1], 3) for group in _groups(rows, first, height, width)]
        # Flips come first, in the order of the whole transform: they are drawn and done before the policy.
        plan[:0] = [(kind, chosen, [[0] * 6] * len(chosen)) for kind, bit in (("horizontal", 1), ("vertical", 2))
                    if (chosen := [n for n, row in enumerate(rows) if int(row[5]) & bit])]
        erased = [n for n, row in enumerate(rows) if row[4] > row[2]]
        numbers = [n for _, chosen, _ in plan for n in chosen] + erased
        values = [value for _, _, arguments in plan for value in arguments] + [rows[n][1:5] + [0, 0] for n in erased]
        # Two copies for everything, from pinned memory: many small ones would wait for the device each.
        numbers = _send(torch.tensor(numbers, dtype=torch.int64), device)
        values = _send(torch.tensor(values, dtype=torch.float32).view(-1, 6), device)
        mean, std, fill = (_send(value.view(3, 1, 1), device) for value in (self.mean, self.std, self.fill))
        images = images.to(device, non_blocking=True).permute(0, 3, 1, 2)  # (B, 3, H, W)
        images = images.clone(memory_format=torch.contiguous_format)
        start = 0
        for kind, chosen, _ in plan:
            stop = start + len(chosen)
            arguments = values[start:stop]
            result = _OPERATIONS[kind](images[numbers[start:stop]], arguments, fill)
            images.index_copy_(0, numbers[start:stop], result)
            start = stop
        images = images.float().div_(255).sub_(mean).div_(std)
        if erased:
            self._erase(images, numbers[start:], values[start:, :4], int(rows[0][0]))
        return images

    def _erase(self, images, numbers, boxes, seed):
        _, _, height, width = images.shape
        top, left, bottom, right = boxes.view(-1, 4, 1, 1).unbind(1)
        y = torch.arange(height, device=images.device)[:, None]
        x = torch.arange(width, device=images.device)
        inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)  # (n, H, W)
        shape = (height, width) if self.eraser.per_pixel else (1, 1)
        noise = torch.zeros(len(numbers), 3, *shape, device=images.device)
        if self.eraser.per_pixel or self.eraser.rand_color:
            noise.normal_(generator=torch.Generator(images.device).manual_seed(seed))
        images.index_copy_(0, numbers, torch.where(inside[:, None], noise, images[numbers]))


def _send(tensor, device):
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _groups(rows, first, height, width):
    """(kind, image numbers, six arguments of each) of the operation that stands at `first` in the rows."""
    groups = {}
    for number, row in enumerate(rows):
        index, argument, bilinear = row[first:first + 3]
        if index:
            kind, arguments = _KINDS[int(index)], [argument, 0, 0, 0, 0, 0]
            if kind in _AFFINE:
                arguments = _AFFINE[kind](argument, height, width)
                kind = "bilinear" if bilinear else "bicubic"
            numbers, values = groups.setdefault(kind, ([], []))
            numbers.append(number)
            values.append(arguments)
    return [(kind, *group) for kind, group in groups.items()]


def _rotation(degrees, height, width):
    angle = math.radians(degrees)
    cos, sin = math.cos(angle), math.sin(angle)
    x, y = width / 2, height / 2
    return [cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y]


# Where a point (x, y) of the result lies in the source: (a x + b y + c, d x + e y + f), as PIL's AFFINE has it.
_AFFINE = {
    "Rotate": _rotation,
    "ShearX": lambda factor, height, width: [1, factor, 0, 0, 1, 0],
    "ShearY": lambda factor, height, width: [1, 0, 0, factor, 1, 0],
    "TranslateX": lambda pixels, height, width: [1, 0, pixels, 0, 1, 0],
    "TranslateY": lambda pixels, height, width: [1, 0, 0, 0, 1, pixels],
    "TranslateXRel": lambda part, height, width: [1, 0, part * width, 0, 1, 0],
    "TranslateYRel": lambda part, height, width: [1, 0, 0, 0, 1, part * height],
}


def _transform(images, matrix, fill, bilinear):
    """Resample uint8 images (n, 3, H, W) by matrices (n, 6) with PIL's kernels; the bicubic one has a = -1."""
    n, _, height, width = images.shape
    a, b, c, d, e, f = matrix.view(n, 6, 1, 1).unbind(1)
    x = torch.arange(width, device=images.device) + 0.5
    y = torch.arange(height, device=images.device)[:, None] + 0.5
    x, y = a * x + b * y + c, d * x + e * y + f  # (n, H, W)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    left, top = (x - 0.5).floor(), (y - 0.5).floor()
    dx, dy = ((x - 0.5) - left)[:, None], ((y - 0.5) - top)[:, None]
    taps, blend = ((0, 1), _linear) if bilinear else ((-1, 0, 1, 2), _cubic)
    flat = images.flatten(2)

    def pixel(row, column):
        index = (top + row).clamp(0, height - 1) * width + (left + column).clamp(0, width - 1)
        return flat.gather(2, index.long().view(n, 1, -1).expand(-1, 3, -1)).view_as(images).float()

    result = blend(*(blend(*(pixel(row, column) for column in taps), dx) for row in taps), dy)
    return torch.where(inside[:, None], result.clamp(0, 255), fill).to(torch.uint8)


def _linear(v0, v1, d):
    return v0 + (v1 - v0) * d


def _cubic(v0, v1, v2, v3, d):
    # Written in differences, so that even areas stay even to the bit.
    return v1 + d * (v2 - v0 + d * (2 * (v0 - v1) + v2 - v3 + d * (v1 - v0 + v3 - v2)))


def _factor(arguments):
    return arguments[:, 0].view(-1, 1, 1, 1)


def _blend(images, other, arguments):
    """From `other` at factor 0 over the image at 1 to its opposite, cut to whole numbers as PIL does."""
    images, other = images.float(), other.float()
    return (other + _factor(arguments) * (images - other)).clamp(0, 255).to(torch.uint8)


def _gray(images):
    red, green, blue = images.int().split(1, dim=1)
    return (red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16  # (n, 1, H, W)


def _contrast(images, arguments, fill):
    gray = _gray(images)
    mean = (gray.sum((1, 2, 3), keepdim=True).double() / gray[0].numel() + 0.5).floor()
    return _blend(images, mean, arguments)


def _sharpness(images, arguments, fill):
    kernel = torch.ones(3, 1, 3, 3, device=images.device)
    kernel[:, :, 1, 1] = 5
    smooth = images.float()
    sums = F.conv2d(smooth, kernel, groups=3)  # whole numbers: exact
    smooth[:, :, 1:-1, 1:-1] = (sums / 13 + 0.5).floor()
    return _blend(images, smooth, arguments)


def _auto_contrast(images, arguments, fill):
    low, high = images.amin((2, 3), keepdim=True).double(), images.amax((2, 3), keepdim=True).double()
    scale = torch.full_like(high, 255) / (high - low)  # 255 / tensor multiplies by the rounded reciprocal
    spread = (images * scale - low * scale).clamp(0, 255)
    return torch.where(high > low, spread, images.double()).to(torch.uint8)


def _equalize(images, arguments, fill):
    flat = images.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = 255 - (counts > 0).int().flip(2).argmax(2, keepdim=True)
    step = (flat.shape[2] - counts.gather(2, last)) // 255
    table = (step // 2 + counts.cumsum(2) - counts) // step.clamp(min=1)
    table = torch.where(step > 0, table.clamp(max=255), torch.arange(256, device=images.device))
    return table.to(torch.uint8).gather(2, flat).view_as(images)


def _posterize(images, arguments, fill):
    lost = 8 - _factor(arguments).int().clamp(1, 8)  # PIL wants one bit at least
    return ((images.int() >> lost) << lost).to(torch.uint8)


def _solarize(images, arguments, fill):
    return torch.where(images < _factor(arguments), images, 255 - images)


def _solarize_add(images, arguments, fill):
    return torch.where(images < 128, (images + _factor(arguments)).clamp(max=255).to(torch.uint8), images)


_OPERATIONS = {
    "horizontal": lambda images, arguments, fill: images.flip(3),
    "vertical": lambda images, arguments, fill: images.flip(2),
    "bicubic": functools.partial(_transform, bilinear=False),
    "bilinear": functools.partial(_transform, bilinear=True),
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
_KINDS = ("", *_AFFINE, *(name for name in _OPERATIONS if name[0].isupper()))


def device_batches(loader, device, finish=None):
    """Batches on a device, each sent there while the one before is worked on.

    On a GPU the copy and `finish` run on a stream of their own, one batch ahead; pinned memory (`pin_memory` of the
    loader) makes the copy run beside the network. On a CPU nothing is fetched ahead.

    Args:
        loader: iterable of (inputs, targets).
        device: torch device.
        finish: the device's half of `split_transform`; without it inputs are images, ready as they are.

    Yields:
        images float32 (B, 3, H, W), targets int64 (B,), to be used on the stream that is current when they come.
    """
    device = torch.device(device)

    def send(inputs, targets):
        inputs = finish(inputs, device) if finish else inputs.to(device, non_blocking=True)
        return inputs, targets.to(device, non_blocking=True)

    if device.type != "cuda":
        for batch in loader:
            yield send(*batch)
        return
    side, ready = _side_stream(device), None
    for batch in loader:
        # What the caller has let go may be written over from here on, so its work on that comes first.
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            coming = send(*batch)
        if ready is not None:
            yield ready
        torch.cuda.current_stream(device).wait_stream(side)
        ready = coming
    if ready is not None:
        yield ready


@functools.lru_cache
def _side_stream(device):
    # One for all epochs: memory freed on a stream serves that stream only.
    return torch.cuda.Stream(device)
