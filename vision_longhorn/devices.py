"""The device that a command runs on, and the precision that it computes in."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env

from vision_longhorn.errors import UserError


def make_accelerator(device: str = "auto", precision: str = "auto", **kwargs: Any) -> Accelerator:
    """Accelerator for `device` (auto, cuda, cpu) and `precision` (auto, bf16, fp16, fp32).

    Args:
        device: auto takes CUDA where there is one.
        precision: auto is bf16 autocast on a GPU that has bf16 in hardware, fp16 autocast on one that has not, which is
            said, and fp32 on a CPU.
        **kwargs: Further arguments of `Accelerator`.

    Raises:
        UserError: Where CUDA is asked for and there is none, or fp16 for a CPU.
    """
    # The scans run on CUDA and on the CPU; accelerate on its own would pick Apple's GPU, too.
    cpu = device == "cpu" or not torch.cuda.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
    if device == "cuda" and cpu:
        raise UserError(
            "device is 'cuda', but PyTorch finds no CUDA GPU here, or the launcher was given --cpu: "
            "use --device auto or --device cpu"
        )
    if precision == "fp16" and cpu:
        raise UserError("precision is 'fp16', which needs a GPU: use --precision fp32, or bf16")
    # NVIDIA's GPUs before the A100 (T4, V100, RTX 2080) only imitate bf16, at the price of conversions.
    plain = cpu or torch.cuda.is_bf16_supported(including_emulation=False)
    auto = "no" if cpu else "bf16" if plain else "fp16"
    mixed_precision = {"auto": auto, "fp32": "no"}.get(precision, precision)
    accelerator = Accelerator(cpu=cpu, mixed_precision=mixed_precision, **kwargs)
    if precision == "auto" and not plain:
        accelerator.print(f"Note: {torch.cuda.get_device_name()} has no bf16 in hardware: it runs in fp16.")
    return accelerator


def leave(accelerator: Accelerator) -> None:
    """Leaves the group of processes, where that does more good than harm."""
    if accelerator.device.type == "cuda":
        accelerator.end_training()  # NCCL wants it; with gloo, torch 2.7 can wait in it for itself, for ever
