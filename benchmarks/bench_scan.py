"""Times the scans, with the floor of the hardware beside each time.

    python benchmarks/bench_scan.py             # everything that this machine's GPU can run; without one, the CPU
    python benchmarks/bench_scan.py --quick     # the same in about a minute
    python benchmarks/bench_scan.py --choices   # every entry of kernels/backends/triton/tuning.py's table, to check it
    python benchmarks/bench_scan.py --once exact   # one forward and backward pass of a rule, for a profiler

Times are medians, in milliseconds, for both directions of the scan together, gated, with a skip and a bias. The rows
"as in vlonghorn" have no gate, and keys and queries of unit length. On a GPU times are of `ops.forward` and
`ops.backward` of `kernels`, replayed in a CUDA graph. The operator around them costs about half a millisecond of the
CPU's time, which would hide the kernels here, while a network in training hides it behind the GPU's work. One row times
the operator as it is called, through autograd. The replays follow one another, so inputs that fit into the GPU's L2
cache may be found there.

The floor is what no implementation on this GPU can undercut: the bytes that must move once (inputs, outputs,
gradients, and what is saved between the passes) at the bandwidth of a copy, or the arithmetic of a walk at the rate of
multiply-adds or exponentials in registers, whichever takes longest. All three rates are measured in the same run.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple, Optional
from unittest import mock

import torch

# First, since it lets a checkout do without installation.
from common import RESULTS, describe, environment, print_environment, table
from torch import Tensor
from vision_longhorn.kernels import Scan, ops
from vision_longhorn.kernels.dispatch import get_backend
from vision_longhorn.kernels.rules import NAMES, get_rule, rule_of

from vision_longhorn import kernels
from vision_longhorn.command_line.parser import Parser, run_cli
from vision_longhorn.errors import UserError

if kernels.HAS_TRITON:
    import triton
    import triton.language as tl
    from vision_longhorn.kernels.backends.triton import tuning

    TRITON = get_backend("triton")

RULES = tuple(name for name in NAMES if name != "diagonal_unit")  # an older name of "diagonal" with qk_norm
DECAYS = [name for name in RULES if get_rule(name).kind == "decay"]  # time can be cut into segments
IMAGES, SMALL_IMAGES = (128, 197, 768), (128, 197, 384)
LONG, WIDE_LONG, ONE = (8, 6085, 384), (8, 6085, 768), (1, 16384, 768)
# The other rules have no regime for few long sequences: one such shape shows what that costs.
SHAPES = {name: (IMAGES, SMALL_IMAGES, LONG, *((WIDE_LONG, ONE) if name in DECAYS else ())) for name in RULES}
QUICK_SHAPES = (SMALL_IMAGES, LONG)
SWEEP_TOKENS, SWEEP_CHANNELS = 16384, 768

# A backward pass for which nothing was saved walks forward once more, without the read-out: a multiply-add less.
READ_OUT = 1


class Rates(NamedTuple):
    """What the GPU reaches: bytes, multiply-adds and exponentials (both float32) per second."""

    bytes: float
    fma: float
    exp: float


if kernels.HAS_TRITON:

    @triton.jit
    def _arithmetic_kernel(
        out_ptr, factor, summand, steps, EXP: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr
    ):
        # Each lane has BLOCK / 128 chains that do not wait for one another, and touches memory only at its end.
        value = tl.arange(0, BLOCK).to(tl.float32)
        factors, summands = tl.zeros_like(value) + factor, tl.zeros_like(value) + summand
        for _ in range(steps):
            for _step in tl.static_range(UNROLL):
                if EXP:
                    value = tl.exp2(-value)
                else:
                    value = tl.fma(value, factors, summands)
        tl.store(out_ptr + tl.program_id(0), tl.sum(value, 0))


def measure(fn: Callable[[], object], rep: float) -> float:
    """Measure the milliseconds of `fn`, without what its launches cost the CPU."""
    torch.cuda.synchronize()
    return triton.testing.do_bench_cudagraph(fn, rep=rep, return_mode="median")


def measure_eager(fn: Callable[[], object], rep: float) -> float:
    """Measure the milliseconds of `fn` as it is called."""
    return triton.testing.do_bench(fn, rep=rep, return_mode="median")


def measure_rates(rep: float) -> Rates:
    """Measure the rates that floors are made of: a copy of float32 numbers, and arithmetic in registers."""
    size, steps = 2**28, 64
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = torch.randn(size, device=device)
    target = torch.empty_like(source)
    # A kernel and not `copy_`, which a graph turns into a transfer by the copy engine, at two thirds of the rate.
    bandwidth = 2 * source.nbytes / measure(lambda: torch.neg(source, out=target), rep) * 1e3
    block, unroll, programs = 2048, 16, 64 * tuning.multiprocessors(device)
    out = torch.empty(programs, device=device)
    count = programs * block * steps * unroll

    def rate(exp: bool) -> float:
        return (
            count
            * 1e3
            / measure(
                lambda: _arithmetic_kernel[(programs,)](
                    out, 0.999, 0.001, steps, EXP=exp, BLOCK=block, UNROLL=unroll, num_warps=4
                ),
                rep,
            )
        )

    return Rates(bandwidth, rate(False), rate(True))


def make_inputs(shape: tuple[int, int, int], N: int, rule: str, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Make random inputs, separate for each direction except z; what a network computes per token has `dtype`."""
    B, L, D = shape
    generator = torch.Generator(device).manual_seed(0)

    def draw(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=dtype, device=device)

    logits = N if get_rule(rule).step_per == "state" else D
    inputs = dict(
        x=draw(2, B, L, D),
        step=draw(2, B, L, logits),
        k=draw(2, B, L, N) / N**0.5,
        q=draw(2, B, L, N),
        z=draw(B, L, D),
        D=draw(2, D, dtype=torch.float32),
        bias=draw(2, logits, dtype=torch.float32),
    )
    if get_rule(rule).takes_A:
        inputs["A"] = -torch.arange(1.0, N + 1, device=device).expand(2, D, N).contiguous()
        inputs["bias"] -= 4  # step sizes of a few hundredths, as Mamba's are
    return inputs


