"""timm's training transform in two halves: workers decode, and perhaps crop; a device does the rest to whole batches.

timm's own code draws all random numbers in the worker, so they follow the worker's seed. In place of an image it gets
a list of notes, to which it adds what it would do. The notes travel with the batch as a table of numbers.

A row of the table is float64: a seed for noise; top, left, bottom and right of the erased box; then, for each flip and
each operation of a policy, its number in `KINDS` (0 does nothing), its argument, and 1 for bilinear resampling or 0 for
bicubic.
"""

import collections
import copy
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from timm.data import auto_augment
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import MaybeToTensor, RandomResizedCropAndInterpolation, ResizeKeepRatio
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from vision_longhorn.errors import UserError
from vision_longhorn.kernels import HAS_TRITON

from . import operations
from .images import decode_tensor
from .operations import KINDS, make_layer
from .regions import resized, resized_regions

_HEAD = 5
_LARGE = 8  # a worker crops an image with more pixels than this for each of the crop, since sending it takes longer
_STEP = 2**21  # bytes to a multiple of which sent images are filled up, so that memory can be used again
_ENOUGH = 2**22  # bytes of crops up to which small batches are collected, for `Finish` to work on together
Correction = Callable[[torch.Tensor], torch.Tensor] | None  # converts colours to sRGB
View = tuple[torch.Tensor, list[int], list[float]]
Memory = Callable[[int], torch.Tensor]
_memory = functools.partial(torch.empty, dtype=torch.uint8)


def split_transform(transform: transforms.Compose, crop_on_device: bool = False) -> tuple["Crops", "Finish"]:
    """Split a training transform of `timm.data.create_transform`.

    Args:
        transform: the result of `create_transform`.
        crop_on_device: let the device make random resized crops, too. Workers then send each image once for all its
            views, except large ones, which they still crop. Batches must come from `crops.collate`, as those of
            `train_loader` do. This is for a GPU with Triton, and for several views of an image: with one, sending takes
            as long as cropping.

    Returns:
        (crops, finish): `crops` is the transform for `train_loader`, `finish` the argument of `device_batches`.

    Raises:
        UserError: for a step that cannot work on batches, such as AugMix (then use `transform` as it is), and if there
            is no random crop or no normalisation.
    """
    crop: Any = None
    resize: ResizeKeepRatio | None = None
    policies: list[tuple[Any, int]] = []  # each with the largest number of operations that it notes
    normalize = eraser = None
    for step in transform.transforms:
        if isinstance(step, RandomResizedCropAndInterpolation) and crop is None and _can_resample(step):
            crop = step
        elif isinstance(step, ResizeKeepRatio) and resize is crop is None and _can_resample(step):
            resize = step
        elif isinstance(step, transforms.RandomCrop) and resize and crop is None and isinstance(step.fill, int):
            crop = step
        elif isinstance(step, (transforms.RandomHorizontalFlip, transforms.RandomVerticalFlip)):
            kind = "Vertical" if isinstance(step, transforms.RandomVerticalFlip) else "Horizontal"
            policies.append((functools.partial(_flip, kind, step.p), 1))
        elif isinstance(step, (auto_augment.RandAugment, auto_augment.AutoAugment)):
            policies.append(_noting(step))
        elif isinstance(step, transforms.ColorJitter) and step.hue is None:
            policies.append((functools.partial(_jitter, step), 3))
        elif isinstance(step, transforms.Normalize):
            normalize = step
        elif isinstance(step, RandomErasing) and step.max_count == 1:
            eraser = step
        elif not isinstance(step, MaybeToTensor):
            raise _unfit(step)
    if crop is None or normalize is None:
        raise UserError("the transform lacks a random crop or a normalisation; timm's create_transform makes both")
    fill = next((op.kwargs["fillcolor"] for policy, _ in policies for op in getattr(policy, "all_ops", ())), (0, 0, 0))
    size = tuple(crop.size) if crop_on_device and resize is None else None
    return Crops(crop, resize, policies, eraser, size), Finish(normalize.mean, normalize.std, eraser, fill, size)


def _unfit(step: Any) -> UserError:
    return UserError(f"{step} cannot run on batches on a device, so the loader has to run the whole transform")


def _can_resample(step: Any) -> bool:
    varies = getattr(step, "random_scale_prob", 0) or getattr(step, "random_aspect_prob", 0)
    return not varies and set(_as_list(step.interpolation)) <= {InterpolationMode.BICUBIC, InterpolationMode.BILINEAR}


