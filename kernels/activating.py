"""GELU after a bias as an operator, for the first linear layer of an MLP."""

import torch
from torch import Tensor

from .checks import check_tensors
from .dispatch import backend_for
from .operators import define, define_gradients


def bias_gelu(x: Tensor, bias: Tensor, backend: str = "auto") -> Tensor:
    """Add a bias and apply GELU, y = v Φ(v) with v = x + bias (Hendrycks and Gimpel, arXiv 1606.08415).

    On a GPU one kernel maps x to y, and one maps x and dy to dx and sums the bias's gradient. Their GELU and its slope
    err by less than 3e-7, besides what v and y lose by rounding. Sums have a fixed order, so all runs give the same
    bits.

    Args:
        x: (.., D) of any float dtype.
        bias: (D,) of any float dtype.
        backend: "auto" (triton on a GPU, else torch), "torch", "triton" or "numba".

    Returns:
        (.., D) in the dtype of x, computed in float32 (float64).

    Raises:
        ValueError: a shape, dtype or backend is not as above.
        RuntimeError: a backend was forced that cannot run on this device.
    """
    y: Tensor = torch.ops.vision_longhorn.bias_gelu(x, bias, backend)
    return y


def _check(x: Tensor, bias: Tensor) -> None:
    if not x.ndim or tuple(bias.shape) != (x.shape[-1],):
        raise ValueError(f"x {tuple(x.shape)} and bias {tuple(bias.shape)}: they must be (.., D) and (D,)")
    check_tensors(dict(x=x, bias=bias))


def _forward(x: Tensor, bias: Tensor, backend: str) -> Tensor:
    _check(x, bias)
    return backend_for(backend, x).gelu_forward(x.contiguous(), bias.contiguous())


def _shape(x: Tensor, bias: Tensor, backend: str) -> Tensor:
    _check(x, bias)
    return x.new_empty(x.shape)


def _backward(dy: Tensor, x: Tensor, bias: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    given = dy.contiguous(), x.contiguous(), bias.contiguous()
    dx, dbias = backend_for(backend, x).gelu_backward(*given)
    return dx, dbias.to(bias.dtype)


_ARGUMENTS = "Tensor x, Tensor bias, str backend"
_operator = define("bias_gelu", _ARGUMENTS, 1, _forward, _shape)
define_gradients("bias_gelu", _operator, f"Tensor dy, {_ARGUMENTS}", 1, 2, _backward)
