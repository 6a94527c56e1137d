"""The scans in Numba's loops, for float32 on a CPU."""

from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from ...contract import Pair, Scan, ceil_div, stack, unstack
from ...rules import rule_of
from ..torch import scan as torch_scan
from ..torch.unit import Raw
from . import loops
from .threads import run

# For each rule the form of its step size and of its decays, and whether ||k||^2 enters the step size.
_FORMS = {
    "exact": (loops.LONGHORN, loops.ERROR, True),
    "delta": (loops.LONGHORN, loops.ERROR, False),
    "diagonal": (loops.LONGHORN, loops.DIAGONAL, True),
    "mamba": (loops.SOFTPLUS, loops.RATES, False),
    "gla": (loops.NO_STEP, loops.TOKEN_RATES, False),
}


def takes(scan: Scan) -> bool:
    """Tell whether the loops compute `scan`, not the torch path."""
    return scan.accumulator == torch.float32 and scan.sizes[1] > 0 and rule_of(scan).name in _FORMS


def _forms(scan: Scan) -> tuple[int, int, bool]:
    step, decay, norm = _FORMS[rule_of(scan).name]
    if decay == loops.DIAGONAL and scan.sizes[4] == 1:
        decay = loops.LONE
    if decay == loops.RATES and scan.A_per_token:
        decay = loops.TOKEN_RATES
    if step == loops.SOFTPLUS and not scan.softplus:
        step = loops.PLAIN
    return step, decay, norm


_NOTHING = np.zeros(0, np.float32)


def _rows(scan: Scan, value: Optional[Tensor], at: Any) -> Any:
    """Return the memory of ([2,] B, L, C) from its first number to its last one, and write the strides of its
    direction, sequence and token to `at`. The numbers of a token lie side by side."""
    if value is None:
        return _NOTHING
    value = stack(scan, value.detach().float(), 3)
    if value.stride(-1) != 1 and value.shape[-1] > 1:
        value = value.contiguous()
    at[:] = value.stride()[:3]
    extent = sum((n - 1) * s for n, s in zip(value.shape[:3], value.stride())) + value.shape[-1]
    return value.as_strided((extent,), (1,)).numpy()


def _whole(scan: Scan, value: Optional[Tensor], ndim: int) -> Any:
    """Return the numbers of `value`, with a direction axis, side by side."""
    if value is None:
        return _NOTHING
    # A copy: memory that NumPy has seen cannot be given back, as FSDP does with the parameters that it has gathered.
    return stack(scan, value.detach().float(), ndim).clone(memory_format=torch.contiguous_format).view(-1).numpy()


def _flat(value: Optional[Tensor]) -> Any:
    return _NOTHING if value is None else value.detach().view(-1).numpy()


class _Inputs:
    """The arguments that both loops take."""

    def __init__(self, scan: Scan):
        G, B, L, D, N = self.sizes = scan.sizes
        self.programs = B * ceil_div(D, loops.WIDTH)
        self.at = at = np.zeros((7, 3), np.int64)
        rows = [_rows(scan, value, at[i]) for i, value in enumerate((scan.x, scan.step, scan.k, scan.q))]
        A = _rows(scan, scan.A, at[4]) if scan.A_per_token else _whole(scan, scan.A, 2)
        self.forms = _forms(scan)
        of_channels = scan.step is not None and scan.step.shape[-1] == D
        self.shape = (*scan.sizes, scan.combine != "none", of_channels)
        turned = np.array(scan.reversed)
        initial = _whole(scan, scan.initial_state, 3)
        self.args = (
            self.shape, turned, np.float32(scan.output_scale), at, *rows, A, _rows(scan, scan.z, at[5]),
            _whole(scan, scan.D, 1), _whole(scan, scan.bias, 1), initial)  # fmt: skip


def saved_shape(scan: Scan) -> tuple[int, ...]:
    """Return the shape of the states that `forward` saves: none for rules of kind "error", whose backward pass does
    not start from them."""
    if not takes(scan):
        return torch_scan.saved_shape(scan)
    return (0,) if rule_of(scan).kind == "error" else torch_scan.saved_shape(scan)


def forward(scan: Scan, save_states: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See `backends.torch.scan.forward`."""
    if not takes(scan):
        return torch_scan.forward(scan, save_states)
    inputs = _Inputs(scan)
    y = torch.empty(scan.output_shape)
    final = torch.empty(scan.state_shape)
    saved = torch.empty(saved_shape(scan) if save_states else (0,))
    run(loops.forward_of(*inputs.forms), inputs.programs, *inputs.args, *map(_flat, (y, final, saved)))
    return y.to(scan.x.dtype), final, saved


def backward(
    scan: Scan, dy: Optional[Tensor], dfinal: Optional[Tensor], saved: Tensor, dz: Optional[Tensor] = None,
    dkq: Optional[Pair] = None, raw: Optional[Raw] = None,
) -> dict[str, Tensor]:  # fmt: skip
    """See `backends.torch.scan.backward`."""
    if not takes(scan):
        return torch_scan.backward(scan, dy, dfinal, saved, dz, dkq, raw)
    inputs = _Inputs(scan)
    G, B, L, D, N = scan.sizes
    A_per_token = inputs.forms[1] == loops.TOKEN_RATES
    grads = {name: torch.empty(value.shape) for name, value in (("x", scan.x), ("step", scan.step), ("z", scan.z))
             if value is not None and value.shape[-1] == D and not (name == "z" and dz is not None)}  # fmt: skip
    if dz is not None and scan.z is not None:
        grads["z"] = dz if dz.dtype == torch.float32 else torch.empty(dz.shape)
    out_at = np.zeros((3, 3), np.int64)
    places = [_rows(scan, grads.get(name), out_at[i]) for i, name in enumerate(("x", "step", "z"))]
    parts = [torch.empty(G, B, *shape) for shape in ((N, D), (D,), (D,), (D, N))]  # of A, D, bias, initial_state
    sums = torch.empty(inputs.programs // B, G, B, L, 3 * N + 1)
    dy = None if dy is None else dy.expand(G, B, L, D) if dy.ndim == 3 else dy
    run(
        loops.backward_of(*inputs.forms), inputs.programs, *inputs.args, _rows(scan, dy, inputs.at[6]),
        _flat(None if dfinal is None else dfinal.detach().float().contiguous()), _flat(saved), out_at, *places,
        *map(_flat, (sums, *parts)))  # fmt: skip
    total = sums[0]
    for part in sums[1:]:  # in this order, on any number of threads
        total += part
    grads["k"], grads["q"], of_A, of_step = (
        part.clone(memory_format=torch.contiguous_format) for part in total.split([N, N, N, 1], -1)
    )
    grads["initial_state"] = parts[3]
    if scan.step is not None and "step" not in grads:
        grads["step"] = of_step
    if scan.A is not None:
        grads["A"] = of_A if A_per_token else parts[0].sum(1).transpose(1, 2)
    grads |= {"D": parts[1].sum(1), "bias": parts[2].sum(1)}
    if dz is not None and scan.z is not None and (found := grads.pop("z")) is not dz:
        dz.copy_(found)
    return {name: unstack(grads[name], value) for name, value in scan.tensors().items() if name in grads}
