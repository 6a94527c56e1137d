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

# The linear layer with which each branch begins, by its name
_FIRST = {BidirectionalMixer: "in_proj", GeluMlp: "fc1", ConvMlp: "fc1"}


def norm_beside(norm: nn.Module, x: Tensor, branch: nn.Module, rows: Optional[int] = None) -> tuple[Tensor, Tensor]:
    """Return the residual stream x, and its norm, which `branch` reads. What `branch` gives is to be added to that x.

    On a GPU one kernel computes the gradients of x and of the norm's weight (`kernels.residual_norm`).

    Args:
        norm: an RMS norm, or what somebody has put in its place.
        x: (B, L, dim)
        branch: what reads the norm.
        rows: give the norm's tokens, which are patches of a grid with that many rows, column by column; None leaves
            them (not 0, since torch.fx cannot test a number that it does not know).
    """
    if _takes_kernel(norm, x):
        return kernels.residual_norm(x, norm.weight, norm.eps, rows or 0, _rounded(x, branch))  # type: ignore[arg-type]
    h = norm(x.to(norm.weight.dtype))  # type: ignore[arg-type]
    return x, h if rows is None else turn_patches(h, rows, "none")


def _takes_kernel(norm: Any, x: Any) -> bool:
    """Tell whether a kernel may compute the gradient of `norm`."""
    return (
        torch.is_grad_enabled()
        and takes_kernels(x)
        and is_bare(norm, nn.RMSNorm)
        and norm.weight is not None
        and norm.weight.dtype != torch.float64
        and norm.eps is not None
    )


def _rounded(x: Tensor, branch: nn.Module) -> Optional[torch.dtype]:
    """Return the dtype to which autocast would round the norm, if nothing but a linear layer of `branch` sees it."""
    kind = branch.__class__
    if torch.is_autocast_enabled(x.device.type) and kind in _FIRST and is_bare(branch, kind):
        if is_bare(getattr(branch, _FIRST[kind]), nn.Linear):
            return torch.get_autocast_dtype(x.device.type)
    return None
