"""Makes torch operators of `scan`, `mix`, `grid_conv`, `bias_gelu` and `bias_norm_silu`, and of their derivatives and
that of `residual_norm`.

Exported programs name an operator's arguments, so a new one comes last and has a default.
"""

from collections.abc import Callable, Sequence
from typing import Any, Optional, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import replaying

_TYPES = {Tensor: "Tensor", Optional[Tensor]: "Tensor?", str: "str", bool: "bool", float: "float"}


def arguments(inputs: type, names: Sequence[str]) -> str:
    """Write fields of the NamedTuple `inputs` as a schema spells them."""
    hints = get_type_hints(inputs)
    return ", ".join(f"{_TYPES[hints[name]]} {name}" for name in names)


def schema(name: str) -> Any:
    """Return the schema of the operator `vision_longhorn::NAME`."""
    return getattr(torch.ops.vision_longhorn, name).default._schema


def define(
    name: str,
    arguments: str,
    outputs: int,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    fills: Sequence[str] = (),
) -> Any:
    """Define the operator `vision_longhorn::NAME`, whose results are tensors. `fake` makes uninitialised ones of the
    same shapes. Both functions get the arguments in order; those at the end that have their defaults are left out. An
    operator with 0 outputs fills its arguments of the names `fills` instead, and `run` returns ()."""

    repeat = replaying.repeating(run)

    def undisturbed(*values: Any) -> Any:
        # An operator would silently lose the tangents.
        if getattr(forward_ad, "_current_level", -1) >= 0 and not name.endswith("_backward"):
            raise NotImplementedError(
                f"{name} has no forward-mode derivative (torch.func.jvp, jacfwd, torch.autograd.forward_ad): use "
                "backward(), torch.autograd.grad or torch.autograd.functional, and call models outside of forward mode"
            )
        device = next(value.device for value in values if isinstance(value, Tensor))
        act = repeat if device.type in replaying.DEVICES else run
        if not torch.is_autocast_enabled(device.type):
            results = act(*values)
        else:
            with torch.autocast(device.type, enabled=False):  # compute in the dtypes of the arguments
                results = act(*values)
        return results if outputs else None

    operator = torch.library.custom_op(
        f"vision_longhorn::{name}",
        undisturbed,
        mutates_args=fills,
        schema=f"({arguments}) -> ({', '.join(['Tensor'] * outputs)})",
    )
    operator.register_fake(fake)
    return operator


def define_gradients(
    name: str, operator: Any, arguments: str, differentiable: int, tensors: int, run: Callable[..., Any]
) -> None:
    """Define the operator NAME_backward, and with it the derivative of `operator`. The first `tensors` arguments of
    `operator` are tensors, and the first `differentiable` of its results have a gradient.

    `run` returns the gradient of each tensor, empty where the tensor is absent. Its arguments begin with the gradients
    of the results and the results that have none.
    """
    names = [argument.name for argument in schema(name).arguments]
    outputs = len(schema(name).returns)

    def fake(*values: Any) -> tuple[Tensor, ...]:
        given = values[outputs : outputs + tensors]
        return tuple(given[0].new_empty(0) if value is None else value.new_empty(value.shape) for value in given)

    backward = define(f"{name}_backward", arguments, tensors, run, fake)
    taken = {argument.name for argument in schema(f"{name}_backward").arguments}

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        kept = output[differentiable:] if outputs > 1 else ()  # torch gives a single result without its tuple
        ctx.save_for_backward(*kept, *inputs[:tensors])
        ctx.options = [value for name, value in zip(names[tensors:], inputs[tensors:]) if name in taken]
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, *grads: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
        found: list[Optional[Tensor]] = [None] * len(names)
        if any(grad is not None for grad in grads[:differentiable]):
            saved = ctx.saved_tensors
            results = backward(*grads[:differentiable], *saved, *ctx.options)
            found[:tensors] = [None if value is None else grad for value, grad in zip(saved[-tensors:], results)]
        return tuple(found)

    operator.register_autograd(differentiate, setup_context=setup_context)
