"""The scans on a GPU: the choice of one of the three regimes that docs/scan.md explains, and the launches of walks."""

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ...contract import Pair, Scan, ceil_div, power_of_2, stack, unstack
from ...rules import rule_of
from ..torch.unit import Raw
from . import chunks, scan_backward, scan_forward
from .finish import add_directions, sum_blocks, sum_sequences
from .lanes import TENSOR_CORES, takes_ptx, warp_lanes
from .launch import Launch, aligned, pointer, rows, run, strides
from .tuning import Choice, choose, first_choice, multiprocessors

CHUNK = 8  # tokens from one saved state to the next; the backward pass rebuilds what lies between
ANCHOR = 64  # the same for a rule of kind "error", which keeps what each token wrote
_LANE_STATES = 16  # the most that a lane keeps; more are spread over lanes
_LONG = 128  # a segment of so many tokens is worth its share of the first pass in any case


class Plan(NamedTuple):
    """A kernel's work: `segments` pieces of `span` tokens side by side (1: one walk through time), in programs of
    `channels` channels of one sequence and direction. `regime` is the one that is taken."""

    segments: int
    span: int
    channels: int
    regime: str


def _cut(scan: Scan, programs: int, resident: int, backward: bool) -> tuple[int, int]:
    """Return (segments, span). A walk through time makes `programs` programs, and the GPU runs `resident` at once.

    Time stays whole unless one walk fills less than a quarter of the GPU, or less than a half if it is long. Else
    segments fill it once, twice or three times with the least left over. None is shorter than 4 chunks, since each pays
    for its share of the first pass. The backward pass fills it at least twice where segments stay long: its first pass
    has more channels in a program, and would otherwise fill half of the GPU.
    """
    L = scan.sizes[2]
    one = 1, ceil_div(L, CHUNK) * CHUNK
    little = programs * (2 if L >= 1024 else 4) <= resident
    if rule_of(scan).kind == "error" or scan.regime == "sequential" or (scan.regime == "auto" and not little):
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


def _pack(value: Tensor, states: int) -> int:
    """Return how many numbers of a row of k or q one 64-bit load takes: as many as fit, if every lane's are aligned."""
    pack = 8 // value.element_size()
    whole = value.data_ptr() % 8 == 0 and all(s % pack == 0 for s in value.stride()[:3])
    return pack if whole and states % pack == 0 else 1


