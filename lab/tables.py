"""Shows a study's JSON as Markdown and as a plot."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.plan import label_of
from lab.statistics import Interval, combination, difference, mean, over_images, read_bits
from vision_longhorn.plots import keep_to_per_cent, new_figure, save_png

Record = dict[str, Any]
LINES, MARKERS = ("-", "--", ":", "-."), "osD^v<>PX*"
BARS = "bars are 95 % intervals, of two seeds both"


class Reading:
    """A study's JSON, the `content` that `results.collect` has made, as tables and plots read it.

    Attributes:
        runs: The records of runs, by key of their arm's settings.
        weights: Which weights count, "ema" or "raw".
        hardware: The machine whose speeds are shown: that of most arms; "" if none was measured.
    """

    def __init__(self, content: Record) -> None:
        self.content, self.arms = content, content["arms"]
        self.weights = content.get("weights", "ema")
        self.runs: dict[str, list[Record]] = defaultdict(list)
        for run in content["runs"]:
            self.runs[run["key"]].append(run)
        names = Counter(name for arm in self.arms for name in arm["speed"])
        self.hardware = names.most_common(1)[0][0] if names else ""

    def label(self, arm: Record) -> str:
        return f"{arm['setting']}, {arm['variant']}" if arm["setting"] else arm["variant"]

    def accuracies(self, arm: Record, kind: str = "") -> list[float]:
        """Lists the top-1 in per cent of an arm's runs, by `kind` or else `weights`; raw replaces a missing ema."""
        finals = [run["final"] for run in self.runs[arm["key"]]]
        return [final.get(kind or self.weights, final["raw"]) for final in finals]

    def losses(self, arm: Record) -> list[float]:
        """Lists the losses on the same images, as far as they are recorded."""
        found = [run.get("loss", {}) for run in self.runs[arm["key"]]]
        return [loss.get(self.weights, loss["raw"]) for loss in found if loss]

    def curve(self, run: Record) -> dict[int, float]:
        """Returns the top-1 of a run in per cent, by the epochs after which it was evaluated."""
        values = run["curve"].get(self.weights, run["curve"]["raw"])
        return {epoch: value for epoch, value in zip(run["curve"]["epoch"], values) if value is not None}

    def arm(self, setting: str, variant: str) -> Record:
        return next(arm for arm in self.arms if (arm["setting"], arm["variant"]) == (setting, variant))

    def speed(self, arm: Record) -> Record:
        return arm["speed"].get(self.hardware, {})

    def hits(self, arm: Record, size: int | str) -> list[Record]:
        """Lists the records of which images were right at that size, one for each seed that was evaluated there."""
        return [run["hits"][str(size)] for run in self.runs[arm["key"]] if str(size) in run["hits"]]

    def shares(self, arm: Record, size: int | str) -> list[float]:
        """Lists the top-1 in per cent at that size, for each seed that was evaluated there."""
        return [100 * float(read_bits(found).mean()) for found in self.hits(arm, size)]


def markdown(content: Record) -> str:
    """Writes the tables of a study with remarks below them."""
    if content.get("task") == "recall":
        return _recall(content)
    reading = Reading(content)
    parts = [_main_table(reading)]
    if content["resolutions"]:
        parts.append(_resolutions(reading))
    parts.append(format_list([*_pairs(reading), *_contrasts(reading), *remarks(reading)]))
    return "\n\n".join(parts) + "\n"


