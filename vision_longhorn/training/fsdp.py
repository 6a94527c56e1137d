"""A model's weights shared out over the processes by torch's FSDP2, and put together again in checkpoints."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from vision_longhorn.errors import UserError

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on the first process; on the others nothing


def shard(accelerator: Accelerator, *models: Any, compress_gradients: bool = False) -> None:
    """Shares out the parameters of models over all processes, in place: each block by itself, then what is left.

    An optimiser made afterwards has its state shared out, too. Every process has to hold the same weights before.

    Args:
        accelerator: Gives device and number of processes.
        *models: Models of timm, not wrapped, with their stack of blocks in `blocks`.
        compress_gradients: Sum the gradients over the processes in bfloat16.

    Raises:
        UserError: Where a model has no `blocks`, or buffers, or gradients are to be compressed on the CPU.
    """
    cpu = accelerator.device.type == "cpu"
    if cpu and compress_gradients:
        raise UserError("compress_gradients together with fsdp needs GPUs: leave one of them out")
    for model in models:
        if not hasattr(model, "blocks") or any(True for _ in model.buffers()):
            raise UserError(
                "fsdp takes models with a stack of `blocks` and without buffers, and "
                f"{type(model).__name__} is none: leave fsdp out"
            )
    # Torch leaves averages of float32 to gloo, which in 2.7 sums. Those of float64 it divides by itself.
    dtype = torch.float64 if cpu else torch.bfloat16 if compress_gradients else None
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for model in models:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)


def compile_blocks(model: Any) -> None:
    """`torch.compile` for a sharded model, in place: block by block, since between them torch gathers weights."""
    config = torch._dynamo.config  # each rate of drop path is another program for it, and after 8 it would give up
    config.recompile_limit = max(config.recompile_limit, 4 * len(model.blocks))
    for block in model.blocks:
        block.forward = torch.compile(block.forward)


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` has been at `model`."""
    return isinstance(model, FSDPModule)


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """Names and whole tensors of a model, sharded or not. All processes take part, the first one gets them."""
    return get_model_state_dict(model, options=WHOLE)


def whole_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` as it is without shards. All processes take part, the first one gets it."""
    if not is_sharded(model) or not optimizer.state:  # torch would fill an empty one by a step of its own
        return optimizer.state_dict()
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    if not state:
        return state
    # torch goes by the parameters' names here, optimisers count them.
    names = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    return {
        "state": {number[name]: value for name, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [number[name] for name in group["params"]]} for group in state["param_groups"]
        ],
    }


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads what `whole_optimizer_state` gave, or an unsharded optimiser, on every process."""
    if not is_sharded(model) or not state["state"]:
        optimizer.load_state_dict(state)
        return
    name = {parameter: name for name, parameter in model.named_parameters()}
    names = [name[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        "state": {names[i]: value for i, value in state["state"].items()},
        "param_groups": [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]],
    }
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))
    for own, group in zip(optimizer.param_groups, state["param_groups"], strict=True):
        own.update({**group, "params": own["params"]})  # torch makes lists of what were tuples
