"""What runs on a GPU, and in Triton's interpreter. The two projections' forward passes are torch's. Only
`dispatch.get_backend` imports this module: Triton is optional."""

from ...contract import REGIMES as regimes  # noqa: F401
from . import conv, norm, scan
from .chunks import takes_projection  # noqa: F401
from .projections import dt_proj_backward, pad, unpad, x_proj_backward  # noqa: F401

scan_forward, scan_backward, saved_shape, plan = scan.forward, scan.backward, scan.saved_shape, scan.plan
conv_forward, conv_backward = conv.forward, conv.backward
norm_forward, norm_backward = norm.forward, norm.backward
