"""The scans as the papers write them: one token after the other, in plain torch, differentiable by autograd.

The backends are tested against this loop. Each rule's formula is its `update` in `rules/`.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from .backends.torch.unit import unit
from .contract import Scan, stack
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
) -> tuple[Tensor, Tensor]:
    """Run one token of Longhorn's recurrence (Algorithm 1 of arXiv 2407.14207): the update and the read-out.

    The state is the weight of an online learner, and the new state solves

        argmin_S  ||S - state||_F^2  +  || S k - x ||^2_{diag(sigmoid(beta))}

    exactly (`rule="exact"`) or with k k^T replaced by its diagonal (`rule="diagonal"`, what the paper trains).

    Args:
        state: (B, D, N), the state after the tokens so far; zeros before the first.
        x, beta, k, q, z, D, beta_bias, rule, qk_norm: as in `longhorn_scan`, without the axis of tokens.

    Returns:
        y (B, D) and the new state (B, D, N).

    Raises:
        ValueError: no rule is called `rule`.
    """
    beta = beta if beta_bias is None else beta + beta_bias
    k, q = (unit(k), unit(q)) if qk_norm else (k, q)
    state = get_rule(rule).update(state, x, beta, k, None, softplus=True)
    return read_out(state, x, q, z, D), state


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
) -> tuple[Tensor, Tensor]:
    """Run one token of Mamba's selective scan (arXiv 2312.00752, Algorithm 2, with B discretised as dt * B).

    Args:
        state: (B, D, N), the state after the tokens so far.
        A: (D, N), or (B, 1, N) where A depends on the token.
        x, dt, B, C, z, D, dt_bias, dt_softplus, qk_norm: as in `selective_scan`, without the axis of tokens.

    Returns:
        y (B, D) and the new state (B, D, N).
    """
    dt = dt if dt_bias is None else dt + dt_bias
    B, C = (unit(B), unit(C)) if qk_norm else (B, C)
    state = get_rule("mamba").update(state, x, dt, B, A, softplus=dt_softplus)
    return read_out(state, x, C, z, D), state


def scan(scan: Scan) -> tuple[Tensor, Tensor]:
    """Run the whole scan as a loop over tokens.

    Returns:
        y in the dtype of x, of shape `scan.output_shape`, and the final state in float32 (float64 for float64 x), of
        shape `scan.state_shape`.
    """
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
