"""Files that are not as they were written, and files of others: neither is taken for what it is not."""

import argparse
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from test_old_files import FILES
from timm.utils import CheckpointSaver

from lab import __main__ as lab
from vision_longhorn import curves, environment, export, hub, maps, plots, predict, shards, train
from vision_longhorn import eval as evaluation
from vision_longhorn.checkpoint import load_checkpoint, save_checkpoint
from vision_longhorn.errors import UserError
from vision_longhorn.export import load_onnx
from vision_longhorn.files import hash_file, written_aside
from vision_longhorn.models.create import create_model
from vision_longhorn.runs import Run
from vision_longhorn.training.init import model_from_weights

STATE = {
    "state_dict": {"a": torch.arange(6.0), "b": torch.arange(9).view(3, 3), "part": torch.arange(12.0)[2:7]},
    "updates": 3,
    "class_names": ["ash", "oak"],
}


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


def is_state(found):
    return found.keys() == STATE.keys() and all(
        torch.equal(found["state_dict"][key], value) for key, value in STATE["state_dict"].items()
    )


def test_a_checkpoint_with_a_flipped_bit_is_refused_or_has_its_tensors(tmp_path):
    """Names and attributes in the directory at its end, too, by which torch finds its tensors."""
    save_checkpoint(tmp_path / "best.pt", STATE)
    data, refused = (tmp_path / "best.pt").read_bytes(), 0
    folder_bits = [8 * (at + 38) + 4 for at in range(len(data)) if data[at : at + 4] == b"PK\1\2"]  # "is a folder"
    for bit in [*range(0, 8 * len(data), 97), *folder_bits]:
        (tmp_path / "best.pt").write_bytes(data)
        flip(tmp_path / "best.pt", bit)
        try:
            assert is_state(load_checkpoint(tmp_path / "best.pt")), bit
        except UserError as error:
            assert str(tmp_path / "best.pt") in str(error) and "\n" not in str(error)
            refused += 1
    assert refused > 100


