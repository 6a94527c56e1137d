"""How the kernels of the chunks (`chunk_forward`, `chunk_backward`) are laid out, and how they load and store.

A warp takes CP tiles of 16 channels of one sequence and direction. In the matrices of a tile rows are channels: rows g
and g + 8 are a pair of neighbours, which share a word in memory. Columns are the 8 tokens of a chunk, or states: lane
4 g + t holds tokens 2t and 2t + 1 of pair g, and states t N / 4 to (t + 1) N / 4 - 1, two to a word, so NP = N / 8
words. "Laid out as C" means the four numbers of a tile that `fragments` draws: both tokens of the first channel, then
of the second. Chunks count in the order of the scan. A tensor has one number for each lane, a tuple several.
"""

from collections import namedtuple

import triton
import triton.language as tl

from .fragments import DIRECT, START, TAKE, end_group, get_shared, packed, put_shared, read, store_words, wait_group
from .lanes import offset_of, part_of

UNALIGNED = ["proj_ptr", "D_ptr", "bias_ptr", "start_ptr", "adjoint_ptr"]

# What a kernel is compiled for, each field a `tl.constexpr`.
#   D channels with N states; CP tiles for a warp, NW warps for a program; logits of rank 8 RP, or 0 if they are whole
#   WORD: how many channels one load takes, 2, 4 or 8
#   SCALAR: one logit for all channels. ALIGNED: strides are multiples of 16
#   ANCHOR: chunks from one kept state to the next
#   STAGES: chunks that shared memory holds, STAGE bytes each. EXCHANGE: bytes for sums over warps. ROOM and WAIT: the
#   PTX that reserves all of it, and that waits for a chunk
# forward: MEET: every other warp goes from the last token to the first. OUTPUT: y is written. SAVE: w and S are kept
# BACKWARD: the backward pass. IN_TURN: there, the directions take turns. OTHER: this is the second of them
Form = namedtuple(
    "Form",
    "D N RP NP CP NW WORD SCALAR ALIGNED ANCHOR STAGES STAGE EXCHANGE ROOM WAIT FIRST_REVERSED HAS_Z "
    "HAS_D HAS_BIAS HAS_START HAS_ADJOINT HAS_INITIAL MEET OUTPUT SAVE BACKWARD IN_TURN OTHER",
)
# Where a lane is: its number r in the program, g and t in its warp; direction and sequence; the first of its channels,
# how many exist from that on, and the first of its states; token i of the scan is token origin + sign i of L.
Lane = namedtuple("Lane", "r g t G b d left state sign origin L")
# Where the tokens of a tensor begin for the lane's channels or states, and how far they are apart.
Tokens = namedtuple("Tokens", "row stride")
# `Tokens` of what a chunk reads, and its words: keys, queries, two tokens each of x, logits, z and of what the other
# direction left, and in the backward pass w, two words for a tile, and dy. (Triton 3.3 returns no deeper tuples.)
Chunk = namedtuple("Chunk", "k q x step z other w dy")


@triton.jit
def zero_of(r):
    """Returns zero for each lane. The compiler knows it, so it takes no register."""
    return (r * 0).to(tl.float32, bitcast=True)


@triton.jit
def lane_of(r, G, b, block, L, form):
    g = r % 32 // 4
    t = r % 4
    d = block * (16 * form.CP) + g * (2 * form.CP)
    backward = G + form.FIRST_REVERSED > 0
    sign = tl.where(backward, -1, 1)
    origin = tl.where(backward, L - 1, 0)
    # Where all channels exist, the compiler is to know it: masks take registers.
    left = form.D - d if form.WORD < 4 else d * 0 + form.D
    return Lane(r, g, t, G, b, d, left, t * (2 * form.NP), sign, origin, L)


@triton.jit
def channels_at(ptr, lane, stride_g, stride_b, stride, form):
    row = ptr + offset_of(lane.G, stride_g, form.ALIGNED) + offset_of(lane.b, stride_b, form.ALIGNED) + lane.d
    return Tokens(row, stride)


