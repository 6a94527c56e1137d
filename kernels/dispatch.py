"""Which backend runs: chosen by the device of the inputs, or forced."""

from functools import cache

import torch
from torch.autograd import forward_ad

from .backends import Backend
from .contract import BACKENDS, check_option
from .rules.base import HAS_TRITON


def choose_backend(backend: str, device: torch.device) -> str:
    """The backend, "torch" or "triton", that `backend` means on `device`. "auto" is triton on a GPU where Triton is
    installed, and torch everywhere else.

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
                "backend='triton' was asked for and triton is not installed; "
                "use backend='auto' or install a build of torch that brings triton"
            )
        from .backends.triton.lanes import INTERPRETED  # Triton is optional

        if device.type != "cuda" and not INTERPRETED:
            raise RuntimeError(
                f"backend='triton' was asked for and the tensors are on {device}; move them to a GPU, "
                "or set TRITON_INTERPRET=1 before the first import to run the kernels on a CPU"
            )
    return backend


@cache
def get_backend(name: str) -> Backend:
    """The backend called "torch" or "triton"."""
    if name == "torch":
        return Backend()
    from .backends.triton.backend import TritonBackend  # Triton is optional, and slow to import

    return TritonBackend()


def refuse_forward_mode() -> None:
    """Raise NotImplementedError within forward-mode differentiation: an operator sees values alone and would silently
    lose their tangents."""
    if getattr(forward_ad, "_current_level", -1) >= 0:
        raise NotImplementedError(
            "the scans have no forward-mode derivative (torch.func.jvp, jacfwd, torch.autograd.forward_ad): use "
            "backward(), torch.autograd.grad or torch.autograd.functional, and call models without tangents outside"
        )
