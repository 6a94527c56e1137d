"""PNG figures: the curves of runs, and what all plots have in common."""

import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vision_longhorn.errors import UserError
from vision_longhorn.files import written_aside
from vision_longhorn.outputs import check_output

# Commands check their --out by this module first, so numpy, matplotlib and TensorBoard are imported only where used.
_SOFTWARE = "vision-longhorn "  # a PNG names this and the tool as its maker
# The names of accuracies in older runs. Such a run may have been continued, and then has both.
FORMER_TAGS = {
    "accuracy/top1": "val/top1",
    "accuracy/top5": "val/top5",
    "accuracy/top1_ema": "val_ema/top1",
    "accuracy/top5_ema": "val_ema/top5",
}


def read_scalars(run: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the TensorBoard events in a run's folder: for each tag (epochs, values), two float64 arrays.

    Raises:
        UserError: The folder holds no scalars of a training run.
    """
    import numpy as np
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # TensorBoard warns of the events that a killed run wrote again when it went on from its checkpoint.
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
    # Events count updates. Runs differ in the size of an update, so the axis shows epochs.
    return {tag: (np.interp(steps, *raw["train/epoch"]), values) for tag, (steps, values) in raw.items()}


def new_figure(width: float, height: float) -> Any:
    """Makes a matplotlib figure of this size in inches. It needs no display, and pyplot does not keep it."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plain(text: str) -> str:
    """Keeps matplotlib from reading what stands between dollars as a formula, and from failing at stray bytes."""
    return text.encode("utf-8", "backslashreplace").decode().replace("$", r"\$")


def save_png(figure: Any, out: str | os.PathLike[str], dpi: float, tool: str) -> None:
    """Writes a figure as a PNG that names the `tool` that made it. Makes the folder if it is missing.

    If writing fails, an OSError names the file, and an earlier one at `out` is still there.
    """
    with written_aside(out) as aside, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # letters that no font here has are boxes
        figure.savefig(aside, format="png", dpi=dpi, metadata={"Software": _SOFTWARE + tool})


def check_png(out: str, tool: str, others: Sequence[str] = ()) -> None:
    """Raises UserError, before any work, if `--out` is neither new nor an earlier PNG of this tool, or if it is one of
    `others`, which the same command reads."""

    def is_own(path: Path) -> bool:
        with open(path, "rb") as file:
            head = file.read(4096)
        return head.startswith(b"\x89PNG") and f"Software\0{_SOFTWARE}{tool}".encode() in head

    check_output("--out", out, (".png",), is_own, others)


def keep_to_per_cent(axes: Any) -> None:
    """Cuts an axis of percentages at 0 and 100."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(0, low), min(100, high))


def plot_runs(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Plots accuracy, loss and learning rate of runs as the PNG `out`, with a colour for each run.

    Raises:
        UserError: A run has no curves.
        OSError: The PNG cannot be written.
    """
    from matplotlib.lines import Line2D

    paths = {Path(run).resolve(): run for run in runs}
    names = [path.name for path in paths]
    # Folders that share a name are shown by their paths.
    curves = {path.name if names.count(path.name) == 1 else str(run): read_scalars(run) for path, run in paths.items()}
    panels = {
        "top-1 on the evaluation split, %": {"accuracy/top1": "-", "accuracy/top1_ema": "--"},
        "loss": {"train/loss": ":", "val/loss": "-", "val_ema/loss": "--"},
        "learning rate": {"train/lr": "-"},
    }
    kinds: dict[Any, str] = {"-": "raw weights", "--": "EMA weights", ":": "training loss"}
    figure = new_figure(15, 5)
    for axes, (title, styles) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for number, scalars in enumerate(curves.values()):
            for tag, style in styles.items():
                if tag in scalars:
                    marker = "o" if len(scalars[tag][0]) == 1 else None  # a line needs two points
                    axes.plot(*scalars[tag], style, marker=marker, color=f"C{number % 10}")
        if title.endswith("%"):
            keep_to_per_cent(axes)
        axes.set(title=title, xlabel="epoch")
        axes.grid(alpha=0.3)
    lines = [Line2D([], [], color=f"C{number % 10}", label=plain(name)) for number, name in enumerate(curves)]
    lines += [Line2D([], [], color="black", linestyle=style, label=kind) for style, kind in kinds.items()]
    figure.legend(handles=lines, loc="outside lower center", ncols=6, fontsize="small")
    save_png(figure, out, dpi=110, tool="curves")
