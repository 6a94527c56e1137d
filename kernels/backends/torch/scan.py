"""The scans in vectorised torch with their own backward pass.

Only the recurrence walks through time. All directions are scanned together, as one batch, and time is cut into spans of
whole chunks of `CHUNK` tokens. Within a span the loop over tokens does only

    "decay":  S_t = a_t * S_{t-1} + k_t w_t^T,  w_t = eps_t x_t
    "error":  S_t = S_{t-1} + k_t w_t^T,        w_t = eps_t (x_t - S_{t-1}^T k_t)

All else is computed for the whole span at once. The forward pass saves the state at the start of each chunk; the
backward pass rebuilds each span from its start. docs/scan.md derives the gradients.

`d` is a `Scan` in the dtype of sums, of R sequences: the batch of each direction in turn. Time comes first and runs in
the order of the scan: x, z and step (with its bias) are (L, R, D), k and q (L, R, N), A is (R, N, D) or per token
(L, R, N), D (R, D), initial_state (R, N, D). Shapes of a span have T for its tokens and b for R.
"""

import math
import threading
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ...contract import Pair, Scan, ceil_div, stack, unstack
from ...rules import rule_of
from ...rules.base import Sizes, over_channels, over_states
from .unit import Raw

CHUNK = 8  # tokens from one saved state to the next

# The most numbers in the states of a span that is longer than one chunk.
SPAN_ELEMENTS = 1 << 21


def _time_first(scan: Scan, value: Tensor) -> Tensor:
    """Turn ([2,] B, L, C) in the order of the tokens into (L, R, C) in the order of the scan."""
    parts = stack(scan, value, 3)
    G, B, L, C = parts.shape
    out = value.new_empty(L, G, B, C, dtype=scan.accumulator)
    for g, backward in enumerate(scan.reversed):
        part = parts[g].transpose(0, 1)
        out[:, g] = part.flip(0) if backward else part
    return out.view(L, G * B, C)


def _batch_first(scan: Scan, value: Tensor) -> Tensor:
    """Undo `_time_first`: turn (L, R, C) into (G, B, L, C)."""
    parts = value.unflatten(1, scan.sizes[:2]).unbind(1)
    return torch.stack(
        [(part.flip(0) if backward else part).transpose(0, 1) for part, backward in zip(parts, scan.reversed)]
    )


def _inputs(scan: Scan) -> Any:
    """Make `d` from `scan`."""
    G, B, L, D, N = scan.sizes

    def each(value: Tensor, ndim: int) -> Tensor:
        return stack(scan, value, ndim).to(scan.accumulator)  # (G, ...)

    def each_sequence(value: Tensor) -> Tensor:
        return value.unsqueeze(1).expand(G, B, *value.shape[1:]).flatten(0, 1)

    per_token = ("x", "step", "k", "q", "z", *(["A"] if scan.A_per_token else []))
    found: dict[str, Any] = {name: _time_first(scan, v) for name, v in scan.tensors().items() if name in per_token}
    if scan.step is not None:
        if scan.bias is not None:
            found["step"].unflatten(1, (G, B)).add_(each(scan.bias, 1).unsqueeze(1))
        found["step"] = found["step"].expand(L, G * B, D)
    if scan.A is not None and not scan.A_per_token:
        found["A"] = each_sequence(each(scan.A, 2).transpose(1, 2))
    if scan.D is not None:
        found["D"] = each_sequence(each(scan.D, 1))
    if scan.initial_state is None:
        found["initial_state"] = scan.x.new_zeros(G * B, N, D, dtype=scan.accumulator)
    else:
        found["initial_state"] = each(scan.initial_state, 3).transpose(2, 3).flatten(0, 1)
    return scan._replace(bias=None, **found)