def test_files_of_others_need_no_checksum(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, tmp_path / "without.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    torch.save(STATE, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    assert is_state(load_checkpoint(tmp_path / "without.pt")) and is_state(load_checkpoint(tmp_path / "legacy.pt"))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "model"
    hub.main([str(FILES / "longhorn" / "last.pt"), str(folder)])
    return folder


def test_a_flipped_bit_in_a_model_folder_is_known_by_its_hash(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    weights = folder / "model.safetensors"
    expected = create_model(f"local-dir:{folder}", pretrained=True).state_dict()
    flip(weights, 8 * weights.stat().st_size - 2)
    for load in lambda: create_model(f"local-dir:{folder}", pretrained=True), lambda: load_checkpoint(weights):
        with pytest.raises(UserError, match="model.safetensors does not match its hash in .*sha256: "):
            load()
    shutil.copy(model_folder / "model.safetensors", weights)
    hash_file(weights).unlink()  # as older ones have none
    found = create_model(f"local-dir:{folder}", pretrained=True).state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_the_hash_of_an_export_is_that_of_the_file_beside_it(tmp_path):
    for text in "one", "two":
        with written_aside(tmp_path / "model.onnx", hashed=True) as aside:
            aside.write_text(text)
    flip(tmp_path / "model.onnx", 3)
    with pytest.raises(UserError, match="model.onnx does not match its hash"):
        load_onnx(tmp_path / "model.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.sha256"]


@pytest.mark.parametrize(
    "key, value, words",
    [
        (None, 0.5, "its config.json: .*line"),
        (None, 0, "its config.json: .*line 1"),
        ("architecture", 3, "its config.json: 'int'"),
        ("num_classes", "10", "its config.json: .*'str'"),
        ("num_classes", 9, r"size mismatch for head.weight: .*\[10, 8\].*\[9, 8\]"),
        ("model_args.num_classes", 9, r"config.json is damaged \(num_classes"),
        ("model_args", [], "its config.json: 'list'"),
        ("label_names", [["ash"]] * 10, r"config.json is damaged \(label_names"),
        ("label_descriptions", ["ash"], "its config.json: 'list'"),
        ("model_args.depth", "1", "its config.json: .*'str'"),
        ("pretrained_cfg.mean", "0.5", "its config.json: .*'str'"),
        ("pretrained_cfg.std", [0.4, 0, 0.4], "std evaluated to zero"),
        ("pretrained_cfg.std", [0.4, -0.4, 0.4], r"config.json is damaged \(mean or std"),
        ("pretrained_cfg.mean", [0.4, float("nan"), 0.4], r"config.json is damaged \(mean or std"),
        ("pretrained_cfg.crop_pct", float("inf"), "height and width must be > 0"),
        ("pretrained_cfg.interpolation", "round", "round"),
        ("weights", 0.5, "header"),
    ],
)
def test_a_damaged_model_folder_is_one_line(model_folder, tmp_path, key, value, words):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    Image.new("L", (9, 9)).save(tmp_path / "image.png")
    file = folder / ("model.safetensors" if key == "weights" else "config.json")
    hash_file(file).unlink(missing_ok=True)
    if key in (None, "weights"):
        file.write_bytes(file.read_bytes()[: int(value * file.stat().st_size)])
    else:
        config = json.loads(file.read_text())
        within = config if "." not in key else config[key.partition(".")[0]]
        within[key.rpartition(".")[2]] = value
        file.write_text(json.dumps(config))
    with pytest.raises(UserError, match=words) as caught:
        predict.main([str(folder), str(tmp_path / "image.png"), "--device", "cpu"])
    assert "\n" not in str(caught.value)


def test_checkpoints_of_timms_trainer_load_as_timm_loads_them(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=3)
    args = argparse.Namespace(model="resnet10t", num_classes=3, lr=0.1, mean=None)
    saver = CheckpointSaver(model, torch.optim.SGD(model.parameters(), 0.1), args, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(0, 50.0)
    found, _ = model_from_weights("resnet10t", tmp_path / "last.pth.tar", 3)
    assert all(torch.equal(found.state_dict()[key], value) for key, value in model.state_dict().items())
    assert load_checkpoint(tmp_path / "last.pth.tar")["num_classes"] == 3  # by which eval makes the model


class Command:
    def __reduce__(self):
        return open, ("ran", "w")


def test_arguments_of_timms_trainer_run_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"a": torch.ones(1)}, "args": argparse.Namespace(x=Command())}, "bad.pth.tar")
    with pytest.raises(UserError, match="could run code"):
        load_checkpoint("bad.pth.tar")
    assert not (tmp_path / "ran").exists()


# What stands where a tool is to write