def _as_list(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


def _noting(policy: Any) -> tuple[Any, int]:
    """Copy a policy of timm so that its operations note what they would do. Also return how many it runs at most."""
    policy = copy.deepcopy(policy)
    if hasattr(policy, "ops"):  # RandAugment
        policy.all_ops, most = policy.ops, policy.num_layers
    else:
        policy.all_ops, most = [op for ops in policy.policy for op in ops], max(map(len, policy.policy))
    for op in policy.all_ops:
        name = op.name.removesuffix("Increasing").removesuffix("Original")
        if name not in KINDS:
            raise _unfit(op.name)
        op.aug_fn = functools.partial(_note, name)
    return policy, most


def _note(
    name: str, notes: list[float], argument: float = 0.0, *, fillcolor: Any = None, resample: Any = None
) -> list[float]:
    resample = random.choice(resample) if isinstance(resample, (list, tuple)) else resample
    bilinear = resample is not None and resample == auto_augment.Image.Resampling.BILINEAR
    return notes + [KINDS.index(name), float(argument), float(bilinear)]


def _flip(kind: str, probability: float, notes: list[float]) -> list[float]:
    is_drawn = torch.rand(1).item() < probability  # as torchvision draws it
    return notes + [KINDS.index(kind) if is_drawn else 0, 0, 0]


def _jitter(step: transforms.ColorJitter, notes: list[float]) -> list[float]:
    order, *factors, _ = step.get_params(step.brightness, step.contrast, step.saturation, step.hue)
    for number in order.tolist():
        if number < 3 and factors[number] is not None:
            notes = _note(("Brightness", "Contrast", "Color")[number], notes, factors[number])
    return notes


class _Box:
    """Takes the place of an image where timm erases, and remembers the erased box."""

    dtype = torch.float32

    def __init__(self, height: int, width: int) -> None:
        self.shape, self.box = (3, height, width), [0, 0, 0, 0]

    def size(self) -> tuple[int, int, int]:
        return self.shape

    def __setitem__(self, place: tuple[slice, slice, slice], value: Any) -> None:
        _, rows, columns = place
        self.box = [rows.start, columns.start, rows.stop, columns.stop]


class Crops:
    """The worker's half of `split_transform`: makes a crop and its row of the table from a file's bytes. With a `size`
    it leaves the crops of all but large images to the device."""

    def __init__(
        self,
        crop: Any,
        resize: Any,
        policies: list[tuple[Any, int]],
        eraser: RandomErasing | None,
        size: tuple[int, int] | None = None,
    ) -> None:
        self.crop, self.resize, self.policies, self.size = crop, resize, policies, size
        self.row_length = _HEAD + 3 * sum(most for _, most in policies)
        self.eraser = copy.copy(eraser)
        if self.eraser is not None:
            self.eraser.per_pixel = self.eraser.rand_color = False  # only the box's place is needed

    def decode(self, data: Any) -> tuple[torch.Tensor, Correction]:
        """Decode a file's bytes, or pixels, with `images.decode_tensor`."""
        image, correct = decode_tensor(data)
        if correct and self._is_sent(image):
            return correct(image), None
        return image, correct

    def _is_sent(self, image: torch.Tensor) -> bool:
        """Tell whether the device crops an image, not the worker."""
        return self.size is not None and image[0].numel() <= _LARGE * self.size[0] * self.size[1]

    def __call__(self, decoded: tuple[torch.Tensor, Correction]) -> View:
        """Turn the result of `decode` into (crop, [], row of the table), the crop uint8 (height, width, 3). With a
        `size` it is (image, place, row): the image uint8 (3, H, W), the place its width, then top, left, height and
        width of the crop, and 1 for bicubic or 0 for bilinear resampling."""
        image, correct = decoded
        place = list[int]()
        if self.size is None:
            image = (self._padded_crop if self.resize else self._resized_crop)(image, correct)
        elif correct or not self._is_sent(image):
            image = self._resized_crop(image, correct).permute(2, 0, 1)
            place = [image.shape[2], 0, 0, *image.shape[1:], 0]
        else:
            region, mode = self._region(image), random.choice(_as_list(self.crop.interpolation))
            place = [image.shape[2], *region, mode == InterpolationMode.BICUBIC]
        notes: list[float] = []
        for policy, _ in self.policies:
            notes = policy(notes)
        box = _Box(*(self.size or image.shape[:2]))
        if self.eraser is not None:
            self.eraser(box)
        row = [random.getrandbits(48), *box.box, *notes]
        row += [0] * (self.row_length - len(row))
        return image, place, row

    def collate(self, views: Sequence[View], memory: Memory = _memory) -> list[torch.Tensor]:
        """Make a batch of what `__call__` gives: crops (B, height, width, 3) and the table. With a `size`, pixels (n,)
        and places (B, 7), as `resized_regions` takes them, and the table. An image of several views is there once.
        Crops and pixels lie in `memory(n)`, uint8 (n,)."""
        table = torch.tensor([row for *_, row in views], dtype=torch.float64)
        if self.size is None:
            crops = [crop for crop, *_ in views]
            found = memory(len(crops) * crops[0].numel()).view(-1, *crops[0].shape)
            return [torch.stack(crops, out=found), table]
        images = {id(image): image for image, *_ in views}
        starts = dict(zip(images, itertools.accumulate((image.numel() for image in images.values()), initial=0)))
        pixels = memory(-(-sum(image.numel() for image in images.values()) // _STEP) * _STEP)
        for number, image in images.items():
            start = starts[number]
            pixels[start : start + image.numel()].view(*image.shape[1:], 3).copy_(image.permute(1, 2, 0))
        return [pixels, torch.tensor([[starts[id(image)], *place] for image, place, _ in views]), table]

    def _region(self, image: torch.Tensor) -> tuple[int, int, int, int]:
        top, left, height, width = self.crop.get_params(image, self.crop.scale, self.crop.ratio)
        height, width = max(height, 1), max(width, 1)  # they can be 0 for a picture one pixel high
        return min(top, image.shape[1] - height), min(left, image.shape[2] - width), height, width

    def _resized_crop(self, image: torch.Tensor, correct: Correction) -> torch.Tensor:
        top, left, height, width = self._region(image)
        part = image[:, top : top + height, left : left + width]
        return _resized(part, correct, self.crop.size, self.crop.interpolation)

    def _padded_crop(self, image: torch.Tensor, correct: Correction) -> torch.Tensor:
        size = self.resize.get_params(image, self.resize.size, self.resize.longest)
        image = _resized(image, correct, size, self.resize.interpolation)
        return self.crop(image.permute(2, 0, 1)).permute(1, 2, 0)


def _resized(image: torch.Tensor, correct: Correction, size: Sequence[int], interpolation: Any) -> torch.Tensor:
    """Resample an image (3, H, W) to a size (height, width), and correct its colours. Returns (height, width, 3)."""
    # Colours are corrected before or after resampling, whichever has fewer pixels.
    late = image[0].numel() > size[0] * size[1]
    if correct and not late:
        image = correct(image)
    mode = random.choice(_as_list(interpolation)).value
    if tuple(image.shape[1:]) != tuple(size):
        image = resized(image, (size[0], size[1]), mode)
    return (correct(image) if correct and late else image).permute(1, 2, 0)


class Finish:
    """The device's half of `split_transform`: flips, policy, normalisation and erasing of whole batches. The host never
    waits for the device."""

    def __init__(
        self,
        mean: Any,
        std: Any,
        eraser: RandomErasing | None,
        fill: tuple[int, ...],
        size: tuple[int, int] | None = None,
    ) -> None:
        mean, std = (torch.as_tensor(value, dtype=torch.float32) for value in (mean, std))
        self.eraser, self.size = eraser, size
        # (x / 255 - mean) / std as x scale + shift, and the colour of pixels from outside
        self.colours = torch.stack([1 / (255 * std), -mean / std, torch.tensor(fill, dtype=torch.float32)])

    def __call__(self, batch: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Turn what `Crops.collate` makes into normalised images, float32 (B, 3, H, W), on `device`."""
        return self.together([batch], device)[0]

    def nbytes(self, batch: Sequence[torch.Tensor]) -> int:
        """Tell how many bytes the crops of a batch have, as uint8."""
        return batch[0].nbytes if self.size is None else len(batch[-1]) * 3 * self.size[0] * self.size[1]

    def together(self, batches: Sequence[Sequence[torch.Tensor]], device: torch.device) -> tuple[torch.Tensor, ...]:
        """Finish several batches at once, each with the bits that `__call__` gives. A small batch takes as many kernel
        launches as a large one, so small batches are faster together."""
        tables = [table.tolist() for *_, table in batches]
        notes = [row for table in tables for row in table]
        height, width = self.size or batches[0][0].shape[1:3]
        layers = [make_layer(notes, first, height, width) for first in range(_HEAD, len(notes[0]), 3)]
        boxes = [[n, 0, *row[1:5], 0, 0] for n, row in enumerate(notes) if _is_erased(row)]
        # One copy from pinned memory serves all operations. Many small ones would each wait for the device.
        rows = _send(torch.tensor([*itertools.chain(*layers), *boxes], dtype=torch.float32).view(-1, 8), device)
        scale, shift, fill = _send(self.colours, device).view(3, 3, 1, 1)
        if self.size is None:
            images = torch.cat([crops.to(device, non_blocking=True) for crops, _ in batches])
            images = images.permute(0, 3, 1, 2).contiguous()  # (B, 3, H, W)
        else:
            sent = ((pixels.to(device, non_blocking=True), places) for pixels, places, _ in batches)
            images = torch.cat([resized_regions(*given, self.size) for given in sent])
        forms: ModuleType = operations
        if images.is_cuda and HAS_TRITON:
            from . import fused  # only here, because Triton is optional

            forms = fused
        start = 0
        for layer in layers:
            if layer:
                images = forms.operate(images, layer, rows, start, fill)
                start += len(layer)
        images = forms.normalize(images, scale, shift)
        if self.eraser is not None and boxes:
            forms.erase(images, rows, start, torch.cat([_noise(table, self.eraser, images) for table in tables]))
        return images.split([len(table) for table in tables])


def _is_erased(row: list[float]) -> bool:
    return row[4] > row[2]


def _noise(table: list[list[float]], eraser: RandomErasing, images: torch.Tensor) -> torch.Tensor:
    """Make what fills a batch's erased boxes, (n, 3, H, W) or (n, 3, 1, 1)."""
    shape = images.shape[2:] if eraser.per_pixel else (1, 1)
    noise = images.new_zeros(sum(map(_is_erased, table)), 3, *shape)
    if (eraser.per_pixel or eraser.rand_color) and len(noise):
        noise.normal_(generator=torch.Generator(images.device).manual_seed(int(table[0][0])))
    return noise


def _send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def device_batches(
    loader: Iterable[tuple[Any, ...]], device: str | torch.device, finish: Finish | None = None
) -> Iterator[tuple[Any, ...]]:
    """Yield a loader's batches (images, targets, ...) on a device, to be used on the stream that is current then.

    On a GPU the copy and `finish` run on a stream of their own, one batch ahead; small batches are sent several at a
    time. With pinned memory (`pin_memory` of the loader), copies run beside the network. On a CPU nothing is fetched
    ahead.

    Args:
        loader: yields (inputs, targets, ...); what follows the targets is passed on unchanged.
        finish: the device's half of `split_transform`; without it the inputs have to be finished images.
    """
    device = torch.device(device)

    def send(batches: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        if finish:
            inputs: Iterable[Any] = finish.together([batch[0] for batch in batches], device)
        else:
            inputs = [batch[0].to(device, non_blocking=True) for batch in batches]
        return [
            (images, targets.to(device, non_blocking=True), *others)
            for images, (_, targets, *others) in zip(inputs, batches, strict=True)
        ]

    if device.type != "cuda":
        for batch in loader:
            yield from send([batch])
        return
    side = _side_stream(device)

    def send_aside(batches: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        # This stream may reuse memory that the caller has freed, so it waits for the caller's work on it.
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            return send(batches)

    def wait() -> None:
        torch.cuda.current_stream(device).wait_stream(side)

    yield from _sent_ahead(loader, send_aside, wait, finish.nbytes if finish else None)


def _sent_ahead(
    loader: Iterable[tuple[Any, ...]],
    send: Callable[[list[tuple[Any, ...]]], list[tuple[Any, ...]]],
    wait: Callable[[], None],
    nbytes: Callable[[Any], int] | None,
    most: int = _ENOUGH,
) -> Iterator[tuple[Any, ...]]:
    """Send batches in groups, one group ahead of the one in use, and call `wait` before a group is used. For each batch
    used one is taken from the loader, so that its workers stay busy.

    A group has `most` bytes of images, as `nbytes` counts them, which keep the GPU busy for longer than their launches
    take. The first groups are smaller, as they are needed soon. Without `nbytes` each batch is a group.
    """
    ready, coming = collections.deque[tuple[Any, ...]](), list[tuple[Any, ...]]()
    group, size, enough = list[tuple[Any, ...]](), 0, 0
    errors = list[Exception]()  # raised once all batches before them are used

    def batches() -> Iterator[tuple[Any, ...] | None]:
        try:
            yield from loader
        except Exception as error:
            errors.append(error)
        yield from (None, None)  # two more turns: one sends the last group, one uses it

    for batch in batches():
        if batch is not None:
            group.append(batch)
            size += nbytes(batch[0]) if nbytes else 0
        if batch is None or size >= enough:
            while ready:
                yield ready.popleft()
            wait()
            ready.extend(coming)
            coming = send(group) if group else []
            group, size, enough = [], 0, min(2 * size, most)
        if ready:
            yield ready.popleft()  # without a name here, which would keep the batch in memory after its use
    while ready:
        yield ready.popleft()
    if errors:
        raise errors.pop()


@functools.lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # One stream for all epochs, because torch reuses memory only on the stream that freed it.
    return torch.cuda.Stream(device)
