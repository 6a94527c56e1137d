"""Tensor cores in plain Triton: PTX on tensors of one number a lane, and the fragments of matrices that lanes hold.

The kernels of the chunks are written as for a single lane: every tensor has one element for each lane of the program,
and element r belongs to lane r % 32 of warp r // 32. `probe` checks at run time that Triton lays it out so.

Lane 4 g + t of a warp, g = 0..7 and t = 0..3, holds of the matrices of a product C += A B

                     columns 2t, 2t+1          a word is two 16-bit numbers, the left one in its low half
    C   row g          c0      c1
        row g + 8      c2      c3
                     columns 2t, 2t+1   columns 2t+8, 2t+9
    A   row g          a0 (word)          a2 (word)          16 columns; with 8 there are a0 and a1 alone
        row g + 8      a1 (word)          a3 (word)
                     column g
    B   rows 2t, 2t+1      b0 (word)                         16 rows; with 8 there is b0 alone
        rows 2t+8, 2t+9    b1 (word)

so that the two columns of a C, rounded and put into one word, are an A of the next product. With 32-bit operands (TF32:
the products take the upper 19 bits) A's columns t and t + 4 take the place of 2t and 2t + 1. If both operands number
what they sum over in the same order, C is such an A too.
"""

import triton
import triton.language as tl


def _product(kind: str, columns: int, words: int, b_words: int) -> tuple[tl.constexpr, tl.constexpr]:
    """Write the PTX of C += A B, where A has 16 rows and B 8 columns, and its constraints."""
    a = ", ".join(f"${4 + i}" for i in range(words))
    b = ", ".join(f"${4 + words + i}" for i in range(b_words))
    c = ", ".join(f"${4 + words + b_words + i}" for i in range(4))
    text = f"mma.sync.aligned.m16n8k{columns}.row.col.f32.{kind}.{kind}.f32 "
    text += f"{{$0, $1, $2, $3}}, {{{a}}}, {{{b}}}, {{{c}}};"
    return tl.constexpr(text), tl.constexpr("=f,=f,=f,=f" + ",r" * (words + b_words) + ",f,f,f,f")


_MMA_8, _MMA_8_CONSTRAINTS = _product("bf16", 8, 2, 1)
_MMA_16, _MMA_16_CONSTRAINTS = _product("bf16", 16, 4, 2)
_MMA_TF32, _MMA_TF32_CONSTRAINTS = _product("tf32", 8, 4, 2)


