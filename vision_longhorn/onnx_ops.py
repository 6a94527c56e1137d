"""The operators of `vision_longhorn.kernels` in operators of the ONNX standard, for `torch.onnx.export`.

A recurrence is an ONNX `Scan`, so the graph has one size for every number of tokens. Inside, tokens come first, as Scan
takes them, and channels last, so that the products of each step run over long rows. All is computed in float32, and
only what inference needs: what an operator returns for its backward pass stands for nothing here.
"""

import linecache
import re
from functools import cache

# `_WALK` names it. Python 3.10 takes that of collections.abc, with its argument, for a class, and onnxscript fails.
from typing import Any, Sequence  # noqa: F401, UP035

import torch
from onnxscript import FLOAT, graph, opset18, script  # noqa: F401  (`_WALK` names them)
from onnxscript.values import Opset

from vision_longhorn import kernels  # noqa: F401  (registers torch.ops.vision_longhorn)
from vision_longhorn.kernels.rules import get_rule

OPSET = 18
op: Any = opset18  # its annotations know nothing of the numbers and None that it takes

# A walk through time, as onnxscript reads it. The body is a graph of its own, so the rule's expression becomes part of
# the source and is not called. The exporter writes the function out where it is called, so no file asks for it.
_WALK = """
def walk(state: FLOAT, k: FLOAT, q: FLOAT, {arguments}, inputs: Sequence[int], output: Sequence[int]
         ) -> tuple[FLOAT, FLOAT]:
    @graph()
    def step(S, k_t, q_t, {steps}):
        S_t = {expression}
        y_t = op.MatMul(q_t, S_t)
        return S_t, y_t

    last, y = op.Scan(state, k, q, {of_token}, body=step, num_scan_inputs={count}, scan_input_directions=inputs,
                      scan_output_directions=output)
    return y, last
"""


@cache
def _walk(rule: str, of_token: tuple[str, ...], others: tuple[str, ...]) -> Any:
    """The walk of a rule as a function of ONNX: y (L, B, 1, D) and the last state, from the first state (B, N, D),
    k (L, B, N, 1), q (L, B, 1, N), what each step takes of one token, each (L, B, ..), and what it takes besides.
    `inputs` and `output` are Scan's directions: 0, or 1 from the last token to the first."""
    expression = re.sub(rf"\b({'|'.join(('k', *of_token))})\b", r"\1_t", get_rule(rule).onnx_step)
    source = _WALK.format(
        arguments=", ".join(f"{name}: FLOAT" for name in of_token + others),
        expression=expression,
        steps=", ".join(f"{name}_t" for name in of_token),
        of_token=", ".join(of_token),
        count=2 + len(of_token),
    )
    file = f"<walk of {rule}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # where inspect finds it
    names: dict[str, Any] = dict(globals())
    exec(compile(source, file, "exec"), names)
    return script(Opset("vision_longhorn", 1), default_opset=op)(names["walk"])


def _ints(*values: int) -> Any:
    return op.Constant(value_ints=list(values))


def _axis(value: Any, axis: int) -> Any:
    return op.Unsqueeze(value, _ints(axis))


def _slice(value: Any, start: int, end: int, axis: int, step: int = 1) -> Any:
    return op.Slice(value, _ints(start), _ints(end), _ints(axis), _ints(step))


def _entry(value: Any, index: int) -> Any:
    return op.Gather(value, op.Constant(value_int=index), axis=0)


def _shape(value: Any) -> tuple[int, ...]:
    return value.shape


def _silu(value: Any) -> Any:
    return op.Mul(value, op.Sigmoid(value))


def _zero_state(x: Any, d_state: int) -> Any:
    """(B, N, D) for x (L, B, D)."""
    return op.Expand(0.0, op.Concat(op.Shape(x, start=1, end=2), _ints(d_state), op.Shape(x, start=2, end=3), axis=0))


def _recurrence(
    x: Any, step: Any, k: Any, q: Any, A: Any, state: Any, rule: str, softplus: bool, per_token: bool, backward: bool
) -> tuple[Any, Any]:
    """One direction: x (L, B, D); step (L, B, D, 1 or N), its bias added; k, q (L, B, N); A (N, D) or, per token,
    (L, B, N); state (B, N, D). Returns y (L, B, D), without the skip, and the last state (B, N, D)."""
    of_token, others = get_rule(rule).onnx_inputs(op, x, step, k, A, softplus)
    if per_token:
        of_token, others = of_token | {name: _axis(value, 3) for name, value in others.items()}, {}
    k = of_token.pop("k", k)  # a rule may have its own
    # Rows of channels as (L, B, 1, D); what is of the states is a column, (L, B, N, 1), already.
    of_token = {name: value if name in ("A", "a") else _axis(value, 2) for name, value in of_token.items()}
    directions = [int(backward)] * (2 + len(of_token))
    y, state = _walk(rule, tuple(of_token), tuple(others))(
        state, _axis(k, 3), _axis(q, 2), *of_token.values(), *others.values(), inputs=directions, output=directions[:1]
    )
    return op.Squeeze(y, _ints(2)), state


