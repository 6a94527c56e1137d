"""The scans in vectorised torch with their own backward pass: what runs on a CPU, and wherever triton is absent.

The recurrence has to walk through time, but little else does. A block of the batch is cut into chunks of `CHUNK`
tokens, which the cache holds; within a chunk the loop over tokens does only

    diagonal, Mamba:  S_t = a_t * S_{t-1} + k_t v_t^T,  v_t = eps_t x_t
    exact:            S_t = S_{t-1} + k_t w_t^T,        w_t = eps_t (x_t - S_{t-1} k_t)

(two passes over the state), and everything that needs no order, the decays, the read-out and all gradients but the
adjoint of the state, is done for the chunk at once. The forward pass saves the state at the start of each chunk, from
which the backward pass rebuilds the chunk.

Layout: time first, (L, batch, ...), the state (batch, N, D). docs/scan.md derives the gradients.
"""

from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from .contract import CHUNK, Scan, stack, unstack

# States of one block and chunk, in elements. Smaller blocks spend their time on calls, larger ones on memory; between
# 2^18 and 2^20 the difference is small.
BLOCK_ELEMENTS = 1 << 19
# exp(87) is the largest power of e, to the integer, that float32 holds; 700 for float64. A step whose logit lies
# below has beta < 1e-37: it writes nothing that float32 could show.
MAX_EXPONENT = {torch.float32: 87.0, torch.float64: 700.0}


class _Direction(NamedTuple):
    """One direction, time first and in the order it is scanned, in the accumulator's dtype."""

    x: Tensor               # (L, B, D)
    step: Tensor            # (L, B, D), bias included
    k: Tensor               # (L, B, N)
    q: Tensor               # (L, B, N)
    A: Optional[Tensor]     # (N, D), or per token (L, B, N)
    z: Optional[Tensor]     # (L, B, D)
    D: Optional[Tensor]     # (D,)
    state: Tensor           # (B, N, D)


class _Step(NamedTuple):
    """What the recurrence needs of each token's step size."""

    eps: Tensor             # (L, B, D): Longhorn's eps, Mamba's dt
    e: Optional[Tensor]     # (L, B, D): exp(-logit), Longhorn only


def _directions(scan: Scan) -> list[_Direction]:
    dtype = scan.accumulator
    G, B, L, D, N = scan.sizes

    def each(value: Optional[Tensor], ndim: int, time: bool) -> list:
        if value is None:
            return [None] * G
        parts = stack(scan, value, ndim).to(dtype).unbind(0)
        if not time:
            return list(parts)
        return [(part.flip(1) if backward else part).transpose(0, 1).contiguous()
                for part, backward in zip(parts, scan.reversed)]

    step = each(scan.step, 3, True)
    if scan.bias is not None:
        step = [part + bias for part, bias in zip(step, each(scan.bias, 1, False))]
    step = [part.expand(L, B, D) for part in step]
    if scan.A_per_token:
        A = each(scan.A, 3, True)
    else:
        A = [part if part is None else part.t().contiguous() for part in each(scan.A, 2, False)]
    if scan.initial_state is None:
        state = [scan.x.new_zeros(B, N, D, dtype=dtype)] * G
    else:
        state = [part.transpose(1, 2).contiguous() for part in each(scan.initial_state, 3, False)]
    return [_Direction(*parts) for parts in zip(
        each(scan.x, 3, True), step, each(scan.k, 3, True), each(scan.q, 3, True), A, each(scan.z, 3, True),
        each(scan.D, 1, False), state)]


def _step_sizes(scan: Scan, d: _Direction) -> _Step:
    if scan.rule == "mamba":
        return _Step(F.softplus(d.step) if scan.softplus else d.step, None)
    e = torch.exp((-d.step).clamp(max=MAX_EXPONENT[d.step.dtype]))
    return _Step(1 / (1 + e + d.k.square().sum(-1, keepdim=True)), e)


