"""Regions of decoded images, resampled to one size as torch and PIL resample images of 8 bits."""

import torch
import torch.nn.functional as F
from torch import Tensor

_STEP = 64  # rows to a multiple of which a GPU's memory is taken, so that it can be used again


def resized_regions(pixels: Tensor, places: Tensor, size: tuple[int, int]) -> Tensor:
    """Cut regions out of images, and resample each to one size. Where a region shrinks, the filter widens.

    Columns are resampled first, then rows, and both results are rounded to 8 bits. On a GPU this needs Triton, and a
    number may differ from what a CPU makes by 1, seldom by 2 where a region is enlarged.

    Args:
        pixels: (n,) uint8, images one behind the other, each (its height, its width, 3). Regions may share an image.
        places: (B, 7) int64 on the CPU. A row has where its image starts in `pixels`, the image's width, then top,
            left, height and width of the region, and 1 for bicubic or 0 for bilinear resampling.
        size: (H, W) of the results.

    Returns:
        (B, 3, H, W) uint8
    """
    if pixels.is_cuda:
        from .resize import resize  # only here, because Triton is optional

        sent = places.pin_memory().to(pixels.device, non_blocking=True)
        rows = -(-int(places[:, 4].max()) // _STEP) * _STEP
        return resize(pixels, sent, rows, size)
    return resized_on_cpu(pixels, places, size)


def resized_on_cpu(pixels: Tensor, places: Tensor, size: tuple[int, int]) -> Tensor:
    """The plain form of `resized_regions`."""
    found = pixels.new_empty(len(places), 3, *size)
    for one, (start, columns, top, left, height, width, is_bicubic) in zip(found, places.tolist(), strict=True):
        image = pixels[start : start + (top + height) * columns * 3].view(top + height, columns, 3)
        region = image[top:, left : left + width].permute(2, 0, 1)
        one.copy_(resized(region, size, "bicubic" if is_bicubic else "bilinear"))
    return found


def resized(image: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """Resample an image (3, height, width) to (3, H, W)."""
    # Decoders store a pixel's colours side by side. Resampling is faster in this layout than in planes.
    image = image[None].contiguous(memory_format=torch.channels_last)
    return F.interpolate(image, size, mode=mode, antialias=True)[0]