@triton.jit
def states_at(ptr, lane, stride_g, stride_b, stride, COUNT: tl.constexpr):
    return Tokens(ptr + lane.G * stride_g + lane.b * stride_b + lane.t * (COUNT // 2 * 4), stride)


@triton.jit
def steps_at(ptr, lane, stride_g, stride_b, stride, stride_d, form):
    """Locates the logits, which are laid out as keys are (at low rank) or as x is."""
    if form.RP > 0:
        row = ptr + lane.G * stride_g + lane.b * stride_b + lane.t * (form.RP // 2 * 4)
    else:
        row = ptr + offset_of(lane.G, stride_g, form.ALIGNED) + offset_of(lane.b, stride_b, form.ALIGNED)
        row = row + lane.d * stride_d
    return Tokens(row, stride)


@triton.jit
def written_at(ptr, lane, sequence, chunks, form):
    """Locates the lane's w of a sequence. All w are (G, B, chunks, fours of channels, 4, 2) of two words: for each lane
    of a quad and each pair of the four channels, two tokens of either channel."""
    words = ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    OF_CHUNK: tl.constexpr = (form.D + 3) // 4 * 8
    return words + sequence * chunks * OF_CHUNK + (lane.d // 4 * 8 + lane.t * 2 + lane.d // 2 % 2)


@triton.jit
def load_words(place, ptr, ok, left, COUNT: tl.constexpr, WORD: tl.constexpr, HOW: tl.constexpr, form):
    """Loads COUNT words of two numbers from `ptr` on, WORD numbers at once, with zeros from the `left`-th number on
    (with WORD 4 or 8 all exist), or everywhere if not `ok`. HOW and `place` are those of `read`."""
    SLOT: tl.constexpr = 256 * form.NW
    words = ()
    if WORD == 8 and HOW != DIRECT:
        for i in tl.static_range(COUNT // 4):
            words = words + read(place + 2 * SLOT * i, ptr + 8 * i, ok, 4, HOW)
    elif WORD >= 4:
        wide = ptr.to(tl.pointer_type(tl.int64), bitcast=True)
        for i in tl.static_range(COUNT // 2):
            words = words + read(place + SLOT * i, wide + i, ok, 2, HOW)
    else:
        pairs = ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        for i in tl.static_range(COUNT):
            words = words + read(place + SLOT * i, pairs + i, ok & (2 * i < left), 1, HOW)
    return words


@triton.jit
def load_states(place, tokens, token, ok, t, COUNT: tl.constexpr, HOW: tl.constexpr, form):
    """Loads a lane's share of a row of keys, queries or low-rank logits: pairs of words, and then a single one."""
    PAIRED: tl.constexpr = COUNT // 2 * 2
    row = tokens.row + token * tokens.stride
    words = load_words(place, row, ok, 0, PAIRED, 4, HOW, form)
    if COUNT > PAIRED:
        row = row + (8 * PAIRED + (2 - 2 * PAIRED) * t)
        words = words + load_words(place + 128 * form.NW * PAIRED, row, ok, 2, 1, 2, HOW, form)
    return words


@triton.jit
def load_pair(place, tokens, first, second, ok, next_ok, lane, HOW: tl.constexpr, form):
    """Loads the lane's channels of the tokens `first` and `second`, where `ok` and `next_ok`."""
    if form.WORD == 8:
        place = place + lane.r * 8  # the place of 16 bytes of a lane
    words = load_words(place, tokens.row + first * tokens.stride, ok, lane.left, form.CP, form.WORD, HOW, form)
    place = place + 256 * form.NW * (form.CP // 2 if form.WORD >= 4 else form.CP)
    ptr = tokens.row + second * tokens.stride
    return words + load_words(place, ptr, next_ok, lane.left, form.CP, form.WORD, HOW, form)


@triton.jit
def load_scalar(place, tokens, token, ok, HOW: tl.constexpr):
    """Loads the logit that all channels share into the low half of a word, where `ok`."""
    # Copies take whole words: here the one in which the number lies.
    at = (tokens.row + token * tokens.stride).to(tl.int64)
    words = read(place, (at & -4).to(tl.pointer_type(tl.int32), bitcast=True), ok, 1, HOW)
    if HOW == TAKE:
        words = ((words[0] >> ((at & 2).to(tl.int32) * 8)) & 65535,)
    return words


@triton.jit
def _load_written(place, rows, lane, c, HOW: tl.constexpr, form):
    """Loads w of chunk c."""
    SLOT: tl.constexpr = 256 * form.NW
    w = ()
    at = rows.w + c * ((form.D + 3) // 4 * 8)
    if form.WORD >= 4:  # two tiles at once
        for i in tl.static_range(form.CP // 2):
            w = w + read(place + lane.r * 8 + 2 * SLOT * i, at + 8 * i, lane.left > 0, 4, HOW)
    else:
        for i in tl.static_range(form.CP):
            w = w + read(place + SLOT * i, at + (i // 2 * 8 + i % 2), 2 * i < lane.left, 2, HOW)
    return w


@triton.jit
def _load_chunk(place, rows, lane, c, meeting, HOW: tl.constexpr, form):
    """Loads chunk c, or the first one if c < 0. Beyond the last token all numbers are zero, so that nothing comes of
    them. z is not needed before the directions meet."""
    w = ()
    dy = ()
    if form.BACKWARD:
        c = tl.maximum(c, 0)
    i = 8 * c
    row = lane.origin + lane.sign * (i + lane.g)
    first = lane.origin + lane.sign * (i + 2 * lane.t)
    second = first + lane.sign
    row_ok = i + lane.g < lane.L
    ok = i + 2 * lane.t < lane.L
    next_ok = i + 2 * lane.t + 1 < lane.L
    OF_STATES: tl.constexpr = 256 * form.NW * ((form.NP + 1) // 2)
    OF_TOKENS: tl.constexpr = 2 * 256 * form.NW * (form.CP // 2 if form.WORD >= 4 else form.CP)
    if form.BACKWARD:
        w = _load_written(place, rows, lane, c, HOW, form)
        place = place + 256 * form.NW * form.CP
        dy = load_pair(place, rows.dy, first, second, ok, next_ok, lane, HOW, form)
        place = place + OF_TOKENS
    k = load_states(place, rows.k, row, row_ok, lane.t, form.NP, HOW, form)
    q = load_states(place + OF_STATES, rows.q, row, row_ok, lane.t, form.NP, HOW, form)
    place = place + 2 * OF_STATES
    x = load_pair(place, rows.x, first, second, ok, next_ok, lane, HOW, form)
    place = place + OF_TOKENS
    if form.RP > 0:
        step = load_states(place, rows.step, row, row_ok, lane.t, form.RP, HOW, form)
        place = place + 256 * form.NW * ((form.RP + 1) // 2)
    else:
        if form.SCALAR:
            step = load_scalar(place, rows.step, first, ok, HOW)
            step = step + load_scalar(place + OF_TOKENS // 2, rows.step, second, next_ok, HOW)
        else:
            step = load_pair(place, rows.step, first, second, ok, next_ok, lane, HOW, form)
        place = place + OF_TOKENS
    z = ()
    other = ()
    if form.OTHER:
        other = load_pair(place, rows.other, first, second, ok, next_ok, lane, HOW, form)
        place = place + OF_TOKENS
    if form.HAS_Z:
        if form.MEET and not form.BACKWARD:
            ok = ok & (c >= meeting)
            next_ok = next_ok & (c >= meeting)
        z = load_pair(place, rows.z, first, second, ok, next_ok, lane, HOW, form)
    return Chunk(k, q, x, step, z, other, w, dy)


@triton.jit
def start_chunk(place, rows, lane, meeting, n, c, form):
    """Starts the copies of chunk c, the n-th to be taken, to shared memory."""
    _load_chunk(place + n % form.STAGES * form.STAGE, rows, lane, c, meeting, START, form)
    end_group(place)


@triton.jit
def next_chunk(place, rows, lane, meeting, n, c, form):
    """Takes chunk c, the n-th, from shared memory, and starts the copies of a later one."""
    wait_group(form.WAIT, place)
    chunk = _load_chunk(place + n % form.STAGES * form.STAGE, rows, lane, c, meeting, TAKE, form)
    then = n + form.STAGES - 1
    start_chunk(place, rows, lane, meeting, then, c - (form.STAGES - 1) if form.BACKWARD else then, form)
    return chunk


@triton.jit
def store_channels(ptr, words, left, ok, form):
    if form.WORD == 8:
        for i in tl.static_range(form.CP // 4):
            store_words(ptr + 8 * i, part_of(words, i, form.CP // 4), ok)
    elif form.WORD == 4:
        for i in tl.static_range(form.CP // 2):
            store_words(ptr + 4 * i, part_of(words, i, form.CP // 2), ok)
    else:
        pairs = ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        for i in tl.static_range(form.CP):
            tl.store(pairs + i, words[i], mask=ok & (2 * i < left))


@triton.jit
def put_written(at, words, left, form):
    """Stores a chunk's w, two words for each tile."""
    for i in tl.static_range(form.CP):
        if form.WORD < 4:
            store_words(at + (i // 2 * 8 + i % 2), part_of(words, i, form.CP), 2 * i < left)
        elif i % 2 == 0:
            store_words(at + 4 * i, part_of(words, i // 2, form.CP // 2), left > 0)


@triton.jit
def put_tokens(row, at, next_at, values, left, ok, next_ok, form):
    """Stores tiles laid out as C in 16 bits: the lane's two tokens, where `ok` and `next_ok`."""
    early = ()
    late = ()
    for cp in tl.static_range(form.CP):
        early = early + (packed(values[4 * cp], values[4 * cp + 2]),)
        late = late + (packed(values[4 * cp + 1], values[4 * cp + 3]),)
    store_channels(row + at, early, left, ok, form)
    store_channels(row + next_at, late, left, next_ok, form)


@triton.jit
def keep_projection(place, ptr, lane, form):
    """Keeps in shared memory a lane's share of the projection (D, 8 RP) that makes logits: for each tile the words of
    both channels, as the left operand of a product."""
    pairs = (ptr + lane.d * (8 * form.RP)).to(tl.pointer_type(tl.int32), bitcast=True)
    PAIRED: tl.constexpr = form.RP // 2 * 2  # `load_states` has the same order
    for cp in tl.static_range(form.CP):
        for j in tl.static_range(form.RP):
            own = lane.t * PAIRED + j if j < PAIRED else 4 * PAIRED + lane.t
            one = tl.load(pairs + (8 * form.RP * cp) + own, mask=2 * cp < lane.left, other=0)
            two = tl.load(pairs + (8 * form.RP * cp + 4 * form.RP) + own, mask=2 * cp + 1 < lane.left, other=0)
            put_shared(place + 256 * form.NW * (cp * form.RP + j), one.to(tl.float32, bitcast=True),
                       two.to(tl.float32, bitcast=True))  # fmt: skip


@triton.jit
def kept_projection(place, cp: tl.constexpr, form):
    a = ()
    for j in tl.static_range(form.RP):
        one, two = get_shared(place + 256 * form.NW * (cp * form.RP + j))
        a = a + (one.to(tl.int32, bitcast=True), two.to(tl.int32, bitcast=True))
    return a


@triton.jit
def load_state(row, lane, stride_d, stride_n, probed, form):
    """Loads the states of a lane's tiles, laid out as C, from row[d, state], and adds the result of `probe`."""
    S = ()
    for i in tl.static_range(form.CP * form.NP):
        pair = 2 * (i // form.NP)
        at = row + (lane.d + pair) * stride_d + (lane.state + 2 * (i % form.NP)) * stride_n
        for h in tl.static_range(2):
            for j in tl.static_range(2):
                ok = pair + h < lane.left
                value = tl.load(at + h * stride_d + j * stride_n, mask=ok, other=0.0).to(tl.float32)
                S = S + (value + probed,)
    return S


@triton.jit
def store_state(row, lane, S, form):
    """Stores such states to a contiguous (D, N) in float32."""
    for i in tl.static_range(form.CP * form.NP):
        pair = 2 * (i // form.NP)
        at = row + (lane.d + pair) * form.N + (lane.state + 2 * (i % form.NP))
        for h in tl.static_range(2):
            for j in tl.static_range(2):
                tl.store(at + (h * form.N + j), S[4 * i + 2 * h + j], mask=pair + h < lane.left)


@triton.jit
def load_weights(ptr, lane, stride_d, HAS: tl.constexpr, probed, form):
    """Loads a number for each channel of the lane, or zeros if there are none, and adds the result of `probe`."""
    values = ()
    for i in tl.static_range(2 * form.CP):
        if HAS:
            value = tl.load(ptr + (lane.d + i) * stride_d, mask=i < lane.left, other=0.0).to(tl.float32)
            values = values + (value + probed,)
        else:
            values = values + (probed,)
    return values
