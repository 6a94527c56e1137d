"""The scans on a GPU: what the Triton kernels are launched with, and in which of three regimes.

Many sequences: one warp walks through each block of channels of each sequence, from its first token to its last. Few
long sequences would leave most of the GPU idle so; for the rules whose transition is one number for each state (kind
"decay") time is then cut into segments that run side by side. A first pass finds what each segment adds
to the state and how much of the state it keeps, a short walk over the segments carries the state through, and the
second pass starts each segment from its state. The backward pass does the same with the adjoint.

The exact rule, whose transition all channels share but for a step size, takes chunks of tokens to the tensor cores
where it can (`chunks`).
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ...contract import Pair, Scan, ceil_div, power_of_2, stack, unstack
from . import chunks, scan_backward, scan_forward, walk
from .finish import add_directions, sum_blocks, sum_sequences
from .lanes import FOLD_CAPABILITY, INTERPRETED, form_of, takes_ptx, warp_lanes
from .tuning import Choice, choose, first_choice, multiprocessors

CHUNK = 8  # tokens from one saved state to the next; the backward pass rebuilds what lies between
# Of a rule that is undone, what each token wrote is kept, and a state every so many tokens.
ANCHOR = 64
# The most states that a lane keeps; more are spread over lanes.
_LANE_STATES = 16
# Tokens of a segment that is worth its share of the first pass in any case.
_LONG = 128


class Plan(NamedTuple):
    """How a kernel goes over its work: `segments` pieces of `span` tokens side by side (1: one walk through time), in
    programs of `channels` channels of one sequence and direction; `regime` is what "auto" comes to."""

    segments: int
    span: int
    channels: int
    regime: str = "sequential"


class _Call(NamedTuple):
    """A kernel with all that it is launched with."""

    kernel: Any
    grid: tuple[int, int]
    args: dict[str, Any]

    def launch(self) -> None:
        self.kernel[self.grid](**self.args)

    def compile(self, device: torch.device) -> None:
        with torch.cuda.device(device):  # each thread has a current device of its own
            self.kernel.warmup(grid=self.grid, **self.args)

    def key(self) -> tuple:
        """All that it is compiled for, and a little less: strides that are 1 or a multiple of 16."""
        names = self.kernel.arg_names
        runtime = set(names) - {names[i] for i in self.kernel.constexprs} - {"form"}
        return self.kernel.fn.__name__, *(
            value.dtype if torch.is_tensor(value) else tuple(c.value for c in value) if name == "form" else value
            for name, value in self.args.items()
            if torch.is_tensor(value) or name not in runtime
        )


_compiled: set[tuple] = set()


def _launch_all(device: torch.device, calls: list[_Call]) -> None:
    """Launch one after the other, having compiled side by side those that are new: that takes seconds for each, few of
    them under Python's lock."""
    if not INTERPRETED:
        new = {(device, *call.key()): call for call in calls}
        new = {key: call for key, call in new.items() if key not in _compiled}
        if new:
            with ThreadPoolExecutor(len(new)) as pool:
                list(pool.map(lambda call: call.compile(device), new.values()))
            _compiled.update(new)
    for call in calls:
        call.launch()


def _cut(scan: Scan, programs: int, resident: int, backward: bool) -> tuple[int, int]:
    """(segments, span), given that a walk through all of time makes `programs` programs, of which the GPU runs
    `resident` at once.

    One walk, unless that fills less than a quarter of the GPU, or less than a half for a long time. Else as many
    segments as fill it once, twice or three times with the least left over, none shorter than 4 chunks: each pays for
    its share of the first pass. The backward pass makes it twice at least where segments stay long: its first pass
    takes more channels a program, and would fill half of the GPU.
    """
    L = scan.sizes[2]
    one = 1, ceil_div(L, CHUNK) * CHUNK
    little = programs * (2 if L >= 1024 else 4) <= resident
    if scan.law.kind == "error" or scan.regime == "sequential" or (scan.regime == "auto" and not little):
        return one
    cuts = {}
    for waves in (3, 2, 1):
        segments = max(2, waves * resident // max(programs, 1))
        span = max(4, ceil_div(ceil_div(L, segments), CHUNK)) * CHUNK
        segments = ceil_div(L, span)
        cuts[segments, span] = segments * programs / (max(1, ceil_div(segments * programs, resident)) * resident)
        if backward and waves == 2 and span >= _LONG:
            break
    segments, span = min(cut for cut in cuts if cuts[cut] > max(cuts.values()) - 0.03)
    return one if segments < (3 if scan.regime == "auto" else 2) else (segments, span)


def _aligned(value: Tensor) -> bool:
    """Whether every row of channels starts at a multiple of 16 bytes (and 16 numbers, as the kernels are told)."""
    return value.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in value.stride()[:3])


