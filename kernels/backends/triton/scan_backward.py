"""The backward kernels of a walk through time: `scan` launches them, docs/scan.md has the equations whose numbers stand
beside the code.

Rules that decay need the states from the last to the first, and registers hold two of them beside the adjoint. So a
chunk of 8 tokens is taken in four parts:

    saved state      t0 t1 | t2 t3 | t4 t5 | t6 t7
    once a chunk     ---------------------->             leaves the states before t2 and t4 in scratch, which L2 holds
    parts, last first                        <----       each: one step forward, two back; the state before a part
                                     <----               is the one after the next part

These were slower on an H200: loading the next part's states and inputs during a part, or the next chunk's states into
L2; four tokens a part; all of a part's loads at its start; for the diagonal rule 168 registers, which spill.
"""

from collections import namedtuple

import triton
import triton.language as tl

from . import walk
from .lanes import all_lanes, channels_of_a_lane, dot, gate, kernel, offset_of, store_sums

# What is loaded of U tokens before the work on them: x, logits, dy, z and w, if there are any.
Part = namedtuple("Part", "x step dy z written")
# A part's tokens on the way forward: the states before them, one after the other, eps and e of each, the state after
# the last one, and its row of k.
States = namedtuple("States", "before eps e after k")


@triton.jit
def _load_part(inputs, dy, z, written, at, i, RULE: tl.constexpr, form):
    zs = ()
    ws = ()
    xs = walk.load_tokens(inputs.x, at, i, form)
    us = walk.load_tokens(inputs.step, at, i, form)
    dys = walk.load_tokens(dy, at, i, form)
    if form.HAS_Z:
        zs = walk.load_tokens(z, at, i, form)
    if RULE.value.undoes:
        ws = walk.load_tokens(written, at, i, form)
    return Part(xs, us, dys, zs, ws)