def make_scan(inputs: dict[str, Tensor], rule: str, directions: int = 2) -> Scan:
    values = {name: inputs.get(name) for name in ("x", "step", "k", "q", "A", "z", "D", "bias")}
    if directions == 1:
        values = {name: value if value is None or name == "z" else value[0] for name, value in values.items()}
        return Scan(**values, initial_state=None, rule=rule)
    return Scan(**values, initial_state=None, rule=rule, direction="both", combine="mean")


def call(inputs: dict[str, Tensor], rule: str, **options) -> Tensor:
    """Call the public function: (B, L, D)."""
    return kernels.recurrent_scan(**inputs, rule=rule, direction="both", combine="mean", **options)


def through_autograd(inputs: dict[str, Tensor], rule: str, **options) -> Callable[[], object]:
    """Make a function that calls the operator and takes the gradient of every input."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}
    dy = torch.randn_like(inputs["z"])
    return lambda: torch.autograd.grad(call(leaves, rule, **options), list(leaves.values()), dy)


def floor(rates: Rates, bytes_moved: int, fma: float, exp: float) -> tuple[float, str]:
    """Return the floor in milliseconds, and the rate that sets it."""
    times = {"bytes": bytes_moved / rates.bytes, "fma": fma / rates.fma, "exp": exp / rates.exp}
    binds = max(times, key=times.get)
    return times[binds] * 1e3, binds


def failed(row: dict, error: Exception) -> dict:
    row |= dict(ms=None, error=describe(error))
    print(f"failed: {row}", file=sys.stderr)
    return row


def attempt(row: dict, fn: Callable[[], float]) -> dict:
    """Fill `row` with its time or the error, since one failure must not cost the rest of a long run."""
    try:
        row["ms"] = fn()
    except Exception as error:
        return failed(row, error)
    if row.get("floor_ms"):
        row["times_floor"] = row["ms"] / row["floor_ms"]
    return row


PASSES = ("forward", "forward, saves", "backward", "backward, nothing saved")
# What the exact rule is timed with besides: as the models call it, with one step size for all channels, and without
# chunks, as on GPUs that cannot run them.
AS_MODEL, SCALAR, WALKING = EXACT = "as in vlonghorn", "scalar beta", "walking"


def time_scan(
    rates: Rates,
    shape: tuple[int, int, int],
    N: int,
    dtype: torch.dtype,
    rule: str,
    rep: float,
    passes: tuple[str, ...] = PASSES,
    directions: int = 2,
    variant: str = "",
) -> list[dict]:
    """Make a row for each pass of one scan; `variant` is one of `EXACT`'s."""
    B, L, D = shape
    base = dict(B=B, L=L, D=D, N=N, dtype=str(dtype).removeprefix("torch."), rule=rule, variant=variant)
    try:
        inputs = make_inputs(shape, N, rule, dtype, "cuda" if torch.cuda.is_available() else "cpu")
        scan = make_scan(inputs, rule, directions)
        if variant == AS_MODEL:
            scan = scan._replace(z=None, qk_norm=True)
        if variant == SCALAR:
            scan = scan._replace(step=scan.step[..., :1].contiguous(), bias=scan.bias[..., :1].contiguous())
        if variant == WALKING:
            scan = scan._replace(regime="sequential")
        saved = ops.forward(scan, True, TRITON)[2]
        plans = {name: plan._asdict() for name, plan in kernels.scan_plan(scan, "triton").items()}
    except Exception as error:  # as in `attempt`
        return [failed(base | {"pass": "all"}, error)]
    dy, empty = torch.randn_like(inputs["z"]), saved.new_empty(0)
    runs = {
        "forward": lambda: ops.forward(scan, False, TRITON),
        "forward, saves": lambda: ops.forward(scan, True, TRITON),
        "backward": lambda: ops.backward(scan, dy, None, saved, TRITON),
        "backward, nothing saved": lambda: ops.backward(scan, dy, None, empty, TRITON),
    }
    read, written = sum(t.nbytes for t in scan.tensors().values()), dy.nbytes
    rows = []
    for name in passes:
        direction = name.split(",")[0]
        fma, exp = rule_of(scan).operations[direction]
        bytes_moved = read + written if direction == "forward" else 2 * read + written
        if name in ("forward, saves", "backward"):
            bytes_moved += saved.nbytes
        if name == "backward, nothing saved":
            again = rule_of(scan).operations["forward"]
            fma, exp = fma + again[0] - READ_OUT, exp + again[1]
        # On tensor cores there is no arithmetic of a walk.
        steps = 0 if plans[direction]["regime"] == "chunked" else directions * B * L * D * N
        floor_ms, binds = floor(rates, bytes_moved, fma * steps, exp * steps)
        row = base | {
            "pass": name,
            "floor_ms": floor_ms,
            "binds": binds,
            "bytes_moved": bytes_moved,
            "saved_MB": None,
            "saved_bytes_per_token": None,
            "plan": plans[direction],
        }
        if name in ("forward, saves", "backward"):
            row |= dict(saved_MB=saved.nbytes / 1e6, saved_bytes_per_token=saved.nbytes / (B * L))
        rows.append(attempt(row, lambda: measure(runs[name], rep)))
    return rows


