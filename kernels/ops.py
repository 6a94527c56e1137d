"""The scans as torch operators: schema, shapes, autograd, and the choice of the backend that runs.

An operator is opaque to `torch.compile`, `torch.export` and FX, so each of them takes it on any device.
"""

from typing import Any, Optional

from torch import Tensor

from .backends import Backend
from .backends.torch.unit import Raw
from .checks import check
from .contract import Pair, Scan
from .dispatch import backend_for
from .operators import arguments, define, define_gradients
from .rules import rule_of

TENSORS = Scan._fields[:9]
FIELDS = Scan._fields[:14]  # tensors and options, in the order of the operators' arguments


def forward(scan: Scan, save_states: bool, backend: Backend) -> tuple[Tensor, Tensor, Tensor]:
    """Run a scan that was checked: return y, the final state, and what is kept for `backward`.

    Raises:
        ValueError: The logits are given at low rank, and this scan cannot take them so.
    """
    if scan.step_proj is not None and not backend.takes_projection(scan):
        raise ValueError(
            f"logits at low rank (step_proj) are for the exact rule's chunks on a GPU, not for rule={scan.rule!r} with "
            f"rank {scan.step_proj.shape[-1]} and d_state {scan.sizes[4]} here: give them whole"
        )
    scan = normalised(scan, backend)
    return backend.scan_forward(rule_of(scan).prepare(scan), save_states)


def normalised(scan: Scan, backend: Backend) -> Scan:
    """Scale the keys and queries of `scan` to unit length, if it asks for that."""
    if not scan.qk_norm:
        return scan
    k, q = backend.unit_forward(scan.k, scan.q)
    return scan._replace(k=k, q=q, qk_norm=False)


def backward(
    scan: Scan, dy: Optional[Tensor], dfinal: Optional[Tensor], saved: Tensor, backend: Backend,
    dz: Optional[Tensor] = None, dkq: Optional[Pair] = None, raw: Optional[Raw] = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the gradient of each tensor of `scan`, by field. If given, `dz` gets that of z instead, and `dkq` those of
    k and q, (G, B, L, N) each for G sets of parameters. `raw` holds k and q before they got unit length. With it, or if
    `scan` has `qk_norm`, the gradients are of k and q before that."""
    rule = rule_of(scan)
    if scan.qk_norm and raw is None:
        raw = Raw(scan.k, scan.q)
    unit = normalised(scan, backend)
    prepared = rule.prepare(unit)
    # The backend cannot write the sum of two directions' gradients in place, nor what `restore` changes.
    in_place = dkq if dkq and prepared.k is unit.k and len(dkq[0]) == len(scan.reversed) else None
    grads = rule.restore(unit, prepared, backend.scan_backward(prepared, dy, dfinal, saved, dz, in_place, raw))
    if raw is not None and "k" in grads:
        backend.unit_backward(raw.k, raw.q, grads["k"], grads["q"], raw.turned)
    for name, out in zip(("z", "k", "q"), (dz, *(dkq or ()))):
        if out is not None and name in grads:
            out.copy_(grads.pop(name))
    return grads


def scan_plan(scan: Scan, backend: str = "auto") -> dict[str, tuple[int, int, int, str]]:
    """Tell how the Triton kernels would run `scan`, whose values are not read.

    Returns:
        For "forward" and "backward" a named tuple: `segments` into which time is cut, `span`, the tokens of each,
        `channels` of a program, and `regime`. The dict is empty if the torch or the numba backend runs.

    Raises:
        ValueError, RuntimeError: as in `recurrent_scan`.
    """
    check(scan)
    return backend_for(backend, scan.x).plan(rule_of(scan).prepare(scan))


def read_scan(values: tuple[Any, ...], count: int) -> tuple[Scan, tuple[Any, ...]]:
    """Split an operator's arguments into the scan that they describe and the `count` others. Programs of older versions
    do not give `qk_norm`."""
    fields, others = values[: len(FIELDS)], values[len(FIELDS) :]
    regime, qk_norm = (*others[count:], False)[:2]
    return Scan._make((*fields, regime, None, qk_norm)), others[:count]


def _scan(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the final state (empty unless `return_final_state`), and the states at the starts of the chunks (empty
    unless `save_states`; the backward pass then computes them again)."""
    scan, (return_final_state, save_states, backend) = read_scan(values, 3)
    check(scan)
    y, final_state, saved = forward(scan, save_states, backend_for(backend, scan.x, scan.regime))
    return y, final_state if return_final_state else final_state.new_empty(0), saved


def _scan_shapes(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    scan, (return_final_state, save_states, backend) = read_scan(values, 3)
    check(scan)
    saved = backend_for(backend, scan.x, scan.regime).saved_shape(scan) if save_states else (0,)
    return (
        scan.x.new_empty(scan.output_shape),
        scan.x.new_empty(scan.state_shape if return_final_state else (0,), dtype=scan.accumulator),
        scan.x.new_empty(saved, dtype=scan.accumulator),
    )


def _scan_backward(dy: Optional[Tensor], dfinal: Optional[Tensor], saved: Tensor, *values: Any) -> tuple[Tensor, ...]:
    """Return the gradient of each of TENSORS, empty where the tensor is absent."""
    scan, (backend,) = read_scan(values, 1)
    dfinal = dfinal if dfinal is not None and dfinal.numel() else None  # empty if no final state was asked for
    grads = backward(scan, dy, dfinal, saved, backend_for(backend, scan.x, scan.regime))
    return tuple(grads[name] if name in grads else scan.x.new_empty(0) for name in TENSORS)


_ARGUMENTS = arguments(Scan, FIELDS).replace("Tensor? step", "Tensor step")  # only the backends have None there
_operator = define("scan", f"{_ARGUMENTS}, bool return_final_state, bool save_states, str backend, str regime, "
                   "bool qk_norm=False", 3, _scan, _scan_shapes)  # fmt: skip
define_gradients("scan", _operator, "Tensor? dy, Tensor? dfinal, Tensor saved, "
                 f"{_ARGUMENTS}, str backend, str regime, bool qk_norm=False",
                 2, len(TENSORS), _scan_backward)  # fmt: skip
