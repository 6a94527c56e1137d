"""Which backend runs: chosen by the device of the inputs, or forced."""

from importlib import import_module

import torch

from .backends import Backend
from .contract import BACKENDS, check_option
from .rules.base import HAS_TRITON


def choose_backend(backend: str, device: torch.device) -> str:
    """The backend, "torch" or "triton", that `backend` means on `device`: with "auto" triton on a GPU where it is
    installed, else torch.

    Raises:
        ValueError: `backend` is not known.
        RuntimeError: a forced backend cannot run here.
    """
    check_option("backend", backend, BACKENDS)
    if backend == "auto":
        return "triton" if device.type == "cuda" and HAS_TRITON else "torch"
    if backend == "triton":
        if not HAS_TRITON:
            raise RuntimeError(
                "backend='triton': triton is not installed; use backend='auto' or a build of torch that brings triton"
            )
        from .backends.triton.lanes import INTERPRETED  # Triton is optional

        if device.type != "cuda" and not INTERPRETED:
            raise RuntimeError(
                f"backend='triton': the tensors are on {device}; move them to a GPU, or set TRITON_INTERPRET=1 before "
                "the first import to run the kernels on a CPU"
            )
    return backend


def get_backend(name: str) -> Backend:
    """The backend called "torch" or "triton"."""
    # Triton is optional, and slow to import.
    return import_module(".backends.triton.backend" if name == "triton" else ".backends.torch", __package__)


def backend_for(backend: str, device: torch.device, regime: str = "auto") -> Backend:
    """The backend that `backend` means on `device`.

    Raises:
        ValueError: it does not have the regime.
    """
    found = get_backend(choose_backend(backend, device))
    if regime not in found.regimes:
        raise ValueError(f"regime={regime!r} is one of the Triton kernels', not of the torch path; use regime='auto'")
    return found
