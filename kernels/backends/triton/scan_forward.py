"""The forward kernels of a walk through time: `scan` launches them, docs/scan.md has the equations whose numbers stand
beside the code."""

import triton
import triton.language as tl

from . import walk
from .lanes import LOG2E, all_lanes, dot, kernel, offset_of, part_of, reciprocal, work_of


@kernel(walk.UNALIGNED)
def _norm_kernel(k_ptr, norm_ptr, L, B, padded, k_g, k_b, k_l, FIRST_REVERSED: tl.constexpr, N: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Computes ||k||^2 in the order of the scan, (G, B, padded), infinite from L on."""
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


@triton.jit
def _load_part(inputs, z, at, i, form):
    """Loads x, logits and z of U tokens from the i-th on."""
    xs = walk.load_tokens(inputs.x, at, i, form)
    us = walk.load_tokens(inputs.step, at, i, form)
    zs = ()
    if form.HAS_Z and form.OUTPUT:
        zs = walk.load_tokens(z, at, i, form)
    return xs, us, zs


@triton.jit
def _load_rows(inputs, q, at, i, COUNT: tl.constexpr, form):
    """Loads rows of k and q of COUNT tokens from the i-th on."""
    ks = walk.load_rows(inputs.k, at, i, COUNT, form.K_PACK, form)
    qs = ()
    if form.OUTPUT:
        qs = walk.load_rows(q, at, i, COUNT, form.Q_PACK, form)
    return ks, qs


@triton.jit
def _read(S, x, z, q, skip, form):
    """Computes y of a token (7), without its scale."""
    y = dot(S, q)
    if form.HAS_D:
        y += skip * x
    if form.HAS_Z:
        z = z.to(tl.float32)
        y *= z * reciprocal(1.0 + tl.exp2(z * -LOG2E), form.PTX)
    return y


@kernel(walk.UNALIGNED, walk.SPECIALIZED, walk.Form)
def _forward_kernel(
    x_ptr, step_ptr, k_ptr, norm_ptr, q_ptr, A_ptr, z_ptr, D_ptr, bias_ptr, start_ptr, y_ptr, final_ptr, decay_ptr,
    saved_ptr, written_ptr,
    L, B, padded, blocks, segments, span,
    x_g, x_b, x_l, step_g, step_b, step_l, step_d, k_g, k_b, k_l, q_g, q_b, q_l, A_g, A_b, A_l, A_d, A_n,
    z_g, z_b, z_l, D_g, bias_g, bias_d, start_g, start_b, start_s, start_d, start_n, scale,
    form, RULE: tl.constexpr,
):  # fmt: skip
    """Walks through one segment of `span` tokens, for BC channels of one sequence and direction.

    SAVE keeps the state before every T-th token, or, for a rule that is undone, the state after every T-th and each
    token's w. The state after the segment goes to final_ptr: with SUMMARY as (G, B, segments, N, D), beside the product
    of the decays at decay_ptr; else for the last segment alone, as (G, B, D, N).
    """
    at = walk.place_of(blocks, segments, span, L, form)
    if form.SUMMARY:
        if at.segment == segments - 1:
            return  # no segment follows it
    d, g = at.d, at.g
    D: tl.constexpr = form.D
    U: tl.constexpr = form.U
    UNDOES: tl.constexpr = RULE.value.undoes
    x = walk.channels_at(x_ptr, at, x_g, x_b, x_l, 1, form)
    step = walk.channels_at(step_ptr, at, step_g, step_b, step_l, step_d, form)
    z = walk.channels_at(z_ptr, at, z_g, z_b, z_l, 1, form)
    sequence = g * B + at.b
    y_row = walk.result_at(y_ptr, at, sequence * L, form)
    written_row = walk.result_at(written_ptr, at, sequence * L, form)
    k = walk.states_at(k_ptr, at, k_g, k_b, k_l, form)
    q = walk.states_at(q_ptr, at, q_g, q_b, q_l, form)
    norm_row = norm_ptr + sequence * padded
    saved_ptr += ((g * ((L + form.T - 1) // form.T) + at.begin // form.T) * B + at.b) * (form.N * D) + at.first * D + d
    skip = walk.load_skip(D_ptr + g * D_g + d, form)
    bias = walk.load_bias(bias_ptr + g * bias_g + d * bias_d, RULE, form)
    A_rows = walk.states_at(A_ptr, at, A_g, A_b, A_l, form)
    A = walk.load_A(A_ptr + g * A_g + at.b * A_b, at, A_d, A_n, RULE, form)
    inputs = walk.Inputs(x, step, k, norm_row, bias, A, A_rows)
    total = ()  # the product of the decays so far
    if form.SUMMARY:
        total = RULE.value.start_total(form)
    if form.HAS_START:
        S = walk.load_state(start_ptr + g * start_g + at.b * start_b + at.segment * start_s + d * start_d
                       + at.first * start_n, start_n, at, form)  # fmt: skip
    else:
        S = walk.fill_state(0.0, form)

    # What a token needs is loaded before it is used: x, logits and z for U tokens at a time, k and q for the next one
    # or (DEEP) as far ahead.
    AHEAD: tl.constexpr = U if form.DEEP else 1
    xs, us, zs = _load_part(inputs, z, at, at.begin, form)
    ks, qs = _load_rows(inputs, q, at, at.begin, AHEAD, form)
    for i in tl.range(at.begin, at.end, U, num_stages=1):
        then = _load_part(inputs, z, at, i + U, form)
        next_rows = ks, qs
        if form.DEEP:
            next_rows = _load_rows(inputs, q, at, i + U, U, form)
        if form.SAVE and not UNDOES:
            if i % form.T == 0:
                walk.store_state(saved_ptr, D, S, at, form)
                saved_ptr += B.to(tl.int64) * (form.N * D)
        for j in tl.static_range(U):
            t = walk.token_at(at, i + j)
            k_t = walk.unpack(part_of(ks, j if form.DEEP else 0, AHEAD), inputs.k, form.K_PACK, form)
            q_t = ()
            if form.OUTPUT:
                q_t = walk.unpack(part_of(qs, j if form.DEEP else 0, AHEAD), q, form.Q_PACK, form)
            if not form.DEEP:
                ks, qs = _load_rows(inputs, q, at, i + j + 1, 1, form)
            A_t = walk.A_of(inputs, at, t, form)
            x_t = xs[j].to(tl.float32)
            inside = all_lanes(i + j, 1, form.BC) < at.end
            keep = tl.where(inside, 1.0, 0.0)
            eps, e = RULE.value.step_size(us[j], inputs.bias, walk.load_norm(inputs.norm, i + j, RULE), keep, form)
            if form.SUMMARY:
                S, total = RULE.value.summarize(S, total, x_t, k_t, A_t, eps, e, form)
            else:
                S, w = RULE.value.advance(S, x_t, k_t, A_t, eps, e)
                if form.SAVE and UNDOES:
                    tl.store(written_row + offset_of(t, D, form.ALIGNED), w, mask=at.d_ok & inside)
            if form.OUTPUT:
                y = _read(S, x_t, zs[j] if form.HAS_Z else 0.0, q_t, skip, form)
                ok = at.d_ok & inside
                tl.store(y_row + offset_of(t, D, form.ALIGNED), (y * scale).to(y_ptr.dtype.element_ty), mask=ok)
        if form.SAVE and UNDOES:
            # Either is zero; older interpreters have no `|`.
            if ((i + U) % form.T) * tl.maximum(at.end - i - U, 0) == 0:
                walk.store_state(saved_ptr, D, S, at, form)
                saved_ptr += B.to(tl.int64) * (form.N * D)
        xs, us, zs = then
        if form.DEEP:
            ks, qs = next_rows
    if form.SUMMARY:
        place = (sequence * segments + at.segment) * (form.N * D) + at.first * D + d
        walk.store_state(final_ptr + place, D, S, at, form)
        walk.store_state(decay_ptr + place, D, RULE.value.end_total(total, inputs.A, form), at, form)
    elif at.end == L:
        walk.store_state(final_ptr + (sequence * D + d) * form.N + at.first, 1, S, at, form)


@kernel(walk.UNALIGNED, specialized=["D"])
def _carry_kernel(
    local_ptr, decay_ptr, start_ptr, D, size, segments, B, start_g, start_b, start_d, start_n,
    HAS_START: tl.constexpr, REVERSED: tl.constexpr, BLOCK: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """Walks over the segments from the first or (REVERSED, for adjoints) the last with state = decay * state + local,
    and puts the state that enters a segment in the place of `local`. A state has `size` numbers, (N, D)."""
    row = tl.program_id(1).to(tl.int64)  # one of G B
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
