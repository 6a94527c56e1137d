"""Times whole models: images per second of training and inference, and peak memory, over resolution and batch.

    python benchmarks/bench_model.py    # what docs/results.md shows beside DeiT and as in the study, and README's plot
    python benchmarks/bench_model.py --merge OUT/model_documented.json --budget 300    # and what is missing
    python benchmarks/bench_model.py --models vlonghorn_tiny vlonghorn_tiny,gate=output resnet50,img_size=none \\
        --sizes 64x224 --modes eager
    python benchmarks/bench_model.py --models vim_small --official ../Vim    # hustvl's ViM beside ours

Any name of timm will do. Images are random, float32 and on the device; labels are random. On a GPU the forward pass
runs under bf16 autocast, on a CPU in float32. A training step is the trainer's: forward, cross entropy, backward, norm
of the gradient, and AdamW, or what `opt` names in the place of an argument, as in vlonghorn_small,opt=muon; without
drop path. An inference step is a forward pass in eval mode. Modes are "eager", "compiled" (torch.compile) and "graphs"
(torch.compile with mode="reduce-overhead").

Each measurement warms up, then times three blocks of steps and takes their median. Memory is the peak of what PyTorch
had allocated in these blocks, model, optimizer and images included; with "graphs" it is what PyTorch had reserved,
since the replay of a graph allocates nothing. What the first step takes, compilation included, is a figure of its own
(a warm cache of the compiler on disk makes it smaller).
"""

import argparse
import gc
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple, Optional

import timm
import torch
import torch.nn.functional as F

# First, since it lets a checkout do without installation.
from common import OF_CONFIGS, RESULTS, describe, environment, print_environment, table
from torch import Tensor, nn

import vision_longhorn  # noqa: F401  (registers the models)
from vision_longhorn.command_line.parser import Parser, run_cli
from vision_longhorn.devices import make_accelerator
from vision_longhorn.errors import UserError
from vision_longhorn.models.names import RENAMED, all_arguments
from vision_longhorn.settings import parse_pairs
from vision_longhorn.training.config import Config
from vision_longhorn.training.setup import build_optimizer
from vision_longhorn.training.step import TrainStep

OFFICIAL = {
    size: f"vim_{size}_patch16_224_bimambav2_final_pool_mean_abs_pos_embed_with_midclstok_div2"
    for size in ("tiny", "small")
}
SIZES = [(256, 224), (8, 1248)]
PASSES = ("train", "infer")
# What docs/results.md shows, by batch, resolution and passes. Ours have the arguments that their configs set.
_SMALL = ["deit_small_patch16_224", "vlonghorn_small", "vlonghorn_small_fast", "vim_small,residual_in_fp32=true"]
_FURTHER = ["vim_small_best", "vlonghorn_small,residual_in_fp32=true", "vlonghorn_small,save_states=false",
            "vlonghorn_small_fast,save_states=false"]  # fmt: skip
_TINY, _BASE = (
    [f"deit_{size}_patch16_224", f"vlonghorn_{size}", f"vlonghorn_{size}_fast"] for size in ("tiny", "base")
)
_STUDY = ("vlonghorn_tiny", "vlonghorn_tiny_fast", "vim_tiny_best,mlp_conv=0", "vim_tiny_best", "vit_tiny_patch16_224")
DOCUMENTED = [
    ((256, 224), PASSES, _SMALL),
    ((8, 1248), PASSES, _SMALL),
    ((256, 224), PASSES[:1], [*_FURTHER, *_TINY]),
    ((64, 448), PASSES[:1], _SMALL),
    ((128, 224), PASSES[:1], _BASE),
    ((256, 64), PASSES[:1], [f"{name},patch_size=4,opt=muon" for name in _STUDY]),
]
COMPILE = {"eager": None, "compiled": {}, "graphs": {"mode": "reduce-overhead"}}
KEYS = ("model", "mode", "batch", "resolution", "pass")  # of a measurement
WARM_UP = 5  # steps, of which the last two tell how many fill the time of a measurement
BLOCKS = 3
GIB = 2**30


