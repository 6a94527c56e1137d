"""Convolutions from images to a grid of patches."""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d, register_notrace_function
from torch import Tensor, nn

from vision_longhorn.models.fusing import is_bare, takes_kernels


def convolve_pixels(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Convolve images (B, C, H, W) with windows (dim, C, 2 n + 1, 2 n + 1) every n pixels, to (B, dim, H / n, W / n).
    H is a multiple of n, and W of n, or of 4 if n is 1.

    With a few channels in bfloat16, cuDNN's own convolution takes as long as a block. So n x n pixels become the
    channels of one place, and every window lies in 3 x 3 places. Zeros fill up the channels to 32 or a multiple of 64,
    with which cuDNN is faster. Windows of 3 x 3 pixels with up to 8 channels become one product.
    """
    dim, C, side, _ = weight.shape
    n = side // 2
    if n == 1 and C <= 8:
        return _multiply_windows(x, weight, bias)
    x = F.pixel_unshuffle(x, n)  # (B, C n n, H / n, W / n)
    weight = F.pad(weight, (0, n - 1, 0, n - 1)).view(dim, C, 3, n, 3, n)  # 3 n pixels; zeros meet the last n - 1
    weight = weight.permute(0, 1, 3, 5, 2, 4).reshape(dim, C * n * n, 3, 3)
    channels = C * n * n
    zeros = (0, 0, 0, 0, 0, -channels % (32 if channels <= 32 else 64))
    x = F.pad(x, zeros).contiguous(memory_format=torch.channels_last)
    return F.conv2d(x, F.pad(weight, zeros), bias, padding=1)


def _multiply_windows(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Convolve images (B, C, H, W) with windows (dim, C, 3, 3) at every pixel as a product: a row has the 3 x 6 pixels
    under four windows side by side, and gives the results of all four."""
    dim, C, _, _ = weight.shape
    B, _, H, W = x.shape
    seen = F.pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 6, 4)  # (B, C, H, W / 4, 3, 6)
    seen = seen.permute(0, 2, 3, 1, 4, 5).reshape(B, H, W // 4, 18 * C)
    weight = torch.stack([F.pad(weight, (j, 3 - j)) for j in range(4)]).view(4 * dim, 18 * C)
    zeros = (0, -18 * C % 8)  # in 16 bits, products are faster if rows have a multiple of 16 bytes
    y = F.linear(F.pad(seen, zeros), F.pad(weight, zeros), None if bias is None else bias.repeat(4))
    return y.view(B, H, W, dim).permute(0, 3, 1, 2)


@torch.fx.wrap
@register_notrace_function
def _convolve(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    if x.is_cuda:
        return convolve_pixels(x, weight, bias)
    step = weight.shape[-1] // 2
    return F.conv2d(x, weight, bias, step, step)


class PixelConv(nn.Conv2d):
    """The first of a stem's convolutions, which a GPU computes by `convolve_pixels`."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        return _convolve(input, weight, bias)  # (B, in_chans, H, W) -> (B, dim, H / stride, W / stride)


class ConvStem(nn.Sequential):
    """Three convolutions in the place of the projection of patches, with as many places as an image has patches.

    They have dim / 4, dim / 2 and dim channels. The first has a window of patch / 2 + 1 pixels and a stride of
    patch / 4. The others have 3 x 3 and 2. A norm over the channels and a SiLU follow each of the first two. (Xiao et
    al., "Early Convolutions Help Transformers See Better", arXiv 2106.14881, have a deeper one.) On a GPU one kernel
    adds a convolution's bias and applies norm and SiLU (`kernels.bias_norm_silu`). The layers are called one by one if
    one of them has a hook or was replaced, in float64, and while a model is traced or exported.

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
        if not torch.jit.is_scripting():
            if _takes_kernel(self, x):
                return _with_kernel(self, x)
        for layer in self:
            x = layer(x)
        return x


def _takes_kernel(stem: ConvStem, x: Any) -> bool:
    """Tell whether one kernel may do what follows each of the first two convolutions."""
    kinds = (PixelConv, LayerNorm2d, nn.SiLU, nn.Conv2d, LayerNorm2d, nn.SiLU)
    layers: list[Any] = list(stem)[: len(kinds)]
    return (
        takes_kernels(x)
        and len(layers) == len(kinds)
        and all(map(is_bare, layers, kinds))
        and all(layers[i].weight is not None and layers[i].bias is not None for i in (0, 1, 3, 4))
    )


def _with_kernel(stem: ConvStem, x: Tensor) -> Tensor:
    layers: list[Any] = list(stem)
    for conv, norm in (layers[:2], layers[3:5]):
        x = conv._conv_forward(x, conv.weight, None)
        grid = x.shape[2:]
        x = x.flatten(2).mT  # (B, rows * columns, channels); inductor changes the layout of what has four axes
        x = torch.ops.vision_longhorn.bias_norm_silu(x, conv.bias, norm.weight, norm.bias, norm.eps, "auto")
        x = x.mT.unflatten(2, grid)
    for layer in layers[6:]:
        x = layer(x)
    return x
