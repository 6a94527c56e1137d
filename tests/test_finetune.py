"""Training that starts from weights: from another image size, for other classes, slower in the early blocks; and what
it skips of bad data."""

import json

import pytest
import torch
from safetensors.torch import save_file
from test_train import (  # noqa: F401  (three are fixtures)
    PLAIN,
    QUICK,
    fails_with_one_line,
    fresh_process_state,
    no_picture,
    scalars,
    shards,
    write_digits,
)

import train_imagenet
from vision_longhorn.checkpoint import save_checkpoint
from vision_longhorn.data.sharding import index_shards
from vision_longhorn.errors import UserError
from vision_longhorn.loading import load_model
from vision_longhorn.models.create import create_model
from vision_longhorn.training.init import model_from_weights

MODEL = dict(depth=2, embed_dim=32, patch_size=4)


@pytest.fixture
def weights(tmp_path):
    """A file with a model of 8 x 8 pixels and 10 classes, and its averaged weights, which differ."""
    torch.manual_seed(3)
    model = create_model("vlonghorn_test", img_size=8, num_classes=10, **MODEL)
    averaged = {name: value + 0.01 for name, value in model.state_dict().items()}
    save_checkpoint(tmp_path / "best.pt", {"state_dict": model.state_dict(), "state_dict_ema": averaged})
    return tmp_path / "best.pt", averaged


@pytest.mark.parametrize("kind", ["checkpoint", "safetensors"])
def test_weights_are_fitted_to_another_size_and_other_classes(weights, tmp_path, kind):
    file, averaged = weights
    if kind == "safetensors":
        file = tmp_path / "model.safetensors"
        save_file(averaged, file)
    same, text = model_from_weights("vlonghorn_test", file, 10, img_size=8, **MODEL)
    assert all(torch.equal(value, averaged[name]) for name, value in same.state_dict().items())
    assert "resampled" not in text and "anew" not in text and f"{len(averaged)} tensors" in text
    other, text = model_from_weights("vlonghorn_test", file, 3, img_size=16, **MODEL)
    assert str(file) in text and "classifier of 3 classes anew" in text
    assert "pos_embed (1, 5, 32) -> (1, 17, 32)" in text
    for name, value in other.state_dict().items():
        if name.startswith("head."):
            assert value.shape[0] == 3
        elif name == "pos_embed":
            assert value.shape == (1, 17, 32) and torch.equal(value[:, 8], averaged[name][:, 2])  # the class token's
        else:
            assert torch.equal(value, averaged[name])


def test_positions_of_a_run_on_oblong_images_are_resampled(tmp_path):
    model = create_model("vlonghorn_test", img_size=[8, 24], num_classes=10, **MODEL)
    save_checkpoint(
        tmp_path / "best.pt",
        {"state_dict": model.state_dict(), "config": {"model_kwargs": {**MODEL, "img_size": [8, 24]}}},
    )
    other, text = model_from_weights("vlonghorn_test", tmp_path / "best.pt", 10, img_size=16, **MODEL)
    assert "pos_embed (1, 13, 32) -> (1, 17, 32)" in text and other.pretrained_cfg["input_size"] == (3, 96, 96)


def test_a_model_has_its_own_image_size_whatever_the_file_is_of(tmp_path):
    small = dict(depth=1, embed_dim=32)
    model = create_model("vlonghorn_tiny_paper", img_size=32, num_classes=10, **small)
    save_checkpoint(
        tmp_path / "best.pt", {"state_dict": model.state_dict(), "config": {"model_kwargs": {**small, "img_size": 32}}}
    )
    other, text = model_from_weights("vlonghorn_tiny_paper", tmp_path / "best.pt", 10, **small)
    assert other.patch_embed.img_size == (224, 224) and "pos_embed (1, 5, 32) -> (1, 197, 32)" in text


NAMES = [f"n{i}" for i in range(10)]


