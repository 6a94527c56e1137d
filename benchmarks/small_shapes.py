"""Runs every kernel once at small, awkward sizes, for a memory checker. It needs a GPU.

compute-sanitizer --tool memcheck python benchmarks/small_shapes.py
compute-sanitizer --tool racecheck python benchmarks/small_shapes.py exact    # of these rules only

Run it once without the checker before: compilation takes long under it.
"""

import argparse
from unittest import mock

import bench_scan  # first, since it lets a checkout do without installation
import torch
from vision_longhorn.kernels.backends.torch import rope
from vision_longhorn.kernels.backends.triton import chunks, projections
from vision_longhorn.kernels.rules import NAMES, get_rule

from vision_longhorn.command_line.parser import Parser, run_cli
from vision_longhorn.errors import UserError
from vision_longhorn.models.mixers import BidirectionalMixer


def no_multiprocessors(device: torch.device) -> int:
    """Return a number with which small sizes seem to fill the GPU."""
    return 0


def run(rule: str, shape: tuple[int, int, int], N: int, regime: str) -> None:
    inputs = bench_scan.make_inputs(shape, N, rule, torch.bfloat16, "cuda")
    leaves = [value.requires_grad_() for value in inputs.values()]
    y = bench_scan.call(inputs, rule, regime=regime, backend="triton")
    y.float().square().mean().backward()
    torch.cuda.synchronize()
    assert all(value.grad.isfinite().all() for value in leaves)
    print(rule, (*shape, N), regime, "ran")


def scans(rules: list[str]) -> None:
    for rule in rules:
        for B, L, D, N in ((2, 37, 70, 16), (1, 101, 64, 5), (1, 70, 33, 33)):
            regimes = ("sequential", "parallel") if get_rule(rule).kind == "decay" else ("sequential",)
            for regime in (*regimes, "chunked") if rule == "exact" and N in chunks.STATES else regimes:
                run(rule, (B, L, D), N, regime)
    if "exact" not in rules:
        return
    # The path for many programs, which small sizes do not give.
    with mock.patch.object(chunks, "multiprocessors", no_multiprocessors):
        run("exact", (2, 35, 128), 16, "chunked")


def mixers(rules: list[str]) -> None:
    """Run short convolution, projections, gated norm and the sum of two directions, around the scans."""
    for B, L, dim in ((2, 37, 40), (1, 5, 24), (1, 70, 64)):  # the last has whole blocks of channels
        wirings = dict(wiring="shared"), *(dict(wiring="alternate", index=i) for i in range(2))
        grids = dict(conv="grid"), dict(conv="grid", d_conv=5, wiring="alternate")
        units = dict(conv="grid", rope=True, qk_norm=True, rule="exact")
        for arguments in (dict(), *wirings, *grids, units, *(dict(rule=rule) for rule in rules)):
            mixer = BidirectionalMixer(dim, d_state=8, **arguments).cuda()
            x = torch.randn(B, L, dim, device="cuda", requires_grad=True)
            with torch.autocast("cuda", torch.bfloat16):
                y = mixer(x, 5 if L % 5 == 0 else 1)
            y.float().square().mean().backward()
            torch.cuda.synchronize()
            assert all(value.grad.isfinite().all() for value in (x, *mixer.parameters()))
            print("mixer", (B, L, dim), arguments, "ran")
    # As in a long batch, in which each program has several tiles.
    with mock.patch.object(projections, "multiprocessors", no_multiprocessors):
        low, dlow, x, dx = (torch.randn(2, 300, size, device="cuda").bfloat16() for size in (56, 56, 256, 256))
        x_proj = torch.randn(2, 56, 256, device="cuda").bfloat16()
        for sets, turned in ((2, None), (1, rope.Turned(100, 10, 24, 16))):
            projections.x_proj_forward(x[:sets], x_proj, turned, units=16)
            projections.x_proj_backward(dlow, x[:sets], x_proj, dx)
        projections.dt_proj_backward(x, low, torch.randn(2, 256, 24, device="cuda").bfloat16(), dlow)
        torch.cuda.synchronize()
        assert dx.isfinite().all() and dlow.isfinite().all()
        print("projections ran")


def known(rule: str) -> str:
    if rule not in NAMES:
        raise argparse.ArgumentTypeError(f"{rule!r} is not known: give one of {', '.join(NAMES)}")
    return rule


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", nargs="*", type=known, metavar="RULE", help=f"{', '.join(NAMES)} [all]")
    chosen = parser.parse_args().rules or list(NAMES)
    if not torch.cuda.is_available():
        raise UserError("this runs the kernels of GPUs, and there is no GPU here")
    torch.manual_seed(0)
    scans(chosen)
    mixers(chosen)


if __name__ == "__main__":
    run_cli(main)
