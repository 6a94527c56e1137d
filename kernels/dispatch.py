"""Which backend runs: chosen by the device of the inputs, or forced."""

import os
from functools import cache

import torch

from .backends import Backend
from .contract import BACKENDS, check_option
from .rules.base import HAS_TRITON


@cache
def get_backend(name: str) -> Backend:
    """Return the backend called "torch" or "triton"."""
    if name == "torch":
        return Backend()
    from .backends.triton.backend import TritonBackend  # Triton is optional, and slow to import

    return TritonBackend()


def backend_for(backend: str, device: torch.device, regime: str = "auto") -> Backend:
    """Return the backend that `backend` means on `device`. "auto" is triton on a GPU where it is installed, else torch.

    Raises:
        ValueError: `backend` is not known, or does not have the regime.
        RuntimeError: a forced backend cannot run here.
    """
    check_option("backend", backend, BACKENDS)
    if backend == "auto":
        backend = "triton" if device.type == "cuda" and HAS_TRITON else "torch"
    on_gpu = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "triton" and not (HAS_TRITON and on_gpu):
        why = f"the tensors are on {device}" if HAS_TRITON else "triton is not installed"
        raise RuntimeError(
            f"backend='triton': {why}; use backend='auto', or a GPU and a torch that comes with triton, or Triton's "
            "interpreter on a CPU: set TRITON_INTERPRET=1 before the first import"
        )
    found = get_backend(backend)
    if regime not in found.regimes:
        raise ValueError(f"regime={regime!r} belongs to the Triton kernels, not the torch path; use regime='auto'")
    return found
