"""How the kernels of a walk through time (`scan_forward`, `scan_backward`) find and load what they read.

A program is one warp, channels along its lanes. Its states are a tuple of NI tensors (NS, BC), where NS groups of lanes
share a channel; what belongs to a channel is (1, BC). States stay in registers: there is no shared memory and no
barrier. Tokens beyond the end have a step size of zero, and nothing of them is stored. Channels beyond D repeat the
last one, and no gradient enters them. RULE is a `rules.base.Functions`, `form` a `Form` and `at` a `Place`.
"""

from collections import namedtuple

import triton
import triton.language as tl

from .fragments import high, low
from .lanes import LOG2E, all_lanes, channels_of, fill, offset_of, part_of, scale_row, work_of

UNALIGNED = ["k_ptr", "norm_ptr", "q_ptr", "A_ptr", "D_ptr", "bias_ptr", "start_ptr", "adjoint_ptr"]
SPECIALIZED = ["step_d", "bias_d"]  # 1, or 0 for one number for all channels


# The constants that a kernel is compiled for, each a `tl.constexpr`; lengths and strides are not among them.
#   D channels, with N states each, of which a lane owns NI. BC: channels of a program, on W lanes or NS times W
#   U: tokens taken at a time. T: tokens from one saved state to the next. K_PACK, Q_PACK: numbers that one load takes
#   FIRST_REVERSED: the first direction goes from the last token to the first
#   WHOLE: all of a program's channels exist. ALIGNED: strides are multiples of 16, so that loads may be wide
#   PTX: NVIDIA's instructions may be used. MATRIX: sums over channels run on tensor cores
# forward:
#   OUTPUT: y is written. SUMMARY: only what a segment does to the state is computed
#   SAVE: what the backward pass starts from is kept. DEEP: rows of k and q are loaded as far ahead as the rest
# backward:
#   HAS_ADJOINT: the final state has a gradient, or another segment follows. V: 2 NI or the next power of two
Form = namedtuple(
    "Form",
    "D N NI NS BC W T U K_PACK Q_PACK FIRST_REVERSED SOFTPLUS A_PER_TOKEN HAS_Z HAS_D HAS_BIAS HAS_START HAS_ADJOINT "
    "HAS_INITIAL WHOLE ALIGNED PTX OUTPUT SUMMARY SAVE DEEP V MATRIX",
)


# The place of a program: block of channels, segment of time (the scan's tokens `begin` to `end` - 1), sequence and
# direction. The scan's i-th token is token origin + sign i of the sequence. d: channels (1, BC); d_ok: which of them
# exist; first: each lane's first state (NS, BC).
Place = namedtuple("Place", "block segment b g sign origin begin end L d d_ok first")
# Where the tokens of a sequence begin, and how far they are apart.
Tokens = namedtuple("Tokens", "row stride")
# The inputs of a token's step: x, logits and keys (`Tokens`), where ||k||^2 begins, the bias, and A (of all tokens, or
# `Tokens`).
Inputs = namedtuple("Inputs", "x step k norm bias A A_rows")


@triton.jit
def place_of(blocks, segments, span, L, form):
    block, segment, b, g = work_of(blocks, segments)
    backward = g + form.FIRST_REVERSED > 0
    begin = segment * span
    sign = tl.where(backward, -1, 1)
    origin = tl.where(backward, L - 1, 0)
    end = tl.minimum(L, begin + span)
    d, d_ok, first = channels_of(block, form.D, form.NI, form.NS, form.BC, form.WHOLE)
    return Place(block, segment, b, g, sign, origin, begin, end, L, d, d_ok, first)


@triton.jit
def token_at(at, i):
    """Returns the place in the sequence of the scan's i-th token, beyond the end that of the last one."""
    return at.origin + at.sign * tl.minimum(i, at.L - 1)


@triton.jit
def channels_at(ptr, at, stride_g, stride_b, stride, stride_d, form):
    row = ptr + offset_of(at.g, stride_g, form.ALIGNED) + offset_of(at.b, stride_b, form.ALIGNED)
    return Tokens(row + at.d * stride_d, stride)


@triton.jit
def states_at(ptr, at, stride_g, stride_b, stride, form):
    """Returns the `Tokens` of k, q or A from the lane's first state on. Where each lane keeps all states, loads are of
    scalars that all lanes share."""
    row = ptr + at.g * stride_g + at.b * stride_b
    if form.NS > 1:
        row = row + at.first
    return Tokens(row, stride)


@triton.jit
def result_at(ptr, at, row, form):
    return ptr + offset_of(row, form.D, form.ALIGNED) + at.d


@triton.jit
def load_tokens(tokens, at, i, form):
    """Loads U tokens from the scan's i-th on, with zeros beyond the last and before the first."""
    ptrs = tokens.row + offset_of(at.origin + at.sign * i, tokens.stride, form.ALIGNED)
    values = ()
    for j in tl.static_range(form.U):
        offset = j * offset_of(at.sign, tokens.stride, form.ALIGNED)
        inside = all_lanes(i + j, 1, form.BC)
        values = values + (tl.load(ptrs + offset, mask=(inside >= 0) & (inside < at.L), other=0),)
    return values


