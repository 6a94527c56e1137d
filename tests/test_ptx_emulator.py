"""The emulator of inline PTX, through kernels in Triton's interpreter."""

import os

import numpy as np
import pytest
import torch

from vision_longhorn import kernels

pytestmark = pytest.mark.skipif(
    not kernels.HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is needed"
)
if kernels.HAS_TRITON:
    import ptx_emulator
    import triton
    import triton.language as tl

    @triton.jit
    def run_mma(out, a, b, c, TEXT: tl.constexpr, A: tl.constexpr, B: tl.constexpr, SIZE: tl.constexpr):
        r = tl.arange(0, SIZE)
        c0, c1, c2, c3 = [tl.load(c + i * SIZE + r) for i in range(4)]
        args = [tl.load(a + i * SIZE + r) for i in range(A)] + [tl.load(b + i * SIZE + r) for i in range(B)]
        d0, d1, d2, d3 = tl.inline_asm_elementwise(
            TEXT,
            "=f,=f,=f,=f," + "r," * (A + B) + "0,1,2,3",
            args + [c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
        tl.store(out + r, d0)
        tl.store(out + SIZE + r, d1)
        tl.store(out + 2 * SIZE + r, d2)
        tl.store(out + 3 * SIZE + r, d3)

    @triton.jit
    def run_two(out, a, b, TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr, SIZE: tl.constexpr):
        r = tl.arange(0, SIZE)
        d = tl.inline_asm_elementwise(
            TEXT, CONSTRAINTS, [tl.load(a + r), tl.load(b + r)], dtype=tl.int32, is_pure=True, pack=1
        )
        tl.store(out + r, d)

    @triton.jit
    def run_scalar(out, a, s, TEXT: tl.constexpr, SIZE: tl.constexpr):
        r = tl.arange(0, SIZE)
        d = tl.inline_asm_elementwise(TEXT, "=f,f,f", [tl.load(a + r), s], dtype=tl.float32, is_pure=True, pack=1)
        one = tl.inline_asm_elementwise("mov.f32 $0, 0f3F800000;", "=f", [], dtype=tl.float32, is_pure=True, pack=1)
        tl.store(out + r, d * one)


SIZE = 64
WARP, LANE = np.divmod(np.arange(SIZE), 32)
G, T = LANE // 4, LANE % 4


@pytest.fixture(autouse=True)
def installed():
    ptx_emulator.install()
    ptx_emulator.install()


def two(text, a, b, constraints="=r,r,r"):
    """int32s of the text's $0 for $1 = a and $2 = b, all of shape (64,)."""
    out = torch.zeros(SIZE, dtype=torch.int32)
    run_two[(1,)](out, torch.as_tensor(a), torch.as_tensor(b), text, constraints, SIZE)
    return out.numpy()


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(low, high):
    """(64,) int32s of two (64,) tensors of 16 bits."""
    return torch.stack([low, high], -1).view(torch.int32).reshape(-1)


@pytest.mark.parametrize("kind, k", [("tf32", 8), ("bf16", 8), ("bf16", 16), ("f16", 8), ("f16", 16)])
def test_mma_is_the_product_of_matrices(kind, k):
    a, b, c = numbers(2, 16, k), numbers(2, k, 8, seed=1), numbers(2, 16, 8, seed=2)
    if kind == "tf32":
        a_words = [a[WARP, G + rows, T + cols].view(torch.int32) for cols in (0, 4) for rows in (0, 8)]
        b_words = [b[WARP, T + rows, G].view(torch.int32) for rows in (0, 4)]
        a, b = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b))
    else:
        a, b = (x.to({"bf16": torch.bfloat16, "f16": torch.float16}[kind]) for x in (a, b))
        halves = range(0, k, 8)
        a_words = [
            packed(a[WARP, G + rows, 2 * T + cols], a[WARP, G + rows, 2 * T + cols + 1])
            for cols in halves
            for rows in (0, 8)
        ]
        b_words = [packed(b[WARP, 2 * T + rows, G], b[WARP, 2 * T + rows + 1, G]) for rows in halves]
    c_words = [c[WARP, G + rows, 2 * T + cols] for rows in (0, 8) for cols in (0, 1)]
    names = iter(range(4, 16))
    operands = [", ".join(f"${next(names)}" for _ in words) for words in (a_words, b_words)]
    d = "{$0, $1, $2, $3}"
    text = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {d}, {{{operands[0]}}}, {{{operands[1]}}}, {d};"
    out = torch.zeros(4, SIZE)
    run_mma[(1,)](
        out, torch.stack(a_words), torch.stack(b_words), torch.stack(c_words), text, len(a_words), len(b_words), SIZE
    )
    want = a.double() @ b.double() + c.double()
    for i, got in enumerate(out):
        torch.testing.assert_close(got.double(), want[WARP, G + i // 2 * 8, 2 * T + i % 2], rtol=1e-6, atol=1e-6)


def test_movmatrix_transposes():
    matrix = torch.arange(128, dtype=torch.int16).reshape(2, 8, 8)
    words = packed(matrix[WARP, G, 2 * T], matrix[WARP, G, 2 * T + 1])
    want = packed(matrix.mT[WARP, G, 2 * T], matrix.mT[WARP, G, 2 * T + 1])
    got = two("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", words, words)
    np.testing.assert_array_equal(got, want)


def test_shuffles_stay_in_their_warp():
    value, lane = np.arange(SIZE, dtype=np.int32) * 3, (np.arange(SIZE, dtype=np.int32) * 7 + 5) % 64
    each = two("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", value, lane)
    np.testing.assert_array_equal(each, 3 * (32 * WARP + lane % 32))
    one = two("shfl.sync.idx.b32 $0, $1, 9, 31, 0xffffffff;", value, lane)
    np.testing.assert_array_equal(one, 3 * (32 * WARP + 9))
    swapped = two("shfl.sync.bfly.b32 $0, $1, 5, 31, 0xffffffff;", value, lane)
    np.testing.assert_array_equal(swapped, 3 * (32 * WARP + (LANE ^ 5)))


@pytest.mark.parametrize("name, dtype", [("bf16x2", torch.bfloat16), ("f16x2", torch.float16)])
def test_rounding_to_16_bits_is_torchs(name, dtype):
    low, high = numbers(SIZE), numbers(SIZE, seed=1)
    low[:6] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 1e30, -torch.inf])  # ties, the range
    got = two(f"cvt.rn.{name}.f32 $0, $1, $2;", high, low, "=r,f,f")
    np.testing.assert_array_equal(got, packed(low.to(dtype), high.to(dtype)))


