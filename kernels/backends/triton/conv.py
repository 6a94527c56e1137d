"""The Triton kernels of the short convolution and their launch; `backends.torch.conv` says what they compute.

A program is one warp that walks through a segment of a sequence, channels along its lanes. It reads each token of x
once for both directions: the K tokens up to s, which stay in registers, give the first direction its token s and the
second one its token s - (K - 1). U tokens are loaded at a time, one part before their use, since a warp alone could not
hide the wait. Tokens outside the sequence are read as zeros, so only stores need a condition. If the second direction
runs alone (G = 1, REVERSED), it takes the place of the first and reads K - 1 tokens further on.

Channels beyond D repeat the last one, and nothing of them is stored.
"""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import ceil_div
from .finish import sum_taps
from .lanes import (
    LOG2E,
    all_from,
    all_lanes,
    channels_of,
    fill,
    gate,
    kernel,
    load_floats,
    reciprocal,
    takes_ptx,
    warp_lanes,
    work_of,
)
from .launch import aligned, refuse_float64, run
from .tuning import multiprocessors

# Bytes of a channel in a part, forward and backward: 8 and 4 tokens of 16-bit numbers. Backward, a longer part takes so
# many registers that fewer programs run at once.
_FORWARD_PART = 16
_BACKWARD_PART = 8
_SHORTEST = 32  # tokens of a segment: each repeats K - 1 tokens of its neighbours

# No length or stride compiles a kernel anew. Strides are in units of UNIT: if that is 16, the compiler sees that
# neighbouring numbers may be loaded together.
_kernel = kernel(["weight_ptr", "bias_ptr"])


@triton.jit
def _exists(t, L, BC: tl.constexpr):
    """Tells whether 0 <= t < L, (1, BC), by one comparison: a negative number is a huge unsigned one."""
    return all_lanes(t, 1, BC).to(tl.uint32) < L.to(tl.uint32)


@triton.jit
def _load_tokens(row, t, step, L, U: tl.constexpr, BC: tl.constexpr):
    """Loads U tokens from token t on, `step` apart, each (1, BC), with zeros outside the sequence."""
    ptrs = row + t.to(tl.int64) * step
    tokens = ()
    for j in tl.static_range(U):
        tokens = tokens + (tl.load(ptrs + j * step, mask=_exists(t + j, L, BC), other=0),)
    return tokens


@triton.jit
def _floats(values):
    converted = ()
    for i in tl.static_range(len(values)):
        converted = converted + (values[i].to(tl.float32),)
    return converted


@triton.jit
def _convolve(window, weight, bias, K: tl.constexpr, FUTURE: tl.constexpr):
    """Computes the pre-activation, (1, BC), of the last of K tokens or (FUTURE) of the first, which sees later ones."""
    total = bias
    for i in tl.static_range(K):
        total += weight[i] * window[K - 1 - i if FUTURE else i]
    return total


@triton.jit
def _grad_of_pre(dy, window, weight, bias, K: tl.constexpr, FUTURE: tl.constexpr, PTX: tl.constexpr):
    dy = dy.to(tl.float32)
    _, grad = gate(dy, _convolve(window, weight, bias, K, FUTURE), PTX)
    return grad


