"""Everything between the two projections of a block, as one operator: short convolution, step sizes, keys and queries,
the scan in one or both directions, gate and mean (or norms, or a gated skip, or no gate, or values of their own).

It is one operator so that little is kept for the backward pass: the input xz, the step sizes at their low rank with
keys and queries (on a Hopper GPU also at unit length), and, where norms follow the scan, their input. The rest costs
less to compute again than to keep.
With `save_states` the states are kept, and also the convolved x and, for rules that decay, the step sizes, which take
much less memory than their states.
"""

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from . import ops
from .backends import Backend
from .backends.torch.rope import Turned, turn
from .backends.torch.unit import Raw, unit
from .checks import check
from .contract import Scan, ceil_div, check_option, wide
from .dispatch import backend_for
from .operators import arguments, define, define_gradients
from .rules import get_rule

GATES = ("output", "skip", "none", "value")


class Mix(NamedTuple):
    """Inputs of one mixing. With S = 2 each direction has its own parameters, and the gated outputs are averaged. With
    S = 1 and `norm_weight` both directions share them, and the outputs are combined as in `backends.torch.norm`. With
    S = 1 and no norms there is one direction, the forward one unless `reversed`.

    With `rows` the tokens are patches, row by row. A `conv_weight` of four axes then is that of one convolution over
    their grid (`backends.torch.grid_conv`), in the place of the causal ones: all directions scan what it gives.

    The gate multiplies the whole output, S q + D x, or with gate "skip" only D x (`backends.torch.skip`). With gate
    "none" there is none, and xz is x alone. With gate "value" there is none either: the scans run over silu(z), and the
    convolved x gives only their steps, keys and queries (`backends.torch.values`)."""

    # fmt: off
    xz: Tensor                     # (B, L, 2 D): what is convolved, and z; (B, L, D) where there is no z
    conv_weight: Tensor            # (S, D, K), the last tap meets the present token; over the grid (1, D, K, K)
    conv_bias: Tensor              # (S, D); over the grid (1, D)
    x_proj: Tensor                 # (S, R + 2 N, D): step size at rank R, key, query; or R + 3 N, with A
    dt_proj: Tensor                # (S, H, R), with H = D, 1 or N logits of a token
    dt_bias: Tensor                # (S, H)
    A_log: Optional[Tensor]        # (S, D, N) for Mamba, A = -exp(A_log); or (S, N), added to the token's part
    D: Tensor                      # (S, D) skip weight
    norm_weight: Optional[Tensor]  # (2, D)
    rule: str                      # one of `rules.NAMES`
    eps: float                     # of the norms
    reversed: bool = False         # convolve and scan from the last token to the first
    qk_norm: bool = False          # keys and queries have unit length (`backends.torch.unit`)
    rows: int = 0                  # of the grid of patches, where something uses it
    rope: bool = False             # keys and queries are turned by their place in the grid (`backends.torch.rope`)
    gate: str = "output"           # one of GATES
    # fmt: on

    @property
    def gates_skip(self) -> bool:
        """Whether the scans leave skip and gate to `backends.torch.skip`."""
        return self.gate == "skip"

    @property
    def own_values(self) -> bool:
        """Whether the scans are over silu(z), and not over the convolved x."""
        return self.gate == "value"

    def split(self, xz: Tensor) -> tuple[Tensor, Any]:
        """Return the parts of x and of z in `xz`, or in its gradient: views (B, L, D). With gate "none" z is None."""
        return (xz, None) if self.gate == "none" else xz.chunk(2, -1)  # type: ignore[return-value]

    def skip_weight(self, x: Tensor) -> Tensor:
        """Return what multiplies each convolved x (S or 1, B, L, D) in the mean over the directions: (S or 1, D)."""
        S, D = self.D.shape
        return self.D.to(wide(x)).view(len(x), S // len(x), D).sum(1) / S

    @property
    def shared(self) -> bool:
        return self.norm_weight is not None

    def kept_shape(self, save_states: bool) -> tuple[int, ...]:
        """Return the shape in which the convolved x is kept, and behind it the step sizes of a rule that decays, if
        each channel has its own; (0,) if nothing is kept. With norms, their input is kept instead."""
        if not save_states or self.shared:
            return (0,)
        (S, steps, _), (B, L, _), D = self.dt_proj.shape, self.xz.shape, self.D.shape[-1]
        with_steps = steps == D and get_rule(self.rule).kind == "decay"
        return len(self.conv_weight) + (S if with_steps else 0), B, L, D

    def parts(self, kept: Tensor) -> list[Tensor]:
        """Split `kept`, which has the shape `kept_shape`, into [convolved x, step sizes], or [convolved x] if no step
        sizes are kept; [] if nothing is."""
        if kept.ndim != 4 or self.shared:
            return []
        return [part for part in kept.tensor_split([len(self.conv_weight)]) if len(part)]

    @property
    def over_grid(self) -> bool:
        """Whether the convolution is over the grid."""
        return self.conv_weight.ndim == 4

    @property
    def d_state(self) -> int:
        return (self.x_proj.shape[1] - self.dt_proj.shape[2]) // (3 if self.A_per_token else 2)

    @property
    def turned(self) -> Optional[Turned]:
        """Where `low` and its gradient have the keys and queries, if these are turned."""
        return Turned(self.xz.shape[1], self.rows, self.width, self.d_state) if self.rope else None

    @property
    def A_per_token(self) -> bool:
        return self.A_log is not None and self.A_log.ndim == 2

    @property
    def width(self) -> int:
        """Columns of the low-rank step size: R and columns of zeros, so that matrix products load whole vectors."""
        return ceil_div(self.dt_proj.shape[2], 8) * 8

    @property
    def low_width(self) -> int:
        """Columns of the product with x_proj."""
        return self.width + self.x_proj.shape[1] - self.dt_proj.shape[2]

    def units(self, backend: Backend) -> int:
        """Return how many columns of unit keys, and of unit queries, follow the product with x_proj: N, or 0 where the
        backend does not store them there, and the scan makes them anew."""
        if not self.qk_norm or self.A_per_token:
            return 0
        appends = backend.appends_units(self.xz, self.D.shape[-1], self.low_width, self.turned)
        return self.d_state if appends else 0

    def low_columns(self, backend: Backend) -> int:
        """Return how many columns `low` has: `low_width`, and perhaps those of unit keys and queries."""
        return self.low_width + 2 * self.units(backend)

    def raw(self, low: Tensor) -> Optional[Raw]:
        """Return keys and queries as they are before they get unit length, in the shapes that `scan` gives them."""
        if not self.qk_norm:
            return None
        low = low[0] if len(low) == 1 else low
        k, q = low[..., self.width : self.width + 2 * self.d_state].chunk(2, -1)
        return Raw(k, q, self.turned)

    def scan(self, x: Tensor, step: Tensor, low: Tensor, step_proj: Optional[Tensor] = None) -> Scan:
        """Make the scan over the convolved x or the values, (S or 1, B, L, D), with step (S, B, L, H) and low
        (S, B, L, `low_columns`). `step` may be at low rank, (S, B, L, width), with its projection (S, D, width)."""
        k, q, *a = low[..., self.width : self.low_width].chunk(3 if self.A_per_token else 2, -1)  # (S, B, L, N)
        A = _rates(self.A_log, *a)
        has_units = low.shape[-1] > self.low_width
        if has_units:
            k, q = low[..., self.low_width :].chunk(2, -1)
        D: Optional[Tensor] = self.D
        _, z = self.split(self.xz)
        if self.gates_skip:
            D = None
        if self.gates_skip or self.own_values:
            z = None
        bias = self.dt_bias
        direction, combine = "both", "mean"
        x = x.expand(len(low), *x.shape[1:])  # each set gets its own gradient, which the backward pass sums
        if len(low) == 1:
            x, step, k, q, bias = x[0], step[0], k[0], q[0], bias[0]
            D = None if D is None else D[0]
            A = None if A is None else A[0]
            step_proj = None if step_proj is None else step_proj[0]
            direction, combine = "backward" if self.reversed else "forward", "none"
            if self.shared:
                direction, z = "both", None
        return Scan(
            x, step, k, q, A, z, D, bias, None, self.rule, direction, combine, A_per_token=self.A_per_token,
            step_proj=step_proj, qk_norm=self.qk_norm and not has_units)  # fmt: skip


TENSORS = Mix._fields[:9]
FIELDS = Mix._fields[:11]  # programs call the operator with arguments in this order


def prepare(mix: Mix) -> Mix:
    """Check the shapes of `mix`, and make its tensors contiguous. (`check` looks at the inputs of the scan.)"""
    check_option("gate", mix.gate, GATES)
    S, D = (1 if mix.shared else min(2, len(mix.x_proj))), mix.D.shape[-1]
    _, steps, R = mix.dt_proj.shape
    uses_grid, L, K = mix.over_grid or mix.rope, mix.xz.shape[1], mix.conv_weight.shape[-1]
    if bool(mix.rows > 0) != uses_grid or (uses_grid and L % mix.rows):
        raise ValueError(
            f"rows={mix.rows} with {L} tokens, conv_weight {tuple(mix.conv_weight.shape)} and rope={mix.rope}: with "
            "rope or a convolution over the grid of patches, (1, D, K, K), give the number of the grid's rows, which "
            "divides that of the tokens; else 0"
        )
    odd = K // 2 * 2 + 1
    taps = (1, D, odd, odd) if mix.over_grid else (S, D, K)
    right = {"conv_weight": taps, "conv_bias": taps[:2], "norm_weight": (2, D),
             "x_proj": (S, mix.x_proj.shape[1], D), "dt_proj": (S, steps, R), "dt_bias": (S, steps), "D": (S, D),
             "xz": (*mix.xz.shape[:2], D if mix.gate == "none" else 2 * D)}  # fmt: skip
    for name, shape in right.items():
        value = getattr(mix, name)
        if value is not None and (value.ndim != len(shape) or tuple(value.shape) != shape):
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; with {D} channels and a set of parameters for "
                f"{'both directions' if S == 1 else 'each direction'} it must be {shape}"
            )
    if mix.gate != "output" and mix.shared:
        raise ValueError(
            f"gate={mix.gate!r} with norms of the scans' outputs, which the gate follows: use gate='output'"
        )
    if mix.rope and mix.d_state % 4:
        raise ValueError(f"rope=True with d_state={mix.d_state}: give a multiple of 4, since points of two axes turn")
    if mix.reversed and (mix.shared or S == 2):
        raise ValueError("reversed=True is for one direction alone: leave it out with two sets of parameters or norms")
    given: tuple[Any, ...] = mix[1 : len(TENSORS)]
    parameters: list[Any] = [None if value is None else value.contiguous() for value in given]
    xz = mix.xz if mix.xz.stride(-1) == 1 else mix.xz.contiguous()
    return Mix(xz, *parameters, *mix[len(TENSORS) :])


