"""The short convolution in Numba's loops, for sums in float32 on a CPU."""

from typing import Optional

import numpy as np
import torch
from torch import Tensor

from ...contract import ceil_div, wide
from ..torch import conv as torch_conv
from . import loops
from .memory import copied, flat, rows
from .threads import run


def _takes(x: Tensor) -> bool:
    """Tell whether the loops convolve x, not the torch path."""
    return wide(x) == torch.float32 and x.numel() > 0


def _arguments(x: Tensor, weight: Tensor, bias: Tensor, reversed: bool) -> tuple[int, tuple]:
    """Return how many programs there are, and the arguments that both loops take."""
    (G, D, K), (B, L, _), at = weight.shape, x.shape, np.zeros(2, np.int64)
    # A program takes all channels, whose numbers then come from memory one after the other, unless threads would rest.
    W = ceil_div(D, loops.WIDTH * (1 if B >= torch.get_num_threads() else torch.get_num_threads())) * loops.WIDTH
    taps = copied(weight.transpose(1, 2))  # (G, K, D)
    return B * ceil_div(D, W), ((G, B, L, D, K, W), reversed, at, rows(x, at), taps, copied(bias))


def forward(x: Tensor, weight: Tensor, bias: Tensor, reversed: bool = False, out: Optional[Tensor] = None) -> Tensor:
    """See `backends.torch.conv.forward`."""
    if not _takes(x):
        return torch_conv.forward(x, weight, bias, reversed, out)
    programs, args = _arguments(x, weight, bias, reversed)
    y = x.new_empty(len(weight), *x.shape) if out is None else out
    found = y if y.dtype == torch.float32 else torch.empty(y.shape)
    run(loops.conv_forward, programs, *args, flat(found))
    return y if found is y else y.copy_(found)


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, dx: Tensor, reversed: bool = False
) -> tuple[Tensor, Tensor]:
    """See `backends.torch.conv.backward`."""
    if not _takes(x):
        return torch_conv.backward(dy, x, weight, bias, dx, reversed)
    programs, args = _arguments(x, weight, bias, reversed)
    (G, D, K), B = weight.shape, len(x)
    found, at = dx if dx.dtype == torch.float32 else torch.empty(dx.shape), np.zeros(2, np.int64)
    dweight, dbias = torch.empty(G, B, K, D), torch.empty(G, B, D)
    run(loops.conv_backward, programs, *args, flat(dy.float()), at, rows(found, at), flat(dweight), flat(dbias))
    if found is not dx:
        dx.copy_(found)
    return dweight.sum(1).transpose(1, 2).contiguous(), dbias.sum(1)
