"""The backends as objects. `Backend` is torch's; `triton.backend.TritonBackend` computes the same on a GPU, and
`numba.backend.NumbaBackend` on a CPU."""

from ..contract import Scan
from .torch import conv, gelu, grid_conv, norm, norm_silu, projections, residual_norm, rope, scan, skip, unit, values


class Backend:
    """The torch backend. Its functions document what those of every backend take and return. None of them uses
    autograd, and all give the same bits in every run."""

    name = "torch"
    regimes: tuple[str, ...] = ("auto", "sequential")

    scan_forward = staticmethod(scan.forward)
    scan_backward = staticmethod(scan.backward)
    saved_shape = staticmethod(scan.saved_shape)
    conv_forward = staticmethod(conv.forward)
    conv_backward = staticmethod(conv.backward)
    grid_conv_forward = staticmethod(grid_conv.forward)
    grid_conv_backward = staticmethod(grid_conv.backward)
    gelu_forward = staticmethod(gelu.forward)
    gelu_backward = staticmethod(gelu.backward)
    norm_forward = staticmethod(norm.forward)
    norm_backward = staticmethod(norm.backward)
    norm_silu_forward = staticmethod(norm_silu.forward)
    norm_silu_backward = staticmethod(norm_silu.backward)
    residual_norm_backward = staticmethod(residual_norm.backward)
    skip_forward = staticmethod(skip.forward)
    skip_backward = staticmethod(skip.backward)
    values_forward = staticmethod(values.forward)
    values_backward = staticmethod(values.backward)
    unit_forward = staticmethod(unit.forward)
    unit_backward = staticmethod(unit.backward)
    rotate = staticmethod(rope.rotate)
    pad = staticmethod(projections.pad)
    unpad = staticmethod(projections.unpad)
    appends_units = staticmethod(projections.appends_units)
    x_proj_forward = staticmethod(projections.x_proj_forward)
    x_proj_backward = staticmethod(projections.x_proj_backward)
    dt_proj_backward = staticmethod(projections.dt_proj_backward)

    @staticmethod
    def takes_projection(scan: Scan) -> bool:
        """Tell whether `scan` can run with logits at low rank (`Scan.step_proj`). If so, `scan_backward` returns the
        gradient of the full logits, (.., B, L, D), in the place of that of `step`."""
        return False

    @staticmethod
    def plan(scan: Scan) -> dict[str, tuple[int, int, int, str]]:
        """Tell how `scan` would run, see `kernels.scan_plan`."""
        return {}
