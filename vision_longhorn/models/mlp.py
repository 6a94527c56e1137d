"""The MLP of a block."""

from typing import Any

import torch
from timm.layers import Mlp
from torch import Tensor, nn
from torch.nn import functional as F

from vision_longhorn.models.fusing import is_bare, takes_kernels


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
        takes_kernels(x)
        and is_bare(fc1, nn.Linear)
        and fc1.bias is not None
        and is_bare(act, nn.GELU)
        and act.approximate == "none"
    )
