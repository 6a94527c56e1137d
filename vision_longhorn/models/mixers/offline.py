"""Longhorn's regression over the whole image at once, in plain torch: a state that no scan has to find."""

import math
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_longhorn import kernels  # noqa: F401  (registers torch.ops.vision_longhorn)
from vision_longhorn.kernels.backends.torch.rope import angles
from vision_longhorn.kernels.backends.torch.unit import unit

_NEWTON_STEPS = 16  # each squares the error: enough while row sums are at most 5,000 times the smallest eigenvalue
_LEAST_RIDGE = 1e-3  # over N. The row sums of K^T diag(w) K are at most N sqrt(N), so keys of up to 32 converge.


def inverse(G: Tensor) -> Tensor:
    """Return the inverse of symmetric positive definite matrices (.., N, N), by Newton's iteration.

    It consists of products alone, so it needs no library of a GPU and can be captured and exported. Its first steps
    have no gradient: the derivative of the last one, P (2 - G P) at P = G^-1, is that of the inverse, -P dG P.
    """
    two = 2 * torch.eye(G.shape[-1], device=G.device, dtype=G.dtype)
    with torch.no_grad():
        P = two / (2 * G.abs().sum(-1).amax(-1)[..., None, None])  # all eigenvalues of G P are in (0, 1]
        for _ in range(_NEWTON_STEPS):
            P = P @ (two - G @ P)
    return P @ (two - G @ P)