def scan(x: FLOAT, step: FLOAT, k: FLOAT, q: FLOAT, A: FLOAT | None, z: FLOAT | None, D: FLOAT | None,
         bias: FLOAT | None, initial_state: FLOAT | None, rule: str, direction: str, combine: str, softplus: bool,
         A_per_token: bool, return_final_state: bool, save_states: bool, backend: str, regime: str
         ) -> Any:  # fmt: skip
    """`torch.ops.vision_longhorn.scan`."""
    both, d_state = direction == "both", _shape(k)[-1]

    def of(g: int, value: Any, ndim: int) -> Any:
        """Direction g's part of a tensor of `ndim` axes, or one more in front if each direction has its own."""
        return value if value is None or len(value.shape) == ndim else _entry(value, g)

    def tokens(g: int, value: Any) -> Any:
        return op.Transpose(of(g, value, 3), perm=[1, 0, 2])

    ys, states = [], []
    for g, backward in enumerate((False, True) if both else (direction == "backward",)):
        x_g, step_g, A_g = tokens(g, x), tokens(g, step), None
        if bias is not None:
            step_g = op.Add(step_g, of(g, bias, 1))
        if A is not None:
            A_g = tokens(g, A) if A_per_token else op.Transpose(of(g, A, 2), perm=[1, 0])
        state = (
            _zero_state(x_g, d_state)
            if initial_state is None
            else op.Transpose(of(g, initial_state, 3), perm=[0, 2, 1])
        )
        y, state = _recurrence(
            x_g, step_g, tokens(g, k), tokens(g, q), A_g, state, rule, softplus, A_per_token, backward
        )
        if D is not None:
            y = op.Add(y, op.Mul(of(g, D, 1), x_g))
        y = op.Transpose(y, perm=[1, 0, 2])
        ys.append(y if z is None else op.Mul(y, _silu(of(g, z, 3))))
        states.append(op.Transpose(state, perm=[0, 2, 1]))
    if not both:
        y, state = *ys, *states
    else:
        state = op.Concat(*(_axis(value, 0) for value in states), axis=0)
        y = op.Concat(*(_axis(value, 0) for value in ys), axis=0) if combine == "none" else op.Add(*ys)
        if combine == "mean":
            y = op.Mul(y, 0.5)
    return y, state, op.Identity(state)


def mix(xz: FLOAT, conv_weight: FLOAT, conv_bias: FLOAT, x_proj: FLOAT, dt_proj: FLOAT, dt_bias: FLOAT,
        A_log: FLOAT | None, D: FLOAT, norm_weight: FLOAT | None, rule: str, eps: float, save_states: bool,
        backend: str, reversed: bool = False) -> Any:  # fmt: skip
    """`torch.ops.vision_longhorn.mix`."""
    sets, d_inner, taps = _shape(conv_weight)
    rank = _shape(dt_proj)[2]
    per_token = A_log is not None and len(_shape(A_log)) == 2
    d_state = (_shape(x_proj)[1] - rank) // (3 if per_token else 2)
    shared = norm_weight is not None
    x = op.Transpose(_slice(xz, 0, d_inner, 2), perm=[0, 2, 1])  # (B, D, L), as Conv takes it

    def prepared(s: int) -> tuple[Any, Any, Any, Any, Any]:
        """Of a set of parameters: convolved x (L, B, D), step sizes with their bias, keys and queries, A."""
        weight, pads = _entry(conv_weight, s), [taps - 1, 0]
        if s == 1 or reversed:  # against the order of the tokens
            weight, pads = _slice(weight, -1, -taps - 1, 1, -1), [0, taps - 1]
        u = op.Conv(x, _axis(weight, 1), _entry(conv_bias, s), group=d_inner, kernel_shape=[taps], pads=pads)
        u = op.Transpose(_silu(u), perm=[2, 0, 1])
        low = op.MatMul(u, op.Transpose(_entry(x_proj, s), perm=[1, 0]))
        step = op.MatMul(_slice(low, 0, rank, 2), op.Transpose(_entry(dt_proj, s), perm=[1, 0]))
        k, q = (_slice(low, start, start + d_state, 2) for start in (rank, rank + d_state))
        A = None
        if per_token:
            a = _slice(low, rank + 2 * d_state, rank + 3 * d_state, 2)
            A = op.Neg(op.Exp(op.Add(a, _entry(A_log, s))))
        elif A_log is not None:
            A = op.Neg(op.Exp(op.Transpose(_entry(A_log, s), perm=[1, 0])))
        return u, op.Add(step, _entry(dt_bias, s)), k, q, A

    ys = []
    parameters = [prepared(s) for s in range(sets)]
    for g in range(2 if shared else sets):
        s = min(g, sets - 1)
        u, step, k, q, A = parameters[s]
        y, _ = _recurrence(u, step, k, q, A, _zero_state(u, d_state), rule, True, per_token, g == 1 or reversed)
        y = op.Add(y, op.Mul(_entry(D, s), u))
        if shared:
            mean = op.ReduceMean(op.Mul(y, y), _ints(-1), keepdims=1)
            y = op.Mul(op.Div(y, op.Sqrt(op.Add(mean, eps))), _entry(norm_weight, g))
        ys.append(y)
    y = ys[0] if len(ys) == 1 else op.Add(*ys) if shared else op.Mul(op.Add(*ys), 0.5)
    y = op.Mul(op.Transpose(y, perm=[1, 0, 2]), _silu(_slice(xz, d_inner, 2 * d_inner, 2)))
    return y, op.Identity(y), op.Identity(y), op.Identity(y)


# For `torch.onnx.export(..., dynamo=True, custom_translation_table=TRANSLATIONS, opset_version=OPSET)`.
TRANSLATIONS = {torch.ops.vision_longhorn.mix.default: mix, torch.ops.vision_longhorn.scan.default: scan}
