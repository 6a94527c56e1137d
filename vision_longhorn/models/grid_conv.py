"""A convolution over the grid of patches."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_longhorn.kernels.contract import check_window
from vision_longhorn.models.tokens import join_class, split_class


class GridConv(nn.Module):
    """x + a depthwise convolution of its patches over their grid, padded with zeros; the class token stays as it is.

    Every patch sees its neighbours above and below, which a scan by rows meets a row later, and its distance to the
    border. This is the conditional position encoding of CPVT (arXiv 2102.10882, section 3), before every mixer. Both
    terms are one convolution, so the middle weight is rounded as numbers around 1 are.

    Raises:
        ValueError: `size`, the side of the convolution's window in patches, is not an odd whole number.
    """

    def __init__(self, dim: int, size: int, class_token: str, device: Any = None, dtype: Any = None):
        super().__init__()
        check_window(f"grid_conv={size!r}", size, ", or 0 for none")
        self.class_token = class_token
        self.weight = nn.Parameter(torch.empty(dim, 1, size, size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights uniformly from ±1 / size, as torch initialises convolutions, and set the bias to 0."""
        bound = 1 / self.weight.shape[-1]
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Map tokens (B, L, C), the patches among them in `rows` rows, to (B, L, C)."""
        token, patches = split_class(x, self.class_token)
        B, count, C = patches.shape
        pad = self.weight.shape[-1] // 2
        grid = patches.reshape(B, rows, count // rows, C).permute(0, 3, 1, 2)  # (B, C, H, W), channels last in memory
        # Adding 1 to the middle weight adds x itself, without another pass over memory.
        weight = self.weight + F.pad(torch.ones_like(self.weight[..., :1, :1]), [pad] * 4)
        grid = F.conv2d(grid, weight, self.bias, padding=pad, groups=C)
        patches = grid.permute(0, 2, 3, 1).reshape(B, count, C)
        return join_class(None if token is None else token.to(patches.dtype), patches, self.class_token)
