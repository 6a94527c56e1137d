"""One update of a model's weights: the same for the trainer, the lab and the benchmarks."""

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch
from accelerate import Accelerator
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from vision_longhorn.training.fsdp import is_sharded


class TrainStep:
    """Forward and backward passes, clipping, then a step of the optimiser and of the averaged weights.

    `net` is `model` as it is called: wrapped for several processes, under autocast, compiled. Where no wrapper averages
    the gradients over the processes, this does, with `compress` in bfloat16. `criterion` maps what `net` returns and
    the targets to the mean loss, () float32. `clip_grad` is the largest norm of the gradient.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        net: Callable[[Any], Tensor],
        criterion: Callable[[Tensor, Any], Tensor],
        optimizer: torch.optim.Optimizer,
        ema: ModelEmaV3 | None = None,
        clip_grad: float | None = None,
        compress: bool = False,
    ) -> None:
        self.accelerator, self.model, self.net, self.criterion = accelerator, model, net, criterion
        self.optimizer, self.ema, self.clip_grad, self.compress = optimizer, ema, clip_grad, compress
        self.parameters = list(model.parameters())
        averaged = isinstance(net, DistributedDataParallel) or is_sharded(model)
        self.sums = accelerator.num_processes > 1 and not averaged
        # This process's weight in the mean over processes. With float16 the gradients must stay as large as the scaler
        # makes them: then the weight is 1, and `sum_gradients` divides.
        self.share = 1 / accelerator.num_processes if self.sums and not accelerator.scaler else 1

    def __call__(self, batches: Iterable[tuple[Any, Any]], number: int = 1) -> tuple[Tensor, Tensor]:
        """Makes an update.

        Args:
            batches: (inputs, targets) of each pass, on the device.
            number: The update's number, from 1, on which a growing decay of the average depends.

        Returns:
            (loss, norm): this process's mean loss, and the norm of the whole gradient before clipping, both () float32
            on the device. Where the norm is not finite, weights, moments and step counts are as they were.
        """
        loss, norm = self.gradients(batches)
        self.apply(norm)
        if self.ema:
            self.ema.update(self.model, step=number)
        return loss, norm

    def gradients(self, batches: Iterable[tuple[Any, Any]]) -> tuple[Tensor, Tensor]:
        """Makes only the passes, which leave the clipped mean gradient in the parameters. Returns (loss, norm), too."""
        self.optimizer.zero_grad()
        loss_sum = torch.zeros((), device=self.accelerator.device)
        for inputs, targets in batches:
            with self.accelerator.accumulate(self.net):
                loss = self.criterion(self.net(inputs), targets)
                loss_sum += loss.detach()
                # Where the loss is not finite, this makes every gradient not finite, and so the sum over the processes.
                self.accelerator.backward(loss * (self.share + 0 * loss.detach()))
        if self.sums:
            self.sum_gradients()
        if self.accelerator.scaler:
            self.accelerator.scaler.unscale_(self.optimizer)
        norm = get_total_norm([one.grad for one in self.parameters if one.grad is not None])
        if self.clip_grad is not None:
            clip_grads_with_norm_(self.parameters, self.clip_grad, norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return loss_sum / self.accelerator.gradient_accumulation_steps, norm

    def sum_gradients(self) -> None:
        """Sums the gradients over the processes, in one exchange."""
        grads = {one: one.grad for one in self.parameters if one.grad is not None}
        dtype = reduce(torch.promote_types, {one.dtype for one in grads})
        # A part has its parameter's strides. Fused optimisers want that, and torch copies equal strides all at once.
        dense = torch.ops.aten.is_non_overlapping_and_dense

        def parts(flat: Tensor) -> list[Tensor]:
            pairs = zip(grads, flat.split([one.numel() for one in grads]), strict=True)
            return [
                part.as_strided(one.shape, one.stride()) if dense(one) else part.view(one.shape) for one, part in pairs
            ]

        sent = torch.empty(
            sum(one.numel() for one in grads),
            dtype=torch.bfloat16 if self.compress else dtype,
            device=self.accelerator.device,
        )
        torch._foreach_copy_(parts(sent), list(grads.values()))
        if self.share == 1:
            sent /= self.accelerator.num_processes
        torch.distributed.all_reduce(sent)
        for one, total in zip(grads, parts(sent.to(dtype)), strict=True):
            one.grad = total.to(one.dtype)

    def apply(self, norm: Tensor) -> None:
        """Updates the weights from the parameters' gradients, unless their `norm`, () float32, is not finite.

        torch's fused optimisers decide that on the device. For the others the host decides, and waits for the device.
        """
        optimizer: Any = self.optimizer
        # The first update has to create the moments; SGD would never fill them if the device skipped it.
        if getattr(optimizer, "_step_supports_amp_scaling", False) and optimizer.state:
            optimizer.grad_scale, optimizer.found_inf = None, (~norm.isfinite()).float()
            optimizer.step()
        elif norm.isfinite():
            optimizer.step()
        if self.accelerator.scaler:
            self.accelerator.scaler.update()
