"""Weights shared out over the processes by torch's FSDP2, and put together again for checkpoints."""

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

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # the first process gets all, the others nothing


def shard(accelerator: Accelerator, *models: Any, compress_gradients: bool = False) -> None:
    """Shares out the parameters of timm's `models` over all processes, in place: each block by itself, then the rest.

    An optimiser that is made afterwards shares out its state, too. All processes have to hold the same weights before.
    With `compress_gradients` the gradients are summed in bfloat16.

    Raises:
        UserError: A model has no `blocks` or has buffers, or a CPU is to compress gradients.
    """
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


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """The whole state dict of a model, sharded or not. All processes take part, the first one gets it."""
    return get_model_state_dict(model, options=WHOLE)


def whole_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` as it is without shards. All processes take part, the first one gets it."""
    if not is_sharded(model) or not optimizer.state:  # torch would fill an empty state by a step of its own
        return optimizer.state_dict()
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    # torch names the parameters here, but optimisers number them.
    names = [name for group in state.get("param_groups", ()) for name in group["params"]]
    return _renamed(state, {name: i for i, name in enumerate(names)}) if state else state


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads the state of an unsharded optimiser, or from `whole_optimizer_state`, on every process."""
    if not is_sharded(model) or not state["state"]:
        optimizer.load_state_dict(state)
        return
    name = {parameter: name for name, parameter in model.named_parameters()}
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    state = _renamed(state, {i: name[parameter] for i, parameter in enumerate(parameters)})
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))
    for own, group in zip(optimizer.param_groups, state["param_groups"], strict=True):
        own.update({**group, "params": own["params"]})  # torch makes lists of tuples


def _renamed(state: dict[str, Any], new: dict[Any, Any]) -> dict[str, Any]:
    """An optimiser's state with new keys for its parameters."""
    return {
        "state": {new[key]: value for key, value in state["state"].items()},
        "param_groups": [{**group, "params": [new[key] for key in group["params"]]} for group in state["param_groups"]],
    }
