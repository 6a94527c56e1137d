"""Cases of what people look at: TensorBoard, plots, tables and maps."""

import functools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.fuzz.case import PYTHON, Case, Expect, Place, require
from tests.fuzz.damage import damage, spoil
from tests.fuzz.kinds.common import is_png, train
from tests.fuzz.process import Result

Words = Sequence[str | Path]
STUDY = {
    "data": {"few": {"train_samples": 96, "val_samples": 37, "num_classes": 10}},
    "variants": {"longhorn": {"model": "vlonghorn_test"}},
    "studies": {
        "pairs": {
            "asks": "Which is better?",
            "config": "demo_digits",
            "data": "few",
            "seeds": 2,
            "pair": ["longhorn", "vim"],
            "model_kwargs": {"depth": 1, "embed_dim": 16, "patch_size": 8},
            "overrides": {"epochs": 4, "warmup_epochs": 0, "batch_size": 16},
            "variants": ["longhorn", {"name": "vim", "model": "vim_test"}],
        },
    },
}
LOW, HIGH = -5.0, 105.0  # of an axis of per cents, with a margin


def cases() -> Iterator[Case]:
    yield from _tensorboard()
    yield from _seeds()
    yield from _studies()
    yield from _arrows()


def _tensorboard() -> Iterator[Case]:
    """The tags of a run: accuracy comes first, final values have a group of their own at the end, and the settings that
    make the run come first among its hparams."""
    leading = ("model", "lr", "epochs", "seed")
    options: tuple[tuple[str, ...], ...] = (
        (), ("--ema-decay", "0"), ("--seed", "3"), ("--lr", "1e-3"), ("--drop-path", "0.1"), ("--opt", "sgd"),
        ("--smoothing", "0"), ("--epochs", "2"), ("--weight-decay", "0"), ("--clip-grad", "1"), ("--hflip", "0"),
        ("--layer-decay", "0.7"),
    )  # fmt: skip

    def check(place: Place, result: Result, given: str) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.plugins.hparams import plugin_data_pb2

        tags: list[str] = []
        params: list[str] = []
        for folder in sorted({path.parent for path in (place / "new").rglob("*tfevents*")}):
            events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
            events.Reload()
            tags += [tag for tag in events.Tags()["scalars"] if tag not in tags]
            for content in events.summary_metadata.values():
                if content.plugin_data.plugin_name == "hparams":
                    data = plugin_data_pb2.HParamsPluginData.FromString(content.plugin_data.content)
                    if data.HasField("experiment"):
                        params += [one.name for one in data.experiment.hparam_infos if one.name not in params]
                    elif data.HasField("session_start_info") and not params:
                        params += sorted(data.session_start_info.hparams)
        groups = sorted({tag.partition("/")[0] for tag in tags})  # as TensorBoard orders them
        accuracy = [group for group in groups if any(tag.startswith(f"{group}/") and "top1" in tag for tag in tags)]
        require(accuracy, f"no tag is an accuracy: {tags}")
        first = [tag for tag in tags if tag.partition("/")[0] == groups[0]]
        require(any("top1" in tag for tag in first), f"the first group, {groups[0]}, has no accuracy: {groups}")
        last = [tag for tag in tags if tag.partition("/")[0] == groups[-1]]
        require(
            any("final" in tag or "best" in tag for tag in last),
            f"the last group, {groups[-1]}, has no final values: {groups}",
        )
        require(set(leading) <= set(params[:5]), f"the settings open with {params[:5]}")
        if given:
            shown = [name.rpartition(".")[2] for name in params]
            require(given in shown, f"{given}, which is not as by default, is not among the settings: {params}")

    for number, more in enumerate(options):
        given = more[0][2:].replace("-", "_") if more else ""
        expect = Expect(0, check=functools.partial(check, given=given))
        yield Case(f"tensorboard/train-{number}", "train", lambda place, more=more: train(place, *more), expect)


# ----------------------------------------------------------------------------------------------------- figures of seeds


def _content(rng: random.Random, seeds: int, epochs: int = 4) -> dict[str, Any]:
    """A study's JSON of two variants whose seeds lie far apart, or close, near an end or in the middle."""
    arms = [
        dict(
            setting="",
            variant=name,
            key=name,
            seeds=list(range(seeds)),
            parameters=1000,
            images_per_epoch=100,
            speed={},
            data="made",
            config={"epochs": epochs},
        )
        for name in ("longhorn", "vim")
    ]
    runs = []
    for name in ("longhorn", "vim"):
        middle, spread = rng.choice((1, 10, 50, 90, 99.5)), rng.choice((0.1, 2, 20))
        for seed in range(seeds):
            curve = [min(100.0, max(0.0, rng.gauss(middle, spread))) for _ in range(epochs)]
            runs.append(
                dict(
                    key=name,
                    seed=seed,
                    final={"ema": curve[-1], "raw": curve[-1]},
                    seconds=10.0,
                    side_by_side=1,
                    skipped_updates=0,
                    hits={},
                    curve={
                        "epoch": list(range(1, epochs + 1)),
                        "train_loss": [2.0] * epochs,
                        "raw": curve,
                        "ema": curve,
                    },
                )
            )
    return dict(
        study="pairs", baseline="vim", pair=["longhorn", "vim"], resolutions=[], arms=arms, runs=runs, unfinished=[]
    )


