"""Activations after a bias as operators: GELU, for the first linear layer of an MLP, and SiLU after a layer norm, for a
stem's convolutions."""

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


def bias_norm_silu(
    x: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float, backend: str = "auto"
) -> Tensor:
    """Add a bias, and apply layer norm (Ba et al., arXiv 1607.06450) over the channels and SiLU.

        y = silu(n norm_weight + norm_bias),    n = (v - mean(v)) / sqrt(variance(v) + eps),    v = x + bias

    On a GPU one kernel maps x to y, and one maps x and dy to dx and sums the other gradients. Sums have a fixed order
    for each number of multiprocessors, so all runs on one kind of GPU give the same bits.

    Args:
        x: (.., D) of any float dtype.
        bias: (D,) of any float dtype, as the next two.
        norm_weight: (D,)
        norm_bias: (D,)
        eps: added to the variance.
        backend: "auto" (triton on a GPU, else torch), "torch", "triton" or "numba".

    Returns:
        (.., D) in the dtype of x, computed in float32 (float64).

    Raises:
        ValueError: a shape, dtype or backend is not as above.
        RuntimeError: a backend was forced that cannot run on this device.
    """
    y: Tensor = torch.ops.vision_longhorn.bias_norm_silu(x, bias, norm_weight, norm_bias, eps, backend)
    return y


def _check(x: Tensor, **vectors: Tensor) -> None:
    for name, value in vectors.items():
        if not x.ndim or tuple(value.shape) != (x.shape[-1],):
            raise ValueError(f"x {tuple(x.shape)} and {name} {tuple(value.shape)}: they must be (.., D) and (D,)")
    check_tensors(dict(x=x, **vectors))


def _forward(x: Tensor, bias: Tensor, backend: str) -> Tensor:
    _check(x, bias=bias)
    return backend_for(backend, x).gelu_forward(x.contiguous(), bias.contiguous())


def _shape(x: Tensor, bias: Tensor, backend: str) -> Tensor:
    _check(x, bias=bias)
    return x.new_empty(x.shape)


def _backward(dy: Tensor, x: Tensor, bias: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    given = dy.contiguous(), x.contiguous(), bias.contiguous()
    dx, dbias = backend_for(backend, x).gelu_backward(*given)
    return dx, dbias.to(bias.dtype)


_ARGUMENTS = "Tensor x, Tensor bias, str backend"
_operator = define("bias_gelu", _ARGUMENTS, 1, _forward, _shape)
define_gradients("bias_gelu", _operator, f"Tensor dy, {_ARGUMENTS}", 1, 2, _backward)


def _norm_forward(x: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float, backend: str) -> Tensor:
    _check(x, bias=bias, norm_weight=norm_weight, norm_bias=norm_bias)
    vectors = bias.contiguous(), norm_weight.contiguous(), norm_bias.contiguous()
    return backend_for(backend, x).norm_silu_forward(x.contiguous(), *vectors, eps)


def _norm_shape(x: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float, backend: str) -> Tensor:
    _check(x, bias=bias, norm_weight=norm_weight, norm_bias=norm_bias)
    return x.new_empty(x.shape)


def _norm_backward(
    dy: Tensor, x: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float, backend: str
) -> tuple[Tensor, ...]:
    vectors = bias.contiguous(), norm_weight.contiguous(), norm_bias.contiguous()
    grads = backend_for(backend, x).norm_silu_backward(dy.contiguous(), x.contiguous(), *vectors, eps)
    return tuple(grad.to(value.dtype) for grad, value in zip(grads, (x, bias, norm_weight, norm_bias)))


_NORM_ARGUMENTS = "Tensor x, Tensor bias, Tensor norm_weight, Tensor norm_bias, float eps, str backend"
_norm_operator = define("bias_norm_silu", _NORM_ARGUMENTS, 1, _norm_forward, _norm_shape)
define_gradients("bias_norm_silu", _norm_operator, f"Tensor dy, {_NORM_ARGUMENTS}", 1, 4, _norm_backward)
