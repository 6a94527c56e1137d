"""Mamba-2's mixer (Dao and Gu, "Transformers are SSMs", arXiv 2405.21060) in both directions, in plain torch.

All decays of a head are one number a token, so a scan over L tokens is a product with one L x L matrix, its "quadratic
form". Where both directions share their inputs, one matrix has both scans: the forward one below its diagonal, the
backward one above.
"""

import math
from typing import Any, Final, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_longhorn.kernels.contract import check_option, check_sizes, wide
from vision_longhorn.kernels.rules import get_rule
from vision_longhorn.models.mixers.state_space import conv_shape

WIRINGS = ("shared", "forward")


@torch.fx.wrap  # torch.fx cannot follow what depends on a dtype or length, and takes it as one step
def short_conv(x: Tensor, weight: Tensor, bias: Tensor, rows: int) -> Tensor:
    """Convolve each channel of tokens (B, L, D), which stand in `rows` rows, and apply SiLU: (B, L, D).

    A weight (D, K, K) covers the patches around each one; a weight (D, 1, K) covers the last K tokens of the one row.
    Sums of shifted tokens have gradients of the same bits in each run, and become one kernel when compiled.
    """
    columns, K = x.shape[1] // rows, weight.shape[2]
    past, above = (K - 1, 0) if weight.shape[1] == 1 else (K // 2, K // 2)
    padded = F.pad(x.unflatten(1, (rows, columns)), (0, 0, past, K - 1 - past, above, above))  # (B, H, W, D)
    weight, y = weight.to(wide(x)), bias.to(wide(x))
    for i in range(weight.shape[1]):
        for j in range(K):
            y = y + padded[:, i : i + rows, j : j + columns] * weight[:, i, j]
    return F.silu(y).to(x.dtype).flatten(1, 2)


def step_sizes(step: Tensor, dt_bias: Tensor, A_log: Tensor) -> tuple[Tensor, Tensor]:
    """Return the step sizes dt of tokens and heads, and the logarithms of their decays, in float32 (float64 for
    float64): two of (B, heads, L), from the logits `step` (B, L, heads)."""
    dt = F.softplus(step.to(wide(step)) + dt_bias).transpose(1, 2)
    return dt, -A_log.to(wide(step)).exp().unsqueeze(-1) * dt


@torch.fx.wrap
def quadratic_form(
    xBC: Tensor, step: Tensor, dt_bias: Tensor, A_log: Tensor, D: Tensor, d_state: int, causal: bool
) -> Tensor:
    """Scan all heads as one product with an L x L matrix for each: forward if `causal`, else the mean of both
    directions.

    Args:
        xBC: x, B and C of each token, side by side, (B, L, d_inner + 2 d_state).
        step: logits of the step sizes, (B, L, heads).
        dt_bias, A_log, D: of the heads, (heads,).
        d_state: width of B and of C.
        causal: leave the backward scan out.

    Returns:
        y (B, L, d_inner), in x's dtype or a wider one of D.
    """
    L, heads = step.shape[1], step.shape[2]
    x, B, C = xBC.split([xBC.shape[2] - 2 * d_state, d_state, d_state], -1)
    x = x.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, heads, L, head_dim)
    dt, log_decay = step_sizes(step, dt_bias, A_log)  # (B, heads, L)

    # Row t, column s: the log of what is left of token s's write when token t reads it. A scan applies the decays of t
    # and of all tokens in between.
    earlier = torch.ones(L, L, dtype=torch.bool, device=xBC.device).tril()  # or the row's own token
    to = log_decay.unsqueeze(-2).masked_fill(~earlier, 0).sum(-1)  # cumsum, which on a GPU counts as not deterministic
    before = to - log_decay
    decays = to.unsqueeze(-1) - to.unsqueeze(-2)  # (B, heads, L, L)
    if causal:
        decays = decays.masked_fill(~earlier, -math.inf)
    else:
        decays = torch.where(earlier, decays, before.unsqueeze(-2) - before.unsqueeze(-1))

    reads = C @ B.transpose(1, 2)  # (B, L, L), the same for all heads
    written = (dt.unsqueeze(-1) * x).to(x.dtype)
    y = (decays.exp() * reads.unsqueeze(1)).to(x.dtype) @ written  # (B, heads, L, head_dim)
    if not causal:  # the mean of two scans, each of which has the diagonal
        y = (y + reads.diagonal(0, 1, 2).unsqueeze(1).unsqueeze(-1) * written) / 2
    return (y + D.view(-1, 1, 1) * x).transpose(1, 2).flatten(2)


