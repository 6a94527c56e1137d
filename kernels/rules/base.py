"""What an update rule is, and what the rules share."""

from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..contract import Scan

HAS_TRITON = find_spec("triton") is not None


class Sizes(NamedTuple):
    """Step sizes and what else a rule computes from the logits, for all tokens of a span at once."""

    # fmt: off
    eps: Tensor       # (T, b, D) or what broadcasts to it: the factor of what is written
    e: Any = None     # (T, b, D): for the rule's own use
    # fmt: on


class Functions:
    """A rule's Triton functions and flags, handed to the kernels as one constexpr.

    States are tuples of NI tensors (NS, BC), values of a channel are (1, BC); `form` is a `walk.Form`. Every rule has

    - `scaled_bias(bias)`: the bias as `step_size` takes it.
    - `step_size(u, bias, norm, keep, form)`: eps and e from the logit u. Beyond the end, a token has to
      leave the state as it is: eps 0 and, for kind "decay", a decay of 1; there `keep`
      is 0 and `norm`, ||k||^2 where the rule `takes_norm`, is infinite.
    - `advance(S, x, k, A, eps, e)`: the new state, and w, which is written along k.
    - `step_back(now, before, x, w, k, A, eps, e, form)`: from the adjoint `now` of the state after the token, its
      read-out included: the adjoint of the state before, the gradients of x (without the skip), of eps or its log
      (dlog), of k, and of A (an empty tuple where the walk takes none).
    - `logit_back(dlog, u, bias, eps, e, inside, form)`: the gradient of the logit.

    A rule that `takes_norm` also has, for more than one state,

    - `through_norm(dlog, eps)`: the factor whose product with k, summed over the channels, is added to k's gradient;
      half of it where the rule `halves_key_sums`.

    A rule of kind "decay" also has

    - `decay(k, A, eps, e, LONE)`: the transition of one state; LONE: the channel has no other.
    - `start_total(form)`, `summarize(S, total, x, k, A, eps, e, form)`, `end_total(total, A, form)`: a segment's walk
      and the product of its decays.
    """

    def __init__(self, rule: type["Rule"], **functions: Any):
        self.name = rule.name
        self.undoes, self.takes_norm, self.needs_A = rule.kind == "error", rule.takes_norm, rule.needs_A
        self.has_step, self.halves_key_sums = rule.step_per == "channel", rule.halves_key_sums
        self.all = functions
        self.__dict__.update(functions)

    @property
    def value(self) -> "Functions":
        """This object. Triton 3.3 gives access only to a constexpr's value, so kernels write `RULE.value.advance`."""
        return self

    @property
    def cache_key(self) -> str:
        """The name that compiled kernels have on disk: it changes with the source of any function."""
        return "-".join(function.cache_key for function in self.all.values())

    def __repr__(self) -> str:
        return f"rule {self.name}"


