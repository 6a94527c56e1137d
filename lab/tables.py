"""What a study's JSON says, as Markdown and as a plot."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from lab.statistics import (
    Interval,
    combination,
    difference,
    mean_interval,
    over_images,
    paired,
    read_bits,
)
from vision_longhorn.plots import keep_to_per_cent, new_figure, save_png

Record = dict[str, Any]
BARS = "bars are 95 % intervals, of two seeds both"


class Reading:
    """A study's JSON, as tables and plots look at it.

    Args:
        content: What `results.collect` has made.

    Attributes:
        runs: The records of runs, by key of their arm's settings.
        weights: Which ones count, "ema" or "raw".
        hardware: Whose speeds are shown: that of most arms; "" where none was measured.
    """

    def __init__(self, content: Record) -> None:
        self.content, self.arms = content, content["arms"]
        self.weights = content.get("weights", "ema")
        self.runs: dict[str, list[Record]] = defaultdict(list)
        for run in content["runs"]:
            self.runs[run["key"]].append(run)
        names = Counter(name for arm in self.arms for name in arm["speed"])
        self.hardware = names.most_common(1)[0][0] if names else ""
        self.settings = list(dict.fromkeys(arm["setting"] for arm in self.arms))

    def label(self, arm: Record) -> str:
        return f"{arm['setting']}, {arm['variant']}" if arm["setting"] else arm["variant"]

    def accuracies(self, arm: Record, kind: str = "") -> list[float]:
        """Top-1 of an arm's runs in per cent, of the weights that count unless `kind` says which; "ema" stands for the
        raw ones where a run averages none."""
        kind = kind or self.weights
        finals = [run["final"] for run in self.runs[arm["key"]]]
        return [final.get(kind, final["raw"]) for final in finals]

    def curve(self, run: Record) -> dict[int, float]:
        """A run's top-1 in per cent, of the weights that count, by epoch, where it was evaluated."""
        values = run["curve"][self.weights if self.weights in run["curve"] else "raw"]
        return {epoch: value for epoch, value in zip(run["curve"]["epoch"], values) if value is not None}

    def arm(self, setting: str, variant: str) -> Record:
        return next(arm for arm in self.arms if (arm["setting"], arm["variant"]) == (setting, variant))

    def speed(self, arm: Record) -> Record:
        return arm["speed"].get(self.hardware, {})

    def bits(self, arm: Record, size: str) -> list[np.ndarray]:
        """Which images were right at that size, an array for each seed that was looked at."""
        return [read_bits(run["hits"][size]) for run in self.runs[arm["key"]] if size in run["hits"]]

    def are_same_images(self, arms: Iterable[Record], size: str) -> bool:
        """Whether the bits of all these runs stand for the same images: other machines may have cut other shards."""
        hits = [run["hits"][size] for arm in arms for run in self.runs[arm["key"]] if size in run["hits"]]
        return len({(found["count"], found.get("images")) for found in hits}) == 1

    def cost(self, arm: Record, alone: bool) -> float:
        """Seconds of training, at the speed alone or as its runs had it."""
        if alone:
            return arm["images_per_epoch"] * arm["config"]["epochs"] / self.speed(arm)["images_per_s"]
        return float(np.mean([run["seconds"] for run in self.runs[arm["key"]]]))


def markdown(content: Record) -> str:
    """The tables of a study and what is to be said below them."""
    if content.get("task") == "recall":
        from lab.recall_tables import recall_markdown

        return recall_markdown(content)
    reading = Reading(content)
    parts = [_main_table(reading)]
    if content["resolutions"]:
        parts.append(_resolutions(reading))
    parts.append("\n".join(f"- {line}" for line in [*_pairs(reading), *_contrasts(reading), *remarks(reading)]))
    return "\n\n".join(filter(None, parts)) + "\n"


def _main_table(reading: Reading) -> str:
    baseline, hardware = reading.content["baseline"], reading.hardware
    kind = " (raw)" if reading.weights == "raw" else ""
    head = ["variant", "parameters", "n", "EMA top-1, %", "raw top-1, %", f"difference to {baseline}{kind}"]
    rows = [[*head, f"images/s alone{f', {hardware}' if hardware else ''}", "peak GiB"]]
    for arm in reading.arms:
        ema, raw = reading.accuracies(arm, "ema"), reading.accuracies(arm, "raw")
        other, less = reading.accuracies(reading.arm(arm["setting"], baseline)), "–"
        if arm["variant"] != baseline and ema and other:
            less = _signed(difference(reading.accuracies(arm), other))
        speed = reading.speed(arm)
        rows.append(
            [
                reading.label(arm),
                f"{arm['parameters']:,}",
                str(len(ema)),
                format_mean(ema),
                format_mean(raw),
                less,
                f"{speed['images_per_s']:,.0f}" if "images_per_s" in speed else "–",
                f"{speed['peak_gib']:.1f}" if speed.get("peak_gib") else "–",
            ]
        )
    return format_table(rows)