@pytest.mark.parametrize(
    "of_file, of_data, words",
    [
        (NAMES, NAMES, None),
        (NAMES, NAMES[::-1], "10 classes anew (class 0 is 'n0' in the file and 'n9' in the data)"),
        (NAMES, None, "note: the data's class names are unknown"),
        (None, NAMES, "note: the file's class names are unknown"),
        (None, None, "note: the file's and the data's class names are unknown"),
    ],
)
@pytest.mark.parametrize("kind", ["checkpoint", "model folder"])
def test_a_classifier_of_other_names_starts_anew(weights, tmp_path, kind, of_file, of_data, words):
    """Display names are no matter: they may change with the language."""
    file, averaged = weights
    if kind == "checkpoint":
        shown = [f"shown {i}" for i in range(10)]
        save_checkpoint(file, {"state_dict": averaged, "class_names": of_file, "display_names": shown})
    else:
        file = tmp_path / "model.safetensors"
        save_file(averaged, file)
        (tmp_path / "config.json").write_text(json.dumps({"label_names": of_file} if of_file else {}))
    model, text = model_from_weights("vlonghorn_test", file, 10, of_data, img_size=8, **MODEL)
    assert words in text if words else "anew (" not in text and "note:" not in text
    stays = torch.equal(model.state_dict()["head.weight"], averaged["head.weight"])
    assert stays == (words is None or "note" in words)
    assert torch.equal(model.state_dict()["pos_embed"], averaged["pos_embed"])


def test_a_run_compares_the_names_of_its_data(weights, tmp_path, capsys):
    """With those of the weights that it starts from, and of the checkpoint that it goes on with."""
    for split in "train", "val":
        write_digits(tmp_path / "data", split, 32, shards=1)
    index_shards(tmp_path / "data", NAMES[::-1])
    save_checkpoint(weights[0], {"state_dict": weights[1], "class_names": NAMES})
    run = train_imagenet.main(
        [*QUICK, *PLAIN, "--data", str(tmp_path / "data"), "--init", str(weights[0]), "--epochs", "1", "--model-kwargs",
         "depth=2", "embed_dim=32", "img_size=8", "patch_size=4", "--run-dir", str(tmp_path / "run")]
    )  # fmt: skip
    assert "anew (class 0 is 'n0' in the file and 'n9' in the data)" in capsys.readouterr().out
    index_shards(tmp_path / "data", NAMES)
    words = "class 0 is 'n9' in", "last.pt and 'n0' in the data"
    fails_with_one_line(train_imagenet.main, ["--resume", run, "--epochs", "2"], capsys, *words)


def test_weights_for_a_model_that_brings_its_own_are_refused(weights):
    with pytest.raises(UserError, match="hf-hub:a/b, which has weights of its own"):
        model_from_weights("hf-hub:a/b", weights[0], 10)


def test_a_run_that_starts_anew_for_want_of_a_checkpoint_has_its_weights(
    weights,
    tmp_path,
    shards,  # noqa: F811
    capsys,
):
    arguments = [*QUICK, *PLAIN, *shards, "--init", str(weights[0]), "--model-kwargs", "depth=2", "embed_dim=32",
                 "img_size=8", "patch_size=4", "--epochs", "1", "--run-dir", str(tmp_path / "run")]  # fmt: skip
    run = train_imagenet.main(arguments)
    for file in run.glob("*.pt"):
        file.unlink()
    capsys.readouterr()
    train_imagenet.main([*arguments, "--resume"])
    said = capsys.readouterr().out
    assert "has no checkpoint yet" in said and "init    EMA weights" in said and "before-1" in said


@pytest.mark.parametrize("classes", [10, 3])
@pytest.mark.parametrize(
    "model, changes, words",
    [
        ("vlonghorn_test", {"embed_dim": 48}, ["another model", "size mismatch for ", "[1, 1, 32]"]),
        ("vlonghorn_test", {"depth": 3}, ["another model", 'Missing key(s) in state_dict: "blocks.2.']),
        ("vlonghorn_test", {"depth": 1}, ["another model", 'Unexpected key(s) in state_dict: "blocks.1.']),
        ("vlonghorn_test", {"class_token": "none", "global_pool": "avg"}, ["another model"]),
        ("vim_test", {}, ["another model", 'Missing key(s) in state_dict: "blocks.0.mixer.A_log']),
        ("vlonghorn_test", {"dept": 3}, ["dept"]),
    ],
)
def test_weights_of_another_model_are_refused_whatever_the_number_of_classes(weights, classes, model, changes, words):
    with pytest.raises(UserError) as caught:
        model_from_weights(model, weights[0], classes, **{**MODEL, "img_size": 8, **changes})
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message and "pretrained_cfg_overlay" not in message


@pytest.mark.parametrize(
    "content, words",
    [
        ({}, ["no weights"]),
        ({"foo": 1}, ["no weights"]),
        ({"foo": torch.zeros(2)}, ["another model", "Missing key(s) in state_dict: "]),
        ({"state_dict": {"foo": torch.zeros(2)}, "config": None}, ["another model"]),
        ([1], ["a list"]),
        (b"", ["torch's files"]),
        (b"some text", ["torch's files"]),
    ],
)
def test_files_without_weights_are_refused(tmp_path, content, words):
    file = tmp_path / "file.pt"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(UserError) as caught:
        model_from_weights("vlonghorn_test", file, 3, img_size=8, **MODEL)
    assert all(word in str(caught.value) for word in words) and "weights_only" not in str(caught.value)


