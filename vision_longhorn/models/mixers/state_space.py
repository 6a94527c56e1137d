"""The state-space mixer: a short convolution and a scan in both directions, under one gate or none.

The inner block is that of Longhorn (arXiv 2407.14207) and Mamba (arXiv 2312.00752); its two wirings of a forward and a
backward scan are those of Vision Mamba (arXiv 2401.09417) and of the Longhorn authors' vision code.
"""

import math
from functools import wraps
from typing import Any, Optional

import torch
from torch import Tensor, nn

from vision_longhorn import kernels  # noqa: F401  (registers torch.ops.vision_longhorn)
from vision_longhorn.kernels.contract import check_option, check_sizes, check_switches, check_window, wide
from vision_longhorn.kernels.dispatch import get_backend
from vision_longhorn.kernels.mixing import GATES, scan_inputs
from vision_longhorn.kernels.rules import NAMES, get_rule
from vision_longhorn.kernels.rules.longhorn import RULES as LONGHORN

WIRINGS = ("vim", "shared", "forward", "alternate")
CONVS = ("causal", "grid")
BETAS = ("vector", "scalar")


def _beta_range(rule: str, low: Optional[float], high: Optional[float]) -> Optional[tuple[float, float]]:
    if low is None and high is None:
        return None
    if get_rule(rule).names["step"] != "beta":
        raise ValueError(f"beta_min={low}, beta_max={high} with rule={rule!r}, which has no beta: leave them out")
    if low is None or high is None or not 0 < low <= high < 1:
        raise ValueError(f"beta_min={low}, beta_max={high}; give both, with 0 < beta_min <= beta_max < 1")
    return low, high


def conv_shape(conv: str, width: Optional[int], wiring: str, sets: int, channels: int) -> tuple[int, ...]:
    """Return the shape of the convolution's weight. `width` is None for its default."""
    check_option("conv", conv, CONVS)
    if conv == "causal":
        width = 4 if width is None else width
        if type(width) is not int or width < 1:
            raise ValueError(f"d_conv={width!r}: give a number of tokens, 1 or more, such as 4")
        return sets, channels, width
    width = 3 if width is None else width
    if wiring == "forward":
        raise ValueError("conv='grid' with wiring='forward', where no token may see a later one: use conv='causal'")
    check_window(f"d_conv={width!r} with conv='grid'", width)
    return 1, channels, width, width


