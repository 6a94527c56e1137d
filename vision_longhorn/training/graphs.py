"""CUDA graphs: a model's forward and backward pass as one launch each, where the CPU cannot keep up with the GPU."""

import contextlib
import gc
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs
from torch import nn

from vision_longhorn.errors import UserError, one_line


def capture(
    accelerator: Accelerator, model: nn.Module, images: torch.Tensor, passes: int, compiled: bool = False
) -> None:
    """Lets `model` replay its training passes, to the same bits; in eval mode it runs as before.

    What it decides or draws on the host in a pass is decided here, once for all passes.

    Args:
        accelerator: Says the precision.
        model: Changed in place. From now on its parameters keep their memory, and its training batches their shape.
        images: Of that shape (B, 3, H, W), on the GPU; their values do not matter.
        passes: Backward passes of an update.
        compiled: Whether what is captured is compiled before; then the bits are those of the compiled model.

    Raises:
        UserError: Where the model does what torch cannot capture, such as waiting for the GPU.
        torch.OutOfMemoryError: Where the graphs do not fit.
    """
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):  # not in older torch
        # Gradients do come, from now on, from the capture's stream, and torch waits for it.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    model.train()
    forward = model.forward
    if compiled:
        model.forward = torch.compile(forward)
    # Within a graph no cast of a weight may outlive its pass, as autocast's cache would have it.
    precision = accelerator.autocast(autocast_handler=AutocastKwargs(cache_enabled=False))
    try:
        with unchanged_buffers(model), precision:
            apart = passes == 1 and gradients_are_apart(model, images)
            gc.collect()  # what is left of that pass, if anything, would bring its stream into the capture
            torch.cuda.make_graphed_callables(model, (images,), allow_unused_input=True)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError) as error:
        what, remedy = "cuda_graphs: this model cannot be captured", "leave it out, or give --cuda-graphs false"
        if compiled:
            what, remedy = "compile, cuda_graphs: this model cannot be compiled and captured", "leave one of them out"
        raise UserError(f"{what} ({one_line(error)}): {remedy}") from error
    replay = model.forward
    # Compiled, an evaluation's first and last batch would be compiled for anew.
    model.forward = lambda images: (replay if model.training else forward)(images)
    if not apart:
        # Gradients would become the parameters' own where they are, to be scaled once for each parameter that shares
        # them, and written over by the next pass.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(torch.clone)


def gradients_are_apart(model: nn.Module, images: torch.Tensor) -> bool:
    """Whether a backward pass gives each parameter a gradient in memory of its own."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(model(images).float().sum(), parameters, allow_unused=True)
    places = [grad.untyped_storage().data_ptr() for grad in grads if grad is not None]
    return len(set(places)) == len(places)


@contextlib.contextmanager
def unchanged_buffers(net: nn.Module) -> Iterator[None]:
    """Passes in here leave no trace in the buffers, such as those of batch norms."""
    before = [buffer.clone() for buffer in net.buffers()]
    try:
        yield
    finally:
        for buffer, value in zip(net.buffers(), before, strict=True):
            buffer.copy_(value)
