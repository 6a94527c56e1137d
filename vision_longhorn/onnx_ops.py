"""Translates the operators of `vision_longhorn.kernels` into standard ONNX operators, for `torch.onnx.export`.

A recurrence is an ONNX `Scan`, so the graph has one size for every number of tokens. Inside it tokens come first, as
Scan takes them, and channels last, so that the products of each step run over long rows. Everything is in float32. What
only a backward pass needs is not computed: y stands in for those results of an operator.
"""

import inspect

# In Python 3.10, onnxscript fails on collections.abc.Sequence[int], which it takes for a class.
from typing import Any, Sequence  # noqa: UP035

import torch
from onnxscript import FLOAT, INT64, graph, opset18, script
from onnxscript.values import Opset

from vision_longhorn.kernels.backends.torch.rope import FASTEST, octaves_per_point
from vision_longhorn.kernels.backends.torch.unit import EPS
from vision_longhorn.kernels.contract import Scan
from vision_longhorn.kernels.mixing import FIELDS, Mix
from vision_longhorn.kernels.operators import schema
from vision_longhorn.kernels.ops import read_scan
from vision_longhorn.kernels.rules.gla import TEMPERATURE

OPSET = 18
op: Any = opset18  # it also takes numbers and None, which its annotations leave out

# The walks through time. They take the first state S (B, N, D), k (L, B, N, 1), q (L, B, 1, N) and what else a walk
# reads, and return y (L, B, 1, D) and the last state. `inputs` and `output` are Scan's directions for tokens and for y:
# 0, or 1 from the last token to the first. The exporter inlines a walk where it is called.
_function: Any = script(Opset("vision_longhorn", 1), default_opset=op)


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
def _walk_decay(S, k, q, a, b, c, x, A, inputs: Sequence[int], output: Sequence[int]) -> tuple[FLOAT, FLOAT]:
    """(exp(a b A) - c k^2) S + x k, with x (L, B, 1, D); a, b and c are of a token, A (N, D) or (1,) is of all."""

    @graph()
    def step(S_0, k_t, q_t, a_t, b_t, c_t, x_t):
        S_t = (op.Exp(a_t * b_t * A) - c_t * k_t * k_t) * S_0 + x_t * k_t
        y_t = op.MatMul(q_t, S_t)
        return S_t, y_t

    last, y = op.Scan(
        S, k, q, a, b, c, x, body=step, num_scan_inputs=6, scan_input_directions=inputs, scan_output_directions=output
    )
    return y, last


def _axis(value: Any, axis: int) -> Any:
    return op.Unsqueeze(value, [axis])


def _slice(value: Any, start: int, end: int, axis: int, step: int = 1) -> Any:
    return op.Slice(value, [start], [end], [axis], [step])


def _entry(value: Any, index: int) -> Any:
    return op.Gather(value, index, axis=0)


def _silu(value: Any) -> Any:
    return value * op.Sigmoid(value)


