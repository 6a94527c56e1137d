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
    """Lets `model` replay its training passes as CUDA graphs, to the same bits. In eval mode it runs as before.

    What the model decides or draws on the host stays as it is in the capture. Its parameters have to keep their memory,
    and its batches the shape of `images`, (B, 3, H, W) on the GPU, whose values do not matter. An update has so many
    backward `passes`. If `compiled`, the training passes are compiled first.

    Raises:
        UserError: The model does something that torch cannot capture, such as waiting for the GPU.
    """
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):  # not in torch 2.7
        # Gradients come from the capture's stream, for which torch waits.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    model.train()
    forward = model.forward
    if compiled:
        model.forward = torch.compile(forward)
    # No cast of a weight may outlive its pass in a graph, so autocast keeps none.
    precision = accelerator.autocast(autocast_handler=AutocastKwargs(cache_enabled=False))
    try:
        with unchanged_buffers(model), precision:
            apart = passes == 1 and gradients_are_apart(model, images)
            gc.collect()  # remains of that pass would bring its stream into the capture
            torch.cuda.make_graphed_callables(model, (images,), allow_unused_input=True)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError) as error:
        options, remedy = ("compile, cuda_graphs", "one of them") if compiled else ("cuda_graphs", "it")
        raise UserError(f"{options}: this model cannot be captured ({one_line(error)}): leave {remedy} out") from error
    replay = model.forward
    # Evaluation is not compiled, as its batches have several shapes.
    model.forward = lambda images: (replay if model.training else forward)(images)
    if not apart:
        # Shared memory would be clipped once for each parameter, and the next pass would write over it.
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
    """Restores the buffers, such as those of batch norms, at the end."""
    before = [buffer.clone() for buffer in net.buffers()]
    try:
        yield
    finally:
        for buffer, value in zip(net.buffers(), before, strict=True):
            buffer.copy_(value)
