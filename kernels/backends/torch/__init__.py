"""The torch backend: for CPUs, and wherever Triton is absent. Its functions say what those of every backend take and
return. They know nothing of autograd, and give the same bits in every run."""

from ...contract import Scan
from . import conv, norm, scan
from .projections import dt_proj_backward, pad, unpad, x_proj_backward  # noqa: F401

regimes = "auto", "sequential"
scan_forward, scan_backward, saved_shape = scan.forward, scan.backward, scan.saved_shape
conv_forward, conv_backward = conv.forward, conv.backward
norm_forward, norm_backward = norm.forward, norm.backward


def takes_projection(scan: Scan) -> bool:
    """Whether `scan` can run with logits at low rank (`Scan.step_proj`). In the place of the gradient of `step`,
    `scan_backward` returns that of the whole logits then, (.., B, L, D)."""
    return False


def plan(scan: Scan) -> dict[str, tuple[int, int, int, str]]:
    """How `scan` would run, see `kernels.scan_plan`."""
    return {}
