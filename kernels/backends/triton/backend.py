"""The Triton backend as an object. Only `dispatch.get_backend` imports it, because Triton is optional."""

from ...contract import REGIMES
from .. import Backend
from . import chunks, conv, gelu, grid_conv, norm, norm_silu, projections, residual_norm, rope, scan, skip, unit, values


class TritonBackend(Backend):
    """The backend for GPUs and for Triton's interpreter. The forward pass of `dt_proj` is torch's."""

    name = "triton"
    regimes = REGIMES

    scan_forward = staticmethod(scan.forward)
    scan_backward = staticmethod(scan.backward)
    saved_shape = staticmethod(scan.saved_shape)
    takes_projection = staticmethod(chunks.takes_projection)
    plan = staticmethod(scan.plan)
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
