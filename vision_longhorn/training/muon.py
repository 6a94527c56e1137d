"""Muon (Jordan et al., 2024), with all matrices of one shape in one update."""

from collections import defaultdict
from typing import Any

import torch
from timm.optim.muon import _COEFFICIENTS, _is_suitable_for_muon, get_lr_scale, zeropower_via_newtonschulz
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


class Muon(torch.optim.AdamW):
    """Computes what timm's Muon does: orthogonal updates of matrices, and AdamW for all else.

    timm updates matrices one by one. The small model has 52, with 15 small products each, which on an H100 take longer
    than all else in a step. Here the matrices of one shape are a batch, and AdamW is torch's fused one. Both can skip
    an update on the device, for which the host need not wait. If matrices are sharded (fsdp), each process makes the
    whole update and keeps its part.

    Args:
        like: timm's "muon", new, with any rates, weight decay and betas, and otherwise as timm makes it. Groups are
            taken from it, and either loads what the other saved.
    """

    def __init__(self, like: torch.optim.Optimizer) -> None:
        super().__init__(like.param_groups, fused=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Loads a state. Matrices have no count of steps, but torch's AdamW looks for one everywhere."""
        for one in state["state"].values():
            one.setdefault("step", torch.zeros(()))
        super().__setstate__(state)
        for one in self.state.values():
            if "momentum_buffer" in one:
                del one["step"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates the weights, unless `found_inf`, () float32, which `TrainStep` sets, is 1."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        taken: dict[Tensor, Any] = {}
        for group in self.param_groups:
            alike = defaultdict(list)
            for one in group["params"]:
                if one.grad is not None and _is_suitable_for_muon(one):
                    alike[one.shape].append(one)
                    taken[one] = one.grad
            for matrices in alike.values():
                self._update(matrices, group)
        for one in taken:
            one.grad = None  # AdamW leaves it alone then
        super().step()
        for one, grad in taken.items():
            one.grad = grad
        return loss

    def _update(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """Updates matrices of one shape. What has more axes counts as a matrix of its first and all others."""
        for one in matrices:
            if not self.state[one]:
                self.state[one]["momentum_buffer"] = torch.zeros_like(one)
        kept = [self.state[one]["momentum_buffer"] for one in matrices]
        moments, grads = torch.stack(_own(kept)), torch.stack(_own([one.grad for one in matrices]))  # (n, rows, ..)
        found_inf, well = getattr(self, "found_inf", None), 1.0
        if found_inf is not None:
            grads, well = torch.where(found_inf > 0, moments, grads), 1 - found_inf
        moments.lerp_(grads, 1 - group["momentum"])
        torch._foreach_copy_(_own(kept), moments.unbind())
        if isinstance(kept[0], DTensor):
            moments = torch.stack([one.full_tensor() for one in kept])
        update = zeropower_via_newtonschulz(
            moments.flatten(2), group["ns_steps"], _COEFFICIENTS[group["ns_coefficients"]], eps=group["eps"]
        )
        rate = group["lr"] * get_lr_scale(update.shape, group["adjust_lr_fn"])
        # Contiguous, or else torch adds them to the weights one by one.
        update = (update.to(moments.dtype) * (-rate * well)).contiguous().view_as(moments)
        torch._foreach_mul_(_own(matrices), 1 - group["lr"] * group["weight_decay"] * well)
        torch._foreach_add_(_own(matrices), [_part(*pair) for pair in zip(update, matrices, strict=True)])


def _own(values: list[Any]) -> list[Tensor]:
    """Returns this process's parts of `values`, which share their memory."""
    return [value.to_local() if isinstance(value, DTensor) else value for value in values]


def _part(value: Tensor, like: Tensor) -> Tensor:
    """Returns this process's part of a `value` that all have, if it is sharded as `like`."""
    if not isinstance(like, DTensor):
        return value
    whole = DTensor.from_local(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements).to_local()
