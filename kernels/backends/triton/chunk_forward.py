"""The forward kernel of the exact rule in chunks of 8 tokens on tensor cores. `chunks` launches it; `chunk_loads` says
which lane holds what, docs/scan.md has the equations whose numbers stand beside the code."""

import triton
import triton.language as tl

from . import chunk_loads as loads
from . import chunk_tiles as tiles
from .fragments import DIRECT, exp2, hidden, packed, probe, product_8, product_tf32, shared_room
from .lanes import LOG2E, copies, kernel, offset_of, part_of, reciprocal, scale_row


@triton.jit
def _solve_pair(R, eps, between):
    """Solves for w of the lane's two tokens, given what the chunk's others leave of x; the second reads the first."""
    w0 = eps[0] * R[0]
    w2 = eps[2] * R[2]
    return w0, eps[1] * (R[1] - between * w0), w2, eps[3] * (R[3] - between * w2)


@triton.jit
def _solve(base, eps, between, G0, G1, form):
    """Solves (21) for W of all tiles, laid out as C, from what the state leaves of x. The tokens of lane t read those
    of the lanes before, so each of four rounds completes one more lane of the quad."""
    R = base
    W = ()
    for turn in tl.static_range(4):
        W = ()
        for cp in tl.static_range(form.CP):
            W = W + _solve_pair(part_of(R, cp, form.CP), part_of(eps, cp, form.CP), between)
        if turn < 3:
            R = ()
            for cp in tl.static_range(form.CP):
                R = R + product_tf32(part_of(base, cp, form.CP), part_of(W, cp, form.CP), G0, G1)
    return W