@_kernel
def _conv_forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, L, B, blocks, segments, span, x_b, x_l,
    D: tl.constexpr, K: tl.constexpr, G: tl.constexpr, REVERSED: tl.constexpr, BC: tl.constexpr, U: tl.constexpr,
    WHOLE: tl.constexpr, UNIT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Takes the steps of one segment, for BC channels of one sequence. The second direction is K - 1 tokens behind the
    first, so both together take L + K - 1 steps, and no segment computes what another one does."""
    block, segment, b, _ = work_of(blocks, segments)
    d, d_ok, _ = channels_of(block, D, 1, 1, BC, WHOLE)
    PAST: tl.constexpr = K - 1
    AHEAD: tl.constexpr = PAST if REVERSED else 0  # tokens from the one computed to the last one read
    begin = segment * span
    end = tl.minimum(begin + span, L + PAST if G == 2 else L)
    x_step = x_l.to(tl.int64) * UNIT
    x_row = x_ptr + b * x_b * UNIT + d
    y_row = y_ptr + b * L * D + d
    y2_row = y_ptr + (b + B * (G - 1)) * L * D + d

    window = _floats(_load_tokens(x_row, begin - PAST + AHEAD, x_step, L, PAST, BC))
    xs = _load_tokens(x_row, begin + AHEAD, x_step, L, U, BC)
    weight = load_floats(weight_ptr + d * K, K, 1)
    bias = load_floats(bias_ptr + d, G, D)
    weight2 = ()
    if G == 2:
        weight2 = load_floats(weight_ptr + D * K + d * K, K, 1)
    for i in tl.range(0, end - begin, U, num_stages=1):
        s = begin + i
        next_xs = _load_tokens(x_row, s + U + AHEAD, x_step, L, U, BC)
        y_at = y_row + s.to(tl.int64) * D
        y2_at = y2_row + (s - PAST).to(tl.int64) * D
        for j in tl.static_range(U):
            window = window + (xs[j].to(tl.float32),)
            pre = _convolve(window, weight, bias[0], K, REVERSED)
            y = pre * reciprocal(1.0 + tl.exp2(pre * -LOG2E), PTX)
            tl.store(y_at + j * D, y.to(y_ptr.dtype.element_ty), mask=d_ok & _exists(s + j, L, BC))
            if G == 2:
                pre = _convolve(window, weight2, bias[1], K, True)
                y = pre * reciprocal(1.0 + tl.exp2(pre * -LOG2E), PTX)
                tl.store(y2_at + j * D, y.to(y_ptr.dtype.element_ty), mask=d_ok & _exists(s + j - PAST, L, BC))
            window = all_from(window, 1)
        xs = next_xs


@_kernel
def _conv_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, dx_ptr, sums_ptr, L, B, blocks, segments, span, x_b, x_l, dx_b, dx_l,
    D: tl.constexpr, K: tl.constexpr, G: tl.constexpr, REVERSED: tl.constexpr, BC: tl.constexpr, U: tl.constexpr,
    WHOLE: tl.constexpr, UNIT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Computes dx of a segment's tokens, for BC channels of one sequence, and its part of the other gradients.

    dx of token u takes the gradients of K pre-activations: of u and the tokens after it in the first direction, of u
    and those before it in the second. They move through windows, as x does; those of other segments are computed again.
    A weight's gradient sums, over the tokens u, x of u times the gradient that the weight connects it with. So each
    token of x is counted once, by its own program, and zeros beyond the end need no mask. `sums` is
    (B, segments, G, K + 1, D): the gradients of the K weights and the bias.
    """
    block, segment, b, _ = work_of(blocks, segments)
    d, d_ok, _ = channels_of(block, D, 1, 1, BC, WHOLE)
    PAST: tl.constexpr = K - 1
    AHEAD: tl.constexpr = 0 if REVERSED else PAST  # tokens from that of dx to the last gradient read
    begin = segment * span
    end = tl.minimum(begin + span, L)
    x_step = x_l.to(tl.int64) * UNIT
    x_row = x_ptr + b * x_b * UNIT + d
    dx_step = dx_l.to(tl.int64) * UNIT
    dx_row = dx_ptr + b * dx_b * UNIT + d
    dy_row = dy_ptr + b * L * D + d
    dy2_row = dy_ptr + (b + B * (G - 1)) * L * D + d

    # Load what comes before the first step. The first direction is PAST tokens ahead of the second.
    window = _floats(_load_tokens(x_row, begin - PAST, x_step, L, PAST, BC))
    early_xs = _load_tokens(x_row, begin, x_step, L, PAST, BC)
    early_gs = _load_tokens(dy_row, begin - PAST + AHEAD, D, L, PAST, BC)
    early_gs2 = ()
    gs2 = ()
    weight2 = ()
    if G == 2:
        early_gs2 = _load_tokens(dy2_row, begin - PAST, D, L, PAST, BC)
        gs2 = _load_tokens(dy2_row, begin, D, L, U, BC)
        weight2 = load_floats(weight_ptr + D * K + d * K, K, 1)
    xs = _load_tokens(x_row, begin + PAST, x_step, L, U, BC)
    gs = _load_tokens(dy_row, begin + AHEAD, D, L, U, BC)
    weight = load_floats(weight_ptr + d * K, K, 1)
    bias = load_floats(bias_ptr + d, G, D)

    grads = ()  # those of the pre-activations that dx of the present step needs
    grads2 = ()
    for j in tl.static_range(PAST):
        window = window + (early_xs[j].to(tl.float32),)
        grads = grads + (_grad_of_pre(early_gs[j], window, weight, bias[0], K, REVERSED, PTX),)
        if G == 2:
            grads2 = grads2 + (_grad_of_pre(early_gs2[j], window, weight2, bias[1], K, True, PTX),)
        window = all_from(window, 1)
    dweight = fill(0.0, K, 1, BC)
    dbias = tl.zeros([1, BC], tl.float32)
    dweight2 = fill(0.0, K if G == 2 else 0, 1, BC)
    dbias2 = tl.zeros([1, BC], tl.float32)

    for i in tl.range(0, end - begin, U, num_stages=1):
        u = begin + i
        dx_at = dx_row + u.to(tl.int64) * dx_step
        next_xs = _load_tokens(x_row, u + U + PAST, x_step, L, U, BC)
        next_gs = _load_tokens(dy_row, u + U + AHEAD, D, L, U, BC)
        next_gs2 = ()
        if G == 2:
            next_gs2 = _load_tokens(dy2_row, u + U, D, L, U, BC)
        for j in tl.static_range(U):
            # x and the first direction are PAST tokens ahead of the second direction and dx.
            window = window + (xs[j].to(tl.float32),)
            grads = grads + (_grad_of_pre(gs[j], window, weight, bias[0], K, REVERSED, PTX),)
            x = window[0]
            dx = grads[0] * weight[0 if REVERSED else K - 1]
            for n in tl.static_range(1, K):
                dx += grads[n] * weight[n if REVERSED else K - 1 - n]
            new = ()
            for n in tl.static_range(K):
                new = new + (dweight[n] + x * grads[n if REVERSED else K - 1 - n],)
            dweight = new
            dbias += grads[K - 1 if REVERSED else 0]
            if G == 2:
                grad = _grad_of_pre(gs2[j], window, weight2, bias[1], K, True, PTX)
                grads2 = grads2 + (grad,)
                new = ()
                for n in tl.static_range(K):
                    dx += grads2[n] * weight2[n]
                    new = new + (dweight2[n] + x * grads2[n],)
                dweight2 = new
                dbias2 += grad
                grads2 = all_from(grads2, 1)
            tl.store(dx_at + j * dx_step, dx.to(dx_ptr.dtype.element_ty), mask=d_ok & _exists(u + j, L, BC))
            window = all_from(window, 1)
            grads = all_from(grads, 1)
        xs = next_xs
        gs = next_gs
        gs2 = next_gs2

    sums = sums_ptr + (b * segments + segment) * (G * (K + 1) * D) + d
    found = dweight + (dbias,)
    if G == 2:
        found = found + dweight2 + (dbias2,)
    for i in tl.static_range(G * (K + 1)):
        tl.store(sums + i * D, found[i], mask=d_ok)