class _Walk(Launch):
    """The launches of a scan that walks through time."""

    def __init__(self, scan: Scan):
        super().__init__(scan)
        self.rule = rule_of(scan)
        N, x, k, q = self.sizes[4], self.args["x_ptr"], self.args["k_ptr"], self.args["q_ptr"]
        A = scan.A
        if A is not None:
            A = rows(scan, A, 3) if scan.A_per_token else stack(scan, A, 2)
        NS = min(32, power_of_2(ceil_div(N, _LANE_STATES)))
        NI = ceil_div(N, NS)
        self.lanes = warp_lanes(x.device) // NS  # these hold different channels
        self.matrix = NS == 1 and takes_ptx(x.device, TENSOR_CORES) and k.element_size() == q.element_size() == 2
        self.args |= dict(A_b=0, A_l=0, A_d=0, A_n=0, start_s=0, adjoint_s=0)
        self.args |= pointer("A", A, "gbl" if scan.A_per_token else "gdn", scan.x)
        self.args |= dict(
            scale=scan.output_scale, RULE=self.rule.kernels, SOFTPLUS=scan.softplus, A_PER_TOKEN=scan.A_per_token,
            NI=NI, NS=NS, T=ANCHOR if self.rule.kind == "error" else CHUNK, PTX=takes_ptx(x.device),
            K_PACK=_pack(k, NI if NS * NI == N else 1), Q_PACK=_pack(q, NI if NS * NI == N else 1))  # fmt: skip

    def norms(self, saved: Tensor, found: bool = False) -> None:
        """Compute ||k||^2 of each token, in the order of the scan and infinite beyond its end, if the rule takes it:
        once for all programs and passes. `saved`, if not empty, keeps them at its end; if `found`, it has them."""
        G, B, L, D, N = self.sizes
        k, count, padded = self.args["k_ptr"], _norms(self.scan), ceil_div(L, CHUNK) * CHUNK
        norm = saved[-count:] if count and saved.numel() else k.new_empty(count, dtype=torch.float32)
        if count and not found:
            scan_forward._norm_kernel[(ceil_div(padded, 128) * B, G)](
                k, norm, L, B, padded, *k.stride()[:3], FIRST_REVERSED=self.args["FIRST_REVERSED"], N=N,
                BLOCK_N=power_of_2(N), BLOCK=128, num_warps=4)  # fmt: skip
        self.args |= dict(norm_ptr=norm, padded=padded)

    def run(self, kernel: Any, choice: Choice, cut: tuple[int, int], **args: Any) -> None:
        """Launch one program for each block of channels, segment, sequence and direction."""
        G, B, L, D, N = self.sizes
        segments, span = cut
        width = self.width(choice)
        blocks = ceil_div(D, width)
        args = {**self.args, "ALIGNED": self.aligned, "BC": width, "W": self.lanes, "U": choice.unroll,
                "DEEP": choice.deep, "WHOLE": D % width == 0, "blocks": blocks, "segments": segments, "span": span,
                "num_warps": 1, "num_stages": 1, "enable_fp_fusion": True, **args}  # fmt: skip
        if choice.registers is not None and self.args["PTX"]:
            args["maxnreg"] = choice.registers
        run(kernel, (blocks * segments * B, G), args)

    def carry(self, local: Tensor, decay: Tensor, start: Optional[Tensor], reverse: bool) -> None:
        """Replace what each segment adds, `local`, by the state (or adjoint) at its start."""
        G, B, L, D, N = self.sizes
        scan_forward._carry_kernel[(ceil_div(N * D, 64), G * B)](
            local, decay, local if start is None else start, D, N * D, local.shape[2], B,
            *((0,) * 4 if start is None else start.stride()), HAS_START=start is not None, REVERSED=reverse, BLOCK=64,
            U=8, num_warps=1, num_stages=1)  # fmt: skip

    def saved(self, saved: Tensor) -> dict[str, Tensor]:
        """Return pointers for the backward pass to the saved states and, for kind "error", what each token wrote."""
        if self.rule.kind != "error" or not saved.numel():
            return dict(saved_ptr=saved, written_ptr=saved)
        G, B, L, D, N = self.sizes
        return dict(saved_ptr=saved[G * B * L * D :], written_ptr=saved)

    def width(self, choice: Choice) -> int:
        """Count a program's channels: several a lane if they can be loaded together and no lanes share a channel."""
        several = self.aligned and self.args["NS"] == 1 and self.sizes[3] % (self.lanes * choice.channels) == 0
        return self.lanes * (choice.channels if several else 1)

    def programs(self, choice: Choice) -> int:
        """Count the programs of one walk through time."""
        G, B, L, D, N = self.sizes
        return G * B * ceil_div(D, self.width(choice))

    def choice(self, kernel: str, cut: tuple[int, int]) -> Choice:
        """Choose for "forward", "backward" or "adjoint". With segments the first two take their first choice."""
        if cut[0] == 1 or kernel == "adjoint":
            return choose(kernel, self.scan, lambda choice: cut[0] * self.programs(choice))
        return first_choice(kernel, self.scan)

    def cut(self, kernel: str) -> tuple[int, int]:
        """Return (segments, span) of "forward" or "backward"."""
        choice = first_choice(kernel, self.scan)
        resident = multiprocessors(self.scan.x.device) * choice.resident
        return _cut(self.scan, self.programs(choice), resident, kernel == "backward")


def _norms(scan: Scan) -> int:
    G, B, L, _, _ = scan.sizes
    return G * B * ceil_div(L, CHUNK) * CHUNK if rule_of(scan).takes_norm else 0


