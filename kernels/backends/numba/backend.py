"""The Numba backend as an object. Only `dispatch.get_backend` imports it, because Numba is optional."""

from .. import Backend
from . import scan


class NumbaBackend(Backend):
    """The backend for float32 on CPUs. All else is the torch backend's."""

    name = "numba"

    scan_forward = staticmethod(scan.forward)
    scan_backward = staticmethod(scan.backward)
    saved_shape = staticmethod(scan.saved_shape)