def _main_table(reading: Reading) -> str:
    baseline, hardware = reading.content["baseline"], reading.hardware
    kind = " (raw)" if reading.weights == "raw" else ""
    head = ["variant", "parameters", "n", "EMA top-1, %", "raw top-1, %", f"difference to {baseline}{kind}"]
    rows = [[*head, f"images/s alone{f', {hardware}' if hardware else ''}", "peak GiB"]]
    with_loss = any(reading.losses(arm) for arm in reading.arms)
    if with_loss:
        rows[0].insert(4, f"{'raw' if kind else 'EMA'} loss")
    for arm in reading.arms:
        ema, own, speed = reading.accuracies(arm, "ema"), reading.accuracies(arm), reading.speed(arm)
        other = reading.accuracies(reading.arm(arm["setting"], baseline))
        figures = [
            format_mean(ema),
            format_mean(reading.accuracies(arm, "raw")),
            _signed(difference(own, other)) if arm["variant"] != baseline and own and other else "–",
            f"{speed['images_per_s']:,.0f}" if "images_per_s" in speed else "–",
            f"{speed['peak_gib']:.1f}" if speed.get("peak_gib") else "–",
        ]
        if with_loss:
            figures.insert(1, format_mean(reading.losses(arm), 3))
        rows.append([reading.label(arm), format_count(arm["parameters"]), str(len(ema)), *figures])
    return format_table(rows)


def _resolutions(reading: Reading) -> str:
    sizes = reading.content["resolutions"]
    rows = [["EMA top-1 at", "n", *(f"{size} px" for size in sizes)]]
    for arm in reading.arms:
        shares = [reading.shares(arm, size) for size in sizes]
        rows.append([reading.label(arm), _range(list(map(len, shares))), *map(format_mean, shares)])
    return format_table(rows)


def _pairs(reading: Reading) -> list[str]:
    """Writes lines on the main pair in each setting, and on its mean difference if data and length are the same."""
    lines, pair, groups = [], reading.content["pair"], list[list[float]]()
    kinds: set[tuple[str, int]] = set()
    for setting in dict.fromkeys(arm["setting"] for arm in reading.arms) if pair else ():
        arms = [reading.arm(setting, name) for name in pair]
        values = [reading.accuracies(arm) for arm in arms]
        if all(values):
            groups += values
            kinds |= {(arm["data"], arm["config"]["epochs"]) for arm in arms}
            lines += [f"{setting}: {line}" if setting else line for line in _pair(reading, *arms)]
    count = len(groups) // 2
    if count > 1 and len(kinds) == 1:  # over other data, or other numbers of epochs, a mean says nothing
        average = combination(groups, [1 / count, -1 / count] * count)
        lines.append(f"mean over {count} settings: {pair[0]} - {pair[1]} {_signed(average)}")
    return lines


def _pair(reading: Reading, *arms: Record) -> list[str]:
    """Writes lines on how far the first of two arms leads: over seeds, in pairs of them, on the way, over images."""
    one, other = (
        dict(zip((run["seed"] for run in reading.runs[arm["key"]]), reading.accuracies(arm), strict=True))
        for arm in arms
    )
    lead = difference([*one.values()], [*other.values()])
    lines = [f"{arms[0]['variant']} - {arms[1]['variant']} {_signed(lead)} over {_count(len(one), len(other))}"]
    if len(shared := [seed for seed in one if seed in other]) > 1:
        # Runs with the same seed see the images in the same order.
        lines[0] += f"; in pairs by seed {_signed(mean([one[seed] - other[seed] for seed in shared]))}"
    if earlier := _on_the_way(reading, *arms):
        lines.append(f"on the way {earlier}")
    sizes = {size for arm in arms for run in reading.runs[arm["key"]] for size in run["hits"]}
    for size in sorted(sizes, key=int):
        hits = [reading.hits(arm, size) for arm in arms]
        # On another machine the shards may hold other images.
        alike = len({(found["count"], found.get("images")) for some in hits for found in some}) == 1
        if all(hits) and alike:
            bits = [[read_bits(found) for found in some] for some in hits]
            lines.append(
                f"at {size} px {_signed(difference(*(reading.shares(arm, size) for arm in arms)))} over "
                f"{_count(*map(len, bits))}, {_signed(over_images(*bits))} over the {len(bits[0][0]):,} images "
                "(bootstrap; of these networks)"
            )
    return lines