class Model(NamedTuple):
    """A model to measure: as it is called in tables, its name in timm, arguments of its own, and its optimiser."""

    label: str
    name: str
    args: dict
    opt: str = "adamw"


def parse_model(word: str, shared: dict) -> Model:
    """Parse NAME or NAME,KEY=VALUE,... where the key may also be opt. `shared` are arguments for our models."""
    name, *pairs = word.split(",")
    args = parse_pairs(pairs)
    opt = args.pop("opt", "adamw")
    return Model(word, name, shared | args if timm.models.is_model_in_modules(name, "vlonghorn") else args, opt)


def parse_size(word: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word)
    if not found:
        raise argparse.ArgumentTypeError(f"{word!r} is not BATCHxRESOLUTION, such as 256x224")
    return int(found[1]), int(found[2])


def register_official(checkout: Path) -> Optional[str]:
    """Register the models of a checkout of hustvl/Vim with timm. Return what went wrong, if anything did."""
    # Its own mamba_ssm, which has the second direction, must come before one that is installed.
    sys.path[:0] = [str(checkout / "vim"), str(checkout / "mamba-1p1p1")]
    try:
        import models_mamba  # noqa: F401
    except Exception as error:  # a build for another torch fails in its own ways
        return describe(error)
    return None


def build(model: Model, resolution: int, device: str) -> nn.Module:
    """Make the model for that resolution, without drop path; an argument of its own that is None leaves the default."""
    return timm.create_model(model.name, **dict(img_size=resolution, drop_path_rate=0.0) | model.args).to(device)


def make_step(
    model: nn.Module, mode: str, training: bool, batch: int, resolution: int, opt: str = "adamw"
) -> Callable[[], object]:
    """Make a function that runs one step on random data, on the device of the model. `opt` is the trainer's."""
    device = next(model.parameters()).device
    images = torch.randn(batch, 3, resolution, resolution, device=device)
    labels = torch.randint(model.num_classes, (batch,), device=device)
    options = COMPILE[mode]
    model.train(training)
    run = model if options is None else torch.compile(model, **options)

    accelerator = make_accelerator(device.type)

    def forward(images: Tensor) -> Tensor:
        if mode == "graphs":
            torch.compiler.cudagraph_mark_step_begin()
        with accelerator.autocast():
            return run(images)

    if not training:
        return torch.inference_mode()(lambda: forward(images))
    optimizer = build_optimizer(Config(opt=opt, cuda_graphs=mode == "graphs"), model, 1e-4)
    step = TrainStep(accelerator, model, forward, lambda scores, of: F.cross_entropy(scores.float(), of), optimizer)
    return lambda: step([(images, labels)])


