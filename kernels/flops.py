"""Tells counters of floating-point operations what the operators cost: torch's, and by `fvcore_handles` others.

Only products that are summed count, as in torch's own formulas: each multiply-add as two operations, and twice that in
the backward pass, where both factors get a gradient. Norms, gates, activations, step sizes and decays are free, and so
is what a backward pass finds again. A token costs three multiply-adds for each state of each channel, whatever the
rule: what it does to the old state, what it writes, and the read-out.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import mixing, ops  # noqa: F401  (whose operators these are)

__all__ = ["fvcore_handles"]

Shape = Sequence[int]
OF_A_STATE = 3
BACKWARD = 2


def scan_macs(x: Shape, step: Shape, k: Shape, *rest: Any) -> int:
    """Multiply-adds of a scan, from the shapes of the operator's tensors and its options, in their order."""
    direction = rest[7]  # after six tensors and the rule
    B, L, D = x[-3:]
    return OF_A_STATE * (2 if direction == "both" else 1) * B * L * D * k[-1]


def mix_macs(
    xz: Shape, conv_weight: Shape, conv_bias: Shape, x_proj: Shape, dt_proj: Shape, dt_bias: Shape, A_log: Shape | None,
    D: Shape, norm_weight: Shape | None, *options: Any,
) -> int:  # fmt: skip
    """Multiply-adds of a mixing: the convolution, the products with x_proj and dt_proj, and the scans."""
    S, channels, _ = conv_weight
    rank = dt_proj[-1]
    per_token_A = A_log is not None and len(A_log) == 2
    states = (x_proj[1] - rank) // (3 if per_token_A else 2)
    directions = S if norm_weight is None else 2
    of_token = prod(conv_weight) + prod(x_proj) + prod(dt_proj) + OF_A_STATE * directions * channels * states
    return prod(xz[:-1]) * of_token


MACS: dict[str, Callable[..., int]] = {"scan": scan_macs, "mix": mix_macs}


def _register(name: str, macs: Callable[..., int], saved: int) -> None:
    """torch's formulas of an operator and of the one of its gradients, which takes `saved` tensors more, first."""

    @register_flop_formula(getattr(torch.ops.vision_longhorn, name))
    def _(*shapes: Any, **_: Any) -> int:
        return 2 * macs(*shapes)

    @register_flop_formula(getattr(torch.ops.vision_longhorn, f"{name}_backward"))
    def _(*shapes: Any, **_: Any) -> int:
        return BACKWARD * 2 * macs(*shapes[saved:])


_register("scan", scan_macs, saved=3)
_register("mix", mix_macs, saved=4)


def _plain(value: Any) -> Any:
    """A tensor's shape, or an option: of an argument itself, or of the value that stands for it in a traced graph."""
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, torch._C.Value):
        return value.type().sizes() if value.isCompleteTensor() else value.toIValue()  # type: ignore[attr-defined]
    return value


def fvcore_handles() -> dict[str, Callable[[Sequence[Any], Sequence[Any]], int]]:
    """Counts of multiply-adds by operator, as `fvcore.nn.FlopCountAnalysis(model, x).set_op_handle(**fvcore_handles())`
    takes them. Each is called with an operator's inputs, tensors or values of a traced graph, and its outputs."""

    def handle(macs: Callable[..., int]) -> Callable[[Sequence[Any], Sequence[Any]], int]:
        return lambda inputs, outputs: macs(*map(_plain, inputs))

    return {f"vision_longhorn::{name}": handle(macs) for name, macs in MACS.items()}
