"""Draws accuracy, loss and learning rate of one or several runs, from their TensorBoard events, as one PNG.

    python -m vision_longhorn.curves runs/A runs/B --out curves.png
"""

import argparse
import os
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vision_longhorn.errors import UserError, run_cli


def read_scalars(run):
    """Scalars of a run's TensorBoard events, over epochs.

    Args:
        run: Folder that holds the event files.

    Returns:
        Dict of tag to (epochs, values), two float64 arrays of one length.

    Raises:
        UserError: Where the folder holds no scalars of a training run.
    """
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    if Path(run).is_dir():
        events.Reload()
    raw = {tag: np.array([(e.step, e.value) for e in events.Scalars(tag)]).T for tag in events.Tags()["scalars"]}
    if "train/epoch" not in raw:
        raise UserError(f"{run} holds no training curves: give the folder of a run")
    # Events count updates, whose size differs between runs; epochs compare.
    return {tag: (np.interp(steps, *raw["train/epoch"]), values) for tag, (steps, values) in raw.items()}


def plot_runs(runs, out):
    """Plots the runs into one PNG, each in its own colour.

    Args:
        runs: Folders of runs; their names become the legend.
        out: Path of the PNG, written aside and renamed.

    Raises:
        UserError: Where a run has no curves.
    """
    curves = {Path(run).resolve().name: read_scalars(run) for run in runs}
    panels = {
        "top-1 on the evaluation split, %": {"val/top1": "-", "val_ema/top1": "--"},
        "loss": {"train/loss": ":", "val/loss": "-", "val_ema/loss": "--"},
        "learning rate": {"train/lr": "-"},
    }
    # Figure without pyplot: no display, and no state that outlives the call
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, styles) in zip(figure.subplots(1, 3), panels.items()):
        for number, (name, scalars) in enumerate(curves.items()):
            for tag, style in styles.items():
                if tag in scalars:
                    kind = {"val_ema": ", EMA", "train": ", training"}.get(tag.split("/")[0], "")
                    axes.plot(*scalars[tag], style, color=f"C{number % 10}", label=name + kind)
        axes.set(title=title, xlabel="epoch")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    aside = Path(f"{out}.tmp")
    aside.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(aside, format="png", dpi=110)
    os.replace(aside, out)


def main(argv=None):
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--out", default="curves.png", help="the PNG to write [curves.png]")
    args = parser.parse_args(argv)
    plot_runs(args.runs, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    run_cli(main)
