"""The exact rule in chunks on tensor cores: when it can run so, and how its kernels are launched."""

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ...contract import Pair, Scan, ceil_div, power_of_2, stack
from ...rules import rule_of
from ..torch.unit import Raw
from . import chunk_backward, chunk_forward, fragments
from .finish import sum_blocks, sum_sequences
from .lanes import TENSOR_CORES, takes_ptx
from .launch import Launch, pointer, run, strides
from .tuning import multiprocessors

CHUNK = 8
# Chunks from one kept state to the next. From a kept state the backward pass goes back by differences.
ANCHOR = 32
STATES = (8, 16, 32)
# The kernels can make logits of these ranks, with at most so many states: more leave no room to load ahead.
_RANKS, _RANK_STATES = (8, 16, 24), 16
_SHARED = 48 << 10  # bytes that a program may reserve
_FAR = 2**31  # the offsets of a sequence's tokens have 32 bits


class Shape(NamedTuple):
    """How channels are dealt out: `pairs` of neighbours to a lane, `warps` to a program."""

    pairs: int
    warps: int
    registers: Optional[int] = None
    stages: int = 2  # chunks that shared memory holds, the present one and those being copied

    @property
    def channels(self) -> int:
        """The channels of a program."""
        return 16 * self.pairs * self.warps


# The fastest on an H200 with 16 states, each for work that gives a multiprocessor so many warps or more.
_SHAPES = {
    "forward": ((8, Shape(4, 2, 168, 3)), (0, Shape(1, 1, None, 4))),
    "backward": ((8, Shape(2, 4, 168, 2)), (2, Shape(2, 2, None, 3)), (0, Shape(1, 2, None, 4))),
}


def choose(kernel: str, scan: Scan) -> Shape:
    G, B, _, D, N = scan.sizes
    *many, (_, few) = _SHAPES[kernel]
    for least, shape in many:
        pairs = shape.pairs if N <= 16 else shape.pairs // 2
        if D % (16 * pairs) or G * B * D // (16 * pairs) < least * multiprocessors(scan.x.device):
            continue
        warps = shape.warps
        # Where directions meet, half of the warps have the same channels as the other half.
        meet = kernel == "forward" and _combined(scan)
        while D % ((8 if meet else 16) * pairs * warps):
            warps //= 2
        return shape._replace(pairs=pairs, warps=warps)
    return few._replace(warps=min(few.warps, power_of_2(ceil_div(D, 16))))


def obstacle(scan: Scan) -> Optional[str]:
    """Say why `scan` cannot run in chunks; None if it can."""
    _, _, L, D, N = scan.sizes
    if scan.rule != "exact":
        return f"rule={scan.rule!r} has no chunked form here"
    if N not in STATES:
        return f"d_state is {N}; it must be one of {', '.join(map(str, STATES))}"
    if D % 2:
        return f"x has {D} channels; their number must be even"
    names = rule_of(scan).names
    for name in ("x", "step", "step_proj", "k", "q", "z"):
        value = getattr(scan, name)
        if value is not None and value.dtype != torch.bfloat16:
            return f"{names.get(name, name)} is {value.dtype}; it must be torch.bfloat16"
    if L * max(D, N, scan.tensors()["step"].stride(-2)) >= _FAR:
        return f"the {L} tokens of a sequence span 2**31 numbers or more"
    if not takes_ptx(scan.x.device, TENSOR_CORES):
        return f"{scan.x.device} is no NVIDIA GPU of compute capability 8.0 or more"
    return None


def chosen(scan: Scan) -> bool:
    """Tell whether `scan` runs in chunks.

    Raises:
        ValueError: its regime demands chunks, and it cannot run in them.
    """
    if scan.regime not in ("auto", "chunked"):
        return False
    why = obstacle(scan)
    if scan.regime == "chunked" and why is not None:
        raise ValueError(f"regime='chunked': {why}; use regime='auto'")
    return why is None


def takes_projection(scan: Scan) -> bool:
    """Tell whether the kernels can make the logits of `scan` from its `step` at low rank."""
    rank = 0 if scan.step_proj is None else scan.step_proj.shape[-1]
    return rank in _RANKS and scan.sizes[4] <= _RANK_STATES and chosen(scan)


