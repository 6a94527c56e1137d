"""The GPU that kernels run on, and what they share: where a program works, sums over states and over channels. Names
and shapes are those of `walk`.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Optional

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from ...replaying import launch

# Decorating kernels depends on it, so the variable must be set before the first import.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


class Kernel:
    """One of Triton's kernels, whose launches are noted where an operator is recorded."""

    def __init__(self, jitted: Any, form: Any):
        self.jitted, self.form, self.arg_names = jitted, form, jitted.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(launch, self.jitted, grid)


def kernel(
    unaligned: Sequence[str] = (), specialized: Sequence[str] = (), form: Any = None
) -> Callable[[Callable[..., None]], Kernel]:
    """Decorate by `triton.jit`, but compile nothing anew for other numbers, unless they are in `specialized`, or for
    other addresses of pointers in `unaligned`. `form` is the namedtuple of the argument `form`."""

    # A pointer and its strides would read better as one tuple, too, but Triton specialises the members of a tuple
    # whatever `do_not_specialize` says, so that another stride would be another kernel.
    def decorate(function: Callable[..., None]) -> Kernel:
        parameters = inspect.signature(function).parameters
        numbers = [
            name
            for name, parameter in parameters.items()
            if parameter.annotation is parameter.empty and name != "form" and not name.endswith("_ptr")
        ]
        jitted: Any = triton.jit(
            do_not_specialize=[name for name in numbers if name not in specialized],
            do_not_specialize_on_alignment=[name for name in unaligned if name in parameters],
        )(function)
        return Kernel(jitted, form)

    return decorate


def form_of(form: Any, args: dict[str, Any]) -> Any:
    """Collect a kernel's constants from the arguments of a launch. A missing one is False."""
    values = {name: args.get(name, False) for name in form._fields}
    if INTERPRETED:
        return SimpleNamespace(**values)  # the interpreter would make tensors of the numbers in a tuple
    return form(**{name: tl.constexpr(value) for name, value in values.items()})


@cache
def target_of(device: torch.device) -> Optional[GPUTarget]:
    """Return the backend, architecture and warp size that Triton compiles for; None where it interprets, and for a GPU
    that is not there. Such a one is taken for a Hopper, and can only be asked for the shapes of results."""
    if INTERPRETED or device.type != "cuda" or not torch.cuda.is_available():
        return None
    with torch.cuda.device(device):
        return triton.runtime.driver.active.get_current_target()


def takes_ptx(device: torch.device, capability: int = 0) -> bool:
    """Tell whether kernels on `device` may hold PTX that needs at least this compute capability, 80 for 8.0."""
    target = target_of(device)
    return target is not None and target.backend == "cuda" and target.arch >= capability


def on_hopper(device: torch.device) -> bool:
    """Tell whether kernels on `device` run on a Hopper, or are interpreted."""
    target = target_of(device)
    return target is None or target.backend == "cuda" and 90 <= target.arch < 100


def warp_lanes(device: torch.device) -> int:
    """Return the lanes of a warp: 64 on AMD's data-centre GPUs, 32 on all others."""
    target = target_of(device)
    return 32 if target is None else target.warp_size


LOG2E = tl.constexpr(1.4426950408889634)
# Keeps e = exp(-logit) below 2^125, so that eps e, as in (28) of docs/scan.md, is not 0 times infinity. Beyond, float32
# could not show eps.
MAX_EXPONENT = tl.constexpr(125.0)
TENSOR_CORES = 80  # the compute capability from which on GPUs multiply bfloat16 and TF32 matrices
_INTERPRETED = tl.constexpr(INTERPRETED)  # for kernels, which read constexprs only


@triton.jit
def operand(value):
    """Makes `value` an operand of `tl.dot`. The interpreter, which takes bfloat16's bits for integers, gets float32."""
    if _INTERPRETED:
        value = value.to(tl.float32)
    return value


@triton.jit
def copies(value, COUNT: tl.constexpr):
    values = ()
    for _ in tl.static_range(COUNT):
        values = values + (value,)
    return values


@triton.jit
def all_from(values, first: tl.constexpr):
    """Drops what comes before number `first`."""
    rest = ()
    for n in tl.static_range(first, len(values)):
        rest = rest + (values[n],)
    return rest


@triton.jit
def load_floats(ptr, COUNT: tl.constexpr, stride):
    """Loads COUNT numbers of each channel, `stride` apart, as float32."""
    values = ()
    for i in tl.static_range(COUNT):
        values = values + (tl.load(ptr + i * stride).to(tl.float32),)
    return values


@triton.jit
def reciprocal(v, PTX: tl.constexpr):
    # Triton's division guards the ends of the exponent range, at six instructions; 1 <= v <= 2^126 needs no guard.
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / v


@triton.jit
def offset_of(index, stride, ALIGNED: tl.constexpr):
    """Returns index * stride; ALIGNED promises that the stride is a multiple of 16, so that loads may be wide."""
    offset = index.to(tl.int64) * stride
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return offset


