"""The operators of `vision_longhorn.kernels` in operators of the ONNX standard, for `torch.onnx.export`.

A recurrence is an ONNX `Scan`, so the graph has one size for every number of tokens. Inside, tokens come first, as Scan
takes them, and channels last, so that the products of each step run over long rows. All is computed in float32, and
only what inference needs: what an operator returns for its backward pass stands for nothing here.
"""

from typing import Optional, Sequence

import torch
from onnxscript import FLOAT, graph, script
from onnxscript import opset18 as op
from onnxscript.values import Opset

from vision_longhorn import kernels  # noqa: F401  (registers torch.ops.vision_longhorn)

OPSET = 18
_domain = Opset("vision_longhorn", 1)

# The walk through time of each rule: the state (B, N, D), then what each step takes of one token. Of those eps and dt
# are (L, B, 1, D or 1), x and u (L, B, 1, D), k and A (L, B, N, 1), q (L, B, 1, N). `inputs` and `output` are
# Scan's directions: 0, or 1 from the last token to the first. The exporter writes these functions out where they are
# called, so no file asks for them.


@script(_domain, default_opset=op)
def ScanDiagonal(state: FLOAT, eps: FLOAT, u: FLOAT, k: FLOAT, q: FLOAT, inputs: Sequence[int], output: Sequence[int]
                 ) -> tuple[FLOAT, FLOAT]:
    @graph()
    def step(S, eps_t, u_t, k_t, q_t):
        S_t = S + (u_t - eps_t * k_t * S) * k_t
        y_t = op.MatMul(q_t, S_t)
        return S_t, y_t

    last, y = op.Scan(state, eps, u, k, q, body=step, num_scan_inputs=4, scan_input_directions=inputs,
                      scan_output_directions=output)
    return y, last


@script(_domain, default_opset=op)
def ScanExact(state: FLOAT, eps: FLOAT, x: FLOAT, k: FLOAT, q: FLOAT, inputs: Sequence[int], output: Sequence[int]
              ) -> tuple[FLOAT, FLOAT]:
    @graph()
    def step(S, eps_t, x_t, k_t, q_t):
        S_t = S + eps_t * (x_t - op.MatMul(op.Transpose(k_t, perm=[0, 2, 1]), S)) * k_t
        y_t = op.MatMul(q_t, S_t)
        return S_t, y_t

    last, y = op.Scan(state, eps, x, k, q, body=step, num_scan_inputs=4, scan_input_directions=inputs,
                      scan_output_directions=output)
    return y, last


@script(_domain, default_opset=op)
def ScanMamba(state: FLOAT, dt: FLOAT, u: FLOAT, k: FLOAT, q: FLOAT, A: FLOAT, inputs: Sequence[int],
              output: Sequence[int]) -> tuple[FLOAT, FLOAT]:
    @graph()
    def step(S, dt_t, u_t, k_t, q_t):
        S_t = op.Exp(dt_t * A) * S + u_t * k_t
        y_t = op.MatMul(q_t, S_t)
        return S_t, y_t

    last, y = op.Scan(state, dt, u, k, q, body=step, num_scan_inputs=4, scan_input_directions=inputs,
                      scan_output_directions=output)
    return y, last


@script(_domain, default_opset=op)
def ScanMambaPerToken(state: FLOAT, dt: FLOAT, u: FLOAT, k: FLOAT, q: FLOAT, A: FLOAT, inputs: Sequence[int],
                      output: Sequence[int]) -> tuple[FLOAT, FLOAT]:
    @graph()
    def step(S, dt_t, u_t, k_t, q_t, A_t):
        S_t = op.Exp(dt_t * A_t) * S + u_t * k_t
        y_t = op.MatMul(q_t, S_t)
        return S_t, y_t

    last, y = op.Scan(state, dt, u, k, q, A, body=step, num_scan_inputs=5, scan_input_directions=inputs,
                      scan_output_directions=output)
    return y, last


def _ints(*values: int):
    return op.Constant(value_ints=list(values))


def _axis(value, axis: int):
    return op.Unsqueeze(value, _ints(axis))


def _slice(value, start: int, end: int, axis: int, step: int = 1):
    return op.Slice(value, _ints(start), _ints(end), _ints(axis), _ints(step))


def _entry(value, index: int):
    return op.Gather(value, op.Constant(value_int=index), axis=0)


def _silu(value):
    return op.Mul(value, op.Sigmoid(value))


def _zero_state(x, d_state: int):
    """(B, N, D) for x (L, B, D)."""
    return op.Expand(0.0, op.Concat(op.Shape(x, start=1, end=2), _ints(d_state), op.Shape(x, start=2, end=3), axis=0))


