"""Softmax attention in the place of a gated scan, with as many parameters, as a baseline for state-space blocks."""

import math
from typing import Any, Optional

import torch.nn.functional as F
from torch import Tensor, nn

from vision_longhorn.kernels.contract import check_switches


def _inner_width(dim: int, heads: int, expand: float) -> int:
    """Choose the width of queries, keys, values and gate so that the mixer has about as many parameters as a
    `BidirectionalMixer` with that `expand`. The width of a head is a multiple of 8."""
    inner, rank, d_state, taps = int(expand * dim), math.ceil(dim / 16), 16, 4
    ours = 3 * dim * inner + 2 * inner * (taps + rank + 2 * d_state + rank + 3)
    return heads * max(1, round(ours / (5 * dim * heads * 8))) * 8


class GatedAttention(nn.Module):
    """Multi-head attention (arXiv 1706.03762) by torch's `scaled_dot_product_attention`, its output gated by silu(z)
    as a scan's is: (B, L, dim) to (B, L, dim).

    It has no notion of order: only the model's position embedding tells where a token stands.

    Args:
        dim: width of the tokens.
        num_heads: heads; dim / 64, at least 1, if None.
        causal: whether a token sees only itself and those before it.
        expand: that of a scan with about as many parameters.
        residual_layers: number of residual branches that add up; scales `out_proj` at initialisation.

    Raises:
        ValueError: `num_heads` is less than 1.
    """

    def __init__(
        self,
        dim: int,
        num_heads: Optional[int] = None,
        causal: bool = False,
        expand: float = 2,
        residual_layers: int = 1,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        self.num_heads = max(1, dim // 64) if num_heads is None else num_heads
        if self.num_heads < 1:
            raise ValueError(f"num_heads={num_heads} is too few; give 1 or more")
        check_switches({"causal": causal})
        self.causal = bool(causal)
        self.residual_layers = residual_layers
        inner = _inner_width(dim, self.num_heads, expand)
        self.in_proj = nn.Linear(dim, 4 * inner, bias=False, device=device, dtype=dtype)
        self.out_proj = nn.Linear(inner, dim, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as the projections of `BidirectionalMixer`."""
        self.in_proj.reset_parameters()
        self.out_proj.reset_parameters()
        self.out_proj.weight.data.div_(math.sqrt(self.residual_layers))

    def forward(self, h: Tensor) -> Tensor:
        """Map tokens (B, L, dim) to (B, L, dim)."""
        q, k, v, z = self.in_proj(h).chunk(4, -1)  # (B, L, inner)
        # (B, heads, L, ..)
        q, k, v = (value.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for value in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out_proj(y.transpose(1, 2).flatten(2) * F.silu(z))

    def describe(self) -> str:
        """Describe the mixer for a model card."""
        return f"{'causal ' if self.causal else ''}attention, {self.num_heads} heads"

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, causal={self.causal}"
