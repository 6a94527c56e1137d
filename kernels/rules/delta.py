"""DeltaNet's rule (Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", arXiv
2406.06484): with b = sigmoid(beta) and k^ = k / ||k||, for each channel d

    S_t[d] = S_{t-1}[d] + b_t[d] (x_t[d] - S_{t-1}[d] . k^_t) k^_t

There is one b for each channel, as in Longhorn, or one for the token, as in the paper. A zero key writes nothing.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from .base import HAS_TRITON, Functions, Sizes, UnitKeys, unit_or_zero


class Delta(UnitKeys):
    name = "delta"
    kind = "error"
    tuned_as = "exact"
    operations = {"forward": (3, 0), "backward": (8, 0)}

    def update(self, state: Tensor, x: Tensor, step: Tensor, k: Tensor, A: Optional[Tensor], softplus: bool) -> Tensor:
        k = unit_or_zero(k).unsqueeze(1)  # (B, 1, N)
        error = x - (state * k).sum(-1)
        return state + (torch.sigmoid(step) * error).unsqueeze(-1) * k

    def sizes(self, d: Any) -> Sizes:
        return Sizes(torch.sigmoid(d.step))

    def through_sizes(self, d: Any, s: Sizes, deps: Tensor, dk: Tensor) -> Tensor:
        return deps * s.eps * torch.sigmoid(-d.step)


RULES = (Delta(),)

if HAS_TRITON:
    import triton
    import triton.language as tl

    from ..backends.triton.lanes import LOG2E, reciprocal
    from ..backends.triton.lanes import MAX_EXPONENT as _MAX_EXPONENT
    from .longhorn import Exact

    @triton.jit
    def _step_size(u, bias, norm, keep, form):
        e = tl.exp2(tl.minimum(u.to(tl.float32) * -LOG2E + bias, _MAX_EXPONENT))
        return reciprocal(1.0 + e, form.PTX) * keep, e

    Delta.kernels = Functions(Delta, **{**Exact.kernels.all, "step_size": _step_size})