def _cut(L: int, programs: int, device: torch.device, part: int) -> tuple[int, int]:
    """Cut a walk of L steps, `programs` of which run, into (segments, span), span a multiple of `part`. Segments make
    about two rounds of 24 programs on each multiprocessor, unless whole walks fill most of one round."""
    capacity = 24 * multiprocessors(device)
    segments = 1 if 3 * programs >= 2 * capacity else 2 * capacity // max(programs, 1)
    span = max(_SHORTEST, ceil_div(ceil_div(L, segments), part) * part)
    return ceil_div(L, span), span


def _prepare(
    steps: int, part_bytes: int, x: Tensor, weight: Tensor, bias: Tensor, reversed: bool, **others: Tensor
) -> tuple[int, dict]:
    """Prepare a walk of `steps` steps: return (programs, arguments). `others` are y, dy and dx."""
    refuse_float64(x)
    B, L, D = x.shape
    G, _, K = weight.shape
    every_aligned = D % 16 == 0 and all(map(aligned, (x, *others.values())))
    # Two channels a lane where they can be loaded together and no lane is idle.
    lanes = warp_lanes(x.device)
    width = 2 * lanes if every_aligned and D % (2 * lanes) == 0 else lanes
    unit = 16 if every_aligned else 1
    blocks = ceil_div(D, width)
    part = part_bytes // x.element_size()
    segments, span = _cut(steps, blocks * B, x.device, part)
    args = dict(x_ptr=x, weight_ptr=weight, bias_ptr=bias, L=L, B=B, blocks=blocks, segments=segments, span=span,
                x_b=x.stride(0) // unit, x_l=x.stride(1) // unit, D=D, K=K, G=G, REVERSED=reversed, BC=width, U=part,
                WHOLE=D % width == 0, UNIT=unit, PTX=takes_ptx(x.device), num_warps=1, num_stages=1,
                enable_fp_fusion=True)  # fmt: skip
    for name, value in others.items():
        args |= {f"{name}_ptr": value, f"{name}_b": value.stride(-3) // unit, f"{name}_l": value.stride(-2) // unit}
    return blocks * segments * B, args


def forward(x: Tensor, weight: Tensor, bias: Tensor, reversed: bool = False, out: Optional[Tensor] = None) -> Tensor:
    """See `backends.torch.conv.forward`."""
    G, _, K = weight.shape
    y = x.new_empty(G, *x.shape) if out is None else out
    programs, args = _prepare(x.shape[1] + (G - 1) * (K - 1), _FORWARD_PART, x, weight, bias, reversed, y=y)
    if programs:
        with torch.cuda.device_of(x):
            run(_conv_forward_kernel, (programs,), args)
    return y


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, dx: Tensor, reversed: bool = False
) -> tuple[Tensor, Tensor]:
    """See `backends.torch.conv.backward`."""
    (B, L, D), (G, _, K) = x.shape, weight.shape
    programs, args = _prepare(L, _BACKWARD_PART, x, weight, bias, reversed, dy=dy, dx=dx)
    sums = x.new_empty(B * args["segments"], G, K + 1, D, dtype=torch.float32)
    if programs:
        with torch.cuda.device_of(x):
            run(_conv_backward_kernel, (programs,), args | dict(sums_ptr=sums))
    return sum_taps(sums)  # no atomics, but a fixed order: the same bits in every run
