"""What every implementation of the scan is given, and what it must return.

The operators of the family do the same shape of work, so one description serves them all. The implementations in
`reference` and `backends` take a `Scan` and differ in nothing that a caller sees but speed.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from . import rules

DIRECTIONS = ("forward", "backward", "both")
COMBINES = ("none", "sum", "mean")
REGIMES = ("auto", "sequential", "parallel", "chunked")
BACKENDS = ("auto", "torch", "triton")
Pair = tuple[Tensor, Tensor]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Scan(NamedTuple):
    """Inputs and options of one scan; the letters are those of `vision_longhorn.kernels.longhorn_scan`, and `step` is
    the logit of what the rule takes for its step size or decay.

    Tensors with a leading direction axis have it first; where it is absent, both directions read the same values.
    """

    # fmt: off
    x: Tensor                      # ([2,] B, L, D)
    step: Optional[Tensor]         # ([2,] B, L, D or 1), or (.., N) where the rule wants one for each state
    k: Tensor                      # ([2,] B, L, N)
    q: Tensor                      # ([2,] B, L, N)
    A: Optional[Tensor]            # ([2,] D, N), or per token ([2,] B, L, N); None where the rule takes none
    z: Optional[Tensor]            # ([2,] B, L, D)
    D: Optional[Tensor]            # ([2,] D)
    bias: Optional[Tensor]         # ([2,] D, 1 or N), as `step`
    initial_state: Optional[Tensor]  # ([2,] B, D, N)
    rule: str
    direction: str = "forward"
    combine: str = "none"
    softplus: bool = True          # Mamba only
    A_per_token: bool = False      # Mamba only
    regime: str = "auto"           # Triton only
    step_proj: Optional[Tensor] = None  # ([2,] D, R): the logits are step step_proj^T, and step is ([2,] B, L, R)
    # fmt: on

    @property
    def reversed(self) -> tuple[bool, ...]:
        """For each direction that is scanned, whether it runs from the last token to the first."""
        return {"forward": (False,), "backward": (True,), "both": (False, True)}[self.direction]

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(directions, batch, tokens, channels, d_state)."""
        B, L, D = self.x.shape[-3:]
        return len(self.reversed), B, L, D, self.k.shape[-1]

    @property
    def output_shape(self) -> tuple[int, ...]:
        _, B, L, D, _ = self.sizes
        return (2, B, L, D) if self.direction == "both" and self.combine == "none" else (B, L, D)

    @property
    def state_shape(self) -> tuple[int, ...]:
        _, B, _, D, N = self.sizes
        return (2, B, D, N) if self.direction == "both" else (B, D, N)

    @property
    def output_scale(self) -> float:
        return 0.5 if self.combine == "mean" else 1.0

    @property
    def accumulator(self) -> torch.dtype:
        """float32 for every input but float64, which stays what it is."""
        return torch.float64 if self.x.dtype == torch.float64 else torch.float32

    @property
    def law(self) -> rules.Rule:
        """The rule that is computed."""
        return rules.get_rule(self.rule).for_states(self.k.shape[-1])

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by field name."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}


def check_option(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(map(repr, allowed))}")


