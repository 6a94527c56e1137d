"""Weights sharded over the processes by torch's FSDP2, and gathered again for checkpoints."""

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
    """Shards the parameters of timm's `models` over all processes, in place: each block by itself, then the rest.

    An optimiser that is made afterwards shards its state, too. All processes must hold the same weights before this.
    With `compress_gradients` the gradients are summed in bfloat16.

    Raises:
        UserError: A model has no `blocks` or has buffers, a CPU is to compress gradients, or the precision is fp16.
    """
    if accelerator.num_processes == 1:
        accelerator.print("Note: fsdp has no effect with one process.")
        return
    if accelerator.scaler:
        raise UserError("precision fp16 does not work with fsdp: use bf16 or fp32")
    cpu = accelerator.device.type == "cpu"
    if cpu and compress_gradients:
        raise UserError("compress_gradients together with fsdp needs GPUs: leave one of them out")
    for model in models:
        if not hasattr(model, "blocks") or any(True for _ in model.buffers()):
            raise UserError(f"fsdp takes models with `blocks` and no buffers, not {type(model).__name__}: drop fsdp")
    # In torch 2.7 gloo sums float32 gradients where it should average them. For float64 torch divides the sum itself.
    dtype = torch.float64 if cpu else torch.bfloat16 if compress_gradients else None
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for model in models:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def whole(state: Any, keep: bool) -> Any:
    """Gathers a state dict of whole tensors on the CPU. All processes must call it; those that `keep` it get one."""

    def gather(value: Tensor) -> Tensor | None:
        value = value.full_tensor() if isinstance(value, DTensor) else value
        return value.cpu() if keep else None

    return tree_map_only(Tensor, gather, state)
