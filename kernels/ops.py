"""The scans as torch operators: schema, shapes, autograd, and the choice of the implementation that runs.

An operator is opaque to `torch.compile`, `torch.export` and FX, so each of them takes it on any device. What runs
inside is chosen by the device of the inputs, or forced by `backend`.
"""

from types import ModuleType
from typing import Any, Optional, cast

import torch
from torch import Tensor

from .contract import Pair, Scan, check
from .dispatch import choose_backend, load_backend, refuse_forward_mode


def implementation(scan: Scan, backend: str) -> ModuleType:
    """The module whose `forward` and `backward` run `scan`.

    Raises:
        ValueError: `scan` asks for a regime that this backend has not.
    """
    name = choose_backend(backend, scan.x.device)
    if scan.regime in ("parallel", "chunked") and name == "torch":
        raise ValueError(
            f"regime={scan.regime!r} is one of the Triton kernels', and these tensors take the torch path; "
            "use regime='auto'"
        )
    return load_backend(name, "scan")


def forward(scan: Scan, save_states: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """y, the final state, and what is kept for `backward`, of a scan that was checked.

    Raises:
        ValueError: The logits are given at low rank, and this scan cannot run so.
    """
    if scan.step_proj is not None and not takes_projection(scan, backend):
        raise ValueError(
            f"logits at low rank (step_proj) are for the exact rule's chunks on a GPU, not for rule={scan.rule!r} with "
            f"rank {scan.step_proj.shape[-1]} and d_state {scan.sizes[4]} here: give them whole"
        )
    return implementation(scan, backend).forward(scan.law.prepare(scan), save_states)


def backward(
    scan: Scan, dy: Optional[Tensor], dfinal: Optional[Tensor], saved: Tensor, backend: str,
    dz: Optional[Tensor] = None, dkq: Optional[Pair] = None,
) -> dict[str, Tensor]:  # fmt: skip
    """A gradient for each tensor of `scan`, by field; that of z is written to `dz` instead, and those of k and q to
    `dkq`, if given (see `backends.torch.scan.backward`)."""
    prepared = scan.law.prepare(scan)
    in_place = dkq if prepared.k is scan.k else None
    grads = scan.law.restore(
        scan, prepared, implementation(scan, backend).backward(prepared, dy, dfinal, saved, dz, in_place)
    )
    for name, out in zip(("k", "q"), dkq or ()):
        if name in grads:
            out.copy_(grads.pop(name))
    return grads


def takes_projection(scan: Scan, backend: str) -> bool:
    """Whether `scan`, whose logits are given at low rank (`Scan.step_proj`), can run so. `backward` finds the gradient
    of the logits then, (.., B, L, D), in the place of that of `step`."""
    return implementation(scan, backend).takes_projection(scan)


def saved_shape(scan: Scan, backend: str) -> tuple[int, ...]:
    """Of what a forward pass keeps for the backward pass, beside the inputs, in the dtype of `scan.accumulator`."""
    return implementation(scan, backend).saved_shape(scan)


def scan_plan(scan: Scan, backend: str = "auto") -> dict[str, tuple[int, int, int, str]]:
    """How the Triton kernels would run `scan`: for "forward" and "backward" the segments into which time is cut, their
    tokens, the channels of a program, and the regime, as a named tuple. Empty where `scan` takes the torch path."""
    check(scan)
    if choose_backend(backend, scan.x.device) != "triton":
        return {}
    return load_backend("triton", "scan").plan(scan.law.prepare(scan))


# The gradients that the backward operator returns, in the order of the tensors of `Scan`.
TENSORS = ("x", "step", "k", "q", "A", "z", "D", "bias", "initial_state")


@torch.library.custom_op("vision_longhorn::scan", mutates_args=())
def scan(
    x: Tensor, step: Tensor, k: Tensor, q: Tensor, A: Optional[Tensor], z: Optional[Tensor], D: Optional[Tensor],
    bias: Optional[Tensor], initial_state: Optional[Tensor], rule: str, direction: str, combine: str, softplus: bool,
    A_per_token: bool, return_final_state: bool, save_states: bool, backend: str, regime: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The operator behind `longhorn_scan` and `selective_scan`; its arguments are the fields of `Scan`.

    Returns y, the final state (empty unless `return_final_state`), and what the backward pass wants kept: the states
    at the starts of the chunks if `save_states`, else an empty tensor, and the backward pass finds them again.
    """
    refuse_forward_mode()
    inputs = Scan(x, step, k, q, A, z, D, bias, initial_state, rule, direction, combine, softplus, A_per_token, regime)
    check(inputs)
    with torch.autocast(x.device.type, enabled=False):  # sums are in float32, whatever surrounds the operator
        y, final_state, saved = forward(inputs, save_states, backend)
    return y, final_state if return_final_state else final_state.new_empty(0), saved


@scan.register_fake
def _(
    x: Tensor, step: Tensor, k: Tensor, q: Tensor, A: Optional[Tensor], z: Optional[Tensor], D: Optional[Tensor],
    bias: Optional[Tensor], initial_state: Optional[Tensor], rule: str, direction: str, combine: str, softplus: bool,
    A_per_token: bool, return_final_state: bool, save_states: bool, backend: str, regime: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = Scan(x, step, k, q, A, z, D, bias, initial_state, rule, direction, combine, softplus, A_per_token, regime)
    check(inputs)
    saved = saved_shape(inputs, backend) if save_states else (0,)
    return (
        x.new_empty(inputs.output_shape),
        x.new_empty(inputs.state_shape if return_final_state else (0,), dtype=inputs.accumulator),
        x.new_empty(saved, dtype=inputs.accumulator),
    )


@torch.library.custom_op("vision_longhorn::scan_backward", mutates_args=())
def scan_backward(
    dy: Optional[Tensor], dfinal: Optional[Tensor], saved: Tensor, x: Tensor, step: Tensor, k: Tensor, q: Tensor,
    A: Optional[Tensor], z: Optional[Tensor], D: Optional[Tensor], bias: Optional[Tensor],
    initial_state: Optional[Tensor], rule: str, direction: str, combine: str, softplus: bool, A_per_token: bool,
    backend: str, regime: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of each tensor of `Scan`, empty where the tensor is absent."""
    inputs = Scan(x, step, k, q, A, z, D, bias, initial_state, rule, direction, combine, softplus, A_per_token, regime)
    with torch.autocast(x.device.type, enabled=False):
        grads = backward(inputs, dy, dfinal, saved, backend)
    return cast(Any, tuple(grads[name] if name in grads else x.new_empty(0) for name in TENSORS))


@scan_backward.register_fake
def _(
    dy: Optional[Tensor], dfinal: Optional[Tensor], saved: Tensor, x: Tensor, step: Tensor, k: Tensor, q: Tensor,
    A: Optional[Tensor], z: Optional[Tensor], D: Optional[Tensor], bias: Optional[Tensor],
    initial_state: Optional[Tensor], rule: str, direction: str, combine: str, softplus: bool, A_per_token: bool,
    backend: str, regime: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(
        x.new_empty(0) if value is None else value.new_empty(value.shape)
        for value in (x, step, k, q, A, z, D, bias, initial_state)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, options, (return_final_state, _, *where) = inputs[:9], inputs[9:14], inputs[14:]
    ctx.save_for_backward(output[2], *tensors)
    ctx.options = (*options, *where)
    ctx.has_final_state = return_final_state
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dy: Optional[Tensor], dfinal: Optional[Tensor], _: Any) -> tuple[Optional[Tensor], ...]:
    saved, *tensors = ctx.saved_tensors
    dfinal = dfinal if ctx.has_final_state else None
    if dy is None and dfinal is None:
        return (None,) * 18
    grads = torch.ops.vision_longhorn.scan_backward(dy, dfinal, saved, *tensors, *ctx.options)
    return (*(None if tensor is None else grad for tensor, grad in zip(tensors, grads)), *(None,) * 9)


scan.register_autograd(_autograd, setup_context=_setup_context)
