"""Weights shared out over the processes by torch's FSDP2, and put together again for checkpoints."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from vision_longhorn.errors import UserError


def shard(accelerator: Accelerator, *models: Any, compress_gradients: bool = False) -> None:
    """Shares out the parameters of timm's `models` over all processes, in place: each block by itself, then the rest.

    An optimiser that is made afterwards shares out its state, too. All processes have to hold the same weights before.
    With `compress_gradients` the gradients are summed in bfloat16.

    Raises:
        UserError: A model has no `blocks` or has buffers, a CPU is to compress gradients, or the precision is fp16.
    """
    if accelerator.num_processes == 1:
        accelerator.print("Note: fsdp has nothing to share out with one process.")
        return
    if accelerator.scaler:
        raise UserError("precision fp16 does not go together with fsdp: use bf16 or fp32")
    cpu = accelerator.device.type == "cpu"
    if cpu and compress_gradients:
        raise UserError("compress_gradients together with fsdp needs GPUs: leave one of them out")
    for model in models:
        if not hasattr(model, "blocks") or any(True for _ in model.buffers()):
            raise UserError(f"fsdp takes models with `blocks` and no buffers, not {type(model).__name__}: leave it out")
    # In torch 2.7 gloo sums where it should average float32. Torch divides sums of float64 by itself.
    dtype = torch.float64 if cpu else torch.bfloat16 if compress_gradients else None
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for model in models:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def whole(state: Any, keep: bool) -> Any:
    """A state dict with whole tensors on the CPU. All processes take part, and only those that `keep` it get them."""

    def gather(value: Tensor) -> Tensor | None:
        value = value.full_tensor() if isinstance(value, DTensor) else value
        return value.cpu() if keep else None

    return tree_map_only(Tensor, gather, state)
