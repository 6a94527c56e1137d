"""Command lines that are drawn from what a tool's own parser has."""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.fuzz.case import TOOLS, Case, Expect, Place, require
from tests.fuzz.kinds.common import is_png, link, train
from tests.fuzz.lines import draw_option, options_of, parser_of, spoil_line, subcommands_of
from tests.fuzz.material import EVAL
from tests.fuzz.process import Result

Words = Sequence[str | Path]
# Options whose value may be right and then takes longer than a case has, or whose work is another machine's
LONG = {
    "--compile", "--pretrained", "--speed", "--cuda-graphs", "--epochs", "--batch", "--img-size",
    "--workers",
}  # fmt: skip
COUNTS = {
    "train": 44, "eval": 30, "predict": 24, "shards": 44, "curves": 34, "export": 44, "hub": 34, "maps": 30,
    "lab": 36,
}  # fmt: skip


def _base(tool: str, place: Place) -> list[str]:
    """A command line that is right and whose work is short."""
    link(place, "photos", "pictures", "shards")
    place.copy("run")
    if tool == "shards":
        place.copy("shards", "mine")
    bases: dict[str, Callable[[], Words]] = {
        "train": lambda: train(place),
        "eval": lambda: ["run", *EVAL, "--data", "shards", "--out", "eval.json"],
        "predict": lambda: ["run", "photos/photo0.jpg", "--workers", "0", "--out", "p.csv"],
        "curves": lambda: ["run", "--out", "c.png"],
        "export": lambda: ["run", "folder/"],
        "hub": lambda: ["run", "folder"],
        "maps": lambda: ["run", "photos/photo0.jpg", "--out", "m.png"],
        "lab": lambda: [
            place.rng.choice(["mixers", "inside"]),
            "--out",
            "out",
            place.rng.choice(["--list", "--dry-run", "--report"]),
        ],
        "shards": lambda: place.rng.choice(
            (
                ["imagefolder", "pictures/val", "out"],
                ["digits", "out"],
                ["verify", "mine"],
                ["index", "mine"],
                ["imagenet", "-", "photos/photo0.jpg", "photos/photo1.jpg", "out"],
            )
        ),
    }
    return [str(word) for word in bases[tool]()]


def cases() -> Iterator[Case]:
    def made(place: Place, tool: str) -> list[str]:
        rng, words = place.rng, _base(tool, place)
        parser: Any = parser_of(tool)
        parser = subcommands_of(parser).get(words[0], parser)
        options = [action for action in options_of(parser) if not LONG & set(action.option_strings)]
        if options and rng.random() < 0.75:
            for _ in range(rng.choice((1, 1, 2))):
                words += draw_option(rng.choice(options), rng)
        else:
            words = list(spoil_line(words, rng))
        # A longer run than the one of `_base` would tell nothing more.
        return words if tool != "train" or "--epochs" in words else [*words, "--epochs", "1"]

    def usable(place: Place, result: Result) -> None:
        """All that was written is whole."""
        for path in place.folder.rglob("*"):
            if path.suffix == ".json" and path.is_file():
                json.loads(path.read_text())
            if path.suffix == ".png" and path.is_file() and not path.is_symlink():
                require(is_png(path), f"{path.name} is no picture")

    for tool in TOOLS:
        for number in range(COUNTS[tool]):
            own = ("mine/_info.json",) if tool == "shards" else ("run/curves.png",)
            leaves = {"train": ("new/*", "data/*", "runs/*"), "eval": ("eval.json",)}.get(tool, ())
            expect = Expect(own=own, leaves=leaves, check=usable)
            yield Case(f"lines/{tool}-{number}", tool, functools.partial(made, tool=tool), expect)

    def alone(place: Place, words: list[str]) -> list[str]:
        return words

    for tool in TOOLS:
        for number, words in enumerate(
            ([], ["--help"], ["--hlep"], ["--version"], ["x"], ["x", "y", "z", "w"], ["--", "x"])
        ):
            code = 0 if words == ["--help"] else 1 if words in (["--hlep"], ["x", "y", "z", "w"]) else None
            if not words and tool in ("train", "lab"):
                continue  # the demo, which is a training run of minutes, or nothing at all
            make = functools.partial(alone, words=list(words))
            yield Case(f"lines/{tool}-bare-{number}", tool, make, Expect(code))