def clock(step: Callable[[], object], steps: int) -> float:
    """Measure the seconds that `steps` steps take."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return time.perf_counter() - start
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    events[0].record()
    for _ in range(steps):
        step()
    events[1].record()
    events[1].synchronize()
    return events[0].elapsed_time(events[1]) / 1e3


def measure(step: Callable[[], object], mode: str, batch: int, steps: int, seconds: float) -> dict:
    """Measure speed and memory of `step`, over at least `steps` steps and about `seconds` seconds."""
    gpu = torch.cuda.is_available()
    first = clock(step, 1)
    clock(step, WARM_UP - 3)
    estimate = clock(step, 2) / 2
    block = math.ceil(max(steps, seconds / estimate) / BLOCKS)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    ms = median(clock(step, block) for _ in range(BLOCKS)) / block * 1e3
    memory = None
    if gpu:
        memory = (torch.cuda.max_memory_reserved if mode == "graphs" else torch.cuda.max_memory_allocated)() / GIB
    return dict(images_per_s=batch / ms * 1e3, ms=ms, GiB=memory, first_step_s=first, steps=block * BLOCKS)


def attempt(row: dict, model: Model, steps: int, seconds: float) -> dict:
    """Fill `row` with the measurement or the error, since one failure must not cost the rest of a long run."""
    torch.manual_seed(0)
    try:
        made = build(model, row["resolution"], "cuda" if torch.cuda.is_available() else "cpu")
        row["parameters"] = sum(value.numel() for value in made.parameters())
        step = make_step(made, row["mode"], row["pass"] == "train", row["batch"], row["resolution"], model.opt)
        row |= measure(step, row["mode"], row["batch"], steps, seconds)
    except Exception as error:
        row["error"] = "out of memory" if "out of memory" in str(error) else describe(error)
    return row


def free() -> None:
    """Give back the memory of the last measurement, so that the next one starts as the first did."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def merge_passes(rows: list[dict]) -> list[dict]:
    """Merge rows into one for each model, mode and size, with the figures of a pass under "PASS KEY"."""
    merged = {}
    for row in rows:
        key = tuple(row[name] for name in ("model", "mode", "batch", "resolution"))
        target = merged.setdefault(key, dict(zip(("model", "mode", "batch", "resolution"), key)))
        target |= {f"{row['pass']} {name}": row.get(name) for name in ("images_per_s", "ms", "GiB", "first_step_s")}
        if "error" in row:
            target["error"] = "; ".join(filter(None, (target.get("error"), f"{row['pass']}: {row['error']}")))
    return list(merged.values())


def size_of(label: str) -> Optional[str]:
    """Find the word for the size in a model's name: "small" in "deit_small_patch16_224"."""
    found = re.search(r"(?<![a-z])(test|tiny|small|medium|base|large|huge)(?![a-z])", label)
    return found and found[1]


def reference_of(label: str, labels: list[str]) -> Optional[str]:
    """Find the DeiT of the same size among `labels`."""
    return next((other for other in labels if other.startswith("deit") and size_of(other) == size_of(label)), None)


def best_of_modes(rows: list[dict]) -> list[dict]:
    """Find the fastest mode of each pass for each model and size, and compare it with the DeiT of the same size."""
    best = {}
    for row in rows:
        if row.get("images_per_s") is None:
            continue
        key = row["model"], row["batch"], row["resolution"]
        passes = best.setdefault(key, {})
        if row["pass"] not in passes or passes[row["pass"]]["images_per_s"] < row["images_per_s"]:
            passes[row["pass"]] = row
    labels, found = list(dict.fromkeys(key[0] for key in best)), []
    for (label, batch, resolution), passes in best.items():
        row = dict(model=label, batch=batch, resolution=resolution)
        others = best.get((reference_of(label, labels), batch, resolution), {})
        for name, fastest in passes.items():
            row |= {f"{name} {key}": fastest[key] for key in ("images_per_s", "mode", "GiB")}
            if name in others:
                row[f"{name} ratio"] = fastest["images_per_s"] / others[name]["images_per_s"]
        found.append(row)
    return found


def print_results(rows: list[dict], best: list[dict]) -> None:
    size = dict(batch=("batch", "d"), resolution=("px", "d"))
    table("models", merge_passes(rows), model=("model", ""), mode=("mode", ""), **size, **{
        "train images_per_s": ("train img/s", ".1f"), "train ms": ("ms/step", ".2f"), "train GiB": ("GiB", ".2f"),
        "train first_step_s": ("first s", ".1f"), "infer images_per_s": ("infer img/s", ".1f"),
        "infer ms": ("ms/step", ".2f"), "infer GiB": ("GiB", ".2f"), "infer first_step_s": ("first s", ".1f")},
        error=("", ""))  # fmt: skip
    table("best of modes (x DeiT: over the DeiT of the same size)", best, model=("model", ""), **size, **{
        "train images_per_s": ("train img/s", ".1f"), "train mode": ("mode", ""), "train ratio": ("x DeiT", ".2f"),
        "train GiB": ("GiB", ".2f"), "infer images_per_s": ("infer img/s", ".1f"), "infer mode": ("mode", ""),
        "infer ratio": ("x DeiT", ".2f"), "infer GiB": ("GiB", ".2f")})  # fmt: skip


