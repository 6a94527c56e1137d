"""The MLP of a block."""

from typing import Any

import torch
from timm.layers import Mlp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module

from vision_longhorn import kernels  # also registers torch.ops.vision_longhorn

_GLOBAL_HOOKS = (
    module._global_forward_pre_hooks,
    module._global_forward_hooks,
    module._global_backward_pre_hooks,
    module._global_backward_hooks,
)


class GeluMlp(Mlp):
    """timm's `Mlp` with GELU: two linear layers, and GELU between them.

    On a GPU one kernel adds the first layer's bias and applies GELU (`kernels.bias_gelu`). The layers are called one by
    one where the kernel would pass over something: a hook of one of them or of all modules, another `forward`, or
    another class (LoRA, quantised layers). The same holds in float64, and while a model is traced or exported; only a
    strict export records the kernel.

    Args:
        dim: width of the tokens.
        hidden: width inside.
    """

    def __init__(self, dim: int, hidden: int, device: Any = None, dtype: Any = None):
        super().__init__(dim, hidden, act_layer=nn.GELU, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (.., dim) to (.., dim)."""
        fused = False
        if not torch.jit.is_scripting():
            fused = _takes_kernel(self.fc1, self.act, x)
        if fused:
            h = torch.ops.vision_longhorn.bias_gelu(F.linear(x, self.fc1.weight), self.fc1.bias, "auto")
        else:
            h = self.act(self.fc1(x))
        h = self.drop1(h)
        if not isinstance(self.norm, nn.Identity):  # torch.fx would take its name for that of the block's mlp_norm
            h = self.norm(h)
        return self.drop2(self.fc2(h))  # (.., hidden) to (.., dim)


def _takes_kernel(fc1: Any, act: Any, x: Any) -> bool:
    """Tell whether one kernel may do what `fc1`, after its product, and `act` would."""
    return (
        isinstance(x, Tensor)  # torch.fx passes proxies
        and x.is_cuda
        and x.dtype != torch.float64
        and kernels.HAS_TRITON
        and not torch.jit.is_tracing()
        # In torch 2.7 is_exporting() is true under torch.compile as well.
        and (torch.compiler.is_dynamo_compiling() or not torch.compiler.is_exporting())
        and not any(_GLOBAL_HOOKS)
        and _is_bare(fc1, nn.Linear)
        and fc1.bias is not None
        and _is_bare(act, nn.GELU)
        and act.approximate == "none"
    )


def _is_bare(layer: Any, kind: type[nn.Module]) -> bool:
    """Tell whether a call of `layer` runs nothing but `kind.forward`."""
    return (
        layer.__class__ is kind
        and "forward" not in layer.__dict__
        and not layer._forward_pre_hooks
        and not layer._forward_hooks
        and not layer._backward_pre_hooks
        and not layer._backward_hooks
    )
