"""CUDA graphs: a model's forward and backward pass as one launch each, where the CPU cannot keep up with the GPU."""

import contextlib
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs
from torch import nn

from vision_longhorn.errors import UserError, one_line


def capture(accelerator: Accelerator, model: nn.Module, images: torch.Tensor, passes: int) -> None:
    """Lets `model` replay its training passes, to the same bits; in eval mode it runs as before.

    Args:
        accelerator: Says the precision.
        model: Changed in place. From now on its parameters keep their memory, and its training batches their shape.
        images: Of that shape (B, 3, H, W), on the GPU; their values do not matter.
        passes: Backward passes of an update.

    Raises:
        UserError: Where the model does what a graph cannot hold, such as waiting for the GPU.
    """
    model.train()
    # Within a graph no cast of a weight may outlive its pass, as autocast's cache would have it.
    precision = accelerator.autocast(autocast_handler=AutocastKwargs(cache_enabled=False))
    try:
        with unchanged_buffers(model), precision:
            torch.cuda.make_graphed_callables(model, (images,), allow_unused_input=True)
    except RuntimeError as error:
        raise UserError(f"cuda_graphs: this model cannot be captured ({one_line(error)}): leave it out") from error
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):  # torch 2.10
        # Gradients do come from the capture's stream, and torch waits for it.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    if passes > 1:
        # The first pass's gradients would become the parameters' own, in memory that the next pass writes over.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(torch.clone)


@contextlib.contextmanager
def unchanged_buffers(net: nn.Module) -> Iterator[None]:
    """Passes in here leave no trace in the buffers, such as those of batch norms."""
    before = [buffer.clone() for buffer in net.buffers()]
    yield
    for buffer, value in zip(net.buffers(), before, strict=True):
        buffer.copy_(value)
