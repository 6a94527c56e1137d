"""Which backend runs: chosen by the device of the inputs, or forced."""

from importlib import import_module
from types import ModuleType

import torch
from torch.autograd import forward_ad

from .contract import BACKENDS, check_option
from .rules.base import HAS_TRITON


def choose_backend(backend: str, device: torch.device) -> str:
    """The implementation that `backend` means on `device`: "torch" or "triton".

    "auto" takes triton on a GPU where it is installed and torch everywhere else.

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
        if device.type != "cuda" and not load_backend("triton", "lanes").INTERPRETED:
            raise RuntimeError(
                f"backend='triton' was asked for and the tensors are on {device}; move them to a GPU, "
                "or set TRITON_INTERPRET=1 before the first import to run the kernels on a CPU"
            )
    return backend


def refuse_forward_mode() -> None:
    """Raises NotImplementedError within forward-mode differentiation, whose tangents would be lost without a word: an
    operator sees the values alone."""
    if getattr(forward_ad, "_current_level", -1) >= 0:
        raise NotImplementedError(
            "the scans have no forward-mode derivative (torch.func.jvp, jacfwd, torch.autograd.forward_ad): use "
            "backward(), torch.autograd.grad or torch.autograd.functional, and call models without tangents outside"
        )


def load_backend(name: str, part: str) -> ModuleType:
    """The module "scan", "conv", "norm", "padding", "x_proj" or "dt_proj" of the backend "torch" or "triton", imported
    when it is first asked for. Each has `forward` and `backward`."""
    return import_module(f".backends.{name}.{part}", __package__)