def saved_shape(scan: Scan) -> tuple[int, ...]:
    """Return the float32 shape of what the backward pass starts from: each token's w, in bfloat16, and some states."""
    G, B, L, D, N = scan.sizes
    chunks = ceil_div(L, CHUNK)
    return (G * B * (chunks * 16 * ceil_div(D, 4) + ceil_div(chunks, ANCHOR) * D * N),)


def _fits(value: Tensor, size: int) -> bool:
    """Tell whether one load can take `size` 16-bit numbers of a row, and offsets reach all rows of a sequence."""
    *strides, last = value.stride()
    whole = value.data_ptr() % (2 * size) == 0 and all(s % size == 0 for s in strides)
    return whole and last == 1 and value.shape[-2] * strides[-1] < _FAR


def _placed(value: Tensor, size: int) -> Tensor:
    """Return `value`, or a copy that `_fits`."""
    return value if _fits(value, size) else value.clone(memory_format=torch.contiguous_format)


def _combined(scan: Scan) -> bool:
    """Tell whether y is one sum of both directions with one gate."""
    return scan.direction == "both" and scan.combine != "none" and (scan.z is None or scan.z.ndim == 3)


def _word(shape: Shape, D: int, channels: int) -> int:
    """Return the number of channels that one load takes: 8 or 4 if each lane has as many, and all of them exist; else
    2."""
    return 2 if D % channels else {0: 8, 2: 4}.get(shape.pairs % 4, 2)