def _watched(function: Callable[[], None], panels: Callable[[str], bool]) -> None:
    """Calls a function and requires of every figure that it saves that axes of per cents stay within them."""
    from matplotlib.figure import Figure

    save, seen = Figure.savefig, []

    def watch(self: Figure, *args: Any, **kwargs: Any) -> None:
        for axes in self.axes:
            if panels(axes.get_title()):
                seen.append((axes.get_title(), *axes.get_ylim()))
        save(self, *args, **kwargs)

    Figure.savefig = watch  # type: ignore[method-assign]
    function()
    require(seen, "no panel shows per cents")
    for title, low, high in seen:
        require(LOW <= low and high <= HIGH, f"the axis of {title!r} goes from {low:.1f} to {high:.1f}")


def _seeds() -> Iterator[Case]:
    def drawn(place: Place, seeds: int) -> Callable[[], None]:
        content = _content(place.rng, seeds)

        def function() -> None:
            from lab.tables import plot

            _watched(lambda: plot(content, Path("plot.png")), lambda title: "top-1" in title)

        return function

    def told(place: Place, seeds: int) -> Callable[[], None]:
        content = _content(place.rng, seeds)

        def function() -> None:
            from lab.tables import markdown

            text = markdown(content)
            for mean, half in re.findall(r"\| (-?\d+\.\d+) ± (\d+\.\d+)", text):
                mean, half = float(mean), float(half)
                require(mean - half >= LOW and mean + half <= HIGH, f"an accuracy of {mean} ± {half} is none:\n{text}")
            for low, high in re.findall(r"\[([+-]\d+\.\d+), ([+-]\d+\.\d+)\]", text):
                require(
                    -100 <= float(low) and float(high) <= 100,
                    f"no difference of accuracies is in [{low}, {high}]:\n{text}",
                )

        return function

    for number in range(8):
        yield Case(f"seeds/plot-two-{number}", PYTHON, functools.partial(drawn, seeds=2), Expect(0))
        yield Case(f"seeds/table-two-{number}", PYTHON, functools.partial(told, seeds=2), Expect(0))
    for number in range(2):
        yield Case(f"seeds/plot-one-{number}", PYTHON, functools.partial(drawn, seeds=1), Expect(0))
        yield Case(f"seeds/plot-three-{number}", PYTHON, functools.partial(drawn, seeds=3), Expect(0))

    def curves(place: Place) -> Callable[[], None]:
        """Curves of a run whose accuracies are all at an end."""
        from torch.utils.tensorboard import SummaryWriter

        value = place.rng.choice((0.0, 100.0, 99.9, 0.3, 50.0))
        writer = SummaryWriter(place / "made")
        for step in range(4):
            writer.add_scalar("train/epoch", step, step)
            for tag in ("val/top1", "val_ema/top1", "1_accuracy/top1"):
                writer.add_scalar(tag, value, step)
            for tag in ("train/loss", "val/loss", "train/lr"):
                writer.add_scalar(tag, 1 / (step + 1), step)
        writer.close()

        def function() -> None:
            from vision_longhorn.curves import main

            _watched(lambda: main(["made", "--out", "c.png"]), lambda title: "top-1" in title)

        return function

    for number in range(4):
        yield Case(f"seeds/curves-{number}", "curves", curves, Expect(0))


# -------------------------------------------------------------------------------------------------------------- studies


def _merged(place: Place, seeds: int = 2) -> tuple[Path, dict[str, Any]]:
    """A file of studies, and earlier results of all its runs."""
    from lab.plan import read_studies

    file = place / "studies.yaml"
    file.write_text(yaml.safe_dump(STUDY))
    study = read_studies(file)["pairs"]
    content = _content(place.rng, seeds)
    keys = {arm.variant: arm for arm in study.arms}
    for arm in content["arms"]:
        own = keys[arm["variant"]]
        arm.update(key=own.key, speed_key=own.speed_key, config=own.settings(), parameters=1000)
    for run in content["runs"]:
        run.update(key=keys[run["key"]].key, epochs=4, images_per_s=100.0, wall_seconds=11.0, environment={})
    content.update(task="images", asks="?", weights="ema", contrasts=[], environment=None)
    return file, content