def gpu_rows(rates: Rates, quick: bool, rep: float) -> Iterator[list[dict]]:
    """Time all shapes and rules, what else the exact rule has, other sizes of the state, float32, and the operator as
    it is called. Yields all rows so far after each case, since compilation takes long."""
    cases = [
        (shape, 16, torch.bfloat16, rule, variant)
        for rule in RULES
        for variant in ("", *(EXACT if rule == "exact" else ()))
        for shape in SHAPES[rule]
        if not quick or shape in QUICK_SHAPES
    ]
    if not quick:
        cases += [(SMALL_IMAGES, N, torch.bfloat16, rule, "") for rule in ("exact", "diagonal") for N in (8, 32, 64)]
        cases += [(SMALL_IMAGES, 16, torch.float32, rule, "") for rule in ("exact", "diagonal")]
    rows = []
    for shape, N, dtype, rule, variant in cases:
        rows += time_scan(rates, shape, N, dtype, rule, rep, variant=variant)
        torch.cuda.empty_cache()
        yield rows
    inputs = make_inputs(SMALL_IMAGES, 16, "diagonal", torch.bfloat16, "cuda")
    row = dict(zip("BLD", SMALL_IMAGES), N=16, dtype="bfloat16", rule="diagonal", variant="")
    row["pass"] = "operator, forward + backward"
    rows.append(attempt(row, lambda: measure_eager(through_autograd(inputs, "diagonal"), rep)))
    yield rows


