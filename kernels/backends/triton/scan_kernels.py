"""The Triton kernels of the scans. `scan` launches them; docs/scan.md explains and derives them.

Every kernel keeps the states of its channels in registers as a tuple of `NI` tensors, one for each state that a lane
owns, and is one warp: channels along the lanes, so that nothing but the sums over channels crosses lanes and no barrier
is needed; shared memory is touched at most to lay out the final state. With more than 16 states `NS` groups of lanes
share a channel: a tensor of states has the shape (NS, BC), what belongs to a channel (1, BC), and a sum over states
crosses NS lanes.

Tokens beyond the end of a sequence repeat the last one with a step size of zero: they change nothing and nothing of
them is stored, so loads need no mask. Channels beyond D repeat the last one, and no gradient enters them.

RULE holds the update rule's functions and flags, `rules.base.Functions`.
"""

import triton
import triton.language as tl

from .lanes import (
    LOG2E,
    all_lanes,
    channels_of,
    channels_of_a_lane,
    dot,
    fill,
    gate,
    kernel,
    load_A,
    load_bias,
    load_norm,
    load_rows,
    load_skip,
    load_state,
    load_tokens,
    offset_of,
    part_of,
    reciprocal,
    row_of,
    start_of_A,
    state_row_of,
    store_state,
    store_sums,
    tokens_of,
    unpack,
    walk,
    work_of,
)

# Only what changes the code is compiled for: not lengths, not strides (`ALIGNED` tells what matters about those), not
# where rows of k and q begin (`K_PACK`, `Q_PACK`).
_RUNTIME = [f"{name}_{axis}" for name in ("x", "step", "k", "q", "A", "z", "D", "bias", "dy", "start", "adjoint")
            for axis in "gbsl"] + ["L", "B", "padded", "size", "blocks", "segments", "span", "A_d", "A_n",
                                   "start_d", "start_n", "adjoint_d", "adjoint_n"]  # fmt: skip
_UNALIGNED = ["k_ptr", "norm_ptr", "q_ptr", "A_ptr", "D_ptr", "bias_ptr", "start_ptr", "adjoint_ptr"]


_kernel = kernel(_RUNTIME, _UNALIGNED)


