"""Compiles every Triton kernel of the package for GPUs that need not be there, and reports what resources each takes.

    python benchmarks/compile_without_gpu.py --jobs 16                    # all targets: half an hour of one core
    python benchmarks/compile_without_gpu.py --targets cuda:75 --every    # all variants in all dtypes
    python benchmarks/compile_without_gpu.py --targets cuda:75 hip:gfx942 --only exact float16 sequential
    python benchmarks/compile_without_gpu.py --list                       # what would be compiled

The first variant of each family of kernels is compiled in each dtype, the others in bfloat16: a dtype changes only the
loads and stores, a variant what lies between them.

Triton asks its driver what to compile for, and here a stand-in answers. The package's own code picks the arguments and
options of each launch, for tensors that have shapes but no memory. A launch compiles instead of running, so this is the
code that such a GPU would run. It may still give wrong results, or be slow.

Registers are those of a lane. Spills are the bytes of a lane's stack that hold what did not fit in registers. If a
kernel does not compile or takes more than its target has, a line names it, and the exit status is 1.

To add a target, write it into TARGETS. To add a kernel, write a function that launches it and put that into FAMILIES.
An H100 runs all kernels: if it is among the targets, `--list` and a run without `--only` name those that nothing here
launches.
"""

import argparse
import importlib
import itertools
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Optional

import torch

# First, since it lets a checkout do without installation.
from common import environment, print_environment, table
from vision_longhorn.kernels import Scan
from vision_longhorn.kernels.rules import NAMES, Rule, get_rule

from vision_longhorn import kernels
from vision_longhorn.command_line.parser import Parser, run_cli
from vision_longhorn.errors import UserError

if not kernels.HAS_TRITON:
    sys.exit("triton is not installed, and it is what compiles the kernels")

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class Target(NamedTuple):
    """A GPU to compile for, and the most that a lane and a program may take of it."""

    gpu: GPUTarget
    registers: int
    shared: int  # KiB
    examples: str


def _nvidia(capability: int, shared: int, examples: str) -> Target:
    return Target(GPUTarget("cuda", capability, 32), 255, shared, examples)


def _amd(arch: str, lanes: int, registers: int, examples: str) -> Target:
    return Target(GPUTarget("hip", arch, lanes), registers, 64, examples)


TARGETS = {
    "cuda:75": _nvidia(75, 64, "T4, RTX 2080"),
    "cuda:80": _nvidia(80, 163, "A100"),
    "cuda:86": _nvidia(86, 99, "A10, RTX 3090"),
    "cuda:89": _nvidia(89, 99, "L4, RTX 4090"),
    "cuda:90": _nvidia(90, 227, "H100, H200"),
    "cuda:100": _nvidia(100, 227, "B200"),
    "cuda:120": _nvidia(120, 99, "RTX 5090"),
    "hip:gfx90a": _amd("gfx90a", 64, 512, "MI210, MI250"),
    "hip:gfx942": _amd("gfx942", 64, 512, "MI300"),
    "hip:gfx1100": _amd("gfx1100", 32, 256, "RX 7900"),
}
DTYPES = ("bfloat16", "float16", "float32")
BATCH, TOKENS, CHANNELS = 2, 197, 384


def _tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# How a scan differs from a gated walk with 16 states, a step size for each channel, and averaged results.
SCANS = {
    "sequential": {},
    "parallel": dict(tokens=6085, regime="parallel"),
    "scalar_step": dict(step=1, gate=False, combine="none"),  # as in the "shared" wiring, with a scalar beta
    "states_32": dict(states=32),
    "A_per_token": dict(A_per_token=True),
    "chunked": dict(regime="chunked", channels=768, batch=128),  # of many sequences
    "chunked_few": dict(regime="chunked", batch=1),
    "chunked_fewest": dict(regime="chunked", batch=1, channels=96),
    "chunked_scalar": dict(regime="chunked", channels=768, batch=128, step=1),
    "chunked_32": dict(regime="chunked", channels=768, batch=128, states=32),
    # Logits at low rank, as in the tiny and small models, and where there is little to do.
    "chunked_rank_16": dict(regime="chunked", channels=384, batch=128, rank=16),
    "chunked_rank_24": dict(regime="chunked", channels=768, batch=128, rank=24),
    "chunked_rank_few": dict(regime="chunked", batch=1, rank=16),
    # As with gate="none" in vlonghorn_tiny, and where there is little to do.
    "chunked_no_gate": dict(regime="chunked", channels=192, batch=128, rank=16, gate=False),
    "chunked_no_gate_few": dict(regime="chunked", channels=192, batch=1, rank=16, gate=False),
}