def check(scan: Scan) -> None:
    """Raise ValueError, naming the argument and what would be right, for anything the contract does not allow."""
    rule = rules.get_rule(scan.rule)
    check_option("direction", scan.direction, DIRECTIONS)
    check_option("combine", scan.combine, COMBINES)
    check_option("regime", scan.regime, REGIMES)
    if scan.regime == "parallel" and rule.kind != "decay":
        raise ValueError(
            f"regime='parallel' with rule={scan.rule!r}: its steps are no products of numbers; "
            "use regime='auto' or rule='diagonal'"
        )
    if scan.regime == "chunked" and rule.name != "exact":
        raise ValueError(
            f"regime='chunked' with rule={scan.rule!r}: its transition differs for each channel and state; "
            "use regime='auto' or rule='exact'"
        )
    if scan.combine != "none" and scan.direction != "both":
        raise ValueError(f"combine={scan.combine!r} adds two directions; with direction={scan.direction!r} use 'none'")

    both = scan.direction == "both"
    names = rule.names
    if scan.step is None:
        raise ValueError(f"{names.get('step', 'step')} is None; rule={scan.rule!r} needs it")
    if scan.x.ndim not in ((3, 4) if both else (3,)):
        raise ValueError(
            f"x has shape {tuple(scan.x.shape)}; it must be (B, L, D)"
            f"{' or (2, B, L, D)' if both else ''} with direction={scan.direction!r}"
        )
    B, L, D = scan.x.shape[-3:]
    N = scan.k.shape[-1] if scan.k.ndim else 0
    if L < 1:
        raise ValueError(f"x has {L} tokens (shape {tuple(scan.x.shape)}); a scan needs at least one")

    def shaped(field: str, *allowed: tuple[int, ...], stacked: str = "may") -> None:
        value = getattr(scan, field)
        if value is None:
            return
        options = [] if both and stacked == "must" else list(allowed)
        if both:
            options += [(2, *shape) for shape in allowed]
        # Lengths first: comparing (B, ...) with (2, B, ...) would tie the batch of a compiled model to other than 2.
        if not any(value.ndim == len(shape) and tuple(value.shape) == shape for shape in options):
            raise ValueError(
                f"{names.get(field, field)} has shape {tuple(value.shape)}; with x {tuple(scan.x.shape)}, "
                f"d_state {N} and direction={scan.direction!r} it must be "
                f"{' or '.join(str(shape) for shape in options)}"
            )

    shaped("x", (B, L, D))
    shaped("k", (B, L, N))
    shaped("q", (B, L, N))
    if scan.step_proj is None:
        shaped("step", *([(B, L, N)] if rule.step_per == "state" else [(B, L, D), (B, L, 1)]))
    else:
        R = scan.step_proj.shape[-1]
        shaped("step", (B, L, R))
        shaped("step_proj", (D, R))
    shaped("A", (B, L, N) if scan.A_per_token else (D, N))
    shaped("z", (B, L, D))
    shaped("D", (D,))
    shaped("bias", (scan.step.shape[-1] if scan.step_proj is None else D,))
    shaped("initial_state", (B, D, N), stacked="must")
    if N < 1 or D < 1:
        raise ValueError(f"d_state {N} and channels {D} must both be at least 1")
    if (scan.A is not None) != rule.takes_A:
        raise ValueError(f"rule={scan.rule!r} {'needs A' if rule.takes_A else 'has no A'}")
    for name, value in scan.tensors().items():
        if value.dtype not in DTYPES:
            raise ValueError(f"{names.get(name, name)} is {value.dtype}; use bfloat16, float16, float32 or float64")
        if value.device != scan.x.device:
            raise ValueError(
                f"{names.get(name, name)} is on {value.device} and x on {scan.x.device}; put them on one device"
            )


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up. (Triton's own takes microseconds, and a launch asks often.)"""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n, n >= 1."""
    return 1 << (n - 1).bit_length()


def stack(scan: Scan, value: Tensor, ndim: int) -> Tensor:
    """`value` with a leading direction axis of one entry per scanned direction, as a view.

    `ndim` is the number of axes without it; a shared value is expanded, which costs no memory.
    """
    if value.ndim == ndim:
        value = value.unsqueeze(0)
    return value.expand(len(scan.reversed), *value.shape[1:])


def unstack(grad: Tensor, like: Tensor) -> Tensor:
    """The gradient of `stack`: sum the direction axis where `like` has none, then sum channels that `like` shares
    (a scalar beta), and cast to the dtype of `like`."""
    if grad.ndim > like.ndim:
        grad = torch.add(grad[0], grad[1]) if grad.shape[0] > 1 else grad.squeeze(0)
    if grad.shape != like.shape:
        grad = grad.sum(-1, keepdim=True)
    return grad.to(like.dtype).contiguous()
