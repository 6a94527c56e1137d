"""The exact rule in chunks of 8 tokens on tensor cores. `chunks` launches these kernels, docs/scan.md derives the
formulas, `fragments` draws which lane holds what.

A warp takes CP tiles of 16 channels of one sequence and direction. In the matrices of a tile rows are channels: row g
is the first, row g + 8 the second of a pair of neighbours, which share a word in memory. Columns are the 8 tokens of a
chunk, or states: lane 4 g + t holds of each pair g the tokens 2t and 2t + 1, and states t N / 4 to (t + 1) N / 4 - 1,
two to a word, so NP = N / 8 words. Names: S state, P adjoint state, W what the tokens write, U adjoint of W before eps.
Chunks count in the order of the scan.

Every tensor has one number for each lane; what a lane holds more of is a tuple.
"""

import triton
import triton.language as tl

from .fragments import (
    DIRECT,
    START,
    TAKE,
    end_group,
    exp2,
    from_lane,
    get_shared,
    high,
    low,
    packed,
    probe,
    product_8,
    product_16,
    product_tf32,
    put_shared,
    read_one,
    read_two,
    reciprocal,
    shared_room,
    sum_column,
    sum_quad,
    transposed,
    wait_group,
)
from .lanes import LOG2E, kernel, offset_of, part_of

CHUNK = tl.constexpr(8)
# A sign bit in both halves of a word.
SIGNS = tl.constexpr(-2147450880)
# e = exp(-logit) is held below 2^125, so that eps e has a value; eps is no number that float32 could show there.
MAX_EXPONENT = tl.constexpr(125.0)

_TENSORS = ("x", "step", "proj", "k", "q", "z", "D", "bias", "dy", "dz", "start", "adjoint")
_RUNTIME = [f"{name}_{axis}" for name in _TENSORS for axis in "gbldn"] + ["L", "B", "blocks", "direction"]
_UNALIGNED = ["proj_ptr", "D_ptr", "bias_ptr", "start_ptr", "adjoint_ptr"]
_kernel = kernel(_RUNTIME, _UNALIGNED)


@triton.jit
def _probe_kernel(out_ptr):
    """Products and exchanges as the kernels below make them, to see whether Triton compiles them."""
    r = tl.arange(0, 32)
    zero = probe(r)
    c = product_16((zero, zero, zero, zero), r, r, r, r, transposed(r), r)
    c = product_tf32(product_8(c, r, r, packed(zero, zero)), c, exp2(zero), reciprocal(zero))
    tl.store(out_ptr + r, from_lane(c[0], r).to(tl.int32, bitcast=True))