def length_rows(rates: Rates, quick: bool, rep: float) -> list[dict]:
    """Time the same number of tokens in ever fewer and longer sequences."""
    lengths = (256, 2048, 16384) if quick else tuple(2**i for i in range(6, 15))
    rows = []
    for rule in RULES:
        for L in lengths:
            shape = SWEEP_TOKENS // L, L, SWEEP_CHANNELS
            rows += time_scan(rates, shape, 16, torch.bfloat16, rule, rep, ("forward", "backward"))
    return rows


@contextmanager
def forced(kernel: str, choice: "Optional[tuning.Choice]") -> Iterator[dict]:
    """Launch `kernel` with `choice` only, or if that is None by the table. Yields what was taken, by kernel."""
    from vision_longhorn.kernels import replaying
    from vision_longhorn.kernels.backends.triton import scan as triton_scan

    taken = {}

    def replace(original: Callable) -> Callable:
        def chosen(name: str, *args, **options) -> tuning.Choice:
            taken[name] = choice if name == kernel and choice is not None else original(name, *args, **options)
            return taken[name]

        return chosen

    chosen_anew = dict(choose=replace(triton_scan.choose), first_choice=replace(triton_scan.first_choice))
    # With a table of its own for what operators repeat, none repeats what it did with another choice.
    with mock.patch.multiple(triton_scan, **chosen_anew), mock.patch.object(replaying, "_known", {}):
        yield taken


def choice_rows(rep: float) -> list[dict]:
    """Time each pass with each choice of the table; kernels that only the parallel regime has, at one long sequence."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for shape in (IMAGES, SMALL_IMAGES, ONE):
        parallel = shape[0] == 1
        for rule in DECAYS if parallel else RULES:
            scan = make_scan(make_inputs(shape, 16, rule, torch.bfloat16, device), rule)
            saved, dy = ops.forward(scan, True, TRITON)[2], torch.randn_like(scan.z)
            runs = {
                "forward": lambda: ops.forward(scan, False, TRITON),
                "backward": lambda: ops.backward(scan, dy, None, saved, TRITON),
            }
            runs |= {"summary": runs["forward"], "adjoint": runs["backward"]} if parallel else {}
            for kernel, run in runs.items():
                with forced(kernel, None) as taken:
                    run()
                for choice in tuning.choices(kernel, scan):
                    row = dict(
                        zip("BLD", shape),
                        rule=rule,
                        kernel=kernel,
                        chosen=choice == taken.get(kernel),
                        **choice._asdict(),
                    )
                    with forced(kernel, choice):
                        rows.append(attempt(row, lambda: measure(run, rep)))
    best = {}
    for row in rows:
        key = tuple(row[name] for name in ("B", "L", "D", "rule", "kernel"))
        best[key] = min(best.get(key, float("inf")), row["ms"] or float("inf"))
        row["key"] = key
    for row in rows:
        row["relative"] = best[row.pop("key")] / row["ms"] if row["ms"] else None
    return rows


def once(rule: str) -> None:
    """Run a forward pass that saves and a backward pass, at the first of the shapes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scan = make_scan(make_inputs(IMAGES, 16, rule, torch.bfloat16, device), rule)
    y, _, saved = ops.forward(scan, True, TRITON)
    ops.backward(scan, torch.randn_like(y), None, saved, TRITON)


def first_use(rule: str) -> list[dict]:
    """Measure a first forward and backward pass: its seconds, and the kernels compiled for it; then of another batch
    and length, and of the parallel regime, if there is one. Run it in a process of its own with an empty cache."""
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    rows, before = [], 0
    for shape in (IMAGES, (96, 256, 768), *((ONE,) if rule in DECAYS else ())):
        scan = make_scan(make_inputs(shape, 16, rule, torch.bfloat16, "cuda"), rule)
        dy = torch.randn_like(scan.z)
        torch.cuda.synchronize()
        start = time.perf_counter()
        saved = ops.forward(scan, True, TRITON)[2]
        ops.backward(scan, dy, None, saved, TRITON)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        compiled = sum(path.suffix in (".cubin", ".hsaco") for path in cache.rglob("*"))
        rows.append(dict(zip("BLD", shape), rule=rule, seconds=seconds, kernels_compiled=compiled - before))
        before = compiled
    return rows