# At this rate a token forgets everything. From 89 on A would be infinite in float32, and its gradient not a number.
_MAX_LOG_RATE = 60.0


def _rates(A_log: Optional[Tensor], a: Optional[Tensor] = None) -> Optional[Tensor]:
    """Return A in the dtype of sums: (S, D, N) from A_log alone, (S, B, L, N) with each token's part `a`."""
    if A_log is None:
        return None
    if a is None:
        return -torch.exp(A_log.to(wide(A_log)))
    return -torch.exp((A_log.to(wide(a))[:, None, None] + a).clamp(max=_MAX_LOG_RATE))


def scan_inputs(
    x: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    A_log: Optional[Tensor],
    qk_norm: bool = False,
    rope_rows: int = 0,
) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    """Return the logits with their bias (S, B, L, H), the keys (S, B, L, N) and A, in the dtype of the convolved x
    (S, B, L, D). Parameters are as in `Mix`, and `rope_rows` are its rows if it has rope."""
    R = dt_proj.shape[2]
    low = x @ x_proj.to(x.dtype).transpose(1, 2)[:, None]  # (S, B, L, R + 2 N or 3 N)
    step = low[..., :R] @ dt_proj.to(x.dtype).transpose(1, 2)[:, None] + dt_bias.to(x.dtype)[:, None, None]
    k, _, *a = low[..., R:].chunk(2 if A_log is None or A_log.ndim == 3 else 3, -1)
    if rope_rows:
        k = turn(k, rope_rows)
    return step, unit(k) if qk_norm else k, _rates(A_log, *a)


