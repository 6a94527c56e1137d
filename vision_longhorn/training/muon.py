"""Muon (Jordan et al., 2024), with many matrices in one update."""

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from timm.optim.muon import _COEFFICIENTS, _is_suitable_for_muon, get_lr_scale, zeropower_via_newtonschulz
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

_PADDED = 1.3  # how many numbers a batch of matrices may have for each of theirs


class _Alike(NamedTuple):
    """Matrices of one shape, their moments, and the group of parameters that they are in."""

    matrices: list[Any]
    moments: list[Any]
    group: dict[str, Any]


class Muon(torch.optim.AdamW):
    """Computes what timm's Muon does: orthogonal updates of matrices, and AdamW for all else.

    timm updates matrices one by one. The small model has 52, with 15 small products each, which on an H100 take longer
    than all else in a step. Here they make two batches, and AdamW is torch's fused one. Both can skip an update on the
    device, for which the host need not wait. If matrices are sharded (fsdp), each process makes the whole update and
    keeps its part.

    Args:
        like: timm's "muon", new, with any rates, weight decay and betas, and otherwise as timm makes it. Groups are
            taken from it, and either loads what the other saved.
        cuda_graphs: On a GPU, replay the matrices' update as a CUDA graph, with the same bits. It has some 150 small
            kernels, which the host could not launch as fast as the GPU runs them.
    """

    def __init__(self, like: torch.optim.Optimizer, cuda_graphs: bool = False) -> None:
        super().__init__(like.param_groups, fused=True)
        self.cuda_graphs = cuda_graphs
        self._graphs: dict[Any, Any] = {}  # at most one, by where matrices and moments lie

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Loads a state. Matrices have no count of steps, but torch's AdamW looks for one everywhere."""
        for one in state["state"].values():
            one.setdefault("step", torch.zeros(()))
        super().__setstate__(state)
        for one in self.state.values():
            if "momentum_buffer" in one:
                del one["step"]
        self._graphs = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates the weights, unless `found_inf`, () float32, which `TrainStep` sets, is 1."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        taken: dict[Tensor, Any] = {}
        batches = []
        for group in self.param_groups:
            alike = defaultdict(list)
            for one in group["params"]:
                if one.grad is not None and _is_suitable_for_muon(one):
                    alike[one.shape].append(one)
                    taken[one] = one.grad
                    if not self.state[one]:
                        self.state[one]["momentum_buffer"] = torch.zeros_like(one)
            for matrices in alike.values():
                batches.append(_Alike(matrices, [self.state[one]["momentum_buffer"] for one in matrices], group))
        if batches:
            self._update(batches)
        for one in taken:
            one.grad = None  # AdamW leaves it alone then
        super().step()
        for one, grad in taken.items():
            one.grad = grad
        return loss

    def _update(self, batches: list[_Alike]) -> None:
        grads = [torch.stack(_own([one.grad for one in batch.matrices])) for batch in batches]  # (n, rows, ..) each
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            found_inf = grads[0].new_zeros(())
        inputs = [found_inf, *(found_inf.new_full((), batch.group["lr"]) for batch in batches), *grads]
        if not self.cuda_graphs or not found_inf.is_cuda or isinstance(batches[0].matrices[0], DTensor):
            _move(batches, inputs)
            return
        places = [one.data_ptr() for batch in batches for one in (*batch.matrices, *batch.moments)]
        key = *places, *(batch.group["momentum"] for batch in batches)
        if key not in self._graphs:
            _move(batches, inputs)  # which loads the kernels, as a capture could not
            self._graphs = {key: None}
            return
        if not self._graphs[key]:
            copies = [torch.empty_like(value) for value in inputs]
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as the loader's, may use the GPU meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                _move(batches, copies)
            self._graphs[key] = graph, copies
        graph, copies = self._graphs[key]
        torch._foreach_copy_(copies, inputs)
        graph.replay()


def _move(batches: list[_Alike], inputs: list[Tensor]) -> None:
    """Updates the matrices, unless `found_inf` is 1. `inputs` are that, a learning rate for each batch, and its
    gradients. What has more axes than two counts as a matrix of its first and all others."""
    found_inf, rates, grads = inputs[0], inputs[1 : len(batches) + 1], inputs[len(batches) + 1 :]
    well, directions = 1 - found_inf, []
    for (_, kept, group), grad in zip(batches, grads, strict=True):
        moments = torch.stack(_own(kept))
        moments.lerp_(torch.where(found_inf > 0, moments, grad), 1 - group["momentum"])
        torch._foreach_copy_(_own(kept), moments.unbind())
        if isinstance(kept[0], DTensor):
            moments = torch.stack([one.full_tensor() for one in kept])
        directions.append(moments.flatten(2).bfloat16())
    for (matrices, _, group), rate, update in zip(
        batches, rates, _orthogonal(directions, batches[0].group), strict=True
    ):
        scale = get_lr_scale(update.shape, group["adjust_lr_fn"])
        # Contiguous, or else torch adds them to the weights one by one.
        update = (update.to(matrices[0].dtype) * (-scale * rate * well)).contiguous().view(-1, *matrices[0].shape)
        torch._foreach_mul_(_own(matrices), 1 - group["weight_decay"] * rate * well)
        torch._foreach_add_(_own(matrices), [_part(*pair) for pair in zip(update, matrices, strict=True)])


def _orthogonal(stacks: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """Makes matrices orthogonal, in stacks of (n, rows, columns) bfloat16. Stacks of similar shapes are one batch, for
    small products take a GPU longer to begin than to make. Zeros around a matrix change nothing."""
    batches: list[tuple[list[int], int, int, int]] = []  # indices of stacks; numbers in them; rows and columns
    for i in sorted(range(len(stacks)), key=lambda i: -stacks[i][0].numel()):
        low, high = sorted(stacks[i].shape[1:])
        for at, (members, numbers, rows, columns) in enumerate(batches):
            count = sum(len(stacks[j]) for j in (*members, i))
            joined = [*members, i], numbers + stacks[i].numel(), max(rows, low), max(columns, high)
            if count * joined[2] * joined[3] <= _PADDED * joined[1]:
                batches[at] = joined
                break
        else:
            batches.append(([i], stacks[i].numel(), low, high))
    found = dict[int, Tensor]()
    for members, _, rows, columns in batches:
        batch = stacks[0].new_zeros(sum(len(stacks[i]) for i in members), rows, columns)
        parts = batch.split([len(stacks[i]) for i in members])
        coefficients = _COEFFICIENTS[group["ns_coefficients"]]
        for i, part in zip(members, parts, strict=True):
            lying = stacks[i] if stacks[i].shape[1] <= stacks[i].shape[2] else stacks[i].mT  # no higher than wide
            part[:, : lying.shape[1], : lying.shape[2]] = lying
        batch = zeropower_via_newtonschulz(batch, group["ns_steps"], coefficients, eps=group["eps"])
        for i, part in zip(members, batch.split([len(stacks[i]) for i in members]), strict=True):
            _, high, wide = stacks[i].shape
            found[i] = part[:, :high, :wide] if high <= wide else part[:, :wide, :high].mT
    return [found[i] for i in range(len(stacks))]


def _own(values: list[Any]) -> list[Tensor]:
    """Returns this process's parts of `values`, which share their memory."""
    return [value.to_local() if isinstance(value, DTensor) else value for value in values]


def _part(value: Tensor, like: Tensor) -> Tensor:
    """Returns this process's part of a `value` that all have, if it is sharded as `like`."""
    if not isinstance(like, DTensor):
        return value
    whole = DTensor.from_local(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements).to_local()
