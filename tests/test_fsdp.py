"""Weights, gradients and moments shared out over two processes: the same run as without, in the same checkpoints."""

import shutil
from types import SimpleNamespace

import pytest
import timm
import torch
from test_resume import (  # noqa: F401  (four are fixtures)
    Run,
    arguments,
    fresh_process_state,
    no_picture,
    same,
    same_run,
    server,
)
from test_train import SMALL, scalars, write_digits

import eval as eval_script
import train_imagenet
from vision_longhorn.checkpoint import load_checkpoint
from vision_longhorn.errors import UserError
from vision_longhorn.training.fsdp import shard

# Channels that start with memories of their own, which shards must keep
SPREAD = [*SMALL[2:], "rule=exact", "qk_norm=true", "beta_min=1e-3", "beta_max=0.1"]


@pytest.fixture(scope="module")
def words(arguments, tmp_path_factory):  # noqa: F811
    """Two epochs of 9 updates of two passes each; in the evaluation the processes have 2 batches and 1."""
    folder = write_digits(tmp_path_factory.mktemp("val"), "val", 9)
    return [*arguments, "--workers", "0", "--val-data", str(folder), "--val-samples", "9", "--batch-size", "4",
            "--grad-accum", "2", "--clip-grad", "1", *SPREAD]  # fmt: skip


def finished(folder, words):
    run = Run(folder, words)
    assert run.wait() == [0, 0], run.text
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, words):
    """Folder of a run without shards."""
    return finished(tmp_path_factory.mktemp("whole") / "run", words)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, words):
    """Folder of the same with them."""
    return finished(tmp_path_factory.mktemp("sharded") / "run", [*words, "--fsdp"])


def close(one, other, where="checkpoint"):
    """Asserts that two nests have the same keys and kinds, and tensors that agree to rounding."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            close(one[key], other[key], f"{where} {key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            close(*pair, f"{where} {i}")
    elif torch.is_tensor(one):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=lambda text: f"{where}: {text}")
    else:
        assert one == other, where


def close_ends(one, other):
    ends = [load_checkpoint(run / "last.pt") for run in (one, other)]
    assert list(ends[0]) == list(ends[1])
    for key in "updates", "state_dict", "state_dict_ema", "optimizer":
        close(ends[0][key], ends[1][key], key)


def test_shards_change_neither_the_run_nor_its_checkpoints(whole, sharded):
    curves = [scalars(run) for run in (whole, sharded)]
    for tag in "train/loss", "train/grad_norm", "val/loss", "val_ema/loss":
        assert curves[1][tag] == pytest.approx(curves[0][tag], rel=1e-5), tag
    for tag in "train/lr", "accuracy/top1", "accuracy/top5", "accuracy/top1_ema", "accuracy/top5_ema":
        assert curves[1][tag] == curves[0][tag], tag
    close_ends(whole, sharded)

    path = sharded / "last.pt"
    checkpoint = load_checkpoint(path)
    for weights, key in ([], "val_ema"), (["--raw"], "val"):
        found = eval_script.main(["--checkpoint", str(path), "--workers", "0", *weights])
        told = checkpoint["history"][-1][key]
        assert all(found[name] == told[name] for name in ("count", "top1_count", "top5_count"))
        assert found["loss"] == pytest.approx(told["loss"], rel=1e-6)
    model = timm.create_model(
        "vlonghorn_test", num_classes=10, checkpoint_path=str(path), **checkpoint["config"]["model_kwargs"]
    )
    same(dict(model.state_dict()), checkpoint["state_dict_ema"])


def test_a_sharded_run_killed_and_stopped_ends_with_the_bits_of_an_undisturbed_one(tmp_path, words, sharded):
    words = [*words, "--fsdp"]
    Run(tmp_path / "run", words, rank=1, at=5, kind="kill").die_with(1)
    stopped = Run(tmp_path / "run", words, rank=1, at=4, kind="SIGTERM")
    assert stopped.wait() == [143, 143] and "Stopped by SIGTERM after update 8" in stopped.text, stopped.text
    last = Run(tmp_path / "run", words)
    assert last.wait() == [0, 0] and "Going on with" in last.text, last.text
    same_run(sharded, tmp_path / "run")


def test_runs_go_on_with_and_without_shards(tmp_path, words, whole, sharded, capsys):
    """From the checkpoint before the last: three updates more."""
    for number, (run, more) in enumerate([(sharded, "false"), (whole, "true")]):
        folder = shutil.copytree(run, tmp_path / str(number))
        (folder / "update-0000015.pt").replace(folder / "last.pt")
        run = Run(folder, ["--fsdp", more])
        assert run.wait() == [0, 0] and f"fsdp {not number} -> {bool(number)}" in run.text, run.text
        close_ends(whole, folder)
    train_imagenet.main(["--resume", str(folder), "--epochs", "3"])
    said = capsys.readouterr().out
    assert "one process" in said and "processes 2 -> 1" in said


def test_sharded_updates_that_are_not_finite_change_nothing(tmp_path, words):
    """The first update throws the weights so far that the next ones are not finite, three in a row."""
    run = Run(
        tmp_path / "run", [*words, "--fsdp", "--lr", "1e30", "--checkpoint-interval", "1", "--max-bad-steps", "3"]
    )
    assert run.wait() == [1, 1] and "3 updates in a row, 2 to 4" in run.text, run.text
    states = [load_checkpoint(tmp_path / "run" / f"update-000000{number}.pt") for number in (2, 3)]
    for key in "state_dict", "optimizer":
        groups = [state[key] if key == "state_dict" else state[key]["state"] for state in states]
        same(*groups)


def test_shards_train_by_muon_as_whole_matrices_do(tmp_path, words):
    words = [*words, "--opt", "muon", "--epochs", "1"]
    runs = [finished(tmp_path / name, [*words, *more]) for name, more in (("a", []), ("b", ["--fsdp"]))]
    curves = [scalars(run) for run in runs]
    for tag in "train/loss", "val/loss":
        assert curves[1][tag] == pytest.approx(curves[0][tag], rel=1e-4), tag
    assert len(set(curves[0]["train/loss"].values())) > 1


def test_what_cannot_be_sharded_is_said():
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=2, scaler=None)
    with pytest.raises(UserError, match="ResNet"):
        shard(accelerator, timm.create_model("test_resnet"))
    with pytest.raises(UserError, match="compress_gradients"):
        shard(accelerator, timm.create_model("vlonghorn_test"), compress_gradients=True)
    with pytest.raises(UserError, match="'adamp'.*adamw"):
        train_imagenet.main(["--fsdp", "--opt", "adamp"])
