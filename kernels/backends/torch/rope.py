"""Keys and queries turned by their patch's place in the grid: rotary position embedding (arXiv 2104.09864) in 2-D.

Numbers 2 p and 2 p + 1 of a vector are a point in the plane, which turns by an angle that grows with the row of the
patch (the first half of the points) or its column (the other half). The product of a query and a key then depends on
the offset of their patches, but not on where both are. The fastest point of an axis turns once in 4 patches, the
slowest in 32, and those between are spaced geometrically. Lengths do not change, so `qk_norm` may scale a vector before
it is turned or after.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...contract import wide

FASTEST = math.pi / 2  # radians a patch
OCTAVES = 3.0  # from the fastest point to the slowest


class Turned(NamedTuple):
    """Where keys and queries that turn stand among the columns of a product over sequences of patches."""

    L: int  # tokens of a sequence
    rows: int  # of the grid
    first: int  # column of the key, which the query follows; even
    N: int  # columns of each

    def of(self, low: Tensor) -> Tensor:
        """Return keys and queries (S, B, L, 2 N) of `low` (S, B L, M), as `rotate` takes them."""
        return low.unflatten(1, (-1, self.L))[..., self.first : self.first + 2 * self.N]


def octaves_per_point(N: int) -> float:
    """Return how much slower each point of an axis turns than the one before, in octaves."""
    return OCTAVES / (N // 4 - 1) if N >= 8 else 0.0


def angles(rows: int, columns: int, N: int, like: Tensor) -> Tensor:
    """Return the angles (rows columns, N / 2) in the dtype of sums, on the device of `like`."""
    place = torch.arange(rows * columns, device=like.device)
    points = torch.arange(N // 4, device=like.device, dtype=wide(like))
    speed = FASTEST * torch.exp2(-octaves_per_point(N) * points)
    return torch.cat([(place // columns)[:, None] * speed, (place % columns)[:, None] * speed], 1)


def rotate(kq: Tensor, rows: int, back: bool = False) -> None:
    """Turn keys and queries in place.

    Args:
        kq: (.., B, L, 2 N), key and query of each token side by side, of any float dtype and strides; N is a multiple
            of 4, and the tokens are patches, row by row.
        rows: rows of the grid.
        back: turn the other way, as the gradients of turned keys and queries must be.
    """
    for v in kq.chunk(2, -1):
        v.copy_(turn(v, rows, back))


def turn(v: Tensor, rows: int, back: bool = False) -> Tensor:
    """Return the keys or queries v (.., B, L, N) turned, in float32 (float64); see `rotate`."""
    L, N = v.shape[-2:]
    angle = angles(rows, L // rows, N, v)  # (L, N / 2)
    cos, sin = angle.cos(), -angle.sin() if back else angle.sin()
    x, y = v.to(wide(v)).unflatten(-1, (N // 2, 2)).unbind(-1)  # (.., L, N / 2)
    return torch.stack([x * cos - y * sin, x * sin + y * cos], -1).flatten(-2)
