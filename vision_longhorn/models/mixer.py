"""The bidirectional state-space mixer: what stands in a Vision Longhorn block where a transformer has attention.

The inner block is that of Longhorn (arXiv 2407.14207) and Mamba (arXiv 2312.00752); its two wirings of a forward and a
backward scan are those of Vision Mamba (arXiv 2401.09417) and of the Longhorn authors' vision code.
"""

import math
from typing import Optional

import torch
from torch import Tensor, nn

from vision_longhorn import kernels  # noqa: F401  (registers torch.ops.vision_longhorn)

MIXERS = ("longhorn", "mamba")
RULES = ("diagonal", "exact")
WIRINGS = ("vim", "shared")
BETAS = ("vector", "scalar")


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError naming the option, the value and what is allowed, unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(map(repr, allowed))}")


class BidirectionalMixer(nn.Module):
    """Projection, short convolution, a scan in each direction, gate, projection: (B, L, dim) to (B, L, dim).

    Per direction, x is convolved and gives the step size (through a head of rank `dt_rank`), the key and the query (B
    and C for Mamba) of each token; the scan runs over x, and both directions meet under one gate silu(z):

    - wiring "vim": each direction has its own convolution, projections, step bias and skip; the gated outputs are
      averaged.
    - wiring "shared": one set serves both directions (its convolution looks backward in both); each scan's output is
      RMS-normalised with a weight of its own, and their sum is gated.

    Parameters of the directions are stacked along a leading axis of 2 ("vim") or 1 ("shared"), so that one product
    serves both.

    Args:
        dim: width of the tokens.
        d_state: state size N per channel.
        d_conv: width of the convolution, in tokens.
        expand: inner width over `dim`.
        dt_rank: rank of the step-size head; ceil(dim / 16) if None.
        mixer: "longhorn" or "mamba".
        rule: Longhorn's update, "diagonal" or "exact".
        wiring: "vim" or "shared".
        beta: "vector" for a step size per channel, "scalar" for one per token.
        residual_layers: number of blocks whose outputs add up; scales `out_proj` at initialisation.
        eps: of the norms in the "shared" wiring.
        save_states: in training, keep the states that the scan's backward pass starts from instead of finding them
            again: faster, at d_inner N / 2 bytes a token and direction for each block (on a GPU the exact rule
            d_inner (4 + N / 16)).

    Raises:
        ValueError: an option is not known, or `rule="exact"` is asked of Mamba.
    """

    def __init__(
        self,
        dim: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: Optional[int] = None,
        mixer: str = "longhorn",
        rule: str = "diagonal",
        wiring: str = "vim",
        beta: str = "vector",
        residual_layers: int = 1,
        eps: float = 1e-5,
        save_states: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        check_choice("mixer", mixer, MIXERS)
        check_choice("rule", rule, RULES)
        check_choice("wiring", wiring, WIRINGS)
        check_choice("beta", beta, BETAS)
        if mixer == "mamba" and rule != "diagonal":
            raise ValueError(f"rule={rule!r} belongs to Longhorn; with mixer='mamba' leave it at 'diagonal'")
        dd = {"device": device, "dtype": dtype}
        self.d_inner = d_inner = int(expand * dim)
        self.d_state = d_state
        self.dt_rank = dt_rank = math.ceil(dim / 16) if dt_rank is None else dt_rank
        self.is_mamba = mixer == "mamba"
        self.rule = "mamba" if self.is_mamba else rule
        self.shared = wiring == "shared"
        self.residual_layers = residual_layers
        self.eps = eps
        self.save_states = save_states
        self.scan_backend = "auto"
        self.sets = sets = 1 if self.shared else 2
        steps = d_inner if beta == "vector" else 1

        self.in_proj = nn.Linear(dim, 2 * d_inner, bias=False, **dd)
        self.conv_weight = nn.Parameter(torch.empty(sets, d_inner, d_conv, **dd))
        self.conv_bias = nn.Parameter(torch.empty(sets, d_inner, **dd))
        self.x_proj = nn.Parameter(torch.empty(sets, dt_rank + 2 * d_state, d_inner, **dd))
        self.dt_proj = nn.Parameter(torch.empty(sets, steps, dt_rank, **dd))
        self.dt_bias = nn.Parameter(torch.empty(sets, steps, **dd))
        self.A_log = nn.Parameter(torch.empty(sets, d_inner, d_state, **dd)) if self.is_mamba else None
        self.D = nn.Parameter(torch.empty(sets, d_inner, **dd))
        self.norm_weight = nn.Parameter(torch.empty(2, d_inner, **dd)) if self.shared else None
        self.out_proj = nn.Linear(d_inner, dim, bias=False, **dd)
        self.reset_parameters()

    # Not matrices: their decay would pull decay rates, skips and offsets towards values with no meaning.
    NO_WEIGHT_DECAY = ("conv_bias", "dt_bias", "A_log", "D", "norm_weight")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise as the official Mamba and Longhorn blocks do (design: docs/models.md)."""
        self.in_proj.reset_parameters()
        bound = self.conv_weight.shape[-1] ** -0.5
        nn.init.uniform_(self.conv_weight, -bound, bound)
        nn.init.uniform_(self.conv_bias, -bound, bound)
        bound = self.d_inner ** -0.5  # what kaiming_uniform_(a=sqrt(5)) gives each direction's own matrix
        nn.init.uniform_(self.x_proj, -bound, bound)
        bound = self.dt_rank ** -0.5
        nn.init.uniform_(self.dt_proj, -bound, bound)
        if self.A_log is None:
            nn.init.zeros_(self.dt_bias)  # beta starts near 1/2
        else:
            # softplus(dt_bias) is log-uniform in [1e-3, 1e-1].
            dt = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
            states = torch.arange(1, self.d_state + 1, device=self.A_log.device, dtype=torch.float32)
            self.A_log.copy_(states.log().to(self.A_log.dtype).expand_as(self.A_log))
        nn.init.ones_(self.D)
        if self.norm_weight is not None:
            nn.init.ones_(self.norm_weight)
        nn.init.kaiming_uniform_(self.out_proj.weight, a=math.sqrt(5))
        self.out_proj.weight.div_(math.sqrt(self.residual_layers))

    def forward(self, h: Tensor) -> Tensor:
        # The operator itself rather than a wrapper: torch.fx and TorchScript trace through operators.
        y, _, _, _ = torch.ops.vision_longhorn.mix(
            self.in_proj(h), self.conv_weight, self.conv_bias, self.x_proj, self.dt_proj, self.dt_bias, self.A_log,
            self.D, self.norm_weight, self.rule, self.eps, self.save_states and self.training, self.scan_backend)
        return self.out_proj(y)

    def extra_repr(self) -> str:
        return f"rule={self.rule}, wiring={'shared' if self.shared else 'vim'}, d_state={self.d_state}"
