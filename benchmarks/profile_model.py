"""Where the GPU's time in a training or inference step goes, by part of the model, beside what the parts should take.

    python benchmarks/profile_model.py --model vlonghorn_small --batch 256 --resolution 224
    python benchmarks/profile_model.py --model vlonghorn_small --mode eager --infer --top 20
    python benchmarks/profile_model.py --model vlonghorn_tiny --arg d_state=8 depth=6

The kernels of a few steps are summed by their names, in the order of `PARTS`. The time of a step is measured without
the profiler; the part of it that no kernel fills is idle.

The budget, for the models of this package, is what the parts would take if each did only its own work:

- scan: as many scans of the block's shape as there are blocks, timed alone as bench_scan.py times them; the backward
  pass with what the model saves for it. All kernels of a pass of the scan are counted in its row.
- matrix products: of each projection its multiply-adds at the rate of a large bf16 product, or its inputs and outputs
  at the bandwidth of a copy, whichever takes longest; the backward pass is two more of the same.
- short convolution, gated norm, and norm and residual: each tensor that they must read or write once, at the bandwidth
  of a copy. Where the compiler fuses one of them with another part, its time stands with the compiler's.
- optimizer: the parameters, gradients and both moments read and all but the gradients written, in float32.
"""

import argparse
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Optional

import bench_scan
import torch
from bench_model import COMPILE, Model, build, make_step, measure

# First, since it lets a checkout do without installation.
from common import RESULTS, environment, print_environment, table
from torch import nn

from vision_longhorn import VisionLonghorn
from vision_longhorn.command_line.parser import Parser, run_cli
from vision_longhorn.errors import UserError
from vision_longhorn.models.names import all_arguments
from vision_longhorn.settings import parse_pairs

FUSED, OTHER = "norm, residual and other fused by the compiler", "other"
# The first pattern that is found in a kernel's name decides. This package's kernels and the compiler's are recognised
# by how their names begin. The compiler names its kernels after all that they fuse ("triton_red_fused_attention_..."),
# so they come before the patterns that look anywhere in a name.
PARTS = tuple(
    (part, re.compile(pattern, re.IGNORECASE))
    for part, pattern in (
        ("scan forward", r"^_forward_kernel"),
        ("scan backward", r"^_backward_kernel"),
        ("scan, other", r"^_(norm|carry|adjoint|add|finish_rows|finish_columns)_kernel"),
        ("short convolution", r"^_((grid_)?conv.*|finish_taps)_kernel|conv_depthwise|depthwise_conv"),
        ("gated norm", r"^_gated_norm"),
        ("gated skip", r"^_skip_"),
        ("matrix products", r"^triton_tem_|^_(x|dt)_proj_"),
        (FUSED, r"^(triton|_residual_norm)_"),
        ("attention", r"flash|fmha|attention|sdpa"),
        ("matrix products", r"gemm|gemv|nvjet|cutlass|cublas|splitk|xmma"),
        ("optimizer", r"multi_tensor|adam"),
        ("norms", r"layer_?norm|rms_?norm|gammabeta"),
        ("reductions", r"reduce"),
        ("elementwise, copies and casts", r"^_pad_kernel|elementwise|copy|catarray|memcpy|memset"),
    )
)
REP = 50  # milliseconds of one timing for the budget
BF16, FLOAT32 = 2, 4  # bytes


class Kernel(NamedTuple):
    """A kernel over the profiled steps."""

    name: str
    launches: int
    ms: float


def part_of(kernel: str) -> str:
    return next((part for part, pattern in PARTS if pattern.search(kernel)), OTHER)