def _blocks(d: _Direction) -> list[slice]:
    _, B, D = d.x.shape
    size = max(1, BLOCK_ELEMENTS // (CHUNK * D * d.k.shape[-1]))
    return [slice(start, min(start + size, B)) for start in range(0, B, size)]


def _block(scan: Scan, d: _Direction, s: _Step, b: slice, t: slice) -> tuple[_Direction, _Step]:
    """The batch entries `b` at the times `t`."""
    def cut(value: Optional[Tensor]) -> Optional[Tensor]:
        return None if value is None else value[t, b]
    A = cut(d.A) if scan.A_per_token else d.A
    return (_Direction(cut(d.x), cut(d.step), cut(d.k), cut(d.q), A, cut(d.z), d.D, d.state[b]),
            _Step(*map(cut, s)))


def _decays(scan: Scan, d: _Direction, s: _Step) -> Tensor:
    """a of shape (T, b, N, D)."""
    eps = s.eps.unsqueeze(-2)  # (T, b, 1, D)
    if scan.rule == "mamba":
        A = d.A.unsqueeze(-1) if scan.A_per_token else d.A
        return (eps * A).exp_()
    k2 = d.k.square().unsqueeze(-1)  # (T, b, N, 1)
    a = 1 - eps * k2
    if d.k.shape[-1] == 1:
        # A lone large key leaves 1 - eps k^2 no digits: and then
        # a = eps (1 + exp(-logit)), since eps = 1 / (1 + exp(-logit) + k^2).
        a = torch.where(a < 0.5, eps * (1 + s.e).unsqueeze(-2), a)
    return a


def _advance(scan: Scan, d: _Direction, s: _Step, state: Tensor) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    """Walk through one chunk from `state`.

    Returns:
        states (T, b, N, D) after each token; the targets (T, b, D), of which eps times k_t is written: x, or for the
        exact rule the error x_t - S_{t-1} k_t; and the decays (None for the exact rule).
    """
    T, b, D = d.x.shape
    states = d.x.new_empty(T, b, d.k.shape[-1], D)
    if scan.state_rule == "exact":
        errors = torch.empty_like(d.x)
        for t in range(T):
            predicted = torch.bmm(d.k[t].unsqueeze(1), state).squeeze(1)  # (b, D)
            torch.sub(d.x[t], predicted, out=errors[t])
            state = torch.addcmul(state, d.k[t].unsqueeze(2), (s.eps[t] * errors[t]).unsqueeze(1), out=states[t])
        return states, errors, None
    a = _decays(scan, d, s)
    write = s.eps * d.x
    for t in range(T):
        state = torch.mul(a[t], state, out=states[t]).addcmul_(d.k[t].unsqueeze(2), write[t].unsqueeze(1))
    return states, d.x, a


def _read_out(d: _Direction, states: Tensor) -> Tensor:
    """q_t S_t + D x_t, before the gate: (T, b, D)."""
    y = torch.matmul(d.q.unsqueeze(2), states).squeeze(2)
    return y if d.D is None else torch.addcmul(y, d.D, d.x)


def _chunks(L: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, L)) for start in range(0, L, CHUNK)]