def _pack(value: Tensor, states: int) -> int:
    """How many numbers of a row of k or q one 64-bit load takes: as many as fit, if every lane's share is aligned."""
    pack = 8 // value.element_size()
    aligned = value.data_ptr() % 8 == 0 and all(s % pack == 0 for s in value.stride()[:3])
    return pack if aligned and states % pack == 0 else 1


class _Launch:
    """The tensors of a scan with a direction axis, their strides and the options that all kernels take."""

    def __init__(self, scan: Scan):
        if scan.x.dtype == torch.float64:
            raise ValueError("the Triton kernels compute in float32 and x is torch.float64; use backend='torch'")
        self.scan = scan
        G, B, L, D, N = self.sizes = scan.sizes

        def view(value: Optional[Tensor], ndim: int) -> Tensor:
            if value is None:
                return scan.x  # an absent tensor is never read; x stands in for its pointer
            value = stack(scan, value, ndim)
            return value if value.stride(-1) == 1 or value.shape[-1] == 1 else value.contiguous()

        x, k, q, z = (view(value, 3) for value in (scan.x, scan.k, scan.q, scan.z))
        skip = view(scan.D, 1)
        step = x if scan.step is None else stack(scan, scan.step, 3)
        if scan.step_proj is None:
            step = step.expand(G, B, L, D)
        bias = view(None, 1) if scan.bias is None else stack(scan, scan.bias, 1).expand(G, D)
        A = scan.x
        A_strides: tuple[int, ...] = (0,) * 5
        if scan.A is not None and scan.A_per_token:
            A = view(scan.A, 3)
            A_strides = (*A.stride()[:3], 0, 0)
        elif scan.A is not None:
            A = stack(scan, scan.A, 2)
            A_strides = (A.stride(0), 0, 0, A.stride(1), A.stride(2))
        self.args: dict[str, Any] = dict(
            x_ptr=x, step_ptr=step, k_ptr=k, q_ptr=q, A_ptr=A, z_ptr=z, D_ptr=skip, bias_ptr=bias, L=L, B=B, D=D,
            scale=scan.output_scale, **_strides("x", x, "gbl"), **_strides("step", step, "gbld"),
            **_strides("k", k, "gbl"), **_strides("q", q, "gbl"),
            **dict(zip(("A_g", "A_b", "A_l", "A_d", "A_n"), A_strides)),
            **_strides("z", None if scan.z is None else z, "gbl"),
            **_strides("D", None if scan.D is None else skip, "g"),
            **_strides("bias", None if scan.bias is None else bias, "gd"))  # fmt: skip
        self.matrix = (
            torch.finfo(k.dtype).bits == 16 and torch.finfo(q.dtype).bits == 16 and takes_ptx(x.device, FOLD_CAPABILITY)
        )
        # A lane takes up to 16 states of a channel.
        NS = min(32, power_of_2(ceil_div(N, _LANE_STATES)))
        NI = ceil_div(N, NS)
        self.lanes = warp_lanes(x.device) // NS  # that hold channels
        self.matrix &= NS == 1
        rows = [x, *(() if scan.step_proj is not None else (step,)), *(() if scan.z is None else (z,))]
        self.aligned = D % 16 == 0 and all(map(_aligned, rows))
        self.args |= dict(
            RULE=scan.law.kernels, SOFTPLUS=scan.softplus, A_PER_TOKEN=scan.A_per_token,
            HAS_Z=scan.z is not None, HAS_D=scan.D is not None, HAS_BIAS=scan.bias is not None,
            FIRST_REVERSED=int(scan.direction == "backward"), N=N, NI=NI, NS=NS,
            T=ANCHOR if scan.law.kind == "error" else CHUNK,
            K_PACK=_pack(k, NI if NS * NI == N else 1), Q_PACK=_pack(q, NI if NS * NI == N else 1),
            PTX=takes_ptx(x.device))  # fmt: skip

    def norms(self, saved: Tensor, found: bool = False) -> None:
        """Find what eps needs of k, in the order of the scan and infinite beyond its end: once for all programs and
        passes, also the backward one where `saved` keeps it (and holds it already: `found`)."""
        if "norm_ptr" in self.args:
            return
        G, B, L, D, N = self.sizes
        k = self.args["k_ptr"]
        padded = ceil_div(L, CHUNK) * CHUNK
        count = _norms(self.scan)
        norm = saved[-count:] if count and saved.numel() else k.new_empty(count, dtype=torch.float32)
        if count and not found:
            scan_forward._norm_kernel[(ceil_div(padded, 128) * B, G)](
                k, norm, L, B, padded, *k.stride()[:3], FIRST_REVERSED=self.args["FIRST_REVERSED"], N=N,
                BLOCK_N=power_of_2(N), BLOCK=128, num_warps=4)  # fmt: skip
        self.args |= dict(norm_ptr=norm, padded=padded)

    def call(self, kernel: Any, choice: Choice, cut: tuple[int, int], **args: Any) -> _Call:
        """One program for each block of channels, segment, sequence and direction."""
        G, B, L, D, N = self.sizes
        segments, span = cut
        width = self.width(choice)
        blocks = ceil_div(D, width)
        args = {**self.args, "ALIGNED": self.aligned, "BC": width, "W": self.lanes, "U": choice.unroll,
                "DEEP": choice.deep, "WHOLE": D % width == 0, "blocks": blocks, "segments": segments, "span": span,
                **args}  # fmt: skip
        options = dict(num_warps=1, num_stages=1, enable_fp_fusion=True)
        if choice.registers is not None and self.args["PTX"]:
            options["maxnreg"] = choice.registers
        args["form"] = form_of(walk.Form, args)
        return _Call(kernel, (blocks * segments * B, G), {name: args[name] for name in kernel.arg_names} | options)

    def saved(self, saved: Tensor) -> dict[str, Tensor]:
        """What the backward pass starts from: states, and of a rule that is undone also what each token wrote."""
        if self.scan.law.kind != "error" or not saved.numel():
            return dict(saved_ptr=saved, written_ptr=saved)
        G, B, L, D, N = self.sizes
        return dict(saved_ptr=saved[G * B * L * D :], written_ptr=saved)

    def width(self, choice: Choice) -> int:
        """Channels of a program: several a lane where they can be loaded together and no lanes share a channel."""
        several = self.aligned and self.args["NS"] == 1 and self.sizes[3] % (self.lanes * choice.channels) == 0
        return self.lanes * (choice.channels if several else 1)

    def programs(self, choice: Choice) -> int:
        """Of one walk through time."""
        G, B, L, D, N = self.sizes
        return G * B * ceil_div(D, self.width(choice))

    def choice(self, kernel: str, cut: tuple[int, int], run: Optional[Callable[[Choice], object]] = None) -> Choice:
        """For "forward", "backward" or "adjoint". The segments are cut for the first choice of the first two."""
        if cut[0] == 1 or kernel == "adjoint":
            return choose(kernel, self.scan, lambda choice: cut[0] * self.programs(choice), run)
        return first_choice(kernel, self.scan)

    def cut(self, kernel: str) -> tuple[int, int]:
        choice = first_choice(kernel, self.scan)
        resident = multiprocessors(self.scan.x.device) * choice.resident
        return _cut(self.scan, self.programs(choice), resident, kernel == "backward")

    def carry(self, local: Tensor, decay: Tensor, start: Optional[Tensor], reverse: bool) -> _Call:
        G, B, L, D, N = self.sizes
        kernel = scan_forward._carry_kernel
        values = (local, decay, local if start is None else start, D, N * D, local.shape[2], B,
                  *((0,) * 4 if start is None else start.stride()))  # fmt: skip
        return _Call(
            kernel,
            (ceil_div(N * D, 64), G * B),
            dict(zip(kernel.arg_names, values))
            | dict(HAS_START=start is not None, REVERSED=reverse, BLOCK=64, U=8, num_warps=1, num_stages=1),
        )


