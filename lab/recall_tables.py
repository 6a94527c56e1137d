"""What the JSON of a study of recall says, as Markdown and as a plot: of arms that differ in their learning rate alone,
the best."""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lab.tables import BARS, Reading, Record, draw_means, format_count, format_list, format_mean, format_table, remarks
from vision_longhorn.plots import new_figure, save_png


class Cell(NamedTuple):
    """What arms of different learning rates have in common.

    Attributes:
        task: Tokens and pairs of a sequence, as text.
        variant: Its name.
        width: Of a token.
        rest: All other settings, as text.
    """

    task: str
    variant: str
    width: int
    rest: str


class Grid:
    """A study's arms by cell and learning rate.

    Args:
        content: What `results.collect` has made.
    """

    def __init__(self, content: Record) -> None:
        self.reading = Reading(content)
        self.cells: dict[Cell, dict[float, Record]] = defaultdict(dict)
        self.rows: dict[tuple[str, str, str], dict[int, Cell]] = defaultdict(dict)  # all widths of a variant
        for arm in content["arms"]:
            config = dict(arm["config"])
            lr, length, pairs, width = (config.pop(key) for key in ("lr", "length", "pairs", "width"))
            cell = Cell(f"{length}, {pairs}", arm["variant"], width, str(config))
            self.cells[cell][lr] = arm
            self.rows[cell.task, cell.variant, cell.rest][width] = cell
        self.widths = sorted({cell.width for cell in self.cells})
        self.rates = sorted({lr for arms in self.cells.values() for lr in arms})

    def known(self, cell: Cell) -> dict[float, list[float]]:
        """Accuracies in per cent, one for each seed, by learning rate."""
        found = {lr: self.reading.accuracies(arm) for lr, arm in self.cells[cell].items()}
        return {lr: values for lr, values in found.items() if values}

    def best(self, cell: Cell) -> tuple[float, list[float]]:
        """The learning rate with the highest mean accuracy, and its accuracies; none where no run is finished."""
        return max(self.known(cell).items(), key=lambda item: float(np.mean(item[1])), default=(0.0, []))


def recall_markdown(content: Record) -> str:
    """The best of all learning rates, all of the grid, and remarks below them."""
    grid = Grid(content)
    lines = [
        "accuracy in per cent at the queries of sequences that were not trained on, after the last epoch: first that "
        f"of the rate, of {len(grid.rates)}, that is best on them (in brackets), then that of each (in brackets "
        "of several runs how many got above the accuracy that ends a run, and their epochs, the fewest and the most)",
        *remarks(grid.reading),
    ]
    return "\n\n".join([_best(grid), _all(grid), format_list(lines)]) + "\n"


def _range(numbers: list[int]) -> str:
    return " to ".join(map(str, dict.fromkeys((min(numbers), max(numbers)))))


def _best(grid: Grid) -> str:
    rows = [["length, pairs", "variant", "n", *(f"width {width}" for width in grid.widths)]]
    for (task, variant, _), cells in grid.rows.items():
        figures = dict.fromkeys(grid.widths, "–")
        counts = []
        for width, cell in cells.items():
            (rate, accuracies), tried = grid.best(cell), len(grid.known(cell))
            if accuracies:
                counts.append(len(accuracies))
                some = f", {tried} of {len(grid.cells[cell])} rates" if tried < len(grid.cells[cell]) else ""
                figures[width] = f"{format_mean(accuracies)} ({rate:.3g}{some})"
        rows.append([task, variant, _range(counts or [0]), *figures.values()])
    return format_table(rows)


def _all(grid: Grid) -> str:
    rows = [["length, pairs", "variant", "width", "parameters", *(f"lr {lr:.3g}" for lr in grid.rates)]]
    for cell, arms in grid.cells.items():
        figures = dict.fromkeys(grid.rates, "–")
        for lr, accuracies in grid.known(cell).items():
            ends = _range([run["epochs"] for run in grid.reading.runs[arms[lr]["key"]]])
            if len(accuracies) > 1:
                solved = sum(accuracy > arms[lr]["config"]["enough"] for accuracy in accuracies)
                ends = f"{solved} of {len(accuracies)}, {ends}"
            figures[lr] = f"{format_mean(accuracies)} ({ends})"
        parameters = format_count(next(iter(arms.values()))["parameters"])
        rows.append([cell.task, cell.variant, str(cell.width), parameters, *figures.values()])
    return format_table(rows)


def recall_plot(content: Record, out: Path) -> None:
    """Draws accuracy against width, a panel for each length, as one PNG."""
    grid = Grid(content)
    tasks = list(dict.fromkeys(task for task, _, _ in grid.rows))
    variants = list(dict.fromkeys(variant for _, variant, _ in grid.rows))
    figure = new_figure(2 + 4 * len(tasks), 4.5)
    for task, axes in zip(tasks, figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]):
        for (own, variant, _), cells in grid.rows.items():
            best = {width: grid.best(cells[width])[1] for width in sorted(cells)}
            if own == task and any(best.values()):
                draw_means(axes, best, label=variant, color=f"C{variants.index(variant) % 10}")
        axes.set(title=f"length, pairs: {task}", xlabel="width", ylim=(0, 100))
        axes.set_xscale("log", base=2)
        axes.set_xticks(grid.widths, list(map(str, grid.widths)))
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="x-small")
    figure.suptitle(f"{content['study']}: accuracy at the queries, %, best of {len(grid.rates)} learning rates\n{BARS}")
    save_png(figure, out, dpi=100, tool="study")