@kernel(walk.UNALIGNED, walk.SPECIALIZED, walk.Form)
def _adjoint_kernel(
    step_ptr, k_ptr, norm_ptr, q_ptr, A_ptr, z_ptr, bias_ptr, dy_ptr, local_ptr, decay_ptr,
    L, B, padded, blocks, segments, span,
    step_g, step_b, step_l, step_d, k_g, k_b, k_l, q_g, q_b, q_l, A_g, A_b, A_l, A_d, A_n, z_g, z_b, z_l,
    bias_g, bias_d, dy_g, dy_b, dy_l, scale, form, RULE: tl.constexpr,
):  # fmt: skip
    """Computes what each segment adds to the adjoint, and the product of its decays, as SUMMARY does going forward."""
    at = walk.place_of(blocks, segments, span, L, form)
    if at.segment == 0:
        return  # no segment follows it on the way back
    U: tl.constexpr = form.U
    TAKES_A: tl.constexpr = RULE.value.needs_A
    d, g, sequence = at.d, at.g, at.g * B + at.b
    step = walk.channels_at(step_ptr, at, step_g, step_b, step_l, step_d, form)
    z = walk.channels_at(z_ptr, at, z_g, z_b, z_l, 1, form)
    dy = walk.channels_at(dy_ptr, at, dy_g, dy_b, dy_l, 1, form)
    k = walk.states_at(k_ptr, at, k_g, k_b, k_l, form)
    q = walk.states_at(q_ptr, at, q_g, q_b, q_l, form)
    norm_row = norm_ptr + sequence * padded
    bias = walk.load_bias(bias_ptr + g * bias_g + d * bias_d, RULE, form)
    A_rows = walk.states_at(A_ptr, at, A_g, A_b, A_l, form)
    A = walk.load_A(A_ptr + g * A_g + at.b * A_b, at, A_d, A_n, RULE, form)
    inputs = walk.Inputs(step, step, k, norm_row, bias, A, A_rows)
    adjoint = walk.fill_state(0.0, form)
    total = walk.fill_state(1.0, form)

    rounds = (at.end - at.begin + U - 1) // U
    last = at.begin + (rounds - 1) * U
    part = _load_part(inputs, dy, z, dy, at, last, RULE, form)
    ks = walk.load_rows(inputs.k, at, last + U - 1, 1, form.K_PACK, form)
    qs = walk.load_rows(q, at, last + U - 1, 1, form.Q_PACK, form)
    for r in tl.range(0, rounds, num_stages=1):
        i = at.begin + (rounds - 1 - r) * U
        then = _load_part(inputs, dy, z, dy, at, i - U, RULE, form)
        for j in tl.static_range(U - 1, -1, -1):
            keep = tl.where(all_lanes(i + j, 1, form.BC) < at.end, 1.0, 0.0)
            k_t = walk.unpack(ks, inputs.k, form.K_PACK, form)
            q_t = walk.unpack(qs, q, form.Q_PACK, form)
            ks = walk.load_rows(inputs.k, at, i + j - 1, 1, form.K_PACK, form)
            qs = walk.load_rows(q, at, i + j - 1, 1, form.Q_PACK, form)
            A_t = walk.A_of(inputs, at, walk.token_at(at, i + j), form)
            eps, e = RULE.value.step_size(
                part.step[j], inputs.bias, walk.load_norm(inputs.norm, i + j, RULE), keep, form
            )
            do = part.dy[j].to(tl.float32) * (scale * keep)
            if form.HAS_Z:
                do, slope = gate(do, part.z[j].to(tl.float32), form.PTX)
            new = ()
            new_total = ()
            for n in tl.static_range(form.NI):
                a = RULE.value.decay(k_t[n], A_t[n] if TAKES_A else 0.0, eps, e, form.N == 1)
                new = new + ((adjoint[n] + q_t[n] * do) * a,)
                new_total = new_total + (total[n] * a,)
            adjoint = new
            total = new_total
        part = then
    place = (sequence * segments + at.segment) * (form.N * form.D) + at.first * form.D + d
    walk.store_state(local_ptr + place, form.D, adjoint, at, form)
    walk.store_state(decay_ptr + place, form.D, total, at, form)