def saved_shape(scan: Scan) -> tuple[int, ...]:
    """Return the shape of what `forward` saves: for rules of kind "error" what each token wrote, then states, and last,
    where the walk takes them, the squares of the keys' norms."""
    G, B, L, D, N = scan.sizes
    if chunks.chosen(scan):
        return chunks.saved_shape(scan)
    numbers = L + ceil_div(L, ANCHOR) * N if rule_of(scan).kind == "error" else ceil_div(L, CHUNK) * N
    return (G * B * D * numbers + _norms(scan),)


def forward(scan: Scan, save_states: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See `backends.torch.scan.forward`."""
    y, final, saved = _forward(scan, save_states, output=True)
    y = torch.add(y[0], y[1]) if y.ndim == 4 and scan.combine != "none" else y.view(scan.output_shape)
    return y, final.view(scan.state_shape), saved


def _forward(scan: Scan, save_states: bool, output: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Run `forward`, whose results keep a direction axis; without `output` compute only the states."""
    if chunks.chosen(scan) and scan.sizes[1]:
        return chunks.forward(Launch(scan), save_states, output)
    walk = _Walk(scan)
    G, B, L, D, N = walk.sizes
    y = scan.x.new_empty((G, B, L, D) if output else (0,))
    final = scan.x.new_empty(G, B, D, N, dtype=torch.float32)
    saved = scan.x.new_empty(saved_shape(scan) if save_states else (0,), dtype=torch.float32)
    if not B:
        return y, final, saved
    start = None if scan.initial_state is None else stack(scan, scan.initial_state, 3)
    with torch.cuda.device_of(scan.x):
        walk.norms(saved)
        common = walk.saved(saved)
        cut = walk.cut("forward")
        if cut[0] > 1:
            local, decay = scan.x.new_empty(2, G, B, cut[0], N, D, dtype=torch.float32).unbind(0)
            walk.run(
                scan_forward._forward_kernel, first_choice("summary", scan), cut, **common, y_ptr=y, start_ptr=local,
                final_ptr=local, decay_ptr=decay, HAS_START=False, OUTPUT=False, SUMMARY=True, SAVE=False,
                **strides("start", None, "gbsnd"))  # fmt: skip
            walk.carry(local, decay, start, reverse=False)
            start = local
        walk.run(
            scan_forward._forward_kernel, walk.choice("forward", cut), cut, **common, y_ptr=y, decay_ptr=final,
            start_ptr=final if start is None else start, final_ptr=final, HAS_START=start is not None, OUTPUT=output,
            SUMMARY=False, SAVE=save_states, **strides("start", start, "gbsnd" if cut[0] > 1 else "gbdn"))  # fmt: skip
    return y, final, saved


def backward(
    scan: Scan, dy: Optional[Tensor], dfinal: Optional[Tensor], saved: Tensor, dz: Optional[Tensor] = None,
    dkq: Optional[Pair] = None, raw: Optional[Raw] = None,
) -> dict[str, Tensor]:  # fmt: skip
    """See `backends.torch.scan.backward`."""
    G, B, L, D, N = scan.sizes
    like = scan.tensors()
    if scan.step_proj is not None:
        like["step"] = scan.x  # the logits' gradient, not that of their low rank
    if not B:
        return {name: torch.zeros_like(value) for name, value in like.items()}  # dz has no numbers either
    if not saved.numel():
        saved = _forward(scan, True, output=False)[2]
    if dy is None:
        dy = scan.x.new_zeros(1).expand(scan.output_shape)
    dy = dy.expand(G, B, L, D) if dy.ndim == 3 else dy
    if dy.stride(-1) != 1:
        dy = dy.contiguous()
    adjoint = dfinal if dfinal is None else dfinal.reshape(G, B, D, N)
    launch = Launch(scan) if chunks.chosen(scan) else _Walk(scan)
    launch.aligned &= aligned(dy)
    with torch.cuda.device_of(scan.x):
        if isinstance(launch, _Walk):
            grads = _walk_back(launch, dy, adjoint, saved, dkq, raw)
        else:
            grads = chunks.backward(launch, dy, adjoint, saved, dz, dkq, raw)
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
    walk: _Walk, dy: Tensor, adjoint: Optional[Tensor], saved: Tensor, dkq: Optional[Pair], raw: Optional[Raw]
) -> dict[str, Tensor]:
    """Return the gradients by field, with a direction axis. Those of k and q are `dkq`, if given, and with `raw` those
    of `raw`."""
    scan = walk.scan
    G, B, L, D, N = walk.sizes
    cut = walk.cut("backward")
    parts = G, B, cut[0]

    def grad(value: Optional[Tensor], *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return scan.x.new_empty(shape if value is not None else (0,), dtype=dtype)

    def whole(value: Optional[Tensor]) -> Tensor:
        # In float32 if it will be summed over channels; a sum of two directions needs no more than its own dtype.
        dtype = value.dtype if value is not None and value.shape[-1] == D else torch.float32
        return grad(value, G, B, L, D, dtype=dtype)

    dx, dstep, dz = whole(scan.x), whole(scan.step), whole(scan.z)
    dA = grad(None if scan.A_per_token else scan.A, *parts, N, D)
    dD, dbias = grad(scan.D, *parts, D), grad(scan.bias, *parts, D)
    dinitial = grad(scan.initial_state, G, B, D, N)
    walk.norms(saved, found=True)
    common = pointer("dy", dy, "gbl")
    if cut[0] > 1:
        local, decay = scan.x.new_empty(2, *parts, N, D, dtype=torch.float32).unbind(0)
        walk.run(
            scan_backward._adjoint_kernel, walk.choice("adjoint", cut), cut, **common, local_ptr=local, decay_ptr=decay
        )
        walk.carry(local, decay, adjoint, reverse=True)
        adjoint = local
    choice = walk.choice("backward", cut)
    # Each block of channels leaves its part of the sums over channels (k, q, a token's A).
    sums = grad(scan.k, ceil_div(D, walk.width(choice)), G, B, L, (3 if scan.A_per_token else 2) * N)
    between = 0 if walk.rule.kind == "error" else CHUNK // choice.unroll - 1
    values = power_of_2(2 * walk.args["NI"])
    walk.run(
        scan_backward._backward_kernel, choice, cut, **common, **walk.saved(saved),
        adjoint_ptr=saved if adjoint is None else adjoint, dx_ptr=dx, dstep_ptr=dstep, sums_ptr=sums, dA_ptr=dA,
        dz_ptr=dz, dD_ptr=dD, dbias_ptr=dbias, dinitial_ptr=dinitial, scratch_ptr=grad(scan.k, *parts, between, N, D),
        HAS_ADJOINT=adjoint is not None, **strides("adjoint", adjoint, "gbsnd" if cut[0] > 1 else "gbdn"),
        HAS_INITIAL=scan.initial_state is not None, V=values,
        MATRIX=walk.matrix and values in (16, 32))  # fmt: skip

    A_of_tokens = () if scan.A is None or not scan.A_per_token else (scan.A,)
    of_tokens = sum_blocks(sums, scan.k, scan.q, *A_of_tokens, dkq=dkq, raw=raw)
    grads = dict(zip(("k", "q", "A"), of_tokens), x=dx, step=dstep, z=dz, initial_state=dinitial)
    if not scan.A_per_token and scan.A is not None:
        grads["A"] = dA.sum((1, 2)).transpose(1, 2)
    of_channels = {name: value for name, value in (("D", dD), ("bias", dbias)) if getattr(scan, name) is not None}
    if of_channels:
        grads |= zip(of_channels, sum_sequences(*of_channels.values()))
    return grads


def plan(scan: Scan) -> dict[str, tuple[int, int, int, str]]:
    """See `kernels.scan_plan`. No values of the tensors of `scan` are read."""
    plans: dict[str, tuple[int, int, int, str]] = {}
    for kernel in ("forward", "backward"):
        if chunks.chosen(scan):
            plans[kernel] = Plan(1, scan.sizes[2], chunks.choose(kernel, scan).channels, "chunked")
        else:
            walk = _Walk(scan)
            cut = walk.cut(kernel)
            regime = "parallel" if cut[0] > 1 else "sequential"
            plans[kernel] = Plan(*cut, walk.width(walk.choice(kernel, cut)), regime)
    return plans
