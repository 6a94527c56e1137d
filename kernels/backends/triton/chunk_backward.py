"""The backward kernel of the exact rule in chunks of 8 tokens on tensor cores. `chunks` launches it; `chunk_loads` says
which lane holds what, docs/scan.md has the equations whose numbers stand beside the code."""

from collections import namedtuple

import triton
import triton.language as tl

from . import chunk_loads as loads
from . import chunk_tiles as tiles
from .fragments import (
    bits,
    exp2,
    get_shared,
    hidden,
    high,
    low,
    packed,
    probe,
    product_8,
    product_16,
    product_tf32,
    put_shared,
    shared_room,
    store_words,
    sum_lanes,
    transposed,
)
from .lanes import LOG2E, copies, kernel, offset_of, part_of, reciprocal, scale_row

# The results of a chunk: states and adjoints before it; gradients of x, logits and z of the lane's tokens; dD and dbias
# so far; sums over channels, in pairs of states; and `pairs`, the products of dO (above) and -U (below) with W.
Found = namedtuple("Found", "S P dx dstep dz dskip dbias sums pairs")
# The tiles of a chunk share transposed keys and queries, and products of keys with keys and with queries.
Shared = namedtuple("Shared", "kT qT minus_kT G0 G1 reads reads_back between n0 n1 none zero")


@triton.jit
def _gate_back(dy, z, unscale):
    """Computes dy silu(z) / unscale, and dy silu'(z) / unscale."""
    part = reciprocal(unscale + unscale * exp2(z * -LOG2E), True)  # sigmoid / unscale
    h = dy * part
    into = z * h
    return into, h + into * (1.0 - unscale * part)


@triton.jit
def _solve_pair(R, eps, between):
    """Solves (24) for U of the lane's two tokens; the first reads the second."""
    u1 = eps[1] * R[1]
    u3 = eps[3] * R[3]
    return eps[0] * (R[0] - between * u1), u1, eps[2] * (R[2] - between * u3), u3