def _strides(name: str, value: Optional[Tensor], axes: str) -> dict[str, int]:
    return {f"{name}_{axis}": 0 if value is None else value.stride(i) for i, axis in enumerate(axes)}


def _state_strides(name: str, value: Optional[Tensor], segmented: bool) -> dict[str, int]:
    """Of (G, B, D, N), or of one state for each segment, (G, B, segments, N, D)."""
    if segmented:
        return _strides(name, value, "gbsnd")
    return {**_strides(name, value, "gbdn"), f"{name}_s": 0}


def _norms(scan: Scan) -> int:
    """How many numbers `_Launch.norms` finds."""
    G, B, L, _, _ = scan.sizes
    return G * B * ceil_div(L, CHUNK) * CHUNK if scan.law.takes_norm else 0


def takes_projection(scan: Scan) -> bool:
    """Whether logits may be given at low rank (`Scan.step_proj`)."""
    return chunks.takes_projection(scan)


def saved_shape(scan: Scan) -> tuple[int, ...]:
    """As `backends.torch.scan.saved_shape`: states, or of a rule that is undone what each token wrote and states; and
    last, where the walk takes them, the squares of the keys' norms."""
    G, B, L, D, N = scan.sizes
    if chunks.chosen(scan):
        return chunks.saved_shape(scan)
    numbers = L + ceil_div(L, ANCHOR) * N if scan.law.kind == "error" else ceil_div(L, CHUNK) * N
    return (G * B * D * numbers + _norms(scan),)