def compile_scan(rule: str, dtype: torch.dtype, variant: str) -> None:
    """Compile both passes: with states kept, without them (inference), and with states computed again."""
    from vision_longhorn.kernels.backends.triton import chunks as triton_chunks
    from vision_longhorn.kernels.backends.triton import scan as triton_scan

    given = dict(tokens=TOKENS, regime="sequential", batch=BATCH, channels=CHANNELS, states=16, gate=True,
                 combine="mean", A_per_token=False) | SCANS[variant]  # fmt: skip
    B, L, D, N = given["batch"], given["tokens"], given["channels"], given["states"]
    steps, rank = given.get("step", D), given.get("rank")

    def both(*shape: int) -> torch.Tensor:
        return _tensor(2, *shape, dtype=dtype)

    law = get_rule(rule)
    A = None if not law.takes_A else both(B, L, N) if given["A_per_token"] else _tensor(2, D, N)
    if law.step_per == "state":
        steps = N
    z = _tensor(B, L, D, dtype=dtype) if given["gate"] else None
    scan = law.prepare(Scan(
        both(B, L, D), both(B, L, rank or steps), both(B, L, N), both(B, L, N), A, z, _tensor(2, D), _tensor(2, steps),
        None, rule, "both", given["combine"], A_per_token=given["A_per_token"], regime=given["regime"],
        step_proj=both(D, rank) if rank else None))  # fmt: skip
    if given["regime"] == "chunked" and triton_chunks.obstacle(scan):
        return  # another regime takes this dtype, or this GPU
    saved = triton_scan.forward(scan, True)[2]
    dy, dz = _tensor(*scan.output_shape, dtype=dtype), None if z is None else torch.empty_like(z)
    triton_scan.backward(scan, dy, None, saved, dz)
    if variant in ("sequential", "parallel", "chunked", "chunked_few"):
        triton_scan.forward(scan, False)
        triton_scan.backward(scan, dy, None, saved[:0], dz)


def compile_conv(_: str, dtype: torch.dtype, variant: str) -> None:
    from vision_longhorn.kernels.backends.triton import conv as triton_conv

    G, reversed = 2 if variant == "both_directions" else 1, variant == "reversed"
    x, weight, bias = _tensor(BATCH, TOKENS, CHANNELS, dtype=dtype), _tensor(G, CHANNELS, 4), _tensor(G, CHANNELS)
    y = triton_conv.forward(x, weight, bias, reversed)
    triton_conv.backward(y, x, weight, bias, torch.empty_like(x), reversed)


def compile_gelu(_: str, dtype: torch.dtype, variant: str) -> None:
    from vision_longhorn.kernels.backends.triton import gelu

    x, bias = _tensor(BATCH * TOKENS, 4 * CHANNELS, dtype=dtype), _tensor(4 * CHANNELS)
    gelu.backward(gelu.forward(x, bias), x, bias)