def _recurrence(x, step, k, q, A, state, rule: str, softplus: bool, per_token: bool, backward: bool):
    """One direction: x (L, B, D); step (L, B, D or 1), its bias added; k, q (L, B, N); A (N, D) or, per token,
    (L, B, N); state (B, N, D). Returns y (L, B, D), without the skip, and the last state (B, N, D)."""
    way, k_t, q_t = int(backward), _axis(k, 3), _axis(q, 2)
    if rule == "mamba":
        dt = op.Softplus(step) if softplus else step
        walk, of_token, others = ScanMamba, [dt, op.Mul(dt, x)], [A]
        if per_token:
            walk, others = ScanMambaPerToken, [_axis(A, 3)]
    else:
        norm = op.ReduceSumSquare(k, _ints(-1), keepdims=1)
        eps = op.Reciprocal(op.Add(op.Add(op.Exp(op.Neg(step)), norm), 1.0))  # where exp is infinite nothing is written
        walk, of_token, others = (ScanExact, [eps, x], []) if rule == "exact" else \
            (ScanDiagonal, [eps, op.Mul(eps, x)], [])
    y, state = walk(state, *(_axis(value, 2) for value in of_token), k_t, q_t, *others,
                    inputs=[way] * (5 if per_token else 4), output=[way])
    return op.Squeeze(y, _ints(2)), state


def scan(x: FLOAT, step: FLOAT, k: FLOAT, q: FLOAT, A: Optional[FLOAT], z: Optional[FLOAT], D: Optional[FLOAT],
         bias: Optional[FLOAT], initial_state: Optional[FLOAT], rule: str, direction: str, combine: str, softplus: bool,
         A_per_token: bool, return_final_state: bool, save_states: bool, backend: str, regime: str):
    """`torch.ops.vision_longhorn.scan`."""
    both, d_state = direction == "both", k.shape[-1]

    def of(g: int, value, ndim: int):
        """Direction g's part of a tensor of `ndim` axes, or one more in front if each direction has its own."""
        return value if value is None or len(value.shape) == ndim else _entry(value, g)

    def tokens(g: int, value):
        return op.Transpose(of(g, value, 3), perm=[1, 0, 2])

    ys, states = [], []
    for g, backward in enumerate((False, True) if both else (direction == "backward",)):
        x_g, step_g, A_g = tokens(g, x), tokens(g, step), None
        if bias is not None:
            step_g = op.Add(step_g, of(g, bias, 1))
        if A is not None:
            A_g = tokens(g, A) if A_per_token else op.Transpose(of(g, A, 2), perm=[1, 0])
        state = _zero_state(x_g, d_state) if initial_state is None else \
            op.Transpose(of(g, initial_state, 3), perm=[0, 2, 1])
        y, state = _recurrence(x_g, step_g, tokens(g, k), tokens(g, q), A_g, state, rule, softplus, A_per_token,
                               backward)
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
        A_log: Optional[FLOAT], D: FLOAT, norm_weight: Optional[FLOAT], rule: str, eps: float, save_states: bool,
        backend: str):
    """`torch.ops.vision_longhorn.mix`."""
    sets, d_inner, taps = conv_weight.shape
    rank = dt_proj.shape[2]
    d_state = (x_proj.shape[1] - rank) // 2
    x = op.Transpose(_slice(xz, 0, d_inner, 2), perm=[0, 2, 1])  # (B, D, L), as Conv takes it

    def prepared(s: int):
        """Of a set of parameters: convolved x (L, B, D), step sizes with their bias, keys and queries, A."""
        weight, pads = _entry(conv_weight, s), [taps - 1, 0]
        if s == 1:  # against the order of the tokens
            weight, pads = _slice(weight, -1, -taps - 1, 1, -1), [0, taps - 1]
        u = op.Conv(x, _axis(weight, 1), _entry(conv_bias, s), group=d_inner, kernel_shape=[taps], pads=pads)
        u = op.Transpose(_silu(u), perm=[2, 0, 1])
        low = op.MatMul(u, op.Transpose(_entry(x_proj, s), perm=[1, 0]))
        step = op.MatMul(_slice(low, 0, rank, 2), op.Transpose(_entry(dt_proj, s), perm=[1, 0]))
        k, q = (_slice(low, start, start + d_state, 2) for start in (rank, rank + d_state))
        A = None if A_log is None else op.Neg(op.Exp(op.Transpose(_entry(A_log, s), perm=[1, 0])))
        return u, op.Add(step, _entry(dt_bias, s)), k, q, A

    ys = []
    parameters = [prepared(s) for s in range(sets)]
    for g in (0, 1):
        s = min(g, sets - 1)
        u, *others = parameters[s]
        y, _ = _recurrence(u, *others, _zero_state(u, d_state), rule, True, False, g == 1)
        y = op.Add(y, op.Mul(_entry(D, s), u))
        if norm_weight is not None:
            mean = op.ReduceMean(op.Mul(y, y), _ints(-1), keepdims=1)
            y = op.Mul(op.Div(y, op.Sqrt(op.Add(mean, eps))), _entry(norm_weight, g))
        ys.append(y)
    y = op.Add(*ys) if norm_weight is not None else op.Mul(op.Add(*ys), 0.5)
    y = op.Mul(op.Transpose(y, perm=[1, 0, 2]), _silu(_slice(xz, d_inner, 2 * d_inner, 2)))
    return y, op.Identity(y), op.Identity(y), op.Identity(y)


# For `torch.onnx.export(..., dynamo=True, custom_translation_table=TRANSLATIONS, opset_version=OPSET)`.
TRANSLATIONS = {torch.ops.vision_longhorn.mix.default: mix, torch.ops.vision_longhorn.scan.default: scan}