def _rows(value: Tensor) -> Tensor:
    """Flatten (S, B, L, n) to (S, B L, n)."""
    return value.flatten(1, 2)


def _convolve(mix: Mix, x: Tensor, backend: Backend, *out: Tensor) -> Tensor:
    """Return the convolved x, (S, B, L, D), or (1, B, L, D) over the grid; in `out` if given."""
    if mix.over_grid:
        return backend.grid_conv_forward(x, mix.conv_weight, mix.conv_bias, mix.rows, *out)
    return backend.conv_forward(x, mix.conv_weight, mix.conv_bias, mix.reversed, *out)


def _scanned(mix: Mix, x: Tensor, backend: Backend) -> Tensor:
    """Return what the scans are over, (S or 1, B, L, D): the convolved x or the values."""
    return backend.values_forward(mix.split(mix.xz)[1])[None] if mix.own_values else x


def _scan(mix: Mix, x: Tensor, low: Tensor, dt_proj: Tensor, backend: Backend, out: Optional[Tensor] = None) -> Scan:
    """Make the scan over x, which is what `_scanned` gives. Compute its step sizes, in `out` if given, unless the
    backend takes them at low rank."""
    # Rules with A cannot use low-rank logits; test that first, or the decay rates are computed twice.
    if out is None and mix.A_log is None and dt_proj.shape[1] == x.shape[-1] > 1:
        scan = mix.scan(x, low[..., : mix.width], low, dt_proj)
        if backend.takes_projection(scan):
            return scan
    step = low.new_empty(*low.shape[:3], dt_proj.shape[1]) if out is None else out
    torch.bmm(_rows(low)[..., : mix.width], dt_proj.transpose(1, 2), out=_rows(step))
    return mix.scan(x, step, low)


