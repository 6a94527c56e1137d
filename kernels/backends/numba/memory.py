"""Tensors as the compiled loops take them: flat arrays, which share the tensors' memory."""

from typing import Any

import torch
from torch import Tensor


def rows(value: Tensor, at: Any) -> Any:
    """Return the memory of (..., C) from its first number to its last one, and write the strides of all axes but the
    last to `at`. The numbers of the last axis lie side by side."""
    value = value.detach().float()
    if value.stride(-1) != 1 and value.shape[-1] > 1:
        value = value.contiguous()
    at[:] = value.stride()[:-1]
    extent = sum((n - 1) * s for n, s in zip(value.shape[:-1], value.stride())) + value.shape[-1]
    return value.as_strided((extent,), (1,)).numpy()


def flat(value: Tensor) -> Any:
    """Return the memory of a contiguous float32 tensor."""
    return value.detach().view(-1).numpy()


def copied(value: Tensor) -> Any:
    """Copy the numbers of a parameter, which then lie side by side. Memory that NumPy has seen cannot be given back, as
    FSDP does with the parameters that it has gathered."""
    return flat(value.detach().float().clone(memory_format=torch.contiguous_format))