def _resolutions(reading: Reading) -> str:
    sizes = [str(size) for size in reading.content["resolutions"]]
    rows = [["EMA top-1 at", "n", *(f"{size} px" for size in sizes)]]
    for arm in reading.arms:
        bits = {size: [100 * float(found.mean()) for found in reading.bits(arm, size)] for size in sizes}
        counts = sorted({len(values) for values in bits.values()})
        n = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        rows.append([reading.label(arm), n, *(format_mean(bits[size]) for size in sizes)])
    return format_table(rows)


def _pairs(reading: Reading) -> list[str]:
    """The main pair in each setting, and its mean difference over settings that have the same data and as many
    epochs."""
    lines, pair = [], reading.content["pair"]
    found: list[list[float]] = []
    kinds: set[tuple[str, int]] = set()
    for setting in reading.settings if pair else ():
        arms = [reading.arm(setting, name) for name in pair]
        values = [reading.accuracies(arm) for arm in arms]
        if all(values):
            found += values
            kinds |= {(arm["data"], arm["config"]["epochs"]) for arm in arms}
            lines += [f"{setting}: {line}" if setting else line for line in _pair(reading, *arms)]
    count = len(found) // 2
    if count > 1 and len(kinds) == 1:  # over other data, or other numbers of epochs, a mean says nothing
        mean = combination(found, [1 / count, -1 / count] * count)
        lines.append(f"mean over {count} settings: {pair[0]} - {pair[1]} {_signed(mean)}")
    return lines


def _pair(reading: Reading, *arms: Record) -> list[str]:
    """How far the first of two arms is ahead: over the seeds, in pairs of those that both have, on the way, and over
    the images."""
    one, other = [
        {run["seed"]: accuracy for run, accuracy in zip(reading.runs[arm["key"]], reading.accuracies(arm))}
        for arm in arms
    ]
    lead = difference([*one.values()], [*other.values()])
    lines = [f"{arms[0]['variant']} - {arms[1]['variant']} {_signed(lead)} over {_count(len(one), len(other))}"]
    if len(shared := [seed for seed in one if seed in other]) > 1:
        by_seed = paired([one[seed] for seed in shared], [other[seed] for seed in shared])
        lines[0] += f"; in pairs by seed {_signed(by_seed)}"
    if earlier := _on_the_way(reading, *arms):
        lines.append(f"on the way {earlier}")
    sizes = {size for arm in arms for run in reading.runs[arm["key"]] for size in run["hits"]}
    for size in sorted(sizes, key=int):
        bits = [reading.bits(arm, size) for arm in arms]
        if all(bits) and reading.are_same_images(arms, size):
            means = [[100 * float(found.mean()) for found in some] for some in bits]
            lines.append(
                f"at {size} px {_signed(difference(*means))} over {_count(*map(len, bits))}, "
                f"{_signed(over_images(*bits))} over the {len(bits[0][0]):,} images (bootstrap; of these networks)"
            )
    return lines


def _on_the_way(reading: Reading, one: Record, other: Record) -> str:
    """How far one arm was ahead of the other after a quarter, half and three quarters of the epochs, or after the last
    ones before where all runs were evaluated, and in how many it had the lower training loss: who learns sooner need
    not end higher."""
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
    """What the study compares besides; nothing of a contrast of which an arm has no run yet."""
    arms = {"-".join(filter(None, (arm["setting"], arm["variant"]))): arm for arm in reading.arms}
    lines = []
    for contrast in reading.content.get("contrasts", ()):  # JSONs of before have none
        groups = [reading.accuracies(arms[label]) for label in (*contrast["plus"], *contrast["minus"])]
        if not all(groups):
            continue
        weights = [1 / contrast["over"]] * len(contrast["plus"]) + [-1 / contrast["over"]] * len(contrast["minus"])
        few, many = min(map(len, groups)), max(map(len, groups))
        count = _count(few, few) if few == many else f"{few} to {many} seeds each"
        lines.append(f"{contrast['name']}: {_signed(combination(groups, weights))} over {count}")
    return lines


def _count(one: int, other: int) -> str:
    return f"{one} seed{'s' * (one > 1)} each" if one == other else f"{one} and {other} seeds"


def remarks(reading: Reading) -> list[str]:
    """What each study has to say of runs that are missing or were not smooth, and what it cost."""
    content, labels = reading.content, {arm["key"]: reading.label(arm) for arm in reading.arms}
    planned = sum(len(arm["seeds"]) for arm in reading.arms)
    seconds = sum(run["seconds"] for run in content["runs"])
    lines = [f"{len(content['runs'])} of {planned} runs" + (f", {seconds:,.0f} s of training" if seconds else " done")]
    beside = sorted({run["side_by_side"] for run in content["runs"]})
    if beside and beside != [1]:
        lines[0] += f", up to {beside[-1]} side by side on a device"
    skipped = {
        f"{labels[run['key']]} seed {run['seed']}: {run['skipped_updates']}"
        for run in content["runs"]
        if run["skipped_updates"]
    }
    lines[0] += f"; updates skipped: {', '.join(sorted(skipped)) or 'none'}"
    for run in content["unfinished"]:
        why = f"failed with exit code {run['exit_code']}: {run['last_line']}" if "exit_code" in run else "unfinished"
        curve = run.get("curve", {})
        labelled = ("ema", "EMA"), ("raw", "raw")
        known = [
            (epoch, f"{label} {value:.2f} %")
            for name, label in labelled
            for epoch, value in zip(curve.get("epoch", []), curve.get(name, []), strict=False)
            if value is not None
        ]
        last = max(known)[0] if known else 0
        at = f" at {', '.join(text for epoch, text in known if epoch == last)}" if known else ""
        at += f" in epoch {last}" if known and last != run["epochs"] else ""
        after = f"{run['epochs']} epoch{'' if run['epochs'] == 1 else 's'}"
        lines.append(f"{labels[run['key']]} seed {run['seed']} after {after}{at}: {why}")
    return lines


