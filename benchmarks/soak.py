"""Makes a long run of train_imagenet.py on the digits: do its memory and its speed stay the same?

    python benchmarks/soak.py                 # 10,000 updates of a small model
    python benchmarks/soak.py --model vim_test --model-kwargs depth=2     # options that it lacks go to the trainer

It trains as a user would, with loader processes, evaluation and checkpoints, and reads the curves of the run: images a
second, memory of the host (with the loader's processes) and of the device. The first tenth of the run is left out, as
allocators and caches fill in it; of the rest the first quarter is compared with the last one.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

# First, since it lets a checkout do without installation.
from common import RESULTS, environment, print_environment, table
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train_imagenet
from vision_longhorn.command_line.parser import Parser, run_cli

CURVES = {"images_per_s": "images/s", "host_gib": "host, GiB", "device_gib": "device, GiB", "data_wait": "data wait"}
DIGITS = 1437  # in the training split


def read(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the points (update, value) of each curve that the run has."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    return {
        name: [(point.step, point.value) for point in events.Scalars(f"train/{name}")]
        for name in CURVES
        if f"train/{name}" in events.Tags()["scalars"]
    }


def compare(points: list[tuple[int, float]], updates: int) -> dict:
    """Compare the medians of the first and the last quarter of what follows the first tenth."""
    points = [value for update, value in points if update > updates / 10]
    quarter = max(1, len(points) // 4)
    first, last = median(points[:quarter]), median(points[-quarter:])
    return dict(first=first, last=last, change=last / first - 1 if first else None)


def plot(curves: dict[str, list[tuple[int, float]]], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(curves), figsize=(8, 2 * len(curves)), sharex=True, layout="constrained", squeeze=False
    )
    for axis, (name, points) in zip(axes[:, 0], curves.items()):
        axis.plot(*zip(*points), linewidth=0.8)
        axis.set_ylim(bottom=0)
        axis.set_ylabel(CURVES[name])
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xlabel("updates")
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=10_000, help="at least so many, in whole epochs (10000)")
    parser.add_argument("--batch-size", type=int, default=64, help="(64)")
    parser.add_argument("--workers", type=int, default=4, help="processes that load data (4)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="for soak.json and soak.png")
    args, more = parser.parse_known_args()
    found = environment()
    print_environment(found)
    epochs = -(-args.updates // (DIGITS // args.batch_size))
    with tempfile.TemporaryDirectory() as folder:
        argv = ["--config", "demo_digits", "--epochs", str(epochs), "--batch-size", str(args.batch_size), "--workers",
                str(args.workers), "--eval-interval", "50", "--run-dir", f"{folder}/run", *more]  # fmt: skip
        curves = read(train_imagenet.main(argv))
    rows = [dict(what=CURVES[name], **compare(points, args.updates)) for name, points in curves.items()]
    table(
        f"{curves['images_per_s'][-1][0]:,} updates",
        rows,
        what=("", ""),
        first=("first quarter", ".4f"),
        last=("last quarter", ".4f"),
        change=("change", "+.4f"),
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "soak.json").write_text(json.dumps(dict(environment=found, rows=rows, curves=curves)) + "\n")
    plot(curves, args.out / "soak.png", found.get("gpu") or "CPU")
    print(f"\nwritten to {args.out / 'soak.json'} and soak.png")


if __name__ == "__main__":
    run_cli(main)