class Rule:
    """One update rule: S_t from S_{t-1} and a token, by one of two kinds of transition:

        decay: S_t = a_t * S_{t-1} + w_t k_t^T,   w_t = eps_t x_t                      (a_t: a number for each state)
        error: S_t = S_{t-1} + w_t k_t^T,         w_t = eps_t (x_t - S_{t-1} k_t)

    Only the first can be cut into segments of time that run side by side. The second is undone, on the way back, by
    subtracting what each token wrote.
    """

    # fmt: off
    name: ClassVar[str]
    kind: ClassVar[str]                       # "decay" or "error"
    step_per: ClassVar[str] = "channel"       # each "channel" (or token) has a logit, or each "state"
    takes_A: ClassVar[bool] = False           # the caller gives A
    needs_A: ClassVar[bool] = False           # the walk takes A (`prepare` may make it)
    takes_norm: ClassVar[bool] = False        # ||k|| enters the step size
    halves_key_sums: ClassVar[bool] = False   # with more than one state `step_back` gives half of k's gradient
    names: ClassVar[dict[str, str]] = {"step": "beta", "bias": "beta_bias"}  # what messages call fields of `Scan`
    tuned_as: ClassVar[Optional[str]] = None  # the rule whose launch choices it takes, if the table has none of its own
    # (multiply-adds, exponentials) for each state of each channel that any walk through time must do
    operations: ClassVar[dict[str, tuple[int, int]]]
    kernels: ClassVar[Functions]              # set where triton is installed
    # fmt: on

    def update(self, state: Tensor, x: Tensor, step: Tensor, k: Tensor, A: Optional[Tensor], softplus: bool) -> Tensor:
        """Compute, by the published formula, the state (B, D, N) after a token, from x (B, D), k (B, N), A (D, N) or
        (B, 1, N), and the logits with their bias, (B, D or 1), or (B, N) if `step_per` is "state". Differentiable."""
        raise NotImplementedError

    def prepare(self, scan: Scan) -> Scan:
        """Change variables before the scan is walked."""
        return scan

    def restore(self, scan: Scan, prepared: Scan, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of the tensors of `scan`, in their shapes and dtypes, from those of `prepared`."""
        return grads

    # In torch, for all tokens of a span at once. `d` is the scan with its tensors as in `backends.torch.scan`.

    def sizes(self, d: Any) -> Sizes:
        """Compute the step sizes from the logits and keys."""
        raise NotImplementedError

    def through_sizes(self, d: Any, s: Sizes, deps: Tensor, dk: Tensor) -> Tensor:
        """Return the gradient of the logits (T, b, D) from that of eps. What reaches k through eps is added to `dk`."""
        raise NotImplementedError

    def decays(self, d: Any, s: Sizes, out: Tensor) -> Tensor:
        """Compute a, (T, b, N, D), into `out`. Only rules of kind "decay" have it."""
        raise NotImplementedError

    def through_decays(
        self, d: Any, s: Sizes, a: Tensor, flow: Tensor, dx: Tensor, deps: Tensor, dk: Tensor
    ) -> Optional[Tensor]:
        """Add to `deps` and `dk` what reaches them through a, and return the gradient of A, if the rule has one:
        (T, b, N) for each token's, else (b, N, D). `flow`, the gradient of a, and `a` may be overwritten."""
        raise NotImplementedError

    def reset_bias(self, bias: Tensor) -> None:
        """Initialise the bias of the logits in place."""
        bias.zero_()

    def maps(self, step: Tensor, k: Tensor, A: Optional[Tensor]) -> Tensor:
        """Compute forgetting and write strength of each token, (2, S, B, L), as `vision_longhorn.maps` defines them,
        from the logits with their bias (S, B, L, C), C = D, 1 or N, keys (S, B, L, N), and A (S, D, N) or
        (S, B, L, N)."""
        found = []
        for s in range(k.shape[0]):
            for b in range(k.shape[1]):  # one image after the other: their states are large
                of_image = None if A is None else A[s] if A.ndim == 3 else A[s, b].unsqueeze(1)
                found.append(self._effect(step[s, b], k[s, b], of_image))
        return torch.stack(found, 1).unflatten(1, k.shape[:2])

    def _effect(self, step: Tensor, k: Tensor, A: Optional[Tensor]) -> Tensor:
        """Compute, as (2, T), how much of a state each of T tokens forgets (along its key if the kind is "error"), and
        how much of its key it adds to an empty state."""
        T, N = k.shape
        D = 1 if self.step_per == "state" else max(step.shape[1], 1 if A is None else A.shape[-2])
        key, energy = k.unsqueeze(1), k.square().sum(-1)
        nothing = k.new_zeros(T, D)
        probe = (key if self.kind == "error" else torch.ones_like(key)).expand(T, D, N)
        kept = self.update(probe, nothing, step, k, A, True)
        added = (self.update(torch.zeros_like(probe), nothing + 1, step, k, A, True) * key).sum(-1).mean(-1) / energy
        if self.kind == "error":
            forgotten = (1 - (kept * key).sum(-1).mean(-1) / energy) / N
        else:
            forgotten = 1 - kept.mean((1, 2))
        return torch.stack([forgotten, added]).nan_to_num()


class UnitKeys(Rule):
    """A rule over k^ = k / ||k||; zero keys stay zero."""

    def prepare(self, scan: Scan) -> Scan:
        return scan._replace(k=unit_or_zero(scan.k.to(scan.accumulator)))

    def restore(self, scan: Scan, prepared: Scan, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        dk = grads["k"]
        across = dk - prepared.k * (prepared.k * dk).sum(-1, keepdim=True)
        return grads | {"k": (across * inverse_norm(scan.k.to(scan.accumulator))).to(scan.k.dtype)}


def unit_or_zero(k: Tensor) -> Tensor:
    """Return k / ||k||, and zeros for a zero key (`inverse_norm`). `backends.torch.unit.unit` adds an eps instead."""
    return k.sign() * (inverse_norm(k) > 0) if k.shape[-1] == 1 else k * inverse_norm(k)


def inverse_norm(k: Tensor) -> Tensor:
    """Return 1 / ||k||, (.., 1), and 0 for a zero key: one whose square is below float32's smallest normal number."""
    energy = k.square().sum(-1, keepdim=True)
    zero = energy < torch.finfo(torch.float32).tiny
    return torch.where(zero, 0.0, energy.masked_fill(zero, 1.0).rsqrt())


def over_channels(field: Tensor, weight: Tensor) -> Tensor:
    """Sum (T, b, N, D) times (T, b, D) over channels: (T, b, N)."""
    return (field @ weight.unsqueeze(-1)).squeeze(-1)


def over_states(weight: Tensor, field: Tensor) -> Tensor:
    """Sum (T, b, N) times (T, b, N, D) over states: (T, b, D)."""
    return (weight.unsqueeze(2) @ field).squeeze(2)


def read_out(state: Tensor, x: Tensor, q: Tensor, z: Optional[Tensor], D: Optional[Tensor]) -> Tensor:
    """Return y (B, D) = (S q + D x) silu(z) of one token."""
    y = (state * q.unsqueeze(1)).sum(-1)
    if D is not None:
        y = y + D * x
    return y if z is None else y * F.silu(z)
