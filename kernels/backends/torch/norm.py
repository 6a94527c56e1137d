"""Where two scans meet in the "shared" wiring: RMS norm of each, weighted sum, gate; forward and backward.

    n[g] = o[g] / sqrt(mean_d o[g]^2 + eps),    y = (n[0] weight[0] + n[1] weight[1]) silu(z)

Written out, it takes a pass over memory for each of its steps; a compiler fuses it but then cannot see past the scan
beside it. Neither function knows autograd.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def forward(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """
    Args:
        o: (2, B, L, D), contiguous; the outputs of the two scans.
        z: (B, L, D) gate, its last axis contiguous.
        weight: (2, D), of any float dtype.
        eps: added to the mean square.

    Returns:
        y: (B, L, D), contiguous, dtype of z; computed in float32 (float64 if o is).
    """
    o, wide = _widened(o)
    n = o * _scale(o, eps)
    return ((n * weight.to(wide)[:, None, None]).sum(0) * F.silu(z.to(wide))).to(z.dtype)


def backward(dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, eps: float, dz: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of o and weight; that of z is written to `dz`.

    Args:
        dy: (B, L, D), dtype of z, its last axis contiguous; the gradient of y.
        o, z, weight, eps: as given to `forward`.
        dz: (B, L, D), dtype of z, a view whose last axis is contiguous; what it held is overwritten.

    Returns:
        (gradient of o (2, B, L, D), dtype of o; gradient of weight (2, D), float32 (float64)), the same bits in every
        run.
    """
    wide_o, wide = _widened(o)
    weight, dy, z = weight.to(wide), dy.to(wide), z.to(wide)
    scale = _scale(wide_o, eps)
    n = wide_o * scale
    sigmoid = torch.sigmoid(z)
    silu = z * sigmoid
    dz.copy_(dy * (n * weight[:, None, None]).sum(0) * (sigmoid + silu * (1 - sigmoid)))
    dsum = dy * silu
    dn = dsum * weight[:, None, None]
    do = scale * (dn - n * (dn * n).mean(-1, keepdim=True))
    return do.to(o.dtype), (dsum * n).sum((1, 2))


def _widened(o: Tensor) -> tuple[Tensor, torch.dtype]:
    wide = torch.float64 if o.dtype == torch.float64 else torch.float32
    return o.to(wide), wide


def _scale(o: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(o.square().mean(-1, keepdim=True) + eps)
