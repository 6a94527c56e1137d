"""Gated linear attention's rule (Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training",
arXiv 2312.06635): with a decay for each of the N states, the same for all channels, a_t = sigmoid(u_t)^(1/16),

    S_t = S_{t-1} diag(a_t) + x_t k_t^T

The logits u are the field `step`, (B, L, N). There is no step size: each token is written as it is.
"""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import HAS_TRITON, Functions, Rule, Sizes, over_channels

TEMPERATURE = 16.0


class GatedLinearAttention(Rule):
    name = "gla"
    kind = "decay"
    step_per = "state"
    needs_A = True  # log(a), of the token
    names = {"step": "gate", "bias": "gate_bias"}
    tuned_as = "mamba"
    operations = {"forward": (3, 1), "backward": (10, 1)}

    def update(self, state: Tensor, x: Tensor, step: Tensor, k: Tensor, A: Optional[Tensor], softplus: bool) -> Tensor:
        a = torch.exp(F.logsigmoid(step) / TEMPERATURE)  # (B, N)
        return state * a.unsqueeze(1) + x.unsqueeze(-1) * k.unsqueeze(1)

    def prepare(self, scan: Any) -> Any:
        return scan._replace(A=F.logsigmoid(_logit(scan)) / TEMPERATURE, A_per_token=True, step=None, bias=None)

    def restore(self, scan: Any, prepared: Any, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        dlogit = grads.pop("A") * torch.sigmoid(-_logit(scan)) / TEMPERATURE
        grads["step"] = dlogit.sum_to_size(scan.step.shape).to(scan.step.dtype)
        if scan.bias is not None:
            over = (1, 2) if scan.bias.ndim == 2 else tuple(range(dlogit.ndim - 1))
            grads["bias"] = dlogit.sum(over).to(scan.bias.dtype)
        return grads

    def sizes(self, d: Any) -> Sizes:
        return Sizes(torch.ones_like(d.x))

    def decays(self, d: Any, s: Sizes, out: Tensor) -> Tensor:
        return out.copy_(d.A.unsqueeze(3).expand_as(out)).exp_()

    def through_decays(self, d: Any, s: Sizes, a: Tensor, flow: Tensor, dx: Tensor, deps: Tensor, dk: Tensor) -> Tensor:
        return over_channels(flow.mul_(a), s.eps)


def _logit(scan: Any) -> Tensor:
    """Return the logits ([2,] B, L, N) with their bias, in the dtype of sums."""
    logit = scan.step.to(scan.accumulator).contiguous()  # so that the last bits do not depend on strides
    if scan.bias is None:
        return logit
    bias = scan.bias.to(scan.accumulator)
    return logit + (bias[:, None, None] if bias.ndim == 2 else bias)


RULES = (GatedLinearAttention(),)

if HAS_TRITON:
    import triton
    import triton.language as tl  # noqa: F401  (Triton's interpreter looks for it)

    from .mamba import Mamba

    @triton.jit
    def _step_size(u, bias, norm, keep, form):
        return keep, keep  # 1, and 0 beyond the end

    # Mamba's `step_back` and `logit_back` also compute gradients of logits. They are unused: A stands for logits here.
    GatedLinearAttention.kernels = Functions(GatedLinearAttention, **{**Mamba.kernels.all, "step_size": _step_size})
