"""Longhorn's rules (Liu et al., "Longhorn: State Space Models are Amortized Online Learners", arXiv 2407.14207).

With eps = b / (1 + b ||k||^2), b = sigmoid(beta), for each channel d

    diagonal: S_t[d] = (1 - eps_t[d] k_t^2) S_{t-1}[d] + eps_t[d] x_t[d] k_t
    exact:    S_t[d] = S_{t-1}[d] + eps_t[d] (x_t[d] - S_{t-1}[d] . k_t) k_t

and "diagonal_unit" is the diagonal one over k / ||k||. Below, e = exp(-beta), and eps = 1 / (1 + e + ||k||^2).
"""

from typing import Any, Optional

import torch
from torch import Tensor

from .base import HAS_TRITON, Functions, Rule, Sizes, UnitKeys, over_channels, over_states, unit_or_zero

# Keeps exp finite. Where -logit is larger, beta is below 1e-37, and the token writes nothing that float32 could show.
MAX_EXPONENT = {torch.float32: 87.0, torch.float64: 700.0}


class Longhorn(Rule):
    takes_norm = True

    @staticmethod
    def _eps(step: Tensor, k: Tensor) -> Tensor:
        beta = torch.sigmoid(step)
        return beta / (1 + beta * k.square().sum(-1, keepdim=True))  # (B, D or 1)

    def sizes(self, d: Any) -> Sizes:
        e = torch.exp((-d.step).clamp(max=MAX_EXPONENT[d.step.dtype]))
        return Sizes(1 / (1 + e + d.k.square().sum(-1, keepdim=True)), e)

    def through_sizes(self, d: Any, s: Sizes, deps: Tensor, dk: Tensor) -> Tensor:
        dlog = deps * s.eps  # d loss / d log(eps)
        if d.k.shape[-1] > 1:  # with one state this part is in `dk` already
            dk -= 2 * d.k * (dlog * s.eps).sum(-1, keepdim=True)
        return dlog * (s.eps * s.e)


class Diagonal(Longhorn):
    name = "diagonal"
    kind = "decay"
    halves_key_sums = True
    operations = {"forward": (4, 0), "backward": (12, 0)}

    def update(self, state: Tensor, x: Tensor, step: Tensor, k: Tensor, A: Optional[Tensor], softplus: bool) -> Tensor:
        eps, k = self._eps(step, k), k.unsqueeze(1)  # (B, D or 1), (B, 1, N)
        return (1 - eps.unsqueeze(-1) * k.square()) * state + (eps * x).unsqueeze(-1) * k

    def decays(self, d: Any, s: Sizes, out: Tensor) -> Tensor:
        eps = s.eps.unsqueeze(2)  # (T, b, 1, D)
        a = torch.mul(eps, -d.k.square().unsqueeze(3), out=out).add_(1)
        if d.k.shape[-1] == 1:
            # With one state, a large key costs 1 - eps k^2 its digits. eps (1 + e) is the same number, and keeps them.
            a = torch.where(a < 0.5, eps * (1 + s.e).unsqueeze(2), a)
        return a

    def through_decays(self, d: Any, s: Sizes, a: Tensor, flow: Tensor, dx: Tensor, deps: Tensor, dk: Tensor) -> None:
        deps -= over_states(d.k.square(), flow)
        if d.k.shape[-1] == 1:
            # flow - eps k^2 flow without the cancellation that a large key causes
            flow = flow.mul_(a) + (dx * d.x).unsqueeze(2)
        dk -= 2 * d.k * over_channels(flow, s.eps)


class Exact(Longhorn):
    name = "exact"
    kind = "error"
    operations = {"forward": (3, 0), "backward": (8, 0)}

    def update(self, state: Tensor, x: Tensor, step: Tensor, k: Tensor, A: Optional[Tensor], softplus: bool) -> Tensor:
        eps, k = self._eps(step, k), k.unsqueeze(1)  # (B, D or 1), (B, 1, N)
        error = x - (state * k).sum(-1)
        return state + (eps * error).unsqueeze(-1) * k


class DiagonalUnit(UnitKeys, Diagonal):
    name = "diagonal_unit"

    def update(self, state: Tensor, x: Tensor, step: Tensor, k: Tensor, A: Optional[Tensor], softplus: bool) -> Tensor:
        return super().update(state, x, step, unit_or_zero(k), A, softplus)

    def prepare(self, scan: Any) -> Any:
        return super().prepare(scan)._replace(rule=Diagonal.name)


RULES = (Diagonal(), Exact(), DiagonalUnit())

