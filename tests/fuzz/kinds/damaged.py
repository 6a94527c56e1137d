"""Damaged files, files that are written over, indexes and model folders that hold nonsense."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.fuzz.case import PYTHON, Case, Expect, Place, require
from tests.fuzz.damage import DAMAGES, damage, flip_bit, lengthen, spoil
from tests.fuzz.kinds.common import (
    draw_maps,
    evaluate,
    is_png,
    link,
    predict,
    same_end,
    same_evaluation,
    same_maps,
    same_predictions,
    same_start,
    train,
)
from tests.fuzz.material import EVAL
from tests.fuzz.process import Result

Make = Callable[[Place], Sequence[str | Path] | Callable[[], Any]]


def cases() -> Iterator[Case]:
    yield from _checkpoints()
    yield from _other_files()
    yield from _written_over()
    yield from _indexes()
    yield from _hub_folders()


def _checkpoints() -> Iterator[Case]:
    def on_run(make: Callable[[Place], Sequence[str | Path]], how: Any, name: str = "best.pt") -> Make:
        def made(place: Place) -> Sequence[str | Path]:
            damage(place.copy("run") / name, place.rng, how)
            return make(place)

        return made

    def to_folder(place: Place, result: Result) -> None:
        found, wanted = (load_file(folder / "hub" / "model.safetensors") for folder in (place.folder, place.material))
        same = found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
        require(same, "the model folder holds other weights")

    of_run: dict[str, tuple[Callable[[Place], Sequence[str | Path]], Any, int]] = {
        "eval": (evaluate, same_evaluation, 30),
        "predict": (predict, same_predictions, 16),
        "maps": (draw_maps, same_maps, 10),
        "hub": (lambda place: ["run", "hub"], to_folder, 16),
        "export": (lambda place: ["run", "hub/"], to_folder, 14),
        "train": (lambda place: train(place, "--init", "run/best.pt"), same_start, 16),
    }
    for word, (make, check, count) in of_run.items():
        for number in range(count):
            how = flip_bit if number % 2 else (*DAMAGES, lengthen)[number // 2 % (len(DAMAGES) + 1)]
            expect = Expect(check=check, leaves=("new/*",) if word == "train" else ())
            yield Case(f"damage/{word}-best-{number}", word, on_run(make, how), expect)

    def resume(how: Any) -> Make:
        def made(place: Place) -> list[str]:
            link(place, "shards")
            damage(place.copy("begun") / "last.pt", place.rng, how)
            return ["--resume", "begun"]

        return made

    for number in range(16):
        how = flip_bit if number % 2 else (*DAMAGES, lengthen)[number // 2 % (len(DAMAGES) + 1)]
        yield Case(
            f"damage/train-resume-{number}",
            "train",
            resume(how),
            Expect(check=same_end, own=("begun/*",), leaves=("begun/*",)),
        )


def _other_files() -> Iterator[Case]:
    def safetensors(make: Callable[..., Sequence[str | Path]], how: Any) -> Make:
        def made(place: Place) -> Sequence[str | Path]:
            damage(place.copy("hub") / "model.safetensors", place.rng, how)
            return make(place, "hub")

        return made

    for number in range(10):
        how = flip_bit if number < 6 else DAMAGES[number - 5]
        make = safetensors(evaluate, how)
        yield Case(f"damage/eval-safetensors-{number}", "eval", make, Expect(check=same_evaluation))
        make = safetensors(predict, how)
        yield Case(f"damage/predict-safetensors-{number}", "predict", make, Expect(check=same_predictions))

    def onnx(place: Place) -> Callable[[], Any]:
        for path in place.material.glob("model.onnx*"):  # with what may be written beside it
            place.copy(path.name)
        place.notes["how"] = damage(place / "model.onnx", place.rng)

        def load() -> None:
            from vision_longhorn.export import largest_error, load_onnx
            from vision_longhorn.loading import load_run

            try:
                run = load_onnx("model.onnx")
                error = largest_error(load_run(place.material / "run")[0].eval(), run)
            except Exception as refused:  # onnxruntime's, or this package's
                sys.exit(f"error: {type(refused).__name__}")
            require(error < 1e-3, f"its outputs are others, by {error:.1e}")

        return load

    for number in range(12):
        yield Case(f"damage/onnx-{number}", PYTHON, onnx)

    def verify(place: Place) -> list[str]:
        path = place.rng.choice(sorted(place.copy("shards").glob("*.tar")))
        damage(path, place.rng)
        return ["verify", "shards", "--full"]

    def on_shards(place: Place) -> list[str | Path]:
        path = place.rng.choice(sorted(place.copy("shards").glob("val*.tar")))
        damage(path, place.rng)
        return [place.material / "run", *EVAL, "--data", "shards", "--out", "eval.json"]

    def all_counted(place: Place, result: Result) -> None:
        require(place.json("eval.json")["count"] == place.json("/eval.json")["count"], "samples are missing")

    def train_on(place: Place) -> list[str | Path]:
        path = place.rng.choice(sorted(place.copy("shards").glob("*.tar")))
        damage(path, place.rng)
        return train(place)

    for number in range(12):
        yield Case(f"damage/shards-verify-{number}", "shards", verify)
        yield Case(f"damage/eval-shards-{number}", "eval", on_shards, Expect(check=all_counted))
    for number in range(8):
        yield Case(f"damage/train-shards-{number}", "train", train_on, Expect(leaves=("new/*",)))

    def curves(place: Place) -> list[str]:
        run = place.copy("run")
        for path in run.glob("*tfevents*"):
            damage(path, place.rng)
        return ["run", "--out", "curves.png"]

    def drawn(place: Place, result: Result) -> None:
        require(is_png(place / "curves.png"), "there is no picture")

    for number in range(12):
        yield Case(f"damage/curves-{number}", "curves", curves, Expect(check=drawn))


def _written_over() -> Iterator[Case]:
    victims = (
        "run/last.pt", "run/best.pt", "run/update-0000004.pt", "run/config.yaml", "run/metrics.json", "run/summary.csv",
        "run/env.json", "photos/photo0.jpg", "shards/_info.json", "shards/train-000000.tar", "model.onnx",
        "hub/config.json", "hub/model.safetensors", "notes.txt", "picture.png", "link.png", "events",
    )  # fmt: skip

    def prepared(place: Place, victim: str) -> str:
        for name in "run", "photos", "shards", "hub", "model.onnx":
            place.copy(name)
        (place / "notes.txt").write_text("what I wanted to remember\n")
        (place / "picture.png").write_bytes((place.material / "pictures/val/oak/oak-00.png").read_bytes())
        (place / "link.png").symlink_to("run/last.pt")
        if victim == "events":
            return f"run/{next((place / 'run').glob('*tfevents*')).name}"
        return victim

    def over(victim: str, words: Callable[[str], Sequence[str]]) -> Make:
        return lambda place: words(prepared(place, victim))

    photo = "photos/photo1.jpg"
    outputs: dict[str, tuple[str, Callable[[str], list[str]], Sequence[str]]] = {
        "maps": ("maps", lambda out: ["run", photo, "--out", out], victims),
        "curves": ("curves", lambda out: ["run", "--out", out], victims),
        "predict": ("predict", lambda out: ["run", "photos", "--workers", "0", "--out", out], victims[::3]),
        "predict-maps": ("predict", lambda out: ["run", "photos", "--workers", "0", "--maps", out], victims[1::3]),
        "eval": ("eval", lambda out: ["run", *EVAL, "--out", out], victims[::2]),
        "eval-predictions": ("eval", lambda out: ["run", *EVAL, "--predictions", out], victims[1::3]),
        "eval-report": ("eval", lambda out: ["run", *EVAL, "--report", out], victims[2::4]),
        "hub": ("hub", lambda out: ["run", out], victims[::2]),
        "export": ("export", lambda out: ["run", f"{out}/"], victims[::4]),
        "train": ("train", lambda out: ["--data", "shards", "--run-dir", out], victims[::4]),
        "shards": ("shards", lambda out: ["digits", out], victims[::3]),
        "lab": ("lab", lambda out: ["mixers", "--out", out, "--report"], victims[::4]),
    }
    for name, (word, words, which) in outputs.items():
        for victim in which:
            about = Path(victim).name
            yield Case(f"overwrite/{name}-{about}", word, over(victim, words), Expect(1))

    def folder(place: Place) -> list[str]:
        prepared(place, "run")
        return ["run", photo, "--out", place.rng.choice(["run", "photos", "shards", ".", "hub"])]

    def own(word: str, first: list[str], out: str) -> Make:
        """Puts a file there that the tool itself has written before."""

        def made(place: Place) -> list[str]:
            place.copy("run")
            place.copy("photos")
            place.copy(out.removeprefix("run/"), out)
            return [*first, "--out", out]

        return made

    for number in range(3):
        yield Case(f"overwrite/maps-folder-{number}", "maps", folder, Expect(1))
    drawn = Expect(0, own=("*.png",))
    yield Case("overwrite/curves-own", "curves", own("curves", ["run"], "curves.png"), drawn)
    yield Case("overwrite/curves-of-run", "curves", own("curves", ["run"], "run/curves.png"), drawn)
    yield Case("overwrite/maps-own", "maps", own("maps", ["run", photo], "maps.png"), drawn)
    yield Case("overwrite/eval-other", "eval", own("eval", ["run", *EVAL, "--raw"], "eval.json"), Expect(1))


def _indexes() -> Iterator[Case]:
    wrong: dict[str, Any] = {
        "class_names": (
            [["ash"], "beech", "oak"], [1, 2, 3], "abc", {"ash": 0, "beech": 1, "oak": 2}, ["ash", "beech"],
            [None, "beech", "oak"], ["ash", "beech", 3], [], 5, [True, False, True],
        ),
        "num_classes": (-1, 0, "3", 3.5, True, [3], {"n": 3}, "three", 2),
        "display_names": ("abc", [1, 2, 3], ["a"], [["a"], "b", "c"], 7, {"ash": "Ash"}),
        "splits": ([], {"train": []}, None, 5, {"train": {}}, "train", {"train": None}),
        "shard_lengths": ("floats", "strings", "negative", "true", "nested", "null"),
        "num_samples": ("18", -18, {}, [18], 18.5),
        "filenames": ([1, 2, 3], "abc", [None] * 3, [["train-000000.tar"]] * 3, ["../a.tar"] * 3, ["", "", ""]),
    }  # fmt: skip
    flat = [(key, value) for key, values in wrong.items() for value in values]

    def broken(place: Place, key: str, value: Any) -> None:
        path = place.copy("shards") / "_info.json"
        index = json.loads(path.read_text())
        entry = index["splits"]["val"]
        lengths = entry["shard_lengths"]
        forms = {
            "floats": [float(length) for length in lengths], "strings": [str(length) for length in lengths],
            "negative": [lengths[0] + 2 * sum(lengths[1:]), *(-length for length in lengths[1:])],
            "true": [True] * len(lengths), "nested": [lengths], "null": None,
        }  # fmt: skip
        if key == "shard_lengths":
            entry[key] = forms[value]
            if value == "true":
                entry["num_samples"] = len(lengths)
        elif key in entry:
            entry[key] = value
        else:
            index[key] = value
        path.write_text(json.dumps(index))

    def use(word: str, key: str, value: Any) -> Make:
        def made(place: Place) -> Sequence[str | Path]:
            broken(place, key, value)
            if word == "shards":
                return ["verify", "shards"]
            if word == "eval":
                return [place.material / "run", *EVAL, "--data", "shards", "--out", "eval.json"]
            return train(place)

        return made

    for number, (key, value) in enumerate(flat):
        fails = ("_info.json",) if (key, value) != ("num_classes", 2) else ()
        expect = Expect(1, fails=fails, lines=60 if not fails else 6)
        yield Case(f"index/verify-{key}-{number}", "shards", use("shards", key, value), expect)
        if number % 2:
            yield Case(f"index/eval-{key}-{number}", "eval", use("eval", key, value), Expect(1, fails=fails))
        elif number % 4 == 0:
            yield Case(f"index/train-{key}-{number}", "train", use("train", key, value), Expect(1))

    def spoilt(word: str) -> Make:
        def made(place: Place) -> Sequence[str | Path]:
            path = place.copy("shards") / "_info.json"
            path.write_text(json.dumps(spoil(json.loads(path.read_text()), place.rng)))
            if word == "shards":
                return [place.rng.choice(["verify", "index"]), "shards"]
            if word == "train":
                return train(place)
            return [place.material / "run", *EVAL, "--data", "shards", "--out", "eval.json"]

        return made

    for number in range(16):
        for word in "shards", "eval", "train":
            if word != "train" or number < 6:
                expect = Expect(own=("shards/_info.json",), leaves=("new/*",), lines=60)
                yield Case(f"index/{word}-spoilt-{number}", word, spoilt(word), expect)

    texts: dict[str, Callable[[bytes, Place], bytes]] = {
        "latin": lambda data, place: data.replace(b"beech", "h\u00eatre".encode("latin-1")),
        "utf-16": lambda data, place: data.decode().encode("utf-16"),
        "cut": lambda data, place: data[: place.rng.randrange(1, len(data))],
        "noise": lambda data, place: place.rng.randbytes(30_000),
        "empty": lambda data, place: b"",
        "nested": lambda data, place: b"[" * 100_000,
        "zeros": lambda data, place: bytes(4096),
        "list": lambda data, place: b"[" + data + b"]",
        "long": lambda data, place: b"\xff" + data * 400,
        "html": lambda data, place: b"<html>" + b"x" * 50_000,
    }

    def text(word: str, how: Callable[[bytes, Place], bytes]) -> Make:
        def made(place: Place) -> Sequence[str | Path]:
            path = place.copy("shards") / "_info.json"
            path.write_bytes(how(path.read_bytes(), place))
            if word == "shards":
                return [place.rng.choice(["verify", "index"]), "shards"]
            return [place.material / "run", *EVAL, "--data", "shards", "--out", "eval.json"]

        return made

    def short(place: Place, result: Result) -> None:
        require(len(result.err) < 500, f"it prints {len(result.err)} characters")

    for name, how in texts.items():
        for word in "shards", "eval":
            expect = Expect(1, fails=("_info.json",), after=short)
            yield Case(f"index-text/{word}-{name}", word, text(word, how), expect)


def _hub_folders() -> Iterator[Case]:
    def on(word: str, place: Place) -> Sequence[str | Path]:
        if word == "eval":
            return evaluate(place, "hub")
        if word == "predict":
            return predict(place, "hub")
        if word == "maps":
            return draw_maps(place, "hub")
        if word == "export":
            return ["local-dir:hub", "model.onnx"]
        return train(place, "--init", "hub")

    def config(word: str, how: Any) -> Make:
        def made(place: Place) -> Sequence[str | Path]:
            path = place.copy("hub") / "config.json"
            if how is None:
                path.write_text(json.dumps(spoil(json.loads(path.read_text()), place.rng)))
            else:
                damage(path, place.rng, how)
            return on(word, place)

        return made

    def missing(word: str, name: str) -> Make:
        def made(place: Place) -> Sequence[str | Path]:
            os.unlink(place.copy("hub") / name)
            return on(word, place)

        return made

    for word in "eval", "predict", "maps", "train":
        for number in range(4):
            expect = Expect(leaves=("new/*",))
            yield Case(f"hub-folders/{word}-damaged-{number}", word, config(word, DAMAGES[number + 1]), expect)
            yield Case(f"hub-folders/{word}-spoilt-{number}", word, config(word, None), expect)
        for name in "config.json", "model.safetensors":
            yield Case(f"hub-folders/{word}-without-{name}", word, missing(word, name), Expect(1))
    for key, value in (
        ("num_classes", "3"),
        ("num_features", "16"),
        ("architecture", 5),
        ("architecture", "nosuchmodel"),
        ("model_args", [1]),
        ("model_args", {"depth": "2"}),
        ("pretrained_cfg", None),
        ("pretrained_cfg", {"mean": "x"}),
        ("label_names", "abc"),
        ("global_pool", 3),
        ("pretrained_cfg", {"input_size": [3, "24", 24]}),
        ("num_classes", -3),
    ):

        def of_key(place: Place, key: str = key, value: Any = value) -> Sequence[str | Path]:
            path = place.copy("hub") / "config.json"
            content = json.loads(path.read_text())
            old = content.get(key)
            content[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
            path.write_text(json.dumps(content))
            return evaluate(place, "hub")

        about = json.dumps(value)[:20].replace(" ", "").replace('"', "").replace("/", "")
        yield Case(f"hub-folders/eval-{key}-{about}", "eval", of_key, Expect(never=("0.00 %.*0.00 %",)))