def forward(mix: Mix, save_states: bool, backend: Backend) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y (B, L, D), low (S, B, L, `low_columns`), what the scan saved, and what else is kept: the scan's outputs
    (2, B, L, D) if norms follow, or the convolved x and the step sizes (`Mix.kept_shape`), or nothing."""
    mix = prepare(mix)
    x, z = mix.split(mix.xz)
    B, L, _ = x.shape
    kept = x.new_empty(mix.kept_shape(save_states))
    places = mix.parts(kept)
    x = _convolve(mix, x, backend, *places[:1])
    x_proj, dt_proj = backend.pad(mix.x_proj, mix.dt_proj, mix.width, x.dtype)
    low = backend.x_proj_forward(_rows(x), x_proj, mix.turned, mix.units(backend)).unflatten(1, (B, L))
    scan = _scan(mix, _scanned(mix, x, backend), low, dt_proj, backend, *places[1:])
    check(scan)
    y, _, saved = ops.forward(scan, save_states, backend)
    if mix.gates_skip:
        backend.skip_forward(y, x, z, mix.skip_weight(x))
    if mix.norm_weight is None:
        return y, low, saved, kept
    return backend.norm_forward(y, z, mix.norm_weight, mix.eps), low, saved, y


def backward(mix: Mix, dy: Tensor, low: Tensor, saved: Tensor, kept: Tensor, backend: Backend) -> dict[str, Tensor]:
    """Return the gradient of each tensor of `mix`, from that of y and what `forward` returned."""
    mix = prepare(mix)
    x, z = mix.split(mix.xz)
    dxz = mix.xz.new_empty(mix.xz.shape)
    dx, dz = mix.split(dxz)
    grads = {"xz": dxz}
    x_proj, dt_proj = backend.pad(mix.x_proj, mix.dt_proj, mix.width, x.dtype)
    convolved, step = (*mix.parts(kept), None, None)[:2]
    if convolved is None:
        convolved = _convolve(mix, x, backend)
    scanned = _scanned(mix, convolved, backend)
    scan = _scan(mix, scanned, low, dt_proj, backend) if step is None else mix.scan(scanned, step, low)
    if mix.norm_weight is not None:
        dy, grads["norm_weight"] = backend.norm_backward(dy, kept, z, mix.norm_weight, mix.eps, dz)
    # Side by side as in `low`: step sizes at their low rank, k, q, and perhaps A.
    dlow = low.new_empty(*low.shape[:3], mix.low_width)  # contiguous, as the backend takes it
    dk, dq, *of_A = dlow[..., mix.width :].chunk(3 if mix.A_per_token else 2, -1)
    found = ops.backward(scan, dy, None, saved, backend, dz, (dk, dq), mix.raw(low))
    if len(mix.x_proj) == 1:
        found = {name: value.unsqueeze(0) for name, value in found.items()}
    if mix.A_per_token:
        da = found["A"] * scan.A  # type: ignore[operator]
        of_A[0].copy_(da)
        grads["A_log"] = da.sum((1, 2))
    elif mix.A_log is not None:
        grads["A_log"] = found["A"] * (-torch.exp(mix.A_log.to(wide(x))))
    if mix.turned and not mix.qk_norm:
        backend.rotate(mix.turned.of(_rows(dlow)), mix.rows, back=True)
    # First dt_proj_backward fills its columns of dlow, then x_proj_backward reads all of them and adds to dconvolved.
    ddt_proj = backend.dt_proj_backward(_rows(found["step"]), _rows(low), dt_proj, _rows(dlow))
    if mix.gates_skip:
        n = len(convolved)
        dweight = backend.skip_backward(dy, convolved, z, mix.skip_weight(convolved), found["x"][:n], dz)
        found["D"] = dweight.repeat_interleave(len(mix.D) // n, 0) / len(mix.D)
    if mix.own_values:
        backend.values_backward(found["x"], z, dz)
        dconvolved = _rows(torch.empty_like(convolved))
    else:
        dconvolved = _rows(found["x"])
    dx_proj = backend.x_proj_backward(_rows(dlow), _rows(convolved), x_proj, dconvolved, not mix.own_values)
    grads["x_proj"], grads["dt_proj"] = backend.unpad(dx_proj, ddt_proj, mix.x_proj, mix.dt_proj)
    given = dconvolved[: len(convolved)].view_as(convolved), x, mix.conv_weight, mix.conv_bias, dx
    grads["conv_weight"], grads["conv_bias"] = (
        backend.grid_conv_backward(*given, mix.rows) if mix.over_grid else backend.conv_backward(*given, mix.reversed)
    )
    return grads | {"D": found["D"], "dt_bias": found["bias"]}


def _mix(*values: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `forward`. The first result is y, (B, L, D) in the dtype of xz; the others are for the backward pass."""
    fields, (save_states, backend, *later) = values[: len(FIELDS)], values[len(FIELDS) :]
    mix = Mix(*fields, *later)
    return forward(mix, save_states, backend_for(backend, mix.xz))


