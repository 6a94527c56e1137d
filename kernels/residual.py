"""RMS norm of a residual stream. Its backward pass also adds the two gradients of the stream."""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from .backends.torch.residual_norm import gradients
from .checks import check_tensors
from .contract import Pair
from .dispatch import backend_for
from .operators import define


def residual_norm(
    x: Tensor, weight: Tensor, eps: float, rows: int = 0, dtype: Optional[torch.dtype] = None, backend: str = "auto"
) -> Pair:
    """Apply RMS norm (Zhang and Sennrich, arXiv 1910.07467) to a residual stream x for a branch of a network.

        h = x / sqrt(mean(x^2) + eps) weight,    and later x + branch(h)

    x is returned as well: if the branch is added to that one, both gradients of x meet here, and on a GPU one kernel
    adds them and sums the weight's gradient. The sums have a fixed order for each number of multiprocessors, so all
    runs on one kind of GPU give the same bits. The forward pass is torch's, which torch.compile fuses with what comes
    before it. Change neither x nor the x that is returned in place.

    Args:
        x: (B, L, D) of any float dtype.
        weight: (D,) of any float dtype.
        eps: added to the mean square.
        rows: give the tokens of h, which are patches of a grid with that many rows, column by column; 0 leaves them.
        dtype: of h; the weight's if None.
        backend: of the backward pass: "auto" (triton on a GPU, else torch), "torch", "triton" or "numba".

    Returns:
        x, and h (B, L, D).

    Raises:
        ValueError: a shape, dtype or backend is not as above.
        RuntimeError: a backend was forced that cannot run on this device.
    """
    if x.ndim != 3 or weight.ndim != 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: they must be (B, L, D) and (D,)")
    if rows < 0 or rows and x.shape[1] % rows:
        raise ValueError(f"rows={rows} with {x.shape[1]} tokens: give the grid's number of rows, which divides them")
    check_tensors(dict(x=x, weight=weight))
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype}: give a float dtype, or None for the weight's")
    if backend != "auto":
        backend_for(backend, x)  # refuses it now, and not in the backward pass
    found: Pair = _ResidualNorm.apply(x, weight, eps, rows, dtype or weight.dtype, backend)
    return found


class _ResidualNorm(torch.autograd.Function):
    """No operator, because an operator may not return its own argument."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, rows: int, dtype: torch.dtype, backend: str
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.options = eps, rows, backend
        h = F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps)
        if h.dtype != dtype:  # torch.compile of 2.11 loses the gradient of a result that a conversion leaves as it is
            h = h.to(dtype)
        if rows:
            B, L, D = h.shape
            h = h.view(B, rows, L // rows, D).transpose(1, 2).reshape(B, L, D)
        return x.view_as(x), h

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dh: Tensor) -> tuple[Optional[Tensor], ...]:
        x, weight = ctx.saved_tensors
        if not torch.compiler.is_compiling() and (torch.is_grad_enabled() or _is_batched(dh) or _is_batched(dx)):
            # Somebody differentiates the gradient, or asks for many at once. The operator can do neither.
            return *gradients(dh, dx, x, weight, *ctx.options[:2]), None, None, None, None
        # The operator fills tensors that are made here, and returns none. When torch up to 2.11 first compiles an
        # operator, it writes down how its inputs are computed. Both gradients come from the next norm's operator, so if
        # that returned them, this text would double with each norm, and a deep model would never be compiled.
        total, dweight = x.new_empty(x.shape), weight.new_empty(weight.shape)
        torch.ops.vision_longhorn.residual_norm_backward(dh, dx, x, weight, total, dweight, *ctx.options)
        return total, dweight, None, None, None, None


def _is_batched(value: Tensor) -> bool:
    """Tell whether `value` stands for many inside of `torch.vmap` or of `is_grads_batched=True`."""
    return is_batchedtensor(value) or is_legacy_batchedtensor(value)


def _backward(
    dh: Tensor, dx: Tensor, x: Tensor, weight: Tensor, total: Tensor, dweight: Tensor,
    eps: float, rows: int, backend: str,
) -> tuple[()]:  # fmt: skip
    given = dh.contiguous(), dx.contiguous(), x.contiguous(), weight.contiguous()
    backend_for(backend, x).residual_norm_backward(*given, total, dweight, eps, rows)
    return ()


_ARGUMENTS = "Tensor dh, Tensor dx, Tensor x, Tensor weight, Tensor(a!) total, Tensor(b!) dweight, float eps"
_FILLS = "total", "dweight"
define("residual_norm_backward", f"{_ARGUMENTS}, SymInt rows, str backend", 0, _backward, lambda *_: None, _FILLS)