def profile(step: Callable[[], None], steps: int) -> list[Kernel]:
    """Record the GPU's kernels and copies in `steps` steps, longest first."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    # Annotations span kernels that are counted themselves.
    kernels = [
        Kernel(event.key, event.count, event.self_device_time_total / 1e3)
        for event in profiler.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    return sorted(kernels, key=lambda kernel: -kernel.ms)


def sum_parts(kernels: list[Kernel], steps: int, budget: dict[str, float]) -> list[dict]:
    """Make a row for each part that occurred or has a budget, per step, in the order of `PARTS`."""
    busy = sum(kernel.ms for kernel in kernels)
    rows = []
    for part in dict.fromkeys([*(part for part, _ in PARTS), OTHER]):
        members = [kernel for kernel in kernels if part_of(kernel.name) == part]
        if members or part in budget:
            ms = sum(kernel.ms for kernel in members)
            rows.append(
                dict(
                    part=part,
                    launches=sum(kernel.launches for kernel in members) / steps,
                    ms=ms / steps,
                    share=100 * ms / busy if busy else None,
                    budget_ms=budget.get(part),
                )
            )
    return rows


def matmul_rate() -> float:
    """Measure the multiplications and additions per second of a large bf16 product."""
    size = 8192
    a, b, out = torch.randn(3, size, size, device="cuda").to(torch.bfloat16)
    return 2 * size**3 / bench_scan.measure(lambda: torch.mm(a, b, out=out), REP) * 1e3


def scan_ms(model: VisionLonghorn, batch: int, rates: bench_scan.Rates, training: bool) -> dict[str, float]:
    """Measure what the scans of all blocks take alone; a pass that could not be timed is left out."""
    mixer = model.blocks[0].mixer
    if mixer.save_states and training:
        names = {"forward, saves": "scan forward", "backward": "scan backward"}
    else:
        names = {"forward": "scan forward", "backward, nothing saved": "scan backward"}
    rows = bench_scan.time_scan(
        rates,
        (batch, model.pos_embed.shape[1], mixer.d_inner),
        mixer.d_state,
        torch.bfloat16,
        mixer.rule,
        REP,
        tuple(names)[: 2 if training else 1],
        1 if mixer.wiring in ("forward", "alternate") else 2,
        bench_scan.AS_MODEL if mixer.qk_norm and mixer.gate == "none" else "",
    )
    return {names[row["pass"]]: len(model.blocks) * row["ms"] for row in rows if row["ms"] is not None}


def products_ms(blocks: nn.Module, tokens: int, flops: float, bandwidth: float, training: bool) -> float:
    """Compute what the projections of all blocks take at these rates."""
    seconds = 0.0
    for name, weight in blocks.named_parameters():
        if "_proj" in name and weight.ndim > 1:
            *stacked, outputs, inputs = weight.shape
            moved = BF16 * tokens * math.prod(stacked) * (outputs + inputs)
            seconds += max(2 * tokens * weight.numel() / flops, moved / bandwidth)
    return seconds * (3 if training else 1) * 1e3


def passes_ms(model: VisionLonghorn, tokens: int, bandwidth: float, training: bool) -> dict[str, float]:
    """Compute what the passes over memory of all blocks, and of the optimizer, take at this bandwidth."""
    mixer, dim = model.blocks[0].mixer, model.embed_dim
    D, convolved = mixer.d_inner, len(mixer.conv_weight)
    # Bytes per token, forward and backward. The convolution reads x and writes a result per set of weights; backward,
    # it reads x and the results' gradients and writes that of x. The norm reads the block's output and the residual and
    # writes the new residual and its norm; backward, it reads the gradients of both and the residual, and writes two.
    moved = {
        "short convolution": (BF16 * (1 + convolved) * D, BF16 * (2 + convolved) * D),
        FUSED: ((2 * BF16 + 2 * FLOAT32) * dim, (2 * BF16 + 3 * FLOAT32) * dim),
    }
    if mixer.wiring == "shared":
        # It reads both directions and the gate and writes one result; backward, it also reads the result's gradient,
        # and writes three gradients.
        moved["gated norm"] = BF16 * 4 * D, BF16 * 7 * D
    found = {part: tokens * len(model.blocks) * sum(both[: 2 if training else 1]) for part, both in moved.items()}
    if training:
        found["optimizer"] = 7 * FLOAT32 * sum(value.numel() for value in model.parameters())
    return {part: total / bandwidth * 1e3 for part, total in found.items()}


def make_budget(model: VisionLonghorn, batch: int, training: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Compute the milliseconds that the parts of a step should take. Also return the rates behind them."""
    rates, flops = bench_scan.measure_rates(REP), matmul_rate()
    tokens = batch * model.pos_embed.shape[1]
    budget = scan_ms(model, batch, rates, training) | passes_ms(model, tokens, rates.bytes, training)
    budget["matrix products"] = products_ms(model.blocks, tokens, flops, rates.bytes, training)
    return budget, {"bytes": rates.bytes, "matmul_flops": flops}


