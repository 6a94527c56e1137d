"""Folders and tars as people have them, and what is said where they cannot be read."""

import bz2
import functools
import io
import json
import lzma
import os
import re
import resource
import signal
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.fuzz.case import Case, Expect, Place, require
from tests.fuzz.kinds.common import EVAL, link, train
from tests.fuzz.material import CLASSES, draw_folder, picture
from tests.fuzz.process import Result
from vision_longhorn.command_line import commands

TRAIN_SPLITS = ("train", "Train", "TRAIN", "training", "Training")
VAL_SPLITS = (
    "val", "valid", "validation", "Val", "VALID", "Validation", "dev", "test", "Test", "testing", "eval", "holdout",
)  # fmt: skip
VEHICLES = ("bus", "car", "train")
Words = Sequence[str | Path]


def cases() -> Iterator[Case]:
    yield from _split_folders()
    yield from _strange_folders()
    yield from _sixteen_bits()
    yield from _unreadable_shards()
    yield from _labels()
    yield from _compressions()
    yield from _shard_folders()
    yield from _missing_splits()
    yield from _nothing_to_verify()
    yield from _full_disks()


# ------------------------------------------------------------------------------------------------------------- folders


def _split_folders() -> Iterator[Case]:
    """Folders of splits in all spellings: all images become shards, or what does not is named."""

    def made(place: Place) -> Words:
        rng, root = place.rng, place / "images"
        splits = [rng.choice(TRAIN_SPLITS), *rng.sample(VAL_SPLITS, rng.choice((1, 1, 2)))]
        counts = {split: 3 * rng.randint(1, 3) for split in dict.fromkeys(splits)}
        for number, (split, count) in enumerate(counts.items()):
            draw_folder(root / split, count // 3, seed=number)
        if rng.random() < 0.3:  # pictures that nobody has sorted
            flat = rng.choice(("flat", "unlabeled", "valid2", "more"))
            (root / flat).mkdir()
            for number in range(4):
                picture(number, 0).save(root / flat / f"{number}.jpg")
            counts[flat] = 4
        place.notes["counts"] = counts
        return ["imagefolder", "images", "out"]

    def all_there(place: Place, result: Result) -> None:
        index = place.json("out/_info.json")
        require(set(index["class_names"]) == set(CLASSES), f"the classes are {index['class_names']}")
        found = sum(entry["num_samples"] for entry in index["splits"].values())
        told = _left_out(place, result)
        total = sum(place.notes["counts"].values())
        require(found + told == total, f"{found} of {total} images became shards, and {told} lie in folders it names")

    for number in range(24):
        yield Case(f"folders/imagefolder-splits-{number}", "shards", made, Expect(check=all_there))

    def flat_val(place: Place, word: str) -> Words:
        root = draw_folder(place / "images" / "train", 3).parent
        flat = root / place.rng.choice(("val", "valid", "test"))
        flat.mkdir()
        for number in range(4):
            picture(number, number % 3).save(flat / f"{number}.jpg")
        place.notes["counts"] = {"train": 9, flat.name: 4}
        return ["imagefolder", "images", "out"] if word == "shards" else train(place, data="images")

    def spelt(place: Place) -> Words:
        root = draw_folder(place / "images" / place.rng.choice(TRAIN_SPLITS), 3).parent
        draw_folder(root / place.rng.choice(VAL_SPLITS[:6]), 2, seed=1)
        return train(place, data="images")

    def vehicles(place: Place, word: str) -> Words:
        classes = place.rng.choice(
            (VEHICLES, ("bus", "test", "train"), ("car", "val"), ("train", "tram"), ("test", "val", "van"))
        )
        draw_folder(place / "images", 4, classes)
        place.notes["classes"] = classes
        if word == "shards":
            return ["imagefolder", "images", "out"]
        draw_folder(place / "more", 3, classes, seed=1)
        return train(place, "--val-data", "more", data="images")

    def no_guess(place: Place, result: Result) -> None:
        found = place.json("out/_info.json")["class_names"]
        require(tuple(found) == place.notes["classes"], f"the classes are {found}, of {place.notes['classes']}")

    for number in range(4):
        make = functools.partial(flat_val, word="shards")
        yield Case(f"folders/imagefolder-flat-{number}", "shards", make, Expect(check=all_there))
        make = functools.partial(flat_val, word="train")
        yield Case(f"folders/train-flat-{number}", "train", make, Expect(1))
        make = functools.partial(vehicles, word="shards")
        yield Case(f"folders/imagefolder-vehicles-{number}", "shards", make, Expect(check=no_guess))
        make = functools.partial(vehicles, word="train")
        yield Case(f"folders/train-vehicles-{number}", "train", make)
    for number in range(8):
        yield Case(f"folders/train-spelt-{number}", "train", spelt, Expect(0))


def _left_out(place: Place, result: Result) -> int:
    """Images in the folders of images/ that are named in what was printed."""
    return sum(
        count
        for name, count in place.notes["counts"].items()
        if re.search(rf"left out[^\n]*\b{re.escape(name)}\b|\b{re.escape(name)}\b[^\n]*left out", result.said)
    )


def _strange_folders() -> Iterator[Case]:
    """Class folders with what else lies in them: nothing hidden, nothing twice, ordinary files and links to them."""

    def strew(place: Place, root: Path) -> int:
        """Draws what lies in the folders of classes, and returns how many pictures count."""
        rng, count = place.rng, 0
        draw_folder(root, 3)
        count += 9
        one = root / "ash"
        for what in rng.sample(
            ("hidden", "hidden-folder", "thumbs", "loop", "pipe", "link", "below", "dangling", "mac", "socket"), 4
        ):
            if what == "hidden":
                picture(1, 0).save(one / "._ash-00.png", "PNG")
            elif what == "hidden-folder":
                (one / ".ipynb_checkpoints").mkdir()
                picture(1, 0).save(one / ".ipynb_checkpoints" / "ash-00-checkpoint.png")
            elif what == "thumbs":
                (one / "Thumbs.db").write_bytes(b"x")
                (one / ".DS_Store").write_bytes(b"x")
            elif what == "loop":
                (one / "again").symlink_to("../..")
            elif what == "pipe":
                os.mkfifo(one / "z.jpg")
            elif what == "link":
                (one / "linked.png").symlink_to(place.material / "photos" / "photo0.jpg")
                count += 1
            elif what == "below":
                (one / "more").mkdir()
                picture(7, 0).save(one / "more" / "x.png")
                count += 1
            elif what == "mac":
                (root / ".Trash").mkdir()
                picture(7, 0).save(root / ".Trash" / "x.png")
            elif what == "socket":
                (one / "zz.jpg").mkdir()
            else:
                (one / "gone.png").symlink_to("nowhere.png")
                place.notes["dangling"] = True
        return count

    def shards(place: Place) -> Words:
        place.notes["count"] = strew(place, place / "images")
        return ["imagefolder", "images", "out", "--on-bad", "skip"]

    def evaluated(place: Place) -> Words:
        place.notes["count"] = strew(place, place / "images")
        return [place.material / "run", *EVAL, "--data", "images", "--out", "eval.json"]

    def trained(place: Place) -> Words:
        place.notes["count"] = strew(place, place / "images" / "train")
        draw_folder(place / "images" / "val", 2, seed=1)
        return train(place, "--max-bad-samples", "3", data="images")

    def predicted(place: Place) -> Words:
        place.notes["count"] = strew(place, place / "images")
        run = place.material / "run"
        return [
            run,
            "images",
            "--workers",
            "0",
            "--on-bad",
            "skip",
            "--format",
            "csv",
            "--out",
            "p.csv",
            "--top-k",
            "1",
        ]

    def counted(place: Place, result: Result) -> None:
        if (place / "out").exists():
            found = place.json("out/_info.json")["splits"]["train"]["num_samples"]
        elif (place / "eval.json").exists():
            found = place.json("eval.json")["count"]
        else:
            found = len((place / "p.csv").read_text().splitlines()) - 1
        require(found == place.notes["count"], f"{found} images were taken, of {place.notes['count']}")

    for number in range(12):
        yield Case(f"folders/imagefolder-strewn-{number}", "shards", shards, Expect(check=counted), limit=20)
        yield Case(f"folders/predict-strewn-{number}", "predict", predicted, Expect(check=counted), limit=20)
        if number < 8:
            yield Case(f"folders/eval-strewn-{number}", "eval", evaluated, Expect(check=counted), limit=20)
            yield Case(f"folders/train-strewn-{number}", "train", trained, Expect(leaves=("new/*",)), limit=30)

    def members(place: Place) -> Words:
        rng, samples = place.rng, []
        for number in range(6):
            key = f"{number:03d}"
            samples += [(f"{key}.png", _png(number)), (f"{key}.cls", b"%d" % (number % 3))]
            if rng.random() < 0.6:
                samples += [
                    (rng.choice((f"._{key}.png", ".DS_Store", f"__MACOSX/._{key}.png", f"a/._{key}.cls")), b"x" * 82)
                ]
        write_tar(place / "data" / "val-0.tar", samples)
        _write_index(place / "data", {"val": {"val-0.tar": 6}})
        if rng.random() < 0.5:
            return ["verify", "data", "--full"]
        return ["index", "data"]

    def six(place: Place, result: Result) -> None:
        require(place.json("data/_info.json")["splits"]["val"]["num_samples"] == 6, "not six samples are counted")

    def evaluated_tar(place: Place) -> Words:
        members(place)
        return [place.material / "run", *EVAL, "--data", "data", "--out", "eval.json"]

    def six_evaluated(place: Place, result: Result) -> None:
        require(place.json("eval.json")["count"] == 6, "not six samples are evaluated")

    for number in range(6):
        expect = Expect(0, own=("data/_info.json",), check=six)
        yield Case(f"folders/tar-members-{number}", "shards", members, expect)
        yield Case(f"folders/eval-tar-members-{number}", "eval", evaluated_tar, Expect(0, check=six_evaluated))


def _png(number: int) -> bytes:
    file = io.BytesIO()
    picture(number, number % 3).save(file, "PNG")
    return file.getvalue()


def write_tar(path: Path, members: Sequence[tuple[str, bytes]], mode: str = "w") -> Path:
    """A tar of (name, bytes) pairs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def _samples(count: int, start: int = 0) -> list[tuple[str, bytes]]:
    members = []
    for number in range(start, start + count):
        members += [(f"{number:03d}.png", _png(number)), (f"{number:03d}.cls", b"%d" % (number % 3))]
    return members


def _write_index(folder: Path, splits: dict[str, dict[str, int]]) -> None:
    index = {
        "splits": {
            name: {
                "name": name,
                "num_samples": sum(shards.values()),
                "filenames": list(shards),
                "shard_lengths": list(shards.values()),
            }
            for name, shards in splits.items()
        },
        "num_classes": 3,
        "class_names": list(CLASSES),
    }
    (folder / "_info.json").write_text(json.dumps(index))


# ------------------------------------------------------------------------------------------------------------ pictures


def _sixteen_bits() -> Iterator[Case]:
    """16-bit pictures, of which only those that come out black are noted."""

    def draw(path: Path, place: Place, most: int) -> None:
        seed = place.rng.randrange(1000)
        values = np.random.default_rng(seed).integers(0, most + 1, (SIZE, SIZE)).astype(np.uint16)
        values[0, 0] = most
        Image.fromarray(values).save(path)

    def predicted(place: Place, most: int) -> Words:
        draw(place / "scan.png", place, most)
        return [place.material / "run", "scan.png", "--workers", "0", "--device", "cpu"]

    def drawn(place: Place, most: int) -> Words:
        draw(place / "scan.png", place, most)
        return [place.material / "run", "scan.png"]

    def stored(place: Place, most: int) -> Words:
        draw(draw_folder(place / "images", 3) / "oak" / "scan.png", place, most)
        return ["imagefolder", "images", "out"]

    def evaluated(place: Place, most: int) -> Words:
        draw(draw_folder(place / "images", 2) / "oak" / "scan.png", place, most)
        return [place.material / "run", *EVAL, "--data", "images", "--out", "eval.json"]

    def trained(place: Place, most: int) -> Words:
        draw(draw_folder(place / "images" / "train", 3) / "oak" / "scan.png", place, most)
        draw_folder(place / "images" / "val", 2, seed=1)
        return train(place, "--batch-size", "2", data="images")  # so that an epoch has all of them

    SIZE = 24
    for word, make in (
        ("predict", predicted),
        ("maps", drawn),
        ("shards", stored),
        ("eval", evaluated),
        ("train", trained),
    ):
        for most in (255, 1023, 4095, 65535):
            expect = Expect(0, never=("(?i)16.bit|black",)) if most == 65535 else Expect(0, says=(r"(?i)scan\.png",))
            if word == "predict" and most != 65535:
                expect = Expect(0, says=("(?i)16.bit",))
            if word == "train" and most != 65535:
                expect = Expect(0, says=(r"(?i)16.bit",))
            yield Case(f"sixteen-bit/{word}-{most}", word, functools.partial(make, most=most), expect)


# --------------------------------------------------------------------------------------------------------------- shards


def _unreadable_shards() -> Iterator[Case]:
    """Shards that are damaged at their start: what is wrong is said in words."""

    def header(place: Place) -> bytes:
        data = bytearray((place.material / "shards" / "val-000000.tar").read_bytes())
        data[place.rng.randrange(148, 154)] ^= 1
        return bytes(data)

    starts: dict[str, Callable[[Place], bytes]] = {
        "empty": lambda place: b"",
        "text": lambda place: b"no tar at all\n" * 100,
        "zeros": lambda place: bytes(1024),
        "few-bytes": lambda place: b"abc",
        "noise": lambda place: place.rng.randbytes(3000),
        "gzip-noise": lambda place: b"\x1f\x8b\x08\x00" + place.rng.randbytes(300),
        "html": lambda place: b"<html>404</html>",
        "header": header,
        "half-header": lambda place: (place.material / "shards" / "val-000000.tar").read_bytes()[:300],
        "cut": lambda place: (place.material / "shards" / "val-000000.tar").read_bytes()[:1500],
    }

    def made(place: Place, start: Callable[[Place], bytes], word: str) -> Words:
        folder = place.copy("shards")
        (folder / "val-000000.tar").write_bytes(start(place))
        if word == "verify":
            return ["verify", "shards"]
        if word == "index":
            os.unlink(folder / "_info.json")
            return ["index", "shards"]
        return [place.material / "run", *EVAL, "--data", "shards", "--out", "eval.json"]

    for name, start in starts.items():
        for word in ("verify", "index", "eval"):
            if name == "zeros" and word == "index":
                continue  # an empty tar is a sound one
            make = functools.partial(made, start=start, word=word)
            expect = Expect(1, says=(r"val-000000\.tar",), never=(r"\(\d+\)", "errno"), lines=4)
            yield Case(f"reasons/{word}-{name}", "eval" if word == "eval" else "shards", make, expect)

    def links(place: Place, word: str, what: str) -> Words:
        shard = place.copy("shards") / "val-000000.tar"
        os.unlink(shard)
        if what == "folder":
            shard.mkdir()
        elif what == "link":
            shard.symlink_to("nowhere.tar")
        if word == "verify":
            return ["verify", "shards"]
        return [place.material / "run", *EVAL, "--data", "shards", "--out", "eval.json"]

    for what in ("folder", "link", "missing"):
        for word in ("verify", "eval"):
            expect = Expect(1, says=(r"val-000000\.tar",), never=(r"\(\d+\)", "(?i)errno"))
            make = functools.partial(links, word=word, what=what)
            yield Case(f"reasons/{word}-{what}", "eval" if word == "eval" else "shards", make, expect)


def _labels() -> Iterator[Case]:
    """Samples whose label is in the tar, but not where it is looked for: the message lists what is there."""

    def apart(number: int) -> list[tuple[str, bytes]]:
        samples = [_samples(1, start) for start in range(number)]
        return [one[0] for one in samples] + [one[1] for one in samples]

    forms: dict[str, tuple[Callable[[], list[tuple[str, bytes]]], str]] = {
        "all-images-first": (lambda: apart(4), r"\.cls|cls"),
        "dots": (lambda: [("a.b.png", _png(0)), ("a.b.cls", b"0")], r"b\.cls"),
        "dots-in-number": (lambda: [("v1.2.png", _png(0)), ("v1.2.cls", b"0")], r"2\.cls"),
        "label-cls": (lambda: [("x.png", _png(0)), ("x.label.cls", b"0")], r"label\.cls"),
        "label": (lambda: [("x.png", _png(0)), ("x.label", b"0")], r"\blabel\b"),
        "txt": (lambda: [("x.png", _png(0)), ("x.txt", b"0")], r"txt"),
        "json": (lambda: [("x.png", _png(0)), ("x.json", b'{"label": 0}')], r"json"),
        "class": (lambda: [("x.png", _png(0)), ("x.class", b"0")], r"\bclass\b"),
        "folders": (lambda: [("img/x.png", _png(0)), ("lab/x.cls", b"0")], r"cls|lab/x"),
        "target": (lambda: [("x.png", _png(0)), ("x.target", b"0"), ("x.id", b"7")], r"target"),
        "label-first": (lambda: [("x.y.cls", b"0"), ("x.png", _png(0))], r"y\.cls"),
    }

    def made(place: Place, form: Callable[[], list[tuple[str, bytes]]], word: str) -> Words:
        members = form()
        write_tar(place / "data" / "val-0.tar", members)
        if word == "index":
            return ["index", "data"]
        _write_index(place / "data", {"val": {"val-0.tar": sum(name.endswith("png") for name, _ in members)}})
        if word == "verify":
            return ["verify", "data"]
        return [place.material / "run", *EVAL, "--data", "data", "--out", "eval.json"]

    for name, (form, found) in forms.items():
        for word in ("index", "verify", "eval"):
            make = functools.partial(made, form=form, word=word)
            expect = Expect(
                1, says=(found,), never=(r"no label; a \.cls member with the class index is needed$",), lines=12
            )
            yield Case(f"labels/{word}-{name}", "eval" if word == "eval" else "shards", make, expect)


def _compressions() -> Iterator[Case]:
    """Sound tars that are compressed by other means are read, or the error says by which."""

    def made(place: Place, mode: str, ending: str, word: str) -> Words:
        folder = place / "data"
        if mode == "zst":  # what begins as such a file does
            write_tar(folder / "val-0.tar", _samples(6))
            data = (folder / "val-0.tar").read_bytes()
            os.unlink(folder / "val-0.tar")
            (folder / f"val-0{ending}").write_bytes(b"\x28\xb5\x2f\xfd\x04\x00" + data[:100])
        else:
            write_tar(folder / f"val-0{ending}", _samples(6), f"w:{mode}")
        if word == "index":
            return ["index", "data"]
        _write_index(folder, {"val": {f"val-0{ending}": 6}})
        if word == "verify":
            return ["verify", "data"]
        data = f"data/val-0{ending}" if word == "eval-file" else "data"
        return [place.material / "run", *EVAL, "--data", data, "--out", "eval.json"]

    def counted(place: Place, result: Result) -> None:
        if (place / "eval.json").exists():
            require(place.json("eval.json")["count"] == 6, "samples are missing")

    def reason(place: Place, result: Result) -> None:
        told = re.search(r"xz|bz2|bzip|zst|compress|\.tar\.gz", result.err)
        require(result.code == 0 or told, "it does not say how the shard is compressed")

    for mode, ending in (
        ("xz", ".tar.xz"),
        ("bz2", ".tar.bz2"),
        ("xz", ".tar"),
        ("bz2", ".tar"),
        ("bz2", ".tbz2"),
        ("zst", ".tar.zst"),
        ("xz", ".txz"),
    ):
        for word in ("index", "verify", "eval", "eval-file"):
            make = functools.partial(made, mode=mode, ending=ending, word=word)
            expect = Expect(
                0 if mode != "zst" and word in ("verify", "eval", "eval-file") and ending == ".tar" else None,
                after=reason,
                never=("damaged", "make or fetch it again"),
                check=counted,
                own=("data/_info.json",),
                lines=8,
            )
            tool = "shards" if word in ("index", "verify") else "eval"
            yield Case(f"tars/{word}-{mode}{ending}", tool, make, expect)

    def renamed(place: Place) -> Words:
        data = bz2.compress((place.material / "shards" / "val-000000.tar").read_bytes())
        data = place.rng.choice((data, lzma.compress((place.material / "shards" / "val-000000.tar").read_bytes())))
        (place.copy("shards") / "val-000000.tar").write_bytes(data)
        return [place.material / "run", *EVAL, "--data", "shards", "--out", "eval.json"]

    for number in range(3):
        expect = Expect(fails=("xz|bz2|bzip|compress",), never=("damaged", "make or fetch it again"))
        yield Case(f"tars/eval-renamed-{number}", "eval", renamed, expect)


def _shard_folders() -> Iterator[Case]:
    """Shards in a folder for each split."""

    def made(place: Place, word: str) -> Words:
        rng, root = place.rng, place / "data"
        train_name = rng.choice(("train", "Train", "training"))
        val_name = rng.choice(("val", "test", "valid", "validation"))
        place.notes["names"] = train_name, val_name
        for name, count in ((train_name, 12), (val_name, 6)):
            write_tar(root / name / rng.choice(("0.tar", "shard-000.tar", "00000.tar.gz")), _samples(count))
        if word in ("index", "verify"):
            return [word, "data"]
        if word == "eval":
            return [
                place.material / "run",
                *EVAL,
                "--data",
                "data",
                "--split",
                val_name,
                "--samples",
                "6",
                "--out",
                "eval.json",
            ]
        return train(place, "--train-samples", "12", "--val-samples", "6", "--num-classes", "3", data="data")

    def told(place: Place, result: Result) -> None:
        names = place.notes["names"]
        if result.code == 1:
            named = any(name in result.err for name in names) or "shards index" in result.err
            require(named, f"it names none of the folders {names}, and not the command that reads them")
            require("or of shards, which" not in result.err, "it does not say that there are shards in these folders")
        elif (place / "eval.json").exists():
            require(place.json("eval.json")["count"] == 6, "samples are missing")

    for word in ("index", "verify", "eval", "train"):
        for number in range(4):
            tool = "shards" if word in ("index", "verify") else word
            expect = Expect(after=told, leaves=("new/*",), never=("holds no shards [(]SPLIT",))
            yield Case(f"shard-folders/{word}-{number}", tool, functools.partial(made, word=word), expect)


def _missing_splits() -> Iterator[Case]:
    """Splits that are not there."""

    def of_shards(place: Place) -> Words:
        split = place.rng.choice(("valid2", "nosuch", "Tset", "tran", "vla", "2"))
        return [
            place.material / "run",
            *EVAL,
            "--data",
            place.material / "shards",
            "--split",
            split,
            "--out",
            "eval.json",
        ]

    def of_folder(place: Place) -> Words:
        there = place.rng.choice(("valid", "holdout", "dev", "more", "test"))
        draw_folder(place / "images" / "train", 2)
        draw_folder(place / "images" / there, 2, seed=1)
        place.notes["there"] = there
        return [place.material / "run", *EVAL, "--data", "images", "--split", "nosuch", "--out", "eval.json"]

    def trained(place: Place) -> Words:
        there = place.rng.choice(("holdout2", "Held-out", "my val", "val2", "other"))
        draw_folder(place / "images" / "train", 2)
        draw_folder(place / "images" / there, 2, seed=1)
        place.notes["there"] = there
        return train(place, data="images")

    def names_it(place: Place, result: Result) -> None:
        require(place.notes["there"] in result.err, f"it does not name the folder {place.notes['there']}")

    for number in range(6):
        yield Case(f"splits/eval-shards-{number}", "eval", of_shards, Expect(1, fails=("train", "val")))
        yield Case(f"splits/eval-folder-{number}", "eval", of_folder, Expect(1, fails=("train",), after=names_it))
        yield Case(f"splits/train-folder-{number}", "train", trained, Expect(1, after=names_it))


def _nothing_to_verify() -> Iterator[Case]:
    """`verify` and `index` of what is not there."""
    here = {
        "missing": lambda place: None,
        "missing-below": lambda place: None,
        "file": lambda place: (place / "nosuchdir").write_text("x"),
        "empty": lambda place: (place / "nosuchdir").mkdir(),
        "dangling": lambda place: (place / "nosuchdir").symlink_to("nowhere"),
        "images": lambda place: draw_folder(place / "nosuchdir", 1),
    }
    for name, prepare in here.items():
        for word in ("verify", "index"):

            def made(place: Place, word: str = word, name: str = name, prepare: Any = prepare) -> Words:
                prepare(place)
                return [word, "nosuchdir/below" if name == "missing-below" else "nosuchdir"]

            is_there = name in ("empty", "images")
            missing = ("(?i)no (such )?folder|not a folder|does not exist|not there|no file or folder",)
            expect = Expect(
                1, fails=("nosuchdir", *(() if is_there else missing)), never=() if is_there else ("has no index",)
            )
            yield Case(f"verify/{word}-{name}", "shards", made, expect)


def _full_disks() -> Iterator[Case]:
    """No room for a file: the error names it, and none is left."""

    def full(word: str, room: int, argv: Callable[[Place], Words]) -> Callable[[Place], Callable[[], None]]:
        def made(place: Place) -> Callable[[], None]:
            words = [os.fspath(each) for each in argv(place)]

            def function() -> None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
                commands.run(word, words)

            return function

        return made

    def predicted(place: Place, ending: str = "csv") -> Words:
        link(place, "photos")
        return [place.material / "run", *["photos"] * 40, "--workers", "0", "--out", f"told.{ending}"]

    def predicted_maps(place: Place) -> Words:
        link(place, "photos")
        return [place.material / "run", "photos", "--workers", "0", "--maps", "drawn"]

    def indexed(place: Place) -> Words:
        for number in range(60):
            write_tar(place / "many" / f"val-{number:06d}.tar", _samples(1))
        return ["index", "many"]

    of: dict[str, tuple[str, int, Callable[[Place], Words], str]] = {
        "predict-csv": ("predict", 2000, predicted, r"told\.csv"),
        "predict-json": ("predict", 2000, functools.partial(predicted, ending="json"), r"told\.json"),
        "predict-text": ("predict", 2000, functools.partial(predicted, ending="txt"), r"told\.txt"),
        "predict-maps": ("predict", 2000, predicted_maps, r"drawn"),
        "shards": (
            "shards",
            6000,
            lambda place: ["imagefolder", place.material / "pictures", "out"],
            r"out\b.*\.tar|out/",
        ),
        "shards-digits": ("shards", 9000, lambda place: ["digits", "out"], r"out\b"),
        "shards-journal": ("shards", 300, lambda place: ["imagefolder", place.material / "pictures", "out"], r"out\b"),
        "hub": ("hub", 2000, lambda place: [place.material / "run", "folder"], r"folder"),
        "maps": (
            "maps",
            2000,
            lambda place: [place.material / "run", place.material / "photos/photo0.jpg", "--out", "m.png"],
            r"m\.png",
        ),
        "curves": ("curves", 2000, lambda place: [place.material / "run", "--out", "c.png"], r"c\.png"),
        "eval": (
            "eval",
            500,
            lambda place: [place.material / "run", *EVAL, "--data", place.material / "shards", "--out", "e.json"],
            r"e\.json",
        ),
        "eval-predictions": (
            "eval",
            1000,
            lambda place: [
                place.material / "run",
                *EVAL,
                "--data",
                place.material / "shards",
                "--out",
                "e.json",
                "--predictions",
                "p.csv",
            ],
            r"p\.csv",
        ),
        "train": ("train", 60_000, train, r"new\b"),
        "index": ("shards", 1500, indexed, r"many"),
    }
    for name, (word, room, argv, names) in of.items():
        leaves = ("new/*", "out/*", "out/.*", "e.json", "drawn/*")
        expect = Expect(1, fails=(names,), leaves=leaves)
        yield Case(f"full-disk/{name}", word, full(word, room, argv), expect)
