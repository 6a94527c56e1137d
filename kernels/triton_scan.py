"""The scans as Triton kernels: one forward and one backward kernel for the whole family.

A program owns BLOCK_D channels of one sequence and one direction; it keeps their states, a tile of (N, BLOCK_D), in
registers and walks through time, forward or backward by the sign of a stride. Channels are last in every tensor and
nothing is transposed, flipped or copied. Offsets are 64 bit, sums float32.

The forward kernel stores the state before every CHUNK-th token; the backward kernel takes chunks from the last to the
first, rebuilds the states of one chunk into a scratch buffer that it uses again and again, and walks back over them.
Sums over channels (the gradients of k, q and a per-token A) leave each program as partial sums that are added
afterwards in a fixed order, as are the sums over the batch: no atomics, so the same input gives the same bits.

The gradients are derived in docs/scan.md; `torch_scan` is the same computation in torch.
"""

import os
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from .contract import CHUNK, Scan, stack, unstack

# Read when the kernels are decorated, so the variable must be set before the first import.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

_RULE = {"diagonal": 0, "exact": 1, "mamba": 2}
DIAGONAL = tl.constexpr(0)
EXACT = tl.constexpr(1)
MAMBA = tl.constexpr(2)
MAX_EXPONENT = tl.constexpr(87.0)  # exp(87) is finite in float32; see torch_scan.MAX_EXPONENT

# In the backward kernel tiles of states have one channel a lane and all their states in that lane's registers. Loads
# and stores whose alignment the compiler knows would choose another layout, several channels a lane, and every step
# would then move tiles between the two through shared memory; so the alignment is kept from it.
_BACKWARD_POINTERS = [
    "x_ptr", "step_ptr", "k_ptr", "q_ptr", "A_ptr", "z_ptr", "D_ptr", "bias_ptr", "saved_ptr", "dy_ptr", "dfinal_ptr",
    "scratch_ptr", "dx_ptr", "dstep_ptr", "dk_ptr", "dq_ptr", "dA_ptr", "dz_ptr", "dD_ptr", "dbias_ptr", "dinitial_ptr",
]


@triton.jit
def _softplus(v):
    # log(1 + u) loses the digits of a small u; log(w) / (w - 1) with the rounded w = 1 + u restores them.
    u = tl.exp(-tl.abs(v))
    w = 1.0 + u
    return tl.maximum(v, 0.0) + tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))


@triton.jit
def _step_size(u, k, RULE: tl.constexpr, SOFTPLUS: tl.constexpr):
    """eps (Mamba's dt) and for Longhorn exp(-logit), both of shape (BLOCK_D,)."""
    if RULE == MAMBA:
        if SOFTPLUS:
            eps = _softplus(u)
        else:
            eps = u
        return eps, eps
    e = tl.exp(tl.minimum(-u, MAX_EXPONENT))
    return 1.0 / (1.0 + e + tl.sum(k * k, 0)), e


@triton.jit
def _decay(eps, e, k, A, RULE: tl.constexpr, A_PER_TOKEN: tl.constexpr):
    """a of shape (N, BLOCK_D), for the rules that have one."""
    if RULE == MAMBA:
        if A_PER_TOKEN:
            return tl.exp(A[:, None] * eps[None, :])
        else:
            return tl.exp(A * eps[None, :])
    a = 1.0 - eps[None, :] * (k * k)[:, None]
    if k.shape[0] == 1:
        # A lone large key leaves 1 - eps k^2 no digits.
        a = tl.where(a < 0.5, (eps * (1.0 + e))[None, :], a)
    return a