@triton.jit
def load_row(ptr, at, PACK: tl.constexpr, form):
    """Loads a lane's share of N numbers at `ptr`, PACK of them in 64 bits if PACK > 1."""
    row = ()
    if PACK > 1:
        packed = ptr.to(tl.pointer_type(tl.int64), bitcast=True)
        for i in tl.static_range(form.NI // PACK):
            row = row + (tl.load(packed + i),)
    else:
        for i in tl.static_range(form.NI):
            if form.NS * form.NI == form.N:
                row = row + (tl.load(ptr + i),)
            else:
                row = row + (tl.load(ptr + i, mask=at.first + i < form.N, other=0),)
    return row


@triton.jit
def load_rows(rows, at, i, COUNT: tl.constexpr, PACK: tl.constexpr, form):
    """Calls `load_row` for COUNT tokens from the scan's i-th on; the last one is repeated."""
    values = ()
    for j in tl.static_range(COUNT):
        t = at.origin + at.sign * tl.maximum(tl.minimum(i + j, at.L - 1), 0)
        values = values + load_row(rows.row + t.to(tl.int64) * rows.stride, at, PACK, form)
    return values


@triton.jit
def unpack(row, source, PACK: tl.constexpr, form):
    """Makes float32 of the numbers of `load_row`, which come from the `Tokens` `source`."""
    values = ()
    for i in tl.static_range(form.NI):
        if PACK == 1:
            values = values + (row[i].to(tl.float32),)
        elif PACK == 2:
            word = (row[i // 2] >> (32 * (i % 2))).to(tl.int32)
            values = values + (word.to(tl.float32, bitcast=True),)
        elif source.row.dtype.element_ty == tl.bfloat16:
            word = (row[i // 4] >> (32 * (i % 4 // 2))).to(tl.int32)
            values = values + (low(word) if i % 2 == 0 else high(word),)
        else:
            word = (row[i // 4] >> (16 * (i % 4))).to(tl.int16)
            values = values + (word.to(tl.float16, bitcast=True).to(tl.float32),)
    return values


@triton.jit
def load_bias(ptr, RULE: tl.constexpr, form):
    if form.HAS_BIAS:
        return RULE.value.scaled_bias(tl.load(ptr).to(tl.float32))
    else:
        return tl.zeros([1, form.BC], tl.float32)


@triton.jit
def load_skip(ptr, form):
    if form.HAS_D:
        return tl.load(ptr).to(tl.float32)
    else:
        return tl.zeros([1, form.BC], tl.float32)


@triton.jit
def load_norm(ptr, i, RULE: tl.constexpr):
    if RULE.value.takes_norm:
        return tl.load(ptr + i)
    else:
        return 0.0


@triton.jit
def load_norms(ptr, i, RULE: tl.constexpr, form):
    norms = ()
    for j in tl.static_range(form.U):
        norms = norms + (load_norm(ptr, i + j, RULE),)
    return norms


@triton.jit
def load_A(ptr, at, A_d, A_n, RULE: tl.constexpr, form):
    """Loads A of all tokens, for exp2; it is empty if each token has its own, or the rule takes none."""
    A = ()
    if RULE.value.needs_A:
        if not form.A_PER_TOKEN:
            A = scale_row(load_state(ptr + at.d * A_d + at.first * A_n, A_n, at, form), LOG2E)
    return A


@triton.jit
def A_of(inputs, at, t, form):
    """Returns token t's A, for exp2."""
    A = inputs.A
    if form.A_PER_TOKEN:
        row = load_row(inputs.A_rows.row + t.to(tl.int64) * inputs.A_rows.stride, at, 1, form)
        A = scale_row(unpack(row, inputs.A_rows, 1, form), LOG2E)
    return A


@triton.jit
def load_state(ptr, n_stride, at, form):
    state = ()
    for i in tl.static_range(form.NI):
        if form.NS * form.NI == form.N:
            state = state + (tl.load(ptr + i * n_stride).to(tl.float32),)
        else:
            state = state + (tl.load(ptr + i * n_stride, mask=at.first + i < form.N, other=0).to(tl.float32),)
    return state


@triton.jit
def store_state(ptr, n_stride, state, at, form):
    for i in tl.static_range(form.NI):
        if form.NS * form.NI == form.N:
            tl.store(ptr + i * n_stride, state[i], mask=at.d_ok)
        else:
            tl.store(ptr + i * n_stride, state[i], mask=at.d_ok & (at.first + i < form.N))


@triton.jit
def fill_state(value, form):
    return fill(value, form.NI, form.NS, form.BC)


@triton.jit
def rebuild(S, inputs, scratch_row, begin, end, at, RULE: tl.constexpr, form):
    """Walks from the state before token `begin` to the one after token `end - 1`, U tokens at a time, and stores the
    states between at `scratch_row`."""
    for i in tl.range(begin, end, form.U, num_stages=1):
        xs = load_tokens(inputs.x, at, i, form)
        us = load_tokens(inputs.step, at, i, form)
        ks = load_rows(inputs.k, at, i, form.U, form.K_PACK, form)
        norms = load_norms(inputs.norm, i, RULE, form)
        for j in tl.static_range(form.U):
            k = unpack(part_of(ks, j, form.U), inputs.k, form.K_PACK, form)
            A = A_of(inputs, at, token_at(at, i + j), form)
            keep = tl.where(all_lanes(i + j, 1, form.BC) < end, 1.0, 0.0)
            eps, e = RULE.value.step_size(us[j], inputs.bias, norms[j], keep, form)
            S, w = RULE.value.advance(S, xs[j].to(tl.float32), k, A, eps, e)
        if i + form.U < end:
            store_state(scratch_row + (i - begin) // form.U * (form.N * form.D), form.D, S, at, form)
    return S