def _studies() -> Iterator[Case]:
    """`lab` with earlier results, sound and spoilt, and with files of studies that hold nonsense."""

    def report(place: Place) -> Words:
        file, content = _merged(place)
        (place / "earlier.json").write_text(json.dumps(content))
        return ["pairs", "--file", file.name, "--out", "out", "--merge", "earlier.json", "--report"]

    def written(place: Place, result: Result) -> None:
        require(len(place.json("out/pairs.json")["runs"]) == 4, "runs are missing")
        require(
            is_png(place / "out" / "pairs.png") and (place / "out" / "pairs.md").is_file(), "there is no table or plot"
        )
        for mean, half in re.findall(r"\| (-?\d+\.\d+) ± (\d+\.\d+)", result.out):
            require(
                float(mean) + float(half) <= HIGH and float(mean) - float(half) >= LOW,
                f"an accuracy of {mean} ± {half} is none",
            )

    for number in range(6):
        yield Case(f"seeds/lab-report-{number}", "lab", report, Expect(0, check=written))

    def spoilt_results(place: Place) -> Words:
        file, content = _merged(place)
        part = place.rng.choice(("runs", "arms", "unfinished", "runs", "arms"))
        content[part] = spoil(content[part], place.rng)
        (place / "earlier.json").write_text(json.dumps(content))
        what = place.rng.choice(("--report", "--report", "--dry-run", "--list"))
        return ["pairs", "--file", file.name, "--out", "out", "--merge", "earlier.json", what]

    def damaged_results(place: Place) -> Words:
        words = report(place)
        damage(place / "earlier.json", place.rng)
        return words

    def spoilt_file(place: Place) -> Words:
        file, _ = _merged(place)
        file.write_text(yaml.safe_dump(spoil(STUDY, place.rng)))
        return ["pairs", "--file", file.name, "--out", "out", place.rng.choice(("--list", "--dry-run"))]

    def damaged_file(place: Place) -> Words:
        file, _ = _merged(place)
        damage(file, place.rng)
        return ["pairs", "--file", file.name, "--out", "out", "--list"]

    leaves = ("out/*",)
    for number in range(16):
        yield Case(f"lines/lab-spoilt-results-{number}", "lab", spoilt_results, Expect(leaves=leaves))
        yield Case(f"lines/lab-spoilt-file-{number}", "lab", spoilt_file, Expect(leaves=leaves))
        if number < 8:
            yield Case(f"damage/lab-results-{number}", "lab", damaged_results, Expect(leaves=leaves))
            yield Case(f"damage/lab-file-{number}", "lab", damaged_file, Expect(leaves=leaves))


# ----------------------------------------------------------------------------------------------------------------- maps


def _arrows() -> Iterator[Case]:
    """Over the maps of blocks that read columns stand vertical arrows, over the others horizontal ones."""

    def check(kwargs: dict[str, Any], rows: bool, columns: bool) -> None:
        import timm
        import torch
        from matplotlib.figure import Figure
        from matplotlib.text import Text

        from vision_longhorn.maps import plot_maps, token_maps

        seen: list[str] = []
        save = Figure.savefig

        def watch(self: Figure, *args: Any, **more: Any) -> None:
            seen.extend(text.get_text() for text in self.findobj(Text))
            save(self, *args, **more)

        Figure.savefig = watch  # type: ignore[method-assign]
        torch.manual_seed(0)
        model = timm.create_model(
            "vlonghorn_test", num_classes=3, img_size=24, patch_size=8, embed_dim=16, **kwargs
        ).eval()
        plot_maps(token_maps(model, torch.randn(1, 3, 24, 24)), torch.rand(24, 24, 3).numpy(), "maps.png")
        text = " ".join(seen)
        for arrows, wanted in (("→←", rows), ("↓↑", columns)):
            found = any(arrow in text for arrow in arrows)
            require(found == wanted, f"{arrows} {'stand there' if found else 'are missing'}: {sorted(set(seen))[:12]}")

    mean = {"class_token": "none", "global_pool": "avg"}
    models: tuple[tuple[dict[str, Any], bool, bool], ...] = (
        ({"depth": 2}, True, False),
        ({"depth": 2, "scan_order": "rows_columns", **mean}, True, True),
        ({"depth": 4, "scan_order": "rows_columns", **mean}, True, True),
        ({"depth": 1, "scan_order": "rows_columns", **mean}, True, False),
        ({"depth": 2, "scan_order": "rows_columns"}, True, True),
        ({"depth": 3, "scan_order": "rows_columns", "rule": "exact", **mean}, True, True),
        ({"depth": 2, "wiring": "alternate"}, True, False),
        ({"depth": 4, "wiring": "alternate", "scan_order": "rows_columns", **mean}, True, True),
        ({"depth": 2, "wiring": "shared"}, True, False),
        ({"depth": 2, "wiring": "shared", "scan_order": "rows_columns", **mean}, True, True),
        ({"depth": 2, "rule": "gla", "scan_order": "rows_columns", **mean}, True, True),
    )
    for number, (kwargs, rows, columns) in enumerate(models):
        run = functools.partial(check, kwargs, rows, columns)
        yield Case(f"arrows/{number}", PYTHON, lambda place, run=run: run, Expect(0))