def forward(scan: Scan, save_states: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `backends.torch.scan.forward`."""
    y, final, saved = _forward(_Launch(scan), save_states, output=True)
    y = torch.add(y[0], y[1]) if y.ndim == 4 and scan.combine != "none" else y.view(scan.output_shape)
    return y, final.view(scan.state_shape), saved


def _forward(launch: _Launch, save_states: bool, output: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`forward` with a direction axis; without `output` only the states are found."""
    scan = launch.scan
    G, B, L, D, N = launch.sizes
    if chunks.chosen(scan) and B:
        return chunks.forward(launch, save_states, output)
    y = scan.x.new_empty((G, B, L, D) if output else (0,))
    final = scan.x.new_empty(G, B, D, N, dtype=torch.float32)
    saved = scan.x.new_empty(saved_shape(scan) if save_states else (0,), dtype=torch.float32)
    start = None if scan.initial_state is None else stack(scan, scan.initial_state, 3)
    if B:
        with torch.cuda.device_of(scan.x):
            launch.norms(saved)
            common = dict(y_ptr=y, decay_ptr=final, **launch.saved(saved))

            def call(choice: Choice) -> _Call:
                return launch.call(
                    scan_forward._forward_kernel, choice, cut, **common, start_ptr=final if start is None else start,
                    final_ptr=final, HAS_START=start is not None, OUTPUT=output, SUMMARY=False, SAVE=save_states,
                    **_state_strides("start", start, cut[0] > 1))  # fmt: skip

            cut = launch.cut("forward")
            if cut[0] > 1:
                local, decay = scan.x.new_empty(2, G, B, cut[0], N, D, dtype=torch.float32).unbind(0)
                summary = launch.call(scan_forward._forward_kernel, first_choice("summary", scan), cut, **common | dict(
                    start_ptr=local, final_ptr=local, decay_ptr=decay, HAS_START=False, OUTPUT=False, SUMMARY=True,
                    SAVE=False, **_state_strides("start", None, True)))  # fmt: skip
                carry = launch.carry(local, decay, start, reverse=False)
                start = local
                _launch_all(scan.x.device, [summary, carry, call(first_choice("forward", scan))])
            else:
                call(launch.choice("forward", cut, lambda choice: call(choice).launch())).launch()
    return y, final, saved


def backward(
    scan: Scan, dy: Optional[Tensor], dfinal: Optional[Tensor], saved: Tensor, dz: Optional[Tensor] = None,
    dkq: Optional[Pair] = None,
) -> dict[str, Tensor]:  # fmt: skip
    """As `backends.torch.scan.backward`."""
    launch = _Launch(scan)
    G, B, L, D, N = launch.sizes
    like = scan.tensors()
    if scan.step_proj is not None:
        like["step"] = scan.x  # the logits' gradient, not that of their low rank
    if not B:
        return {name: torch.zeros_like(value) for name, value in like.items()}  # dz has no numbers either
    if not saved.numel():
        saved = _forward(launch, True, output=False)[2]
    if dy is None:
        dy = scan.x.new_zeros(1).expand(scan.output_shape)
    dy = dy.expand(G, B, L, D) if dy.ndim == 3 else dy
    if dy.stride(-1) != 1:
        dy = dy.contiguous()
    launch.aligned &= _aligned(dy)
    adjoint = dfinal if dfinal is None else dfinal.reshape(G, B, D, N)
    with torch.cuda.device_of(scan.x):
        if chunks.chosen(scan):
            grads = chunks.backward(launch, dy, adjoint, saved, dz, dkq)
        else:
            grads = _walk_back(launch, dy, adjoint, saved, dkq)
    if dkq is not None:
        del grads["k"], grads["q"]
    if dz is not None and scan.z is not None:
        found = grads.pop("z")
        if found.ndim == 4 and len(found) == 2:
            add_directions(found, dz)
        elif found is not dz:
            dz.copy_(found.view_as(dz))
    return {name: unstack(grads[name], value) for name, value in like.items() if name in grads}


def _walk_back(
    launch: _Launch, dy: Tensor, adjoint: Optional[Tensor], saved: Tensor, dkq: Optional[Pair]
) -> dict[str, Tensor]:
    """The gradients by field, with a direction axis. Those of k and q are `dkq`, if given."""
    scan = launch.scan
    G, B, L, D, N = launch.sizes
    groups = 3 if scan.A_per_token else 2
    cut = launch.cut("backward")
    parts = G, B, cut[0]

    def grad(value: Optional[Tensor], *shape: int, dtype: Optional[torch.dtype] = torch.float32) -> Tensor:
        return scan.x.new_empty(shape if value is not None else (0,), dtype=dtype)

    def whole(value: Optional[Tensor]) -> Tensor:
        # To be summed over the directions at most, two numbers, it has its dtype already; over channels, float32.
        return grad(
            value, G, B, L, D, dtype=value.dtype if value is not None and value.shape[-1] == D else torch.float32
        )

    dx, dstep, dz = whole(scan.x), whole(scan.step), whole(scan.z)
    dA = grad(None if scan.A_per_token else scan.A, *parts, N, D)
    dD, dbias = grad(scan.D, *parts, D), grad(scan.bias, *parts, D)
    dinitial = grad(scan.initial_state, G, B, D, N)
    launch.norms(saved, found=True)
    common = dict(dy_ptr=dy, **_strides("dy", dy, "gbl"))
    if cut[0] > 1:
        local, decay = scan.x.new_empty(2, *parts, N, D, dtype=torch.float32).unbind(0)
        before = [launch.call(scan_backward._adjoint_kernel, launch.choice("adjoint", cut), cut, **common,
                              local_ptr=local, decay_ptr=decay),
                  launch.carry(local, decay, adjoint, reverse=True)]  # fmt: skip
        adjoint = local
    values = power_of_2(2 * launch.args["NI"])

    def call(choice: Choice) -> _Call:
        # Each block of channels leaves its part of the sums over channels (k, q, a token's A).
        sums = scan.x.new_empty(ceil_div(D, launch.width(choice)), G, B, L, groups * N, dtype=torch.float32)
        between = 0 if scan.law.kind == "error" else CHUNK // choice.unroll - 1
        return launch.call(
            scan_backward._backward_kernel, choice, cut, **common, **launch.saved(saved),
            adjoint_ptr=saved if adjoint is None else adjoint, dx_ptr=dx, dstep_ptr=dstep, sums_ptr=sums,
            dA_ptr=dA, dz_ptr=dz, dD_ptr=dD, dbias_ptr=dbias, dinitial_ptr=dinitial,
            scratch_ptr=grad(scan.k, *parts, between, N, D), HAS_ADJOINT=adjoint is not None,
            HAS_INITIAL=scan.initial_state is not None, V=values,
            MATRIX=launch.matrix and values in (16, 32), **_state_strides("adjoint", adjoint, cut[0] > 1),
        )  # fmt: skip

    last = call(launch.choice("backward", cut, lambda choice: call(choice).launch()))
    if cut[0] > 1:
        _launch_all(scan.x.device, [*before, last])
    else:
        last.launch()
    A_of_tokens = () if scan.A is None or not scan.A_per_token else (scan.A,)
    of_tokens = sum_blocks(last.args["sums_ptr"], scan.k, scan.q, *A_of_tokens, dkq=dkq)
    grads = dict(zip(("k", "q", "A"), of_tokens), x=dx, step=dstep, z=dz, initial_state=dinitial)
    if not scan.A_per_token and scan.A is not None:
        grads["A"] = dA.sum((1, 2)).transpose(1, 2)
    of_channels = {"D": dD, "bias": dbias}
    of_channels = {name: value for name, value in of_channels.items() if getattr(scan, name) is not None}
    if of_channels:
        grads |= zip(of_channels, sum_sequences(*of_channels.values()))
    return grads


def plan(scan: Scan) -> dict[str, Plan]:
    """How "forward" and "backward" would be run; the tensors of `scan` are not looked into."""
    launch = _Launch(scan)
    plans = {}
    for kernel in ("forward", "backward"):
        if chunks.chosen(scan):
            plans[kernel] = Plan(1, scan.sizes[2], chunks.choose(kernel, scan).channels, "chunked")
        else:
            cut = launch.cut(kernel)
            regime = "parallel" if cut[0] > 1 else "sequential"
            plans[kernel] = Plan(*cut, launch.width(launch.choice(kernel, cut)), regime)
    return plans