def _on_the_way(reading: Reading, one: Record, other: Record) -> str:
    """Writes the lead of one arm after a quarter, half and three quarters of the epochs (or at the last evaluations
    before that both have), and in how many epochs its training loss was lower: a faster start need not end higher."""
    epochs = one["config"]["epochs"]
    if other["config"]["epochs"] != epochs:
        return ""
    known = [[reading.curve(run) for run in reading.runs[arm["key"]]] for arm in (one, other)]
    common = set.intersection(*(set(curve) for curves in known for curve in curves))
    marks = {max((epoch for epoch in common if epoch <= share * epochs), default=0) for share in (0.25, 0.5, 0.75)}
    leads = {mark: difference(*([curve[mark] for curve in curves] for curves in known)) for mark in marks - {0}}
    marked = ", ".join(f"{_signed(leads[mark])} after epoch {mark}" for mark in sorted(leads))
    losses = [[run["curve"]["train_loss"] for run in reading.runs[arm["key"]]] for arm in (one, other)]
    lower = np.sum(np.mean(losses[0], axis=0) < np.mean(losses[1], axis=0))
    return marked and f"{marked}; its mean training loss is the lower in {lower} of {epochs} epochs"


def _contrasts(reading: Reading) -> list[str]:
    """Writes lines on the contrasts in which each arm has a run."""
    arms = {label_of(arm["setting"], arm["variant"]): arm for arm in reading.arms}
    lines = []
    for contrast in reading.content.get("contrasts", ()):  # older JSONs have none
        plus, minus = contrast["plus"], contrast["minus"]
        groups = [reading.accuracies(arms[label]) for label in (*plus, *minus)]
        if all(groups):
            found = combination(groups, np.array([1] * len(plus) + [-1] * len(minus)) / contrast["over"])
            few, many = min(map(len, groups)), max(map(len, groups))
            count = _count(few, few) if few == many else f"{few} to {many} seeds each"
            lines.append(f"{contrast['name']}: {_signed(found)} over {count}")
    return lines


def remarks(reading: Reading) -> list[str]:
    """Writes lines on what the runs cost, and on runs that are missing or skipped updates."""
    runs, labels = reading.content["runs"], {arm["key"]: reading.label(arm) for arm in reading.arms}
    seconds = sum(run["seconds"] for run in runs)
    beside = max((run["side_by_side"] for run in runs), default=1)
    skipped = sorted(f"{labels[run['key']]} seed {run['seed']}: {run['skipped_updates']}"
                     for run in runs if run["skipped_updates"])  # fmt: skip
    first = f"{len(runs)} of {sum(len(arm['seeds']) for arm in reading.arms)} runs"
    first += f", {seconds:,.0f} s of training" if seconds else " done"
    first += f", up to {beside} side by side on a device" if beside > 1 else ""
    first += f"; updates skipped: {', '.join(skipped) or 'none'}"
    return [first, *(_unfinished(labels[run["key"]], run) for run in reading.content["unfinished"])]


def _unfinished(label: str, run: Record) -> str:
    curve, at = run.get("curve", {}), ""
    known = [
        (epoch, f"{name} {value:.2f} %")
        for key, name in (("ema", "EMA"), ("raw", "raw"))
        for epoch, value in zip(curve.get("epoch", []), curve.get(key, []))
        if value is not None
    ]
    if known:
        last = max(known)[0]
        at = f" at {', '.join(text for epoch, text in known if epoch == last)}"
        at += f" in epoch {last}" if last != run["epochs"] else ""
    why = f"failed with exit code {run['exit_code']}: {run['last_line']}" if "exit_code" in run else "unfinished"
    return f"{label} seed {run['seed']} after {run['epochs']} epoch{'s' * (run['epochs'] != 1)}{at}: {why}"


def _count(one: int, other: int) -> str:
    return f"{one} seed{'s' * (one > 1)} each" if one == other else f"{one} and {other} seeds"


def format_count(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def format_mean(values: Sequence[float], digits: int = 2) -> str:
    """Writes the mean with its interval, or with both values if there are two, which have no interval."""
    if not values:
        return "–"
    found = mean(values)
    if len(values) == 2:
        return f"{found.value:.{digits}f} ({values[0]:.{digits}f} and {values[1]:.{digits}f})"
    return f"{found.value:.{digits}f}" + ("" if found.high is None else f" ± {found.high - found.value:.{digits}f}")


def _signed(found: Interval) -> str:
    return f"{found.value:+.2f}" + ("" if found.low is None else f" [{found.low:+.2f}, {found.high:+.2f}]")


def format_table(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])