def _common(launch: Launch, shape: Shape, channels: int, *others: Tensor) -> dict[str, Any]:
    """Return the arguments that both kernels take. A program has `channels` of one sequence. `others` are the tensors
    that the backward kernel reads or writes as it reads x."""
    scan = launch.scan
    G, B, L, D, N = launch.sizes
    rank = 0 if scan.step_proj is None else scan.step_proj.shape[-1]
    scalar = not rank and scan.tensors()["step"].shape[-1] == 1
    # How many channels, states and low-rank numbers one load takes.
    word = _word(shape, D, channels)
    states, ranks = (4 if numbers >= 16 else 2 for numbers in (N, rank))
    sizes = {"x": word, "k": states, "q": states}
    sizes |= {} if scan.z is None else {"z": word}
    sizes |= {} if scalar else {"step": ranks if rank else word}
    args = dict(launch.args)
    for name, size in sizes.items():
        args |= pointer(name, _placed(args[f"{name}_ptr"], size), "gbld" if name == "step" else "gbl")
    proj = args["step_ptr"] if scan.step_proj is None else stack(scan, scan.step_proj, 2)
    if rank and (proj.stride(1) != rank or not _fits(proj, 2)):
        proj = proj.contiguous()
    aligned = launch.aligned and all(s % 16 == 0 for v in others for s in v.stride()[:-1])
    exchange = shape.warps * (N // 4 + 1) * 512 if others else 0  # bytes for sums over warps
    reads = 2 * (1 + (not rank) + (scan.z is not None) + (2 if others else 0))  # of two tokens
    slots = reads * ceil_div(2 * shape.pairs, min(word, 4)) + 2 * ceil_div(N, 16) + ceil_div(rank, 16)
    slots += shape.pairs if others else 0  # what the forward pass kept
    stage = slots * 8 * 32 * shape.warps
    kept = rank // 8 * shape.pairs * 8 * 32 * shape.warps
    stages = min(shape.stages, (_SHARED - exchange - kept) // stage)
    args |= dict(
        SCALAR=scalar, proj_ptr=proj, proj_g=proj.stride(0) if rank else 0, RP=rank // 8, blocks=ceil_div(D, channels),
        unscale=1 / scan.output_scale, ALIGNED=aligned, BACKWARD=bool(others), NP=N // 8, CP=shape.pairs,
        NW=shape.warps, ANCHOR=ANCHOR, num_warps=shape.warps, num_stages=1, WORD=word, enable_fp_fusion=True,
        STAGES=stages, STAGE=stage, EXCHANGE=exchange, WAIT=fragments.wait(stages - 2),
        ROOM=fragments.room(stages * stage + exchange + kept))  # fmt: skip
    if shape.registers is not None:
        args["maxnreg"] = shape.registers
    return args


def _parts(launch: Launch, saved: Tensor) -> dict[str, Tensor]:
    G, B, L, D, N = launch.sizes
    return dict(written_ptr=saved, anchor_ptr=saved[G * B * ceil_div(L, CHUNK) * 16 * ceil_div(D, 4) :])


def forward(launch: Launch, save: bool, output: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (G, B, L, D), or (B, L, D) if the directions are combined already, the final state (G, B, D, N) and what
    is kept."""
    scan = launch.scan
    G, B, L, D, N = launch.sizes
    shape = choose("forward", scan)
    # With few programs, directions that meet in one program would only make it take longer.
    meet = output and _combined(scan) and shape.warps > 1
    y = scan.x.new_empty((B, L, D) if meet else (G, B, L, D) if output else (0,))
    final = scan.x.new_empty(G, B, D, N, dtype=torch.float32)
    saved = scan.x.new_empty(saved_shape(scan) if save else (0,), dtype=torch.float32)
    start = None if scan.initial_state is None else stack(scan, scan.initial_state, 3)
    channels = shape.channels // 2 if meet else shape.channels
    args = _common(launch, shape, channels) | dict(
        y_ptr=y, final_ptr=final, **_parts(launch, saved), start_ptr=final if start is None else start,
        HAS_START=start is not None, **strides("start", start, "gbdn"), OUTPUT=output, SAVE=save,
        MEET=meet)  # fmt: skip
    with torch.cuda.device_of(scan.x):
        run(chunk_forward._forward_kernel, (args["blocks"] * B, 1 if meet else G), args)
    return y, final, saved


def backward(
    launch: Launch, dy: Tensor, adjoint: Optional[Tensor], saved: Tensor, dz: Optional[Tensor],
    dkq: Optional[Pair] = None, raw: Optional[Raw] = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the gradients by field, with a direction axis, float32 where a sum over directions or channels may follow.
    That of z has no such axis if it is summed already, and is `dz` itself if the kernel can write there. Those of k and
    q are `dkq`, if given, and with `raw` those of `raw`."""
    scan = launch.scan
    G, B, L, D, N = launch.sizes
    shape = choose("backward", scan)
    blocks = ceil_div(D, shape.channels)
    word = _word(shape, D, shape.channels)
    dy = _placed(dy, word)
    # If one direction keeps all schedulers busy, the second runs after it and adds to its results.
    busy = B * blocks * shape.warps >= 8 * multiprocessors(scan.x.device)
    in_turn = scan.z is not None and _combined(scan) and busy
    in_place = in_turn or (scan.z is not None and G == 1)
    if not in_place:
        dz = scan.x.new_empty((G, B, L, D) if scan.z is not None else (0, 0, 0, 0))
    elif dz is None or not _fits(dz, word):
        dz = scan.x.new_empty(B, L, D)
    args = _common(launch, shape, shape.channels, *((dy,) if scan.z is None else (dy, dz)))
    scalar = args["SCALAR"]

    def numbers(*sizes: int) -> Tensor:
        return scan.x.new_empty(sizes, dtype=torch.float32)

    dx = scan.x.new_empty(G, B, L, D)
    dstep = numbers(blocks, G, B, L) if scalar else torch.empty_like(dx)
    dD, dbias, dinitial = numbers(G, B, D), numbers(G, B, D), numbers(G, B, D, N)
    sums = numbers(blocks, G, B, L, 2 * N)
    args |= dict(
        **pointer("dy", dy, "gbl"), **_parts(launch, saved), dstep_ptr=dstep,
        dz_ptr=dz, **dict(zip(("dz_g", "dz_b", "dz_l"), (0, *dz.stride()) if in_place else dz.stride())),
        adjoint_ptr=saved if adjoint is None else adjoint, HAS_ADJOINT=adjoint is not None,
        HAS_INITIAL=scan.initial_state is not None, **strides("adjoint", adjoint, "gbdn"), dx_ptr=dx, dD_ptr=dD,
        dbias_ptr=dbias, dinitial_ptr=dinitial, sums_ptr=sums)  # fmt: skip
    for direction in range(2 if in_turn else 1):
        turn = dict(IN_TURN=in_turn, OTHER=direction > 0, direction=direction)
        run(chunk_backward._backward_kernel, (blocks * B, 1 if in_turn else G), args | turn)

    dk, dq = sum_blocks(sums, scan.k, scan.q, dkq=dkq, raw=raw)
    skip, bias = sum_sequences(dD, dbias)
    if scalar:
        dstep = dstep.sum(0).unsqueeze(-1)
    grads = dict(x=dx, step=dstep, k=dk, q=dq, z=dz, D=skip, bias=bias, initial_state=dinitial)
    return {name: value for name, value in grads.items() if getattr(scan, name) is not None}
