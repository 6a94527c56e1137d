"""The scans as the papers write them: one token after the other, in plain torch, differentiable by autograd.

This is what the other implementations are measured against. It is slow and meant to be read beside
Liu et al., "Longhorn: State Space Models are Amortized Online Learners" (arXiv 2407.14207) and
Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (arXiv 2312.00752). The formula of each
rule is its `update` in `rules/`; here is what all have around it.
"""

from typing import Optional

import torch
from torch import Tensor

from .contract import Scan, stack
from .rules import get_rule
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
) -> tuple[Tensor, Tensor]:
    """One token of Longhorn's recurrence (Algorithm 1 of arXiv 2407.14207): the update and the read-out.

    The state is the weight of an online learner, and the new state solves

        argmin_S  ||S - state||_F^2  +  || S k - x ||^2_{diag(sigmoid(beta))}

    exactly (`rule="exact"`) or with k k^T replaced by its diagonal (`rule="diagonal"`, what the paper trains).

    Args:
        state: (B, D, N), what the tokens so far have left; zeros before the first.
        x: (B, D) values.
        beta: (B, D), or (B, 1) for one step size for all channels; logits, the sigmoid is taken here.
        k: (B, N) keys.
        q: (B, N) queries.
        z: (B, D) gate; the output is multiplied by silu(z).
        D: (D,) skip weight; D * x is added before the gate.
        beta_bias: (D,) or (1,), added to `beta`.
        rule: "diagonal" or "exact".

    Returns:
        y (B, D) and the new state (B, D, N).

    Raises:
        ValueError: `rule` is neither "diagonal" nor "exact".
    """
    if rule not in ("diagonal", "exact"):
        raise ValueError(f"rule={rule!r} is not known; choose 'diagonal' or 'exact'")
    if rule not in ("diagonal", "exact"):
        raise ValueError(f"rule={rule!r} is not known; choose 'diagonal' or 'exact'")
    beta = beta if beta_bias is None else beta + beta_bias
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
) -> tuple[Tensor, Tensor]:
    """One token of Mamba's selective scan (arXiv 2312.00752, Algorithm 2, with B discretised as dt * B).

    Args:
        state: (B, D, N).
        x: (B, D) values.
        dt: (B, D) or (B, 1) step sizes, before the softplus if `dt_softplus`.
        A: (D, N), or (B, 1, N) where A depends on the token; negative, so that exp(dt A) decays.
        B: (B, N) input weights, the keys of Longhorn.
        C: (B, N) read-out weights, the queries of Longhorn.
        z, D: gate and skip as in `longhorn_step`.
        dt_bias: (D,) or (1,), added to `dt` before the softplus.
        dt_softplus: whether the step size is softplus(dt + dt_bias).

    Returns:
        y (B, D) and the new state (B, D, N).
    """
    dt = dt if dt_bias is None else dt + dt_bias
    state = get_rule("mamba").update(state, x, dt, B, A, softplus=dt_softplus)
    return read_out(state, x, C, z, D), state


def scan(scan: Scan) -> tuple[Tensor, Tensor]:
    """The whole scan as a loop over tokens.

    Returns:
        y in the dtype of x, of shape `scan.output_shape`, and the final state in float32 (float64 for float64 x), of
        shape `scan.state_shape`.
    """
    G, B, L, D, N = scan.sizes

    def each_direction(value: Optional[Tensor], ndim: int) -> list:
        if value is None:
            return [None] * G
        return list(stack(scan, value, ndim).to(scan.accumulator).unbind(0))

    ys, states = [], []
    for backward, x, step, k, q, A, z, skip, bias, state in zip(
        scan.reversed, each_direction(scan.x, 3), each_direction(scan.step, 3), each_direction(scan.k, 3),
        each_direction(scan.q, 3), each_direction(scan.A, 3 if scan.A_per_token else 2), each_direction(scan.z, 3),
        each_direction(scan.D, 1), each_direction(scan.bias, 1), each_direction(scan.initial_state, 3),
    ):  # fmt: skip
        state = x.new_zeros(B, D, N) if state is None else state
        outputs = [x] * L
        for t in reversed(range(L)) if backward else range(L):
            A_t = A[:, t].unsqueeze(1) if scan.A_per_token else A
            logit = step[:, t] if bias is None else step[:, t] + bias
            state = scan.law.update(state, x[:, t], logit, k[:, t], A_t, scan.softplus)
            outputs[t] = read_out(state, x[:, t], q[:, t], None if z is None else z[:, t], skip)
        ys.append(torch.stack(outputs, 1))  # (B, L, D)
        states.append(state)

    if scan.direction != "both":
        return ys[0].to(scan.x.dtype), states[0]
    y = torch.stack(ys) if scan.combine == "none" else scan.output_scale * (ys[0] + ys[1])
    return y.to(scan.x.dtype), torch.stack(states)