@triton.jit
def _solve_chunk(S, chunk, kept, zero, bias, lane, form):
    """Computes for a chunk: the words of the states before it, W, the transposed keys, and queries times keys."""
    g, t = lane.g, lane.t
    kT = tiles.each_transposed(chunk.k)
    minus_k = tiles.each_negated(chunk.k)
    G0, G1, reads = tiles.products_of_tokens(chunk.k, chunk.q, zero, lane, form.NP)
    between, n0, n1 = tiles.own_products(G0, G1, t)
    G0 = tl.where(g // 2 > t, -G0, 0.0)
    G1 = tl.where(g // 2 > t, -G1, 0.0)
    A = ()
    eps = ()
    base = ()  # x - S K^T of (21)
    for cp in tl.static_range(form.CP):
        a = tiles.words_of(part_of(S, cp, form.CP), form.NP)
        A = A + a
        own, e = tiles.step_sizes(chunk.step, kept, zero, bias, n0, n1, cp, form)
        eps = eps + own
        base = base + tiles.over_states(tiles.numbers(chunk.x, cp, form), a, minus_k, form.NP)
    return A, _solve(base, eps, between, G0, G1, form), kT, reads


@triton.jit
def _advance(S, W, A, chunk, kT, reads, skip, written, left, form):
    """Computes the states after a chunk (23) and y before its gate (22), both tile by tile, laid out as C. Keeps w."""
    ys = ()
    new = ()
    words = ()
    for cp in tl.static_range(form.CP):
        w = part_of(W, cp, form.CP)
        w0 = packed(w[0], w[1])
        w1 = packed(w[2], w[3])
        if form.SAVE:
            words = words + (w0, w1)
        if form.OUTPUT:
            o = tiles.times_skip(tiles.numbers(chunk.x, cp, form), skip, cp)
            o = tiles.over_states(o, part_of(A, cp, form.CP), chunk.q, form.NP)
            ys = ys + product_8(o, w0, w1, reads)
        for j in tl.static_range(form.NP):
            new = new + product_8(part_of(S, form.NP * cp + j, form.CP * form.NP), w0, w1, kT[j])
    if form.SAVE:
        loads.put_written(written, words, left, form)
    return new, ys


@triton.jit
def _gate(values, zs, others, unscale, ADD: tl.constexpr, form):
    """Adds `others` (if ADD) to tiles laid out as C, and multiplies them by silu(z) / unscale."""
    out = ()
    for cp in tl.static_range(form.CP):
        o = part_of(values, cp, form.CP)
        if ADD:
            o = tiles.sum_of(o, tiles.numbers(others, cp, form))
        if form.HAS_Z:
            z = tiles.numbers(zs, cp, form)
            for j in tl.static_range(4):
                out = out + ((o[j] * z[j]) * reciprocal(unscale + unscale * exp2(z[j] * -LOG2E), True),)
        else:
            out = out + scale_row(o, 1.0 / unscale)
    return out


@triton.jit
def _load_others(y_row, at, next_at, left, ok, next_ok, place, form):
    """Loads what the other direction left for the lane's tokens, where `ok` and `next_ok`."""
    words = loads.load_words(place, y_row + at, ok, left, form.CP, form.WORD, DIRECT, form)
    return words + loads.load_words(place, y_row + next_at, next_ok, left, form.CP, form.WORD, DIRECT, form)


@triton.jit
def _comes_first(token, c, lane):
    """Tells whether the other direction comes to a token of chunk c later, or in its own chunk c as the second."""
    theirs = (lane.L - 1 - token) // 8
    return (token < lane.L) & ((theirs > c) | ((theirs == c) & (lane.G == 0)))


@triton.jit
def _put_where_they_meet(place, y_row, at, next_at, ys, z, others, first, early, next_early, c, meeting, lane, unscale,
                         form):  # fmt: skip
    """Stores y as it is for tokens that this direction comes to first, and the gated sum for the others. `early` and
    `next_early` are those of chunk `meeting`; all tokens before come first."""
    left = lane.left
    if c <= meeting:
        loads.put_tokens(y_row, at, next_at, ys, left, early | (c < meeting), next_early | (c < meeting), form)
    if c >= meeting:
        late = (first < lane.L) & ((early == 0) | (c > meeting))
        next_late = (first + 1 < lane.L) & ((next_early == 0) | (c > meeting))
        if c == meeting:
            tl.debug_barrier()
            others = _load_others(y_row, at, next_at, left, late, next_late, place, form)
        ys = _gate(ys, z, others, unscale, True, form)
        loads.put_tokens(y_row, at, next_at, ys, left, late, next_late, form)


@kernel(loads.UNALIGNED, form=loads.Form)
def _forward_kernel(
    x_ptr, step_ptr, proj_ptr, k_ptr, q_ptr, z_ptr, D_ptr, bias_ptr, start_ptr, y_ptr, final_ptr, written_ptr,
    anchor_ptr, L, B, blocks,
    x_g, x_b, x_l, step_g, step_b, step_l, step_d, proj_g, k_g, k_b, k_l, q_g, q_b, q_l, z_g, z_b, z_l, D_g, bias_g,
    bias_d, start_g, start_b, start_d, start_n, unscale, form,
):  # fmt: skip
    """Takes all chunks of NW blocks of 16 CP channels of one sequence and direction.

    y is (G, B, L, D), or with MEET the sum of both directions, (B, L, D): every other warp goes from the last token to
    the first, on the channels of the warp before it. The one that comes to a token first leaves its part there, without
    gate and scale, and the other adds its own; the program waits once, where the two meet.
    SAVE keeps w (`loads.written_at`), and the state before every ANCHOR-th chunk but the first and after the last,
    (G, B, anchors, D, N). `unscale` is 1 / scale of y.
    """
    D: tl.constexpr = form.D
    r = tl.arange(0, 32 * form.NW)
    probed = probe(r)
    zero = loads.zero_of(r)
    i = tl.program_id(0)
    b = (i // blocks).to(tl.int64)
    if form.MEET:
        G = (r // 32 % 2).to(tl.int64)
        block = i % blocks * (form.NW // 2) + r // 64
    else:
        G = tl.program_id(1).to(tl.int64)
        block = i % blocks * form.NW + r // 32
    lane = loads.lane_of(r, G, b, block, L, form)
    left = lane.left
    chunks = (L + 7) // 8
    meeting = (chunks - 1) // 2 if form.MEET else 0
    anchors = (chunks + form.ANCHOR - 1) // form.ANCHOR
    x = loads.channels_at(x_ptr, lane, x_g, x_b, x_l, form)
    step = loads.steps_at(step_ptr, lane, step_g, step_b, step_l, step_d, form)
    z = loads.channels_at(z_ptr, lane, z_g, z_b, z_l, form)
    y_row = y_ptr + offset_of(b if form.MEET else G * B + b, L * D, False) + lane.d
    k = loads.states_at(k_ptr, lane, k_g, k_b, k_l, form.NP)
    q = loads.states_at(q_ptr, lane, q_g, q_b, q_l, form.NP)
    rows = loads.Chunk(k, q, x, step, z, (), (), ())
    written = loads.written_at(written_ptr, lane, G * B + b, chunks, form)
    anchor_row = anchor_ptr + (G * B + b) * anchors * (D * form.N)
    bias = scale_row(loads.load_weights(bias_ptr + G * bias_g, lane, bias_d, form.HAS_BIAS, probed, form), -LOG2E)
    skip = loads.load_weights(D_ptr + G * D_g, lane, 1, form.HAS_D, probed, form)
    if form.HAS_START:
        S = loads.load_state(start_ptr + G * start_g + b * start_b, lane, start_d, start_n, probed, form)
    else:
        S = copies(probed, 4 * form.CP * form.NP)
    place = r * 8 + shared_room(form.ROOM, r)
    kept = place + form.STAGES * form.STAGE
    if form.RP > 0:
        loads.keep_projection(kept, proj_ptr + G * proj_g, lane, form)
    for n in tl.static_range(form.STAGES - 1):
        loads.start_chunk(place, rows, lane, meeting, n, n, form)
    # Whether this direction comes to the lane's first token of chunk `meeting` before the other; and to its second.
    early = _comes_first(8 * meeting + 2 * lane.t, meeting, lane)
    next_early = _comes_first(8 * meeting + 2 * lane.t + 1, meeting, lane)
    for n in tl.range(0, chunks, num_stages=1):
        c = hidden(n)
        chunk = loads.next_chunk(place, rows, lane, meeting, c, c, form)
        first = 8 * c + 2 * lane.t
        at = (lane.origin + lane.sign * first) * D
        next_at = (lane.origin + lane.sign * (first + 1)) * D
        others = ()
        if form.MEET:
            late = c > meeting
            others = _load_others(y_row, at, next_at, left, late & (first < L), late & (first + 1 < L), place, form)
        A, W, kT, reads = _solve_chunk(S, chunk, kept, zero, bias, lane, form)
        S, ys = _advance(S, W, A, chunk, kT, reads, skip, written, left, form)
        written += (D + 3) // 4 * 8
        if form.OUTPUT:
            if form.MEET:
                _put_where_they_meet(place, y_row, at, next_at, ys, chunk.z, others, first, early, next_early, c,
                                     meeting, lane, unscale, form)  # fmt: skip
            else:
                ys = _gate(ys, chunk.z, others, unscale, False, form)
                loads.put_tokens(y_row, at, next_at, ys, left, first < L, first + 1 < L, form)
        if form.SAVE:
            if (c + 1) % form.ANCHOR == 0 or c == chunks - 1:
                loads.store_state(anchor_row, lane, S, form)
                anchor_row += D * form.N
    loads.store_state(final_ptr + (G * B + b) * (D * form.N), lane, S, form)
