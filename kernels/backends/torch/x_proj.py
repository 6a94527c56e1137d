"""The projection of the convolved x to what the scan wants of each token, side by side: step sizes at their low rank,
keys, queries, and perhaps A."""

import torch
from torch import Tensor


def forward(x: Tensor, x_proj: Tensor) -> Tensor:
    """
    Args:
        x: (S, T, D).
        x_proj: (S, M, D), in the dtype of x.

    Returns:
        (S, T, M).
    """
    return torch.bmm(x, x_proj.transpose(1, 2))


def backward(dlow: Tensor, x: Tensor, x_proj: Tensor, dx: Tensor) -> Tensor:
    """
    Args:
        dlow: (S, T, M), the gradient of what `forward` returns, contiguous.
        x, x_proj: As there.
        dx: (S, T, D), contiguous; the gradient of x is added to it.

    Returns:
        The gradient of x_proj, (S, M, D).
    """
    dx.baddbmm_(dlow, x_proj)
    return weight_grad(dlow, x)


def weight_grad(left: Tensor, right: Tensor) -> Tensor:
    """left^T right of each set, (S, T, n) and (S, T, m) to (S, n, m). One product after the other: small results of
    long sums are cut along the sum then, which the batched product does not do."""
    products = left.new_empty(len(left), left.shape[2], right.shape[2])
    for a, b, product in zip(left, right, products):
        torch.mm(a.t(), b, out=product)
    return products
