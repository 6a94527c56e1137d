"""Mamba's selective scan (Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv
2312.00752): with dt = softplus(step), for each channel

    S_t = exp(dt_t A) * S_{t-1} + dt_t x_t k_t^T

B, C and dt are the fields `k`, `q` and `step`. A is one for all tokens, or each token's own (arXiv 2407.14207).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import HAS_TRITON, Functions, Rule, Sizes, over_channels, over_states


class Mamba(Rule):
    name = "mamba"
    kind = "decay"
    takes_A = needs_A = True
    names = {"step": "dt", "k": "B", "q": "C", "bias": "dt_bias"}
    operations = {"forward": (4, 1), "backward": (12, 1)}

    def update(self, state: Tensor, x: Tensor, step: Tensor, k: Tensor, A: Any, softplus: bool) -> Tensor:
        dt = F.softplus(step) if softplus else step
        return torch.exp(dt.unsqueeze(-1) * A) * state + (dt * x).unsqueeze(-1) * k.unsqueeze(1)

    def sizes(self, d: Any) -> Sizes:
        return Sizes(F.softplus(d.step) if d.softplus else d.step)

    def through_sizes(self, d: Any, s: Sizes, deps: Tensor, dk: Tensor) -> Tensor:
        return deps * torch.sigmoid(d.step) if d.softplus else deps

    def decays(self, d: Any, s: Sizes, out: Tensor) -> Tensor:
        return torch.mul(s.eps.unsqueeze(2), d.A.unsqueeze(3) if d.A_per_token else d.A, out=out).exp_()

    def through_decays(self, d: Any, s: Sizes, a: Tensor, flow: Tensor, dx: Tensor, deps: Tensor, dk: Tensor) -> Tensor:
        flow.mul_(a)  # d loss / d (dt A)
        if d.A_per_token:
            deps += over_states(d.A, flow)
            return over_channels(flow, s.eps)
        deps += torch.mul(flow, d.A, out=a).sum(2)
        return flow.mul_(s.eps.unsqueeze(2)).sum(0)

    def reset_bias(self, bias: Tensor) -> None:
        # softplus(bias) is log-uniform in [1e-3, 1e-1].
        dt = torch.empty_like(bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        bias.copy_(dt + torch.log(-torch.expm1(-dt)))


RULES = (Mamba(),)

if HAS_TRITON:
    import triton
    import triton.language as tl

    from ..backends.triton.lanes import LOG2E, dot, fill, reciprocal

    _LN2 = tl.constexpr(0.6931471805599453)

    @triton.jit
    def scaled_bias(bias):
        return bias

    @triton.jit
    def _softplus(v):
        # log(1 + u) loses the digits of a small u; log(w) / (w - 1) with the rounded w = 1 + u restores them.
        u = tl.exp(-tl.abs(v))
        w = 1.0 + u
        return tl.maximum(v, 0.0) + tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))

    @triton.jit
    def _step_size(u, bias, norm, keep, form):
        if form.SOFTPLUS:
            eps = _softplus(u.to(tl.float32) + bias) * keep
        else:
            eps = (u.to(tl.float32) + bias) * keep
        return eps, eps

    @triton.jit
    def decay(k, A, eps, e, LONE: tl.constexpr):  # A was multiplied by log2(e)
        return tl.exp2(A * eps)

    @triton.jit
    def advance(S, x, k, A, eps, e):
        w = eps * x  # (4)
        new = ()
        for i in tl.static_range(len(A)):
            new = new + (tl.exp2(A[i] * eps) * S[i] + k[i] * w,)
        return new, w

    # The product of the decays is one exp, of the sum of dt A or, with an A for all tokens, of dt.

    @triton.jit
    def start_total(form):
        return fill(0.0, form.NI if form.A_PER_TOKEN else 1, form.NS if form.A_PER_TOKEN else 1, form.BC)

    @triton.jit
    def summarize(S, total, x, k, A, eps, e, form):
        S, w = advance(S, x, k, A, eps, e)
        if form.A_PER_TOKEN:
            new = ()
            for n in tl.static_range(len(A)):
                new = new + (total[n] + A[n] * eps,)
            total = new
        else:
            total = (total[0] + eps,)
        return S, total

    @triton.jit
    def end_total(total, A, form):
        product = ()
        for n in tl.static_range(form.NI):
            if form.A_PER_TOKEN:
                product = product + (tl.exp2(total[n]),)
            else:
                product = product + (tl.exp2(total[0] * A[n]),)
        return product

    @triton.jit
    def _step_back(now, before, x, w, k, A, eps, e, form):
        reads = dot(now, k)
        dx = eps * reads
        dk = ()
        G = ()
        flows = ()  # d loss / d (dt A), for (18) and (19)
        dA = ()
        for n in tl.static_range(len(A)):
            a = decay(k[n], A[n], eps, e, False)
            dk = dk + (now[n] * w,)
            G = G + (now[n] * a,)
            flows = flows + (G[n] * before[n],)
            dA = dA + (flows[n] * eps,)
        return G, dx, x * reads + dot(flows, A) * _LN2, dk, dA

    @triton.jit
    def _logit_back(dstep, u, bias, eps, e, inside, form):
        if form.SOFTPLUS:
            dstep = dstep * reciprocal(1.0 + tl.exp2((u.to(tl.float32) + bias) * -LOG2E), form.PTX)
        return tl.where(inside, dstep, 0.0)

    Mamba.kernels = Functions(
        Mamba, scaled_bias=scaled_bias, step_size=_step_size, advance=advance, step_back=_step_back,
        logit_back=_logit_back, decay=decay, start_total=start_total, summarize=summarize, end_total=end_total,
    )  # fmt: skip