def compile_norm_silu(_: str, dtype: torch.dtype, variant: str) -> None:
    from vision_longhorn.kernels.backends.triton import norm_silu

    x = _tensor(BATCH * TOKENS, CHANNELS // 4, dtype=dtype)
    vectors = [_tensor(CHANNELS // 4) for _ in range(3)]
    norm_silu.backward(norm_silu.forward(x, *vectors, 1e-5), x, *vectors, 1e-5)


def compile_residual_norm(_: str, dtype: torch.dtype, variant: str) -> None:
    from vision_longhorn.kernels.backends.triton import residual_norm

    x, rows = _tensor(BATCH, TOKENS - 1, CHANNELS, dtype=dtype), 14 if variant == "turned" else 0
    weight = _tensor(CHANNELS)
    residual_norm.backward(x, x, x, weight, x, weight, 1e-5, rows)


def compile_grid_conv(_: str, dtype: torch.dtype, variant: str) -> None:
    from vision_longhorn.kernels.backends.triton import grid_conv

    K = int(variant[-1])
    x = _tensor(BATCH, TOKENS - 1, 2 * CHANNELS, dtype=dtype).chunk(2, -1)[0]
    weight, bias = _tensor(1, CHANNELS, K, K), _tensor(1, CHANNELS)
    grid_conv.backward(grid_conv.forward(x, weight, bias, 14), x, weight, bias, x, 14)


def compile_norm(_: str, dtype: torch.dtype, variant: str) -> None:
    from vision_longhorn.kernels.backends.triton import norm as triton_norm

    z, weight = _tensor(BATCH, TOKENS, CHANNELS, dtype=dtype), _tensor(2, CHANNELS)
    o = _tensor(2, *z.shape, dtype=dtype)
    y = triton_norm.forward(o, z, weight, 1e-5)
    triton_norm.backward(y, o, z, weight, 1e-5, torch.empty_like(z))


def compile_skip(_: str, dtype: torch.dtype, variant: str) -> None:
    from vision_longhorn.kernels.backends.triton import skip

    z, sets = _tensor(BATCH, TOKENS, CHANNELS, dtype=dtype), 1 + (variant == "both_directions")
    x, weight = _tensor(sets, *z.shape, dtype=dtype), _tensor(sets, CHANNELS)
    skip.forward(torch.empty_like(z), x, z, weight)
    skip.backward(z, x, z, weight, torch.empty_like(x), torch.empty_like(z))


def compile_values(_: str, dtype: torch.dtype, variant: str) -> None:
    from vision_longhorn.kernels.backends.triton import values

    z, scans = _tensor(BATCH, TOKENS, CHANNELS, dtype=dtype), 1 + (variant == "both_directions")
    values.backward(_tensor(scans, *z.shape, dtype=dtype), z, values.forward(z))


def compile_augment(_: str, dtype: torch.dtype, variant: str) -> None:
    from vision_longhorn.data import fused
    from vision_longhorn.data.operations import INDICES

    images, colours = _tensor(BATCH, 3, 32, 32, dtype=torch.uint8), _tensor(3, 1, 1, dtype=torch.float32)
    rows = _tensor(BATCH, 8, dtype=torch.float32)
    fused.operate(images, [[n, INDICES["Equalize"]] for n in range(BATCH)], rows, 0, colours)
    normalized = fused.normalize(images, colours, colours)
    for side in 32, 1:
        fused.erase(normalized, rows, 0, _tensor(BATCH, 3, side, side, dtype=torch.float32))


def compile_resize(_: str, dtype: torch.dtype, variant: str) -> None:
    from vision_longhorn.data.resize import resize

    resize(_tensor(BATCH * 48 * 40 * 3, dtype=torch.uint8), _tensor(BATCH, 7, dtype=torch.int64), 48, (32, 32))


def compile_unit(_: str, dtype: torch.dtype, variant: str) -> None:
    from vision_longhorn.kernels.backends.torch.rope import Turned
    from vision_longhorn.kernels.backends.triton import unit as triton_unit

    k, q = _tensor(2, BATCH, TOKENS, 2 * 16, dtype=dtype).chunk(2, -1)
    turned = Turned(TOKENS, 1, 0, 16) if variant == "turned" else None
    triton_unit.backward(k, q, *triton_unit.forward(k, q), turned)
    triton_unit.backward(k, q, k, q, turned, _tensor(3, *k.shape[:-1], 2 * 16))


def compile_rope(_: str, dtype: torch.dtype, variant: str) -> None:
    from vision_longhorn.kernels.backends.triton import rope

    rope.rotate(_tensor(2, BATCH, TOKENS, 2 * 16, dtype=dtype), 1)


def compile_padding(_: str, dtype: torch.dtype, variant: str) -> None:
    from vision_longhorn.kernels.backends.triton import projections

    x_proj, dt_proj = _tensor(2, 12 + 2 * 16, CHANNELS), _tensor(2, CHANNELS, 12)
    padded = projections.pad(x_proj, dt_proj, 16, dtype)
    projections.unpad(*(wide.float()[:, None].expand(-1, 40, -1, -1) for wide in padded), x_proj, dt_proj)


def compile_projections(_: str, dtype: torch.dtype, variant: str) -> None:
    from vision_longhorn.kernels.backends.torch.rope import Turned
    from vision_longhorn.kernels.backends.triton import projections

    size, *one = variant.split("_")
    D, R = {"base": (1536, 48), "small": (768, 24), "tiny": (384, 16), "narrow": (192, 16)}[size]
    M = R + 2 * 16
    dx, dlow = _tensor(2, BATCH * TOKENS, D, dtype=dtype), _tensor(2, BATCH * TOKENS, M, dtype=dtype)
    x_proj = _tensor(2, M, D, dtype=dtype)
    # What stands over the grid has one x for both sets, and may have keys that turn.
    x, turned = (dx[:1], Turned(TOKENS, 1, R, 16)) if one else (dx, None)
    if dtype != torch.float32:  # which torch multiplies
        projections.dt_proj_backward(dx, dlow, _tensor(2, D, R, dtype=dtype), torch.empty_like(dlow))
        projections.x_proj_backward(dlow, x, x_proj, dx)
        projections.x_proj_backward(dlow, x, x_proj, x, False)
        for units in (0, 16):
            projections.x_proj_forward(x, x_proj, turned, units)


def scan_variants(rule: Rule) -> tuple[str, ...]:
    return (
        "sequential",
        *(("parallel",) if rule.kind == "decay" else ()),
        *(("scalar_step",) if rule.step_per == "channel" else ()),
        "states_32",
        *(("A_per_token",) if rule.takes_A else ()),
        *((name for name in SCANS if name.startswith("chunked")) if rule.name == "exact" else ()),
    )


# The function that launches a family of kernels, and its variants.
FAMILIES: dict[str, tuple[Callable[[str, torch.dtype, str], None], tuple[str, ...]]] = {
    **{name: (compile_scan, scan_variants(get_rule(name))) for name in NAMES},
    "augment": (compile_augment, ("one_direction",)),
    "conv": (compile_conv, ("one_direction", "reversed", "both_directions")),
    "gelu": (compile_gelu, ("one_direction",)),
    "grid_conv": (compile_grid_conv, ("size_3", "size_5", "size_7")),
    "norm": (compile_norm, ("both_directions",)),
    "norm_silu": (compile_norm_silu, ("one_direction",)),
    "padding": (compile_padding, ("both_directions",)),
    "projections": (compile_projections, ("small", "small_grid", "tiny_grid", "base_grid", "narrow_grid")),
    "residual_norm": (compile_residual_norm, ("one_direction", "turned")),
    "resize": (compile_resize, ("bicubic",)),
    "rope": (compile_rope, ("both_directions",)),
    "skip": (compile_skip, ("one_direction", "both_directions")),
    "unit": (compile_unit, ("both_directions", "turned")),
    "values": (compile_values, ("one_direction", "both_directions")),
}
VARIANTS = tuple(dict.fromkeys(variant for _, variants in FAMILIES.values() for variant in variants))
# Constants that make another kernel of one: a row of the table names those that are set.
NAMED = ("SUMMARY", "OUTPUT", "SAVE", "MATRIX", "MEET", "IN_TURN", "OTHER", "SCALAR", "GRAD", "BACK", "UNITS", "PARTS")


class _Driver:
    """The part of Triton's driver that compiling needs."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Optional[int] = None) -> int:
        return 0


def stand_in(target: GPUTarget, launch: Callable) -> None:
    """Make the package believe, for the rest of this process, that it is on a GPU of this kind. Each launch becomes a
    call of `launch(compile, kernel, options)`, where `compile()` returns what Triton compiled."""
    from vision_longhorn.kernels.backends.triton import lanes, tuning

    choices, run = tuning.choices, JITFunction.run
    triton.runtime.driver.set_active(_Driver(target))
    lanes.target_of = lambda device: target
    # What is launched must not depend on how the shapes here would fill the GPU.
    tuning.choices = lambda kernel, scan: choices(kernel, scan)[:1]

    def launched(self: JITFunction, *args, grid, warmup: bool, **options):
        launch(lambda: run(self, *args, grid=grid, warmup=True, **options), self.fn.__name__, options)

    JITFunction.run = launched


def launchable() -> set[str]:
    """Find the names of the package's kernels that are launched, not called by others: they end in _kernel."""
    found = set()
    modules = [module.name for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    for name in (*modules, "vision_longhorn.data.fused", "vision_longhorn.data.resize"):
        values = [getattr(value, "jitted", value) for value in vars(importlib.import_module(name)).values()]
        found |= {value.fn.__name__ for value in values if isinstance(value, JITFunction)}
    return {name for name in found if name.endswith("_kernel")}


def resources(compiled) -> tuple[int, int, int]:
    """Read (registers of a lane, bytes of its stack, bytes of a program's shared memory) from a compiled kernel."""
    if "cubin" in compiled.asm:
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            text = subprocess.run(
                [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        patterns = r"\bREG:(\d+)", r"\bSTACK:(\d+)", r"\bSHARED:(\d+)"  # what the kernel's own PTX reserves
    else:
        text = compiled.asm["amdgcn"]
        patterns = r"\.vgpr_count:\s*(\d+)", r"\.private_segment_fixed_size:\s*(\d+)", r"$()"
    registers, stack, shared = (int(re.search(pattern, text)[1] or 0) for pattern in patterns)
    return registers, stack, shared + compiled.metadata.shared


def reason(text: str) -> str:
    """Find the most telling line of a compiler's message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    told = next((line for line in lines if re.search(r"\berror\s*:", line)), lines[-1])
    return re.sub(r"^.*?\berror\s*:\s*", "", told)[:200]


def too_much(row: dict, target: Target) -> Optional[str]:
    """Say what a compiled kernel takes too much of, if anything."""
    if row["registers"] > target.registers:
        return f"takes {row['registers']} registers of {target.registers}"
    if row["shared"] > target.shared * 1024:
        return f"takes {row['shared']} bytes of shared memory of {target.shared} KiB"
    return None


def run_cases(
    target: GPUTarget,
    cases: list[tuple[str, str, str]],
    note: Callable[[int, Optional[dict]], None],
    compiling: bool = True,
) -> None:
    """Compile `cases` in this process, which cannot be used for anything else afterwards.

    When a launch begins, `note` gets a number and a row with an error, in case the compiler ends the process. When it
    ends, `note` gets the number and the final row, or None if the same was compiled, or failed, before.
    """
    seen = set()
    numbers = itertools.count()

    def launch(compile: Callable, kernel: str, options: dict) -> None:
        number = next(numbers)
        form = {name: getattr(options["form"], name, None) for name in NAMED} if "form" in options else {}
        named = [name for name in NAMED if getattr(form.get(name), "value", options.get(name))]
        row = dict(zip(("family", "dtype", "variant"), case), kernel=kernel + (f"[{','.join(named)}]" if named else ""))
        if not compiling:
            note(number, row)
            return
        note(number, row | dict(error="the compiler ended the process"))
        start = time.perf_counter()
        try:
            compiled = compile()
            row["seconds"] = round(time.perf_counter() - start, 2)
            row["registers"], row["spills"], row["shared"] = resources(compiled)
            same = compiled.hash
        except Exception as error:  # compilers raise what they like; the other kernels still have their turn
            row["error"] = reason(str(error))
            same = tuple(row.values())
        note(number, None if same in seen else row)
        seen.add(same)

    stand_in(target, launch)
    for case in cases:
        family, dtype, variant = case
        FAMILIES[family][0](family, getattr(torch, dtype), variant)


def worker(target: str, folder: Path) -> None:
    """Compile the cases in `folder`/cases, and write each note of `run_cases` to `folder`/notes as a line."""
    with (folder / "notes").open("w") as file:

        def note(*entry) -> None:
            file.write(json.dumps(entry) + "\n")
            file.flush()

        run_cases(TARGETS[target].gpu, json.loads((folder / "cases").read_text()), note)


def compile_apart(target: str, cases: list[tuple[str, str, str]]) -> list[dict]:
    """Compile `cases` in a process of their own, so that stand-ins and crashes stay there, and return their rows. Its
    empty cache makes it compile everything."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cases").write_text(json.dumps(cases))
        settings = os.environ | {"TRITON_CACHE_DIR": name, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        # Triton prints whole programs that fail to assemble.
        run = subprocess.run(
            [sys.executable, __file__, "--worker", name, "--targets", target],
            env=settings,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        notes = folder / "notes"
        rows = dict(map(json.loads, notes.read_text().splitlines())) if notes.exists() else {}
    rows = [row for row in rows.values() if row is not None]
    if run.returncode and not any("error" in row for row in rows):
        rows.append(dict(family=cases[0][0], dtype="", variant="", kernel="launches", error=reason(run.stderr)))
    return [dict(target=target, **row) for row in rows]


def selected(only: list[str], every: bool) -> dict[str, list[tuple[str, str, str]]]:
    """Choose the cases (family, dtype, variant) of each family, by the families, dtypes and variants in `only`. If it
    names no dtype, only the first variant gets all of them, unless `every`."""

    def allowed(word: str, words: tuple[str, ...]) -> bool:
        return word in only or not set(only) & set(words)

    cases = {}
    for family, (_, variants) in FAMILIES.items():
        found = [
            (family, dtype, variant)
            for dtype in DTYPES
            for variant in variants
            if allowed(family, tuple(FAMILIES))
            and allowed(dtype, DTYPES)
            and allowed(variant, VARIANTS)
            and (every or dtype in only or dtype == DTYPES[0] or variant == variants[0])
        ]
        if found:
            cases[family] = found
    return cases


def show(name: str, rows: list[dict]) -> None:
    target = TARGETS[name]
    rows = [row | {"limits": f"{target.registers}, {target.shared} KiB"} for row in rows]
    table(
        f"{name} ({target.examples})",
        rows,
        family=("", "s"),
        dtype=("", "s"),
        variant=("", "s"),
        kernel=("", "s"),
        seconds=("seconds", ".1f"),
        registers=("registers", "d"),
        spills=("spilled B", "d"),
        shared=("shared B", "d"),
        limits=("registers and shared at most", "s"),
    )


def parse_args(argv: Optional[list[str]]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--targets",
        nargs="+",
        choices=list(TARGETS),
        default=list(TARGETS),
        metavar="TARGET",
        help=f"({' '.join(TARGETS)})",
    )
    words = [*FAMILIES, *DTYPES, *VARIANTS]
    parser.add_argument("--only", nargs="+", choices=words, default=[], metavar="WORD", help=f"({' '.join(words)})")
    parser.add_argument("--every", action="store_true", help="compile all variants in all dtypes")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side (1)")
    parser.add_argument(
        "--list",
        action="store_true",
        help="print what would be launched on an H100, if that is a target, else on the first",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for compile_without_gpu.json")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # for the processes it starts itself
    args = parser.parse_args(argv)
    args.cases = selected(args.only, args.every)
    if not args.cases:
        raise UserError(f"no kernels match all of {' '.join(args.only)}")
    return args


def main(argv: Optional[list[str]] = None) -> int:
    args = parse_args(argv)
    if args.worker:
        worker(args.targets[0], args.worker)
        return 0
    whole = not args.only and "cuda:90" in args.targets
    if args.list:
        launches = []
        run_cases(
            TARGETS["cuda:90" if "cuda:90" in args.targets else args.targets[0]].gpu,
            sum(args.cases.values(), []),
            lambda number, row: launches.append(row),
            compiling=False,
        )
        for line in dict.fromkeys(" ".join(row.values()) for row in launches):
            print(line)
        return report(launches, [], whole)

    found = environment()
    print_environment(found)
    start = time.perf_counter()
    results = dict(environment=found, targets={}, kernels=[])
    rows = results["kernels"]
    with ThreadPoolExecutor(args.jobs) as pool:
        pending = {
            target: [pool.submit(compile_apart, target, cases) for cases in args.cases.values()]
            for target in args.targets
        }
        for name, done in pending.items():
            target = TARGETS[name]
            of_target = [row for rows_of_family in done for row in rows_of_family.result()]
            for row in of_target:
                excess = None if "error" in row else too_much(row, target)
                if excess:
                    row["error"] = excess
            show(name, of_target)
            rows += of_target
            results["targets"][name] = dict(
                examples=target.examples, registers=target.registers, shared_KiB=target.shared
            )
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / "compile_without_gpu.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{len(rows)} kernels in {time.perf_counter() - start:.0f} s")
    return report(rows, [row for row in rows if "error" in row], whole)


def report(rows: list[dict], failed: list[dict], whole: bool) -> int:
    """Name what failed and, after a whole run, the kernels that nothing launched. Returns the exit status."""
    for row in failed:
        print(f"FAILED {row['target']} {row['family']} {row['dtype']} {row['variant']} {row['kernel']}: {row['error']}")
    missing = launchable() - {row["kernel"].partition("[")[0] for row in rows} if whole else set()
    for name in sorted(missing):
        print(f"FAILED {name}: nothing here launches it")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # or there would be nothing to compile
    run_cli(lambda: sys.exit(main()))