@triton.jit
def row_at(row, L, stride_b, stride_l, ALIGNED: tl.constexpr):
    """Returns where rows of (B, L, ..) start; `row` counts them over all sequences."""
    return offset_of(row // L, stride_b, ALIGNED) + offset_of(row % L, stride_l, ALIGNED)


@triton.jit
def tile_at(tile, d, rows, D: tl.constexpr, ROWS: tl.constexpr):
    """Returns (where a tile of ROWS rows of D numbers begins, the places in it of columns d, which of them exist)."""
    row = tl.arange(0, ROWS)[:, None]
    return tile.to(tl.int64) * (ROWS * D), row * D + d[None, :], (row < rows - tile * ROWS) & (d < D)[None, :]


@triton.jit
def load_channels(ptr, d, D: tl.constexpr):
    return tl.load(ptr + d, mask=d < D, other=0).to(tl.float32)[None, :]


@triton.jit
def work_of(blocks, segments):
    """Returns (block of channels, segment of time, sequence, direction) of this program. The grid's first axis holds
    all but the direction, since only that axis may be longer than 65,535."""
    i = tl.program_id(0)
    return i % blocks, i // blocks % segments, (i // blocks // segments).to(tl.int64), tl.program_id(1).to(tl.int64)


@triton.jit
def channels_of(block, D: tl.constexpr, NI: tl.constexpr, NS: tl.constexpr, BC: tl.constexpr, WHOLE: tl.constexpr):
    """Returns (channels (1, BC), which of them exist, each lane's first state (NS, BC)). WHOLE: all exist."""
    lane = block * BC + tl.arange(0, BC)[None, :]
    first = tl.arange(0, NS)[:, None] * NI + tl.zeros([NS, BC], tl.int32)
    return lane if WHOLE else tl.minimum(lane, D - 1), lane < D, first


@triton.jit
def all_lanes(value, NS: tl.constexpr, BC: tl.constexpr):
    # Conditions on tokens are tensors: the interpreter has no masks made of scalars.
    return tl.zeros([NS, BC], tl.int32) + value


@triton.jit
def part_of(values, j: tl.constexpr, parts: tl.constexpr):
    part = ()
    for i in tl.static_range(len(values) // parts):
        part = part + (values[j * (len(values) // parts) + i],)
    return part


@triton.jit
def _term(a, b, i: tl.constexpr):
    if len(b) > 0:
        return a[i] * b[i]
    else:
        return a[i]


@triton.jit
def dot(a, b):
    """Sums a * b, or a if b is empty, over the states in up to four chains, (1, BC)."""
    c0 = _term(a, b, 0)
    if len(a) < 4:
        for i in tl.static_range(1, len(a)):
            c0 += _term(a, b, i)
    else:
        c1 = _term(a, b, 1)
        c2 = _term(a, b, 2)
        c3 = _term(a, b, 3)
        for i in tl.static_range(4, len(a)):
            if i % 4 == 0:
                c0 += _term(a, b, i)
            elif i % 4 == 1:
                c1 += _term(a, b, i)
            elif i % 4 == 2:
                c2 += _term(a, b, i)
            else:
                c3 += _term(a, b, i)
        c0 = (c0 + c1) + (c2 + c3)
    if c0.shape[0] > 1:
        c0 = tl.sum(c0, 0, keep_dims=True)
    return c0


@triton.jit
def fill(value, NI: tl.constexpr, NS: tl.constexpr, BC: tl.constexpr):
    state = ()
    for _ in tl.static_range(NI):
        state = state + (tl.full([NS, BC], value, tl.float32),)
    return state


@triton.jit
def scale_row(row, factor):
    scaled = ()
    for i in tl.static_range(len(row)):
        scaled = scaled + (row[i] * factor,)
    return scaled


@triton.jit
def gate(dy, z, PTX: tl.constexpr):
    """Returns dy silu(z), and dy silu'(z): (8)."""
    sigmoid = reciprocal(1.0 + tl.exp2(z * -LOG2E), PTX)
    silu = z * sigmoid
    return dy * silu, dy * (sigmoid + silu * (1.0 - sigmoid))


@triton.jit
def channels_of_a_lane(v, NS: tl.constexpr, W: tl.constexpr, BC: tl.constexpr):
    """Sums over the channels that a lane holds: (NS, BC) to (NS, W)."""
    if BC == W:
        return v
    else:
        return tl.sum(tl.reshape(v, [NS, W, BC // W]), 2)


@triton.jit
def fold_lanes(values, V: tl.constexpr, NS: tl.constexpr, W: tl.constexpr):
    """Sums V tensors (NS, W) over W lanes at once, V a power of two.

    A lane keeps one half of the values and gives its partner the other, so V sums take V - 1 exchanges instead of
    V log W. Lane l ends with the sums of values l V/W, l V/W + 1, ...; with V < W, W/V lanes hold the same.
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
    """Write the PTX of `fold_lanes` for one warp with 16 or 32 values, and its constraints. Tensor cores make the first
    steps: a product with a matrix of ones sums over the four lanes of each quad.

    With the ones in column n alone, the sum of value n comes out in column n. So four products take 16 values, and a
    lane holds 2 columns of 2 rows of the result. What is left are sums over the eight quads, a quarter of the
    exchanges. Operands are rounded to TF32 (11 bits), which is enough for 16-bit inputs only.

    Triton does not promise that lane l holds element l of each tensor. So the first operand is the number of the
    element, and where that is not the lane's the result is NaN, not a wrong number.
    """
    tiles = values // 16
    code = [
        "{ .reg .pred p; .reg .u32 lane, quad, bit; .reg .f32 a, b, c;",
        f".reg .b32 one<8>; .reg .f32 s<{4 * tiles}>;",
        "mov.u32 lane, %laneid; shr.u32 quad, lane, 2;",
    ]
    code += [f"setp.eq.u32 p, quad, {n}; selp.b32 one{n}, 0x3f800000, 0, p;" for n in range(8)]
    code += [f"mov.f32 s{i}, 0f00000000;" for i in range(4 * tiles)]
    for tile in range(tiles):
        sums = ", ".join(f"s{4 * tile + i}" for i in range(4))
        for m in range(0, 8, 2):
            first = 2 + 16 * tile + m
            code.append(
                f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{{sums}}}, "
                f"{{${first}, ${first + 8}, ${first + 1}, ${first + 9}}}, {{one{m}, one{m + 1}}}, {{{sums}}};"
            )
    left = 4 * tiles
    for bit in (16, 8, 4):
        if left > 1:
            left //= 2
            code.append(f"and.b32 bit, lane, {bit}; setp.ne.u32 p, bit, 0;")
            code += [
                f"selp.f32 a, s{i}, s{i + left}, p; selp.f32 b, s{i + left}, s{i}, p; "
                f"shfl.sync.bfly.b32 c, a, {bit}, 31, 0xffffffff; add.f32 s{i}, b, c;"
                for i in range(left)
            ]
        else:
            code.append(f"shfl.sync.bfly.b32 c, s0, {bit}, 31, 0xffffffff; add.f32 s0, s0, c;")
    code.append("setp.ne.u32 p, $1, lane; selp.f32 $0, 0f7FFFFFFF, s0, p; }")
    return " ".join(code), "=f" + ",r" * (1 + values)


_FOLD_16, _FOLD_16_CONSTRAINTS = (tl.constexpr(text) for text in _matrix_fold(16))
_FOLD_32, _FOLD_32_CONSTRAINTS = (tl.constexpr(text) for text in _matrix_fold(32))


@triton.jit
def store_sums(ptr, values, token, end, GROUPS: tl.constexpr, FACTOR: tl.constexpr, form):
    """Sums `values`, GROUPS (1 or 2) times NI tensors (NS, W), over the lanes. If token < end, stores state n of a
    group at ptr[group N + n], the first group times FACTOR."""
    V: tl.constexpr = form.V if GROUPS == 2 else form.V // 2
    for _ in tl.static_range(V - GROUPS * form.NI):
        values = values + (tl.zeros([form.NS, form.W], tl.float32),)
    lane = tl.arange(0, form.W)[None, :] + tl.zeros([form.NS, form.W], tl.int32)
    index = lane * V // form.W
    valid = lane % (form.W // V if V < form.W else 1) == 0
    if form.MATRIX and V >= 16:
        words = (lane,)
        for i in tl.static_range(V):
            words = words + (values[i].to(tl.int32, bitcast=True),)
        if V == 32:
            fold = tl.inline_asm_elementwise(_FOLD_32, _FOLD_32_CONSTRAINTS, words, tl.float32, is_pure=True, pack=1)
            index = (lane & 24) + 2 * (lane & 3) + (lane // 4 & 1)
        else:
            fold = tl.inline_asm_elementwise(_FOLD_16, _FOLD_16_CONSTRAINTS, words, tl.float32, is_pure=True, pack=1)
            index = (lane // 2 & 8) + 2 * (lane & 3) + (lane // 8 & 1)
            valid = (lane & 4) == 0
        sums = (fold,)
    else:
        sums = fold_lanes(values, V, form.NS, form.W)
    part = tl.arange(0, form.NS)[:, None] + tl.zeros([form.NS, form.W], tl.int32)
    for j in tl.static_range(V // form.W if V > form.W else 1):
        group = (index + j) // form.NI
        n = part * form.NI + (index + j) % form.NI
        ok = valid & (group < GROUPS) & (n < form.N) & (all_lanes(token, form.NS, form.W) < end)
        total = sums[j]
        if FACTOR != 1.0:
            total = tl.where(group == 0, FACTOR * total, total)
        tl.store(ptr + group * form.N + n, total, mask=ok)
