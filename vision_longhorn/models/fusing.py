"""Where one kernel may do what several layers would."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module

from vision_longhorn import kernels  # also registers torch.ops.vision_longhorn

_GLOBAL_HOOKS = (
    module._global_forward_pre_hooks,
    module._global_forward_hooks,
    module._global_backward_pre_hooks,
    module._global_backward_hooks,
)


def takes_kernels(x: Any) -> bool:
    """Tell whether kernels of our own may take `x` now: on a GPU, but not in float64, nor while a hook watches all
    modules, nor while a model is traced or exported, unless strictly."""
    return (
        isinstance(x, Tensor)  # torch.fx passes proxies
        and x.is_cuda
        and x.dtype != torch.float64
        and kernels.HAS_TRITON
        and not torch.jit.is_tracing()
        # In torch 2.7 is_exporting() is true under torch.compile as well.
        and (torch.compiler.is_dynamo_compiling() or not torch.compiler.is_exporting())
        and not any(_GLOBAL_HOOKS)
    )


def is_bare(layer: Any, kind: type[nn.Module]) -> bool:
    """Tell whether a call of `layer` runs nothing but `kind.forward`."""
    return (
        layer.__class__ is kind
        and "forward" not in layer.__dict__
        and not layer._forward_pre_hooks
        and not layer._forward_hooks
        and not layer._backward_pre_hooks
        and not layer._backward_hooks
    )
