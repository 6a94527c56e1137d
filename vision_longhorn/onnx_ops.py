"""The operators of `vision_longhorn.kernels` in operators of the ONNX standard, for `torch.onnx.export`.

A recurrence is an ONNX `Scan`, so the graph has one size for every number of tokens. Inside, tokens come first, as Scan
takes them, and channels last, so that the products of each step run over long rows. All is computed in float32, and
only what inference needs: y stands in for the results that an operator keeps for its backward pass.
"""

import inspect
from collections.abc import Callable

# Python 3.10 takes the Sequence of collections.abc, with its argument, for a class, and onnxscript fails.
from typing import Any, NamedTuple, Sequence  # noqa: UP035

import torch
from onnxscript import FLOAT, graph, opset18, script
from onnxscript.values import Opset

from vision_longhorn.kernels.contract import Scan
from vision_longhorn.kernels.mixing import FIELDS, Mix
from vision_longhorn.kernels.operators import schema
from vision_longhorn.kernels.ops import FIELDS as SCAN_FIELDS
from vision_longhorn.kernels.rules.gla import TEMPERATURE

OPSET = 18
op: Any = opset18  # its annotations know nothing of the numbers and None that it takes

# The walks through time: from the first state S (B, N, D), k (L, B, N, 1), q (L, B, 1, N) and what else a walk reads
# to y (L, B, 1, D) and the last state. `inputs` and `output` are Scan's directions of what is read of tokens and of y:
# 0, or 1 from the last token to the first. The exporter writes a walk out where it is called.
_function: Any = script(Opset("vision_longhorn", 1), default_opset=op)


@_function
def _walk_diagonal(S, k, q, eps, x, inputs: Sequence[int], output: Sequence[int]) -> tuple[FLOAT, FLOAT]:
    """S + eps (x - k S) k, with eps and x (L, B, 1, D)."""

    @graph()
    def step(S_0, k_t, q_t, eps_t, x_t):
        S_t = S_0 + eps_t * (x_t - k_t * S_0) * k_t
        y_t = op.MatMul(q_t, S_t)
        return S_t, y_t

    last, y = op.Scan(
        S, k, q, eps, x, body=step, num_scan_inputs=4, scan_input_directions=inputs, scan_output_directions=output
    )
    return y, last


@_function
def _walk_error(S, k, q, eps, x, inputs: Sequence[int], output: Sequence[int]) -> tuple[FLOAT, FLOAT]:
    """S + eps (x - k^T S) k, with eps and x (L, B, 1, D)."""

    @graph()
    def step(S_0, k_t, q_t, eps_t, x_t):
        S_t = S_0 + eps_t * (x_t - op.MatMul(op.Transpose(k_t, perm=[0, 2, 1]), S_0)) * k_t
        y_t = op.MatMul(q_t, S_t)
        return S_t, y_t

    last, y = op.Scan(
        S, k, q, eps, x, body=step, num_scan_inputs=4, scan_input_directions=inputs, scan_output_directions=output
    )
    return y, last


@_function
def _walk_rate(S, k, q, dt, u, A, inputs: Sequence[int], output: Sequence[int]) -> tuple[FLOAT, FLOAT]:
    """exp(dt A) S + u k, with dt and u (L, B, 1, D) and A (N, D) for all tokens."""

    @graph()
    def step(S_0, k_t, q_t, dt_t, u_t):
        S_t = op.Exp(dt_t * A) * S_0 + u_t * k_t
        y_t = op.MatMul(q_t, S_t)
        return S_t, y_t

    last, y = op.Scan(
        S, k, q, dt, u, body=step, num_scan_inputs=4, scan_input_directions=inputs, scan_output_directions=output
    )
    return y, last


@_function
def _walk_rate_per_token(S, k, q, dt, u, A, inputs: Sequence[int], output: Sequence[int]) -> tuple[FLOAT, FLOAT]:
    """exp(dt A) S + u k, with dt and u (L, B, 1, D) and A (L, B, N, 1)."""

    @graph()
    def step(S_0, k_t, q_t, dt_t, u_t, A_t):
        S_t = op.Exp(dt_t * A_t) * S_0 + u_t * k_t
        y_t = op.MatMul(q_t, S_t)
        return S_t, y_t

    last, y = op.Scan(
        S, k, q, dt, u, A, body=step, num_scan_inputs=5, scan_input_directions=inputs, scan_output_directions=output
    )
    return y, last


@_function
def _walk_decay(S, k, q, a, x, inputs: Sequence[int], output: Sequence[int]) -> tuple[FLOAT, FLOAT]:
    """a S + x k, with a (L, B, N, 1) and x (L, B, 1, D)."""

    @graph()
    def step(S_0, k_t, q_t, a_t, x_t):
        S_t = a_t * S_0 + x_t * k_t
        y_t = op.MatMul(q_t, S_t)
        return S_t, y_t

    last, y = op.Scan(
        S, k, q, a, x, body=step, num_scan_inputs=4, scan_input_directions=inputs, scan_output_directions=output
    )
    return y, last