@triton.jit(do_not_specialize=["L", "B"])
def _forward_kernel(
    x_ptr, step_ptr, k_ptr, q_ptr, A_ptr, z_ptr, D_ptr, bias_ptr, initial_ptr, y_ptr, final_ptr, saved_ptr,
    L, B, D, N, blocks,
    x_g, x_b, x_l, step_g, step_b, step_l, step_d, k_g, k_b, k_l, q_g, q_b, q_l, A_g, A_b, A_l, A_d, A_n,
    z_g, z_b, z_l, D_g, bias_g, bias_d, initial_g, initial_b, initial_d, initial_n,
    RULE: tl.constexpr, SOFTPLUS: tl.constexpr, A_PER_TOKEN: tl.constexpr, HAS_Z: tl.constexpr, HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, SAVE: tl.constexpr, FIRST_REVERSED: tl.constexpr,
    T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # Batch and blocks share the grid's first axis: only that one may be longer than 65,535.
    b = (tl.program_id(0) // blocks).to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    d_ok = d < D
    n_ok = n < N
    tile_ok = n_ok[:, None] & d_ok[None, :]
    tile = n[:, None] * D + d[None, :]
    # A reversed scan starts at the last token and walks with negative strides.
    backward = g + FIRST_REVERSED > 0
    first = tl.where(backward, L - 1, 0).to(tl.int64)
    sign = tl.where(backward, -1, 1)

    x_ptrs = x_ptr + g * x_g + b * x_b + first * x_l + d
    step_ptrs = step_ptr + g * step_g + b * step_b + first * step_l + d * step_d
    k_ptrs = k_ptr + g * k_g + b * k_b + first * k_l + n
    q_ptrs = q_ptr + g * q_g + b * q_b + first * q_l + n
    y_ptrs = y_ptr + ((g * B + b) * L + first) * D + d
    z_ptrs = z_ptr + g * z_g + b * z_b + first * z_l + d
    saved_ptr += (g * ((L + T - 1) // T) * B + b) * N * D

    skip = tl.zeros([BLOCK_D], tl.float32)
    bias = tl.zeros([BLOCK_D], tl.float32)
    A = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    S = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if HAS_D:
        skip = tl.load(D_ptr + g * D_g + d, mask=d_ok, other=0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + g * bias_g + d * bias_d, mask=d_ok, other=0).to(tl.float32)
    if RULE == MAMBA:
        if A_PER_TOKEN:
            A = tl.zeros([BLOCK_N], tl.float32)
            A_ptrs = A_ptr + g * A_g + b * A_b + first * A_l + n
        else:
            A = tl.load(A_ptr + g * A_g + d[None, :] * A_d + n[:, None] * A_n, mask=tile_ok, other=0).to(tl.float32)
    if HAS_INITIAL:
        S = tl.load(initial_ptr + g * initial_g + b * initial_b + d[None, :] * initial_d + n[:, None] * initial_n,
                    mask=tile_ok, other=0).to(tl.float32)

    for i in tl.range(0, L, num_stages=1):
        if SAVE:
            if i % T == 0:
                tl.store(saved_ptr + tile, S, mask=tile_ok)
                saved_ptr += B.to(tl.int64) * N * D
        x = tl.load(x_ptrs, mask=d_ok, other=0).to(tl.float32)
        k = tl.load(k_ptrs, mask=n_ok, other=0).to(tl.float32)
        q = tl.load(q_ptrs, mask=n_ok, other=0).to(tl.float32)
        u = tl.load(step_ptrs, mask=d_ok, other=0).to(tl.float32) + bias
        if A_PER_TOKEN:
            A = tl.load(A_ptrs, mask=n_ok, other=0).to(tl.float32)
            A_ptrs += sign * A_l
        eps, e = _step_size(u, k, RULE, SOFTPLUS)
        if RULE == EXACT:
            error = x - tl.sum(S * k[:, None], 0)
            S += k[:, None] * (eps * error)[None, :]
        else:
            S = _decay(eps, e, k, A, RULE, A_PER_TOKEN) * S + k[:, None] * (eps * x)[None, :]
        y = tl.sum(S * q[:, None], 0)
        if HAS_D:
            y += skip * x
        if HAS_Z:
            z = tl.load(z_ptrs, mask=d_ok, other=0).to(tl.float32)
            y *= z * tl.sigmoid(z)
            z_ptrs += sign * z_l
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=d_ok)
        x_ptrs += sign * x_l
        step_ptrs += sign * step_l
        k_ptrs += sign * k_l
        q_ptrs += sign * q_l
        y_ptrs += sign * D
    tl.store(final_ptr + ((g * B + b) * D + d[None, :]) * N + n[:, None], S, mask=tile_ok)


@triton.jit(do_not_specialize=["L", "B"], do_not_specialize_on_alignment=_BACKWARD_POINTERS)
def _backward_kernel(
    x_ptr, step_ptr, k_ptr, q_ptr, A_ptr, z_ptr, D_ptr, bias_ptr, saved_ptr, dy_ptr, dfinal_ptr, scratch_ptr,
    dx_ptr, dstep_ptr, dk_ptr, dq_ptr, dA_ptr, dz_ptr, dD_ptr, dbias_ptr, dinitial_ptr,
    L, B, D, N, G, blocks, scale,
    x_g, x_b, x_l, step_g, step_b, step_l, step_d, k_g, k_b, k_l, q_g, q_b, q_l, A_g, A_b, A_l, A_d, A_n,
    z_g, z_b, z_l, D_g, bias_g, bias_d, dy_g, dy_b, dy_l,
    RULE: tl.constexpr, SOFTPLUS: tl.constexpr, A_PER_TOKEN: tl.constexpr, HAS_Z: tl.constexpr, HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_DFINAL: tl.constexpr, FIRST_REVERSED: tl.constexpr,
    T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    n = tl.arange(0, BLOCK_N)
    n_ok = n < N
    lane = tl.arange(0, BLOCK_D)
    scratch_tile = n[:, None] * BLOCK_D + lane[None, :]
    scratch_ptr += tl.program_id(0).to(tl.int64) * T * BLOCK_N * BLOCK_D
    # No more programs than the GPU holds at once, each for many (block of channels, sequence, direction): their
    # scratch buffers then stay in the cache.
    for work in tl.range(tl.program_id(0), blocks * B * G, tl.num_programs(0), num_stages=1):
        block = (work % blocks).to(tl.int64)
        b = (work // blocks % B).to(tl.int64)
        g = (work // blocks // B).to(tl.int64)
        d = block * BLOCK_D + lane
        d_ok = d < D
        tile_ok = n_ok[:, None] & d_ok[None, :]
        tile = n[:, None] * D + d[None, :]
        backward = g + FIRST_REVERSED > 0
        sign = tl.where(backward, -1, 1)

        x_row = x_ptr + g * x_g + b * x_b
        step_row = step_ptr + g * step_g + b * step_b
        k_row = k_ptr + g * k_g + b * k_b
        q_row = q_ptr + g * q_g + b * q_b
        z_row = z_ptr + g * z_g + b * z_b
        dy_row = dy_ptr + g * dy_g + b * dy_b
        row = (g * B + b) * L                    # of the (G, B, L, ·) outputs
        partial = ((block * G + g) * B + b) * L  # of the (blocks, G, B, L, N) partial sums

        skip = tl.zeros([BLOCK_D], tl.float32)
        bias = tl.zeros([BLOCK_D], tl.float32)
        A = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        if HAS_D:
            skip = tl.load(D_ptr + g * D_g + d, mask=d_ok, other=0).to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + g * bias_g + d * bias_d, mask=d_ok, other=0).to(tl.float32)
        if RULE == MAMBA:
            if A_PER_TOKEN:
                A = tl.zeros([BLOCK_N], tl.float32)
                A_row = A_ptr + g * A_g + b * A_b
            else:
                A = tl.load(A_ptr + g * A_g + d[None, :] * A_d + n[:, None] * A_n, mask=tile_ok, other=0).to(tl.float32)
        adjoint = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        if HAS_DFINAL:
            adjoint = tl.load(dfinal_ptr + ((g * B + b) * D + d[None, :]) * N + n[:, None], mask=tile_ok, other=0)
        dD = tl.zeros([BLOCK_D], tl.float32)
        dbias = tl.zeros([BLOCK_D], tl.float32)
        dA = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

        chunks = (L + T - 1) // T
        for j in tl.range(0, chunks, num_stages=1):
            c = chunks - 1 - j
            start = c * T
            length = tl.minimum(T, L - start)
            t = tl.where(backward, L - 1 - start, start).to(tl.int64)

            # Rebuild the states before each token of the chunk (for the exact rule the errors, which tell them).
            S = tl.load(saved_ptr + ((g * chunks + c) * B + b) * N * D + tile, mask=tile_ok, other=0)
            states = scratch_ptr
            for _ in tl.range(0, length, num_stages=1):
                if RULE != EXACT:
                    tl.store(states + scratch_tile, S)
                x = tl.load(x_row + t * x_l + d, mask=d_ok, other=0).to(tl.float32)
                k = tl.load(k_row + t * k_l + n, mask=n_ok, other=0).to(tl.float32)
                u = tl.load(step_row + t * step_l + d * step_d, mask=d_ok, other=0).to(tl.float32) + bias
                if A_PER_TOKEN:
                    A = tl.load(A_row + t * A_l + n, mask=n_ok, other=0).to(tl.float32)
                eps, e = _step_size(u, k, RULE, SOFTPLUS)
                if RULE == EXACT:
                    error = x - tl.sum(S * k[:, None], 0)
                    tl.store(states + lane, error)
                    S += k[:, None] * (eps * error)[None, :]
                else:
                    S = _decay(eps, e, k, A, RULE, A_PER_TOKEN) * S + k[:, None] * (eps * x)[None, :]
                states += BLOCK_N * BLOCK_D
                t += sign
            tl.debug_barrier()

            for _ in tl.range(0, length, num_stages=1):
                t -= sign
                states -= BLOCK_N * BLOCK_D
                x = tl.load(x_row + t * x_l + d, mask=d_ok, other=0).to(tl.float32)
                k = tl.load(k_row + t * k_l + n, mask=n_ok, other=0).to(tl.float32)
                q = tl.load(q_row + t * q_l + n, mask=n_ok, other=0).to(tl.float32)
                u = tl.load(step_row + t * step_l + d * step_d, mask=d_ok, other=0).to(tl.float32) + bias
                dy = tl.load(dy_row + t * dy_l + d, mask=d_ok, other=0).to(tl.float32) * scale
                if A_PER_TOKEN:
                    A = tl.load(A_row + t * A_l + n, mask=n_ok, other=0).to(tl.float32)
                eps, e = _step_size(u, k, RULE, SOFTPLUS)
                if RULE == EXACT:
                    # The step is undone by subtracting what it wrote; over one chunk that costs no digits.
                    error = tl.load(states + lane)
                    before = S - k[:, None] * (eps * error)[None, :]
                else:
                    before = tl.load(states + scratch_tile)

                if HAS_Z:
                    z = tl.load(z_row + t * z_l + d, mask=d_ok, other=0).to(tl.float32)
                    o = tl.sum(S * q[:, None], 0) + skip * x
                    sigmoid = tl.sigmoid(z)
                    dz = dy * o * sigmoid * (1.0 + z * (1.0 - sigmoid))
                    tl.store(dz_ptr + (row + t) * D + d, dz.to(dz_ptr.dtype.element_ty), mask=d_ok)
                    dy *= z * sigmoid
                adjoint += q[:, None] * dy[None, :]
                dq = tl.sum(S * dy[None, :], 1)
                reads = tl.sum(adjoint * k[:, None], 0)
                dx = eps * reads
                if RULE == EXACT:
                    deps = error * reads
                    dk = tl.sum(adjoint * (eps * error)[None, :] - before * dx[None, :], 1)
                    adjoint -= k[:, None] * dx[None, :]
                else:
                    a = _decay(eps, e, k, A, RULE, A_PER_TOKEN)
                    flow = adjoint * before  # d loss / d a
                    if RULE == MAMBA:
                        flow *= a
                        if A_PER_TOKEN:
                            deps = x * reads + tl.sum(flow * A[:, None], 0)
                            dA_t = tl.sum(flow * eps[None, :], 1)
                            tl.store(dA_ptr + (partial + t) * N + n, dA_t, mask=n_ok)
                        else:
                            deps = x * reads + tl.sum(flow * A, 0)
                            dA += flow * eps[None, :]
                        dk = tl.sum(adjoint * (eps * x)[None, :], 1)
                    else:
                        deps = x * reads - tl.sum(flow * (k * k)[:, None], 0)
                        if BLOCK_N == 1:
                            # flow - eps k^2 flow: two terms of dk, without their cancellation for a large key.
                            flow = flow * a + (eps * x * reads)[None, :]
                        dk = tl.sum(adjoint * (eps * x)[None, :] - (2.0 * k)[:, None] * (flow * eps[None, :]), 1)
                    adjoint *= a
                if RULE == MAMBA:
                    dstep = deps
                    if SOFTPLUS:
                        dstep = deps * tl.sigmoid(u)
                else:
                    dlog = deps * eps  # d loss / d log(eps); zero in masked channels, where x and the adjoint are
                    if BLOCK_N > 1:
                        dk -= 2.0 * k * tl.sum(dlog * eps, 0)
                    dstep = dlog * (eps * e)
                if HAS_D:
                    dD += dy * x
                    dx += skip * dy
                dbias += dstep
                tl.store(dx_ptr + (row + t) * D + d, dx.to(dx_ptr.dtype.element_ty), mask=d_ok)
                tl.store(dstep_ptr + (row + t) * D + d, dstep.to(dstep_ptr.dtype.element_ty), mask=d_ok)
                tl.store(dk_ptr + (partial + t) * N + n, dk, mask=n_ok)
                tl.store(dq_ptr + (partial + t) * N + n, dq, mask=n_ok)
                S = before
            tl.debug_barrier()

        if HAS_INITIAL:
            tl.store(dinitial_ptr + ((g * B + b) * D + d[None, :]) * N + n[:, None], adjoint, mask=tile_ok)
        if HAS_D:
            tl.store(dD_ptr + (g * B + b) * D + d, dD, mask=d_ok)
        if HAS_BIAS:
            tl.store(dbias_ptr + (g * B + b) * D + d, dbias, mask=d_ok)
        if RULE == MAMBA:
            if not A_PER_TOKEN:
                tl.store(dA_ptr + (g * B + b) * N * D + tile, dA, mask=tile_ok)


def _contiguous_last(value: Tensor) -> Tensor:
    return value if value.stride(-1) == 1 or value.shape[-1] == 1 else value.contiguous()


def _resident_programs(device: torch.device, num_warps: int) -> int:
    """How many programs of the backward kernel run at once: its registers leave room for 8 warps a multiprocessor."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count * max(1, 8 // num_warps)


class _Launch:
    """Pointers, strides and compile-time options that both kernels take."""

    def __init__(self, scan: Scan, block_d: int = 32):
        if scan.x.dtype == torch.float64:
            raise ValueError("the Triton kernels compute in float32 and x is torch.float64; use backend='torch'")
        G, B, L, D, N = self.sizes = scan.sizes

        def view(value: Optional[Tensor], ndim: int) -> Tensor:
            # An absent tensor is never read; x stands in for its pointer.
            return _contiguous_last(stack(scan, value, ndim)) if value is not None else scan.x.new_empty(0)

        x, k, q, z = (view(value, 3) for value in (scan.x, scan.k, scan.q, scan.z))
        skip = view(scan.D, 1)
        step = stack(scan, scan.step, 3).expand(G, B, L, D)
        bias = view(None, 1) if scan.bias is None else stack(scan, scan.bias, 1).expand(G, D)
        A = view(scan.A, 3 if scan.A_per_token else 2)
        if scan.A is not None and not scan.A_per_token:
            A = A.transpose(1, 2).contiguous()  # (G, N, D): channels last, like the states
        self.tensors = (x, step, k, q, A, z, skip, bias)
        A_strides = (0,) * 5 if scan.A is None else \
            (*A.stride()[:3], 0, 0) if scan.A_per_token else (A.stride(0), 0, 0, A.stride(2), A.stride(1))
        self.strides = (*x.stride()[:3], *step.stride(), *k.stride()[:3], *q.stride()[:3], *A_strides,
                        *((0, 0, 0) if scan.z is None else z.stride()[:3]),
                        0 if scan.D is None else skip.stride(0), *((0, 0) if scan.bias is None else bias.stride()))
        block_n = triton.next_power_of_2(N)
        # A lane holds one or two channels with all their states; more states than 16 are spread over more warps.
        self.options = dict(
            RULE=_RULE[scan.state_rule], SOFTPLUS=scan.softplus, A_PER_TOKEN=scan.A_per_token,
            HAS_Z=scan.z is not None, HAS_D=scan.D is not None, HAS_BIAS=scan.bias is not None,
            FIRST_REVERSED=int(scan.direction == "backward"), T=CHUNK, BLOCK_N=block_n, BLOCK_D=block_d,
            num_warps=max(1, min(8, block_n // 16)))
        self.blocks = triton.cdiv(D, block_d)


def forward(scan: Scan, save_states: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `torch_scan.forward`."""
    launch = _Launch(scan)
    G, B, L, D, N = launch.sizes
    combined = scan.direction == "both" and scan.combine != "none"
    y = scan.x.new_empty(G, B, L, D, dtype=torch.float32 if combined else scan.x.dtype)
    final = scan.x.new_empty(G, B, D, N, dtype=torch.float32)
    saved = scan.x.new_empty((G, triton.cdiv(L, CHUNK), B, N, D) if save_states else (0,), dtype=torch.float32)
    has_initial = scan.initial_state is not None
    initial = stack(scan, scan.initial_state, 3) if has_initial else saved
    if B:
        with torch.cuda.device_of(scan.x):
            _forward_kernel[(launch.blocks * B, G)](
                *launch.tensors, initial, y, final, saved, L, B, D, N, launch.blocks, *launch.strides,
                *(initial.stride() if has_initial else (0, 0, 0, 0)),
                HAS_INITIAL=has_initial, SAVE=save_states, **launch.options)
    if combined:
        y = ((y[0] + y[1]) * scan.output_scale).to(scan.x.dtype)
    return y.view(scan.output_shape), final.view(scan.state_shape), saved


def backward(scan: Scan, dy: Optional[Tensor], dfinal: Optional[Tensor], saved: Tensor) -> dict[str, Tensor]:
    """As `torch_scan.backward`."""
    # Two channels a lane halve the work of the sums over channels; Mamba's decays leave no registers for them.
    launch = _Launch(scan, block_d=64 if scan.rule != "mamba" and scan.x.shape[-1] > 32 else 32)
    G, B, L, D, N = launch.sizes
    if not saved.numel():
        saved = forward(scan, True)[2]
    if dy is None:
        dy = scan.x.new_zeros(1).expand(scan.output_shape)
    dy = dy if dy.stride(-1) == 1 or D == 1 else dy.contiguous()
    dy = dy.expand(G, B, L, D) if dy.ndim == 3 else dy
    blocks = launch.blocks

    def grad(value: Optional[Tensor], *shape: int, summed: bool = False) -> Tensor:
        # What is still to be summed stays in float32.
        if value is None:
            return scan.x.new_empty(0)
        shared = summed or (value.ndim < len(shape) and G > 1) or value.shape[-1] != shape[-1]
        return value.new_empty(shape, dtype=torch.float32 if shared else value.dtype)

    grads = {
        "x": grad(scan.x, G, B, L, D),
        "step": grad(scan.step, G, B, L, D),
        "k": grad(scan.k, blocks, G, B, L, N, summed=True),
        "q": grad(scan.q, blocks, G, B, L, N, summed=True),
        "A": grad(scan.A, *((blocks, G, B, L, N) if scan.A_per_token else (G, B, N, D)), summed=True),
        "z": grad(scan.z, G, B, L, D),
        "D": grad(scan.D, G, B, D, summed=True),
        "bias": grad(scan.bias, G, B, D, summed=True),
        "initial_state": grad(scan.initial_state, G, B, D, N, summed=True),
    }
    programs = min(blocks * B * G, _resident_programs(scan.x.device, launch.options["num_warps"]))
    scratch = scan.x.new_empty(programs * CHUNK * launch.options["BLOCK_N"] * launch.options["BLOCK_D"],
                               dtype=torch.float32)
    if B:
        with torch.cuda.device_of(scan.x):
            _backward_kernel[(programs,)](
                *launch.tensors, saved, dy, dy if dfinal is None else dfinal.contiguous(), scratch, *grads.values(),
                L, B, D, N, G, blocks, scan.output_scale, *launch.strides, *dy.stride()[:3],
                HAS_INITIAL=scan.initial_state is not None, HAS_DFINAL=dfinal is not None, **launch.options)
    # Fixed-order sums: over the blocks of channels, then (in unstack) over the directions; over the batch.
    for name in ("k", "q", *(("A",) if scan.A_per_token else ())):
        grads[name] = grads[name].sum(0)
    for name in ("D", "bias"):
        if getattr(scan, name) is not None:
            grads[name] = grads[name].sum(1)
    if scan.A is not None and not scan.A_per_token:
        grads["A"] = grads["A"].sum(1).transpose(1, 2)
    return {name: unstack(grads[name], value).contiguous() for name, value in scan.tensors().items()}
