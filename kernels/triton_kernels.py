"""The Triton kernels of the scans. `triton_scan` launches them; docs/scan.md explains and derives them.

Every kernel keeps the states of its channels in registers as a tuple of `NI` tensors, one for each state that a lane
owns, and is one warp: channels along the lanes, so that nothing but the sums over channels crosses lanes, no shared
memory is touched and no barrier is needed. With more than 16 states `NS` groups of lanes share a channel: a tensor of
states has the shape (NS, BC), what belongs to a channel (1, BC), and a sum over states crosses NS lanes.

Tokens beyond the end of a sequence repeat the last one with a step size of zero: they change nothing and nothing of
them is stored, so loads need no mask. Channels beyond D repeat the last one, and no gradient enters them.
"""

import inspect
import os

import triton
import triton.language as tl

# Read when the kernels are decorated, so the variable must be set before the first import.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

DIAGONAL = tl.constexpr(0)
EXACT = tl.constexpr(1)
MAMBA = tl.constexpr(2)
# Only what changes the code is compiled for: not lengths, not strides (`ALIGNED` tells what matters about those), not
# where rows of k and q begin (`K_PACK`, `Q_PACK`).
_RUNTIME = [f"{name}_{axis}" for name in ("x", "step", "k", "q", "A", "z", "D", "bias", "dy", "start", "adjoint")
            for axis in "gbsl"] + ["L", "B", "padded", "size", "blocks", "segments", "span", "A_d", "A_n",
                                   "start_d", "start_n", "adjoint_d", "adjoint_n"]
_UNALIGNED = ["k_ptr", "q_ptr", "A_ptr", "D_ptr", "bias_ptr", "start_ptr", "adjoint_ptr"]
LOG2E = tl.constexpr(1.4426950408889634)
# 2^125 is far inside float32; a step whose logit lies below -87 has beta < 1e-37 and writes nothing float32 could show.
MAX_EXPONENT = tl.constexpr(125.0)


def _kernel(function):
    names = inspect.signature(function).parameters
    return triton.jit(do_not_specialize=[name for name in _RUNTIME if name in names],
                      do_not_specialize_on_alignment=[name for name in _UNALIGNED if name in names])(function)


@triton.jit
def _reciprocal(v, PTX: tl.constexpr):
    # Triton's division guards the ends of the exponent range, at six instructions; 1 <= v <= 2^126 needs no guard.
    if PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True,
                                         pack=1)
    else:
        return 1.0 / v


@triton.jit
def _at(index, stride, ALIGNED: tl.constexpr):
    """index * stride; ALIGNED promises that the stride is a multiple of 16, so that loads may be wide."""
    offset = index.to(tl.int64) * stride
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return offset


@triton.jit
def _load_tokens(row, origin, sign, i, stride, L, U: tl.constexpr, BC: tl.constexpr, ALIGNED: tl.constexpr):
    """U tokens from the i-th of the scan on, zeros beyond the last one and before the first."""
    ptrs = row + _at(origin + sign * i, stride, ALIGNED)
    tokens = ()
    for j in tl.static_range(U):
        offset = j * _at(sign, stride, ALIGNED)
        inside = _all_lanes(i + j, 1, BC)
        tokens = tokens + (tl.load(ptrs + offset, mask=(inside >= 0) & (inside < L), other=0),)
    return tokens


@triton.jit
def _all_lanes(value, NS: tl.constexpr, BC: tl.constexpr):
    # Conditions on tokens are tensors: the interpreter has no masks made of scalars.
    return tl.zeros([NS, BC], tl.int32) + value


@triton.jit
def _softplus(v):
    # log(1 + u) loses the digits of a small u; log(w) / (w - 1) with the rounded w = 1 + u restores them.
    u = tl.exp(-tl.abs(v))
    w = 1.0 + u
    return tl.maximum(v, 0.0) + tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))


