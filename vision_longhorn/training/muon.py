"""Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon), with many matrices in one update."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from timm.optim.muon import _COEFFICIENTS, _is_suitable_for_muon, get_lr_scale, zeropower_via_newtonschulz
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

_PADDED = 1.3  # numbers that a padded batch may have for each number of its matrices


class _Alike(NamedTuple):
    """Matrices of one shape, their moments, and the group of parameters that they are in."""

    matrices: list[Any]
    moments: list[Any]
    group: dict[str, Any]

    @property
    def grads(self) -> list[Any]:
        return [one.grad for one in self.matrices]


class Muon(torch.optim.AdamW):
    """Computes what timm's Muon does: orthogonal updates of matrices, and AdamW for all else.

    timm updates matrices one by one. The small model has 52, with 15 small products each, which on an H100 take longer
    than all else in a step. Here they are updated in three batches, and AdamW is torch's fused one. Both can skip an
    update on the device, for which the host need not wait. If matrices are sharded (fsdp), each process makes the whole
    update and keeps its part.

    Args:
        like: a new "muon" of timm, with any learning rate, weight decay and betas, and timm's defaults otherwise. Its
            parameter groups are used. State dicts of timm's Muon and of this class are interchangeable.
        cuda_graphs: On a GPU, replay the matrices' update as a CUDA graph, with the same bits. The host could not
            launch its small kernels as fast as the GPU runs them. The graph keeps some 12 bytes for each number.
    """

    cuda_graphs = False  # the default of copied and unpickled optimisers, for which torch does not call __init__

    def __init__(self, like: torch.optim.Optimizer, cuda_graphs: bool = False) -> None:
        super().__init__(like.param_groups, fused=True)
        self.defaults |= like.defaults  # for groups that are added
        self.cuda_graphs = cuda_graphs
        self._graph: Any = None  # (values that the graph fixes, (graph, inputs, gradients) or None before the capture)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Loads a state. Matrices have no count of steps, but torch's AdamW looks for one everywhere."""
        for one in state["state"].values():
            one.setdefault("step", torch.zeros(()))
        super().__setstate__(state)
        for one in self.state.values():
            if "momentum_buffer" in one:
                del one["step"]
        self._graph = None

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
        like = batches[0].matrices[0]
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            found_inf = torch.zeros((), device=like.device)
        rates = [found_inf.new_full((), batch.group["lr"]) for batch in batches]
        if not self.cuda_graphs or not like.is_cuda or isinstance(like, DTensor):
            _move(batches, found_inf, rates, (_stack(batch.grads) for batch in batches))
            return
        places = [one.data_ptr() for batch in batches for one in (*batch.matrices, *batch.moments)]
        fixed = *places, *(batch.group[name] for batch in batches for name in ("momentum", "weight_decay"))
        if not self._graph or self._graph[0] != fixed:
            _move(batches, found_inf, rates, (_stack(batch.grads) for batch in batches))  # loads the kernels
            self._graph = fixed, None
            return
        if not self._graph[1]:
            grads = [_stack(batch.grads) for batch in batches]
            inputs, graph = [found_inf.clone(), *(rate.clone() for rate in rates)], torch.cuda.CUDAGraph()
            # Other threads, such as the loader's, may use the GPU meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                _move(batches, inputs[0], inputs[1:], grads)
            self._graph = fixed, (graph, inputs, grads)
        graph, inputs, grads = self._graph[1]
        torch._foreach_copy_(inputs, [found_inf, *rates])
        for batch, place in zip(batches, grads, strict=True):
            torch.stack(batch.grads, out=place)
        graph.replay()


def _move(batches: list[_Alike], found_inf: Tensor, rates: list[Tensor], grads: Iterable[Tensor]) -> None:
    """Updates the matrices by a learning rate and the gradients, (n, rows, ..), of each batch, unless `found_inf` is 1.
    The first axis of a parameter counts as rows, all others together as columns."""
    well, directions = 1 - found_inf, []
    for (_, kept, group), grad in zip(batches, grads, strict=True):
        moments = _stack(kept)
        moments.lerp_(torch.where(found_inf > 0, moments, grad), 1 - group["momentum"])
        torch._foreach_copy_(_own(kept), moments.unbind())
        if isinstance(kept[0], DTensor):
            moments = torch.stack([one.full_tensor() for one in kept])
        directions.append(moments.flatten(2).bfloat16())
    updates = _orthogonal(directions, batches[0].group)
    for (matrices, _, group), rate, update in zip(batches, rates, updates, strict=True):
        scale = get_lr_scale(update.shape, group["adjust_lr_fn"])
        # torch would add updates that are not contiguous to the weights one by one. A copy is cheaper before the cast.
        update = update.contiguous().view(-1, *matrices[0].shape).to(matrices[0].dtype) * (-scale * rate * well)
        torch._foreach_mul_(_own(matrices), 1 - group["weight_decay"] * rate * well)
        torch._foreach_add_(_own(matrices), [_part(*pair) for pair in zip(update, matrices, strict=True)])


def _orthogonal(stacks: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """Makes matrices orthogonal, in stacks of (n, rows, columns) bfloat16. A GPU takes longer to start small products
    than to compute them. So a stack joins a batch of larger matrices, with zeros around its own, which change nothing.
    """
    sides = [sorted(stack.shape[1:]) for stack in stacks]
    batches: list[list[int]] = []  # indices of stacks, the one that the others fit in first
    for i in sorted(range(len(stacks)), key=lambda i: -stacks[i].numel()):
        for members in batches:
            low, high = sides[members[0]]
            numbers = sum(stacks[j].numel() for j in (*members, i))
            padded = sum(len(stacks[j]) for j in (*members, i)) * low * high
            if sides[i][0] <= low and sides[i][1] <= high and padded <= _PADDED * numbers:
                members.append(i)
                break
        else:
            batches.append([i])
    coefficients, found = _COEFFICIENTS[group["ns_coefficients"]], dict[int, Tensor]()
    for members in batches:
        sizes = [len(stacks[i]) for i in members]
        batch = stacks[0].new_zeros(sum(sizes), *sides[members[0]])
        for i, part in zip(members, batch.split(sizes), strict=True):
            lying = stacks[i] if stacks[i].shape[1] <= stacks[i].shape[2] else stacks[i].mT
            part[:, : lying.shape[1], : lying.shape[2]] = lying
        batch = zeropower_via_newtonschulz(batch, group["ns_steps"], coefficients, eps=group["eps"])
        for i, part in zip(members, batch.split(sizes), strict=True):
            _, rows, columns = stacks[i].shape
            found[i] = part[:, :rows, :columns] if rows <= columns else part[:, :columns, :rows].mT
    return [found[i] for i in range(len(stacks))]


def _stack(values: list[Any]) -> Tensor:
    """Stacks this process's parts of `values`."""
    return torch.stack(_own(values))


def _own(values: list[Any]) -> list[Tensor]:
    """Returns this process's parts of `values`, which share their memory."""
    return [value.to_local() if isinstance(value, DTensor) else value for value in values]


def _part(value: Tensor, like: Tensor) -> Tensor:
    """Returns this process's part of a `value` that all have, if it is sharded as `like`."""
    if not isinstance(like, DTensor):
        return value
    whole = DTensor.from_local(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements).to_local()
