"""Counts of floating-point operations, for torch's counter and, through `fvcore_handles`, for fvcore's.

Only products that are summed count, as in torch's own formulas: each multiply-add as two operations, and twice that in
the backward pass, where both factors get a gradient. Norms, gates, activations, step sizes and decays do not count, nor
does what a backward pass computes again. Whatever the rule, a token costs three multiply-adds for each state of each
channel: the change of the old state, what is written, and the read-out.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import convolving, mixing, ops  # noqa: F401  (register the operators)
from .operators import schema

__all__ = ["fvcore_handles"]

_MACS_PER_STATE = 3


def _scan_macs(scan: Any) -> int:
    """Count the multiply-adds of a scan, from the operator's arguments with shapes in the place of tensors."""
    B, L, D = scan.x[-3:]
    return _MACS_PER_STATE * (2 if scan.direction == "both" else 1) * B * L * D * scan.k[-1]


def _mix_macs(mix: Any) -> int:
    """Count the multiply-adds of a mixing: the convolution, the products with x_proj and dt_proj, and the scans."""
    S, _, channels = mix.x_proj
    per_token_A = mix.A_log is not None and len(mix.A_log) == 2
    states = (mix.x_proj[1] - mix.dt_proj[-1]) // (3 if per_token_A else 2)
    directions = S if mix.norm_weight is None else 2
    of_token = (
        prod(mix.conv_weight) + prod(mix.x_proj) + prod(mix.dt_proj) + _MACS_PER_STATE * directions * channels * states
    )
    return prod(mix.xz[:-1]) * of_token


def _conv_macs(conv: Any) -> int:
    """Count the multiply-adds of a convolution over the grid."""
    return prod(conv.x[:-1]) * prod(conv.weight)


_MACS = {"scan": _scan_macs, "mix": _mix_macs, "grid_conv": _conv_macs}


def _macs(operator: str, values: Iterable[Any]) -> int:
    names = [argument.name for argument in schema(operator).arguments]
    return _MACS[operator.removesuffix("_backward")](SimpleNamespace(**dict(zip(names, values))))


def _register(operator: str, operations: int) -> None:
    @register_flop_formula(getattr(torch.ops.vision_longhorn, operator))
    def _(*shapes: Any, **_: Any) -> int:
        return operations * _macs(operator, shapes)


for _name in _MACS:
    _register(_name, 2)
    _register(f"{_name}_backward", 4)


def _plain(value: Any) -> Any:
    """Return an option as it is, and the shape of a tensor. Values of a traced graph may stand for either."""
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, torch._C.Value):
        return value.type().sizes() if value.isCompleteTensor() else value.toIValue()  # type: ignore[attr-defined]
    return value


def fvcore_handles() -> dict[str, Callable[[Sequence[Any], Sequence[Any]], int]]:
    """Return what counts multiply-adds in `fvcore.nn.FlopCountAnalysis(model, x).set_op_handle(**fvcore_handles())`:
    functions that are called with an operator's inputs, tensors or values of a traced graph, and its outputs. ptflops
    takes each, with `backend="aten"`, as its hook of the operator of that name in `torch.ops.vision_longhorn`."""

    def counter(name: str) -> Callable[[Sequence[Any], Sequence[Any]], int]:
        return lambda inputs, outputs: _macs(name, map(_plain, inputs))

    return {f"vision_longhorn::{name}": counter(name) for name in _MACS}