@triton.jit
def _load_row(ptr, first, N: tl.constexpr, NI: tl.constexpr, NS: tl.constexpr, PACK: tl.constexpr):
    """A lane's share of N numbers at `ptr`, as they lie in memory: with PACK > 1, PACK of them in 64 bits."""
    row = ()
    if PACK > 1:
        packed = ptr.to(tl.pointer_type(tl.int64), bitcast=True)
        for i in tl.static_range(NI // PACK):
            row = row + (tl.load(packed + i),)
    else:
        for i in tl.static_range(NI):
            if NS * NI == N:
                row = row + (tl.load(ptr + i),)
            else:
                row = row + (tl.load(ptr + i, mask=first + i < N, other=0),)
    return row


@triton.jit
def _load_rows(row, stride, origin, sign, i, L, U: tl.constexpr, first, N: tl.constexpr, NI: tl.constexpr,
               NS: tl.constexpr, PACK: tl.constexpr):
    """`_load_row` of U tokens from the i-th of the scan on, the last one again beyond the end."""
    rows = ()
    for j in tl.static_range(U):
        t = origin + sign * tl.maximum(tl.minimum(i + j, L - 1), 0)
        rows = rows + _load_row(row + t.to(tl.int64) * stride, first, N, NI, NS, PACK)
    return rows


@triton.jit
def _part(values, j: tl.constexpr, parts: tl.constexpr):
    """The j-th of equal parts of a tuple."""
    part = ()
    for i in tl.static_range(len(values) // parts):
        part = part + (values[j * (len(values) // parts) + i],)
    return part


@triton.jit
def _unpack(row, like, NI: tl.constexpr, PACK: tl.constexpr):
    """The numbers of `_load_row` as float32; `like` is the pointer that they were read from."""
    values = ()
    for i in tl.static_range(NI):
        if PACK == 1:
            values = values + (row[i].to(tl.float32),)
        else:
            if PACK == 2:
                word = (row[i // 2] >> (32 * (i % 2))).to(tl.int32)
                values = values + (word.to(tl.float32, bitcast=True),)
            else:
                if like.dtype.element_ty == tl.bfloat16:
                    word = (row[i // 4] >> (32 * (i % 4 // 2))).to(tl.int32)
                    if i % 2 == 0:
                        values = values + ((word << 16).to(tl.float32, bitcast=True),)
                    else:
                        values = values + ((word & -65536).to(tl.float32, bitcast=True),)
                else:
                    word = (row[i // 4] >> (16 * (i % 4))).to(tl.int16)
                    values = values + (word.to(tl.float16, bitcast=True).to(tl.float32),)
    return values


@triton.jit
def _dot(a, b, NI: tl.constexpr, NS: tl.constexpr):
    """Sum over the states of a * b, in up to four chains; (1, BC), or a scalar where a and b are."""
    c0 = a[0] * b[0]
    if NI < 4:
        for i in tl.static_range(1, NI):
            c0 += a[i] * b[i]
    else:
        c1 = a[1] * b[1]
        c2 = a[2] * b[2]
        c3 = a[3] * b[3]
        for i in tl.static_range(4, NI):
            if i % 4 == 0:
                c0 += a[i] * b[i]
            elif i % 4 == 1:
                c1 += a[i] * b[i]
            elif i % 4 == 2:
                c2 += a[i] * b[i]
            else:
                c3 += a[i] * b[i]
        c0 = (c0 + c1) + (c2 + c3)
    if NS > 1:
        c0 = tl.sum(c0, 0, keep_dims=True)
    return c0


@triton.jit
def _sum(a, NI: tl.constexpr, NS: tl.constexpr):
    """Sum over the states, as `_dot`."""
    c0 = a[0]
    if NI < 4:
        for i in tl.static_range(1, NI):
            c0 += a[i]
    else:
        c1 = a[1]
        c2 = a[2]
        c3 = a[3]
        for i in tl.static_range(4, NI):
            if i % 4 == 0:
                c0 += a[i]
            elif i % 4 == 1:
                c1 += a[i]
            elif i % 4 == 2:
                c2 += a[i]
            else:
                c3 += a[i]
        c0 = (c0 + c1) + (c2 + c3)
    if NS > 1:
        c0 = tl.sum(c0, 0, keep_dims=True)
    return c0


@triton.jit
def _step_size(u, bias, norm, keep, RULE: tl.constexpr, SOFTPLUS: tl.constexpr, PTX: tl.constexpr):
    """eps and, for Longhorn, exp(-logit); Mamba's dt stands for eps. A token beyond the end, where `norm`, ||k||^2, is
    infinite (Longhorn) or `keep` is 0 (Mamba), has eps 0: as if it were not there."""
    if RULE == MAMBA:
        if SOFTPLUS:
            eps = _softplus(u.to(tl.float32) + bias) * keep
        else:
            eps = (u.to(tl.float32) + bias) * keep
        return eps, eps
    # `_bias` has the factor already.
    e = tl.exp2(tl.minimum(u.to(tl.float32) * -LOG2E + bias, MAX_EXPONENT))
    return _reciprocal(1.0 + e + norm, PTX), e


@triton.jit
def _load_bias(ptr, RULE: tl.constexpr):
    bias = tl.load(ptr).to(tl.float32)
    if RULE == MAMBA:
        return bias
    else:
        return bias * -LOG2E


@triton.jit
def _load_norm(ptr, i, RULE: tl.constexpr):
    if RULE == MAMBA:
        return 0.0
    else:
        return tl.load(ptr + i)


@triton.jit(do_not_specialize=["L", "B", "padded", "k_g", "k_b", "k_l"], do_not_specialize_on_alignment=["k_ptr"])
def _norm_kernel(k_ptr, norm_ptr, L, B, padded, k_g, k_b, k_l, FIRST_REVERSED: tl.constexpr, N: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):
    """||k||^2 in the order of the scan, (G, B, padded), infinite from L on."""
    b = tl.program_id(1).to(tl.int64)
    g = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, BLOCK_N)
    t = tl.where(g + FIRST_REVERSED > 0, L - 1 - i, i).to(tl.int64)
    k = tl.load(k_ptr + g * k_g + b * k_b + t[:, None] * k_l + n[None, :],
                mask=(i < L)[:, None] & (n < N)[None, :], other=0).to(tl.float32)
    norm = tl.where(i < L, tl.sum(k * k, 1), float("inf"))
    tl.store(norm_ptr + (g * B + b) * padded + i, norm, mask=i < padded)


@triton.jit
def _advance(S, x, k, A, eps, e, NI: tl.constexpr, NS: tl.constexpr, N: tl.constexpr, RULE: tl.constexpr):
    """One step of the recurrence: the new state, and w, what is written along k."""
    new = ()
    if RULE == EXACT:
        w = eps * (x - _dot(S, k, NI, NS))
        for i in tl.static_range(NI):
            new = new + (S[i] + k[i] * w,)
    else:
        w = eps * x
        for i in tl.static_range(NI):
            if RULE == MAMBA:
                new = new + (tl.exp2(A[i] * eps) * S[i] + k[i] * w,)
            elif N == 1:
                new = new + (_lone_decay(k[i], eps, e) * S[i] + k[i] * w,)
            else:
                new = new + (S[i] + k[i] * (w - eps * (k[i] * S[i])),)
    return new, w


@triton.jit
def _load_A(ptr, like, first, N: tl.constexpr, NI: tl.constexpr, NS: tl.constexpr):
    """A token's A, for exp2."""
    return _scale(_unpack(_load_row(ptr, first, N, NI, NS, 1), like, NI, 1), LOG2E, NI)


@triton.jit
def _walk(S, x_row, x_l, step_row, step_l, k_row, k_l, A_row, A_l, norm_row, bias, A, k_ptr, A_ptr, scratch_row, d_ok,
          origin, sign, begin, end, L, first, ALIGNED: tl.constexpr, RULE: tl.constexpr, SOFTPLUS: tl.constexpr,
          A_PER_TOKEN: tl.constexpr, D: tl.constexpr, N: tl.constexpr, NI: tl.constexpr, NS: tl.constexpr,
          K_PACK: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, PTX: tl.constexpr):
    """From the state before token `begin` to the one after token `end - 1`, U tokens at a time; the states between are
    stored one after the other at `scratch_row`."""
    for i in tl.range(begin, end, U, num_stages=1):
        xs = _load_tokens(x_row, origin, sign, i, x_l, L, U, BC, ALIGNED)
        us = _load_tokens(step_row, origin, sign, i, step_l, L, U, BC, ALIGNED)
        ks = _load_rows(k_row, k_l, origin, sign, i, L, U, first, N, NI, NS, K_PACK)
        norms = ()
        for j in tl.static_range(U):
            norms = norms + (_load_norm(norm_row, i + j, RULE),)
        for j in tl.static_range(U):
            k = _unpack(_part(ks, j, U), k_ptr, NI, K_PACK)
            A_t = A
            if A_PER_TOKEN:
                t = origin + sign * tl.minimum(i + j, L - 1)
                A_t = _load_A(A_row + t.to(tl.int64) * A_l, A_ptr, first, N, NI, NS)
            keep = tl.where(_all_lanes(i + j, 1, BC) < end, 1.0, 0.0)
            eps, e = _step_size(us[j], bias, norms[j], keep, RULE, SOFTPLUS, PTX)
            S, w = _advance(S, xs[j].to(tl.float32), k, A_t, eps, e, NI, NS, N, RULE)
        if i + U < end:
            _store_state(scratch_row + (i - begin) // U * (N * D), D, S, d_ok, first, N, NI, NS)
    return S


@triton.jit
def _lone_decay(k, eps, e):
    # With one state a large key leaves 1 - eps k^2 no digits; eps (1 + e) is the same without the difference.
    a = 1.0 - eps * (k * k)
    return tl.where(a < 0.5, eps * (1.0 + e), a)


@triton.jit
def _decay(k, A, eps, e, N: tl.constexpr, RULE: tl.constexpr):
    if RULE == MAMBA:
        return tl.exp2(A * eps)
    elif N == 1:
        return _lone_decay(k, eps, e)
    else:
        return 1.0 - eps * (k * k)


@triton.jit
def _fill(value, NI: tl.constexpr, NS: tl.constexpr, BC: tl.constexpr):
    state = ()
    for _ in tl.static_range(NI):
        state = state + (tl.full([NS, BC], value, tl.float32),)
    return state


@triton.jit
def _load_state(ptr, n_stride, first, N: tl.constexpr, NI: tl.constexpr, NS: tl.constexpr):
    """State i of the lane from ptr + i n_stride; `ptr` points at its first state."""
    state = ()
    for i in tl.static_range(NI):
        if NS * NI == N:
            state = state + (tl.load(ptr + i * n_stride).to(tl.float32),)
        else:
            state = state + (tl.load(ptr + i * n_stride, mask=first + i < N, other=0).to(tl.float32),)
    return state


@triton.jit
def _store_state(ptr, n_stride, state, ok, first, N: tl.constexpr, NI: tl.constexpr, NS: tl.constexpr):
    for i in tl.static_range(NI):
        if NS * NI == N:
            tl.store(ptr + i * n_stride, state[i], mask=ok)
        else:
            tl.store(ptr + i * n_stride, state[i], mask=ok & (first + i < N))


@triton.jit
def _scale(row, factor, NI: tl.constexpr):
    scaled = ()
    for i in tl.static_range(NI):
        scaled = scaled + (row[i] * factor,)
    return scaled


@_kernel
def _forward_kernel(
    x_ptr, step_ptr, k_ptr, norm_ptr, q_ptr, A_ptr, z_ptr, D_ptr, bias_ptr, start_ptr, y_ptr, final_ptr, decay_ptr,
    saved_ptr, written_ptr,
    L, B, padded, blocks, segments, span,
    x_g, x_b, x_l, step_g, step_b, step_l, step_d, k_g, k_b, k_l, q_g, q_b, q_l, A_g, A_b, A_l, A_d, A_n,
    z_g, z_b, z_l, D_g, bias_g, bias_d, start_g, start_b, start_s, start_d, start_n, scale,
    RULE: tl.constexpr, SOFTPLUS: tl.constexpr, A_PER_TOKEN: tl.constexpr, HAS_Z: tl.constexpr, HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr, FIRST_REVERSED: tl.constexpr, HAS_START: tl.constexpr, OUTPUT: tl.constexpr,
    SUMMARY: tl.constexpr, SAVE: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, N: tl.constexpr, NI: tl.constexpr, NS: tl.constexpr, K_PACK: tl.constexpr, Q_PACK: tl.constexpr,
    T: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, DEEP: tl.constexpr, PTX: tl.constexpr,
):
    """One segment of `span` tokens, BC channels of one sequence and direction.

    OUTPUT writes y. SAVE keeps what the backward pass starts from: the state before every T-th token, or, for the exact
    rule, the states after T tokens each and what every token wrote, w. The state after the segment goes to final_ptr:
    with SUMMARY as (G, B, segments, N, D), beside the product of its decays at decay_ptr, else, for the last segment
    alone, as (G, B, D, N).
    """
    # Batch, blocks and segments share the grid's first axis: only that one may be longer than 65,535.
    block = tl.program_id(0) % blocks
    segment = tl.program_id(0) // blocks % segments
    b = (tl.program_id(0) // blocks // segments).to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    backward = g + FIRST_REVERSED > 0
    sign = tl.where(backward, -1, 1)
    origin = tl.where(backward, L - 1, 0)  # token i of the scan is token origin + sign i of the sequence
    if SUMMARY:
        if segment == segments - 1:
            return  # no segment follows it
    begin = segment * span
    end = tl.minimum(L, begin + span)

    lane = block * BC + tl.arange(0, BC)[None, :]  # (1, BC)
    d_ok = lane < D
    d = lane if WHOLE else tl.minimum(lane, D - 1)
    first = tl.arange(0, NS)[:, None] * NI + tl.zeros([NS, BC], tl.int32)  # (NS, BC), the lane's first state
    x_row = x_ptr + _at(g, x_g, ALIGNED) + _at(b, x_b, ALIGNED) + d
    step_row = step_ptr + _at(g, step_g, ALIGNED) + _at(b, step_b, ALIGNED) + d * step_d
    z_row = z_ptr + _at(g, z_g, ALIGNED) + _at(b, z_b, ALIGNED) + d
    y_row = y_ptr + _at((g * B + b) * L, D, ALIGNED) + d
    written_row = written_ptr + _at((g * B + b) * L, D, ALIGNED) + d
    k_row = k_ptr + g * k_g + b * k_b
    q_row = q_ptr + g * q_g + b * q_b
    A_row = A_ptr + g * A_g + b * A_b
    norm_row = norm_ptr + (g * B + b) * padded
    if NS > 1:
        k_row = k_row + first
        q_row = q_row + first
    saved_ptr += ((g * ((L + T - 1) // T) + begin // T) * B + b) * (N * D) + first * D + d

    skip = tl.zeros([1, BC], tl.float32)
    bias = tl.zeros([1, BC], tl.float32)
    if HAS_D:
        skip = tl.load(D_ptr + g * D_g + d).to(tl.float32)
    if HAS_BIAS:
        bias = _load_bias(bias_ptr + g * bias_g + d * bias_d, RULE)
    A = ()
    total = ()  # Mamba's decay over the segment is one exp of the sum of dt, or of dt A, so far
    if RULE == MAMBA:
        if A_PER_TOKEN:
            if NS > 1:
                A_row = A_row + first
            total = _fill(0.0, NI, NS, BC)
        else:
            A = _scale(_load_state(A_row + d * A_d + first * A_n, A_n, first, N, NI, NS), LOG2E, NI)
            total = (tl.zeros([1, BC], tl.float32),)
    else:
        total = _fill(1.0, NI, NS, BC)
    if HAS_START:
        S = _load_state(start_ptr + g * start_g + b * start_b + segment * start_s + d * start_d + first * start_n,
                        start_n, first, N, NI, NS)
    else:
        S = _fill(0.0, NI, NS, BC)

    # What a token needs is loaded before it is used: x, logits and z for U tokens at a time, k and q for the next one.
    xs = _load_tokens(x_row, origin, sign, begin, x_l, L, U, BC, ALIGNED)
    us = _load_tokens(step_row, origin, sign, begin, step_l, L, U, BC, ALIGNED)
    zs = ()
    if HAS_Z and OUTPUT:
        zs = _load_tokens(z_row, origin, sign, begin, z_l, L, U, BC, ALIGNED)
    # Rows of k and q one token ahead, or (DEEP) as many as the others.
    AHEAD: tl.constexpr = U if DEEP else 1
    ks = _load_rows(k_row, k_l, origin, sign, begin, L, AHEAD, first, N, NI, NS, K_PACK)
    qs = ()
    if OUTPUT:
        qs = _load_rows(q_row, q_l, origin, sign, begin, L, AHEAD, first, N, NI, NS, Q_PACK)
    for i in tl.range(begin, end, U, num_stages=1):
        next_xs = _load_tokens(x_row, origin, sign, i + U, x_l, L, U, BC, ALIGNED)
        next_us = _load_tokens(step_row, origin, sign, i + U, step_l, L, U, BC, ALIGNED)
        next_zs = ()
        if HAS_Z and OUTPUT:
            next_zs = _load_tokens(z_row, origin, sign, i + U, z_l, L, U, BC, ALIGNED)
        next_ks = ks
        next_qs = qs
        if DEEP:
            next_ks = _load_rows(k_row, k_l, origin, sign, i + U, L, U, first, N, NI, NS, K_PACK)
            if OUTPUT:
                next_qs = _load_rows(q_row, q_l, origin, sign, i + U, L, U, first, N, NI, NS, Q_PACK)
        if SAVE and RULE != EXACT:
            if i % T == 0:
                _store_state(saved_ptr, D, S, d_ok, first, N, NI, NS)
                saved_ptr += B.to(tl.int64) * (N * D)
        for j in tl.static_range(U):
            t = origin + sign * tl.minimum(i + j, L - 1)
            k = _unpack(_part(ks, j if DEEP else 0, AHEAD), k_ptr, NI, K_PACK)
            q = ()
            if OUTPUT:
                q = _unpack(_part(qs, j if DEEP else 0, AHEAD), q_ptr, NI, Q_PACK)
            if not DEEP:
                ks = _load_rows(k_row, k_l, origin, sign, i + j + 1, L, 1, first, N, NI, NS, K_PACK)
                if OUTPUT:
                    qs = _load_rows(q_row, q_l, origin, sign, i + j + 1, L, 1, first, N, NI, NS, Q_PACK)
            A_t = A
            if A_PER_TOKEN:
                A_t = _load_A(A_row + t.to(tl.int64) * A_l, A_ptr, first, N, NI, NS)
            x = xs[j].to(tl.float32)
            inside = _all_lanes(i + j, 1, BC) < end
            keep = tl.where(inside, 1.0, 0.0)
            eps, e = _step_size(us[j], bias, _load_norm(norm_row, i + j, RULE), keep, RULE, SOFTPLUS, PTX)
            if SUMMARY and RULE == DIAGONAL:
                w = eps * x
                new = ()
                new_total = ()
                for n in tl.static_range(NI):
                    a = _decay(k[n], 0.0, eps, e, N, RULE)
                    new = new + (a * S[n] + k[n] * w,)
                    new_total = new_total + (total[n] * a,)
                S = new
                total = new_total
            else:
                S, w = _advance(S, x, k, A_t, eps, e, NI, NS, N, RULE)
            if SAVE and RULE == EXACT:
                tl.store(written_row + _at(t, D, ALIGNED), w, mask=d_ok & inside)
            if SUMMARY and RULE == MAMBA:
                if A_PER_TOKEN:
                    new = ()
                    for n in tl.static_range(NI):
                        new = new + (total[n] + A_t[n] * eps,)
                    total = new
                else:
                    total = (total[0] + eps,)
            if OUTPUT:
                y = _dot(S, q, NI, NS)
                if HAS_D:
                    y += skip * x
                if HAS_Z:
                    z = zs[j].to(tl.float32)
                    y *= z * _reciprocal(1.0 + tl.exp2(z * -LOG2E), PTX)
                tl.store(y_row + _at(t, D, ALIGNED), (y * scale).to(y_ptr.dtype.element_ty), mask=d_ok & inside)
        if SAVE and RULE == EXACT:
            if ((i + U) % T) * tl.maximum(end - i - U, 0) == 0:  # either is zero; older interpreters have no `|` here
                _store_state(saved_ptr, D, S, d_ok, first, N, NI, NS)
                saved_ptr += B.to(tl.int64) * (N * D)
        xs = next_xs
        us = next_us
        zs = next_zs
        if DEEP:
            ks = next_ks
            qs = next_qs
    if SUMMARY:
        at = ((g * B + b) * segments + segment) * (N * D) + first * D + d
        _store_state(final_ptr + at, D, S, d_ok, first, N, NI, NS)
        if RULE == MAMBA:
            new = ()
            for n in tl.static_range(NI):
                if A_PER_TOKEN:
                    new = new + (tl.exp2(total[n]),)
                else:
                    new = new + (tl.exp2(total[0] * A[n]),)
            total = new
        _store_state(decay_ptr + at, D, total, d_ok, first, N, NI, NS)
    else:
        if end == L:
            _store_state(final_ptr + ((g * B + b) * D + d) * N + first, 1, S, d_ok, first, N, NI, NS)


@_kernel
def _carry_kernel(
    local_ptr, decay_ptr, start_ptr, D, size, segments, B, start_g, start_b, start_d, start_n,
    HAS_START: tl.constexpr, REVERSED: tl.constexpr, BLOCK: tl.constexpr, U: tl.constexpr,
):
    """The state that enters each segment, in the place of what the segment adds to it: a walk over the segments with
    state = decay * state + local, from the first or (REVERSED, for adjoints) from the last. A state has `size` numbers,
    (N, D)."""
    row = tl.program_id(1).to(tl.int64)  # of (G, B)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    step = -size.to(tl.int64) if REVERSED else size.to(tl.int64)
    offset = row * segments * size + at
    if REVERSED:
        offset += (segments - 1) * size
    state = tl.zeros([BLOCK], tl.float32)
    if HAS_START:
        state = tl.load(start_ptr + row // B * start_g + row % B * start_b + at % D * start_d + at // D * start_n,
                        mask=ok, other=0).to(tl.float32)
    for s in tl.range(0, segments, U, num_stages=1):
        locals = ()
        decays = ()
        for j in tl.static_range(U):
            more = ok & (tl.zeros([BLOCK], tl.int32) + s + j < segments)  # a tensor, as in _all_lanes
            locals = locals + (tl.load(local_ptr + offset + j * step, mask=more, other=0),)
            decays = decays + (tl.load(decay_ptr + offset + j * step, mask=more, other=0),)
        for j in tl.static_range(U):
            more = ok & (tl.zeros([BLOCK], tl.int32) + s + j < segments)
            tl.store(local_ptr + offset + j * step, state, mask=more)
            state = decays[j] * state + locals[j]
        offset += U * step


@triton.jit
def _gate(dy, z, PTX: tl.constexpr):
    """dy silu(z), and dy silu'(z)."""
    sigmoid = _reciprocal(1.0 + tl.exp2(z * -LOG2E), PTX)
    silu = z * sigmoid
    return dy * silu, dy * (sigmoid + silu * (1.0 - sigmoid))


@_kernel
def _adjoint_kernel(
    step_ptr, k_ptr, norm_ptr, q_ptr, A_ptr, z_ptr, bias_ptr, dy_ptr, local_ptr, decay_ptr,
    L, B, padded, blocks, segments, span,
    step_g, step_b, step_l, step_d, k_g, k_b, k_l, q_g, q_b, q_l, A_g, A_b, A_l, A_d, A_n, z_g, z_b, z_l,
    bias_g, bias_d, dy_g, dy_b, dy_l, scale,
    RULE: tl.constexpr, SOFTPLUS: tl.constexpr, A_PER_TOKEN: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr, FIRST_REVERSED: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, N: tl.constexpr, NI: tl.constexpr, NS: tl.constexpr, K_PACK: tl.constexpr, Q_PACK: tl.constexpr,
    BC: tl.constexpr, U: tl.constexpr, PTX: tl.constexpr,
):
    """What each segment adds to the adjoint of the state, and the product of its decays: `_forward_kernel` with
    SUMMARY, walking the other way. For the rules whose decay is one number for each state."""
    block = tl.program_id(0) % blocks
    segment = tl.program_id(0) // blocks % segments
    b = (tl.program_id(0) // blocks // segments).to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    backward = g + FIRST_REVERSED > 0
    sign = tl.where(backward, -1, 1)
    origin = tl.where(backward, L - 1, 0)
    if segment == 0:
        return  # no segment follows it on the way back
    begin = segment * span
    end = tl.minimum(L, begin + span)

    lane = block * BC + tl.arange(0, BC)[None, :]  # (1, BC)
    d_ok = lane < D
    d = lane if WHOLE else tl.minimum(lane, D - 1)
    first = tl.arange(0, NS)[:, None] * NI + tl.zeros([NS, BC], tl.int32)  # (NS, BC)
    step_row = step_ptr + _at(g, step_g, ALIGNED) + _at(b, step_b, ALIGNED) + d * step_d
    z_row = z_ptr + _at(g, z_g, ALIGNED) + _at(b, z_b, ALIGNED) + d
    dy_row = dy_ptr + _at(g, dy_g, ALIGNED) + _at(b, dy_b, ALIGNED) + d
    k_row = k_ptr + g * k_g + b * k_b
    q_row = q_ptr + g * q_g + b * q_b
    A_row = A_ptr + g * A_g + b * A_b
    norm_row = norm_ptr + (g * B + b) * padded
    if NS > 1:
        k_row = k_row + first
        q_row = q_row + first
    bias = tl.zeros([1, BC], tl.float32)
    if HAS_BIAS:
        bias = _load_bias(bias_ptr + g * bias_g + d * bias_d, RULE)
    A = ()
    if RULE == MAMBA:
        if A_PER_TOKEN:
            if NS > 1:
                A_row = A_row + first
        else:
            A = _scale(_load_state(A_row + d * A_d + first * A_n, A_n, first, N, NI, NS), LOG2E, NI)
    adjoint = _fill(0.0, NI, NS, BC)
    total = _fill(1.0, NI, NS, BC)

    rounds = (end - begin + U - 1) // U
    last = begin + (rounds - 1) * U
    us = _load_tokens(step_row, origin, sign, last, step_l, L, U, BC, ALIGNED)
    gs = _load_tokens(dy_row, origin, sign, last, dy_l, L, U, BC, ALIGNED)
    zs = ()
    if HAS_Z:
        zs = _load_tokens(z_row, origin, sign, last, z_l, L, U, BC, ALIGNED)
    ks = _load_rows(k_row, k_l, origin, sign, last + U - 1, L, 1, first, N, NI, NS, K_PACK)
    qs = _load_rows(q_row, q_l, origin, sign, last + U - 1, L, 1, first, N, NI, NS, Q_PACK)
    for r in tl.range(0, rounds, num_stages=1):
        i = begin + (rounds - 1 - r) * U
        next_us = _load_tokens(step_row, origin, sign, i - U, step_l, L, U, BC, ALIGNED)
        next_gs = _load_tokens(dy_row, origin, sign, i - U, dy_l, L, U, BC, ALIGNED)
        next_zs = ()
        if HAS_Z:
            next_zs = _load_tokens(z_row, origin, sign, i - U, z_l, L, U, BC, ALIGNED)
        for j in tl.static_range(U - 1, -1, -1):
            keep = tl.where(_all_lanes(i + j, 1, BC) < end, 1.0, 0.0)
            t = origin + sign * tl.minimum(i + j, L - 1)
            k = _unpack(ks, k_ptr, NI, K_PACK)
            q = _unpack(qs, q_ptr, NI, Q_PACK)
            ks = _load_rows(k_row, k_l, origin, sign, i + j - 1, L, 1, first, N, NI, NS, K_PACK)
            qs = _load_rows(q_row, q_l, origin, sign, i + j - 1, L, 1, first, N, NI, NS, Q_PACK)
            A_t = A
            if A_PER_TOKEN:
                A_t = _load_A(A_row + t.to(tl.int64) * A_l, A_ptr, first, N, NI, NS)
            eps, e = _step_size(us[j], bias, _load_norm(norm_row, i + j, RULE), keep, RULE, SOFTPLUS, PTX)
            dy = gs[j].to(tl.float32) * (scale * keep)
            if HAS_Z:
                dy, slope = _gate(dy, zs[j].to(tl.float32), PTX)
            new = ()
            new_total = ()
            for n in tl.static_range(NI):
                a = _decay(k[n], A_t[n] if RULE == MAMBA else 0.0, eps, e, N, RULE)
                new = new + ((adjoint[n] + q[n] * dy) * a,)
                new_total = new_total + (total[n] * a,)
            adjoint = new
            total = new_total
        us = next_us
        zs = next_zs
        gs = next_gs
    at = ((g * B + b) * segments + segment) * (N * D) + first * D + d
    _store_state(local_ptr + at, D, adjoint, d_ok, first, N, NI, NS)
    _store_state(decay_ptr + at, D, total, d_ok, first, N, NI, NS)


@triton.jit
def _channels_of_a_lane(v, NS: tl.constexpr, W: tl.constexpr, BC: tl.constexpr):
    """(NS, BC) -> (NS, W): the sum over the channels that a lane holds."""
    if BC == W:
        return v
    else:
        return tl.sum(tl.reshape(v, [NS, W, BC // W]), 2)


@triton.jit
def _fold(values, V: tl.constexpr, NS: tl.constexpr, W: tl.constexpr):
    """Sums over W lanes of V tensors (NS, W) at once, V a power of two.

    Halving: a lane keeps one half of the values and gives its partner the other, so that V sums take V - 1 exchanges
    and not V log W. Lane l ends with the sums of the values l V/W, l V/W + 1, ...; with V < W, W/V lanes hold the same.
    """
    lane = tl.arange(0, W)[None, :] + tl.zeros([NS, W], tl.int32)
    for s in tl.static_range(6):
        if (W >> (s + 1)) > 0:
            if (V >> (s + 1)) > 0:
                upper = (lane & (W >> (s + 1))) != 0
                half = ()
                for i in tl.static_range(V >> (s + 1)):
                    kept = tl.where(upper, values[i + (V >> (s + 1))], values[i])
                    given = tl.where(upper, values[i], values[i + (V >> (s + 1))])
                    half = half + (kept + tl.gather(given, lane ^ (W >> (s + 1)), 1),)
                values = half
            else:
                values = (values[0] + tl.gather(values[0], lane ^ (W >> (s + 1)), 1),)
    return values


def _matrix_fold(values: int) -> tuple[str, str]:
    """PTX of `_fold` for one warp with 16 or 32 values, its first steps made by the matrix units, and its constraints.

    A product with a matrix of ones sums over the four lanes of each quad. With the ones in column n alone, value n
    comes to stand in column n; so four products take 16 values, and a lane holds 2 columns of 2 rows of the result. The
    sums over the eight quads are left, a quarter of the exchanges. Operands are rounded to TF32 (11 bits), sums are
    float32: for 16-bit inputs only.

    This takes it that lane l holds element l of each tensor, which Triton does not promise: the first operand is the
    number of the element, and where it is another than the lane's the result is NaN and not a wrong number.
    """
    tiles = values // 16
    code = ["{ .reg .pred p; .reg .u32 lane, quad, bit; .reg .f32 a, b, c;",
            f".reg .b32 one<8>; .reg .f32 s<{4 * tiles}>;", "mov.u32 lane, %laneid; shr.u32 quad, lane, 2;"]
    code += [f"setp.eq.u32 p, quad, {n}; selp.b32 one{n}, 0x3f800000, 0, p;" for n in range(8)]
    code += [f"mov.f32 s{i}, 0f00000000;" for i in range(4 * tiles)]
    for tile in range(tiles):
        sums = ", ".join(f"s{4 * tile + i}" for i in range(4))
        for m in range(0, 8, 2):
            first = 2 + 16 * tile + m
            code.append(f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{{sums}}}, "
                        f"{{${first}, ${first + 8}, ${first + 1}, ${first + 9}}}, {{one{m}, one{m + 1}}}, {{{sums}}};")
    left = 4 * tiles
    for bit in (16, 8, 4):
        if left > 1:
            left //= 2
            code.append(f"and.b32 bit, lane, {bit}; setp.ne.u32 p, bit, 0;")
            code += [f"selp.f32 a, s{i}, s{i + left}, p; selp.f32 b, s{i + left}, s{i}, p; "
                     f"shfl.sync.bfly.b32 c, a, {bit}, 31, 0xffffffff; add.f32 s{i}, b, c;" for i in range(left)]
        else:
            code.append(f"shfl.sync.bfly.b32 c, s0, {bit}, 31, 0xffffffff; add.f32 s0, s0, c;")
    code.append("setp.ne.u32 p, $1, lane; selp.f32 $0, 0f7FFFFFFF, s0, p; }")
    return " ".join(code), "=f" + ",r" * (1 + values)


_FOLD_16, _FOLD_16_CONSTRAINTS = (tl.constexpr(text) for text in _matrix_fold(16))
_FOLD_32, _FOLD_32_CONSTRAINTS = (tl.constexpr(text) for text in _matrix_fold(32))


@triton.jit
def _store_sums(ptr, values, token, end, GROUPS: tl.constexpr, N: tl.constexpr, NI: tl.constexpr, NS: tl.constexpr,
                V: tl.constexpr, W: tl.constexpr, FACTOR: tl.constexpr, MATRIX: tl.constexpr):
    """Sum `values`, GROUPS times NI tensors (NS, W), over the lanes and store state n of a group at ptr[group N + n],
    if token < end; the first group times FACTOR. V is GROUPS NI or the next power of two."""
    for _ in tl.static_range(V - GROUPS * NI):
        values = values + (tl.zeros([NS, W], tl.float32),)
    lane = tl.arange(0, W)[None, :] + tl.zeros([NS, W], tl.int32)
    index = lane * V // W
    valid = lane % (W // V if V < W else 1) == 0
    if MATRIX:
        words = (lane,)
        for i in tl.static_range(V):
            words = words + (values[i].to(tl.int32, bitcast=True),)
        if V == 32:
            sums = (tl.inline_asm_elementwise(_FOLD_32, _FOLD_32_CONSTRAINTS, words, dtype=tl.float32, is_pure=True,
                                              pack=1),)
            index = (lane & 24) + 2 * (lane & 3) + (lane // 4 & 1)
        else:
            sums = (tl.inline_asm_elementwise(_FOLD_16, _FOLD_16_CONSTRAINTS, words, dtype=tl.float32, is_pure=True,
                                              pack=1),)
            index = (lane // 2 & 8) + 2 * (lane & 3) + (lane // 8 & 1)
            valid = (lane & 4) == 0
    else:
        sums = _fold(values, V, NS, W)
    part = tl.arange(0, NS)[:, None] + tl.zeros([NS, W], tl.int32)
    for j in tl.static_range(V // W if V > W else 1):
        group = (index + j) // NI
        n = part * NI + (index + j) % NI
        ok = valid & (group < GROUPS) & (n < N) & (_all_lanes(token, NS, W) < end)
        total = sums[j]
        if FACTOR != 1.0:
            total = tl.where(group == 0, FACTOR * total, total)
        tl.store(ptr + group * N + n, total, mask=ok)


@_kernel
def _backward_kernel(
    x_ptr, step_ptr, k_ptr, norm_ptr, q_ptr, A_ptr, z_ptr, D_ptr, bias_ptr, saved_ptr, written_ptr, dy_ptr, adjoint_ptr,
    dx_ptr, dstep_ptr, sums_ptr, dA_ptr, dz_ptr, dD_ptr, dbias_ptr, dinitial_ptr, scratch_ptr,
    L, B, padded, blocks, segments, span,
    x_g, x_b, x_l, step_g, step_b, step_l, step_d, k_g, k_b, k_l, q_g, q_b, q_l, A_g, A_b, A_l, A_d, A_n,
    z_g, z_b, z_l, D_g, bias_g, bias_d, dy_g, dy_b, dy_l,
    adjoint_g, adjoint_b, adjoint_s, adjoint_d, adjoint_n, scale,
    RULE: tl.constexpr, SOFTPLUS: tl.constexpr, A_PER_TOKEN: tl.constexpr, HAS_Z: tl.constexpr, HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr, FIRST_REVERSED: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_ADJOINT: tl.constexpr,
    WHOLE: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, N: tl.constexpr, NI: tl.constexpr, NS: tl.constexpr, K_PACK: tl.constexpr, Q_PACK: tl.constexpr,
    T: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, U: tl.constexpr, V: tl.constexpr, VA: tl.constexpr,
    MATRIX: tl.constexpr, PTX: tl.constexpr,
):
    """One segment of `span` tokens backwards, BC channels of one sequence and direction.

    The tokens are taken in parts of U, the last part first: walk forward to the part from a saved state, through it
    with its states kept in registers, then back over them. The exact rule needs no walk forward:
    its steps are undone by subtracting what each wrote, from the saved state after every T-th token.
    """
    block = tl.program_id(0) % blocks
    segment = tl.program_id(0) // blocks % segments
    b = (tl.program_id(0) // blocks // segments).to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    backward = g + FIRST_REVERSED > 0
    sign = tl.where(backward, -1, 1)
    origin = tl.where(backward, L - 1, 0)
    begin = segment * span
    end = tl.minimum(L, begin + span)

    lane = block * BC + tl.arange(0, BC)[None, :]  # (1, BC)
    d_ok = lane < D
    d = lane if WHOLE else tl.minimum(lane, D - 1)
    first = tl.arange(0, NS)[:, None] * NI + tl.zeros([NS, BC], tl.int32)  # (NS, BC)
    x_row = x_ptr + _at(g, x_g, ALIGNED) + _at(b, x_b, ALIGNED) + d
    step_row = step_ptr + _at(g, step_g, ALIGNED) + _at(b, step_b, ALIGNED) + d * step_d
    z_row = z_ptr + _at(g, z_g, ALIGNED) + _at(b, z_b, ALIGNED) + d
    dy_row = dy_ptr + _at(g, dy_g, ALIGNED) + _at(b, dy_b, ALIGNED) + d
    k_row = k_ptr + g * k_g + b * k_b
    q_row = q_ptr + g * q_g + b * q_b
    A_row = A_ptr + g * A_g + b * A_b
    norm_row = norm_ptr + (g * B + b) * padded
    if NS > 1:
        k_row = k_row + first
        q_row = q_row + first
    row = (g * B + b) * L  # of the (G, B, L, ...) gradients
    dx_row = dx_ptr + _at(row, D, ALIGNED) + d
    dstep_row = dstep_ptr + _at(row, D, ALIGNED) + d
    dz_row = dz_ptr + _at(row, D, ALIGNED) + d
    written_row = written_ptr + _at(row, D, ALIGNED) + d
    SUMS: tl.constexpr = 3 * N if A_PER_TOKEN else 2 * N
    sums_row = sums_ptr + (block * tl.num_programs(1).to(tl.int64) * B * L + row) * SUMS
    saved_row = saved_ptr + (g * ((L + T - 1) // T) * B + b) * (N * D) + first * D + d
    saved_c = B.to(tl.int64) * (N * D)

    # (G, B, segments, T / U - 1, N, D): each lane reads what it wrote.
    scratch_row = scratch_ptr + ((g * B + b) * segments + segment) * ((T // U - 1) * N * D) + first * D + d

    skip = tl.zeros([1, BC], tl.float32)
    bias = tl.zeros([1, BC], tl.float32)
    if HAS_D:
        skip = tl.load(D_ptr + g * D_g + d).to(tl.float32)
    if HAS_BIAS:
        bias = _load_bias(bias_ptr + g * bias_g + d * bias_d, RULE)
    A = ()
    dA = ()
    if RULE == MAMBA:
        if A_PER_TOKEN:
            if NS > 1:
                A_row = A_row + first
        else:
            A = _scale(_load_state(A_row + d * A_d + first * A_n, A_n, first, N, NI, NS), LOG2E, NI)
            dA = _fill(0.0, NI, NS, BC)
    G = _fill(0.0, NI, NS, BC)  # the adjoint
    if HAS_ADJOINT:
        G = _load_state(adjoint_ptr + g * adjoint_g + b * adjoint_b + segment * adjoint_s + d * adjoint_d
                        + first * adjoint_n, adjoint_n, first, N, NI, NS)
        if not WHOLE:
            masked = ()
            for n in tl.static_range(NI):
                masked = masked + (tl.where(d_ok, G[n], 0.0),)
            G = masked
    dD = tl.zeros([1, BC], tl.float32)
    dbias = tl.zeros([1, BC], tl.float32)

    # Loads stand far before their use, and before the stores that the compiler would not move them across.
    rounds = (end - begin + U - 1) // U
    last = begin + (rounds - 1) * U
    xs = _load_tokens(x_row, origin, sign, last, x_l, L, U, BC, ALIGNED)
    us = _load_tokens(step_row, origin, sign, last, step_l, L, U, BC, ALIGNED)
    gs = _load_tokens(dy_row, origin, sign, last, dy_l, L, U, BC, ALIGNED)
    zs = ()
    ws = ()
    if HAS_Z:
        zs = _load_tokens(z_row, origin, sign, last, z_l, L, U, BC, ALIGNED)
    if RULE == EXACT:
        ws = _load_tokens(written_row, origin, sign, last, D, L, U, BC, ALIGNED)
    # The state after a part is the one before the part that follows; for the last part (exact: part of a chunk) it is
    # found in the loop.
    S = _fill(0.0, NI, NS, BC)
    k_next = _load_rows(k_row, k_l, origin, sign, last + U - 1 if RULE == EXACT else last, L, 1, first, N, NI, NS,
                        K_PACK)
    for r in tl.range(0, rounds, num_stages=1):
        i = begin + (rounds - 1 - r) * U
        q_next = _load_rows(q_row, q_l, origin, sign, i + U - 1, L, 1, first, N, NI, NS, Q_PACK)
        norms = ()
        for j in tl.static_range(U):
            norms = norms + (_load_norm(norm_row, i + j, RULE),)
        if RULE == EXACT:
            if ((i + U) % T) * r == 0:  # either is zero
                S = _load_state(saved_row + i // T * saved_c, D, first, N, NI, NS)
        states = S  # one after the other the states before the tokens of the part
        epss = ()
        es = ()
        if RULE != EXACT:
            # The first part to be taken of a chunk walks to it, and leaves the states before the others on its way.
            start = saved_row + i // T * saved_c
            walked = i // T * T
            if U < T:
                if (i % T - (T - U)) * r == 0:  # either is zero
                    walked = i
                elif i % T > 0:
                    start = scratch_row + (i % T // U - 1) * (N * D)
            state = _load_state(start, D, first, N, NI, NS)
            if U < T:
                state = _walk(state, x_row, x_l, step_row, step_l, k_row, k_l, A_row, A_l, norm_row, bias, A, k_ptr,
                              A_ptr, scratch_row, d_ok, origin, sign, i // T * T, walked, L, first, ALIGNED, RULE,
                              SOFTPLUS, A_PER_TOKEN, D, N, NI, NS, K_PACK, BC, U, PTX)
            states = state
            for j in tl.static_range(U):
                keep = tl.where(_all_lanes(i + j, 1, BC) < end, 1.0, 0.0)
                eps, e = _step_size(us[j], bias, norms[j], keep, RULE, SOFTPLUS, PTX)
                epss = epss + (eps,)
                es = es + (e,)
                k = _unpack(k_next, k_ptr, NI, K_PACK)
                A_t = A
                if A_PER_TOKEN:
                    t = origin + sign * tl.minimum(i + j, L - 1)
                    A_t = _load_A(A_row + t.to(tl.int64) * A_l, A_ptr, first, N, NI, NS)
                if j + 1 < U:
                    k_next = _load_rows(k_row, k_l, origin, sign, i + j + 1, L, 1, first, N, NI, NS, K_PACK)
                    state, w = _advance(state, xs[j].to(tl.float32), k, A_t, eps, e, NI, NS, N, RULE)
                    states = states + state
                else:
                    if r == 0:
                        S, w = _advance(state, xs[j].to(tl.float32), k, A_t, eps, e, NI, NS, N, RULE)

        next_xs = _load_tokens(x_row, origin, sign, i - U, x_l, L, U, BC, ALIGNED)
        next_us = _load_tokens(step_row, origin, sign, i - U, step_l, L, U, BC, ALIGNED)
        next_gs = _load_tokens(dy_row, origin, sign, i - U, dy_l, L, U, BC, ALIGNED)
        next_zs = ()
        next_ws = ()
        if HAS_Z:
            next_zs = _load_tokens(z_row, origin, sign, i - U, z_l, L, U, BC, ALIGNED)
        if RULE == EXACT:
            next_ws = _load_tokens(written_row, origin, sign, i - U, D, L, U, BC, ALIGNED)
        part = _at(origin + sign * i, D, ALIGNED)
        for j in tl.static_range(U - 1, -1, -1):
            t = origin + sign * tl.minimum(i + j, L - 1)
            inside = _all_lanes(i + j, 1, BC) < end
            ok = d_ok & inside
            at = part + j * _at(sign, D, ALIGNED)
            k = _unpack(k_next, k_ptr, NI, K_PACK)
            q = _unpack(q_next, q_ptr, NI, Q_PACK)
            if j > 0:
                k_next = _load_rows(k_row, k_l, origin, sign, i + j - 1, L, 1, first, N, NI, NS, K_PACK)
                q_next = _load_rows(q_row, q_l, origin, sign, i + j - 1, L, 1, first, N, NI, NS, Q_PACK)
            else:
                # The first key that the next part needs: of its first token, or (exact) of its last.
                k_next = _load_rows(k_row, k_l, origin, sign, i - 1 if RULE == EXACT else i - U, L, 1, first, N, NI, NS,
                                    K_PACK)
            A_t = A
            if A_PER_TOKEN:
                A_t = _load_A(A_row + t.to(tl.int64) * A_l, A_ptr, first, N, NI, NS)
            x = xs[j].to(tl.float32)
            if RULE == EXACT:
                eps, e = _step_size(us[j], bias, norms[j], 1.0, RULE, SOFTPLUS, PTX)
                w = ws[j]  # zero beyond the end
            else:
                eps = epss[j]
                e = es[j]
                w = eps * x
            dy = gs[j].to(tl.float32) * tl.where(inside, scale, 0.0)
            if not WHOLE:
                dy = tl.where(d_ok, dy, 0.0)
            if HAS_Z:
                o = _dot(S, q, NI, NS) + skip * x
                dy, dz = _gate(dy, zs[j].to(tl.float32), PTX)
                tl.store(dz_row + at, (dz * o).to(dz_ptr.dtype.element_ty), mask=ok)
            before = ()
            now = ()
            dq = ()
            for n in tl.static_range(NI):
                if RULE == EXACT:
                    before = before + (S[n] - k[n] * w,)
                else:
                    before = before + (states[j * NI + n],)
                dq = dq + (_channels_of_a_lane(S[n] * dy, NS, W, BC),)
                now = now + (G[n] + q[n] * dy,)
            dk = ()
            G = ()
            flows = ()
            if RULE == EXACT:
                reads = _dot(now, k, NI, NS)
                dx = eps * reads
                dlog = w * reads  # d loss / d log(eps), here and below
                for n in tl.static_range(NI):
                    dk = dk + (w * now[n] - dx * before[n],)
                    G = G + (now[n] - k[n] * dx,)
            elif RULE == MAMBA:
                reads = _dot(now, k, NI, NS)
                dx = eps * reads
                for n in tl.static_range(NI):
                    a = _decay(k[n], A_t[n], eps, eps, N, RULE)
                    dk = dk + (now[n] * w,)
                    G = G + (now[n] * a,)
                    flows = flows + (G[n] * before[n],)  # d loss / d(dt A)
                dlog = x * reads + _dot(flows, A_t, NI, NS) * 0.6931471805599453
            elif N == 1:
                a = _lone_decay(k[0], eps, e)
                reads = now[0] * k[0]
                dx = eps * reads
                flow = now[0] * before[0]
                dlog = eps * (x * reads - flow * (k[0] * k[0]))
                # Two terms of dk, without their cancellation for a large key.
                dk = (now[0] * w - 2.0 * k[0] * eps * (flow * a + w * reads),)
                G = (now[0] * a,)
            else:
                # With H = eps G: dk / 2 = H (x/2 - k S), and two sums of what is there already give dx and dlog.
                heads = ()
                for n in tl.static_range(NI):
                    scaled = now[n] * eps
                    head = k[n] * scaled
                    heads = heads + (head,)
                    dk = dk + (scaled * (0.5 * x - k[n] * before[n]),)
                    G = G + (now[n] - k[n] * head,)
                dx = _sum(heads, NI, NS)
                dlog = _dot(dk, k, NI, NS) + (0.5 * x) * dx
            if RULE == MAMBA:
                dstep = dlog
                if SOFTPLUS:
                    dstep = dlog * _reciprocal(1.0 + tl.exp2((us[j].to(tl.float32) + bias) * -LOG2E), PTX)
                dstep = tl.where(inside, dstep, 0.0)
                if A_PER_TOKEN:
                    dA_t = ()
                    for n in tl.static_range(NI):
                        dA_t = dA_t + (_channels_of_a_lane(flows[n] * eps, NS, W, BC),)
                    _store_sums(sums_row + t.to(tl.int64) * SUMS + 2 * N, dA_t, i + j, end, 1, N, NI, NS, VA, W,
                                1.0, MATRIX and VA >= 16)
                else:
                    new = ()
                    for n in tl.static_range(NI):
                        new = new + (dA[n] + flows[n] * eps,)
                    dA = new
            else:
                dstep = dlog * (eps * e)
            dD += dy * x
            dbias += dstep
            tl.store(dx_row + at, (dx + skip * dy).to(dx_ptr.dtype.element_ty), mask=ok)
            tl.store(dstep_row + at, dstep.to(dstep_ptr.dtype.element_ty), mask=ok)
            sums = ()
            if RULE == MAMBA or N == 1:
                for n in tl.static_range(NI):
                    sums = sums + (_channels_of_a_lane(dk[n], NS, W, BC),)
            else:
                # eps depends on the norm of k. The diagonal rule has its sums halved here, and all of them in the end.
                through_eps = _channels_of_a_lane((-1.0 if RULE == DIAGONAL else -2.0) * eps * dlog, 1, W, BC)
                for n in tl.static_range(NI):
                    sums = sums + (_channels_of_a_lane(dk[n], NS, W, BC) + k[n] * through_eps,)
            _store_sums(sums_row + t.to(tl.int64) * SUMS, sums + dq, i + j, end, 2, N, NI, NS, V, W,
                        2.0 if RULE == DIAGONAL and N > 1 else 1.0, MATRIX)
            S = before
        xs = next_xs
        us = next_us
        gs = next_gs
        zs = next_zs
        ws = next_ws

    piece = (g * B + b) * segments + segment
    if HAS_INITIAL:
        if segment == 0:
            _store_state(dinitial_ptr + ((g * B + b) * D + d) * N + first, 1, G, d_ok, first, N, NI, NS)
    if HAS_D:
        tl.store(dD_ptr + piece * D + d, dD, mask=d_ok)
    if HAS_BIAS:
        tl.store(dbias_ptr + piece * D + d, dbias, mask=d_ok)
    if RULE == MAMBA:
        if not A_PER_TOKEN:
            _store_state(dA_ptr + piece * N * D + first * D + d, D, dA, d_ok, first, N, NI, NS)