class BidirectionalMixer(nn.Module):
    """Projection, short convolution, a scan in each direction, gate, projection: (B, L, dim) to (B, L, dim).

    Per direction, x is convolved and gives the step size (through a head of rank `dt_rank`), the key and the query (B
    and C for Mamba) of each token; the scan runs over x, and both directions meet under one gate silu(z) (see `gate`):

    - wiring "vim": each direction has its own convolution, projections, step bias and skip; the gated outputs are
      averaged.
    - wiring "shared": one set serves both directions (its convolution looks backward in both); each scan's output is
      RMS-normalised with a weight of its own, and their sum is gated.
    - wiring "forward": one direction, from the first token to the last, for causal tasks.
    - wiring "alternate": one direction, in a block of even index from the first token to the last, else from the last
      to the first, for scan and convolution.

    Parameters of the directions are stacked along a leading axis of 2 ("vim") or 1, so that one product serves both.

    With conv="grid" the tokens are patches, row by row, and one convolution over their grid, which has no direction,
    takes the place of the causal ones: both directions scan what it gives. With this or `rope`, the mixer is called
    with the number of rows, and has no place for a class token.

    Args:
        dim: width of the tokens.
        d_state: state size N per channel.
        d_conv: width of the convolution; 4 tokens if None, or with conv="grid" 3 patches, where it must be odd.
        expand: inner width over `dim`.
        dt_rank: rank of the step-size head; ceil(dim / 16) if None.
        rule: the update, one of `kernels.rules.NAMES`.
        wiring: "vim", "shared", "forward" or "alternate".
        beta: "vector" for a step size per channel, "scalar" for one per token.
        A_per_token: give each token its own decay rate A = -exp(A_log + linear(x)), in the place of one for all (Mamba
            only). The exponent is cut off at 60, where a token forgets everything.
        residual_layers: number of residual branches that add up; scales `out_proj` at initialisation.
        eps: of the norms in the "shared" wiring.
        save_states: in training, keep what the backward pass would compute again, which is faster. For each block these
            are the states that it starts from, d_inner N / 2 bytes a token and direction (for the exact rule on a GPU
            d_inner (4 + N / 16), in chunks d_inner (2 + N / 64)), and except with "shared" the convolved x and a
            decaying rule's step sizes per channel, each as large as x for each set of parameters.
        index: number of the block, from 0; in the "alternate" wiring it decides the direction.
        qk_norm: divide keys and queries (Mamba's B and C) by their lengths, as `kernels.recurrent_scan` does.
        beta_min, beta_max: draw each channel's initial beta log-uniformly from this range, so that their memories
            differ from the start. 0 < beta_min <= beta_max < 1; None for 0.5 everywhere. (Only rules with a beta.)
        conv: "causal", a convolution along the scan of each set of parameters, or "grid".
        rope: turn keys and queries (B and C) by the row and column of their patch, so that their products depend on the
            offset of the patches (2-D rotary position embedding, `kernels/backends/torch/rope.py`). The tokens are
            patches, row by row, and `d_state` is a multiple of 4.
        gate: what the gate silu(z) multiplies: "output", all that the scans give, or "skip", their skip D x alone, so
            that what they read from their states, S q, goes on as it is. With "none" there is no gate: `in_proj` gives
            x alone, and the scans S q + D x. With "value" it gates nothing: the scans run over v = silu(z), which is
            not convolved, and give S q + D v, and the convolved x gives their steps, keys and queries alone. (The
            "shared" wiring takes "output" only.)

    Raises:
        ValueError: an option's value is not known, or the rule cannot have it.
    """

    def __init__(
        self,
        dim: int,
        d_state: int = 16,
        d_conv: Optional[int] = None,
        expand: int = 2,
        dt_rank: Optional[int] = None,
        rule: str = "diagonal",
        wiring: str = "vim",
        beta: str = "vector",
        A_per_token: bool = False,
        residual_layers: int = 1,
        eps: float = 1e-5,
        save_states: bool = False,
        device: Any = None,
        dtype: Any = None,
        index: int = 0,
        qk_norm: bool = False,
        beta_min: Optional[float] = None,
        beta_max: Optional[float] = None,
        conv: str = "causal",
        rope: bool = False,
        gate: str = "output",
    ):
        super().__init__()
        check_option("rule", rule, NAMES)
        check_option("wiring", wiring, WIRINGS)
        check_option("beta", beta, BETAS)
        check_option("gate", gate, GATES)
        check_switches(dict(qk_norm=qk_norm, rope=rope, save_states=save_states, A_per_token=A_per_token))
        if gate != "output" and wiring == "shared":
            raise ValueError(f"gate={gate!r} with wiring='shared', whose gate follows norms: use gate='output'")
        update_rule = get_rule(rule)
        if beta == "scalar" and update_rule.step_per != "channel":
            raise ValueError(
                f"beta='scalar' with rule={rule!r}, which has a decay for each state: leave it at 'vector'"
            )
        if A_per_token and not update_rule.takes_A:
            raise ValueError(f"A_per_token=True with rule={rule!r}, which has no A: it belongs to Mamba")
        if rope and d_state % 4:
            raise ValueError(f"rope=True with d_state={d_state}: give a multiple of 4, since points of two axes turn")
        self.beta_range = _beta_range(rule, beta_min, beta_max)
        dd = {"device": device, "dtype": dtype}
        self.d_inner = d_inner = int(expand * dim)
        self.dt_rank = dt_rank = math.ceil(dim / 16) if dt_rank is None else dt_rank
        check_sizes({"d_state": d_state, "dt_rank": dt_rank, "int(expand * dim)": d_inner})
        self.d_state, self.rule, self.wiring, self.eps = d_state, rule, wiring, eps
        self.residual_layers, self.save_states, self.scan_backend = residual_layers, bool(save_states), "auto"
        self.qk_norm, self.rope, self.over_grid, self.gate = bool(qk_norm), bool(rope), conv == "grid", gate
        sets = 2 if wiring == "vim" else 1
        self.reversed = wiring == "alternate" and index % 2 == 1
        self.needs_grid = rope or self.over_grid
        taps = conv_shape(conv, d_conv, wiring, sets, d_inner)
        steps = d_state if update_rule.step_per == "state" else d_inner if beta == "vector" else 1
        of_token = 3 if A_per_token else 2  # key, query, and perhaps A

        self.in_proj = nn.Linear(dim, d_inner if gate == "none" else 2 * d_inner, bias=False, **dd)
        self.conv_weight = nn.Parameter(torch.empty(*taps, **dd))
        self.conv_bias = nn.Parameter(torch.empty(*taps[:2], **dd))
        self.x_proj = nn.Parameter(torch.empty(sets, dt_rank + of_token * d_state, d_inner, **dd))
        self.dt_proj = nn.Parameter(torch.empty(sets, steps, dt_rank, **dd))
        self.dt_bias = nn.Parameter(torch.empty(sets, steps, **dd))
        A_shape = (sets, d_state) if A_per_token else (sets, d_inner, d_state)
        self.A_log = nn.Parameter(torch.empty(*A_shape, **dd)) if update_rule.takes_A else None
        self.D = nn.Parameter(torch.empty(sets, d_inner, **dd))
        self.norm_weight = nn.Parameter(torch.empty(2, d_inner, **dd)) if wiring == "shared" else None
        self.out_proj = nn.Linear(d_inner, dim, bias=False, **dd)
        self.reset_parameters()

    # These are no matrices: weight decay would pull decay rates, skips and offsets towards arbitrary values.
    NO_WEIGHT_DECAY = ("conv_bias", "dt_bias", "A_log", "D", "norm_weight")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise as Mamba's code does, but out_proj as ViM's, divided by sqrt(residual_layers). `dt_bias` gives
        betas between `beta_min` and `beta_max`, or else is the rule's: for Longhorn 0, a beta of about 1/2."""
        self.in_proj.reset_parameters()
        bound = self.conv_weight[0, 0].numel() ** -0.5
        nn.init.uniform_(self.conv_weight, -bound, bound)
        nn.init.uniform_(self.conv_bias, -bound, bound)
        bound = self.d_inner**-0.5  # what kaiming_uniform_(a=sqrt(5)) gives each direction's own matrix
        nn.init.uniform_(self.x_proj, -bound, bound)
        bound = self.dt_rank**-0.5
        nn.init.uniform_(self.dt_proj, -bound, bound)
        if self.beta_range:
            low, high = map(math.log, self.beta_range)
            beta = torch.empty_like(self.dt_bias, dtype=torch.float32).uniform_(low, high).exp()
            self.dt_bias.copy_(torch.logit(beta))
        else:
            get_rule(self.rule).reset_bias(self.dt_bias)
        if self.A_log is not None:
            states = torch.arange(1, self.d_state + 1, device=self.A_log.device, dtype=torch.float32)
            self.A_log.copy_(states.log().to(self.A_log.dtype).expand_as(self.A_log))
        nn.init.ones_(self.D)
        if self.norm_weight is not None:
            nn.init.ones_(self.norm_weight)
        self.out_proj.reset_parameters()
        self.out_proj.weight.div_(math.sqrt(self.residual_layers))

    def forward(self, h: Tensor, rows: int = 0) -> Tensor:
        """Map tokens (B, L, dim) to (B, L, dim). With conv="grid" or rope they are patches in `rows` rows."""
        # Call the operator itself, not a wrapper: torch.fx and TorchScript trace operators only.
        y, _, _, _ = torch.ops.vision_longhorn.mix(
            self.in_proj(h), self.conv_weight, self.conv_bias, self.x_proj, self.dt_proj, self.dt_bias, self.A_log,
            self.D, self.norm_weight, self.rule, self.eps, self.save_states and self.training, self.scan_backend,
            self.reversed, self.qk_norm, rows if self.needs_grid else 0, self.rope, self.gate,
        )  # fmt: skip
        return self.out_proj(y)

    def forgetting_and_write(self, h: Tensor, rows: int = 0) -> Tensor:
        """Compute forgetting and write strength of what `forward` is given, as `vision_longhorn.maps` defines them:
        (2, B, 2, L). The second 2 are the directions, which are equal unless the wiring is "vim"."""
        x = self.in_proj(h)[..., : self.d_inner]
        with torch.autocast(h.device.type, enabled=False):
            x = x.to(wide(x))
            weight, bias = self.conv_weight.contiguous(), self.conv_bias.contiguous()
            backend = get_backend("torch")
            if self.over_grid:
                x = backend.grid_conv_forward(x, weight, bias, rows)  # (1, B, L, D)
            else:
                x = backend.conv_forward(x, weight, bias, self.reversed)  # (S, B, L, D)
            parameters = (self.x_proj, self.dt_proj, self.dt_bias, self.A_log)
            step, k, A = scan_inputs(x, *parameters, self.qk_norm, rows if self.rope else 0)
            found = get_rule(self.rule).maps(step, k, A)
        return found.expand(2, 2, -1, -1).transpose(1, 2)

    def describe(self) -> str:
        """Describe the mixer for a model card."""
        name = f"longhorn, {self.rule} rule" if get_rule(self.rule) in LONGHORN else self.rule
        conv = ", convolution over the grid" if self.over_grid else ""
        rope = ", rotary positions" if self.rope else ""
        gate = {"output": "", "skip": ", gated skip", "none": ", no gate", "value": ", values of their own"}[self.gate]
        return f"{name}, state size {self.d_state}, {self.wiring} wiring{conv}{rope}{gate}"

    def extra_repr(self) -> str:
        reversed = ", reversed" if self.reversed else ""
        conv, rope = ", conv=grid" if self.over_grid else "", ", rope" if self.rope else ""
        gate = "" if self.gate == "output" else f", gate={self.gate}"
        return f"rule={self.rule}, wiring={self.wiring}{reversed}, d_state={self.d_state}{conv}{rope}{gate}"


@wraps(BidirectionalMixer, assigned=(), updated=())  # the signature, by which a model knows the options
def mamba(dim: int, rule: str = "mamba", **options: Any) -> BidirectionalMixer:
    """Make a `BidirectionalMixer` with Mamba's rule. Raises ValueError for another rule."""
    if rule not in ("mamba", "diagonal"):  # older configs give the second
        raise ValueError(f"rule={rule!r} belongs to Longhorn; with mixer='mamba' leave it out")
    return BidirectionalMixer(dim, rule="mamba", **options)