@triton.jit
def load_channels(place, row, offset, left, CP: tl.constexpr, WORD: tl.constexpr, ALL: tl.constexpr, HOW: tl.constexpr,
                  LANES: tl.constexpr):  # fmt: skip
    """CP words at row + offset, two channels each; zeros from the `left`-th channel on. WORD numbers are loaded at
    once; 4 takes it that all channels exist, or without ALL that none does where `left` is 0. HOW and `place` as
    `read_two` has them."""
    words = ()
    if WORD == 4:
        wide = (row + offset).to(tl.pointer_type(tl.int64), bitcast=True)
        for i in tl.static_range(CP // 2):
            words = words + read_two(place + 8 * LANES * i, wide + i, left > 0, ALL, HOW)
    elif WORD == 2:
        pairs = (row + offset).to(tl.pointer_type(tl.int32), bitcast=True)
        for i in tl.static_range(CP):
            words = words + read_one(place + 8 * LANES * i, pairs + i, 2 * i < left, False, HOW)
    else:
        single = (row + offset).to(tl.pointer_type(tl.int16), bitcast=True)
        for i in tl.static_range(CP):
            first = tl.load(single + 2 * i, mask=2 * i < left, other=0).to(tl.int32)
            second = tl.load(single + (2 * i + 1), mask=2 * i + 1 < left, other=0).to(tl.int32)
            words = words + ((first & 65535) | (second << 16),)
    return words


@triton.jit
def store_channels(row, offset, words, left, ok, CP: tl.constexpr, WORD: tl.constexpr):
    if WORD == 4:
        wide = (row + offset).to(tl.pointer_type(tl.int64), bitcast=True)
        for i in tl.static_range(CP // 2):
            tl.store(wide + i, joined(words[2 * i], words[2 * i + 1]), mask=ok)
    elif WORD == 2:
        pairs = (row + offset).to(tl.pointer_type(tl.int32), bitcast=True)
        for i in tl.static_range(CP):
            tl.store(pairs + i, words[i], mask=ok & (2 * i < left))
    else:
        single = (row + offset).to(tl.pointer_type(tl.int16), bitcast=True)
        for i in tl.static_range(CP):
            tl.store(single + 2 * i, words[i].to(tl.int16), mask=ok & (2 * i < left))
            tl.store(single + (2 * i + 1), (words[i] >> 16).to(tl.int16), mask=ok & (2 * i + 1 < left))


@triton.jit
def joined(first, second):
    return (first.to(tl.int64) & 4294967295) | (second.to(tl.int64) << 32)


@triton.jit
def load_states(place, row, offset, NP: tl.constexpr, WORD: tl.constexpr, HOW: tl.constexpr, LANES: tl.constexpr):
    """A lane's share of a row of keys or queries: NP words of two states, as `load_channels`."""
    words = ()
    if WORD == 4:
        wide = (row + offset).to(tl.pointer_type(tl.int64), bitcast=True)
        for i in tl.static_range(NP // 2):
            words = words + read_two(place + 8 * LANES * i, wide + i, place > 0, True, HOW)
    elif WORD == 2:
        pairs = (row + offset).to(tl.pointer_type(tl.int32), bitcast=True)
        for i in tl.static_range(NP):
            words = words + read_one(place + 8 * LANES * i, pairs + i, place > 0, True, HOW)
    else:
        single = (row + offset).to(tl.pointer_type(tl.int16), bitcast=True)
        for i in tl.static_range(NP):
            first = tl.load(single + 2 * i).to(tl.int32)
            words = words + ((first & 65535) | (tl.load(single + (2 * i + 1)).to(tl.int32) << 16),)
    return words


@triton.jit
def load_steps(place, row, offset, left, CP: tl.constexpr, WORD: tl.constexpr, SCALAR: tl.constexpr, HOW: tl.constexpr,
               LANES: tl.constexpr):  # fmt: skip
    """Logits as `load_channels`; SCALAR: one number for all channels, in the low half of one word."""
    if SCALAR:
        if HOW == DIRECT:
            single = (row + offset).to(tl.pointer_type(tl.int16), bitcast=True)
            words = (tl.load(single).to(tl.int32) & 65535,)
        else:
            # Copies are of whole words: that in which the number lies.
            at = (row + offset).to(tl.int64)
            whole = (at & -4).to(tl.pointer_type(tl.int32), bitcast=True)
            words = read_one(place, whole, place > 0, True, HOW)
            if HOW == TAKE:
                words = ((words[0] >> ((at & 2).to(tl.int32) * 8)) & 65535,)
    else:
        words = load_channels(place, row, offset, left, CP, WORD, True, HOW, LANES)
    return words


@triton.jit
def over_states(c, a, b, NP: tl.constexpr):
    """c + A B, summing over the states; a: per word of states the words of rows g and g + 8."""
    for j in tl.static_range(NP // 2):
        c = product_16(c, a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3], b[2 * j], b[2 * j + 1])
    if NP % 2 == 1:
        c = product_8(c, a[2 * NP - 2], a[2 * NP - 1], b[NP - 1])
    return c


@triton.jit
def words_of(S, NP: tl.constexpr):
    """A tile's states, rounded to bfloat16, as the left operand of a product."""
    words = ()
    for i in tl.static_range(2 * NP):
        words = words + (packed(S[2 * i], S[2 * i + 1]),)
    return words


@triton.jit
def each_transposed(words):
    turned = ()
    for i in tl.static_range(len(words)):
        turned = turned + (transposed(words[i]),)
    return turned


@triton.jit
def each_negated(words):
    negated = ()
    for i in tl.static_range(len(words)):
        negated = negated + (words[i] ^ SIGNS,)
    return negated


@triton.jit
def products_of_tokens(k, q, zero, g, t, NP: tl.constexpr):
    """(k_g . k_2t, k_g . k_2t+1), and q_g . k_2t, q_g . k_2t+1 in one word, zero where the key comes after the
    query."""
    a = ()
    for j in tl.static_range(NP):
        a = a + (k[j], q[j])
    c = over_states((zero, zero, zero, zero), a, k, NP)
    reads = packed(tl.where(2 * t <= g, c[2], 0.0), tl.where(2 * t < g, c[3], 0.0))
    return c[0], c[1], reads


@triton.jit
def own_products(G0, G1, t, tokens):
    """Of the lane's tokens 2t and 2t + 1: their keys' product, and 1 + ||k||^2 of each, infinite (so that eps is zero)
    from token `tokens` of the chunk on."""
    n0 = from_lane(G0, 9 * t)
    between = from_lane(G0, 9 * t + 4)
    n1 = from_lane(G1, 9 * t + 4)
    n0 = tl.where(2 * t < tokens, 1.0 + n0, float("inf"))
    n1 = tl.where(2 * t + 1 < tokens, 1.0 + n1, float("inf"))
    return between, n0, n1


@triton.jit
def keep_projection(place, row, left, RP: tl.constexpr, CP: tl.constexpr, LANES: tl.constexpr):
    """Puts a lane's share of the projection (D, 8 RP) that makes logits into shared memory of its own: of each tile the
    words of both channels, as the left operand of a product. `row` is where the share of the first channel begins."""
    pairs = row.to(tl.pointer_type(tl.int32), bitcast=True)
    for cp in tl.static_range(CP):
        for j in tl.static_range(RP):
            one = tl.load(pairs + (8 * RP * cp + j), mask=2 * cp < left, other=0)
            two = tl.load(pairs + (8 * RP * cp + 4 * RP + j), mask=2 * cp + 1 < left, other=0)
            put_shared(place + 8 * LANES * (cp * RP + j), one.to(tl.float32, bitcast=True),
                       two.to(tl.float32, bitcast=True))  # fmt: skip


@triton.jit
def step_sizes(words, kept, zero, bias, n0, n1, cp: tl.constexpr, CP: tl.constexpr, SCALAR: tl.constexpr,
               RP: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """eps and e = exp(-logit) of a tile, each as C lies. RP: the words are the tokens' at low rank, and the projection
    lies at `kept`."""
    if RP > 0:
        a = ()
        for j in tl.static_range(RP):
            one, two = get_shared(kept + 8 * LANES * (cp * RP + j))
            a = a + (one.to(tl.int32, bitcast=True), two.to(tl.int32, bitcast=True))
        u = over_states((zero, zero, zero, zero), a, words, RP)
        e = (exp2(tl.minimum(u[0] * -LOG2E + bias[2 * cp], MAX_EXPONENT)),
             exp2(tl.minimum(u[1] * -LOG2E + bias[2 * cp], MAX_EXPONENT)),
             exp2(tl.minimum(u[2] * -LOG2E + bias[2 * cp + 1], MAX_EXPONENT)),
             exp2(tl.minimum(u[3] * -LOG2E + bias[2 * cp + 1], MAX_EXPONENT)))  # fmt: skip
    elif SCALAR:
        e0 = exp2(tl.minimum(low(words[0]) * -LOG2E + bias[0], MAX_EXPONENT))
        e1 = exp2(tl.minimum(low(words[1]) * -LOG2E + bias[0], MAX_EXPONENT))
        e = (e0, e1, e0, e1)
    else:
        w0 = words[cp]
        w1 = words[CP + cp]
        e = (exp2(tl.minimum(low(w0) * -LOG2E + bias[2 * cp], MAX_EXPONENT)),
             exp2(tl.minimum(low(w1) * -LOG2E + bias[2 * cp], MAX_EXPONENT)),
             exp2(tl.minimum(high(w0) * -LOG2E + bias[2 * cp + 1], MAX_EXPONENT)),
             exp2(tl.minimum(high(w1) * -LOG2E + bias[2 * cp + 1], MAX_EXPONENT)))  # fmt: skip
    return (reciprocal(n0 + e[0]), reciprocal(n1 + e[1]), reciprocal(n0 + e[2]), reciprocal(n1 + e[3])), e


@triton.jit
def numbers(words, cp: tl.constexpr, CP: tl.constexpr):
    """Float32 of a tile's tokens, as C lies, from the words of `load_channels` of both tokens."""
    return low(words[cp]), low(words[CP + cp]), high(words[cp]), high(words[CP + cp])


@triton.jit
def solve_pair(R, eps, linked):
    """w of the lane's two tokens, given what the others of the chunk leave of x: the second reads the first."""
    w0 = eps[0] * R[0]
    w2 = eps[2] * R[2]
    return w0, eps[1] * R[1] - linked[0] * w0, w2, eps[3] * R[3] - linked[1] * w2


@triton.jit
def solve(base, eps, linked, G0, G1, CP: tl.constexpr):
    """W of all tiles, as C lies, from what the state leaves of x. Four rounds, each right for one lane of the quad
    more: the tokens of lane t read those of the lanes before."""
    R = base
    W = ()
    for turn in tl.static_range(4):
        W = ()
        for cp in tl.static_range(CP):
            W = W + solve_pair(part_of(R, cp, CP), part_of(eps, cp, CP), part_of(linked, cp, CP))
        if turn < 3:
            R = ()
            for cp in tl.static_range(CP):
                R = R + product_tf32(part_of(base, cp, CP), part_of(W, cp, CP), G0, G1)
    return W


@triton.jit
def solve_pair_back(R, eps, between):
    """U of the lane's two tokens: the first reads the second."""
    u1 = eps[1] * R[1]
    u3 = eps[3] * R[3]
    return eps[0] * (R[0] - between * u1), u1, eps[2] * (R[2] - between * u3), u3


@triton.jit
def state_at(row, d, state, stride_d, stride_n, left, NP: tl.constexpr, CP: tl.constexpr):
    """The states of a lane's tiles, tile by tile as C lies, from row[d, state]."""
    S = ()
    for i in tl.static_range(CP * NP):
        pair = 2 * (i // NP)
        at = row + (d + pair) * stride_d + (state + 2 * (i % NP)) * stride_n
        for h in tl.static_range(2):
            for j in tl.static_range(2):
                S = S + (tl.load(at + h * stride_d + j * stride_n, mask=pair + h < left, other=0.0).to(tl.float32),)
    return S


@triton.jit
def put_state(row, d, state, S, left, N: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr):
    """The reverse, to contiguous (D, N) in float32."""
    for i in tl.static_range(CP * NP):
        pair = 2 * (i // NP)
        at = row + (d + pair) * N + (state + 2 * (i % NP))
        for h in tl.static_range(2):
            for j in tl.static_range(2):
                tl.store(at + (h * N + j), S[4 * i + 2 * h + j], mask=pair + h < left)


@triton.jit
def weights(ptr, d, stride_d, left, HAS: tl.constexpr, like, CP: tl.constexpr):
    """A number for each channel of the lane, zeros if there are none."""
    values = ()
    for i in tl.static_range(2 * CP):
        if HAS:
            values = values + (tl.load(ptr + (d + i) * stride_d, mask=i < left, other=0.0).to(tl.float32),)
        else:
            values = values + (like,)
    return values


@triton.jit
def scaled(values, factor):
    out = ()
    for i in tl.static_range(len(values)):
        out = out + (values[i] * factor,)
    return out


@triton.jit
def load_chunk(place, rows, strides, lane, i, left_of_z, HAS_Z: tl.constexpr, OTHER: tl.constexpr,
               SCALAR: tl.constexpr, RP: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr, WORD: tl.constexpr,
               STATES: tl.constexpr, RANKS: tl.constexpr, ALL: tl.constexpr, HOW: tl.constexpr,
               LANES: tl.constexpr):  # fmt: skip
    """What a chunk from the i-th token of the scan on reads: words of keys, queries, x, logits, z and what the other
    direction left (two tokens each); beyond the last token that one again. RP: logits at low rank, as keys, RANKS
    numbers at once.

    `rows` is where these begin for the lane's channels and states, in the order k, q, x, logits, z, other; `strides`
    how far their tokens are apart; `lane` its (g, t), channels left, and the scan's origin, sign and L.
    """
    k_row, q_row, x_row, step_row, z_row, other_row = rows
    k_l, q_l, x_l, step_l, z_l, other_l = strides
    g, t, left, origin, sign, L = lane
    row = origin + sign * tl.maximum(tl.minimum(i + g, L - 1), 0)
    first = origin + sign * tl.maximum(tl.minimum(i + 2 * t, L - 1), 0)
    second = origin + sign * tl.maximum(tl.minimum(i + 2 * t + 1, L - 1), 0)
    OF_STATES: tl.constexpr = 8 * LANES * (NP // 2 if STATES == 4 else NP)
    OF_TOKEN: tl.constexpr = 8 * LANES * (CP // 2 if WORD == 4 else CP)
    words = load_states(place, k_row, row * k_l, NP, STATES, HOW, LANES)
    words = words + load_states(place + OF_STATES, q_row, row * q_l, NP, STATES, HOW, LANES)
    place = place + 2 * OF_STATES
    words = words + load_channels(place, x_row, first * x_l, left, CP, WORD, True, HOW, LANES)
    words = words + load_channels(place + OF_TOKEN, x_row, second * x_l, left, CP, WORD, True, HOW, LANES)
    place = place + 2 * OF_TOKEN
    if RP > 0:
        words = words + load_states(place, step_row, row * step_l, RP, RANKS, HOW, LANES)
        place = place + 8 * LANES * (RP // 2 if RANKS == 4 else RP)
    else:
        words = words + load_steps(place, step_row, first * step_l, left, CP, WORD, SCALAR, HOW, LANES)
        words = words + load_steps(place + OF_TOKEN, step_row, second * step_l, left, CP, WORD, SCALAR, HOW, LANES)
        place = place + 2 * OF_TOKEN
    if HAS_Z:
        words = words + load_channels(place, z_row, first * z_l, left_of_z, CP, WORD, ALL, HOW, LANES)
        words = words + load_channels(place + OF_TOKEN, z_row, second * z_l, left_of_z, CP, WORD, ALL, HOW, LANES)
        place = place + 2 * OF_TOKEN
    if OTHER:
        words = words + load_channels(place, other_row, first * other_l, left, CP, WORD, True, HOW, LANES)
        words = words + load_channels(place + OF_TOKEN, other_row, second * other_l, left, CP, WORD, True, HOW, LANES)
    return words


@triton.jit
def sum_of(o, other):
    return (o[0] + other[0], o[1] + other[1], o[2] + other[2], o[3] + other[3])


@triton.jit
def span_of(values, begin: tl.constexpr, count: tl.constexpr):
    part = ()
    for i in tl.static_range(count):
        part = part + (values[begin + i],)
    return part


@_kernel
def _forward_kernel(
    x_ptr, step_ptr, proj_ptr, k_ptr, q_ptr, z_ptr, D_ptr, bias_ptr, start_ptr, y_ptr, final_ptr, written_ptr,
    anchor_ptr, L, B, blocks,
    x_g, x_b, x_l, step_g, step_b, step_l, step_d, proj_g, k_g, k_b, k_l, q_g, q_b, q_l, z_g, z_b, z_l, D_g, bias_g,
    bias_d, start_g, start_b, start_d, start_n, unscale,
    HAS_Z: tl.constexpr, HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_START: tl.constexpr,
    FIRST_REVERSED: tl.constexpr, MEET: tl.constexpr, SCALAR: tl.constexpr, OUTPUT: tl.constexpr, SAVE: tl.constexpr,
    ALIGNED: tl.constexpr, D: tl.constexpr, N: tl.constexpr, RP: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr,
    NW: tl.constexpr, WORD: tl.constexpr, STATES: tl.constexpr, RANKS: tl.constexpr, ANCHOR: tl.constexpr,
    STAGES: tl.constexpr, STAGE: tl.constexpr, WAIT: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """All chunks of NW blocks of 16 CP channels of one sequence and direction.

    OUTPUT writes y, (G, B, L, D). With MEET y is (B, L, D), the sum of both directions: every other warp goes from the
    last token to the first, on the channels of the warp before it. The one that comes to a token first leaves its part
    there, without gate and scale, and the other adds its own; the program waits once, where the two meet.
    SAVE keeps w, (G, B, chunks, pairs of channels, 4) of two words (the lane's tokens of either channel), and the state
    before every ANCHOR-th chunk but the first and after the last, (G, B, anchors, D, N). `unscale` is 1 / scale of y.
    """
    r = tl.arange(0, 32 * NW)
    g = r % 32 // 4
    t = r % 4
    zero = probe(r)
    i = tl.program_id(0)
    b = (i // blocks).to(tl.int64)
    if MEET:
        G = (r // 32 % 2).to(tl.int64)
        block = i % blocks * (NW // 2) + r // 64
    else:
        G = tl.program_id(1).to(tl.int64)
        block = i % blocks * NW + r // 32
    d = block * (16 * CP) + g * (2 * CP)
    left = D - d
    state = t * (2 * NP)
    backward = G + FIRST_REVERSED > 0
    sign = tl.where(backward, -1, 1)
    origin = tl.where(backward, L - 1, 0)
    chunks = (L + 7) // 8
    meeting = (chunks - 1) // 2 if MEET else 0
    anchors = (chunks + ANCHOR - 1) // ANCHOR
    x_row = x_ptr + offset_of(G, x_g, ALIGNED) + offset_of(b, x_b, ALIGNED) + d
    if RP > 0:
        step_row = step_ptr + G * step_g + b * step_b + t * (2 * RP)
    else:
        step_row = step_ptr + offset_of(G, step_g, ALIGNED) + offset_of(b, step_b, ALIGNED) + d * step_d
    z_row = z_ptr + offset_of(G, z_g, ALIGNED) + offset_of(b, z_b, ALIGNED) + d
    y_row = y_ptr + offset_of(b if MEET else G * B + b, L * D, False) + d
    k_row = k_ptr + G * k_g + b * k_b + state
    q_row = q_ptr + G * q_g + b * q_b + state
    PAIRS: tl.constexpr = (D + 1) // 2
    written = written_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    written = written + (G * B + b) * chunks * (4 * PAIRS) + (d * 2 + t)
    anchor_row = anchor_ptr + (G * B + b) * anchors * (D * N)
    bias = scaled(weights(bias_ptr + G * bias_g, d, bias_d, left, HAS_BIAS, zero, CP), -LOG2E)
    skip = weights(D_ptr + G * D_g, d, 1, left, HAS_D, zero, CP)
    S = ()
    if HAS_START:
        S = state_at(start_ptr + G * start_g + b * start_b, d, state, start_d, start_n, left, NP, CP)
    else:
        for _ in tl.static_range(4 * CP * NP):
            S = S + (zero,)
    STEPS: tl.constexpr = RP if RP > 0 else 2 if SCALAR else 2 * CP  # words of logits
    LANES: tl.constexpr = 32 * NW
    place = r * 8
    if STAGES + RP > 0:
        place = place + shared_room(ROOM, r)
    kept = place + STAGES * STAGE
    if RP > 0:
        keep_projection(kept, proj_ptr + G * proj_g + d * (8 * RP) + t * (2 * RP), left, RP, CP, LANES)
    rows = k_row, q_row, x_row, step_row, z_row, y_row
    strides = k_l, q_l, x_l, step_l, z_l, L
    lane = g, t, left, origin, sign, L
    ahead = ()
    # z is of no use before the directions meet.
    if STAGES > 0:
        for n in tl.static_range(STAGES - 1):
            load_chunk(place + n * STAGE, rows, strides, lane, 8 * n, tl.where(n < meeting, 0, left), HAS_Z, False,
                       SCALAR, RP, NP, CP, WORD, STATES, RANKS, not MEET, START, LANES)  # fmt: skip
            end_group(place)
    else:
        ahead = load_chunk(place, rows, strides, lane, 0, tl.where(meeting > 0, 0, left), HAS_Z, False, SCALAR, RP, NP,
                           CP, WORD, STATES, RANKS, not MEET, DIRECT, LANES)  # fmt: skip
    for c in tl.range(0, chunks, num_stages=1):
        if STAGES > 0:
            wait_group(WAIT, place)
            words = load_chunk(place + c % STAGES * STAGE, rows, strides, lane, 8 * c, left, HAS_Z, False, SCALAR, RP,
                               NP, CP, WORD, STATES, RANKS, not MEET, TAKE, LANES)  # fmt: skip
            then = c + STAGES - 1
            load_chunk(place + then % STAGES * STAGE, rows, strides, lane, 8 * then, tl.where(then < meeting, 0, left),
                       HAS_Z, False, SCALAR, RP, NP, CP, WORD, STATES, RANKS, not MEET, START, LANES)  # fmt: skip
            end_group(place)
        else:
            words = ahead
            ahead = load_chunk(place, rows, strides, lane, 8 * c + 8, tl.where(c + 1 < meeting, 0, left), HAS_Z, False,
                               SCALAR, RP, NP, CP, WORD, STATES, RANKS, not MEET, DIRECT, LANES)  # fmt: skip
        first = 8 * c + 2 * t
        at = (origin + sign * first) * D
        next_at = (origin + sign * (first + 1)) * D
        early = first < L  # whose tokens are stored as they are, of the lane's first and second
        next_early = first + 1 < L
        if MEET:
            theirs = (L - 1 - first) // 8
            next_theirs = (L - 2 - first) // 8
            early = early & ((theirs > c) | ((theirs == c) & (G == 0)))
            next_early = next_early & ((next_theirs > c) | ((next_theirs == c) & (G == 0)))
            others_left = tl.where(c > meeting, left, 0)
            others = load_channels(
                place, y_row, at, tl.where(first < L, others_left, 0), CP, WORD, False, DIRECT, LANES
            )
            others = others + load_channels(place, y_row, next_at, tl.where(first + 1 < L, others_left, 0), CP, WORD,
                                            False, DIRECT, LANES)  # fmt: skip
        k = span_of(words, 0, NP)
        q = span_of(words, NP, NP)
        xs = span_of(words, 2 * NP, 2 * CP)
        us = span_of(words, 2 * NP + 2 * CP, STEPS)
        kT = each_transposed(k)
        minus_k = each_negated(k)
        G0, G1, reads = products_of_tokens(k, q, zero, g, t, NP)
        between, n0, n1 = own_products(G0, G1, t, L - 8 * c)
        G0 = tl.where(g // 2 > t, -G0, 0.0)
        G1 = tl.where(g // 2 > t, -G1, 0.0)
        A = ()
        eps = ()
        linked = ()
        base = ()
        for cp in tl.static_range(CP):
            a = words_of(span_of(S, 4 * NP * cp, 4 * NP), NP)
            A = A + a
            own, e = step_sizes(us, kept, zero, bias, n0, n1, cp, CP, SCALAR, RP, LANES)
            eps = eps + own
            linked = linked + (own[1] * between, own[3] * between)
            base = base + over_states(numbers(xs, cp, CP), a, minus_k, NP)
        W = solve(base, eps, linked, G0, G1, CP)
        ys = ()
        new = ()
        for cp in tl.static_range(CP):
            w = part_of(W, cp, CP)
            w0 = packed(w[0], w[1])
            w1 = packed(w[2], w[3])
            if SAVE:
                tl.store(written + (c * (4 * PAIRS) + 4 * cp), joined(w0, w1), mask=2 * cp < left)
            if OUTPUT:
                x = numbers(xs, cp, CP)
                o = (x[0] * skip[2 * cp], x[1] * skip[2 * cp], x[2] * skip[2 * cp + 1], x[3] * skip[2 * cp + 1])
                o = over_states(o, part_of(A, cp, CP), q, NP)
                ys = ys + product_8(o, w0, w1, reads)
            for j in tl.static_range(NP):
                new = new + product_8(span_of(S, 4 * (NP * cp + j), 4), w0, w1, kT[j])
        S = new
        if OUTPUT:
            zs = span_of(words, 2 * NP + 2 * CP + STEPS, 2 * CP if HAS_Z else 0)
            if MEET:
                put_tokens(y_row, at, next_at, ys, left, early, next_early, CP, WORD)
                if c >= meeting:
                    late = (first < L) & (early == 0)
                    next_late = (first + 1 < L) & (next_early == 0)
                    if c == meeting:
                        tl.debug_barrier()
                        others = load_channels(place, y_row, at, tl.where(late, left, 0), CP, WORD, False, DIRECT,
                                               LANES)  # fmt: skip
                        others = others + load_channels(place, y_row, next_at, tl.where(next_late, left, 0), CP, WORD,
                                                        False, DIRECT, LANES)  # fmt: skip
                    ys = gate_tokens(ys, zs, others, unscale, HAS_Z, True, CP)
                    put_tokens(y_row, at, next_at, ys, left, late, next_late, CP, WORD)
            else:
                ys = gate_tokens(ys, zs, zs, unscale, HAS_Z, False, CP)
                put_tokens(y_row, at, next_at, ys, left, early, next_early, CP, WORD)
        if SAVE:
            if (c + 1) % ANCHOR == 0 or c == chunks - 1:
                put_state(anchor_row + (c // ANCHOR) * (D * N), d, state, S, left, N, NP, CP)
    put_state(final_ptr + (G * B + b) * (D * N), d, state, S, left, N, NP, CP)


@triton.jit
def gate_tokens(values, zs, others, unscale, HAS_Z: tl.constexpr, ADD: tl.constexpr, CP: tl.constexpr):
    """What lies tile by tile as C, with ADD what `others` holds added, times silu(z) / unscale."""
    out = ()
    for cp in tl.static_range(CP):
        o = part_of(values, cp, CP)
        if ADD:
            o = sum_of(o, numbers(others, cp, CP))
        if HAS_Z:
            z = numbers(zs, cp, CP)
            for j in tl.static_range(4):
                out = out + ((o[j] * z[j]) * reciprocal(unscale + unscale * exp2(z[j] * -LOG2E)),)
        else:
            out = out + scaled(o, 1.0 / unscale)
    return out


@triton.jit
def load_chunk_back(place, rows, strides, lane, dy_row, dy_l, written, c, HAS_Z: tl.constexpr, OTHER: tl.constexpr,
                    SCALAR: tl.constexpr, RP: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr, PAIRS: tl.constexpr,
                    WORD: tl.constexpr, STATES: tl.constexpr, RANKS: tl.constexpr, HOW: tl.constexpr,
                    LANES: tl.constexpr):  # fmt: skip
    """What chunk c reads: w, two words a tile, dy, and as `load_chunk`. Before the first chunk the first again."""
    g, t, left, origin, sign, L = lane
    c = tl.maximum(c, 0)
    first = 8 * c + 2 * t
    OF_TOKEN: tl.constexpr = 8 * LANES * (CP // 2 if WORD == 4 else CP)
    words = ()
    for i in tl.static_range(CP):
        words = words + read_two(
            place + 8 * LANES * i, written + (c * (4 * PAIRS) + 4 * i), 2 * i < left, WORD == 4, HOW
        )
    place = place + 8 * LANES * CP
    for j in tl.static_range(2):
        token = origin + sign * tl.minimum(first + j, L - 1)
        words = words + load_channels(place + j * OF_TOKEN, dy_row, token * dy_l, left, CP, WORD, True, HOW, LANES)
    return words + load_chunk(place + 2 * OF_TOKEN, rows, strides, lane, 8 * c, left, HAS_Z, OTHER, SCALAR, RP, NP, CP,
                              WORD, STATES, RANKS, True, HOW, LANES)  # fmt: skip


@triton.jit
def within(words, first, L, CP: tl.constexpr):
    """Of both tokens, zeros beyond the last one."""
    kept = ()
    for i in tl.static_range(2 * CP):
        kept = kept + (tl.where(first + i // CP < L, words[i], 0),)
    return kept


@triton.jit
def gate_back(dy, z, unscale):
    """dy silu(z) / unscale, and dy silu'(z) / unscale."""
    sigmoid = reciprocal(1.0 + exp2(z * -LOG2E))
    dy = dy * (1.0 / unscale)
    h = dy * sigmoid
    into = z * h
    return into, h + into * (1.0 - sigmoid)


@triton.jit
def sum_warps(parts, place, warp, turn, COUNT: tl.constexpr, NW: tl.constexpr):
    """The sums over the program's warps of `parts`, COUNT pairs of numbers; warp w gets pairs w, w + NW and so on.
    `turn` alternates between 0 and 1, so that one barrier is enough."""
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
def sums_of_keys(sums, pair_sums, kT, qT, none, g, t, NP: tl.constexpr):
    """Of the warp's channels, pairs of states of dk and then of dq for token g: what `sums` holds of the chunk's ends,
    and what goes through its own tokens, whose w was read by themselves and those after them. `pair_sums` are products
    of dO (above) and -U (below) with W."""
    upper = packed(tl.where(2 * t <= g, pair_sums[0], 0.0), tl.where(2 * t < g, pair_sums[1], 0.0))
    lower = packed(tl.where(2 * t <= g, pair_sums[2], 0.0), tl.where(2 * t < g, pair_sums[3], 0.0))
    upperT = transposed(upper)
    lowerT = transposed(lower)
    dk = ()
    dq = ()
    for j in tl.static_range(NP):
        part = product_8(span_of(sums, 4 * j, 4), upper, lower, kT[j])
        part = product_16(part, none, upperT, none, lowerT, qT[j], kT[j])
        dk = dk + (part[2], part[3])
        dq = dq + (part[0], part[1])
    return dk + dq


@_kernel
def _backward_kernel(
    x_ptr, step_ptr, proj_ptr, k_ptr, q_ptr, z_ptr, D_ptr, bias_ptr, dy_ptr, adjoint_ptr, written_ptr, anchor_ptr,
    dx_ptr, dstep_ptr, dz_ptr, sums_ptr, dD_ptr, dbias_ptr, dinitial_ptr,
    L, B, blocks, direction,
    x_g, x_b, x_l, step_g, step_b, step_l, step_d, proj_g, k_g, k_b, k_l, q_g, q_b, q_l, z_g, z_b, z_l, D_g, bias_g,
    bias_d, dy_g, dy_b, dy_l, dz_g, dz_b, dz_l, adjoint_g, adjoint_b, adjoint_d, adjoint_n, unscale,
    HAS_Z: tl.constexpr, HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADJOINT: tl.constexpr,
    HAS_INITIAL: tl.constexpr, FIRST_REVERSED: tl.constexpr, IN_TURN: tl.constexpr, OTHER: tl.constexpr,
    SCALAR: tl.constexpr, ALIGNED: tl.constexpr, D: tl.constexpr, N: tl.constexpr, RP: tl.constexpr, NP: tl.constexpr,
    CP: tl.constexpr, NW: tl.constexpr, WORD: tl.constexpr, STATES: tl.constexpr, RANKS: tl.constexpr,
    ANCHOR: tl.constexpr, STAGES: tl.constexpr, STAGE: tl.constexpr, EXCHANGE: tl.constexpr, WAIT: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    """The chunks from the last to the first, NW blocks of 16 CP channels of one sequence and direction.

    The state goes back by S - W K, from the states that were kept. dk and dq are left as this program's sums over its
    channels, (blocks, G, B, L, 2 N); dD and dbias as sums over the tokens of each sequence, (G, B, D). IN_TURN there is
    one launch for each `direction`: the first leaves its read-out where dz will be, and the second, OTHER, makes dz of
    both.
    """
    r = tl.arange(0, 32 * NW)
    g = r % 32 // 4
    t = r % 4
    warp = r // 32
    zero = probe(r)
    i = tl.program_id(0)
    b = (i // blocks).to(tl.int64)
    directions = tl.num_programs(1) + IN_TURN
    G = tl.program_id(1).to(tl.int64) + direction
    d = (i % blocks * NW + warp) * (16 * CP) + g * (2 * CP)
    left = D - d
    state = t * (2 * NP)
    backward = G + FIRST_REVERSED > 0
    sign = tl.where(backward, -1, 1)
    origin = tl.where(backward, L - 1, 0)
    chunks = (L + 7) // 8
    anchors = (chunks + ANCHOR - 1) // ANCHOR
    of_sequence = offset_of(G * B + b, L * D, False) + d
    x_row = x_ptr + offset_of(G, x_g, ALIGNED) + offset_of(b, x_b, ALIGNED) + d
    if RP > 0:
        step_row = step_ptr + G * step_g + b * step_b + t * (2 * RP)
    else:
        step_row = step_ptr + offset_of(G, step_g, ALIGNED) + offset_of(b, step_b, ALIGNED) + d * step_d
    z_row = z_ptr + offset_of(G, z_g, ALIGNED) + offset_of(b, z_b, ALIGNED) + d
    dy_row = dy_ptr + offset_of(G, dy_g, ALIGNED) + offset_of(b, dy_b, ALIGNED) + d
    dz_row = dz_ptr + offset_of(G, dz_g, ALIGNED) + offset_of(b, dz_b, ALIGNED) + d
    k_row = k_ptr + G * k_g + b * k_b + state
    q_row = q_ptr + G * q_g + b * q_b + state
    PAIRS: tl.constexpr = (D + 1) // 2
    written = written_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    written = written + (G * B + b) * chunks * (4 * PAIRS) + (d * 2 + t)
    anchor_row = anchor_ptr + (G * B + b) * anchors * (D * N)
    sums_row = sums_ptr + ((i % blocks * directions + G) * B + b) * L * (2 * N) + state
    bias = scaled(weights(bias_ptr + G * bias_g, d, bias_d, left, HAS_BIAS, zero, CP), -LOG2E)
    skip = weights(D_ptr + G * D_g, d, 1, left, HAS_D, zero, CP)
    LANES: tl.constexpr = 32 * NW
    room = shared_room(ROOM, r)
    place = room + r * 8
    exchange = room + STAGES * STAGE + r % 32 * 8
    kept = place + (STAGES * STAGE + EXCHANGE)
    if RP > 0:
        keep_projection(kept, proj_ptr + G * proj_g + d * (8 * RP) + t * (2 * RP), left, RP, CP, LANES)
    STEPS: tl.constexpr = RP if RP > 0 else 2 if SCALAR else 2 * CP
    S = ()
    for _n in tl.static_range(4 * CP * NP):
        S = S + (zero,)
    P = S
    if HAS_ADJOINT:
        P = state_at(adjoint_ptr + G * adjoint_g + b * adjoint_b, d, state, adjoint_d, adjoint_n, left, NP, CP)
    dskip = ()
    dbias = ()
    for _n in tl.static_range(2 * CP):
        dskip = dskip + (zero,)
        dbias = dbias + (zero,)
    rows = k_row, q_row, x_row, step_row, z_row, dz_row
    strides = k_l, q_l, x_l, step_l, z_l, dz_l
    lane = g, t, left, origin, sign, L
    ahead = ()
    if STAGES > 0:
        for n in tl.static_range(STAGES - 1):
            load_chunk_back(place + n * STAGE, rows, strides, lane, dy_row, dy_l, written, chunks - 1 - n, HAS_Z, OTHER,
                            SCALAR, RP, NP, CP, PAIRS, WORD, STATES, RANKS, START, LANES)  # fmt: skip
            end_group(place)
    else:
        ahead = load_chunk_back(place, rows, strides, lane, dy_row, dy_l, written, chunks - 1, HAS_Z, OTHER, SCALAR, RP,
                                NP, CP, PAIRS, WORD, STATES, RANKS, DIRECT, LANES)  # fmt: skip
    for n in tl.range(0, chunks, num_stages=1):
        c = chunks - 1 - n
        if (c + 1) % ANCHOR == 0 or n == 0:
            S = state_at(anchor_row + c // ANCHOR * (D * N), d, state, N, 1, left, NP, CP)
        if STAGES > 0:
            wait_group(WAIT, place)
            words = load_chunk_back(place + n % STAGES * STAGE, rows, strides, lane, dy_row, dy_l, written, c, HAS_Z,
                                    OTHER, SCALAR, RP, NP, CP, PAIRS, WORD, STATES, RANKS, TAKE, LANES)  # fmt: skip
            then = n + STAGES - 1
            load_chunk_back(place + then % STAGES * STAGE, rows, strides, lane, dy_row, dy_l, written,
                            c - (STAGES - 1), HAS_Z, OTHER, SCALAR, RP, NP, CP, PAIRS, WORD, STATES, RANKS, START,
                            LANES)  # fmt: skip
            end_group(place)
        else:
            words = ahead
            ahead = load_chunk_back(place, rows, strides, lane, dy_row, dy_l, written, c - 1, HAS_Z, OTHER, SCALAR, RP,
                                    NP, CP, PAIRS, WORD, STATES, RANKS, DIRECT, LANES)  # fmt: skip
        ws = span_of(words, 0, 2 * CP)
        dys = within(span_of(words, 2 * CP, 2 * CP), 8 * c + 2 * t, L, CP)
        k = span_of(words, 4 * CP, NP)
        q = span_of(words, 4 * CP + NP, NP)
        xs = span_of(words, 4 * CP + 2 * NP, 2 * CP)
        us = span_of(words, 6 * CP + 2 * NP, STEPS)
        kT = each_transposed(k)
        qT = each_transposed(q)
        minus_kT = each_negated(kT)
        G0, G1, reads = products_of_tokens(k, q, zero, g, t, NP)
        reads_back = transposed(reads)
        between, n0, n1 = own_products(G0, G1, t, L - 8 * c)
        G0 = tl.where(g // 2 < t, -G0, 0.0)
        G1 = tl.where(g // 2 < t, -G1, 0.0)
        first = 8 * c + 2 * t
        none = r * 0
        pair_sums = (zero, zero, zero, zero)  # of dO and -U with W: rows their tokens, columns those of W
        sums = ()
        for _j in tl.static_range(NP):
            sums = sums + (zero, zero, zero, zero)
        new_S = ()
        new_P = ()
        dxs = ()
        dsteps = ()
        dzs = ()
        new_dskip = ()
        new_dbias = ()
        for cp in tl.static_range(CP):
            w0 = ws[2 * cp]
            w1 = ws[2 * cp + 1]
            s = ()
            for j in tl.static_range(NP):
                s = s + product_8(span_of(S, 4 * (NP * cp + j), 4), w0, w1, minus_kT[j])
            new_S = new_S + s
            A = words_of(s, NP)
            x = numbers(xs, cp, CP)
            dy = numbers(dys, cp, CP)
            dO = ()
            if HAS_Z:
                o = (x[0] * skip[2 * cp], x[1] * skip[2 * cp], x[2] * skip[2 * cp + 1], x[3] * skip[2 * cp + 1])
                o = product_8(over_states(o, A, q, NP), w0, w1, reads)
                z = numbers(span_of(words, 6 * CP + 2 * NP + STEPS, 2 * CP), cp, CP)
                if OTHER:
                    o = sum_of(o, numbers(span_of(words, len(words) - 2 * CP, 2 * CP), cp, CP))
                for j in tl.static_range(4):
                    into, across = gate_back(dy[j], z[j], unscale)
                    dO = dO + (into,)
                    if IN_TURN and not OTHER:
                        dzs = dzs + (o[j],)
                    else:
                        dzs = dzs + (across * o[j],)
            else:
                dO = scaled(dy, 1.0 / unscale)
            new_dskip = new_dskip + (dskip[2 * cp] + (dO[0] * x[0] + dO[1] * x[1]),
                                     dskip[2 * cp + 1] + (dO[2] * x[2] + dO[3] * x[3]))  # fmt: skip
            o0 = packed(dO[0], dO[1])
            o1 = packed(dO[2], dO[3])
            p = span_of(P, 4 * NP * cp, 4 * NP)
            PA = words_of(p, NP)
            base = product_8(over_states((zero, zero, zero, zero), PA, k, NP), o0, o1, reads_back)
            eps, e = step_sizes(us, kept, zero, bias, n0, n1, cp, CP, SCALAR, RP, LANES)
            U = solve_pair_back(base, eps, between)
            for _turn in tl.static_range(3):
                U = solve_pair_back(product_tf32(base, U, G0, G1), eps, between)
            dxs = dxs + (U[0] + skip[2 * cp] * dO[0], U[1] + skip[2 * cp] * dO[1],
                         U[2] + skip[2 * cp + 1] * dO[2], U[3] + skip[2 * cp + 1] * dO[3])  # fmt: skip
            # d log eps / d logit is eps e.
            du = ((U[0] * low(w0)) * e[0], (U[1] * high(w0)) * e[1], (U[2] * low(w1)) * e[2], (U[3] * high(w1)) * e[3])
            dsteps = dsteps + du
            new_dbias = new_dbias + (dbias[2 * cp] + (du[0] + du[1]), dbias[2 * cp + 1] + (du[2] + du[3]))
            u0 = packed(-U[0], -U[1])
            u1 = packed(-U[2], -U[3])
            # Sums over channels: transposed, they are the columns of the left and the rows of the right operand.
            wT = each_transposed((w0, w1))
            oT = each_transposed((o0, o1))
            uT = each_transposed((u0, u1))
            ST = each_transposed(A)
            PT = each_transposed(PA)
            added = ()
            for j in tl.static_range(NP):
                part = product_16(span_of(sums, 4 * j, 4), oT[0], uT[0], oT[1], uT[1], ST[2 * j], ST[2 * j + 1])
                added = added + product_16(part, none, wT[0], none, wT[1], PT[2 * j], PT[2 * j + 1])
                new_P = new_P + product_16(span_of(p, 4 * j, 4), o0, o1, u0, u1, qT[j], kT[j])
            sums = added
            pair_sums = product_16(pair_sums, oT[0], uT[0], oT[1], uT[1], wT[0], wT[1])
        S = new_S
        P = new_P
        dskip = new_dskip
        dbias = new_dbias
        at = origin + sign * first
        next_at = origin + sign * (first + 1)
        put_tokens(dx_ptr + of_sequence, at * D, next_at * D, dxs, left, first < L, first + 1 < L, CP, WORD)
        if HAS_Z:
            put_tokens(dz_row, at * dz_l, next_at * dz_l, dzs, left, first < L, first + 1 < L, CP, WORD)
        if not SCALAR:
            put_tokens(dstep_ptr + of_sequence, at * D, next_at * D, dsteps, left, first < L, first + 1 < L, CP, WORD)
        parts = sums_of_keys(sums, pair_sums, kT, qT, none, g, t, NP)
        if SCALAR:
            even = zero
            odd = zero
            for cp in tl.static_range(CP):
                even += dsteps[4 * cp] + dsteps[4 * cp + 2]
                odd += dsteps[4 * cp + 1] + dsteps[4 * cp + 3]
            parts = parts + (sum_column(even, r), sum_column(odd, r))
        total = sum_warps(parts, exchange, warp, n % 2, 2 * NP + SCALAR, NW)
        row = origin + sign * (8 * c + g)
        for j in tl.static_range((2 * NP + NW - 1) // NW):
            pair = j * NW + warp  # dk's pairs of states first, then dq's
            to = sums_row + row.to(tl.int64) * (2 * N) + (pair // NP * N + pair % NP * 2)
            to = to.to(tl.pointer_type(tl.int64), bitcast=True)
            word = joined(total[2 * j].to(tl.int32, bitcast=True), total[2 * j + 1].to(tl.int32, bitcast=True))
            tl.store(to, word, mask=(pair < 2 * NP) & (8 * c + g < L))
        if SCALAR:
            last: tl.constexpr = 2 * (2 * NP // NW)
            to = dstep_ptr + ((i % blocks * directions + G) * B + b) * L
            owner = (warp == 2 * NP % NW) & (g == 0)
            tl.store(to + at, total[last], mask=owner & (first < L))
            tl.store(to + next_at, total[last + 1], mask=owner & (first + 1 < L))
    if HAS_INITIAL:
        put_state(dinitial_ptr + (G * B + b) * (D * N), d, state, P, left, N, NP, CP)
    for j in tl.static_range(2 * CP):
        if HAS_D:
            tl.store(dD_ptr + (G * B + b) * D + d + j, sum_quad(dskip[j], r), mask=(j < left) & (t == 0))
        if HAS_BIAS:
            tl.store(dbias_ptr + (G * B + b) * D + d + j, sum_quad(dbias[j], r), mask=(j < left) & (t == 0))


@triton.jit
def put_tokens(row, at, next_at, values, left, ok, next_ok, CP: tl.constexpr, WORD: tl.constexpr):
    """Store what lies tile by tile as C, the lane's two tokens where `ok` and `next_ok`, in 16 bits."""
    early = ()
    late = ()
    for cp in tl.static_range(CP):
        early = early + (packed(values[4 * cp], values[4 * cp + 2]),)
        late = late + (packed(values[4 * cp + 1], values[4 * cp + 3]),)
    store_channels(row, at, early, left, ok, CP, WORD)
    store_channels(row, next_at, late, left, next_ok, CP, WORD)
