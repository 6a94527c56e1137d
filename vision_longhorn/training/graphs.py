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
    """Lets `model` replay its training passes as CUDA graphs, with the same bits. In eval mode it runs as before.

    Whatever the model decides or draws on the host during the capture is the same in every replay. Its parameters must
    keep their place in memory, and its batches the shape of `images`, (B, 3, H, W) on the GPU, whose values do not
    matter. `passes` is the number of backward passes in an update. If `compiled`, the training passes are compiled
    first.

    Raises:
        UserError: The model does something that torch cannot capture, such as waiting for the GPU.
    """
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):  # not in torch 2.7
        # It warns that gradients come from the capture's stream, but torch waits for that stream.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    model.train()
    forward = model.forward
    if compiled:
        model.forward = torch.compile(forward)
    # A graph must not use a weight that was cast in an earlier pass, so autocast caches none.
    precision = accelerator.autocast(autocast_handler=AutocastKwargs(cache_enabled=False))
    try:
        with unchanged_buffers(model), precision:
            apart = passes == 1 and gradients_are_apart(model, images)
            gc.collect()  # what is left of that pass would bring its stream into the capture
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
        # Memory that gradients share would be clipped once per parameter, and the next pass would overwrite it.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(torch.clone)


def gradients_are_apart(model: nn.Module, images: torch.Tensor) -> bool:
    """Tells whether a backward pass gives each parameter a gradient in memory of its own."""
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