def test_rounding_to_tf32_is_to_nearest_and_away_from_zero():
    x = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-11, 1 + 2**-11 - 2**-23] * 16)
    want = torch.tensor([1 + 2**-10, 1 + 2**-9, -1 - 2**-10, 1.0] * 16)
    np.testing.assert_array_equal(two("cvt.rna.tf32.f32 $0, $1;", x, x, "=r,f,f"), want.view(torch.int32))


def test_a_text_of_several_instructions_with_registers_and_predicates():
    a, b = (np.arange(SIZE, dtype=np.int32) - 20) * 1000003, np.arange(SIZE, dtype=np.int32)[::-1].copy()
    text = """{
        .reg .b32 t<3>; .reg .pred p, q;  // a comment; of two parts
        mov.u32 t0, %laneid;
        setp.lt.s32 p, $1, $2; setp.lt.u32 q, $1, $2;
        prmt.b32 t1, $1, $2, 0x5410;
        selp.b32 t2, t0, t1, p;
        @!q xor.b32 t2, t2, -1;
        shl.b32 t1, t2, 3; shr.u32 t2, t2, 29; or.b32 t1, t1, t2;
        bar.sync 0;
        add.s32 $0, t1, 0x10; }"""
    t = np.where(a < b, LANE, (a & 0xFFFF) | (b << 16)).astype(np.uint32)
    t = np.where(a.view(np.uint32) < b.view(np.uint32), t, ~t)
    np.testing.assert_array_equal(two(text, a, b).view(np.uint32), (t << 3 | t >> 29) + np.uint32(16))


def test_a_scalar_is_broadcast_and_fma_rounds_once():
    # The exact sum is 2**-60 above the middle between two float32s: rounded to float64 first, it would go to the lower.
    a, out = torch.full((SIZE,), 1 + 2**-12), torch.zeros(SIZE)
    run_scalar[(1,)](out, a, 1 + 2**-12, "fma.rn.f32 $0, $1, $2, 0f21800000;", SIZE)
    np.testing.assert_array_equal(out, np.full(SIZE, np.float32(1 + 2**-11 + 2**-23)))


def test_shared_memory_is_seen_by_every_warp():
    a, b = (np.arange(SIZE, dtype=np.int32) + first for first in (1000, 5000))
    text = """{ .shared .align 16 .b8 room[512]; .reg .b32 own, other, x, y;
        mov.u32 own, room; mov.u32 other, %tid.x; shl.b32 other, other, 3; add.u32 own, own, other;
        st.shared.v2.f32 [own], {$1, $2};
        bar.sync 0;
        xor.b32 other, own, 0x1F8;
        ld.shared.v2.f32 {x, y}, [other];
        shl.b32 y, y, 16; or.b32 $0, x, y; }"""
    np.testing.assert_array_equal(two(text, a, b), (a | b << 16)[::-1])


def test_ftz_makes_subnormals_zero():
    a, out = torch.full((SIZE,), 2**-126), torch.ones(SIZE)
    run_scalar[(1,)](out, a, 0.5, "mul.rn.ftz.f32 $0, $1, $2;", SIZE)
    np.testing.assert_array_equal(out, 0)
    run_scalar[(1,)](out, a, 0.5, "mul.rn.f32 $0, $1, $2;", SIZE)
    np.testing.assert_array_equal(out, np.full(SIZE, np.float32(2**-127)))


@pytest.mark.parametrize(
    "text, constraints, says",
    [
        ("dp4a.u32.u32 $0, $1, $2, 0;", "=r,r,r", "NotImplementedError.*dp4a"),
        ("mov.b32 $0, $1; add.u32 $0, $0, $2;", "=r,r,r", "no & is written"),
        (".reg .b32 t; mov.b32 t, $1; mov.b32 $0, t;", "=r,r,r", "outside of"),
        ("add.u32 $0, $1, $2;", "=r,f,r", "is a .f32 for a .u32"),
        ("{ .shared .align 16 .b8 room[65536]; mov.u32 $0, room; }", "=r,r,r", "65536 bytes of shared memory"),
    ],
)
def test_what_it_does_not_know_and_what_a_gpu_would_not_run_is_named(text, constraints, says):
    a = np.zeros(SIZE, np.int32)
    with pytest.raises(Exception, match=says):
        two(text, a, a, constraints)
    np.testing.assert_array_equal(two("mov.b32 $0, $1; add.u32 $0, $0, $2;", a + 1, a + 2, "=&r,r,r"), 3)
