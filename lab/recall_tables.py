"""What the JSON of a study of recall says, as Markdown and as a plot: of arms that differ in their learning rate alone,
the best."""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lab.tables import BARS, Reading, Record, draw_means, format_mean, format_table, remarks
from vision_longhorn.plots import new_figure, save_png


class Cell(NamedTuple):
    """What arms of different learning rates have in common.

    Attributes:
        variant: Its name.
        length, pairs, width: Tokens and pairs of a sequence, and width of a token.
        rest: All other settings, as text.
    """

    variant: str
    length: int
    pairs: int
    width: int
    rest: str

    @property
    def task(self) -> str:
        return f"{self.length}, {self.pairs}"


class Grid:
    """A study's arms by cell and learning rate.

    Args:
        content: What `results.collect` has made.
    """

    def __init__(self, content: Record) -> None:
        self.reading = Reading(content)
        self.cells: dict[Cell, dict[float, Record]] = defaultdict(dict)
        for arm in content["arms"]:
            config = dict(arm["config"])
            lr, length, pairs, width = (config.pop(key) for key in ("lr", "length", "pairs", "width"))
            self.cells[Cell(arm["variant"], length, pairs, width, str(config))][lr] = arm
        self.widths = sorted({cell.width for cell in self.cells})
        self.rates = sorted({lr for arms in self.cells.values() for lr in arms})
        # A row of the table of the best is all widths of a variant, a panel of the plot all rows of a task.
        self.rows: dict[tuple[str, str, str], dict[int, Cell]] = defaultdict(dict)
        for cell in self.cells:
            self.rows[cell.task, cell.variant, cell.rest][cell.width] = cell

    def best(self, cell: Cell) -> tuple[float, list[float]] | None:
        """The learning rate with the highest mean accuracy, and its accuracies in per cent, one for each seed; None
        where no run is finished."""
        found = {lr: self.reading.accuracies(arm) for lr, arm in self.cells[cell].items()}
        found = {lr: values for lr, values in found.items() if values}
        return max(found.items(), key=lambda item: float(np.mean(item[1]))) if found else None

    def cell(self, cell: Cell) -> str:
        """The best accuracy with its learning rate, and how many of the rates have finished runs where not all have."""
        arms, best = self.cells[cell], self.best(cell)
        if best is None:
            return "–"
        tried = sum(bool(self.reading.runs[arm["key"]]) for arm in arms.values())
        some = f", {tried} of {len(arms)} rates" if tried < len(arms) else ""
        return f"{format_mean(best[1])} ({best[0]:.3g}{some})"


def recall_markdown(content: Record) -> str:
    """The best of all learning rates, all of the grid, and what is to be said below them."""
    grid = Grid(content)
    lines = [
        "accuracy in per cent at the queries of sequences that were not trained on, after the last epoch: first that "
        f"of the rate, of {len(grid.rates)}, that is best on them (in brackets), then that of each (in brackets "
        "of several runs how many got above the accuracy that ends a run, and their epochs, the fewest and the most)",
        *remarks(grid.reading),
    ]
    return "\n\n".join([_best(grid), _all(grid), "\n".join(f"- {line}" for line in lines)]) + "\n"


def _best(grid: Grid) -> str:
    rows = [["length, pairs", "variant", "n", *(f"width {width}" for width in grid.widths)]]
    for (task, variant, _), cells in grid.rows.items():
        best = {width: grid.best(cell) for width, cell in cells.items()}
        counts = sorted({len(found[1]) for found in best.values() if found}) or [0]
        figures = [grid.cell(cells[width]) if width in cells else "–" for width in grid.widths]
        rows.append([task, variant, " to ".join(map(str, counts[:: max(1, len(counts) - 1)])), *figures])
    return format_table(rows)


def _all(grid: Grid) -> str:
    rows = [["length, pairs", "variant", "width", "parameters", *(f"lr {lr:.3g}" for lr in grid.rates)]]
    for cell, arms in grid.cells.items():
        figures = []
        for lr in grid.rates:
            runs = grid.reading.runs[arms[lr]["key"]] if lr in arms else []
            epochs = sorted({run["epochs"] for run in runs})
            ends = " to ".join(map(str, dict.fromkeys((epochs[0], epochs[-1])))) if runs else ""
            accuracies = grid.reading.accuracies(arms[lr]) if runs else []
            if len(runs) > 1:
                solved = sum(accuracy > arms[lr]["config"]["enough"] for accuracy in accuracies)
                ends = f"{solved} of {len(runs)}, {ends}"
            figures.append(f"{format_mean(accuracies)} ({ends})" if runs else "–")
        parameters = next(iter(arms.values()))["parameters"]
        rows.append([cell.task, cell.variant, str(cell.width), f"{parameters:,}", *figures])
    return format_table(rows)


def recall_plot(content: Record, out: Path) -> None:
    """Draws accuracy against width, a panel for each length, as one PNG."""
    grid = Grid(content)
    tasks = list(dict.fromkeys(task for task, _, _ in grid.rows))
    variants = list(dict.fromkeys(variant for _, variant, _ in grid.rows))
    figure = new_figure(2 + 4 * len(tasks), 4.5)
    for task, axes in zip(tasks, figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]):
        for (own, variant, _), cells in grid.rows.items():
            best = {width: grid.best(cells[width]) for width in sorted(cells)}
            found = {width: pair[1] for width, pair in best.items() if pair}
            if own == task and found:
                draw_means(axes, found, label=variant, color=f"C{variants.index(variant) % 10}")
        axes.set(title=f"length, pairs: {task}", xlabel="width", ylim=(0, 100))
        axes.set_xscale("log", base=2)
        axes.set_xticks(grid.widths, list(map(str, grid.widths)))
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="x-small")
    figure.suptitle(f"{content['study']}: accuracy at the queries, %, best of {len(grid.rates)} learning rates\n{BARS}")
    save_png(figure, out, dpi=100, tool="study")
