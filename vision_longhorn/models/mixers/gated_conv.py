"""A convolution in the place of a scan: what a network does without any mixing over long distances."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_longhorn import kernels  # noqa: F401  (registers torch.ops.vision_longhorn)
from vision_longhorn.kernels.contract import check_sizes, check_window


class GatedConv(nn.Module):
    """A depthwise convolution over the grid of patches, its output gated by silu(z): (B, L, dim) to (B, L, dim).

    It is a `BidirectionalMixer` with conv="grid" whose scan gives nothing, as MambaOut (arXiv 2405.07992) has it to ask
    what a scan is good for. The tokens are patches, row by row.

    Args:
        dim: width of the tokens.
        d_conv: side of the convolution's window in patches.
        expand: inner width over `dim`.
        residual_layers: number of residual branches that add up; scales `out_proj` at initialisation.

    Raises:
        ValueError: `d_conv` is not an odd whole number.
    """

    NO_WEIGHT_DECAY = ("conv_bias",)
    needs_grid = True

    def __init__(
        self,
        dim: int,
        d_conv: int = 3,
        expand: float = 2,
        residual_layers: int = 1,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        check_window(f"d_conv={d_conv!r}", d_conv)
        inner = int(expand * dim)
        check_sizes({"int(expand * dim)": inner})
        self.residual_layers = residual_layers
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False, device=device, dtype=dtype)
        self.conv_weight = nn.Parameter(torch.empty(inner, d_conv, d_conv, device=device, dtype=dtype))
        self.conv_bias = nn.Parameter(torch.empty(inner, device=device, dtype=dtype))
        self.out_proj = nn.Linear(inner, dim, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as the projections and the convolution of `BidirectionalMixer`."""
        self.in_proj.reset_parameters()
        bound = 1 / self.conv_weight.shape[-1]
        nn.init.uniform_(self.conv_weight, -bound, bound)
        nn.init.uniform_(self.conv_bias, -bound, bound)
        self.out_proj.reset_parameters()
        self.out_proj.weight.data.div_(math.sqrt(self.residual_layers))

    def forward(self, h: Tensor, rows: int) -> Tensor:
        """Map patches (B, L, dim) in `rows` rows to (B, L, dim)."""
        x, z = self.in_proj(h).chunk(2, -1)  # (B, L, inner)
        x = torch.ops.vision_longhorn.grid_conv(x, self.conv_weight, self.conv_bias, rows, "auto")
        return self.out_proj(x * F.silu(z))

    def describe(self) -> str:
        """Describe the mixer for a model card."""
        return f"gated convolution, {self.conv_weight.shape[-1]} patches wide"
