"""The inputs of a scan, as every implementation takes them: `reference` and the backends differ only in speed."""

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

DIRECTIONS = ("forward", "backward", "both")
COMBINES = ("none", "sum", "mean")
REGIMES = ("auto", "sequential", "parallel", "chunked")
BACKENDS = ("auto", "torch", "triton", "numba")
Pair = tuple[Tensor, Tensor]


class Scan(NamedTuple):
    """Inputs and options of one scan, with the letters of `vision_longhorn.kernels.longhorn_scan`. `step` holds the
    logits of the rule's step size or decay. A tensor without the leading direction axis serves both directions.
    """

    # fmt: off
    x: Tensor                      # ([2,] B, L, D)
    step: Optional[Tensor]         # ([2,] B, L, D or 1), or (.., N) where the rule has a logit for each state;
                                   # None where the rule's `prepare` has put it into A
    k: Tensor                      # ([2,] B, L, N)
    q: Tensor                      # ([2,] B, L, N)
    A: Optional[Tensor]            # ([2,] D, N), or per token ([2,] B, L, N); None where the rule takes none
    z: Optional[Tensor]            # ([2,] B, L, D)
    D: Optional[Tensor]            # ([2,] D)
    bias: Optional[Tensor]         # ([2,] C), C = D, 1 or N: the last axis of `step`
    initial_state: Optional[Tensor]  # ([2,] B, D, N)
    rule: str
    direction: str = "forward"
    combine: str = "none"
    softplus: bool = True          # Mamba only
    A_per_token: bool = False      # Mamba only
    regime: str = "auto"           # Triton only
    step_proj: Optional[Tensor] = None  # ([2,] D, R): the logits are step step_proj^T, and step is ([2,] B, L, R)
    qk_norm: bool = False          # k and q are divided by their lengths first (`backends.torch.unit`)
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
        """The dtype of sums and states."""
        return wide(self.x)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are present, by field name."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}


def check_option(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(map(repr, allowed))}")


def check_sizes(sizes: dict[str, int]) -> None:
    """Raise ValueError for a size below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value}: give 1 or more")


def check_switches(switches: dict[str, Any]) -> None:
    """Raise ValueError for what is neither True nor False."""
    for name, value in switches.items():
        if value not in (True, False):
            raise ValueError(f"{name}={value!r}: give True or False")


def check_window(given: str, size: Any, instead: str = "") -> None:
    """Raise ValueError unless `size`, the side of a convolution's window in patches, is an odd whole number."""
    if type(size) is not int or size < 1 or size % 2 == 0:
        raise ValueError(f"{given}: give an odd number of patches, such as 3{instead}")


def wide(value: Tensor) -> torch.dtype:
    """Return the dtype of sums: float64 for float64, else float32."""
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up. (Triton's own function would cost each launch several microseconds.)"""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n, n >= 1."""
    return 1 << (n - 1).bit_length()


def stack(scan: Scan, value: Tensor, ndim: int) -> Tensor:
    """Return a view of `value` with a leading axis, one entry for each direction that is scanned. `ndim` counts the
    axes without it."""
    if value.ndim == ndim:
        value = value.unsqueeze(0)
    return value.expand(len(scan.reversed), *value.shape[1:])


def unstack(grad: Tensor, like: Tensor) -> Tensor:
    """Undo `stack` for a gradient: sum it over the directions and channels that share `like`, and take its dtype."""
    if grad.ndim > like.ndim:
        grad = torch.add(grad[0], grad[1]) if grad.shape[0] > 1 else grad.squeeze(0)
    if grad.shape != like.shape:
        grad = grad.sum(-1, keepdim=True)
    return grad.to(like.dtype).contiguous()