class _Tokens(NamedTuple):
    """One direction of a scan."""

    # fmt: off
    x: Any      # (L, B, D)
    step: Any   # (L, B, D, 1 or N), its bias added
    k: Any      # (L, B, N)
    q: Any      # (L, B, N)
    A: Any      # (N, D), or per token (L, B, N), or None
    state: Any  # (B, N, D)
    A_per_token: bool
    softplus: bool = True
    # fmt: on


def _longhorn(t: _Tokens, k: Any) -> tuple[Any, ...]:
    norm = op.ReduceSumSquare(k, _ints(-1), keepdims=1)
    eps = op.Reciprocal(op.Add(op.Add(op.Exp(op.Neg(t.step)), norm), 1.0))  # 0 where exp is infinite
    return k, _axis(eps, 2), _axis(t.x, 2)


def _mamba(t: _Tokens) -> tuple[Any, ...]:
    dt = op.Softplus(t.step) if t.softplus else t.step
    read = t.k, _axis(dt, 2), _axis(op.Mul(dt, t.x), 2)
    return (_walk_rate_per_token, *read, _axis(t.A, 3)) if t.A_per_token else (_walk_rate, *read, t.A)


def _gla(t: _Tokens) -> tuple[Any, ...]:
    a = op.Exp(op.Div(op.Neg(op.Softplus(op.Neg(t.step))), TEMPERATURE))  # log(sigmoid(u)) = -softplus(-u)
    return _walk_decay, t.k, _axis(a, 3), _axis(t.x, 2)


# For each rule its walk, the keys (L, B, N), and what else the walk reads.
_RULES: dict[str, Callable[[_Tokens], tuple[Any, ...]]] = {
    "diagonal": lambda t: (_walk_diagonal, *_longhorn(t, t.k)),
    "diagonal_unit": lambda t: (_walk_diagonal, *_longhorn(t, _unit(t.k))),
    "exact": lambda t: (_walk_error, *_longhorn(t, t.k)),
    "delta": lambda t: (_walk_error, _unit(t.k), _axis(op.Sigmoid(t.step), 2), _axis(t.x, 2)),
    "mamba": _mamba,
    "gla": _gla,
}


def _unit(k: Any) -> Any:
    """k / ||k||, and 0 for a zero key: one whose square is below float32's smallest normal number."""
    energy = op.ReduceSumSquare(k, _ints(-1), keepdims=1)
    scale = op.Where(op.GreaterOrEqual(energy, torch.finfo(torch.float32).tiny), op.Reciprocal(op.Sqrt(energy)), 0.0)
    return op.Mul(k, scale)


def _ints(*values: int) -> Any:
    return op.Constant(value_ints=list(values))


def _axis(value: Any, axis: int) -> Any:
    return op.Unsqueeze(value, _ints(axis))


def _slice(value: Any, start: int, end: int, axis: int, step: int = 1) -> Any:
    return op.Slice(value, _ints(start), _ints(end), _ints(axis), _ints(step))


def _entry(value: Any, index: int) -> Any:
    return op.Gather(value, op.Constant(value_int=index), axis=0)


def _silu(value: Any) -> Any:
    return op.Mul(value, op.Sigmoid(value))


def _zero_state(x: Any, d_state: int) -> Any:
    """(B, N, D) for x (L, B, D)."""
    return op.Expand(0.0, op.Concat(op.Shape(x, start=1, end=2), _ints(d_state), op.Shape(x, start=2, end=3), axis=0))


def _recurrence(t: _Tokens, rule: str, backward: bool) -> tuple[Any, Any]:
    """y (L, B, D), without the skip, and the last state (B, N, D)."""
    walk, k, *read = _RULES[rule](t)
    of_token = 2 + len(read) - (walk is _walk_rate)  # k, q, and the others but an A for all tokens
    y, state = walk(t.state, _axis(k, 3), _axis(t.q, 2), *read, inputs=[int(backward)] * of_token,
                    output=[int(backward)])  # fmt: skip
    return op.Squeeze(y, _ints(2)), state


_HINTS = {"Tensor": FLOAT, "Optional[Tensor]": FLOAT | None, "str": str, "bool": bool, "float": float}