def first_use_rows(quick: bool) -> list[dict]:
    rows = []
    for rule in RULES[:1] if quick else ("exact", "diagonal", "mamba"):  # those of the named models
        with tempfile.TemporaryDirectory() as folder:
            try:
                run = subprocess.run(
                    [sys.executable, __file__, "--first-use", rule],
                    env=os.environ | {"TRITON_CACHE_DIR": folder},
                    text=True,
                    capture_output=True,
                    timeout=300,
                    check=True,
                )
                rows += json.loads(run.stdout.splitlines()[-1])
            except Exception as error:  # as in `attempt`; the child's last line says more than its exit status
                lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
                rows.append(failed(dict(rule=rule, seconds=None), RuntimeError(lines[-1])))
    return rows


def peer_function(candidates: tuple[tuple[str, str], ...]) -> tuple[Optional[Callable], str]:
    """Find the first (module, function) that can be imported, and say what was found."""
    status = "not installed"
    for module, function in candidates:
        try:
            found = importlib.import_module(module)
            return getattr(found, function) if function else None, "importable"
        except AttributeError:
            continue  # a namesake that has another operator
        except Exception as error:  # a build for another torch fails in its own ways
            if isinstance(error, ModuleNotFoundError) and error.name and module.startswith(error.name):
                continue
            status = f"not usable: {type(error).__name__}: {error}".splitlines()[0][:120]
    return None, status


def peer_rows(quick: bool, rep: float) -> list[dict]:
    """Time the peers that can be imported, with as much of the same work as they can do: a call for each direction, on
    copies of the inputs in their layout and order of time. So transposing, flipping and adding the two outputs are not
    counted. They are timed as they are called."""
    interface = "ops.selective_scan_interface"
    mamba = peer_function(((f"mamba_ssm.{interface}", "selective_scan_fn"),))
    longhorn = peer_function(
        (
            (f"longhorn.{interface}", "selective_scan_online7_fn"),
            (f"mamba_ssm.{interface}", "selective_scan_online7_fn"),
        )
    )
    delta = peer_function((("fla.ops.delta_rule", "chunk_delta_rule"),))
    conv = peer_function((("causal_conv1d", ""),))

    def channels_first(values: dict[str, Tensor], *names: str) -> list[Tensor]:
        return [values[name].transpose(1, 2).contiguous() for name in names]

    def mamba_call(v: dict[str, Tensor]) -> tuple[list[Tensor], Callable]:
        return (
            [
                *channels_first(v, "x", "step"),
                v["A"],
                *channels_first(v, "k", "q"),
                v["D"],
                *channels_first(v, "z"),
                v["bias"],
            ],
            lambda *leaves: mamba[0](*leaves, delta_softplus=True),
        )

    def longhorn_call(v: dict[str, Tensor]) -> tuple[list[Tensor], Callable]:
        x, q, k, step, z = channels_first(v, "x", "q", "k", "step", "z")
        return [x, q, k, step, v["D"], v["bias"], z], longhorn[0]

    def delta_call(v: dict[str, Tensor]) -> tuple[list[Tensor], Callable]:
        heads = [v[name].unsqueeze(2).contiguous() for name in ("q", "k", "x")]  # (B, L, 1, N or D)
        step = torch.sigmoid(v["step"][..., :1].float())
        step = (step / (1 + step * v["k"].float().square().sum(-1, keepdim=True))).to(v["x"].dtype)
        return [*heads, step], lambda *leaves: delta[0](*leaves, scale=1.0)[0]

    peers = (
        ("mamba_ssm", "mamba", mamba, mamba_call, ""),
        ("official Longhorn", "diagonal", longhorn, longhorn_call, ""),
        ("flash-linear-attention", "exact", delta, delta_call, "delta rule: a step a token, no gate or skip"),
    )
    rows = [{"peer": "causal_conv1d", "status": conv[1]}]
    for peer, rule, (function, status), prepare, note in peers:
        if function is None:
            rows.append({"peer": peer, "rule": rule, "status": status})
            continue
        for shape in QUICK_SHAPES if quick else SHAPES["diagonal"]:
            base = dict(zip("BLD", shape), peer=peer, rule=rule, status=status, note=note)
            try:
                inputs = make_inputs(shape, 16, rule, torch.bfloat16, "cuda")
                calls = []
                for g in range(2):
                    leaves, run = prepare({name: value if name == "z" else value[g] for name, value in inputs.items()})
                    calls.append(([leaf.detach().clone().requires_grad_() for leaf in leaves], run))
                outputs = [run(*leaves) for leaves, run in calls]
                dys = [torch.randn_like(y) for y in outputs]
            except Exception as error:  # as in `attempt`
                rows.append(failed(base | {"pass": "all"}, error))
                continue

            def forward() -> None:
                with torch.no_grad():
                    for leaves, run in calls:
                        run(*leaves)

            def backward() -> None:
                for y, dy, (leaves, _) in zip(outputs, dys, calls):
                    torch.autograd.grad(y, leaves, dy, retain_graph=True)

            rows += [
                attempt(base | {"pass": name}, lambda: measure_eager(run, rep))
                for name, run in (("forward", forward), ("backward", backward))
            ]
    return rows