@triton.jit
def product_8(c, a0, a1, b0):
    """Returns c + A B of 16-bit numbers, summed over 8."""
    return tl.inline_asm_elementwise(
        _MMA_8, _MMA_8_CONSTRAINTS, [a0, a1, b0, c[0], c[1], c[2], c[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1)  # fmt: skip


@triton.jit
def product_16(c, a0, a1, a2, a3, b0, b1):
    """Returns c + A B of 16-bit numbers, summed over 16."""
    return tl.inline_asm_elementwise(
        _MMA_16, _MMA_16_CONSTRAINTS, [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1)  # fmt: skip


@triton.jit
def hidden(i):
    """Returns `i`, the index of a loop, in a way that the compiler cannot follow: it would count in 64 bits."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def bits(v):
    return v.to(tl.int32, bitcast=True)


@triton.jit
def product_tf32(c, a, b0, b1):
    """Returns c + A B of float32 cut to TF32, summed over 8; A is laid out as C."""
    return tl.inline_asm_elementwise(
        _MMA_TF32, _MMA_TF32_CONSTRAINTS,
        [bits(a[0]), bits(a[2]), bits(a[1]), bits(a[3]), bits(b0), bits(b1), c[0], c[1], c[2], c[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1)  # fmt: skip


@triton.jit
def transposed(word):
    """Transposes an 8 x 8 matrix of 16-bit numbers that is laid out as C's rows g: it is then laid out as a B."""
    return tl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def from_lane(v, lane):
    """Returns the float32 that lane number `lane` of the warp holds."""
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=f,f,r", [v, lane], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def sum_lanes(v, lane, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Sums over lanes whose numbers differ in COUNT bits from FIRST on: 1, 2 are a quad; 4, 3 the lanes of equal t."""
    for i in tl.static_range(COUNT):
        v = v + tl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;", "=f,f,r", [v, lane * 0 + (FIRST << i)], dtype=tl.float32,
            is_pure=True, pack=1)  # fmt: skip
    return v


@triton.jit
def packed(low, high):
    """Rounds two float32 to bfloat16 and puts them into one word."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def low(word):
    """Returns the left number of a word of two bfloat16, as float32."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(word):
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def exp2(v):
    # Triton's own function spends three instructions on subnormal results.
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def probe(index):
    """Returns zero, or NaN where element `index` of a tensor does not belong to lane index % 32: a wrong layout must
    not give a wrong number."""
    return tl.inline_asm_elementwise(
        "{ .reg .u32 lane, own; .reg .pred p; mov.u32 lane, %laneid; and.b32 own, $1, 31; setp.ne.u32 p, own, lane; "
        "selp.f32 $0, 0f7FFFFFFF, 0f00000000, p; }",
        "=f,r", [index], dtype=tl.float32, is_pure=True, pack=1)  # fmt: skip


def room(size: int) -> str:
    """Write PTX that reserves `size` bytes of shared memory for a program and gives their address."""
    return f"{{ .shared .align 16 .b8 room[{size}]; mov.u32 $0, room; }}"


@triton.jit
def shared_room(ROOM: tl.constexpr, index):
    return tl.inline_asm_elementwise(ROOM, "=r,r", [index], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def put_shared(address, a, b):
    tl.inline_asm_elementwise(
        "st.shared.v2.f32 [$1], {$2, $3}; mov.u32 $0, $1;", "=r,r,f,f", [address, a, b], dtype=tl.int32, is_pure=False,
        pack=1)  # fmt: skip


@triton.jit
def get_shared(address):
    return tl.inline_asm_elementwise(
        "ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r", [address], dtype=(tl.float32, tl.float32), is_pure=False, pack=1
    )


# How a kernel reads: directly; by starting a copy into shared memory; by taking what such a copy brought.
DIRECT, START, TAKE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


_COPY_ONE = tl.constexpr("cp.async.ca.shared.global [$1], [$2], 4, $3; mov.u32 $0, $1;")
_COPY_TWO = tl.constexpr("cp.async.ca.shared.global [$1], [$2], 8, $3; mov.u32 $0, $1;")
_COPY_FOUR = tl.constexpr("cp.async.cg.shared.global [$1], [$2], 16, $3; mov.u32 $0, $1;")


@triton.jit
def read(place, ptr, ok, COUNT: tl.constexpr, HOW: tl.constexpr):
    """Reads one, two or four words at `ptr`, which points to words or pairs of them; zeros where not `ok`. `place` is
    the lane's own bytes of shared memory. Four words are not read directly."""
    words = ()
    if HOW == START:
        size = tl.where(ok, 4 * COUNT, 0)
        COPY: tl.constexpr = _COPY_FOUR if COUNT == 4 else _COPY_TWO if COUNT == 2 else _COPY_ONE
        tl.inline_asm_elementwise(
            COPY, "=r,r,l,r", [place, ptr.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1
        )
    elif HOW == TAKE:
        if COUNT == 4:
            words = tl.inline_asm_elementwise(
                "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [place],
                (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1)  # fmt: skip
        elif COUNT == 2:
            words = tl.inline_asm_elementwise(
                "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", [place], (tl.int32, tl.int32), is_pure=False, pack=1
            )
        else:
            words = (tl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=r,r", [place], tl.int32, False, 1),)
    else:
        v = tl.load(ptr, mask=ok, other=0)
        if COUNT == 2:
            words = (v.to(tl.int32), (v >> 32).to(tl.int32))
        else:
            words = (v,)
    return words


_STORE_TWO = tl.constexpr("{ .reg .pred p; setp.ne.u32 p, $2, 0; @p st.global.v2.b32 [$1], {$3, $4}; mov.u32 $0, $2; }")
_STORE_FOUR = tl.constexpr(
    "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p st.global.v4.b32 [$1], {$3, $4, $5, $6}; mov.u32 $0, $2; }"
)


@triton.jit
def store_words(ptr, words, ok):
    """Stores two or four words at once at `ptr`, where `ok`."""
    # Triton would join words by moves to other registers.
    if len(words) == 4:
        tl.inline_asm_elementwise(
            _STORE_FOUR, "=r,l,r,r,r,r,r", [ptr.to(tl.int64), ok.to(tl.int32), words[0], words[1], words[2], words[3]],
            dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            _STORE_TWO, "=r,l,r,r,r", [ptr.to(tl.int64), ok.to(tl.int32), words[0], words[1]], dtype=tl.int32,
            is_pure=False, pack=1)  # fmt: skip


@triton.jit
def end_group(place):
    """Makes one group of the copies that were started since the last call."""
    tl.inline_asm_elementwise(
        "cp.async.commit_group; mov.u32 $0, $1;", "=r,r", [place], dtype=tl.int32, is_pure=False, pack=1
    )


def wait(groups: int) -> str:
    """Write PTX that waits until no more than the last `groups` groups of copies are under way."""
    return f"cp.async.wait_group {groups}; mov.u32 $0, $1;"


@triton.jit
def wait_group(WAIT: tl.constexpr, place):
    tl.inline_asm_elementwise(WAIT, "=r,r", [place], dtype=tl.int32, is_pure=False, pack=1)
