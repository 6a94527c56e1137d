"""Launches of the scans' kernels: the arguments that walks (`scan`) and chunks (`chunks`) share."""

from typing import Any, Optional

import torch
from torch import Tensor

from ...contract import Scan, power_of_2, stack
from .lanes import form_of

_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")


def refuse_float64(x: Tensor) -> None:
    if x.dtype == torch.float64:
        raise ValueError("the Triton kernels compute in float32 and x is torch.float64; use backend='torch'")


class Launch:
    """The arguments that all kernels of a scan take: tensors with a direction axis, strides, options."""

    def __init__(self, scan: Scan):
        refuse_float64(scan.x)
        self.scan = scan
        G, B, L, D, N = self.sizes = scan.sizes
        x, k, q = (rows(scan, value, 3) for value in (scan.x, scan.k, scan.q))
        z, skip = (None if value is None else rows(scan, value, ndim) for value, ndim in ((scan.z, 3), (scan.D, 1)))
        step = x if scan.step is None else stack(scan, scan.step, 3)
        if scan.step_proj is None:
            step = step.expand(G, B, L, D)
        bias = None if scan.bias is None else stack(scan, scan.bias, 1).expand(G, D)
        absent = scan.x
        self.args: dict[str, Any] = dict(
            **pointer("x", x, "gbl"), **pointer("step", step, "gbld"), **pointer("k", k, "gbl"),
            **pointer("q", q, "gbl"), **pointer("z", z, "gbl", absent), **pointer("D", skip, "g", absent),
            **pointer("bias", bias, "gd", absent), L=L, B=B, D=D, N=N, HAS_Z=z is not None, HAS_D=skip is not None,
            HAS_BIAS=bias is not None, FIRST_REVERSED=int(scan.direction == "backward"))  # fmt: skip
        read = [x, *(() if scan.step_proj is not None else (step,)), *(() if z is None else (z,))]
        self.aligned = D % 16 == 0 and all(map(aligned, read))


def rows(scan: Scan, value: Tensor, ndim: int) -> Tensor:
    """Apply `stack`, and lay the numbers of the last axis side by side."""
    value = stack(scan, value, ndim)
    return value if value.stride(-1) == 1 or value.shape[-1] == 1 else value.contiguous()


def strides(name: str, value: Optional[Tensor], axes: str) -> dict[str, int]:
    """Return the strides of a tensor as arguments of a kernel, zeros where it is absent."""
    return {f"{name}_{axis}": 0 if value is None else value.stride(i) for i, axis in enumerate(axes)}


def pointer(name: str, value: Optional[Tensor], axes: str, absent: Optional[Tensor] = None) -> dict[str, Any]:
    """Return a tensor and its strides as arguments of a kernel. For a missing one `absent` is passed, and not read."""
    return {f"{name}_ptr": absent if value is None else value, **strides(name, value, axes)}


def aligned(value: Tensor) -> bool:
    """Tell whether every row of channels starts at a multiple of 16 bytes (and 16 numbers, as the kernels are told)."""
    return value.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in value.stride()[:-1])


def row_options(numbers: int, *views: Tensor) -> dict[str, Any]:
    """Return the options of a kernel that takes whole rows of D channels, about `numbers` of each tensor at a time.
    The `views` are those of its tensors that have strides, (B, L, D)."""
    D = views[0].shape[-1]
    block = power_of_2(D)
    whole = D % 16 == 0 and all(s % 16 == 0 for view in views for s in view.stride()[:2])
    return dict(D=D, ROWS=max(1, numbers // block), BLOCK=block, ALIGNED=whole, num_warps=min(8, max(4, block // 256)))


def run(kernel: Any, grid: tuple[int, ...], args: dict[str, Any]) -> None:
    """Launch `kernel` with those of `args` that it takes or that are options of Triton."""
    if kernel.form is not None:
        args = args | dict(form=form_of(kernel.form, args))
    names = (*kernel.arg_names, *(name for name in _OPTIONS if name in args))
    kernel[grid](**{name: args[name] for name in names})
