"""The scans as the papers write them: one token after the other, in plain torch, differentiable by autograd.

The backends are tested against this loop. Each rule's formula is its `update` in `rules/`.
"""

from types import SimpleNamespace
from typing import Any, Optional

import torch
from torch import Tensor

from .backends.torch.unit import unit
from .contract import Scan, head_of, split_heads, stack
from .rules import get_rule, rule_of
from .rules.base import read_out


def longhorn_step(
    state: Tensor,
    x: Tensor,
    beta: Tensor,
    k: Tensor,
    q: Tensor,
    z: Optional[Tensor] = None,
    D: Optional[Tensor] = None,
    beta_bias: Optional[Tensor] = None,
    *,
    rule: str = "diagonal",
    qk_norm: bool = False,
    num_heads: int = 1,
) -> tuple[Tensor, Tensor]:
    """Run one token of Longhorn's recurrence (Algorithm 1 of arXiv 2407.14207): the update and the read-out.

    The state is the weight of an online learner, and the new state solves

        argmin_S  ||S - state||_F^2  +  || S k - x ||^2_{diag(sigmoid(beta))}

    exactly (`rule="exact"`) or with k k^T replaced by its diagonal (`rule="diagonal"`, what the paper trains).

    Args:
        state: (B, D, N), the state after the tokens so far; zeros before the first.
        x, beta, k, q, z, D, beta_bias, rule, qk_norm, num_heads: as in `longhorn_scan`, without the axis of tokens.

    Returns:
        y (B, D) and the new state (B, D, N).
    """
    return _step(state, x, beta, k, q, None, z, D, beta_bias, rule, True, qk_norm, num_heads)


def selective_step(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    z: Optional[Tensor] = None,
    D: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    *,
    dt_softplus: bool = True,
    qk_norm: bool = False,
    num_heads: int = 1,
) -> tuple[Tensor, Tensor]:
    """Run one token of Mamba's selective scan (arXiv 2312.00752, Algorithm 2, with B discretised as dt * B).

    Args:
        state: (B, D, N), the state after the tokens so far.
        A: (D, N), or (B, 1, N) where A depends on the token.
        x, dt, B, C, z, D, dt_bias, dt_softplus, qk_norm, num_heads: as in `selective_scan`, without the axis of tokens.

    Returns:
        y (B, D) and the new state (B, D, N).
    """
    return _step(state, x, dt, B, C, A, z, D, dt_bias, "mamba", dt_softplus, qk_norm, num_heads)


def _step(
    state: Tensor, x: Tensor, logit: Tensor, k: Tensor, q: Tensor, A: Optional[Tensor], z: Optional[Tensor],
    D: Optional[Tensor], bias: Optional[Tensor], rule: str, softplus: bool, qk_norm: bool, num_heads: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run one token of any rule: head by head, as each has its own channels, keys and queries."""
    given = {"initial_state": state, "x": x, "step": logit, "k": k, "q": q, "A": A, "z": z, "D": D, "bias": bias}
    ys, states = [], []
    for h in range(num_heads):
        s: Any = SimpleNamespace(**{n: v if v is None else head_of(n, v, h, num_heads) for n, v in given.items()})
        key, query = (unit(s.k), unit(s.q)) if qk_norm else (s.k, s.q)
        logit = s.step if s.bias is None else s.step + s.bias
        states.append(get_rule(rule).update(s.initial_state, s.x, logit, key, s.A, softplus))
        ys.append(read_out(states[-1], s.x, query, s.z, s.D))
    return torch.cat(ys, -1), torch.cat(states, -2)


def scan(scan: Scan) -> tuple[Tensor, Tensor]:
    """Run the whole scan as a loop over tokens.

    Returns:
        y in the dtype of x, of shape `scan.output_shape`, and the final state in float32 (float64 for float64 x), of
        shape `scan.state_shape`.
    """
    if scan.num_heads > 1:
        found = [_scan(part) for part in split_heads(scan)]
        return torch.cat([y for y, _ in found], -1), torch.cat([state for _, state in found], -2)
    return _scan(scan)


def _scan(scan: Scan) -> tuple[Tensor, Tensor]:
    G, B, L, D, N = scan.sizes
    rule = rule_of(scan)
    axes = {"A": 3 if scan.A_per_token else 2, "D": 1, "bias": 1}  # without the direction axis; others have 3
    tensors: dict[str, Any] = {
        name: stack(scan, value, axes.get(name, 3)).to(scan.accumulator) for name, value in scan.tensors().items()
    }
    if scan.qk_norm:
        tensors |= {name: unit(tensors[name]) for name in ("k", "q")}
    ys, states = [], []
    for g, backward in enumerate(scan.reversed):
        d: Any = scan._replace(**{name: value[g] for name, value in tensors.items()})
        state = d.x.new_zeros(B, D, N) if d.initial_state is None else d.initial_state
        outputs = [d.x] * L
        for t in reversed(range(L)) if backward else range(L):
            x, logit, k, q = d.x[:, t], d.step[:, t], d.k[:, t], d.q[:, t]
            logit = logit if d.bias is None else logit + d.bias
            A = d.A[:, t].unsqueeze(1) if scan.A_per_token else d.A
            state = rule.update(state, x, logit, k, A, scan.softplus)
            outputs[t] = read_out(state, x, q, None if d.z is None else d.z[:, t], d.D)
        ys.append(torch.stack(outputs, 1))  # (B, L, D)
        states.append(state)

    if scan.direction != "both":
        return ys[0].to(scan.x.dtype), states[0]
    y = torch.stack(ys) if scan.combine == "none" else scan.output_scale * (ys[0] + ys[1])
    return y.to(scan.x.dtype), torch.stack(states)