def format_list(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def draw_means(axes: Any, groups: dict[Any, list[float]], **style: Any) -> None:
    """Draws the mean of each group of percentages over its key with a bar for its interval, cut to 0 to 100, or with
    dashes for two values, which have no interval."""
    found = {x: mean(values) for x, values in groups.items() if values}
    bars = [
        (0, 0) if one.low is None or one.high is None else (one.value - max(0, one.low), min(100, one.high) - one.value)
        for one in found.values()
    ]
    values = [one.value for one in found.values()]
    axes.errorbar(list(found), values, np.transpose(bars), capsize=3, clip_on=False, **{"marker": "o", **style})
    for x, pair in groups.items():
        if len(pair) == 2:
            axes.plot([x, x], pair, linestyle="", marker="_", color=style["color"], clip_on=False)


def plot(content: Record, out: Path) -> None:
    """Draws accuracy against training cost, accuracy and loss over epochs, and accuracy over the study's resolutions
    as one PNG; of recall accuracy against width."""
    if content.get("task") == "recall":
        return _plot_recall(content, out)
    reading, sizes = Reading(content), content["resolutions"]
    arms = [arm for arm in reading.arms if reading.runs[arm["key"]]]
    # All use the same kind of seconds, because runs side by side take several times as many.
    alone = bool(arms) and all(reading.speed(arm).get("images_per_s") and arm["images_per_epoch"] for arm in arms)
    count = 4 if sizes else 3
    columns = 2 * count  # of the legend
    figure = new_figure(5 * count, 5 + 0.2 * math.ceil(len(arms) / columns))
    axes = figure.subplots(1, count)
    variants, settings = (list(dict.fromkeys(arm[part] for arm in arms)) for part in ("variant", "setting"))
    for arm in arms:
        # A variant has the same colour in all settings. Lines and markers tell settings apart, and tens of variants.
        variant = variants.index(arm["variant"])
        kind = settings.index(arm["setting"]) * math.ceil(len(variants) / 10) + variant // 10
        runs = reading.runs[arm["key"]]
        style = dict(
            color=f"C{variant % 10}",
            linestyle=LINES[kind % len(LINES)],
            marker=MARKERS[kind % len(MARKERS)],
            label=f"{reading.label(arm)} ({len(runs)})",
        )
        cost = float(np.mean([run["seconds"] for run in runs]))
        if alone:
            cost = arm["images_per_epoch"] * arm["config"]["epochs"] / reading.speed(arm)["images_per_s"]
        draw_means(axes[0], {cost: reading.accuracies(arm)}, **style)
        losses = [dict(zip(run["curve"]["epoch"], run["curve"]["train_loss"])) for run in runs]
        for panel, curves in (axes[1], [reading.curve(run) for run in runs]), (axes[2], losses):
            epochs = [epoch for epoch in curves[0] if all(epoch in curve for curve in curves)]
            values = [float(np.mean([curve[epoch] for curve in curves])) for epoch in epochs]
            panel.plot(epochs, values, markersize=3, markevery=math.ceil(len(epochs) / 6) or 1, **style)
        if sizes:
            draw_means(axes[3], {size: reading.shares(arm, size) for size in sizes}, **style)
    measured = f"alone on {reading.hardware}" if alone else "as measured, perhaps side by side"
    top1 = f"{'EMA' if reading.weights == 'ema' else 'raw'} top-1, %"
    titles = [(top1, f"seconds of training, {measured}"), (top1, "epoch"), ("training loss", "epoch"), (top1, "pixels")]
    for panel, (title, below) in zip(axes, titles):
        panel.set(title=title, xlabel=below)
        panel.grid(alpha=0.3)
        if title == top1:
            keep_to_per_cent(panel)
    if arms:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="x-small")
    figure.suptitle(f"{content['study']}: mean over seeds (their number in brackets), {BARS}")
    save_png(figure, out, dpi=100, tool="study")


