"""Convolutions from images to a grid of patches."""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d, register_notrace_function
from torch import Tensor, nn


def convolve_pixels(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Convolve images (B, C, H, W) with windows (dim, C, 2 n + 1, 2 n + 1) every n pixels, to (B, dim, H / n, W / n).

    n x n pixels become one place with n * n * C channels; 3 x 3 places hold a window. Channels of zeros make them a
    multiple of 8. With three channels in bfloat16, cuDNN's own convolution takes as long as a block.
    """
    dim, C, side, _ = weight.shape
    n = side // 2
    x = F.pixel_unshuffle(x, n)  # (B, C n n, H / n, W / n)
    weight = F.pad(weight, (0, n - 1, 0, n - 1)).view(dim, C, 3, n, 3, n)  # 3 n pixels; zeros meet the last n - 1
    weight = weight.permute(0, 1, 3, 5, 2, 4).reshape(dim, C * n * n, 3, 3)
    zeros = (0, 0, 0, 0, 0, -C * n * n % 8)
    x = F.pad(x, zeros).contiguous(memory_format=torch.channels_last)
    return F.conv2d(x, F.pad(weight, zeros), bias, padding=1)


@torch.fx.wrap
@register_notrace_function
def _convolve(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    if x.is_cuda:
        return convolve_pixels(x, weight, bias)
    step = weight.shape[-1] // 2
    return F.conv2d(x, weight, bias, step, step)


class PixelConv(nn.Conv2d):
    """The first of a stem's convolutions, which a GPU computes by `convolve_pixels`."""

    def forward(self, x: Tensor) -> Tensor:  # (B, in_chans, H, W) -> (B, dim, H / stride, W / stride)
        return _convolve(x, self.weight, self.bias)


class ConvStem(nn.Sequential):
    """Three convolutions in the place of the projection of patches, with as many places as an image has patches.

    They have dim / 4, dim / 2 and dim channels. The first has a window of patch / 2 + 1 pixels and a stride of
    patch / 4. The others have 3 x 3 and 2. A norm over the channels and a SiLU follow each of the first two. (Xiao et
    al., "Early Convolutions Help Transformers See Better", arXiv 2106.14881, have a deeper one.)

    Args:
        in_chans: channels of the images.
        dim: width of the tokens.
        patch_size: height and width of a patch in pixels.
        eps: added to the variance in the norms.

    Raises:
        ValueError: the patches are not square, or their side or `dim` is not a multiple of 4.
    """

    def __init__(
        self, in_chans: int, dim: int, patch_size: tuple[int, int], eps: float, device: Any = None, dtype: Any = None
    ):
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        height, width = patch_size
        if height != width or height % 4:
            raise ValueError(
                f"patch_size={patch_size} with stem='conv': give square patches whose side is a multiple of 4, or "
                "stem='patch'"
            )
        if dim % 4:
            raise ValueError(f"embed_dim={dim} with stem='conv': give a multiple of 4, or stem='patch'")
        step = height // 4
        super().__init__(
            PixelConv(in_chans, dim // 4, 2 * step + 1, step, padding=step, **dd),
            LayerNorm2d(dim // 4, eps=eps, **dd),
            nn.SiLU(),
            nn.Conv2d(dim // 4, dim // 2, 3, 2, padding=1, **dd),
            LayerNorm2d(dim // 2, eps=eps, **dd),
            nn.SiLU(),
            nn.Conv2d(dim // 2, dim, 3, 2, padding=1, **dd),
        )
        self.side = height

    def forward(self, x: Tensor) -> Tensor:  # (B, in_chans, H, W) -> (B, dim, rows, columns)
        H, W = x.shape[-2], x.shape[-1]
        x = x[:, :, : H // self.side * self.side, : W // self.side * self.side]  # whole patches
        x = x.contiguous(memory_format=torch.channels_last)  # as norms and tokens have it, and convolutions are fastest
        for layer in self:
            x = layer(x)
        return x