def _translates(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function of *values an operator's signature: torch's exporter tells tensors from options by it."""

    arguments, empty = schema(name).arguments, inspect.Parameter.empty
    defaults = [argument.default_value if argument.has_default_value() else empty for argument in arguments]
    kind = inspect.Parameter.POSITIONAL_ONLY

    def decorate(function: Any) -> Any:
        function.__annotations__ = {"return": Any, **{each.name: _HINTS[str(each.type)] for each in arguments}}
        function.__signature__ = inspect.Signature(
            [inspect.Parameter(each.name, kind, default=default) for each, default in zip(arguments, defaults)]
        )
        return function

    return decorate


@_translates("scan")
def scan(*values: Any) -> Any:
    """`torch.ops.vision_longhorn.scan`."""
    s: Any = Scan(*values[: len(SCAN_FIELDS)])
    both, d_state = s.direction == "both", s.k.shape[-1]

    def of(g: int, value: Any, ndim: int) -> Any:
        """Direction g's part of a tensor of `ndim` axes, or one more in front if each direction has its own."""
        return value if value is None or len(value.shape) == ndim else _entry(value, g)

    def tokens(g: int, value: Any) -> Any:
        return op.Transpose(of(g, value, 3), perm=[1, 0, 2])

    ys, states = [], []
    for g, backward in enumerate(s.reversed):
        x, step, k, q = (tokens(g, value) for value in (s.x, s.step, s.k, s.q))
        if s.bias is not None:
            step = op.Add(step, of(g, s.bias, 1))
        A = None
        if s.A is not None:
            A = tokens(g, s.A) if s.A_per_token else op.Transpose(of(g, s.A, 2), perm=[1, 0])
        if s.initial_state is None:
            state = _zero_state(x, d_state)
        else:
            state = op.Transpose(of(g, s.initial_state, 3), perm=[0, 2, 1])
        y, state = _recurrence(_Tokens(x, step, k, q, A, state, s.A_per_token, s.softplus), s.rule, backward)
        if s.D is not None:
            y = op.Add(y, op.Mul(of(g, s.D, 1), x))
        y = op.Transpose(y, perm=[1, 0, 2])
        ys.append(y if s.z is None else op.Mul(y, _silu(of(g, s.z, 3))))
        states.append(op.Transpose(state, perm=[0, 2, 1]))
    if not both:
        y, state = *ys, *states
    else:
        state = op.Concat(*(_axis(value, 0) for value in states), axis=0)
        y = op.Concat(*(_axis(value, 0) for value in ys), axis=0) if s.combine == "none" else op.Add(*ys)
        if s.combine == "mean":
            y = op.Mul(y, 0.5)
    return y, state, op.Identity(state)


@_translates("mix")
def mix(*values: Any) -> Any:
    """`torch.ops.vision_longhorn.mix`."""
    m: Any = Mix(*values[: len(FIELDS)], *values[len(FIELDS) + 2 :])
    sets, d_inner, taps = m.conv_weight.shape
    rank = m.dt_proj.shape[2]
    per_token = m.A_log is not None and len(m.A_log.shape) == 2
    d_state = (m.x_proj.shape[1] - rank) // (3 if per_token else 2)
    x = op.Transpose(_slice(m.xz, 0, d_inner, 2), perm=[0, 2, 1])  # (B, D, L), as Conv takes it

    def prepared(s: int) -> _Tokens:
        """The convolved x and what is projected from it, by the set of parameters s."""
        weight, pads = _entry(m.conv_weight, s), [taps - 1, 0]
        if s == 1 or m.reversed:  # against the order of the tokens
            weight, pads = _slice(weight, -1, -taps - 1, 1, -1), [0, taps - 1]
        u = op.Conv(x, _axis(weight, 1), _entry(m.conv_bias, s), group=d_inner, kernel_shape=[taps], pads=pads)
        u = op.Transpose(_silu(u), perm=[2, 0, 1])
        low = op.MatMul(u, op.Transpose(_entry(m.x_proj, s), perm=[1, 0]))
        step = op.MatMul(_slice(low, 0, rank, 2), op.Transpose(_entry(m.dt_proj, s), perm=[1, 0]))
        k, q = (_slice(low, start, start + d_state, 2) for start in (rank, rank + d_state))
        A = None
        if per_token:
            a = _slice(low, rank + 2 * d_state, rank + 3 * d_state, 2)
            A = op.Neg(op.Exp(op.Add(a, _entry(m.A_log, s))))
        elif m.A_log is not None:
            A = op.Neg(op.Exp(op.Transpose(_entry(m.A_log, s), perm=[1, 0])))
        return _Tokens(u, op.Add(step, _entry(m.dt_bias, s)), k, q, A, _zero_state(u, d_state), per_token)

    ys = []
    parameters = [prepared(s) for s in range(sets)]
    for g in range(2 if m.shared else sets):
        s = min(g, sets - 1)
        y, _ = _recurrence(parameters[s], m.rule, g == 1 or m.reversed)
        y = op.Add(y, op.Mul(_entry(m.D, s), parameters[s].x))
        if m.shared:
            mean = op.ReduceMean(op.Mul(y, y), _ints(-1), keepdims=1)
            y = op.Mul(op.Div(y, op.Sqrt(op.Add(mean, m.eps))), _entry(m.norm_weight, g))
        ys.append(y)
    y = ys[0] if len(ys) == 1 else op.Add(*ys) if m.shared else op.Mul(op.Add(*ys), 0.5)
    y = op.Mul(op.Transpose(y, perm=[1, 0, 2]), _silu(_slice(m.xz, d_inner, 2 * d_inner, 2)))
    return y, op.Identity(y), op.Identity(y), op.Identity(y)


# For `torch.onnx.export(..., dynamo=True, custom_translation_table=TRANSLATIONS, opset_version=OPSET)`.
TRANSLATIONS = {torch.ops.vision_longhorn.mix.default: mix, torch.ops.vision_longhorn.scan.default: scan}