TOOLS = {
    "curves": lambda out: curves.main(["run", "--out", out]),
    "maps": lambda out: maps.main(["run", "photo.png", "--out", out]),
    "predict": lambda out: predict.main(["run", "photo.png", "--out", out]),
    "predict maps": lambda out: predict.main(["run", "photo.png", "--maps", out]),
    "eval": lambda out: evaluation.main(["run", "--out", out]),
    "eval predictions": lambda out: evaluation.main(["run", "--predictions", out]),
    "eval report": lambda out: evaluation.main(["run", "--report", out]),
    "export": lambda out: export.main(["run", out]),
    "hub": lambda out: hub.main(["run", out]),
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with what people have in theirs."""
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    for name in (
        "run/best.pt", "run/config.yaml", "run/metrics.json", "notes.json", "notes.txt", "table.csv", "other.onnx",
        "other.pt2", "full/mine",
    ):  # fmt: skip
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("mine")
    Image.new("L", (9, 9)).save("photo.png")
    os.symlink("nowhere.png", "link.png")
    os.symlink("nowhere.json", "link.json")
    os.mkfifo("pipe.png")
    return tmp_path


def look(folder):
    return {
        path: os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("tool", TOOLS)
def test_no_tool_writes_over_what_is_not_its_own(place, tool):
    before = look(place)
    names = [str(path.relative_to(place)) for path in before if path.name != "run"]
    for name in [*names, "run/last.pt", "run/env.json", "new.safetensors"]:
        with pytest.raises(UserError, match=name):
            TOOLS[tool](name)
    assert look(place) == before


def test_an_earlier_picture_of_the_same_tool_is_replaced(place):
    figure = plots.new_figure(1, 1)
    plots.save_png(figure, "curves.png", 10, "curves")
    curves.check_png("curves.png", "curves")
    refused = [("curves.png", "maps", []), ("photo.png", "curves", []), ("curves.png", "curves", ["./curves.png"])]
    for out, tool, others in refused:
        with pytest.raises(UserError, match=out):
            curves.check_png(out, tool, others)


@pytest.mark.parametrize("kind", ["onnx", "pt2"])
def test_an_earlier_export_is_replaced_and_none_of_others(place, kind):
    with written_aside(f"other.{kind}", hashed=True) as aside:
        aside.write_text("ours")
    with pytest.raises(UserError, match="no checkpoint at nowhere.pt"):  # it would have been replaced
        export.main(["nowhere.pt", f"other.{kind}"])
    Path(f"other.{kind}").write_text("someone's")
    with pytest.raises(UserError, match="not written by this tool"):
        export.main(["nowhere.pt", f"other.{kind}"])


@pytest.mark.parametrize(
    "words", [["--out", "a.json", "--predictions", "./a.json"], ["--predictions", "a", "--report", "a"]]
)
def test_two_results_do_not_get_one_name(place, words):
    with pytest.raises(UserError, match="named twice"):
        evaluation.main(["run", *words])


def test_a_result_is_not_the_root_of_all_folders(place):
    with pytest.raises(UserError, match="--report / "):  # which has no folder above it
        evaluation.main(["run", "--report", "/"])


@pytest.mark.parametrize("name", ["metrics.json", "summary.csv", "env.yaml", "curves.png"])
def test_a_run_writes_over_no_results_of_others(tmp_path, name):
    (tmp_path / name).write_text("mine")
    if name == "env.yaml":  # nothing of a run's
        return Run(tmp_path).check_free(goes_on=False)
    with pytest.raises(UserError, match=f"holds a {name} that no run has written"):
        Run(tmp_path).check_free(goes_on=False)


def test_a_study_writes_over_no_table_of_others(tmp_path):
    (tmp_path / "mixers.md").write_text("mine")
    with pytest.raises(UserError, match="mixers.md is there already"):
        lab.main(["mixers", "--report", "--out", str(tmp_path)])
    assert (tmp_path / "mixers.md").read_text() == "mine"


def test_the_demos_shards_replace_none_of_the_same_name(tmp_path):
    (tmp_path / "val-000000.tar").write_text("mine")
    with pytest.raises(UserError, match=r"other data than the digits .val-000000.tar.; name another folder"):
        shards.main(["digits", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["val-000000.tar"]


@pytest.mark.skipif(not shutil.which("git"), reason="without git no commit is found anyway")
def test_the_commit_of_a_users_repository_is_not_taken_for_ours(tmp_path, monkeypatch):
    monkeypatch.delenv("VISION_LONGHORN_COMMIT", raising=False)
    (tmp_path / "notes").write_text("mine")
    for words in (
        ["init", "-q"],
        ["add", "notes"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "notes"))
    assert environment.find_commit()[0] is not None
    (tmp_path / "installed").mkdir()
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "installed" / "environment.py"))
    assert environment.find_commit() == (None, None)


def test_a_run_that_fails_at_once_leaves_nothing_in_a_folder(tmp_path):
    words = ["--model-kwargs", "img_size=3", "--workers", "0", "--device", "cpu", "--run-dir", str(tmp_path)]
    with pytest.raises(UserError, match="img_size"):
        train.main(words)
    assert not list(tmp_path.iterdir())