def parse_args(argv: Optional[list[str]]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vlonghorn_small", metavar="NAME", help="a timm model (vlonghorn_small)")
    parser.add_argument("--arg", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="its arguments")
    parser.add_argument("--batch", type=int, default=256, help="(256)")
    parser.add_argument("--resolution", type=int, default=224, help="(224)")
    parser.add_argument("--mode", choices=list(COMPILE), default="compiled", help="(compiled)")
    parser.add_argument("--infer", action="store_true", help="an inference step instead of a training step")
    parser.add_argument("--steps", type=int, default=5, help="steps that are profiled (5)")
    parser.add_argument("--top", type=int, default=0, metavar="N", help="print the N longest kernels by name")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="FOLDER", help="for profile_MODEL_BATCHxRESOLUTION_PASS.json"
    )
    args = parser.parse_args(argv)
    args.arg = parse_pairs(args.arg)
    if not (torch.cuda.is_available() and bench_scan.kernels.HAS_TRITON):
        raise UserError("this sums the times of GPU kernels and needs a GPU and triton, which are missing")
    return args


def main(argv: Optional[list[str]] = None) -> None:
    args = parse_args(argv)
    name = "infer" if args.infer else "train"
    found = environment()
    print_environment(found)
    model = build(Model(args.model, args.model, args.arg), args.resolution, "cuda")
    step = make_step(model, args.mode, not args.infer, args.batch, args.resolution)
    measured = measure(step, args.mode, args.batch, 10, 2.0)
    kernels = profile(step, args.steps)
    del step  # its images, gradients and optimizer make room for the scan alone
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    budget, rates = {}, None
    if isinstance(model, VisionLonghorn):
        budget, rates = make_budget(model, args.batch, not args.infer)
    rows = sum_parts(kernels, args.steps, budget)
    busy = sum(row["ms"] for row in rows)
    whole = dict(busy_ms=busy, step_ms=measured["ms"], idle_ms=measured["ms"] - busy)
    total = dict(
        part="all",
        launches=sum(row["launches"] for row in rows),
        ms=busy,
        budget_ms=sum(budget.values()) if budget else None,
    )
    columns = dict(launches=("launches", ".0f"), ms=("ms", ".3f"), share=("%", ".1f"))
    table(
        f"{args.model}, {args.batch} x {args.resolution} px, {name}, {args.mode}: a step",
        [*rows, total],
        part=("part", ""),
        **columns,
        **{"budget_ms": ("budget ms", ".3f")} if budget else {},
    )
    print(
        f"\nGPU busy {whole['busy_ms']:.3f} ms, step {whole['step_ms']:.3f} ms, idle {whole['idle_ms']:.3f} ms; "
        f"{measured['images_per_s']:.1f} images/s"
    )
    if rates:
        print(
            f"rates of the budget: copy {rates['bytes'] / 1e12:.2f} TB/s, "
            f"bf16 product {rates['matmul_flops'] / 1e12:.0f} TFLOP/s"
        )
    shown = [
        dict(
            name=kernel.name,
            part=part_of(kernel.name),
            launches=kernel.launches / args.steps,
            ms=kernel.ms / args.steps,
        )
        for kernel in kernels
    ]
    if args.top:
        table(
            f"the {args.top} longest kernels",
            [row | {"name": row["name"][:120]} for row in shown[: args.top]],
            launches=columns["launches"],
            ms=columns["ms"],
            part=("part", ""),
            name=("kernel", ""),
        )
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"profile_{args.model}_{args.batch}x{args.resolution}_{name}.json"
    path.write_text(json.dumps(dict(
        environment=found, model=args.model, args=all_arguments(args.model, args.arg), mode=args.mode, batch=args.batch,
        resolution=args.resolution, **{"pass": name}, **whole, measured=measured, rates=rates, parts=rows,
        kernels=shown), indent=1) + "\n")  # fmt: skip
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    run_cli(main)