class Grid:
    """The arms of a study of recall.

    Attributes:
        cells: Arms by their learning rate, for each (length and pairs, variant, all other settings, width).
        rows: The same cells by the first three of these, then by width.
    """

    def __init__(self, content: Record) -> None:
        self.reading = Reading(content)
        self.cells: dict[tuple[str, str, str, int], dict[float, Record]] = defaultdict(dict)
        self.rows: dict[tuple[str, str, str], dict[int, dict[float, Record]]] = defaultdict(dict)
        for arm in content["arms"]:
            config = dict(arm["config"])
            lr, length, pairs, width = (config.pop(key) for key in ("lr", "length", "pairs", "width"))
            row = f"{length}, {pairs}", arm["variant"], str(config)
            cell = self.cells[row + (width,)]
            cell[lr] = arm
            self.rows[row][width] = cell
        self.widths = sorted({width for *_, width in self.cells})
        self.rates = sorted({lr for arms in self.cells.values() for lr in arms})

    def known(self, arms: dict[float, Record]) -> dict[float, list[float]]:
        """Returns accuracies of a cell in per cent, one for each seed, by learning rate."""
        found = {lr: self.reading.accuracies(arm) for lr, arm in arms.items()}
        return {lr: values for lr, values in found.items() if values}

    def best(self, arms: dict[float, Record]) -> tuple[float, list[float]]:
        """Finds the learning rate with the highest mean accuracy, and its accuracies; none if no run is finished."""
        return max(self.known(arms).items(), key=lambda item: float(np.mean(item[1])), default=(0.0, []))


def _recall(content: Record) -> str:
    grid = Grid(content)
    lines = [
        "accuracy in per cent at the queries of sequences that were not trained on, after the last epoch: first that "
        f"of the rate, of {len(grid.rates)}, that is best on them (in brackets), then that of each (in brackets "
        "of several runs how many got above the accuracy that ends a run, and their epochs, the fewest and the most)",
        *remarks(grid.reading),
    ]
    return "\n\n".join([_best_rates(grid), _all_rates(grid), format_list(lines)]) + "\n"


def _range(numbers: list[int]) -> str:
    return " to ".join(map(str, dict.fromkeys((min(numbers), max(numbers)))))


def _best_rates(grid: Grid) -> str:
    rows = [["length, pairs", "variant", "n", *(f"width {width}" for width in grid.widths)]]
    for (task, variant, _), cells in grid.rows.items():
        figures, counts = dict.fromkeys(grid.widths, "–"), []
        for width, arms in cells.items():
            (rate, accuracies), tried = grid.best(arms), len(grid.known(arms))
            if accuracies:
                counts.append(len(accuracies))
                some = f", {tried} of {len(arms)} rates" if tried < len(arms) else ""
                figures[width] = f"{format_mean(accuracies)} ({rate:.3g}{some})"
        rows.append([task, variant, _range(counts or [0]), *figures.values()])
    return format_table(rows)


def _all_rates(grid: Grid) -> str:
    rows = [["length, pairs", "variant", "width", "parameters", *(f"lr {lr:.3g}" for lr in grid.rates)]]
    for (task, variant, _, width), arms in grid.cells.items():
        figures = dict.fromkeys(grid.rates, "–")
        for lr, accuracies in grid.known(arms).items():
            ends = _range([run["epochs"] for run in grid.reading.runs[arms[lr]["key"]]])
            if len(accuracies) > 1:
                solved = sum(accuracy > arms[lr]["config"]["enough"] for accuracy in accuracies)
                ends = f"{solved} of {len(accuracies)}, {ends}"
            figures[lr] = f"{format_mean(accuracies)} ({ends})"
        parameters = format_count(next(iter(arms.values()))["parameters"])
        rows.append([task, variant, str(width), parameters, *figures.values()])
    return format_table(rows)


def _plot_recall(content: Record, out: Path) -> None:
    """Draws a panel for each length."""
    grid = Grid(content)
    tasks, variants = (list(dict.fromkeys(row[i] for row in grid.rows)) for i in (0, 1))
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
