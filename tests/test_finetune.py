"""Training that starts from weights: from another image size, for other classes, slower in the early blocks; and what
it skips of bad data."""

import json

import pytest
import torch
from safetensors.torch import save_file
from test_train import PLAIN, QUICK, fresh_process_state, shards, write_digits  # noqa: F401  (two are fixtures)

import train_imagenet
from vision_longhorn.checkpoint import create_model, save_checkpoint
from vision_longhorn.errors import UserError

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
    same = create_model("vlonghorn_test", file, img_size=8, num_classes=10, **MODEL)
    assert all(torch.equal(value, averaged[name]) for name, value in same.state_dict().items())
    other = create_model("vlonghorn_test", file, img_size=16, num_classes=3, **MODEL)
    for name, value in other.state_dict().items():
        if name.startswith("head."):
            assert value.shape[0] == 3
        elif name == "pos_embed":
            assert value.shape == (1, 17, 32) and torch.equal(value[:, 8], averaged[name][:, 2])  # the class token's
        else:
            assert torch.equal(value, averaged[name])


def test_weights_of_another_model_are_refused(weights):
    with pytest.raises(UserError, match="cannot be made with"):
        create_model("vlonghorn_test", weights[0], **{**MODEL, "embed_dim": 48}, img_size=8, num_classes=10)


def test_early_blocks_of_a_fine_tuned_model_learn_slower(weights, tmp_path, shards):  # noqa: F811
    file, averaged = weights
    run = train_imagenet.main([
        *QUICK, *PLAIN, *shards, "--init", str(file), "--model-kwargs", "depth=2", "embed_dim=32", "img_size=8",
        "patch_size=4", "--layer-decay", "0.01", "--opt", "sgd", "--lr", "1e-2", "--weight-decay", "0", "--epochs", "1",
        "--run-dir", str(tmp_path / "run")])
    trained = torch.load(run / "last.pt", weights_only=True)["state_dict"]

    def moved(prefix):
        return max((trained[name] - averaged[name]).abs().max().item() for name in trained if name.startswith(prefix))
    assert 0 < moved("blocks.0") < 0.1 * moved("blocks.1")


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
