"""The device and the precision of a command, and the processes that share its work."""

import random
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, parse_flag_from_env

from vision_longhorn.errors import UserError, one_line


def make_accelerator(device: str = "auto", precision: str = "auto", grad_accum: int = 1, **kwargs: Any) -> Accelerator:
    """Makes the accelerator of a command, with `kwargs` of `Accelerator`. A process may call it again with another
    precision and, if it works alone, another device.

    The device is "auto" (CUDA where there is a GPU), "cuda" or "cpu"; the precision "auto", "bf16", "fp16" or "fp32".
    "auto" is autocast to bf16 on a GPU with bf16 in hardware, to fp16 on another GPU, and fp32 on a CPU.

    Raises:
        UserError: There is no such device, it cannot compute in that precision, accelerate is set to use DeepSpeed or
            the like, or the processes cannot connect.
    """
    try:
        cpu, used = _choose(device, precision)
        # accelerate would keep its state for the life of a process. Only a group of several processes must stay.
        AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
        accelerator = Accelerator(
            cpu=cpu,
            mixed_precision="no" if used == "fp32" else used,
            # These two are given, so that accelerate does not read them from its environment.
            dynamo_backend="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=grad_accum),
            **kwargs,
        )
    except UserError:
        raise
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"accelerate cannot start with these settings: {one_line(error)}") from error
    if (precision, used) == ("auto", "fp16"):
        accelerator.print(f"Note: {torch.cuda.get_device_name()} has no bf16 in hardware: it runs in fp16.")
    return accelerator


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds the generators of Python, NumPy, and of torch on the CPU and on `device`.

    Without a GPU this takes a fraction of the time of accelerate's `set_seed`, which prepares to seed all kinds.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _choose(device: str, precision: str) -> tuple[bool, str]:
    """Returns whether the CPU computes, and the precision."""
    for engine in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if parse_flag_from_env(f"ACCELERATE_USE_{engine}"):
            raise UserError(
                f"ACCELERATE_USE_{engine} is set, as by `accelerate launch --use_{engine.lower()}`: leave that out; "
                "training shards a model by its own setting fsdp"
            )
    # The scans run on CUDA and on the CPU. accelerate would take Apple's GPU by itself.
    cpu = device == "cpu" or not torch.cuda.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
    if device == "cuda" and cpu:
        raise UserError("device is 'cuda', but torch finds no GPU, or the launcher got --cpu: give auto or cpu")
    if precision == "fp16" and cpu:
        raise UserError("precision is 'fp16', which needs a GPU: give bf16 or fp32")
    if precision == "auto" and cpu:
        return cpu, "fp32"
    if precision == "auto":
        # NVIDIA's GPUs before the A100 (T4, V100, RTX 2080) emulate bf16, and slowly.
        precision = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return cpu, precision


def leave(accelerator: Accelerator) -> None:
    """Leaves the group of processes if NCCL connects them. With gloo, torch 2.7 could hang there for ever."""
    if accelerator.device.type == "cuda":
        accelerator.end_training()