@triton.jit(
    do_not_specialize=["L", "B", "padded", "k_g", "k_b", "k_l"], do_not_specialize_on_alignment=["k_ptr", "norm_ptr"]
)
def _norm_kernel(k_ptr, norm_ptr, L, B, padded, k_g, k_b, k_l, FIRST_REVERSED: tl.constexpr, N: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """||k||^2 in the order of the scan, (G, B, padded), infinite from L on."""
    blocks = (padded + BLOCK - 1) // BLOCK
    block, _, b, g = work_of(blocks, 1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, BLOCK_N)
    t = tl.where(g + FIRST_REVERSED > 0, L - 1 - i, i).to(tl.int64)
    k = tl.load(
        k_ptr + g * k_g + b * k_b + t[:, None] * k_l + n[None, :], mask=(i < L)[:, None] & (n < N)[None, :], other=0
    ).to(tl.float32)
    norm = tl.where(i < L, tl.sum(k * k, 1), float("inf"))
    tl.store(norm_ptr + (g * B + b) * padded + i, norm, mask=i < padded)


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
):  # fmt: skip
    """One segment of `span` tokens, BC channels of one sequence and direction.

    OUTPUT writes y. SAVE keeps what the backward pass starts from: the state before every T-th token, or, for a rule
    that is undone, the states after T tokens each and what every token wrote, w. The state after the segment goes to
    final_ptr: with SUMMARY as (G, B, segments, N, D), beside the product of its decays at decay_ptr, else, for the last
    segment alone, as (G, B, D, N).
    """
    block, segment, b, g = work_of(blocks, segments)
    sign, origin, begin, end = tokens_of(segment, g, span, L, FIRST_REVERSED)
    if SUMMARY:
        if segment == segments - 1:
            return  # no segment follows it
    d, d_ok, first = channels_of(block, D, NI, NS, BC, WHOLE)
    x_row = row_of(x_ptr, g, b, x_g, x_b, ALIGNED) + d
    step_row = row_of(step_ptr, g, b, step_g, step_b, ALIGNED) + d * step_d
    z_row = row_of(z_ptr, g, b, z_g, z_b, ALIGNED) + d
    y_row = y_ptr + offset_of((g * B + b) * L, D, ALIGNED) + d
    written_row = written_ptr + offset_of((g * B + b) * L, D, ALIGNED) + d
    k_row = state_row_of(k_ptr, g, b, k_g, k_b, first, NS)
    q_row = state_row_of(q_ptr, g, b, q_g, q_b, first, NS)
    norm_row = norm_ptr + (g * B + b) * padded
    saved_ptr += ((g * ((L + T - 1) // T) + begin // T) * B + b) * (N * D) + first * D + d

    skip = load_skip(D_ptr + g * D_g + d, HAS_D, BC)
    bias = load_bias(bias_ptr + g * bias_g + d * bias_d, HAS_BIAS, RULE, BC)
    A_row, A = start_of_A(A_ptr, g, b, A_g, A_b, A_d, A_n, d, first, A_PER_TOKEN, RULE, N, NI, NS)
    UNDOES: tl.constexpr = RULE.value.undoes
    total = ()  # the product of the decays so far
    if SUMMARY:
        total = RULE.value.start_total(NI, NS, BC, A_PER_TOKEN)
    if HAS_START:
        S = load_state(start_ptr + g * start_g + b * start_b + segment * start_s + d * start_d + first * start_n,
                        start_n, first, N, NI, NS)  # fmt: skip
    else:
        S = fill(0.0, NI, NS, BC)

    # What a token needs is loaded before it is used: x, logits and z for U tokens at a time, k and q for the next one.
    xs = load_tokens(x_row, origin, sign, begin, x_l, L, U, BC, ALIGNED)
    us = load_tokens(step_row, origin, sign, begin, step_l, L, U, BC, ALIGNED)
    zs = ()
    if HAS_Z and OUTPUT:
        zs = load_tokens(z_row, origin, sign, begin, z_l, L, U, BC, ALIGNED)
    # Rows of k and q one token ahead, or (DEEP) as many as the others.
    AHEAD: tl.constexpr = U if DEEP else 1
    ks = load_rows(k_row, k_l, origin, sign, begin, L, AHEAD, first, N, NI, NS, K_PACK)
    qs = ()
    if OUTPUT:
        qs = load_rows(q_row, q_l, origin, sign, begin, L, AHEAD, first, N, NI, NS, Q_PACK)
    for i in tl.range(begin, end, U, num_stages=1):
        next_xs = load_tokens(x_row, origin, sign, i + U, x_l, L, U, BC, ALIGNED)
        next_us = load_tokens(step_row, origin, sign, i + U, step_l, L, U, BC, ALIGNED)
        next_zs = ()
        if HAS_Z and OUTPUT:
            next_zs = load_tokens(z_row, origin, sign, i + U, z_l, L, U, BC, ALIGNED)
        next_ks = ks
        next_qs = qs
        if DEEP:
            next_ks = load_rows(k_row, k_l, origin, sign, i + U, L, U, first, N, NI, NS, K_PACK)
            if OUTPUT:
                next_qs = load_rows(q_row, q_l, origin, sign, i + U, L, U, first, N, NI, NS, Q_PACK)
        if SAVE and not UNDOES:
            if i % T == 0:
                store_state(saved_ptr, D, S, d_ok, first, N, NI, NS)
                saved_ptr += B.to(tl.int64) * (N * D)
        for j in tl.static_range(U):
            t = origin + sign * tl.minimum(i + j, L - 1)
            k = unpack(part_of(ks, j if DEEP else 0, AHEAD), k_ptr, NI, K_PACK)
            q = ()
            if OUTPUT:
                q = unpack(part_of(qs, j if DEEP else 0, AHEAD), q_ptr, NI, Q_PACK)
            if not DEEP:
                ks = load_rows(k_row, k_l, origin, sign, i + j + 1, L, 1, first, N, NI, NS, K_PACK)
                if OUTPUT:
                    qs = load_rows(q_row, q_l, origin, sign, i + j + 1, L, 1, first, N, NI, NS, Q_PACK)
            A_t = A
            if A_PER_TOKEN:
                A_t = load_A(A_row + t.to(tl.int64) * A_l, A_ptr, first, N, NI, NS)
            x = xs[j].to(tl.float32)
            inside = all_lanes(i + j, 1, BC) < end
            keep = tl.where(inside, 1.0, 0.0)
            eps, e = RULE.value.step_size(us[j], bias, load_norm(norm_row, i + j, RULE), keep, SOFTPLUS, PTX)
            if SUMMARY:
                S, total = RULE.value.summarize(S, total, x, k, A_t, eps, e, N, NI, NS, A_PER_TOKEN)
            else:
                S, w = RULE.value.advance(S, x, k, A_t, eps, e, N, NI, NS)
                if SAVE and UNDOES:
                    tl.store(written_row + offset_of(t, D, ALIGNED), w, mask=d_ok & inside)
            if OUTPUT:
                y = dot(S, q, NI, NS)
                if HAS_D:
                    y += skip * x
                if HAS_Z:
                    z = zs[j].to(tl.float32)
                    y *= z * reciprocal(1.0 + tl.exp2(z * -LOG2E), PTX)
                tl.store(y_row + offset_of(t, D, ALIGNED), (y * scale).to(y_ptr.dtype.element_ty), mask=d_ok & inside)
        if SAVE and UNDOES:
            if ((i + U) % T) * tl.maximum(end - i - U, 0) == 0:  # either is zero; older interpreters have no `|` here
                store_state(saved_ptr, D, S, d_ok, first, N, NI, NS)
                saved_ptr += B.to(tl.int64) * (N * D)
        xs = next_xs
        us = next_us
        zs = next_zs
        if DEEP:
            ks = next_ks
            qs = next_qs
    if SUMMARY:
        at = ((g * B + b) * segments + segment) * (N * D) + first * D + d
        store_state(final_ptr + at, D, S, d_ok, first, N, NI, NS)
        total = RULE.value.end_total(total, A, NI, A_PER_TOKEN)
        store_state(decay_ptr + at, D, total, d_ok, first, N, NI, NS)
    else:
        if end == L:
            store_state(final_ptr + ((g * B + b) * D + d) * N + first, 1, S, d_ok, first, N, NI, NS)


@_kernel
def _carry_kernel(
    local_ptr, decay_ptr, start_ptr, D, size, segments, B, start_g, start_b, start_d, start_n,
    HAS_START: tl.constexpr, REVERSED: tl.constexpr, BLOCK: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
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
        state = tl.load(
            start_ptr + row // B * start_g + row % B * start_b + at % D * start_d + at // D * start_n, mask=ok, other=0
        ).to(tl.float32)
    for s in tl.range(0, segments, U, num_stages=1):
        locals = ()
        decays = ()
        for j in tl.static_range(U):
            more = ok & (tl.zeros([BLOCK], tl.int32) + s + j < segments)  # a tensor, as in all_lanes
            locals = locals + (tl.load(local_ptr + offset + j * step, mask=more, other=0),)
            decays = decays + (tl.load(decay_ptr + offset + j * step, mask=more, other=0),)
        for j in tl.static_range(U):
            more = ok & (tl.zeros([BLOCK], tl.int32) + s + j < segments)
            tl.store(local_ptr + offset + j * step, state, mask=more)
            state = decays[j] * state + locals[j]
        offset += U * step


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
):  # fmt: skip
    """What each segment adds to the adjoint of the state, and the product of its decays: `_forward_kernel` with
    SUMMARY, walking the other way. For the rules whose decay is one number for each state."""
    block, segment, b, g = work_of(blocks, segments)
    sign, origin, begin, end = tokens_of(segment, g, span, L, FIRST_REVERSED)
    if segment == 0:
        return  # no segment follows it on the way back
    d, d_ok, first = channels_of(block, D, NI, NS, BC, WHOLE)
    step_row = row_of(step_ptr, g, b, step_g, step_b, ALIGNED) + d * step_d
    z_row = row_of(z_ptr, g, b, z_g, z_b, ALIGNED) + d
    dy_row = row_of(dy_ptr, g, b, dy_g, dy_b, ALIGNED) + d
    k_row = state_row_of(k_ptr, g, b, k_g, k_b, first, NS)
    q_row = state_row_of(q_ptr, g, b, q_g, q_b, first, NS)
    norm_row = norm_ptr + (g * B + b) * padded
    bias = load_bias(bias_ptr + g * bias_g + d * bias_d, HAS_BIAS, RULE, BC)
    A_row, A = start_of_A(A_ptr, g, b, A_g, A_b, A_d, A_n, d, first, A_PER_TOKEN, RULE, N, NI, NS)
    adjoint = fill(0.0, NI, NS, BC)
    total = fill(1.0, NI, NS, BC)

    rounds = (end - begin + U - 1) // U
    last = begin + (rounds - 1) * U
    us = load_tokens(step_row, origin, sign, last, step_l, L, U, BC, ALIGNED)
    gs = load_tokens(dy_row, origin, sign, last, dy_l, L, U, BC, ALIGNED)
    zs = ()
    if HAS_Z:
        zs = load_tokens(z_row, origin, sign, last, z_l, L, U, BC, ALIGNED)
    ks = load_rows(k_row, k_l, origin, sign, last + U - 1, L, 1, first, N, NI, NS, K_PACK)
    qs = load_rows(q_row, q_l, origin, sign, last + U - 1, L, 1, first, N, NI, NS, Q_PACK)
    for r in tl.range(0, rounds, num_stages=1):
        i = begin + (rounds - 1 - r) * U
        next_us = load_tokens(step_row, origin, sign, i - U, step_l, L, U, BC, ALIGNED)
        next_gs = load_tokens(dy_row, origin, sign, i - U, dy_l, L, U, BC, ALIGNED)
        next_zs = ()
        if HAS_Z:
            next_zs = load_tokens(z_row, origin, sign, i - U, z_l, L, U, BC, ALIGNED)
        for j in tl.static_range(U - 1, -1, -1):
            keep = tl.where(all_lanes(i + j, 1, BC) < end, 1.0, 0.0)
            t = origin + sign * tl.minimum(i + j, L - 1)
            k = unpack(ks, k_ptr, NI, K_PACK)
            q = unpack(qs, q_ptr, NI, Q_PACK)
            ks = load_rows(k_row, k_l, origin, sign, i + j - 1, L, 1, first, N, NI, NS, K_PACK)
            qs = load_rows(q_row, q_l, origin, sign, i + j - 1, L, 1, first, N, NI, NS, Q_PACK)
            A_t = A
            if A_PER_TOKEN:
                A_t = load_A(A_row + t.to(tl.int64) * A_l, A_ptr, first, N, NI, NS)
            eps, e = RULE.value.step_size(us[j], bias, load_norm(norm_row, i + j, RULE), keep, SOFTPLUS, PTX)
            dy = gs[j].to(tl.float32) * (scale * keep)
            if HAS_Z:
                dy, slope = gate(dy, zs[j].to(tl.float32), PTX)
            new = ()
            new_total = ()
            for n in tl.static_range(NI):
                a = RULE.value.decay(k[n], A_t[n] if RULE.value.takes_A else 0.0, eps, e, N)
                new = new + ((adjoint[n] + q[n] * dy) * a,)
                new_total = new_total + (total[n] * a,)
            adjoint = new
            total = new_total
        us = next_us
        zs = next_zs
        gs = next_gs
    at = ((g * B + b) * segments + segment) * (N * D) + first * D + d
    store_state(local_ptr + at, D, adjoint, d_ok, first, N, NI, NS)
    store_state(decay_ptr + at, D, total, d_ok, first, N, NI, NS)


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
):  # fmt: skip
    """One segment of `span` tokens backwards, BC channels of one sequence and direction.

    The tokens are taken in parts of U, the last part first: walk forward to the part from a saved state, through it
    with its states kept in registers, then back over them. A rule that is undone needs no walk forward: what each token
    wrote is subtracted, from the saved state after every T-th token on.
    """
    block, segment, b, g = work_of(blocks, segments)
    sign, origin, begin, end = tokens_of(segment, g, span, L, FIRST_REVERSED)
    d, d_ok, first = channels_of(block, D, NI, NS, BC, WHOLE)
    x_row = row_of(x_ptr, g, b, x_g, x_b, ALIGNED) + d
    step_row = row_of(step_ptr, g, b, step_g, step_b, ALIGNED) + d * step_d
    z_row = row_of(z_ptr, g, b, z_g, z_b, ALIGNED) + d
    dy_row = row_of(dy_ptr, g, b, dy_g, dy_b, ALIGNED) + d
    k_row = state_row_of(k_ptr, g, b, k_g, k_b, first, NS)
    q_row = state_row_of(q_ptr, g, b, q_g, q_b, first, NS)
    norm_row = norm_ptr + (g * B + b) * padded
    row = (g * B + b) * L  # of the (G, B, L, ...) gradients
    dx_row = dx_ptr + offset_of(row, D, ALIGNED) + d
    dstep_row = dstep_ptr + offset_of(row, D, ALIGNED) + d
    dz_row = dz_ptr + offset_of(row, D, ALIGNED) + d
    written_row = written_ptr + offset_of(row, D, ALIGNED) + d
    SUMS: tl.constexpr = 3 * N if A_PER_TOKEN else 2 * N
    sums_row = sums_ptr + (block * tl.num_programs(1).to(tl.int64) * B * L + row) * SUMS
    saved_row = saved_ptr + (g * ((L + T - 1) // T) * B + b) * (N * D) + first * D + d
    saved_c = B.to(tl.int64) * (N * D)

    # (G, B, segments, T / U - 1, N, D): each lane reads what it wrote.
    scratch_row = scratch_ptr + ((g * B + b) * segments + segment) * ((T // U - 1) * N * D) + first * D + d

    skip = load_skip(D_ptr + g * D_g + d, HAS_D, BC)
    bias = load_bias(bias_ptr + g * bias_g + d * bias_d, HAS_BIAS, RULE, BC)
    A_row, A = start_of_A(A_ptr, g, b, A_g, A_b, A_d, A_n, d, first, A_PER_TOKEN, RULE, N, NI, NS)
    UNDOES: tl.constexpr = RULE.value.undoes
    TAKES_A: tl.constexpr = RULE.value.takes_A
    # The flags are Python's own; Triton 3.3 combines constexprs only.
    TAKES_NORM: tl.constexpr = RULE.value.takes_norm
    THROUGH: tl.constexpr = TAKES_NORM and N > 1
    HALVES: tl.constexpr = RULE.value.halves_key_sums
    FACTOR: tl.constexpr = 2.0 if HALVES and N > 1 else 1.0
    dA = fill(0.0, NI if TAKES_A and not A_PER_TOKEN else 0, NS, BC)
    G = fill(0.0, NI, NS, BC)  # the adjoint
    if HAS_ADJOINT:
        G = load_state(adjoint_ptr + g * adjoint_g + b * adjoint_b + segment * adjoint_s + d * adjoint_d
                        + first * adjoint_n, adjoint_n, first, N, NI, NS)  # fmt: skip
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
    xs = load_tokens(x_row, origin, sign, last, x_l, L, U, BC, ALIGNED)
    us = load_tokens(step_row, origin, sign, last, step_l, L, U, BC, ALIGNED)
    gs = load_tokens(dy_row, origin, sign, last, dy_l, L, U, BC, ALIGNED)
    zs = ()
    ws = ()
    if HAS_Z:
        zs = load_tokens(z_row, origin, sign, last, z_l, L, U, BC, ALIGNED)
    if UNDOES:
        ws = load_tokens(written_row, origin, sign, last, D, L, U, BC, ALIGNED)
    # The state after a part is the one before the part that follows; for the last part (of a rule that is undone: part
    # of a chunk) it is found in the loop.
    S = fill(0.0, NI, NS, BC)
    k_next = load_rows(k_row, k_l, origin, sign, last + U - 1 if UNDOES else last, L, 1, first, N, NI, NS, K_PACK)
    for r in tl.range(0, rounds, num_stages=1):
        i = begin + (rounds - 1 - r) * U
        q_next = load_rows(q_row, q_l, origin, sign, i + U - 1, L, 1, first, N, NI, NS, Q_PACK)
        norms = ()
        for j in tl.static_range(U):
            norms = norms + (load_norm(norm_row, i + j, RULE),)
        if UNDOES:
            if ((i + U) % T) * r == 0:  # either is zero
                S = load_state(saved_row + i // T * saved_c, D, first, N, NI, NS)
        states = S  # one after the other the states before the tokens of the part
        epss = ()
        es = ()
        if not UNDOES:
            # The first part to be taken of a chunk walks to it, and leaves the states before the others on its way.
            start = saved_row + i // T * saved_c
            walked = i // T * T
            if U < T:
                if (i % T - (T - U)) * r == 0:  # either is zero
                    walked = i
                elif i % T > 0:
                    start = scratch_row + (i % T // U - 1) * (N * D)
            state = load_state(start, D, first, N, NI, NS)
            if U < T:
                state = walk(state, x_row, x_l, step_row, step_l, k_row, k_l, A_row, A_l, norm_row, bias, A, k_ptr,
                              A_ptr, scratch_row, d_ok, origin, sign, i // T * T, walked, L, first, ALIGNED, RULE,
                              SOFTPLUS, A_PER_TOKEN, D, N, NI, NS, K_PACK, BC, U, PTX)  # fmt: skip
            states = state
            for j in tl.static_range(U):
                keep = tl.where(all_lanes(i + j, 1, BC) < end, 1.0, 0.0)
                eps, e = RULE.value.step_size(us[j], bias, norms[j], keep, SOFTPLUS, PTX)
                epss = epss + (eps,)
                es = es + (e,)
                k = unpack(k_next, k_ptr, NI, K_PACK)
                A_t = A
                if A_PER_TOKEN:
                    t = origin + sign * tl.minimum(i + j, L - 1)
                    A_t = load_A(A_row + t.to(tl.int64) * A_l, A_ptr, first, N, NI, NS)
                if j + 1 < U:
                    k_next = load_rows(k_row, k_l, origin, sign, i + j + 1, L, 1, first, N, NI, NS, K_PACK)
                    state, w = RULE.value.advance(state, xs[j].to(tl.float32), k, A_t, eps, e, N, NI, NS)
                    states = states + state
                else:
                    if r == 0:
                        S, w = RULE.value.advance(state, xs[j].to(tl.float32), k, A_t, eps, e, N, NI, NS)

        next_xs = load_tokens(x_row, origin, sign, i - U, x_l, L, U, BC, ALIGNED)
        next_us = load_tokens(step_row, origin, sign, i - U, step_l, L, U, BC, ALIGNED)
        next_gs = load_tokens(dy_row, origin, sign, i - U, dy_l, L, U, BC, ALIGNED)
        next_zs = ()
        next_ws = ()
        if HAS_Z:
            next_zs = load_tokens(z_row, origin, sign, i - U, z_l, L, U, BC, ALIGNED)
        if UNDOES:
            next_ws = load_tokens(written_row, origin, sign, i - U, D, L, U, BC, ALIGNED)
        part = offset_of(origin + sign * i, D, ALIGNED)
        for j in tl.static_range(U - 1, -1, -1):
            t = origin + sign * tl.minimum(i + j, L - 1)
            inside = all_lanes(i + j, 1, BC) < end
            ok = d_ok & inside
            at = part + j * offset_of(sign, D, ALIGNED)
            k = unpack(k_next, k_ptr, NI, K_PACK)
            q = unpack(q_next, q_ptr, NI, Q_PACK)
            if j > 0:
                k_next = load_rows(k_row, k_l, origin, sign, i + j - 1, L, 1, first, N, NI, NS, K_PACK)
                q_next = load_rows(q_row, q_l, origin, sign, i + j - 1, L, 1, first, N, NI, NS, Q_PACK)
            else:
                # The first key that the next part needs: of its first token, or (of a rule that is undone) of its last.
                k_next = load_rows(k_row, k_l, origin, sign, i - 1 if UNDOES else i - U, L, 1, first, N, NI, NS, K_PACK)
            A_t = A
            if A_PER_TOKEN:
                A_t = load_A(A_row + t.to(tl.int64) * A_l, A_ptr, first, N, NI, NS)
            x = xs[j].to(tl.float32)
            if UNDOES:
                keep = tl.where(inside, 1.0, 0.0)
                eps, e = RULE.value.step_size(us[j], bias, norms[j], keep, SOFTPLUS, PTX)
                w = ws[j]  # zero beyond the end
            else:
                eps = epss[j]
                e = es[j]
                w = eps * x
            dy = gs[j].to(tl.float32) * tl.where(inside, scale, 0.0)
            if not WHOLE:
                dy = tl.where(d_ok, dy, 0.0)
            if HAS_Z:
                o = dot(S, q, NI, NS) + skip * x
                dy, dz = gate(dy, zs[j].to(tl.float32), PTX)
                tl.store(dz_row + at, (dz * o).to(dz_ptr.dtype.element_ty), mask=ok)
            before = ()
            now = ()
            dq = ()
            for n in tl.static_range(NI):
                if UNDOES:
                    before = before + (S[n] - k[n] * w,)
                else:
                    before = before + (states[j * NI + n],)
                dq = dq + (channels_of_a_lane(S[n] * dy, NS, W, BC),)
                now = now + (G[n] + q[n] * dy,)
            G, dx, dlog, dk, dA_t = RULE.value.step_back(now, before, x, w, k, A_t, eps, e, N, NI, NS, HAS_ADJOINT)
            dstep = RULE.value.logit_back(dlog, us[j], bias, eps, e, inside, SOFTPLUS, PTX)
            if TAKES_A:
                if A_PER_TOKEN:
                    of_lanes = ()
                    for n in tl.static_range(NI):
                        of_lanes = of_lanes + (channels_of_a_lane(dA_t[n], NS, W, BC),)
                    store_sums(sums_row + t.to(tl.int64) * SUMS + 2 * N, of_lanes, i + j, end, 1, N, NI, NS, VA, W,
                                1.0, MATRIX and VA >= 16)  # fmt: skip
                else:
                    new = ()
                    for n in tl.static_range(NI):
                        new = new + (dA[n] + dA_t[n],)
                    dA = new
            dD += dy * x
            dbias += dstep
            tl.store(dx_row + at, (dx + skip * dy).to(dx_ptr.dtype.element_ty), mask=ok)
            if RULE.value.has_step:
                tl.store(dstep_row + at, dstep.to(dstep_ptr.dtype.element_ty), mask=ok)
            sums = ()
            if THROUGH:
                through_eps = channels_of_a_lane(RULE.value.through_norm(dlog, eps), 1, W, BC)
                for n in tl.static_range(NI):
                    sums = sums + (channels_of_a_lane(dk[n], NS, W, BC) + k[n] * through_eps,)
            else:
                for n in tl.static_range(NI):
                    sums = sums + (channels_of_a_lane(dk[n], NS, W, BC),)
            store_sums(sums_row + t.to(tl.int64) * SUMS, sums + dq, i + j, end, 2, N, NI, NS, V, W,
                        FACTOR, MATRIX)  # fmt: skip
            S = before
        xs = next_xs
        us = next_us
        gs = next_gs
        zs = next_zs
        ws = next_ws

    piece = (g * B + b) * segments + segment
    if HAS_INITIAL:
        if segment == 0:
            store_state(dinitial_ptr + ((g * B + b) * D + d) * N + first, 1, G, d_ok, first, N, NI, NS)
    if HAS_D:
        tl.store(dD_ptr + piece * D + d, dD, mask=d_ok)
    if HAS_BIAS:
        tl.store(dbias_ptr + piece * D + d, dbias, mask=d_ok)
    if TAKES_A:
        if not A_PER_TOKEN:
            store_state(dA_ptr + piece * N * D + first * D + d, D, dA, d_ok, first, N, NI, NS)
