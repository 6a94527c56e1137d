"""The device that a command runs on, and the precision that it computes in."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import GradientAccumulationPlugin, parse_flag_from_env

from vision_longhorn.errors import UserError, one_line
from vision_longhorn.signals import launcher_option

# Engines of accelerate that would train in the place of the code here: each variable by which `accelerate launch` or
# its config file asks for one, and its option. They are refused.
ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "--use_deepspeed",
    "ACCELERATE_USE_FSDP": "--use_fsdp",
    "ACCELERATE_USE_MEGATRON_LM": "--use_megatron_lm",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "--use_parallelism_config",
}
# What accelerate reads from its environment, or leaves unread, though a command here has an option for it: its name,
# ours, and what it is where nobody asked for anything. `make_accelerator` sees to it that none takes effect, and says
# so where it differs from what the run does. The rest holds (ACCELERATE_USE_CPU, _CPU_AFFINITY, _DEBUG_MODE, ...).
OVERRULED = {
    "mixed_precision": ("--precision", "no"),
    "dynamo_backend": ("--compile", "no"),
    "gradient_accumulation_steps": ("--grad-accum", "1"),
    "gradient_clipping": ("--clip-grad", "none"),
}


def make_accelerator(
    device: str = "auto", precision: str = "auto", settings: dict[str, Any] | None = None, **kwargs: Any
) -> Accelerator:
    """Accelerator for `device` (auto, cuda, cpu) and `precision` (auto, bf16, fp16, fp32).

    What the environment asks of accelerate beside that holds, is said to change nothing, or is refused. A second one in
    a process may have another precision, and with one process another device.

    Args:
        device: auto takes CUDA where there is one.
        precision: auto is bf16 autocast on a GPU that has bf16 in hardware, fp16 autocast on one that has not, which is
            said, and fp32 on a CPU.
        settings: What the command does of OVERRULED, beside the precision; what is not in there has no meaning to it.
        **kwargs: Further arguments of `Accelerator`.

    Raises:
        UserError: Where CUDA is asked for and there is none, fp16 for a CPU, or an engine of accelerate; and where
            the processes cannot meet.
    """
    with _as_user_error():
        _refuse_engines()
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
        settings = settings or {}
        _forget_another(cpu, mixed_precision)
        # Given as plugins, they are not read from the environment.
        accumulation = GradientAccumulationPlugin(num_steps=settings.get("gradient_accumulation_steps", 1))
        accelerator = Accelerator(
            cpu=cpu,
            mixed_precision=mixed_precision,
            dynamo_backend="no",
            gradient_accumulation_plugin=accumulation,
            **kwargs,
        )
    if precision == "auto" and not plain:
        accelerator.print(f"Note: {torch.cuda.get_device_name()} has no bf16 in hardware: it runs in fp16.")
    for note in _overruled({**settings, "mixed_precision": {"no": "fp32"}.get(mixed_precision, mixed_precision)}):
        accelerator.print(f"Note: {note}.")
    return accelerator


@contextlib.contextmanager
def _as_user_error() -> Iterator[None]:
    """What accelerate and torch say of an environment in which they cannot start, as a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"accelerate cannot start as its environment has it: {one_line(error)}") from error


def _refuse_engines() -> None:
    for variable, option in ENGINES.items():
        if os.environ.get(variable, "").lower() in ("true", "1", "yes", "y", "on", "t"):
            own = "; what shares out a model here is --fsdp in training" if variable.endswith("FSDP") else ""
            raise UserError(
                f"{variable} is set, by `accelerate launch {option}` or its config file: models are not run by that "
                f"here, leave it out{own}"
            )
    if os.environ.get("ACCELERATE_TORCH_DEVICE"):
        raise UserError(
            f"ACCELERATE_TORCH_DEVICE is {os.environ['ACCELERATE_TORCH_DEVICE']}: unset it; --device says the device "
            "here, and CUDA_VISIBLE_DEVICES which of several GPUs"
        )


def _forget_another(cpu: bool, mixed_precision: str) -> None:
    """Lets accelerate, which keeps its state for the life of a process, take another precision or device."""
    if not PartialState._shared_state:
        return
    if (PartialState().device.type == "cpu") != cpu:
        if torch.distributed.is_initialized():
            raise UserError("these processes have met for another device before: start new ones for this one")
        AcceleratorState._reset_state(reset_partial_state=True)
    elif AcceleratorState._shared_state and AcceleratorState._shared_state["_mixed_precision"] != mixed_precision:
        AcceleratorState._reset_state()


def _overruled(settings: dict[str, Any]) -> Iterator[str]:
    """What to say of each setting that was asked of accelerate, and is not what the command does."""
    for name, (option, default) in OVERRULED.items():
        variable = f"ACCELERATE_{name.upper()}"
        asked, source = os.environ.get(variable), variable
        if asked is None:
            asked, source = launcher_option(name), f"accelerate launch --{name}"
        if asked is None or asked.lower() in (default, str(settings.get(name, default)).lower()):
            continue
        told = f"{option} says that here, and it is {settings[name]}" if name in settings else "this command has none"
        yield f"{source} {asked} changes nothing: {told}"


def leave(accelerator: Accelerator) -> None:
    """Leaves the group of processes, where that does more good than harm."""
    if accelerator.device.type == "cuda":
        accelerator.end_training()  # NCCL wants it; with gloo, torch 2.7 can wait in it for itself, for ever