def format_mean(values: list[float]) -> str:
    if not values:
        return "–"
    found = mean_interval(values)
    if len(values) == 2:  # which have no interval
        return f"{found.value:.2f} ({values[0]:.2f} and {values[1]:.2f})"
    return f"{found.value:.2f}" + ("" if found.high is None else f" ± {found.high - found.value:.2f}")


def draw_means(axes: Any, groups: dict[Any, list[float]], **style: Any) -> None:
    """Draws the mean of each group of percentages over its key, with its interval, as far as that is between 0 and 100,
    as a bar. Two values, which have no interval, stand as dashes."""
    found = {x: mean_interval(values) for x, values in groups.items() if values}
    bars = [
        (0, 0) if one.low is None or one.high is None else (one.value - max(0, one.low), min(100, one.high) - one.value)
        for one in found.values()
    ]
    values = [one.value for one in found.values()]
    axes.errorbar(list(found), values, np.transpose(bars), marker="o", capsize=3, clip_on=False, **style)
    for x, pair in groups.items():
        if len(pair) == 2:
            axes.plot([x, x], pair, linestyle="", marker="_", color=style["color"], clip_on=False)


def _signed(found: Interval) -> str:
    bounds = "" if found.low is None or found.high is None else f" [{found.low:+.2f}, {found.high:+.2f}]"
    return f"{found.value:+.2f}{bounds}"


def format_table(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])


def plot(content: Record, out: Path) -> None:
    """Draws accuracy against training cost with intervals, accuracy and loss over epochs, and over resolutions where
    these were looked at, as one PNG; of recall accuracy against width."""
    if content.get("task") == "recall":
        from lab.recall_tables import recall_plot

        return recall_plot(content, out)
    reading, sizes = Reading(content), [str(size) for size in content["resolutions"]]
    arms = [arm for arm in reading.arms if reading.runs[arm["key"]]]
    # One kind of seconds for all: those of runs side by side are several times as many.
    alone = bool(reading.hardware) and all(reading.speed(arm).get("images_per_s") for arm in arms)
    figure = new_figure(20 if sizes else 15, 5)
    axes = figure.subplots(1, 4 if sizes else 3)
    for number, arm in enumerate(arms):
        style = dict(color=f"C{number % 10}", linestyle=("-", "--", ":", "-.")[number // 10 % 4])
        label = f"{reading.label(arm)} ({len(reading.runs[arm['key']])})"
        draw_means(axes[0], {reading.cost(arm, alone): reading.accuracies(arm)}, label=label, **style)
        for panel, kinds in (axes[1], (reading.weights, "raw")), (axes[2], ("train_loss",)):
            curves = [
                next(run["curve"][kind] for kind in kinds if kind in run["curve"]) for run in reading.runs[arm["key"]]
            ]
            known = [i for i, values in enumerate(zip(*curves)) if None not in values]
            epochs = [reading.runs[arm["key"]][0]["curve"]["epoch"][i] for i in known]
            mean = np.mean([[curve[i] for i in known] for curve in curves], axis=0)
            panel.plot(epochs, mean, marker="o" if len(epochs) == 1 else None, label=label, **style)
        if sizes:
            shares = {int(size): [100 * float(bits.mean()) for bits in reading.bits(arm, size)] for size in sizes}
            draw_means(axes[3], shares, label=label, **style)
    cost = f"alone on {reading.hardware}" if alone else "as measured, perhaps side by side"
    top1 = f"{'EMA' if reading.weights == 'ema' else 'raw'} top-1, %"
    titles = [(top1, f"seconds of training, {cost}"), (top1, "epoch"), ("training loss", "epoch"), (top1, "pixels")]
    for panel, (title, below) in zip(axes, titles):
        panel.set(title=title, xlabel=below)
        panel.grid(alpha=0.3)
    for panel in (axes[0], axes[1], *axes[3:]):
        keep_to_per_cent(panel)
    if arms:
        axes[2].legend(fontsize="x-small")  # the corner that losses leave free
    figure.suptitle(f"{content['study']}: mean over seeds (their number in brackets), {BARS}")
    save_png(figure, out, dpi=100, tool="study")