def _spans(d: Any) -> list[slice]:
    """Cut time into spans of whole chunks."""
    (L, R, D), N = d.x.shape, d.k.shape[-1]
    span = CHUNK * max(1, SPAN_ELEMENTS // max(1, CHUNK * R * D * N))
    return [slice(start, min(start + span, L)) for start in range(0, L, span)]


def _cut(d: Any, t: slice) -> Any:
    """Return `d` for the tokens `t` alone."""
    fixed = ("D", "initial_state") if d.A_per_token else ("A", "D", "initial_state")
    return d._replace(**{name: value if name in fixed else value[t] for name, value in d.tensors().items()})


_kept = threading.local()


def _workspace(d: Any, spans: list[slice], fields: int) -> Tensor:
    """Uninitialised memory for `fields` tensors of T + 1 states, T the tokens of a span: (fields, T + 1, R, N, D).

    All calls of a thread share it unless it is large: memory that the allocator returns to the system costs page faults
    when it is next written, a fifth of the time of a small scan.
    """
    shape = fields, spans[0].stop + 1, *d.initial_state.shape
    if d.x.device.type != "cpu" or d.x.dtype != torch.float32 or math.prod(shape) > 4 * SPAN_ELEMENTS:
        return d.x.new_empty(shape)
    if not hasattr(_kept, "room"):
        with torch.inference_mode(False):  # it outlives the call
            _kept.room = torch.empty(4 * SPAN_ELEMENTS, dtype=torch.float32, device="cpu")
    return _kept.room[: math.prod(shape)].view(shape)


def _rows(value: Tensor) -> tuple[Tensor, ...]:
    """Split (T, b, C) into (b, 1, C) for each token."""
    return value.unsqueeze(2).unbind(0)


def _columns(value: Tensor) -> tuple[Tensor, ...]:
    """Split (T, b, C) into (b, C, 1) for each token."""
    return value.unsqueeze(3).unbind(0)


def _advance(d: Any, s: Sizes, state: Tensor, work: Tensor) -> tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
    """Walk from `state` through the T tokens of `d`. The first two fields of `work` hold the states and the decays.

    Returns:
        The states before the first token and after each, (T + 1, b, N, D); x, or the errors for kind "error",
        (T, b, D); eps times these, which is written along k, (T, b, D); the decays (T, b, N, D), or None for "error".
    """
    T, rule = len(d.x), rule_of(d)
    states = work[0, : T + 1]
    states[0] = state
    rows = states.unbind(0)
    if rule.kind == "error":
        errors = d.x.clone(memory_format=torch.contiguous_format)
        writes = torch.empty_like(errors)
        for before, after, error, write, eps, key, key_column in zip(
            rows, rows[1:], _rows(errors), _rows(writes), _rows(s.eps), _rows(d.k), _columns(d.k)
        ):
            error.baddbmm_(key, before, alpha=-1)
            torch.mul(eps, error, out=write)
            torch.addcmul(before, key_column, write, out=after)
        return states, errors, writes, None
    a = rule.decays(d, s, work[1, :T])
    writes = s.eps * d.x
    torch.mul(d.k.unsqueeze(3), writes.unsqueeze(2), out=states[1:])
    for before, after, decay in zip(rows, rows[1:], a.unbind(0)):
        after.addcmul_(decay, before)
    return states, d.x, writes, a


def _read_out(d: Any, states: Tensor) -> Tensor:
    """Return q_t S_t + D x_t, before the gate: (T, b, D)."""
    y = torch.matmul(d.q.unsqueeze(2), states).squeeze(2)
    return y if d.D is None else y.addcmul_(d.D, d.x)


def saved_shape(scan: Scan) -> tuple[int, ...]:
    """Return the shape of the states that `forward` saves."""
    G, B, L, D, N = scan.sizes
    return G, ceil_div(L, CHUNK), B, N, D


def forward(scan: Scan, save_states: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Run the scan.

    Returns:
        y (`scan.output_shape`) in the dtype of x, the final state (`scan.state_shape`) in the dtype of sums, and the
        states at the starts of the chunks (`saved_shape`), empty unless `save_states`.
    """
    G, B, L, D, N = scan.sizes
    d = _inputs(scan)
    out, state = torch.empty_like(d.x), d.initial_state
    saved = d.x.new_empty(ceil_div(L, CHUNK) if save_states else 0, G * B, N, D)
    spans = _spans(d)
    work = _workspace(d, spans, 2)
    for t in spans:
        part = _cut(d, t)
        states = _advance(part, rule_of(d).sizes(part), state, work)[0]
        if save_states:
            saved[t.start // CHUNK : ceil_div(t.stop, CHUNK)] = states[:-1:CHUNK]
        y = _read_out(part, states[1:])
        out[t] = y if part.z is None else y.mul_(F.silu(part.z))
        state = states[-1]
    y = _batch_first(scan, out)
    y = (y[0] + y[1]).mul_(scan.output_scale) if scan.combine != "none" else y.view(scan.output_shape)
    final = state.transpose(1, 2).reshape(scan.state_shape).clone(memory_format=torch.contiguous_format)
    saved = saved.unflatten(1, (G, B)).transpose(0, 1).contiguous() if save_states else saved.new_empty(0)
    return y.to(scan.x.dtype), final, saved


def backward(
    scan: Scan, dy: Optional[Tensor], dfinal: Optional[Tensor], saved: Tensor, dz: Optional[Tensor] = None,
    dkq: Optional[Pair] = None, raw: Optional[Raw] = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the gradient of each tensor of `scan`, by field. `dy` and `dfinal` are the gradients of y and of the final
    state, `saved` is what `forward` saved.

    Args:
        dz: (B, L, D), for a gate that the directions share: a backend may write the gradient of z there instead.
        dkq: two views (G, B, L, N), side by side in the rows of one tensor, if each direction has its own k and q: a
            backend may write their gradients there instead.
        raw: what k and q were before they got unit length: with it a backend that writes to `dkq` writes the gradients
            of `raw` (`unit.backward`).
    """
    G, B, L, D, N = scan.sizes
    if not saved.numel():
        saved = forward(scan, True)[2]
    d = _inputs(scan)
    spans = _spans(d)
    starts = saved[:, [t.start // CHUNK for t in spans]].transpose(0, 1).flatten(1, 2)  # (spans, R, N, D)
    dy = torch.zeros_like(d.x) if dy is None else _time_first(scan, dy).mul_(scan.output_scale)
    if dfinal is None:
        dfinal = torch.zeros_like(d.initial_state)
    else:
        dfinal = dfinal.to(scan.accumulator).reshape(G * B, D, N).transpose(1, 2)
    grads = {
        name: torch.zeros_like(value, memory_format=torch.contiguous_format) for name, value in d.tensors().items()
    }
    adjoint, work = dfinal, _workspace(d, spans, 3)
    for start, t in reversed(list(zip(starts, spans))):
        adjoint = _span_backward(_cut(d, t), start, dy[t], adjoint, work, grads, t)
    grads["initial_state"] = adjoint

    def original(name: str) -> Tensor:
        """Return the gradient in the layout of `scan`, with a direction axis first."""
        if name == "bias":
            return grads["step"].unflatten(1, (G, B)).sum((0, 2))  # (G, D)
        if name == "initial_state":
            return grads["initial_state"].unflatten(0, (G, B)).transpose(2, 3)
        if name == "D":
            return grads["D"].unflatten(0, (G, B)).sum(1)
        if name == "A" and not scan.A_per_token:
            return grads["A"].unflatten(0, (G, B)).sum(1).transpose(1, 2)
        return _batch_first(scan, grads[name])

    return {name: unstack(original(name), value) for name, value in scan.tensors().items()}


def _span_backward(
    d: Any, state: Tensor, dy: Tensor, adjoint: Tensor, work: Tensor, grads: dict[str, Tensor], t: slice
) -> Tensor:
    """Rebuild a span from the state at its start, write its gradients into `grads`, and return the adjoint of that
    state, from that of the state at its end."""
    rule = rule_of(d)
    s = rule.sizes(d)
    walk, targets, writes, a = _advance(d, s, state, work)
    before, states = walk[:-1], walk[1:]  # (T, b, N, D)
    if d.z is not None:
        sigmoid = torch.sigmoid(d.z)
        grads["z"][t] = dy * _read_out(d, states) * (sigmoid * (1 + d.z * (1 - sigmoid)))
        dy = dy * d.z * sigmoid
    if d.D is not None:
        grads["D"] += (dy * d.x).sum(0)

    adjoints = work[2, : len(states)]  # the gradients of S_t, its read-out included
    rows = adjoints.unbind(0)
    if a is not None:
        torch.mul(d.q.unsqueeze(3), dy.unsqueeze(2), out=adjoints)
        rows[-1].add_(adjoint)
        decays = a.unbind(0)
        for i in reversed(range(1, len(rows))):
            rows[i - 1].addcmul_(decays[i], rows[i])
        adjoint = decays[0] * rows[0]
        reads = over_states(d.k, adjoints)  # k_t · adjoint_t: (T, b, D)
        dx = s.eps * reads
    else:
        reads, dx = torch.empty_like(targets), torch.empty_like(targets)
        for row, query, dy_t, key, key_column, eps, read, product in reversed(
            list(zip(rows, _columns(d.q), _rows(dy), _rows(d.k), _columns(d.k), _rows(s.eps), _rows(reads), _rows(dx)))
        ):
            torch.addcmul(adjoint, query, dy_t, out=row)
            torch.bmm(key, row, out=read)
            torch.mul(eps, read, out=product)
            adjoint = torch.addcmul(row, key_column, product, value=-1)

    grads["q"][t] = over_channels(states, dy)
    dk = over_channels(adjoints, writes)
    deps = targets * reads
    if a is None:
        dk -= over_channels(before, dx)
    else:
        dA = rule.through_decays(d, s, a, adjoints.mul_(before), dx, deps, dk)
        if dA is not None:
            grads["A"][t if d.A_per_token else ...] += dA
    grads["x"][t] = dx if d.D is None else torch.addcmul(dx, d.D, dy)
    if d.step is not None:
        grads["step"][t] = rule.through_sizes(d, s, deps, dk)
    grads["k"][t] = dk
    return adjoint
