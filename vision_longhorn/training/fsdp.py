"""Weights shared out over the processes by torch's FSDP2, and put together again for checkpoints."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
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


def compile_blocks(model: Any) -> None:
    """Compiles a sharded model in place, block by block, since torch gathers weights between them."""
    config = torch._dynamo.config  # each rate of drop path needs a program of its own, and torch gives up after 8
    config.recompile_limit = max(config.recompile_limit, 4 * len(model.blocks))
    for block in model.blocks:
        block.forward = torch.compile(block.forward)


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` has shared out the model."""
    return isinstance(model, FSDPModule)


def whole(state: Any, keep: bool) -> Any:
    """A state dict with whole tensors on the CPU. All processes take part, and only those that `keep` it get them."""

    def gather(value: Tensor) -> Tensor | None:
        value = value.full_tensor() if isinstance(value, DTensor) else value
        return value.cpu() if keep else None

    return tree_map_only(Tensor, gather, state)


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads whole tensors, of which an optimiser of a sharded model takes its own part, on every process."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in state["state"].items():
        one = parameters[number]
        for key, value in values.items() if isinstance(one, DTensor) else ():
            if torch.is_tensor(value) and value.shape == one.shape:
                values[key] = distribute_tensor(value.to(one.device), one.device_mesh, one.placements)
    optimizer.load_state_dict(state)