class Mamba2Mixer(nn.Module):
    """Projection, short convolution, Mamba-2's scan in both directions, gate, norm, projection: (B, L, dim) to
    (B, L, dim).

    `in_proj` gives the gate z, x, B, C (the same for all heads) and a step size for each head; x, B and C are convolved
    and go through SiLU. With dt_t = softplus(step_t + dt_bias) and a_t = exp(-exp(A_log) dt_t), a head scans its
    channels of x by

        S_t = a_t S_{t-1} + dt_t x_t B_t^T,    y_t = S_t C_t + D x_t

    and out_proj(RMSNorm(y * silu(z))) is the output. The scans of both directions share all parameters and x, B, C and
    dt; y is their mean, so a token meets itself with weight 1 and any other with half of what its one scan says. A
    causal convolution looks backward for both scans.

    A forward pass takes L^2 numbers a head and image, in float32 for the decays: this is for images of some hundred to
    a few thousand tokens. Decays come from float32 sums of their logarithms over all tokens, which err by about 1e-7 of
    the sum's size.

    Args:
        dim: width of the tokens.
        d_state: state size N per channel.
        d_conv: width of the convolution; 4 tokens if None, or with conv="grid" 3 patches, where it must be odd.
        expand: inner width over `dim`.
        head_dim: channels of a head; 64 if None, or the inner width if that is less.
        wiring: "shared" for both directions, or "forward" for one scan from the first token to the last.
        conv: "causal", a convolution along the tokens, or "grid", one over the grid of patches, row by row; the mixer
            is then called with the number of rows, and has no place for a class token.
        residual_layers: number of residual branches that add up; scales `out_proj` at initialisation.
        eps: of the norm.

    Raises:
        ValueError: an option's value is not known, or `head_dim` does not divide the inner width.
    """

    NO_WEIGHT_DECAY = ("conv_bias", "dt_bias", "A_log", "D")
    needs_grid: Final[bool]

    def __init__(
        self,
        dim: int,
        d_state: int = 64,
        d_conv: Optional[int] = None,
        expand: int = 2,
        head_dim: Optional[int] = None,
        wiring: str = "shared",
        conv: str = "causal",
        residual_layers: int = 1,
        eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        check_option("wiring", wiring, WIRINGS)
        dd = {"device": device, "dtype": dtype}
        d_inner = int(expand * dim)
        check_sizes({"d_state": d_state, "int(expand * dim)": d_inner})
        head_dim = min(64, d_inner) if head_dim is None else head_dim
        if head_dim < 1 or d_inner % head_dim:
            raise ValueError(
                f"head_dim={head_dim} does not divide the inner width of {d_inner} into heads: give a divisor of it"
            )
        self.num_heads, self.d_state, self.wiring = d_inner // head_dim, d_state, wiring
        self.residual_layers, self.needs_grid = residual_layers, conv == "grid"
        self.widths = [d_inner, d_inner + 2 * d_state, self.num_heads]  # z; x, B and C; step sizes
        channels = self.widths[1]
        taps = conv_shape(conv, d_conv, wiring, 1, channels)

        self.in_proj = nn.Linear(dim, sum(self.widths), bias=False, **dd)
        self.conv_weight = nn.Parameter(torch.empty(channels, taps[-1] if self.needs_grid else 1, taps[-1], **dd))
        self.conv_bias = nn.Parameter(torch.empty(channels, **dd))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads, **dd))
        self.A_log = nn.Parameter(torch.empty(self.num_heads, **dd))
        self.D = nn.Parameter(torch.empty(self.num_heads, **dd))
        self.norm = nn.RMSNorm(d_inner, eps=eps, **dd)
        self.out_proj = nn.Linear(d_inner, dim, bias=False, **dd)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise as the official Mamba-2 block does: a head's A uniformly in 1 to 16, its dt log-uniformly in 1e-3
        to 1e-1."""
        self.in_proj.reset_parameters()
        bound = self.conv_weight[0].numel() ** -0.5
        nn.init.uniform_(self.conv_weight, -bound, bound)
        nn.init.uniform_(self.conv_bias, -bound, bound)
        self.norm.reset_parameters()
        get_rule("mamba").reset_bias(self.dt_bias)
        self.A_log.uniform_(1, 16).log_()
        nn.init.ones_(self.D)
        self.out_proj.reset_parameters()
        self.out_proj.weight.div_(math.sqrt(self.residual_layers))

    def forward(self, h: Tensor, rows: int = 0) -> Tensor:
        """Map tokens (B, L, dim) to (B, L, dim). With conv="grid" they are patches in `rows` rows."""
        z, xBC, step = self.in_proj(h).split(self.widths, -1)
        xBC = short_conv(xBC, self.conv_weight, self.conv_bias, rows if self.needs_grid else 1)
        y = quadratic_form(xBC, step, self.dt_bias, self.A_log, self.D, self.d_state, self.wiring == "forward")
        return self.out_proj(self.norm((y * F.silu(z)).to(self.norm.weight.dtype)))

    def forgetting_and_write(self, h: Tensor, rows: int = 0) -> Tensor:
        """Compute forgetting and write strength of what `forward` is given, as `vision_longhorn.maps` defines them:
        (2, B, 2, L). The last 2 are the directions, which are equal."""
        step = self.in_proj(h)[..., -self.num_heads :]
        dt, log_decay = step_sizes(step, self.dt_bias, self.A_log)
        found = torch.stack([-log_decay.expm1(), dt]).mean(2)  # (2, B, L)
        return found.unsqueeze(2).expand(-1, -1, 2, -1)

    def describe(self) -> str:
        """Describe the mixer for a model card."""
        conv = ", convolution over the grid" if self.needs_grid else ""
        return f"mamba2, {self.num_heads} heads, state size {self.d_state}, {self.wiring} wiring{conv}"

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, d_state={self.d_state}, wiring={self.wiring}"
