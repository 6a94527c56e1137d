"""Keys and queries of unit length, before a scan: v^ = v / sqrt(||v||^2 + EPS).

A vector much shorter than sqrt(EPS) = 1e-3 fades smoothly to zero. A token with a zero key writes nothing, one with a
zero query reads nothing. The gradient of v is at most 1000 times that of v^.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ...contract import Pair, wide
from .rope import Turned, turn

EPS = 1e-6


class Raw(NamedTuple):
    """Keys and queries (.., N) before they were scaled to unit length."""

    k: Tensor
    q: Tensor
    turned: Optional[Turned] = None  # if given, gradients are those of the vectors before they were turned


def unit(v: Tensor) -> Tensor:
    """Return v^ of v (.., N) in float32 (float64). Autograd can differentiate it."""
    v = v.to(wide(v))
    return v * torch.rsqrt(v.square().sum(-1, keepdim=True) + EPS)


def forward(k: Tensor, q: Tensor) -> Pair:
    """Scale keys and queries to unit length.

    Args:
        k, q: (.., N), of any float dtypes and strides; their other axes may differ.

    Returns:
        k^ and q^, contiguous, each of the shape and dtype of its argument; computed in float32 (float64).
    """
    return unit(k).to(k.dtype), unit(q).to(q.dtype)


def backward(k: Tensor, q: Tensor, dk: Tensor, dq: Tensor, turned: Optional[Turned] = None) -> None:
    """Change the gradients `dk` and `dq` of k^ and q^ into those of k and q, in place. Shapes are those of `forward`.
    With `turned` they become those of what k and q were before they were turned (`rope.rotate`): shapes are
    (.., B, L, N), and L and rows are those of `turned`."""
    for v, dv in ((k, dk), (q, dq)):
        v, along = v.to(wide(v)), dv.to(wide(v))
        scale = torch.rsqrt(v.square().sum(-1, keepdim=True) + EPS)
        n = v * scale
        # With one number v^ is little more than its sign: the difference would lose all digits.
        across = along * (EPS * scale.square()) if v.shape[-1] == 1 else along - n * (n * along).sum(-1, keepdim=True)
        found = across * scale
        dv.copy_(turn(found, turned.rows, back=True) if turned else found)
