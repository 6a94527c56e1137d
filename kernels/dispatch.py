"""Which backend runs: chosen by the device and dtype of the inputs, or forced."""

import os
from functools import cache

import torch
from torch import Tensor

from .backends import Backend
from .contract import BACKENDS, check_option
from .rules.base import HAS_TRITON


@cache
def get_backend(name: str) -> Backend:
    """Return the backend called "torch", "triton" or "numba"."""
    if name == "torch":
        return Backend()
    if name == "numba":
        from .backends.numba.backend import NumbaBackend  # Numba is optional, and slow to import

        return NumbaBackend()
    from .backends.triton.backend import TritonBackend  # Triton is optional, and slow to import

    return TritonBackend()


@cache
def has_numba() -> bool:
    """Tell whether Numba is installed, and works with the NumPy that is."""
    try:
        get_backend("numba")
    except ImportError:
        return False
    return True


def backend_for(backend: str, x: Tensor, regime: str = "auto") -> Backend:
    """Return the backend that `backend` means for x. "auto" is triton on a GPU where it is installed (not for float64),
    numba on a CPU where it is, else torch.

    Raises:
        ValueError: `backend` is not known, or does not have the regime.
        RuntimeError: a forced backend cannot run here.
    """
    check_option("backend", backend, BACKENDS)
    device = x.device
    if backend == "auto":
        backend = "triton" if device.type == "cuda" and HAS_TRITON and x.dtype != torch.float64 else "torch"
        if device.type == "cpu" and has_numba():
            backend = "numba"
    on_gpu = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "triton" and not (HAS_TRITON and on_gpu):
        why = f"the tensors are on {device}" if HAS_TRITON else "triton is not installed"
        raise RuntimeError(
            f"backend='triton': {why}; use backend='auto', or a GPU and a torch that comes with triton, or Triton's "
            "interpreter on a CPU: set TRITON_INTERPRET=1 before the first import"
        )
    if backend == "numba" and not (device.type == "cpu" and has_numba()):
        why = "numba cannot be imported" if device.type == "cpu" else f"the tensors are on {device}"
        raise RuntimeError(f"backend='numba': {why}; use backend='auto', or tensors on a CPU and `pip install numba`")
    found = get_backend(backend)
    if regime not in found.regimes:
        raise ValueError(
            f"regime={regime!r} belongs to the Triton kernels, not the {found.name} path; use regime='auto'"
        )
    return found