def test_weights_of_timms_models_are_taken_too(tmp_path):
    donor = create_model("resnet10t", num_classes=5)
    torch.save(donor.state_dict(), tmp_path / "resnet.pt")
    model, _ = model_from_weights("resnet10t", tmp_path / "resnet.pt", 3)
    assert model.fc.weight.shape[0] == 3 and torch.equal(model.conv1[0].weight, donor.conv1[0].weight)
    with pytest.raises(UserError, match="another model"):
        model_from_weights("vlonghorn_test", tmp_path / "resnet.pt", 5, img_size=8, **MODEL)


def test_a_model_for_any_size_trains_at_that_of_the_config(tmp_path, shards, capsys):  # noqa: F811
    # A ResNet has no img_size, and timm's default of 224 px would be 28 times as large.
    run = train_imagenet.main([
        *QUICK, *PLAIN, *shards, "--model", "test_resnet", "--model-kwargs", "img_size=8", "patch_size=none",
        "depth=none", "embed_dim=none", "save_states=true", "residual_in_fp32=false", "--epochs", "1", "--run-dir",
        str(tmp_path / "run")])  # fmt: skip
    said = capsys.readouterr().out
    assert "input 3x8x8" in said
    assert all(
        f"Note: this model has no {word}, and trains without it" in said for word in ("save_states", "residual_in_fp32")
    )
    assert load_model(run).settings["input_size"] == (3, 8, 8)
    model, _ = model_from_weights("test_resnet", run, 3, img_size=16)
    assert model.num_classes == 3
    with pytest.raises(UserError, match=r"with d_state=8: .*'d_state'"):
        create_model("test_resnet", img_size=8, d_state=8)


def test_early_blocks_of_a_fine_tuned_model_learn_slower(weights, tmp_path, shards, capsys):  # noqa: F811
    file, averaged = weights
    run = train_imagenet.main([
        *QUICK, *PLAIN, *shards, "--init", str(file), "--model-kwargs", "depth=2", "embed_dim=32", "img_size=8",
        "patch_size=4", "--layer-decay", "0.01", "--opt", "sgd", "--lr", "1e-2", "--weight-decay", "0", "--epochs", "1",
        "--run-dir", str(tmp_path / "run")])  # fmt: skip
    trained = torch.load(run / "last.pt", weights_only=True)["state_dict"]

    def moved(prefix):
        return max((trained[name] - averaged[name]).abs().max().item() for name in trained if name.startswith(prefix))

    assert 0 < moved("blocks.0") < 0.1 * moved("blocks.1")
    assert f"init    EMA weights of {file}: {len(averaged)} tensors" in capsys.readouterr().out
    # The curves show the rate of the classifier, which is the one printed, and not a block's share of it.
    assert scalars(run)["train/lr"][1] == pytest.approx(1e-2)


def test_bad_samples_are_counted_in_a_run_and_stop_it_without_a_budget(tmp_path):
    folder = write_digits(tmp_path / "data", "train", 70)
    write_digits(folder, "val", 20)
    bad = (folder / "train-0.tar").read_bytes().replace(b"\x89PNG", b"\x89BAD", 1)
    (folder / "train-0.tar").write_bytes(bad)
    arguments = [*QUICK, *PLAIN, "--data", str(folder), "--train-samples", "70", "--val-samples", "20", "--epochs", "1"]
    with pytest.raises(UserError, match="train-0.tar, sample 0000: not a readable image"):
        train_imagenet.main([*arguments, "--run-dir", str(tmp_path / "strict")])
    run = train_imagenet.main([*arguments, "--run-dir", str(tmp_path / "run"), "--max-bad-samples", "2"])
    assert [entry["skipped_samples"] for entry in json.loads((run / "metrics.json").read_text())] == [1]
    # An evaluation skips none.
    bad = (folder / "val-0.tar").read_bytes().replace(b"\x89PNG", b"\x89BAD", 1)
    (folder / "val-0.tar").write_bytes(bad)
    with pytest.raises(UserError, match="val-0.tar, sample 0000: not a readable image"):
        train_imagenet.main([*arguments, "--run-dir", str(tmp_path / "stopped"), "--max-bad-samples", "2"])
