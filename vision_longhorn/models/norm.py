"""The norms of the residual stream."""

from typing import Any, Optional

import torch
from torch import Tensor, nn

from vision_longhorn import kernels
from vision_longhorn.models.conv_mlp import ConvMlp
from vision_longhorn.models.fusing import is_bare, takes_kernels
from vision_longhorn.models.mixers.state_space import BidirectionalMixer
from vision_longhorn.models.mlp import GeluMlp
from vision_longhorn.models.tokens import turn_patches

# They begin with a linear layer, which under autocast would round the norm as `norm_beside` does.
_BEGIN_WITH_LINEAR = (BidirectionalMixer, GeluMlp, ConvMlp)


def norm_beside(norm: nn.Module, x: Tensor, branch: nn.Module, rows: Optional[int] = None) -> tuple[Tensor, Tensor]:
    """Return the residual stream x, and its norm, which `branch` reads. What `branch` gives is to be added to that x.

    In training on a GPU one kernel then computes the gradient of both (`kernels.residual_norm`).

    Args:
        norm: an RMS norm, or what somebody has put in its place.
        x: (B, L, dim)
        branch: what reads the norm.
        rows: give the norm's tokens, which are patches of a grid with that many rows, column by column; None leaves
            them. (torch.fx passes a number that is not known.)
    """
    if _takes_kernel(norm, x, branch):
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
        return kernels.residual_norm(x, norm.weight, norm.eps, rows or 0, dtype)  # type: ignore[arg-type]
    h = norm(x.to(norm.weight.dtype))  # type: ignore[arg-type]
    return x, h if rows is None else turn_patches(h, rows, "none")


def _takes_kernel(norm: Any, x: Any, branch: Any) -> bool:
    return (
        torch.is_grad_enabled()
        and takes_kernels(x)
        and is_bare(norm, nn.RMSNorm)
        and norm.weight is not None
        and norm.weight.dtype != torch.float64
        and norm.eps is not None
        and isinstance(branch, _BEGIN_WITH_LINEAR)
    )
