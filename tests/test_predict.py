"""Prediction: any images to class names, in their order, by a run, a model folder or a timm model."""

import csv
import io
import itertools
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits
from test_shards import full_disk
from test_train import REPOSITORY, fails_with_one_line, fresh_process_state  # noqa: F401  (a fixture)
from timm.data import create_transform

from vision_longhorn import hub, maps, predict
from vision_longhorn.checkpoint import save_checkpoint
from vision_longhorn.data import images as images_module
from vision_longhorn.data.transforms import input_settings
from vision_longhorn.errors import UserError
from vision_longhorn.evaluation.images import find_images
from vision_longhorn.train import load_config

NAMES = [f"digit {i}" for i in range(10)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder, with a model that was not trained but tells images apart."""
    folder = tmp_path_factory.mktemp("predict") / "run"
    folder.mkdir()
    kwargs = dict(img_size=16, patch_size=4, embed_dim=16, depth=2, d_state=2)
    values = {
        **load_config(["--config", "demo_digits"])[0].values(),
        "model_kwargs": kwargs,
        "data": None,
        "mean": [0.4, 0.5, 0.6],
        "std": [0.2, 0.3, 0.4],
    }
    torch.manual_seed(0)
    model = timm.create_model("vlonghorn_test", num_classes=10, **kwargs)
    torch.nn.init.normal_(model.get_classifier().weight)
    save_checkpoint(
        folder / "best.pt",
        dict(
            arch="vlonghorn_test",
            num_classes=10,
            config=values,
            state_dict=model.state_dict(),
            class_names=NAMES,
            display_names=[f"the number {i}" for i in range(10)],
            epoch=1,
            updates=1,
            history=[{}],
        ),
    )
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Seven images in a folder and a folder of it, in colour; and a file that is none."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "sub").mkdir()
    for i in range(7):
        grey = Image.fromarray((load_digits().images[i] * 15).astype("uint8")).resize((20, 16))
        picture = Image.merge("RGB", (grey, grey.point(lambda v: 255 - v), grey))
        picture.save(folder / ("sub" if i > 3 else "") / f"{i}.png")
    (folder / "notes.txt").write_text("no image")
    return folder


def expected(run, path):
    """Probabilities (10,) by plain code."""
    checkpoint = torch.load(run / "best.pt", weights_only=True)
    model = timm.create_model("vlonghorn_test", num_classes=10, **checkpoint["config"]["model_kwargs"])
    model.load_state_dict(checkpoint["state_dict"])
    transform = create_transform(**input_settings(model, checkpoint["config"]))
    with torch.no_grad(), Image.open(path) as image:
        return model.eval()(transform(image)[None]).softmax(1)[0]


def test_results_are_the_models_in_the_order_given(run, images, tmp_path):
    given = [str(images / "sub" / "6.png"), str(images), str(images / "1.png")]
    assert predict.main([str(run), *given, "--batch-size", "4", "--workers", "2", "--top-k", "3",
                         "--out", str(tmp_path / "out.json")]) == 9  # fmt: skip
    found = json.loads((tmp_path / "out.json").read_text())
    assert [os.path.relpath(one["image"], images) for one in found] == [
        "sub/6.png",
        "0.png",
        "1.png",
        "2.png",
        "3.png",
        "sub/4.png",
        "sub/5.png",
        "sub/6.png",
        "1.png",
    ]
    for one in found:
        right = expected(run, one["image"]).sort(descending=True)
        assert [told["index"] for told in one["predictions"]] == right.indices[:3].tolist()
        assert [told["probability"] for told in one["predictions"]] == pytest.approx(
            right.values[:3].tolist(), abs=1e-5
        )
        assert all(
            told["class"] == f"digit {told['index']}" and told["name"] == f"the number {told['index']}"
            for told in one["predictions"]
        )
    assert len({round(one["predictions"][0]["probability"], 3) for one in found}) > 3  # each has its own


def test_images_of_other_kinds_are_left_out_by_name(run, images, tmp_path, capsys):
    shutil.copytree(images, tmp_path / "mixed")
    Image.open(images / "1.png").save(tmp_path / "mixed" / "1.bmp")
    assert predict.main([str(run), str(tmp_path / "mixed"), "--top-k", "1"]) == 7
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "left out: 2 (" in said and f"{tmp_path / 'mixed' / '1.bmp'}: none of jpg" in said


def test_text_csv_and_json_say_the_same(run, images, tmp_path, capsys):
    arguments = [str(run), str(images / "2.png"), "--top-k", "2"]
    predict.main([*arguments, "--format", "json"])
    first, second = json.loads(capsys.readouterr().out)[0]["predictions"]
    predict.main([*arguments, "--out", str(tmp_path / "new" / "out.csv")])
    assert capsys.readouterr().out == f"wrote {tmp_path / 'new' / 'out.csv'}\n"
    with open(tmp_path / "new" / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["image"], row["rank"], row["index"], row["name"]) for row in rows] == [
        (str(images / "2.png"), str(i), str(one["index"]), one["name"]) for i, one in ((1, first), (2, second))
    ]
    predict.main([*arguments[:2], "--top-k", "50"])  # more than there are
    line = capsys.readouterr().out
    assert line.startswith(f"{images / '2.png'}: {first['name']} {100 * first['probability']:.1f} %, {second['name']}")
    assert line.count("%") == 10 and line.count("\n") == 1


def test_images_are_upright(run, images, tmp_path):
    with Image.open(images / "sub" / "5.png") as image:
        straight = image.copy()
    straight.save(tmp_path / "straight.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees clockwise
    straight.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    predict.main(
        [str(run), str(tmp_path / "straight.png"), str(tmp_path / "turned.png"), "--out", str(tmp_path / "out.json")]
    )
    one, other = json.loads((tmp_path / "out.json").read_text())
    assert one["predictions"] == other["predictions"]


def test_an_image_that_cannot_be_read_is_named(run, images, tmp_path, capsys):
    (tmp_path / "bad.jpg").write_bytes(b"junk")
    given = [str(run), str(images / "0.png"), str(tmp_path / "bad.jpg"), str(images / "1.png")]
    out = ["--out", str(tmp_path / "out.csv")]
    fails_with_one_line(predict.main, [*given, *out], capsys, "bad.jpg", "--on-bad skip")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jpg"]  # nothing that looks like a result
    with pytest.raises(UserError):
        predict.main(given)
    assert capsys.readouterr().out.startswith(str(images / "0.png"))  # what was found before is not lost

    assert predict.main([*given, *out, "--on-bad", "skip"]) == 2
    said = capsys.readouterr().err
    assert f"skipped: {tmp_path / 'bad.jpg'}: not a readable image" in said and "1 of 3 images were skipped" in said
    assert "bad.jpg" not in (tmp_path / "out.csv").read_text()
    fails_with_one_line(predict.main, [run, tmp_path / "bad.jpg", "--on-bad", "skip"], capsys, "none of the images")


def test_a_full_disk_is_told_with_the_file_that_it_had_no_room_for(run, images, tmp_path, capsys, monkeypatch):
    with full_disk(100):
        fails_with_one_line(predict.main, [run, images, "--out", tmp_path / "out.csv"], capsys, f"{tmp_path}/out.csv: ")
    assert not list(tmp_path.iterdir())
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        fails_with_one_line(predict.main, [run, images], capsys, "standard output cannot be written (No space left")


def test_16_bit_pictures_that_come_out_dark_are_named_once(run, tmp_path, caplog, monkeypatch):
    for name in "ab":
        Image.fromarray(np.full((9, 9), 4000, np.uint16)).save(tmp_path / f"{name}.png")
    monkeypatch.setattr(images_module, "_warnings", itertools.count())
    assert predict.main([str(run), str(tmp_path), "--batch-size", "1", "--workers", "0"]) == 2
    (said,) = caplog.messages
    assert said.startswith(f"{tmp_path / 'a.png'}: a 16-bit picture, and dark")
    caplog.clear()
    monkeypatch.setattr(images_module, "_warnings", itertools.count())
    maps.main([str(run / "best.pt"), str(tmp_path / "b.png"), "--out", str(tmp_path / "maps" / "b.png")])
    assert caplog.messages[0].startswith(f"{tmp_path / 'b.png'}: a 16-bit picture, and dark")


def test_paths_from_standard_input(run, images, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{images / '3.png'}\n\n{images / '0.png'}\n"))
    assert predict.main([str(run), "-"]) == 2
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        str(images / "3.png"),
        str(images / "0.png"),
    ]


def test_a_pipe_among_paths_from_standard_input_is_not_waited_for(run, images, tmp_path, capsys, monkeypatch):
    os.mkfifo(tmp_path / "z.jpg")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{tmp_path / 'z.jpg'}\n{images / '1.png'}\n"))
    assert predict.main([str(run), "-", "--on-bad", "skip", "--workers", "0"]) == 1
    assert f"skipped: {tmp_path / 'z.jpg'}: it is a pipe" in capsys.readouterr().err


def test_an_image_that_fits_no_memory_is_skipped(run, images, tmp_path, capsys, monkeypatch):
    def resize(image, *args, **kwargs):
        if image.width > 1000:
            raise MemoryError
        return resized(image, *args, **kwargs)

    resized = Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", resize)
    Image.new("RGB", (3000, 1)).save(tmp_path / "thin.png")
    arguments = [str(run), str(tmp_path / "thin.png"), str(images / "1.png"), "--on-bad", "skip", "--workers", "0"]
    assert predict.main(arguments) == 1
    assert f"skipped: {tmp_path / 'thin.png'}: 3000 x 1 pixels do not fit into memory" in capsys.readouterr().err


def test_a_model_folder_says_what_the_run_says(run, images, tmp_path, capsys, monkeypatch):
    hub.main([str(run), str(tmp_path / "model")])
    capsys.readouterr()
    texts, folder = [], str(tmp_path / "model")
    for arguments in [str(run)], [folder], ["--model", f"local-dir:{folder}", "--pretrained"]:
        predict.main([*arguments, str(images), "--format", "json"])
        texts.append(
            [
                [(told["index"], round(told["probability"], 5), told["class"]) for told in one["predictions"]]
                for one in json.loads(capsys.readouterr().out)
            ]
        )
    assert texts[0] == texts[1] == texts[2]


def test_a_folder_of_a_gray_model_is_refused_by_its_channels(images, tmp_path, capsys):
    timm.models.save_for_hf(timm.create_model("vlonghorn_test", in_chans=1), tmp_path, model_args=dict(in_chans=1))
    fails_with_one_line(predict.main, [str(tmp_path), str(images)], capsys, "in_chans is 1", "3 channels")


def test_maps_of_every_image(run, images, tmp_path, capsys):
    predict.main([str(run), str(images / "sub"), "--batch-size", "2", "--maps", str(tmp_path / "maps")])
    said = capsys.readouterr()
    assert said.err == f"wrote the maps in {tmp_path / 'maps'}\n" and len(said.out.splitlines()) == 3
    assert sorted(os.listdir(tmp_path / "maps")) == ["1-4.png", "2-5.png", "3-6.png"]
    assert len({path.read_bytes() for path in (tmp_path / "maps").iterdir()}) == 3  # each of its own image
    out, more = tmp_path / "out.json", tmp_path / "more"
    predict.main([str(run), str(images / "0.png"), "--out", str(out), "--maps", str(more)])
    assert capsys.readouterr().out == f"wrote {out} and the maps in {more}\n"
    fails_with_one_line(predict.main, [run, images, "--maps", tmp_path / "maps"], capsys, "--maps", "is there already")


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], ["no model", "--model"]),
        (["{run}"], ["no images"]),
        (["{run}", "nowhere.png"], ["nowhere.png"]),
        (["{run}", "{empty}"], ["no images", "empty"]),
        (["{run}", "{pipe}"], ["no file or folder", "z.jpg"]),
        (["{run}/nothing", "{images}"], ["nothing"]),
        (["{empty}", "{images}"], ["empty", "best.pt"]),
        (["{run}", "{images}", "--top-k", "0"], ["--top-k", "0"]),
        (["{run}", "{images}", "--batch-size", "0"], ["--batch-size", "0"]),
        (["{run}", "{images}", "--topk", "3"], ["--topk", "--top-k"]),
        (["{run}", "--format", "xml", "{images}"], ["xml", "json"]),
        (["{run}", "{images}", "--out", "{images}/notes.txt"], ["notes.txt", "is there already"]),
        (["--model", "vlonghorn_tinny", "{images}"], ["vlonghorn_tinny", "vlonghorn_tiny"]),
        (["--model", "vlonghorn_test", "{images}"], ["vlonghorn_test", "weights"]),
    ],
)
def test_mistakes_end_with_one_line(run, images, tmp_path, capsys, arguments, words):
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "z.jpg")
    names = dict(run=run, images=images, empty=tmp_path / "empty", pipe=tmp_path / "z.jpg")
    arguments = [word.format(**names) for word in arguments]
    fails_with_one_line(predict.main, arguments, capsys, *words)


def test_the_command_prints_nothing_but_results(run, images):
    done = subprocess.run(
        [sys.executable, "-m", "vision_longhorn.predict", run, *sorted(images.rglob("*.png")), "--top-k", "1"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stderr == "" and len(done.stdout.splitlines()) == 7


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_paths_from_standard_input_are_bytes_whatever_the_terminals_encoding(encoding, monkeypatch):
    names = ["é/日本.png", "b\udcffn.png"]
    written = io.BytesIO(b"".join(os.fsencode(name) + b"\n" for name in names))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(written, encoding))
    assert find_images(["-"]) == names