def plot(best: list[dict], path: Path, title: str) -> None:
    """Plot how fast each model trains over the resolution, as a ratio to the DeiT of its size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    axis.axhline(1, color="black", linewidth=1)
    axis.annotate(" DeiT", (1, 1), xycoords=("axes fraction", "data"), va="center")
    shown = [row for row in best if "train ratio" in row and not row["model"].startswith("deit")]
    sizes = Counter(row["model"] for row in shown)
    labels = [label for label, count in sizes.items() if count > 1]  # a single size makes no line
    names = [label.partition(",")[0] for label in labels]
    for label, name in zip(labels, names):
        points = sorted((row["resolution"], row["train ratio"]) for row in shown if row["model"] == label)
        (line,) = axis.plot(*zip(*points), marker="o", markersize=4)
        axis.annotate(f"  {name if names.count(name) == 1 else label}", points[-1], color=line.get_color(), va="center")
    resolutions = sorted({row["resolution"] for row in shown if row["model"] in labels})
    axis.set(
        xscale="log",
        xlabel="side of the images, pixels",
        ylabel="training images/s, DeiT of the same size = 1",
        title=title,
    )
    axis.set_xticks(resolutions, [str(resolution) for resolution in resolutions])
    axis.set_xticks([], minor=True)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)  # the names cross where the frame would be
    figure.savefig(path, dpi=120, bbox_inches="tight")  # with the names that stand behind the lines
    plt.close(figure)


def parse_args(argv: Optional[list[str]]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        nargs="+",
        metavar="NAME[,KEY=VALUE]",
        help="timm models, each with arguments of its own (what docs/results.md shows)",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=parse_size,
        metavar="BATCHxRESOLUTION",
        help="(256x224 8x1248; without --models those that docs/results.md shows)",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=list(COMPILE),
        metavar="MODE",
        help="eager, compiled, graphs (eager compiled; without --models graphs)",
    )
    parser.add_argument("--passes", nargs="+", choices=PASSES, help="(both)")
    parser.add_argument(
        "--arg",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="arguments for the models of this package; a model of another has them after its name",
    )
    parser.add_argument(
        "--official",
        type=Path,
        metavar="CHECKOUT",
        help="a checkout of hustvl/Vim, whose tiny and small models are measured too",
    )
    parser.add_argument("--steps", type=int, default=10, help="least number of steps of a measurement (10)")
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long a measurement lasts (2)")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no measurement after that time")
    parser.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        default=[],
        metavar="JSON",
        help="rows of earlier runs on the same hardware join the tables and the plot; without --models they are not "
        "measured again, and with --budget 0 nothing is",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="for model.json; without --models for model_documented.json and model_over_resolution.png",
    )
    args = parser.parse_args(argv)
    if args.steps < 1:
        raise UserError(f"--steps {args.steps}: give at least 1")
    passes, shared = args.passes or PASSES, parse_pairs(args.arg)
    jobs = [(size, passes, args.models or []) for size in args.sizes or SIZES]  # a checkout's own models come to them
    args.documented = not args.models and not args.official
    if args.documented:
        args.modes, shared = args.modes or ["graphs"], OF_CONFIGS | shared
        jobs = [(size, [one for one in own if one in passes], words) for size, own, words in DOCUMENTED]
        if args.sizes:
            shown = sorted({f"{batch}x{resolution}" for (batch, resolution), *_ in jobs})
            jobs = [job for job in jobs if job[0] in args.sizes]
            if not jobs:
                raise UserError(
                    f"docs/results.md shows none of these --sizes: give --models, or some of {', '.join(shown)}"
                )
    args.modes = args.modes or ["eager", "compiled"]
    args.jobs = [(size, passes, [parse_model(word, shared) for word in words]) for size, passes, words in jobs]
    return args


def called_now(row: dict) -> dict:
    """Give a row the name that its model has now. A row without all arguments is of version 0.1."""
    name, *options = row["model"].split(",")
    if name not in RENAMED or "all_arguments" in row["args"]:
        return row
    return {**row, "model": ",".join([RENAMED[name], *options])}


def earlier_runs(paths: list[Path], own: list[dict]) -> tuple[list[dict], list[dict]]:
    """Read (environments, rows) from earlier runs' files. Of each measurement the last stays, with a "date".

    Args:
        paths: The files.
        own: Environment of the run that they join, if it measures anything: all have to be of one GPU.
    """
    environments, rows = [], {}
    for path in paths:
        try:
            found = json.loads(path.read_text())
            environments += [*found.get("earlier", ()), found["environment"]]
            date = found["environment"]["date"]
            for row in map(called_now, found["models"]):
                rows[tuple(row[key] for key in KEYS)] = {"date": date, **row}
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"--merge {path}: this is not a result of this script ({describe(error)})") from error
        first, last = [*own, *environments][0].get("gpu"), environments[-1].get("gpu")
        if first != last:
            raise UserError(f"--merge {path}: it is of {last or 'a CPU'}, and others are of {first or 'a CPU'}")
    return environments, list(rows.values())


def main(argv: Optional[list[str]] = None) -> None:
    start = time.monotonic()
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / ("model_documented.json" if args.documented else "model.json")
    own = environment()
    print_environment(own)
    results: dict = {}
    official: list[Model] = []
    if args.official:
        if not args.official.is_dir():
            raise UserError(f"there is no folder {args.official}: give a checkout of hustvl/Vim")
        error = register_official(args.official)
        results["official"] = {"imported": error is None, "error": error}
        if error is None:
            official = [Model(f"vim_{size} (official)", name, {}) for size, name in OFFICIAL.items()]
        else:
            print(f"the official models cannot be imported: {error}")
    plan = [
        (
            dict(model=model.label, args=all_arguments(model.name, model.args), mode=mode, batch=batch)
            | {"resolution": resolution, "pass": name},
            model,
        )
        for (batch, resolution), passes, models in args.jobs
        for model in [*models, *official]
        for mode in args.modes
        for name in passes
    ]
    results["earlier"], rows = earlier_runs(args.merge, [own] if args.budget != 0 else [])
    if results["earlier"] and args.budget == 0:  # what is merged may have been measured elsewhere
        own = results["earlier"].pop()
    results = {"environment": own, **results, "models": rows}
    places = {tuple(row[key] for key in KEYS): i for i, row in enumerate(rows)}
    if args.documented:
        plan = [job for job in plan if tuple(job[0][key] for key in KEYS) not in places]
    measured = 0

    def keep() -> None:
        # Called after each measurement, so that a run that is cut short leaves what it had.
        results["missing"] = [row for row, _ in plan[measured:]]
        results["best"] = best_of_modes(rows)
        path.write_text(json.dumps(results, indent=1) + "\n")

    keep()
    for row, model in plan:
        if args.budget is not None and time.monotonic() - start >= args.budget:
            break
        key = tuple(row[key] for key in KEYS)
        row = attempt(row, model, args.steps, args.seconds)
        if key in places:
            rows[places[key]] = row
        else:
            rows.append(row)
        measured += 1
        keep()
        found = f"{row['images_per_s']:.1f} images/s" if "ms" in row else row["error"]
        print(
            f"{row['model']}, {row['mode']}, {row['batch']} x {row['resolution']} px, {row['pass']}: {found}",
            flush=True,
        )
        free()
    print_results(rows, results["best"])
    if args.documented and len({row["resolution"] for row in results["best"] if "train ratio" in row}) > 1:
        plot(results["best"], args.out / "model_over_resolution.png", results["environment"].get("gpu") or "CPU")
    if results["missing"]:
        print(f"\nnot measured within {args.budget:g} s:")
        for row in results["missing"]:
            print(f"  {row['model']}, {row['mode']}, {row['batch']} x {row['resolution']} px, {row['pass']}")
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    run_cli(main)