def cpu_rows(quick: bool) -> list[dict]:
    """Time the default, the torch path and the plain loop under autograd, forward and backward, in float32."""
    # The demo's batch, 16 patches and the class token, twice its width of 64, its d_state of 8 and that of the rest.
    cases = [((32, 17, 128), 8), ((32, 17, 128), 16)] + ([] if quick else [((4, 197, 384), 16)])
    rows = []
    for shape, N in cases:
        for rule in RULES:
            inputs = make_inputs(shape, N, rule, torch.float32, "cpu")
            times = {
                backend: _cpu_time(through_autograd(inputs, rule, backend=backend), 0.5 if quick else 2.0)
                for backend in ("auto", "torch", "reference")
            }
            rows.append(
                dict(
                    zip("BLD", shape),
                    N=N,
                    rule=rule,
                    ms=times["auto"],
                    torch_ms=times["torch"],
                    reference_ms=times["reference"],
                    ratio=times["reference"] / times["auto"],
                )
            )
    return rows


def _cpu_time(fn: Callable[[], object], seconds: float) -> float:
    """Measure median milliseconds over at least 3 runs and about `seconds`, after one that warms up."""
    fn()
    times = []
    while len(times) < 3 or sum(times) < seconds * 1e3:
        start = time.perf_counter()
        fn()
        times.append((time.perf_counter() - start) * 1e3)
    return median(times)


SIZES = dict(B=("B", "d"), L=("L", "d"), D=("D", "d"))


def print_passes(title: str, rows: list[dict]) -> None:
    shown = []
    for row in rows:
        row = dict(variant="", plan=None) | row
        plan = row["plan"]
        words = (
            ""
            if plan is None
            else f"chunks, {plan['channels']} channels"
            if plan["regime"] == "chunked"
            else f"walk, {plan['channels']} channels"
            if plan["segments"] == 1
            else f"{plan['segments']} segments of {plan['span']}, {plan['channels']} channels"
        )
        shown.append(row | {"plan": words})
    table(title, shown, **SIZES, N=("N", "d"), dtype=("dtype", ""), rule=("rule", ""), variant=("", ""),
          **{"pass": ("pass", "")}, ms=("ms", ".3f"), floor_ms=("floor", ".3f"), binds=("binds", ""),
          times_floor=("x floor", ".1f"), saved_MB=("saved MB", ".0f"), saved_bytes_per_token=("B/token", ".0f"),
          plan=("plan", ""))  # fmt: skip