if HAS_TRITON:
    import triton
    import triton.language as tl

    from ..backends.triton.lanes import LOG2E, dot, fill, reciprocal
    from ..backends.triton.lanes import MAX_EXPONENT as _MAX_EXPONENT

    @triton.jit
    def scaled_bias(bias):
        return bias * -LOG2E

    @triton.jit
    def step_size(u, bias, norm, keep, form):
        # (1)
        e = tl.exp2(tl.minimum(u.to(tl.float32) * -LOG2E + bias, _MAX_EXPONENT))
        return reciprocal(1.0 + e + norm, form.PTX), e

    @triton.jit
    def diagonal_decay(k, A, eps, e, LONE: tl.constexpr):
        a = 1.0 - eps * (k * k)
        if LONE:  # as in `Diagonal.decays`; a rule with another step size needs its own
            a = tl.where(a < 0.5, eps * (1.0 + e), a)
        return a

    @triton.jit
    def diagonal_advance(S, x, k, A, eps, e):
        w = eps * x  # (3)
        new = ()
        for i in tl.static_range(len(k)):
            if len(k) == 1:
                new = new + (diagonal_decay(k[i], 0.0, eps, e, True) * S[i] + k[i] * w,)
            else:
                new = new + (S[i] + k[i] * (w - eps * (k[i] * S[i])),)
        return new, w

    @triton.jit
    def start_total(form):
        return fill(1.0, form.NI, form.NS, form.BC)

    @triton.jit
    def summarize(S, total, x, k, A, eps, e, form):
        w = eps * x
        new = ()
        new_total = ()
        for n in tl.static_range(len(k)):
            a = diagonal_decay(k[n], 0.0, eps, e, len(k) == 1)
            new = new + (a * S[n] + k[n] * w,)
            new_total = new_total + (total[n] * a,)
        return new, new_total

    @triton.jit
    def end_total(total, A, form):
        return total

    @triton.jit
    def logit_back(dlog, u, bias, eps, e, inside, form):
        return dlog * (eps * e)  # (17)

    @triton.jit
    def diagonal_step_back(now, before, x, w, k, A, eps, e, form):
        dk = ()
        G = ()
        if len(k) == 1:
            a = diagonal_decay(k[0], 0.0, eps, e, True)
            reads = now[0] * k[0]
            dx = eps * reads
            flow = now[0] * before[0]
            dlog = eps * (x * reads - flow * (k[0] * k[0]))
            # (20)
            dk = (now[0] * w - 2.0 * k[0] * eps * (flow * a + w * reads),)
            G = (now[0] * a,)
            return G, dx, dlog, dk, ()
        else:
            # (14): dk / 2 = H (x/2 - k S), and two sums of what is there already give dx and dlog.
            heads = ()
            # The order of a sum decides which registers ptxas spills: each is 2 to 3.5 % faster in its branch (H200).
            if form.HAS_ADJOINT:
                for n in tl.static_range(len(k)):
                    heads = heads + (k[n] * (now[n] * eps),)
                dx = dot(heads, ())
                for n in tl.static_range(len(k)):
                    dk = dk + ((now[n] * eps) * (0.5 * x - k[n] * before[n]),)
                    G = G + (now[n] - k[n] * heads[n],)
            else:
                for n in tl.static_range(len(k)):
                    scaled = now[n] * eps
                    head = k[n] * scaled
                    heads = heads + (head,)
                    dk = dk + (scaled * (0.5 * x - k[n] * before[n]),)
                    G = G + (now[n] - k[n] * head,)
                dx = dot(heads, ())
            dlog = dot(dk, k) + (0.5 * x) * dx
            return G, dx, dlog, dk, ()

    @triton.jit
    def diagonal_through_norm(dlog, eps):
        return -1.0 * eps * dlog  # half of the last term of (13), as of dk

    @triton.jit
    def error_advance(S, x, k, A, eps, e):
        w = eps * (x - dot(S, k))  # (2)
        new = ()
        for i in tl.static_range(len(k)):
            new = new + (S[i] + k[i] * w,)
        return new, w

    @triton.jit
    def error_step_back(now, before, x, w, k, A, eps, e, form):
        dk = ()
        G = ()
        reads = dot(now, k)
        dx = eps * reads  # (11)
        dlog = w * reads  # (15), times eps
        for n in tl.static_range(len(k)):
            dk = dk + (w * now[n] - dx * before[n],)  # (16)
            G = G + (now[n] - k[n] * dx,)
        return G, dx, dlog, dk, ()

    @triton.jit
    def exact_through_norm(dlog, eps):
        return -2.0 * eps * dlog  # the last term of (16)

    Diagonal.kernels = Functions(
        Diagonal, scaled_bias=scaled_bias, step_size=step_size, advance=diagonal_advance,
        step_back=diagonal_step_back, logit_back=logit_back, through_norm=diagonal_through_norm,
        decay=diagonal_decay, start_total=start_total, summarize=summarize, end_total=end_total,
    )  # fmt: skip
    Exact.kernels = Functions(Exact, scaled_bias=scaled_bias, step_size=step_size, advance=error_advance,
                       step_back=error_step_back, logit_back=logit_back, through_norm=exact_through_norm)  # fmt: skip
