"""An MLP with a convolution over the grid of patches inside."""

from typing import Any

import torch
from torch import Tensor, nn

from vision_longhorn import kernels  # noqa: F401  (registers torch.ops.vision_longhorn)
from vision_longhorn.kernels.contract import check_window


class ConvMlp(nn.Module):
    """Two linear layers, and between them a depthwise convolution over the grid of patches and a SiLU. (PVTv2, arXiv
    2106.13797, has one with GELU.)

    Args:
        dim: width of the tokens.
        hidden: width inside.
        size: side of the convolution's window in patches.

    Raises:
        ValueError: `size` is not an odd whole number.
    """

    def __init__(self, dim: int, hidden: int, size: int, device: Any = None, dtype: Any = None):
        super().__init__()
        check_window(f"mlp_conv={size!r}", size, ", or 0 for none")
        self.fc1 = nn.Linear(dim, hidden, device=device, dtype=dtype)
        self.conv_weight = nn.Parameter(torch.empty(hidden, size, size, device=device, dtype=dtype))
        self.conv_bias = nn.Parameter(torch.empty(hidden, device=device, dtype=dtype))
        self.fc2 = nn.Linear(hidden, dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all layers as torch does."""
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()
        bound = 1 / self.conv_weight.shape[-1]
        nn.init.uniform_(self.conv_weight, -bound, bound)
        nn.init.uniform_(self.conv_bias, -bound, bound)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Map patches (B, L, dim) in `rows` rows to (B, L, dim)."""
        h = torch.ops.vision_longhorn.grid_conv(self.fc1(x), self.conv_weight, self.conv_bias, rows, "auto")
        return self.fc2(h)
