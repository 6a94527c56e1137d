"""Draws accuracy, loss and learning rate of one or several runs, from their TensorBoard events, as one PNG.

python -m vision_longhorn.curves runs/A runs/B --out curves.png
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision_longhorn.command_line.parser import Parser
from vision_longhorn.errors import UserError, one_line
from vision_longhorn.files import written_aside
from vision_longhorn.outputs import check_output
from vision_longhorn.runs import Run

# What takes long to import is imported where it is used: the command line is read before.
if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure


# What the accuracies were called before they came to stand first in TensorBoard; a run may have gone on since.
FORMER_TAGS = {
    "accuracy/top1": "val/top1",
    "accuracy/top5": "val/top5",
    "accuracy/top1_ema": "val_ema/top1",
    "accuracy/top5_ema": "val_ema/top5",
}


def read_scalars(run: str | os.PathLike[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Scalars of a run's TensorBoard events, over epochs.

    Args:
        run: Folder that holds the event files.

    Returns:
        Dict of tag to (epochs, values), two float64 arrays of one length.

    Raises:
        UserError: Where the folder holds no scalars of a training run.
    """
    import numpy as np
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Of a run that was killed and went on it says that events are removed: those between checkpoint and kill, which
    # were written again.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    if Path(run).is_dir():
        events.Reload()
    points = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    for tag, former in FORMER_TAGS.items():
        if former in points:
            points[tag] = points.pop(former) + points.get(tag, [])
    raw = {tag: np.array(found).T for tag, found in points.items()}
    if "train/epoch" not in raw:
        raise UserError(f"{run} holds no training curves: give the folder of a run")
    # Events count updates, whose size differs between runs; epochs compare.
    return {tag: (np.interp(steps, *raw["train/epoch"]), values) for tag, (steps, values) in raw.items()}


def new_figure(width: float, height: float) -> Figure:
    """A matplotlib figure of this size in inches: without pyplot, so no display and no state that outlives it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: Figure, out: str | os.PathLike[str], dpi: float, tool: str) -> None:
    """Writes a figure as PNG, which says which tool has made it. Its folder is made if it is missing.

    Raises:
        UserError: Where the file cannot be written. What stood at `out` still does.
    """
    try:
        with written_aside(out) as aside:
            figure.savefig(aside, format="png", dpi=dpi, metadata={"Software": _signature(tool)})
    except OSError as error:
        raise UserError(
            f"{out} cannot be written ({error.strerror or one_line(error)}): name a file in a folder "
            "that you may write to"
        ) from error


def check_png(out: str, tool: str, others: Sequence[str] = ()) -> None:
    """`check_output` of a tool that writes a PNG by `save_png` and reads the `others`."""
    signature = b"Software\0" + _signature(tool).encode()

    def is_own(path: Path) -> bool:
        with open(path, "rb") as file:
            head = file.read(4096)
        # Before pictures were signed, only the curves in a run's folder are known by their place.
        run = Run(path.parent)
        of_run = tool == "curves" and path == run.curves_file and run.has_begun()
        return head.startswith(b"\x89PNG") and (signature in head or of_run)

    check_output("--out", out, (".png",), is_own, others)


def _signature(tool: str) -> str:
    return f"vision-longhorn {tool}"


def keep_to_per_cent(axes: Any) -> None:
    """Ends an axis of percentages at 0 and 100, where it would go beyond."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(0, low), min(100, high))


def _names(runs: Sequence[str | os.PathLike[str]]) -> dict[str | os.PathLike[str], str]:
    """A name for each run: its folder's, or the path as it was given where two folders are called alike."""
    paths = {Path(run).resolve(): run for run in runs}
    names = [path.name for path in paths]
    return {run: path.name if names.count(path.name) == 1 else str(run) for path, run in paths.items()}


def plot_runs(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Plots the runs into one PNG, each in its own colour.

    Args:
        runs: Folders of runs; their names become the legend.
        out: Path of the PNG, as `save_png` takes it.

    Raises:
        UserError: Where a run has no curves, or the PNG cannot be written.
    """
    from matplotlib.lines import Line2D

    curves = {name: read_scalars(run) for run, name in _names(runs).items()}
    panels = {
        "top-1 on the evaluation split, %": {"accuracy/top1": "-", "accuracy/top1_ema": "--"},
        "loss": {"train/loss": ":", "val/loss": "-", "val_ema/loss": "--"},
        "learning rate": {"train/lr": "-"},
    }
    averages = any("accuracy/top1_ema" in scalars for scalars in curves.values())
    kinds: dict[Any, str] = {"-": "raw weights", "--": "EMA weights"} if averages else {"-": "evaluation"}
    kinds[":"] = "training loss"
    figure = new_figure(15, 5)
    for axes, (title, styles) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for number, scalars in enumerate(curves.values()):
            for tag, style in styles.items():
                if tag in scalars:
                    marker = "o" if len(scalars[tag][0]) == 1 else None  # which a line would not show
                    axes.plot(*scalars[tag], style, marker=marker, color=f"C{number % 10}")
        if title.endswith("%"):
            keep_to_per_cent(axes)
        axes.set(title=title, xlabel="epoch")
        axes.grid(alpha=0.3)
    lines = [Line2D([], [], color=f"C{number % 10}", label=name) for number, name in enumerate(curves)]
    lines += [Line2D([], [], color="black", linestyle=style, label=kind) for style, kind in kinds.items()]
    figure.legend(handles=lines, loc="outside lower center", ncols=6, fontsize="small")  # where it covers no curve
    save_png(figure, out, dpi=110, tool="curves")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--out", default="curves.png", help="the PNG to write [curves.png]")
    args = parser.parse_args(argv)
    check_png(args.out, "curves", args.runs)
    plot_runs(args.runs, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    from vision_longhorn.command_line.commands import run

    run("curves")