def forward(scan: Scan, save_states: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Run the scan.

    Returns:
        y (`scan.output_shape`) in the dtype of x, the final state (`scan.state_shape`) in the accumulator's dtype, and
        the states at the starts of the chunks, (directions, chunks, B, N, D), empty unless `save_states`.
    """
    G, B, L, D, N = scan.sizes
    chunks = _chunks(L)
    y = scan.x.new_empty(G, B, L, D, dtype=scan.accumulator)
    final = scan.x.new_empty(G, B, N, D, dtype=scan.accumulator)
    saved = scan.x.new_empty(*((G, len(chunks), B, N, D) if save_states else (0,)), dtype=scan.accumulator)
    for g, d in enumerate(_directions(scan)):
        s = _step_sizes(scan, d)
        out = d.x.new_empty(L, B, D)
        for b in _blocks(d):
            state = d.state[b]
            for c, t in enumerate(chunks):
                if save_states:
                    saved[g, c, b] = state
                part, sizes = _block(scan, d, s, b, t)
                states, _, _ = _advance(scan, part, sizes, state)
                o = _read_out(part, states)
                out[t, b] = o if part.z is None else o.mul_(F.silu(part.z))
                state = states[-1]
            final[g, b] = state
        y[g] = _to_batch_first(out, scan.reversed[g])
    if scan.direction == "both" and scan.combine != "none":
        y = (y[0] + y[1]).mul_(scan.output_scale)
    elif scan.direction != "both":
        y = y[0]
    final = final.transpose(-1, -2).reshape(scan.state_shape)
    return y.to(scan.x.dtype), final.contiguous(), saved


def _to_batch_first(value: Tensor, backward: bool) -> Tensor:
    """(L, B, ·) in scanning order to (B, L, ·) in the order of the tokens."""
    value = value.transpose(0, 1)
    return value.flip(1) if backward else value


def backward(scan: Scan, dy: Optional[Tensor], dfinal: Optional[Tensor], saved: Tensor) -> dict[str, Tensor]:
    """A gradient for each tensor of `scan`, given those of y and of the final state and what `forward` saved."""
    G, B, L, D, N = scan.sizes
    if not saved.numel():
        saved = forward(scan, True)[2]
    if dy is None:
        dy = scan.x.new_zeros(scan.output_shape)
    dy = dy.to(scan.accumulator).mul(scan.output_scale)
    dys = dy.unbind(0) if dy.ndim == 4 else [dy] * G
    dfinals = [None] * G if dfinal is None else dfinal.reshape(G, B, D, N).transpose(-1, -2).to(scan.accumulator)

    per_direction: list[dict[str, Tensor]] = []
    for g, d in enumerate(_directions(scan)):
        s = _step_sizes(scan, d)
        grads = {name: torch.zeros_like(value, memory_format=torch.contiguous_format)
                 for name, value in d._asdict().items() if value is not None}
        gy = (dys[g].flip(1) if scan.reversed[g] else dys[g]).transpose(0, 1)  # (L, B, D)
        for b in _blocks(d):
            adjoint = torch.zeros_like(d.state[b]) if dfinals[g] is None else dfinals[g][b].clone()  # (b, N, D)
            for c, t in reversed(list(enumerate(_chunks(L)))):
                part, sizes = _block(scan, d, s, b, t)
                adjoint = _chunk_backward(scan, part, sizes, saved[g, c, b], gy[t, b], adjoint, grads, b, t)
            grads["state"][b] = adjoint
        per_direction.append(grads)

    out: dict[str, Tensor] = {}
    for name, value in scan.tensors().items():
        field = "state" if name == "initial_state" else "step" if name == "bias" else name
        parts = [grads[field] for grads in per_direction]
        if field in ("x", "step", "k", "q", "z") or (field == "A" and scan.A_per_token):
            parts = [_to_batch_first(part, backward) for part, backward in zip(parts, scan.reversed)]
        if name == "bias":
            parts = [part.sum((0, 1)) for part in parts]  # (D,)
        elif field == "state" or (field == "A" and not scan.A_per_token):
            parts = [part.transpose(-1, -2) for part in parts]
        out[name] = unstack(torch.stack(parts), value).contiguous()
    return out


def _chunk_backward(scan: Scan, d: _Direction, s: _Step, state: Tensor, dy: Tensor, adjoint: Tensor,
                    grads: dict[str, Tensor], b: slice, t: slice) -> Tensor:
    """Rebuild the chunk from the state at its start, write its gradients into `grads`, and return the adjoint of that
    state. `adjoint` is that of the state at its end, from all later tokens."""
    states, targets, a = _advance(scan, d, s, state)
    before = torch.cat([state.unsqueeze(0), states[:-1]])  # (T, b, N, D)
    if d.z is not None:
        sigmoid = torch.sigmoid(d.z)
        grads["z"][t, b] = dy * _read_out(d, states) * (sigmoid * (1 + d.z * (1 - sigmoid)))
        dy = dy * d.z * sigmoid
    if d.D is not None:
        grads["D"] += (dy * d.x).sum((0, 1))

    T = d.x.shape[0]
    adjoints = torch.empty_like(states)  # of S_t, the read-out at t included
    reads = torch.empty_like(d.x)        # k_t · adjoint_t: (T, b, D)
    for i in reversed(range(T)):
        torch.addcmul(adjoint, d.q[i].unsqueeze(2), dy[i].unsqueeze(1), out=adjoints[i])
        if a is not None:
            adjoint = a[i] * adjoints[i]
        else:
            reads[i] = torch.bmm(d.k[i].unsqueeze(1), adjoints[i]).squeeze(1)
            adjoint = torch.addcmul(adjoints[i], d.k[i].unsqueeze(2), (s.eps[i] * reads[i]).unsqueeze(1), value=-1)

    def over_channels(field: Tensor, weight: Tensor) -> Tensor:
        return torch.matmul(field, weight.unsqueeze(-1)).squeeze(-1)  # (T, b, N)

    def over_states(weight: Tensor, field: Tensor) -> Tensor:
        return torch.matmul(weight.unsqueeze(2), field).squeeze(2)  # (T, b, D)

    grads["q"][t, b] = over_channels(states, dy)
    dk = over_channels(adjoints, s.eps * targets)
    if a is not None:
        reads = over_states(d.k, adjoints)
    dx = s.eps * reads
    deps = targets * reads
    if a is None:
        dk -= over_channels(before, dx)
    else:
        flow = adjoints.mul_(before)  # d loss / d a_t
        if scan.rule == "mamba":
            flow = flow.mul_(a)
            if scan.A_per_token:
                deps += over_states(d.A, flow)
                grads["A"][t, b] = over_channels(flow, s.eps)
            else:
                deps += (flow * d.A).sum(2)
                grads["A"] += (flow * s.eps.unsqueeze(2)).sum((0, 1))
        else:
            deps -= over_states(d.k.square(), flow)
            if d.k.shape[-1] == 1:
                # flow - eps k^2 flow, what two terms of dk come to, without their cancellation for a large key.
                flow = flow.mul_(a) + (dx * d.x).unsqueeze(2)
            dk -= 2 * d.k * over_channels(flow, s.eps)
    grads["x"][t, b] = dx if d.D is None else torch.addcmul(dx, d.D, dy)
    if scan.rule == "mamba":
        grads["step"][t, b] = deps * torch.sigmoid(d.step) if scan.softplus else deps
    else:
        dlog = deps * s.eps  # d loss / d log(eps)
        if d.k.shape[-1] > 1:
            dk -= 2 * d.k * (dlog * s.eps).sum(-1, keepdim=True)
        grads["step"][t, b] = dlog * (s.eps * s.e)
    grads["k"][t, b] = dk
    return adjoint
