"""The values v = silu(z) of gate="value", z being the gate's half of xz. The scans run over them, not over x."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...contract import wide


def forward(z: Tensor) -> Tensor:
    """Return silu(z) in the dtype of z, contiguous, computed in float32 (float64 if z is). z is (B, L, D), its last
    axis contiguous."""
    return F.silu(z.to(wide(z))).to(z.dtype).contiguous()


def backward(dv: Tensor, z: Tensor, dz: Tensor) -> None:
    """Write the gradient of z to `dz`, (B, L, D), from those of the values in each scan, dv (n, B, L, D), n = 1 or 2
    and contiguous. The last axes of z and dz are contiguous."""
    dtype = wide(z)
    z = z.to(dtype)
    sigmoid = torch.sigmoid(z)
    dz.copy_(dv.to(dtype).sum(0) * sigmoid * (1 + z * (1 - sigmoid)))
