"""How two scans are combined in the "shared" wiring: an RMS norm of each, their weighted sum, and the gate.

n[g] = o[g] / sqrt(mean_d o[g]^2 + eps),    y = (n[0] weight[0] + n[1] weight[1]) silu(z)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...contract import wide


def forward(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Combine the outputs of two scans.

    Args:
        o: (2, B, L, D), contiguous; the outputs of the two scans.
        z: (B, L, D) gate, its last axis contiguous.
        weight: (2, D), of any float dtype.
        eps: added to the mean square.

    Returns:
        y: (B, L, D), contiguous, dtype of z; computed in float32 (float64 if o is).
    """
    o = o.to(wide(o))
    n = o * _scale(o, eps)
    return ((n * weight.to(o.dtype)[:, None, None]).sum(0) * F.silu(z.to(o.dtype))).to(z.dtype)


def backward(dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, eps: float, dz: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of o, (2, B, L, D) in its dtype, and of weight, (2, D) in float32 (float64). That of z is
    written to `dz`. dy and dz are (B, L, D) in the dtype of z, and their last axes are contiguous."""
    dtype, o = o.dtype, o.to(wide(o))
    weight, dy, z = weight.to(o.dtype), dy.to(o.dtype), z.to(o.dtype)
    scale = _scale(o, eps)
    n = o * scale
    sigmoid = torch.sigmoid(z)
    silu = z * sigmoid
    dz.copy_(dy * (n * weight[:, None, None]).sum(0) * (sigmoid + silu * (1 - sigmoid)))
    dsum = dy * silu
    dn = dsum * weight[:, None, None]
    do = scale * (dn - n * (dn * n).mean(-1, keepdim=True))
    return do.to(dtype), (dsum * n).sum((1, 2))


def _scale(o: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(o.square().mean(-1, keepdim=True) + eps)