@triton.jit
def _forward_part(part, k_row, S, inputs, saved_row, scratch_row, norms, i, r, at, RULE: tl.constexpr, form):
    """Computes the states of a part, from the saved state before its chunk. The part of a chunk that is taken first
    walks to its place and leaves the states before the others at `scratch_row`. S, the state after the part, is
    computed here for the first part of all (r = 0) and handed on after that."""
    start = saved_row
    walked = i // form.T * form.T
    if (i % form.T - (form.T - form.U)) * r == 0:  # either is zero
        walked = i
    elif i % form.T > 0:
        start = scratch_row + (i % form.T // form.U - 1) * (form.N * form.D)
    state = walk.load_state(start, form.D, at, form)
    state = walk.rebuild(state, inputs, scratch_row, i // form.T * form.T, walked, at, RULE, form)
    states = state
    epss = ()
    es = ()
    for j in tl.static_range(form.U):
        keep = tl.where(all_lanes(i + j, 1, form.BC) < at.end, 1.0, 0.0)
        eps, e = RULE.value.step_size(part.step[j], inputs.bias, norms[j], keep, form)
        epss = epss + (eps,)
        es = es + (e,)
        k = walk.unpack(k_row, inputs.k, form.K_PACK, form)
        A = walk.A_of(inputs, at, walk.token_at(at, i + j), form)
        if j + 1 < form.U:
            k_row = walk.load_rows(inputs.k, at, i + j + 1, 1, form.K_PACK, form)
            state, w = RULE.value.advance(state, part.x[j].to(tl.float32), k, A, eps, e)
            states = states + state
        elif r == 0:
            S, w = RULE.value.advance(state, part.x[j].to(tl.float32), k, A, eps, e)
    return States(states, epss, es, S, k_row)


@triton.jit
def _states_around(S, G, states, do, j: tl.constexpr, k, q, w, RULE: tl.constexpr, form):
    """Returns the state before the part's j-th token, its adjoint with the read-out (9), the lane's part of dq (10)."""
    before = ()
    now = ()
    dq = ()
    for n in tl.static_range(form.NI):
        if RULE.value.undoes:
            before = before + (S[n] - k[n] * w,)
        else:
            before = before + (states.before[j * form.NI + n],)
        dq = dq + (channels_of_a_lane(S[n] * do, form.NS, form.W, form.BC),)
        now = now + (G[n] + q[n] * do,)
    return before, now, dq


@triton.jit
def _store_rows(rows, t, dk, dq, k, dlog, eps, i, end, RULE: tl.constexpr, form):
    """Stores the sums over channels of token t: dq (10), and dk (13), (16) or (18)."""
    # The flags are Python's own; Triton 3.3 combines constexprs only.
    TAKES_NORM: tl.constexpr = RULE.value.takes_norm
    HALVES: tl.constexpr = RULE.value.halves_key_sums
    FACTOR: tl.constexpr = 2.0 if HALVES and form.N > 1 else 1.0
    sums = ()
    if TAKES_NORM and form.N > 1:
        through_eps = channels_of_a_lane(RULE.value.through_norm(dlog, eps), 1, form.W, form.BC)
    for n in tl.static_range(form.NI):
        total = channels_of_a_lane(dk[n], form.NS, form.W, form.BC)
        if TAKES_NORM and form.N > 1:
            total += k[n] * through_eps
        sums = sums + (total,)
    store_sums(rows.row + t.to(tl.int64) * rows.stride, sums + dq, i, end, 2, FACTOR, form)


@triton.jit
def _add_dA(dA, dA_t, row, i, end, form):
    """Stores the token's gradient of A, summed over channels, or adds it to that of all tokens."""
    new = ()
    if form.A_PER_TOKEN:
        for n in tl.static_range(form.NI):
            new = new + (channels_of_a_lane(dA_t[n], form.NS, form.W, form.BC),)
        store_sums(row, new, i, end, 1, 1.0, form)
        new = dA
    else:
        for n in tl.static_range(form.NI):
            new = new + (dA[n] + dA_t[n],)
    return new


@kernel(walk.UNALIGNED, walk.SPECIALIZED, walk.Form)
def _backward_kernel(
    x_ptr, step_ptr, k_ptr, norm_ptr, q_ptr, A_ptr, z_ptr, D_ptr, bias_ptr, saved_ptr, written_ptr, dy_ptr, adjoint_ptr,
    dx_ptr, dstep_ptr, sums_ptr, dA_ptr, dz_ptr, dD_ptr, dbias_ptr, dinitial_ptr, scratch_ptr,
    L, B, padded, blocks, segments, span,
    x_g, x_b, x_l, step_g, step_b, step_l, step_d, k_g, k_b, k_l, q_g, q_b, q_l, A_g, A_b, A_l, A_d, A_n,
    z_g, z_b, z_l, D_g, bias_g, bias_d, dy_g, dy_b, dy_l,
    adjoint_g, adjoint_b, adjoint_s, adjoint_d, adjoint_n, scale,
    form, RULE: tl.constexpr,
):  # fmt: skip
    """Goes back over one segment of `span` tokens, for BC channels of one sequence and direction.

    Tokens are taken in parts of U, the last part first: forward to the part from a saved state, through it with its
    states kept in registers, then back. A rule that is undone needs no way forward: from the saved state after every
    T-th token, it subtracts what each token wrote.
    """
    at = walk.place_of(blocks, segments, span, L, form)
    d, g = at.d, at.g
    D: tl.constexpr = form.D
    T: tl.constexpr = form.T
    U: tl.constexpr = form.U
    UNDOES: tl.constexpr = RULE.value.undoes
    TAKES_A: tl.constexpr = RULE.value.needs_A
    x = walk.channels_at(x_ptr, at, x_g, x_b, x_l, 1, form)
    step = walk.channels_at(step_ptr, at, step_g, step_b, step_l, step_d, form)
    z = walk.channels_at(z_ptr, at, z_g, z_b, z_l, 1, form)
    dy = walk.channels_at(dy_ptr, at, dy_g, dy_b, dy_l, 1, form)
    k = walk.states_at(k_ptr, at, k_g, k_b, k_l, form)
    q = walk.states_at(q_ptr, at, q_g, q_b, q_l, form)
    sequence = g * B + at.b
    norm_row = norm_ptr + sequence * padded
    row = sequence * L  # of the (G, B, L, ...) gradients
    dx_row = walk.result_at(dx_ptr, at, row, form)
    dstep_row = walk.result_at(dstep_ptr, at, row, form)
    dz_row = walk.result_at(dz_ptr, at, row, form)
    written = walk.Tokens(walk.result_at(written_ptr, at, row, form), D)
    SUMS: tl.constexpr = 3 * form.N if form.A_PER_TOKEN else 2 * form.N
    sums = walk.Tokens(sums_ptr + (at.block * tl.num_programs(1).to(tl.int64) * B * L + row) * SUMS, SUMS)
    saved_row = saved_ptr + (g * ((L + T - 1) // T) * B + at.b) * (form.N * D) + at.first * D + d
    saved_c = B.to(tl.int64) * (form.N * D)
    # (G, B, segments, T / U - 1, N, D): each lane reads what it wrote.
    scratch_row = scratch_ptr + (sequence * segments + at.segment) * ((T // U - 1) * form.N * D) + at.first * D + d

    skip = walk.load_skip(D_ptr + g * D_g + d, form)
    bias = walk.load_bias(bias_ptr + g * bias_g + d * bias_d, RULE, form)
    A_rows = walk.states_at(A_ptr, at, A_g, A_b, A_l, form)
    A = walk.load_A(A_ptr + g * A_g + at.b * A_b, at, A_d, A_n, RULE, form)
    inputs = walk.Inputs(x, step, k, norm_row, bias, A, A_rows)
    dA = ()
    if TAKES_A:
        if not form.A_PER_TOKEN:
            dA = walk.fill_state(0.0, form)
    G = walk.fill_state(0.0, form)  # the adjoint
    if form.HAS_ADJOINT:
        G = walk.load_state(adjoint_ptr + g * adjoint_g + at.b * adjoint_b + at.segment * adjoint_s + d * adjoint_d
                       + at.first * adjoint_n, adjoint_n, at, form)  # fmt: skip
        if not form.WHOLE:
            masked = ()
            for n in tl.static_range(form.NI):
                masked = masked + (tl.where(at.d_ok, G[n], 0.0),)
            G = masked
    dD = tl.zeros([1, form.BC], tl.float32)
    dbias = tl.zeros([1, form.BC], tl.float32)

    # Loads stand far before their use, and before the stores that the compiler would not move them across.
    rounds = (at.end - at.begin + U - 1) // U
    last = at.begin + (rounds - 1) * U
    part = _load_part(inputs, dy, z, written, at, last, RULE, form)
    # The state after a part is the one before the part that follows. The loop finds it for the last part, or, with a
    # rule that is undone, for the last part of each chunk.
    S = walk.fill_state(0.0, form)
    k_next = walk.load_rows(inputs.k, at, last + U - 1 if UNDOES else last, 1, form.K_PACK, form)
    for r in tl.range(0, rounds, num_stages=1):
        i = at.begin + (rounds - 1 - r) * U
        q_next = walk.load_rows(q, at, i + U - 1, 1, form.Q_PACK, form)
        norms = walk.load_norms(inputs.norm, i, RULE, form)
        states = States((), (), (), S, k_next)
        if UNDOES:
            if ((i + U) % T) * r == 0:  # either is zero
                S = walk.load_state(saved_row + i // T * saved_c, D, at, form)
        else:
            states = _forward_part(part, k_next, S, inputs, saved_row + i // T * saved_c, scratch_row, norms, i, r, at,
                                   RULE, form)  # fmt: skip
            S = states.after
            k_next = states.k
        then = _load_part(inputs, dy, z, written, at, i - U, RULE, form)
        place_of_part = offset_of(at.origin + at.sign * i, D, form.ALIGNED)
        for j in tl.static_range(U - 1, -1, -1):
            t = walk.token_at(at, i + j)
            inside = all_lanes(i + j, 1, form.BC) < at.end
            ok = at.d_ok & inside
            place = place_of_part + j * offset_of(at.sign, D, form.ALIGNED)
            k_t = walk.unpack(k_next, inputs.k, form.K_PACK, form)
            q_t = walk.unpack(q_next, q, form.Q_PACK, form)
            if j > 0:
                k_next = walk.load_rows(inputs.k, at, i + j - 1, 1, form.K_PACK, form)
                q_next = walk.load_rows(q, at, i + j - 1, 1, form.Q_PACK, form)
            else:
                # The first key that the next part needs: that of its first token, or of its last if the rule is undone.
                k_next = walk.load_rows(inputs.k, at, i - 1 if UNDOES else i - U, 1, form.K_PACK, form)
            A_t = walk.A_of(inputs, at, t, form)
            x_t = part.x[j].to(tl.float32)
            if UNDOES:
                keep = tl.where(inside, 1.0, 0.0)
                eps, e = RULE.value.step_size(part.step[j], inputs.bias, norms[j], keep, form)
                w = part.written[j]  # zero beyond the end
            else:
                eps, e = states.eps[j], states.e[j]
                w = eps * x_t
            do = part.dy[j].to(tl.float32) * tl.where(inside, scale, 0.0)
            if not form.WHOLE:
                do = tl.where(at.d_ok, do, 0.0)
            if form.HAS_Z:
                o = dot(S, q_t) + skip * x_t  # (7)
                do, dz = gate(do, part.z[j].to(tl.float32), form.PTX)
                tl.store(dz_row + place, (dz * o).to(dz_ptr.dtype.element_ty), mask=ok)
            before, now, dq = _states_around(S, G, states, do, j, k_t, q_t, w, RULE, form)
            G, dx, dlog, dk, dA_t = RULE.value.step_back(now, before, x_t, w, k_t, A_t, eps, e, form)
            dstep = RULE.value.logit_back(dlog, part.step[j], inputs.bias, eps, e, inside, form)
            if TAKES_A:
                dA = _add_dA(dA, dA_t, sums.row + t.to(tl.int64) * SUMS + 2 * form.N, i + j, at.end, form)
            dD += do * x_t  # (8)
            dbias += dstep
            tl.store(dx_row + place, (dx + skip * do).to(dx_ptr.dtype.element_ty), mask=ok)
            if RULE.value.has_step:
                tl.store(dstep_row + place, dstep.to(dstep_ptr.dtype.element_ty), mask=ok)
            _store_rows(sums, t, dk, dq, k_t, dlog, eps, i + j, at.end, RULE, form)
            S = before
        part = then

    piece = sequence * segments + at.segment
    if form.HAS_INITIAL:
        if at.segment == 0:
            walk.store_state(dinitial_ptr + (sequence * D + d) * form.N + at.first, 1, G, at, form)
    if form.HAS_D:
        tl.store(dD_ptr + piece * D + d, dD, mask=at.d_ok)
    if form.HAS_BIAS:
        tl.store(dbias_ptr + piece * D + d, dbias, mask=at.d_ok)
    if TAKES_A:
        if not form.A_PER_TOKEN:
            walk.store_state(dA_ptr + piece * form.N * D + at.first * D + d, D, dA, at, form)