def plot(rows: list[dict], path: Path, title: str) -> None:
    """Plot time and floor over the length, forward and backward."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for axis, name in zip(axes, ("forward", "backward")):
        for i, rule in enumerate(RULES):
            points = [row for row in rows if row["pass"] == name and row["rule"] == rule and row["ms"]]
            lengths = [row["L"] for row in points]
            axis.loglog(lengths, [row["ms"] for row in points], "o-", color=f"C{i}", label=rule)
            axis.loglog(
                lengths, [row["floor_ms"] for row in points], "--", color=f"C{i}", linewidth=1, label=f"{rule}, floor"
            )
        axis.set(title=name, xlabel=f"tokens in a sequence ({SWEEP_TOKENS:,} in all)")
        axis.grid(which="both", alpha=0.3)
    axes[0].set_ylabel("ms, both directions")
    axes[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="for scan.json and scan_over_length.png; scan_cpu.json without a GPU; choices.json",
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes and shorter timings")
    parser.add_argument("--cpu", action="store_true", help="time the CPU's implementation too (without a GPU, always)")
    parser.add_argument(
        "--choices", action="store_true", help="time the entries of kernels/backends/triton/tuning.py and nothing else"
    )
    parser.add_argument(
        "--only-first-use", action="store_true", help="how long a first use takes and nothing else, to first_use.json"
    )
    parser.add_argument("--once", choices=RULES, help="run a rule once and time nothing, for a profiler")
    parser.add_argument("--rep", type=float, metavar="MS", help="length of one timing (50; with --quick 10)")
    parser.add_argument("--first-use", choices=RULES, help=argparse.SUPPRESS)  # for the process it starts itself
    args = parser.parse_args()
    if args.first_use:
        print(json.dumps(first_use(args.first_use)))
        return
    if args.once:
        once(args.once)
        return
    gpu = torch.cuda.is_available() and kernels.HAS_TRITON
    if (args.choices or args.only_first_use) and not gpu:
        raise UserError("--choices and --only-first-use time GPU kernels, and there is no GPU here")
    rep = args.rep or (10 if args.quick else 50)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / (
        "choices.json"
        if args.choices
        else "first_use.json"
        if args.only_first_use
        else "scan.json"
        if gpu
        else "scan_cpu.json"
    )
    results = {"environment": environment()}
    print_environment(results["environment"])

    def keep(name: str, value: object) -> None:
        # Called after each part, so that a run that is cut short leaves what it had.
        results[name] = value
        path.write_text(json.dumps(results, indent=1) + "\n")

    def show_first_use() -> None:
        keep("first_use", first_use_rows(args.quick))
        table(
            "first use: seconds of forward and backward, one shape after the other, from an empty cache",
            results["first_use"],
            **SIZES,
            rule=("rule", ""),
            seconds=("seconds", ".3f"),
            kernels_compiled=("kernels compiled", "d"),
        )

    if args.only_first_use:
        show_first_use()
        return
    if args.choices:
        keep("choices", choice_rows(rep))
        table(
            "choices (relative: to the fastest for the same work)",
            results["choices"],
            **SIZES,
            rule=("rule", ""),
            kernel=("kernel", ""),
            channels=("channels", "d"),
            unroll=("unroll", "d"),
            registers=("registers", "d"),
            deep=("deep", ""),
            ms=("ms", ".3f"),
            relative=("relative", ".2f"),
            speed=("speed", ".2f"),
            chosen=("chosen", ""),
        )
        return
    if gpu:
        rates = measure_rates(rep)
        keep("rates", rates._asdict())
        print(
            f"copy {rates.bytes / 1e12:.2f} TB/s, {rates.fma / 1e12:.1f} T multiply-adds/s, "
            f"{rates.exp / 1e12:.2f} T exponentials/s"
        )
        for rows in gpu_rows(rates, args.quick, rep):
            keep("scans", rows)
        print_passes("scans, both directions, gated", results["scans"])
        keep("peers", peer_rows(args.quick, rep))
        table(
            "peers, both directions",
            results["peers"],
            peer=("peer", ""),
            status=("status", ""),
            **SIZES,
            rule=("rule", ""),
            **{"pass": ("pass", "")},
            ms=("ms", ".3f"),
            note=("", ""),
        )
        keep("over_length", length_rows(rates, args.quick, rep / 2))
        print_passes(f"{SWEEP_TOKENS:,} tokens in sequences of length L", results["over_length"])
        plot(
            results["over_length"],
            args.out / "scan_over_length.png",
            f"{results['environment']['gpu']}, bfloat16, D={SWEEP_CHANNELS}, N=16, gated",
        )
        show_first_use()
    if args.cpu or not gpu:
        keep("cpu", cpu_rows(args.quick))
        table(
            f"CPU, {torch.get_num_threads()} threads, float32, forward + backward, both directions",
            results["cpu"],
            **SIZES,
            N=("N", "d"),
            rule=("rule", ""),
            ms=("ms", ".1f"),
            torch_ms=("torch path", ".1f"),
            reference_ms=("plain loop", ".1f"),
            ratio=("ratio", ".1f"),
        )
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    run_cli(main)
