"""Checks that a scan's arguments are what the contract allows."""

import torch
from torch import Tensor

from .contract import COMBINES, DIRECTIONS, REGIMES, Scan, check_option
from .rules import Rule, get_rule

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check(scan: Scan) -> None:
    """Raise ValueError, naming the argument and what would be right, for anything the contract does not allow."""
    rule = get_rule(scan.rule)
    check_option("direction", scan.direction, DIRECTIONS)
    check_option("combine", scan.combine, COMBINES)
    check_option("regime", scan.regime, REGIMES)
    if (scan.regime == "parallel" and rule.kind != "decay") or (scan.regime == "chunked" and rule.name != "exact"):
        raise ValueError(f"regime={scan.regime!r} is not possible with rule={scan.rule!r}; use regime='auto'")
    if scan.combine != "none" and scan.direction != "both":
        raise ValueError(f"combine={scan.combine!r} adds two directions; with direction={scan.direction!r} use 'none'")
    _check_shapes(scan, rule)
    if (scan.A is not None) != rule.takes_A:
        raise ValueError(f"rule={scan.rule!r} {'needs A' if rule.takes_A else 'has no A: leave it out'}")
    check_tensors({rule.names.get(name, name): value for name, value in scan.tensors().items()})


def check_tensors(tensors: dict[str, Tensor]) -> None:
    """Raise ValueError unless all tensors, by name, have a float dtype and are on the device of the one named x."""
    x = tensors["x"]
    for name, value in tensors.items():
        if value.dtype not in _DTYPES:
            raise ValueError(f"{name} is {value.dtype}; use bfloat16, float16, float32 or float64")
        if value.device != x.device:
            raise ValueError(f"{name} is on {value.device} and x on {x.device}; put them on one device")


def _check_shapes(scan: Scan, rule: Rule) -> None:
    both = scan.direction == "both"
    if scan.step is None:
        raise ValueError(f"{rule.names.get('step', 'step')} is None; rule={scan.rule!r} needs it")
    if scan.x.ndim not in ((3, 4) if both else (3,)):
        raise ValueError(
            f"x has shape {tuple(scan.x.shape)}; it must be (B, L, D)"
            f"{' or (2, B, L, D)' if both else ''} with direction={scan.direction!r}"
        )
    B, L, D = scan.x.shape[-3:]
    N = scan.k.shape[-1] if scan.k.ndim else 0
    if L < 1 or D < 1 or N < 1:
        raise ValueError(f"the scan has {L} tokens, {D} channels and {N} states (d_state); give at least 1 of each")
    right: dict[str, list[tuple[int, ...]]] = {
        "x": [(B, L, D)],
        "k": [(B, L, N)],
        "q": [(B, L, N)],
        "step": [(B, L, N)] if rule.step_per == "state" else [(B, L, D), (B, L, 1)],
        "A": [(B, L, N) if scan.A_per_token else (D, N)],
        "z": [(B, L, D)],
        "D": [(D,)],
        "bias": [tuple(scan.step.shape[-1:])],
        "initial_state": [(B, D, N)],
    }
    if scan.step_proj is not None:
        R = scan.step_proj.shape[-1]
        right |= {"step": [(B, L, R)], "step_proj": [(D, R)], "bias": [(D,)]}
    for field, shapes in right.items():
        value = getattr(scan, field)
        if value is None:
            continue
        if both:
            stacked: list[tuple[int, ...]] = [(2, *shape) for shape in shapes]
            shapes = stacked if field == "initial_state" else shapes + stacked
        # Numbers of axes first: comparing (B, ...) with (2, B, ...) would bar a compiled model from batches of 2.
        if not any(value.ndim == len(shape) and tuple(value.shape) == shape for shape in shapes):
            raise ValueError(
                f"{rule.names.get(field, field)} has shape {tuple(value.shape)}; with x {tuple(scan.x.shape)}, d_state "
                f"{N} and direction={scan.direction!r} it must be {' or '.join(map(str, shapes))}"
            )