def turned(v: Tensor, rows: int) -> Tensor:
    """Turn keys or queries (.., L, N) by the places of their patches, which stand in `rows` rows, as
    `kernels.backends.torch.rope` does it."""
    L, N = v.shape[-2:]
    angle = angles(rows, L // rows, N, v)  # (L, N / 2)
    cos, sin = angle.cos(), angle.sin()
    x, y = v.unflatten(-1, (N // 2, 2)).unbind(-1)
    return torch.stack([x * cos - y * sin, x * sin + y * cos], -1).flatten(-2)


@torch.fx.wrap  # torch.fx cannot follow what depends on a dtype, and takes it as one step
def regression(
    x: Tensor, low: Tensor, beta_bias: Tensor, ridge_log: Tensor, D: Tensor, rows: int, rope: bool, solve: bool
) -> Tensor:
    """Fit each head's values by its keys, and read the fit at the queries.

    Args:
        x: values, (B, L, heads C).
        low: of each token the keys and queries of all heads and the logits of beta, (B, L, heads (2 N + 1)).
        beta_bias, ridge_log: (heads,); ridge_log is the logarithm of the ridge, which is at least N / 1000.
        D: skip weight, (heads C,).
        rows: of the grid, in which the tokens stand row by row.
        rope: turn keys and queries by their place.
        solve: find the minimiser; else that for keys in all directions alike, whose K^T diag(w) K is I.

    Returns:
        y (B, L, heads C), in the dtype of x.
    """
    heads = len(beta_bias)
    N = (low.shape[-1] // heads - 1) // 2
    with torch.autocast(x.device.type, enabled=False):
        kq, logits = low[..., : 2 * heads * N], low[..., 2 * heads * N :]
        k, q = unit(kq.unflatten(-1, (2, heads, N)).permute(2, 0, 3, 1, 4))  # each (B, heads, L, N)
        if rope:
            k, q = turned(k, rows), turned(q, rows)
        beta = torch.sigmoid(logits.to(k.dtype) + beta_bias).transpose(1, 2)  # (B, heads, L)
        weight = beta * (N / beta.sum(-1, keepdim=True))
        ridge = ridge_log.to(k.dtype).exp().clamp(min=_LEAST_RIDGE * N)[:, None, None]
        written = (k * weight.unsqueeze(-1)).transpose(2, 3)  # (B, heads, N, L)
        v = x.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, heads, L, C)
        S = (written.to(x.dtype) @ v).to(k.dtype)  # (B, heads, N, C)
        if solve:
            S = inverse(written @ k + ridge * torch.eye(N, device=x.device, dtype=k.dtype)) @ S
        else:
            S = S / (1 + ridge)
        y = q.to(x.dtype) @ S.to(x.dtype)
    return y.transpose(1, 2).flatten(2) + x * D.to(x.dtype)


class OfflineLonghorn(nn.Module):
    """Projection, convolution, Longhorn's regression over all patches at once, projection: (B, L, dim) to (B, L, dim).

    Longhorn (arXiv 2407.14207) makes each token a step of online learning: the new state S stays near the old one and
    maps the token's key to its value. In an image all tokens are there from the start. So here the state of a head is
    the best one for all of them together, and no scan has to find it:

        S = argmin_S  sum_t w_t ||S k_t - x_t||^2 + ridge ||S||^2,     y_t = S q_t + D x_t

    which is S = X^T diag(w) K (K^T diag(w) K + ridge I)^-1, with the tokens' keys and values in the rows of K and X.
    The weights w_t = N beta_t / sum_s beta_s add up to the N numbers of a key, so that images of any size have the same
    ridge. x comes from `in_proj` and a convolution over the grid of patches, and gives keys and queries of unit length,
    and beta between 0 and 1. Only `rope` tells the regression where a patch stands. The time grows with the number of
    patches, not its square.

    Args:
        dim: width of the tokens.
        d_state: width N of the keys; with `rope` a multiple of 4.
        d_conv: side of the convolution's window in patches, odd.
        expand: inner width over `dim`.
        head_dim: channels of a head; 64 if None, or the inner width if that is less.
        rope: turn keys and queries by the row and column of their patch (`kernels/backends/torch/rope.py`).
        solve: with False K^T diag(w) K is taken for I, which it is on average, if keys point in all directions alike.
            Then S = X^T diag(w) K / (1 + ridge), which is linear attention.
        residual_layers: number of blocks whose outputs add up; scales `out_proj` at initialisation.

    Raises:
        ValueError: `head_dim` does not divide the inner width, `d_conv` is even, or `d_state` does not fit `rope`.
    """

    NO_WEIGHT_DECAY = ("conv_bias", "beta_bias", "ridge_log", "D")
    needs_grid = True

    def __init__(
        self,
        dim: int,
        d_state: int = 32,
        d_conv: int = 3,
        expand: float = 2,
        head_dim: Optional[int] = None,
        rope: bool = True,
        solve: bool = True,
        residual_layers: int = 1,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        if type(d_conv) is not int or d_conv < 1 or d_conv % 2 == 0:
            raise ValueError(f"d_conv={d_conv!r}: give an odd number of patches, such as 3")
        if rope and d_state % 4:
            raise ValueError(f"rope=True with d_state={d_state}: give a multiple of 4, since points of two axes turn")
        d_inner = int(expand * dim)
        head_dim = min(64, d_inner) if head_dim is None else head_dim
        if head_dim < 1 or d_inner % head_dim:
            raise ValueError(f"head_dim={head_dim} does not divide the inner width of {d_inner} into heads")
        dd = {"device": device, "dtype": dtype}
        self.num_heads, self.d_state, self.rope, self.solve = d_inner // head_dim, d_state, rope, solve
        self.residual_layers = residual_layers
        self.in_proj = nn.Linear(dim, d_inner, bias=False, **dd)
        self.conv_weight = nn.Parameter(torch.empty(d_inner, d_conv, d_conv, **dd))
        self.conv_bias = nn.Parameter(torch.empty(d_inner, **dd))
        # With its first axis Muon leaves it to AdamW, as that of `BidirectionalMixer`: keys learn faster so.
        self.x_proj = nn.Parameter(torch.empty(1, self.num_heads * (2 * d_state + 1), d_inner, **dd))
        self.beta_bias = nn.Parameter(torch.empty(self.num_heads, **dd))
        self.ridge_log = nn.Parameter(torch.empty(self.num_heads, **dd))
        self.D = nn.Parameter(torch.empty(d_inner, **dd))
        self.out_proj = nn.Linear(d_inner, dim, bias=False, **dd)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise as `BidirectionalMixer`, with beta near 1/2 and a ridge of 1/4."""
        self.in_proj.reset_parameters()
        bound = self.x_proj.shape[2] ** -0.5
        nn.init.uniform_(self.x_proj, -bound, bound)
        bound = 1 / self.conv_weight.shape[-1]
        nn.init.uniform_(self.conv_weight, -bound, bound)
        nn.init.uniform_(self.conv_bias, -bound, bound)
        nn.init.zeros_(self.beta_bias)
        nn.init.constant_(self.ridge_log, math.log(0.25))
        nn.init.ones_(self.D)
        nn.init.kaiming_uniform_(self.out_proj.weight, a=math.sqrt(5))
        self.out_proj.weight.div_(math.sqrt(self.residual_layers))

    def forward(self, h: Tensor, rows: int) -> Tensor:
        """Map patches (B, L, dim), which stand in `rows` rows, to (B, L, dim)."""
        x = torch.ops.vision_longhorn.grid_conv(self.in_proj(h), self.conv_weight, self.conv_bias, rows, "auto")
        low = F.linear(x, self.x_proj[0])
        y = regression(x, low, self.beta_bias, self.ridge_log, self.D, rows, self.rope, self.solve)
        return self.out_proj(y)

    def describe(self) -> str:
        """Describe the mixer for a model card."""
        rope = ", rotary positions" if self.rope else ""
        name = "longhorn over the whole image" if self.solve else "linear attention"
        return f"{name}, {self.num_heads} heads, keys of {self.d_state}{rope}"

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, d_state={self.d_state}, rope={self.rope}, solve={self.solve}"