@triton.jit
def _shared(k, q, zero, lane, form):
    kT = tiles.each_transposed(k)
    qT = tiles.each_transposed(q)
    minus_kT = tiles.each_negated(kT)
    G0, G1, reads = tiles.products_of_tokens(k, q, zero, lane, form.NP)
    reads_back = transposed(reads)
    between, n0, n1 = tiles.own_products(G0, G1, lane.t)
    G0 = tl.where(lane.g // 2 < lane.t, -G0, 0.0)
    G1 = tl.where(lane.g // 2 < lane.t, -G1, 0.0)
    return Shared(kT, qT, minus_kT, G0, G1, reads, reads_back, between, n0, n1, lane.r * 0, zero)


@triton.jit
def _read_out_back(dy, chunk, x, A, w0, w1, shared, skip, unscale, cp: tl.constexpr, form):
    """Computes dO of a tile, and dz (8). IN_TURN, the first direction leaves its read-out in the place of dz."""
    dO = ()
    dz = ()
    if form.HAS_Z:
        o = tiles.times_skip(x, skip, cp)
        o = product_8(tiles.over_states(o, A, chunk.q, form.NP), w0, w1, shared.reads)
        z = tiles.numbers(chunk.z, cp, form)
        if form.OTHER:
            o = tiles.sum_of(o, tiles.numbers(chunk.other, cp, form))
        for j in tl.static_range(4):
            into, across = _gate_back(dy[j], z[j], unscale)
            dO = dO + (into,)
            if form.IN_TURN and not form.OTHER:
                dz = dz + (o[j],)
            else:
                dz = dz + (across * o[j],)
    else:
        dO = scale_row(dy, 1.0 / unscale)
    return dO, dz


@triton.jit
def _tile_back(found, chunk, S, P, dskip, dbias, shared, kept, bias, skip, unscale, cp: tl.constexpr, form):
    """Adds the results of one tile of a chunk to those `found` for the others."""
    zero = shared.zero
    w0 = chunk.w[2 * cp]
    w1 = chunk.w[2 * cp + 1]
    s = ()  # the state before the chunk, (23) undone
    for j in tl.static_range(form.NP):
        s = s + product_8(part_of(S, form.NP * cp + j, form.CP * form.NP), w0, w1, shared.minus_kT[j])
    A = tiles.words_of(s, form.NP)
    x = tiles.numbers(chunk.x, cp, form)
    dy = tiles.numbers(chunk.dy, cp, form)
    dO, dz = _read_out_back(dy, chunk, x, A, w0, w1, shared, skip, unscale, cp, form)
    dskip = (dskip[2 * cp] + dO[0] * x[0] + dO[1] * x[1], dskip[2 * cp + 1] + dO[2] * x[2] + dO[3] * x[3])
    o0 = packed(dO[0], dO[1])
    o1 = packed(dO[2], dO[3])
    p = part_of(P, cp, form.CP)
    PA = tiles.words_of(p, form.NP)
    # P K^T + dO tril(Q K^T) of (24)
    base = product_8(tiles.over_states((zero, zero, zero, zero), PA, chunk.k, form.NP), o0, o1, shared.reads_back)
    eps, e = tiles.step_sizes(chunk.step, kept, zero, bias, shared.n0, shared.n1, cp, form)
    U = _solve_pair(base, eps, shared.between)
    for _turn in tl.static_range(3):
        U = _solve_pair(product_tf32(base, U, shared.G0, shared.G1), eps, shared.between)
    dx = (U[0] + skip[2 * cp] * dO[0], U[1] + skip[2 * cp] * dO[1],
          U[2] + skip[2 * cp + 1] * dO[2], U[3] + skip[2 * cp + 1] * dO[3])  # fmt: skip
    # (28), since d log eps / d logit is eps e
    du = ((U[0] * low(w0)) * e[0], (U[1] * high(w0)) * e[1], (U[2] * low(w1)) * e[2], (U[3] * high(w1)) * e[3])
    dbias = (dbias[2 * cp] + du[0] + du[1], dbias[2 * cp + 1] + du[2] + du[3])
    u0 = packed(-U[0], -U[1])
    u1 = packed(-U[2], -U[3])
    # Sums over channels: transposed, they are the columns of the left and the rows of the right operand.
    wT = tiles.each_transposed((w0, w1))
    oT = tiles.each_transposed((o0, o1))
    uT = tiles.each_transposed((u0, u1))
    ST = tiles.each_transposed(A)
    PT = tiles.each_transposed(PA)
    sums = ()
    new_P = ()
    for j in tl.static_range(form.NP):
        # dO^T S and -U^T S, then W^T P, of (26) and (27); the next P (25)
        part = product_16(part_of(found.sums, j, form.NP), oT[0], uT[0], oT[1], uT[1], ST[2 * j], ST[2 * j + 1])
        sums = sums + product_16(part, shared.none, wT[0], shared.none, wT[1], PT[2 * j], PT[2 * j + 1])
        new_P = new_P + product_16(part_of(p, j, form.NP), o0, o1, u0, u1, shared.qT[j], shared.kT[j])
    pairs = product_16(found.pairs, oT[0], uT[0], oT[1], uT[1], wT[0], wT[1])
    return Found(found.S + s, found.P + new_P, found.dx + dx, found.dstep + du, found.dz + dz,
                 found.dskip + dskip, found.dbias + dbias, sums, pairs)  # fmt: skip


@triton.jit
def _sums_of_keys(found, shared, lane, form):
    """Sums dk (27) and then dq (26) of token g over the warp's channels, in pairs of states: `found.sums` and what goes
    through the chunk's own tokens."""
    g, t, pairs = lane.g, lane.t, found.pairs
    upper = packed(tl.where(2 * t <= g, pairs[0], 0.0), tl.where(2 * t < g, pairs[1], 0.0))
    lower = packed(tl.where(2 * t <= g, pairs[2], 0.0), tl.where(2 * t < g, pairs[3], 0.0))
    upperT = transposed(upper)
    lowerT = transposed(lower)
    dk = ()
    dq = ()
    for j in tl.static_range(form.NP):
        part = product_8(part_of(found.sums, j, form.NP), upper, lower, shared.kT[j])
        part = product_16(part, shared.none, upperT, shared.none, lowerT, shared.qT[j], shared.kT[j])
        dk = dk + (part[2], part[3])
        dq = dq + (part[0], part[1])
    return dk + dq


@triton.jit
def _sum_warps(parts, place, warp, turn, NW: tl.constexpr):
    """Sums `parts`, pairs of numbers, over the program's warps. Warp w gets pairs w, w + NW and so on. `turn`
    alternates between 0 and 1, so that one barrier is enough."""
    COUNT: tl.constexpr = len(parts) // 2
    base = place + turn * (NW * COUNT * 256)
    for i in tl.static_range(COUNT):
        put_shared(base + (warp * COUNT + i) * 256, parts[2 * i], parts[2 * i + 1])
    tl.debug_barrier()
    sums = ()
    for i in tl.static_range((COUNT + NW - 1) // NW):
        pair = tl.minimum(i * NW + warp, COUNT - 1)
        total = get_shared(base + pair * 256)
        for w in tl.static_range(1, NW):
            more = get_shared(base + (w * COUNT + pair) * 256)
            total = (total[0] + more[0], total[1] + more[1])
        sums = sums + (total[0], total[1])
    return sums


@triton.jit
def _put_sums(found, shared, sums_row, dstep_row, at, next_at, exchange, n, c, lane, warp, form):
    """Stores the sums over the program's channels: dk, dq and, if all channels share a logit, its gradient."""
    g, L = lane.g, lane.L
    parts = _sums_of_keys(found, shared, lane, form)
    if form.SCALAR:
        even = shared.zero
        odd = shared.zero
        for cp in tl.static_range(form.CP):
            even += found.dstep[4 * cp] + found.dstep[4 * cp + 2]
            odd += found.dstep[4 * cp + 1] + found.dstep[4 * cp + 3]
        parts = parts + (sum_lanes(even, lane.r, 4, 3), sum_lanes(odd, lane.r, 4, 3))
    total = _sum_warps(parts, exchange, warp, n % 2, form.NW)
    row = lane.origin + lane.sign * (8 * c + g)
    for j in tl.static_range((2 * form.NP + form.NW - 1) // form.NW):
        pair = j * form.NW + warp  # dk's pairs of states first, then dq's
        to = sums_row + row.to(tl.int64) * (2 * form.N) + (pair // form.NP * form.N + pair % form.NP * 2)
        words = (bits(total[2 * j]), bits(total[2 * j + 1]))
        store_words(to, words, (pair < 2 * form.NP) & (8 * c + g < L))
    if form.SCALAR:
        last: tl.constexpr = 2 * (2 * form.NP // form.NW)
        first = 8 * c + 2 * lane.t
        owner = (warp == 2 * form.NP % form.NW) & (g == 0)
        tl.store(dstep_row + at, total[last], mask=owner & (first < L))
        tl.store(dstep_row + next_at, total[last + 1], mask=owner & (first + 1 < L))


@kernel(loads.UNALIGNED, form=loads.Form)
def _backward_kernel(
    x_ptr, step_ptr, proj_ptr, k_ptr, q_ptr, z_ptr, D_ptr, bias_ptr, dy_ptr, adjoint_ptr, written_ptr, anchor_ptr,
    dx_ptr, dstep_ptr, dz_ptr, sums_ptr, dD_ptr, dbias_ptr, dinitial_ptr,
    L, B, blocks, direction,
    x_g, x_b, x_l, step_g, step_b, step_l, step_d, proj_g, k_g, k_b, k_l, q_g, q_b, q_l, z_g, z_b, z_l, D_g, bias_g,
    bias_d, dy_g, dy_b, dy_l, dz_g, dz_b, dz_l, adjoint_g, adjoint_b, adjoint_d, adjoint_n, unscale, form,
):  # fmt: skip
    """Takes the chunks from the last to the first, for NW blocks of 16 CP channels of one sequence and direction.

    The state goes back by S - W K, from the states that were kept. dk and dq are this program's sums over its channels,
    (blocks, G, B, L, 2 N); dD and dbias are sums over the tokens of each sequence, (G, B, D). IN_TURN, each `direction`
    has its own launch: the second (OTHER) makes dz of its own read-out and of the one that the first left there.
    """
    D: tl.constexpr = form.D
    r = tl.arange(0, 32 * form.NW)
    warp = r // 32
    probed = probe(r)
    zero = loads.zero_of(r)
    i = tl.program_id(0)
    b = (i // blocks).to(tl.int64)
    directions = tl.num_programs(1) + form.IN_TURN
    G = tl.program_id(1).to(tl.int64) + direction
    lane = loads.lane_of(r, G, b, i % blocks * form.NW + warp, L, form)
    d, t, left = lane.d, lane.t, lane.left
    sequence = G * B + b
    chunks = (L + 7) // 8
    anchors = (chunks + form.ANCHOR - 1) // form.ANCHOR
    of_sequence = offset_of(sequence, L * D, False) + d
    x = loads.channels_at(x_ptr, lane, x_g, x_b, x_l, form)
    step = loads.steps_at(step_ptr, lane, step_g, step_b, step_l, step_d, form)
    z = loads.channels_at(z_ptr, lane, z_g, z_b, z_l, form)
    dy = loads.channels_at(dy_ptr, lane, dy_g, dy_b, dy_l, form)
    dz = loads.channels_at(dz_ptr, lane, dz_g, dz_b, dz_l, form)
    k = loads.states_at(k_ptr, lane, k_g, k_b, k_l, form.NP)
    q = loads.states_at(q_ptr, lane, q_g, q_b, q_l, form.NP)
    written = loads.written_at(written_ptr, lane, sequence, chunks, form)
    rows = loads.Chunk(k, q, x, step, z, dz, written, dy)
    anchor_row = anchor_ptr + sequence * anchors * (D * form.N)
    of_block = (i % blocks * directions + G) * B + b
    sums_row = sums_ptr + of_block * L * (2 * form.N) + lane.state
    bias = scale_row(loads.load_weights(bias_ptr + G * bias_g, lane, bias_d, form.HAS_BIAS, probed, form), -LOG2E)
    skip = loads.load_weights(D_ptr + G * D_g, lane, 1, form.HAS_D, probed, form)
    room = shared_room(form.ROOM, r)
    place = room + r * 8
    exchange = room + form.STAGES * form.STAGE + r % 32 * 8
    kept = place + (form.STAGES * form.STAGE + form.EXCHANGE)
    if form.RP > 0:
        loads.keep_projection(kept, proj_ptr + G * proj_g, lane, form)
    S = copies(probed, 4 * form.CP * form.NP)
    P = S
    if form.HAS_ADJOINT:
        P = loads.load_state(adjoint_ptr + G * adjoint_g + b * adjoint_b, lane, adjoint_d, adjoint_n, probed, form)
    dskip = copies(probed, 2 * form.CP)
    dbias = copies(probed, 2 * form.CP)
    for early in tl.static_range(form.STAGES - 1):
        loads.start_chunk(place, rows, lane, 0, early, chunks - 1 - early, form)
    for n in tl.range(0, chunks, num_stages=1):
        c = chunks - 1 - hidden(n)
        if (c + 1) % form.ANCHOR == 0 or n == 0:
            S = loads.load_state(anchor_row + c // form.ANCHOR * (D * form.N), lane, form.N, 1, probed, form)
        chunk = loads.next_chunk(place, rows, lane, 0, n, c, form)
        first = 8 * c + 2 * t
        shared = _shared(chunk.k, chunk.q, zero, lane, form)
        found = Found((), (), (), (), (), (), (), copies(zero, 4 * form.NP), (zero, zero, zero, zero))
        for cp in tl.static_range(form.CP):
            found = _tile_back(found, chunk, S, P, dskip, dbias, shared, kept, bias, skip, unscale, cp, form)
        S = found.S
        P = found.P
        dskip = found.dskip
        dbias = found.dbias
        at = lane.origin + lane.sign * first
        next_at = lane.origin + lane.sign * (first + 1)
        ok = first < L
        next_ok = first + 1 < L
        loads.put_tokens(dx_ptr + of_sequence, at * D, next_at * D, found.dx, left, ok, next_ok, form)
        if form.HAS_Z:
            loads.put_tokens(dz.row, at * dz.stride, next_at * dz.stride, found.dz, left, ok, next_ok, form)
        if not form.SCALAR:
            loads.put_tokens(dstep_ptr + of_sequence, at * D, next_at * D, found.dstep, left, ok, next_ok, form)
        _put_sums(found, shared, sums_row, dstep_ptr + of_block * L, at, next_at, exchange, n, c, lane, warp, form)
    if form.HAS_INITIAL:
        loads.store_state(dinitial_ptr + sequence * (D * form.N), lane, P, form)
    for j in tl.static_range(2 * form.CP):
        if form.HAS_D:
            tl.store(dD_ptr + sequence * D + d + j, sum_lanes(dskip[j], r, 1, 2), mask=(j < left) & (t == 0))
        if form.HAS_BIAS:
            tl.store(dbias_ptr + sequence * D + d + j, sum_lanes(dbias[j], r, 1, 2), mask=(j < left) & (t == 0))
