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
        cuda_graphs: On a GPU, replay the update of each batch of matrices as a CUDA graph, with the same bits. It has
            some 40 small kernels, which the host could not launch as fast as the GPU runs them.
    """

    def __init__(self, like: torch.optim.Optimizer, cuda_graphs: bool = False) -> None:
        super().__init__(like.param_groups, fused=True)
        self.cuda_graphs = cuda_graphs
        self._graphs: dict[Any, Any] = {}  # of each batch, by where its matrices and their moments lie
        self._pool: Any = None  # the graphs' memory: they run one after the other, and keep nothing there

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Loads a state. Matrices have no count of steps, but torch's AdamW looks for one everywhere."""
        for one in state["state"].values():
            one.setdefault("step", torch.zeros(()))
        super().__setstate__(state)
        for one in self.state.values():
            if "momentum_buffer" in one:
                del one["step"]
        self._graphs, self._pool = {}, None  # a pool ends with its last graph

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
        grads = torch.stack(_own([one.grad for one in matrices]))  # (n, rows, ..)
        rate, decay = (
            group["lr"] * get_lr_scale(grads.flatten(2).shape, group["adjust_lr_fn"]),
            group["lr"] * group["weight_decay"],
        )
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            found_inf = grads.new_zeros(())
        if self.cuda_graphs and grads.is_cuda and not isinstance(kept[0], DTensor):
            self._replay(matrices, kept, group, grads, found_inf, rate, decay)
        else:
            _move(matrices, kept, group, grads, found_inf, rate, decay)

    def _replay(self, matrices: list[Tensor], kept: list[Tensor], group: dict[str, Any], *inputs: Any) -> None:
        """Calls `_move` by a CUDA graph, which is captured at the second update: the first one loads the kernels."""
        key = group["momentum"], *(one.data_ptr() for one in (*matrices, *kept))
        if key not in self._graphs:
            self._graphs[key] = None
            _move(matrices, kept, group, *inputs)
            return
        if not self._graphs[key]:
            places = [torch.empty_like(inputs[0]), *(inputs[0].new_empty(()) for _ in inputs[1:])]
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as the loader's, may use the GPU meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                _move(matrices, kept, group, *places)
            self._graphs[key] = graph, places
        graph, places = self._graphs[key]
        for place, value in zip(places, inputs, strict=True):
            if isinstance(value, Tensor):
                place.copy_(value)
            else:
                place.fill_(value)
        graph.replay()


def _move(
    matrices: list[Tensor],
    kept: list[Any],
    group: dict[str, Any],
    grads: Tensor,
    found_inf: Tensor,
    rate: float | Tensor,
    decay: float | Tensor,
) -> None:
    """Updates `matrices` by their `grads`, (n, rows, ..), and `kept`, their moments, unless `found_inf` is 1."""
    moments, well = torch.stack(_own(kept)), 1 - found_inf
    moments.lerp_(torch.where(found_inf > 0, moments, grads), 1 - group["momentum"])
    torch._foreach_copy_(_own(kept), moments.unbind())
    if isinstance(kept[0], DTensor):
        moments = torch.stack([one.full_tensor() for one in kept])
    update = zeropower_via_newtonschulz(
        moments.flatten(2), group["ns_steps"], _COEFFICIENTS[group["ns_coefficients"]], eps=group["eps"]
    )
    # Contiguous, or else torch adds them to the weights one by one.
    update = (update.to(moments.dtype) * (-rate * well)).contiguous().view_as(moments)
    torch._foreach_mul_(_own(matrices), 1 - decay * well)
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