def _mix_shapes(*values: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    fields, (save_states, backend, *later) = values[: len(FIELDS)], values[len(FIELDS) :]
    mix = prepare(Mix(*fields, *later))
    empty = mix.xz.new_empty
    (S, _, D), (B, L, _) = mix.x_proj.shape, mix.xz.shape
    chosen = backend_for(backend, mix.xz)
    low = empty(S, B, L, mix.low_columns(chosen))
    scan = mix.scan(empty(S, B, L, D), empty(S, B, L, mix.dt_proj.shape[1]), low)
    check(scan)
    saved = chosen.saved_shape(scan) if save_states else (0,)
    kept = (2, B, L, D) if mix.shared else mix.kept_shape(save_states)
    return empty(B, L, D), low, empty(saved, dtype=scan.accumulator), empty(kept)


def _mix_backward(dy: Tensor, low: Tensor, saved: Tensor, kept: Tensor, *values: Any) -> tuple[Tensor, ...]:
    """Return the gradient of each of TENSORS, empty where the tensor is absent."""
    fields, (backend, *later) = values[: len(FIELDS)], values[len(FIELDS) :]
    mix = Mix(*fields, *later)
    grads = backward(mix, dy.contiguous(), low, saved, kept, backend_for(backend, mix.xz))
    return tuple(
        mix.xz.new_empty(0) if value is None else grads[name].to(value.dtype).contiguous()
        for name, value in zip(TENSORS, values)
    )


_ARGUMENTS = arguments(Mix, FIELDS)
# Programs of older versions do not give these.
_LATER = "bool reversed=False, bool qk_norm=False, SymInt rows=0, bool rope=False, str gate='output'"
_operator = define("mix", f"{_ARGUMENTS}, bool save_states, str backend, {_LATER}", 4, _mix, _mix_shapes)
define_gradients("mix", _operator, "Tensor dy, Tensor low, Tensor saved, Tensor kept, "
                 f"{_ARGUMENTS}, str backend, {_LATER}", 1, len(TENSORS), _mix_backward)  # fmt: skip