def _over_grid(x: Any, weight: Any, bias: Any, rows: Any, D: int, K: int) -> Any:
    """Convolve x (B, D, L) over its grid of `rows` with the weight (D, 1, K, K) and the bias (D,)."""
    rest = op.Constant(value_ints=[-1])
    grid = op.Reshape(x, op.Concat(op.Constant(value_ints=[0, 0]), op.Reshape(rows, [1]), rest, axis=0))
    y = op.Conv(grid, weight, bias, group=D, kernel_shape=[K, K], pads=[K // 2] * 4)
    return op.Reshape(y, [0, 0, -1])


def _unit(value: Any) -> Any:
    """Scale to unit length, see `backends.torch.unit`."""
    return value / op.Sqrt(op.ReduceSumSquare(value, [-1], keepdims=1) + EPS)


def _rotated(v: Any, rows: Any, N: int) -> Any:
    """Turn keys or queries (L, B, N) by their place in the grid, see `backends.torch.rope`."""
    speeds = [
        FASTEST * 2 ** (-octaves_per_point(N) * (n // 2)) for n in range(N // 2)
    ]  # one for both numbers of a point
    count = op.Shape(v, start=0, end=1)
    columns = op.Div(count, rows)
    place = op.Range(0, op.Squeeze(count, [0]), 1)
    row, column = (_axis(op.Cast(found, to=1), 1) for found in (op.Div(place, columns), op.Mod(place, columns)))
    angle = op.Concat(row * op.Constant(value_floats=speeds), column * op.Constant(value_floats=speeds), axis=1)
    swap = [0.0] * (N * N)  # a matrix that maps the point (x, y) to (-y, x)
    swap[1 :: 2 * N + 2], swap[N :: 2 * N + 2] = [1.0] * (N // 2), [-1.0] * (N // 2)
    swapped = op.MatMul(v, op.Reshape(op.Constant(value_floats=swap), [N, N]))
    angle = _axis(angle, 1)  # (L, 1, N)
    return v * op.Cos(angle) + swapped * op.Sin(angle)


def _recurrence(s: Any, backward: bool) -> tuple[Any, Any]:
    """Return y (L, B, D) and the last state (B, N, D) of a `Scan` in one direction, with the tokens first."""
    step = s.step if s.bias is None else s.step + s.bias
    k, q = (_unit(s.k), _unit(s.q)) if s.qk_norm else (s.k, s.q)
    if s.rule in ("diagonal_unit", "delta"):  # k / ||k||, or 0 if its square is below float32's smallest normal number
        energy = op.ReduceSumSquare(k, [-1], keepdims=1)
        k = k * op.Where(energy >= torch.finfo(torch.float32).tiny, op.Reciprocal(op.Sqrt(energy)), 0.0)
    x, one = _axis(s.x, 2), op.Constant(value_floats=[1.0])
    tokens = op.Concat(op.Shape(s.x, start=0, end=1), op.Constant(value_ints=[1, 1, 1]), axis=0)
    zeros, ones = op.Expand(0.0, tokens), op.Expand(1.0, tokens)
    walk, fixed = _walk_decay, [one]
    if s.rule == "gla":
        log_decay = -op.Softplus(-step) / TEMPERATURE  # log(sigmoid(u)) = -softplus(-u)
        read = [_axis(log_decay, 3), ones, zeros, x]
    elif s.rule == "mamba":
        dt = op.Softplus(step) if s.softplus else step
        read = [_axis(dt, 2), _axis(s.A, 3) if s.A_per_token else ones, zeros, _axis(dt * s.x, 2)]
        fixed = [one if s.A_per_token else s.A]
    else:
        if s.rule == "delta":
            eps = op.Sigmoid(step)
        else:  # this is 0 where exp is infinite
            eps = op.Reciprocal(op.Exp(-step) + op.ReduceSumSquare(k, [-1], keepdims=1) + 1.0)
        eps = _axis(eps, 2)
        read = [zeros, zeros, eps, eps * x]
        if not s.rule.startswith("diagonal"):
            walk, read, fixed = _walk_error, [eps, x], []
    state = s.initial_state
    if state is None:
        batch, channels = op.Shape(s.x, start=1, end=2), op.Shape(s.x, start=2, end=3)
        state = op.Expand(0.0, op.Concat(batch, op.Shape(k, start=2, end=3), channels, axis=0))
    read = [_axis(k, 3), _axis(q, 2), *read]
    y, state = walk(state, *read, *fixed, inputs=[int(backward)] * len(read), output=[int(backward)])
    y = op.Squeeze(y, [2])
    return y if s.D is None else y + s.D * s.x, state


_HINTS = {"Tensor": FLOAT, "Optional[Tensor]": FLOAT | None, "str": str, "bool": bool, "float": float, "int": INT64}


def _translates(function: Any) -> Any:
    """Give a function the signature of the operator of its name. torch's exporter tells tensors from options by it."""
    function.__annotations__, parameters = {"return": Any}, []
    for argument in schema(function.__name__).arguments:
        function.__annotations__[argument.name] = _HINTS[str(argument.type)]
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        parameters.append(inspect.Parameter(argument.name, inspect.Parameter.POSITIONAL_ONLY, default=default))
    function.__signature__ = inspect.Signature(parameters)
    return function


@_translates
def scan(*values: Any) -> Any:
    s: Any = read_scan(values, 3)[0]
    ys, states = [], []
    for g, backward in enumerate(s.reversed):

        def transposed(value: Any, ndim: int, *perm: int, g: int = g) -> Any:
            """Transpose direction g's part of a tensor of `ndim` axes, or one more if each direction has its own."""
            if value is not None and len(value.shape) > ndim:
                value = _entry(value, g)
            return op.Transpose(value, perm=perm) if value is not None and perm else value

        tokens = {name: transposed(getattr(s, name), 3, 1, 0, 2) for name in ("x", "step", "k", "q")}
        A = transposed(s.A, 3, 1, 0, 2) if s.A_per_token else transposed(s.A, 2, 1, 0)
        state, D, bias = transposed(s.initial_state, 3, 0, 2, 1), transposed(s.D, 1), transposed(s.bias, 1)
        y, state = _recurrence(s._replace(**tokens, A=A, initial_state=state, D=D, bias=bias), backward)
        y = op.Transpose(y, perm=[1, 0, 2])
        ys.append(y if s.z is None else y * _silu(transposed(s.z, 3)))
        states.append(op.Transpose(state, perm=[0, 2, 1]))
    y, state = ys[0], states[0]
    if s.direction == "both":
        state = op.Concat(*(_axis(value, 0) for value in states), axis=0)
        y = op.Concat(*(_axis(value, 0) for value in ys), axis=0) if s.combine == "none" else op.Add(*ys)
    y = y * 0.5 if s.combine == "mean" else y
    return y, state, op.Identity(state)


@_translates
def mix(*values: Any) -> Any:
    m: Any = Mix(*values[: len(FIELDS)], *values[len(FIELDS) + 2 :])
    sets, _, d_inner = m.x_proj.shape
    taps = m.conv_weight.shape[-1]
    rank = m.dt_proj.shape[2]
    per_token = m.A_log is not None and len(m.A_log.shape) == 2
    d_state = (m.x_proj.shape[1] - rank) // (3 if per_token else 2)
    x = m.xz if m.gate == "none" else _slice(m.xz, 0, d_inner, 2)
    x = op.Transpose(x, perm=[0, 2, 1])  # (B, D, L), as Conv takes it

    def convolved(s: int) -> Any:
        """Return x for the set of parameters s, (L, B, D)."""
        if len(m.conv_weight.shape) == 4:  # one for all, over the grid
            weight, bias = op.Transpose(m.conv_weight, perm=[1, 0, 2, 3]), _entry(m.conv_bias, 0)
            u = _over_grid(x, weight, bias, m.rows, d_inner, taps)
        else:
            weight, pads = _entry(m.conv_weight, s), [taps - 1, 0]
            if s == 1 or m.reversed:  # against the order of the tokens
                weight, pads = _slice(weight, -1, -taps - 1, 1, -1), [0, taps - 1]
            u = op.Conv(x, _axis(weight, 1), _entry(m.conv_bias, s), group=d_inner, kernel_shape=[taps], pads=pads)
        return op.Transpose(_silu(u), perm=[2, 0, 1])

    gate = None if m.gate == "none" else _silu(_slice(m.xz, d_inner, 2 * d_inner, 2))
    values = op.Transpose(gate, perm=[1, 0, 2]) if m.own_values else None
    over_grid = convolved(0) if len(m.conv_weight.shape) == 4 else None

    def prepared(s: int) -> Scan:
        """Make the scan over the convolved x or the values, with the set of parameters s."""
        u = convolved(s) if over_grid is None else over_grid
        low = op.MatMul(u, op.Transpose(_entry(m.x_proj, s), perm=[1, 0]))
        step = op.MatMul(_slice(low, 0, rank, 2), op.Transpose(_entry(m.dt_proj, s), perm=[1, 0]))
        k, q, a = (_slice(low, start, start + d_state, 2) for start in range(rank, rank + 3 * d_state, d_state))
        if m.rope:
            k, q = (_rotated(v, op.Reshape(m.rows, [1]), d_state) for v in (k, q))
        A = None
        if m.A_log is not None:
            log = _entry(m.A_log, s)
            A = -op.Exp(a + log if per_token else op.Transpose(log, perm=[1, 0]))
        bias, D = _entry(m.dt_bias, s), None if m.gates_skip else _entry(m.D, s)
        scanned: Any = u if values is None else values
        return Scan(scanned, step, k, q, A, None, D, bias, None, m.rule, A_per_token=per_token, qk_norm=m.qk_norm)

    ys, parameters = [], [prepared(s) for s in range(sets)]
    for g in range(2 if m.shared else sets):
        y, _ = _recurrence(parameters[min(g, sets - 1)], g == 1 or m.reversed)
        if m.shared:
            mean = op.ReduceMean(y * y, [-1], keepdims=1)
            y = y / op.Sqrt(mean + m.eps) * _entry(m.norm_weight, g)
        ys.append(y)
    y = ys[0] if len(ys) == 1 else op.Add(*ys) if m.shared else op.Add(*ys) * 0.5
    y = op.Transpose(y, perm=[1, 0, 2])
    if m.gates_skip:
        skips = [part.x * _entry(m.D, s) for s, part in enumerate(parameters)]
        skip = skips[0] if sets == 1 else op.Add(*skips) * 0.5
        y = y + op.Transpose(skip, perm=[1, 0, 2]) * gate
    elif gate is not None and values is None:
        y = y * gate
    return y, op.Identity(y), op.Identity(y), op.Identity(y)


@_translates
def grid_conv(x: Any, weight: Any, bias: Any, rows: Any, backend: Any) -> Any:
    y = _over_grid(op.Transpose(x, perm=[0, 2, 1]), _axis(weight, 1), bias, rows, weight.shape[0], weight.shape[-1])
    return op.Transpose(_silu(y), perm=[0, 2, 1])


@_translates
def bias_gelu(x: Any, bias: Any, backend: Any) -> Any:
    v = x + op.CastLike(bias, x)
    return v * (0.5 + 0.5 * op.Erf(v * 0.5**0.5))


@_translates
def bias_norm_silu(x: Any, bias: Any, norm_weight: Any, norm_bias: Any, eps: Any, backend: Any) -> Any:
    weights = op.CastLike(norm_weight, x), op.CastLike(norm_bias, x)
    u, _, _ = op.LayerNormalization(x + op.CastLike(bias, x), *weights, axis=-1, epsilon=eps)
    return _silu(u)


_TRANSLATED = mix, scan, grid_conv, bias_gelu, bias_norm_silu
# For `torch.onnx.export(..., dynamo=True, custom_translation_table=TRANSLATIONS, opset_version=OPSET)`.
TRANSLATIONS = {getattr(torch.ops.vision_longhorn, f.__name__).default: f for f in _TRANSLATED}
