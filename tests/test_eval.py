"""Evaluation: exact on any number of processes, honest about ties and broken scores, and clear about wrong files."""

import json
import pickle

import pytest
import timm
import torch
from accelerate.state import AcceleratorState, GradientState
from test_train import PLAIN, QUICK, fails_with_one_line, launch, write_digits

import eval as eval_script  # noqa: I001, importing test_train made the repository's root known
import train_imagenet
from vision_longhorn.checkpoint import load_checkpoint, save_checkpoint
from vision_longhorn.errors import UserError
from vision_longhorn.evaluate import evaluate, make_accelerator


@pytest.fixture(autouse=True)
def fresh_process_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder. Its 37 evaluation samples lie in one shard: fewer shards than processes and workers."""
    folder = tmp_path_factory.mktemp("eval")
    write_digits(folder / "data", "train", 70)
    write_digits(folder / "data", "val", 37, shards=1)
    data = ["--data", str(folder / "data")]
    train_imagenet.main([*QUICK, *PLAIN, *data, "--train-samples", "70", "--val-samples", "37", "--epochs", "2",
                         "--ema-decay", "0.9", "--run-dir", str(folder / "run")])
    return folder / "run"


def scores(logits, targets, batch=2):
    """`evaluate` of a model that passes its input on as logits."""
    logits, targets = torch.tensor(logits), torch.tensor(targets)
    loader = list(zip(logits.split(batch), targets.split(batch)))
    return evaluate({"it": torch.nn.Identity()}, loader, make_accelerator("cpu"), len(targets), batch)["it"]


def test_counts_and_loss_by_hand():
    logits = torch.randn(23, 12, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(23) % 12
    result = scores(logits.tolist(), targets.tolist(), batch=4)
    order = logits.argsort(dim=1, descending=True)
    assert result["count"] == 23
    assert result["top1_count"] == sum(order[i, 0] == targets[i] for i in range(23))
    assert result["top5_count"] == sum(targets[i] in order[i, :5] for i in range(23))
    assert result["top1"] == pytest.approx(100 * result["top1_count"] / 23)
    expected = -logits.double().log_softmax(1)[torch.arange(23), targets].mean().item()
    assert result["loss"] == pytest.approx(expected, rel=1e-6)


def test_fewer_than_five_classes():
    result = scores([[0.0, 1.0, 2.0]] * 3, [0, 1, 2])
    assert (result["top1_count"], result["top5_count"]) == (1, 3)


def test_ties_go_to_the_first_class_and_scores_that_are_no_numbers_never_hit():
    assert scores([[1.0] * 8] * 8, list(range(8)))["top1_count"] == 1
    assert scores([[1.0] * 8] * 8, list(range(8)))["top5_count"] == 5
    broken = scores([[float("nan")] * 8, [0.0] + [float("nan")] * 7], [0, 0])
    assert (broken["top1_count"], broken["top5_count"]) == (0, 0)


def test_a_split_of_another_size_is_an_error():
    with pytest.raises(UserError, match="saw 2 samples, but the split should hold 3"):
        evaluate({"it": torch.nn.Identity()}, [(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))],
                 make_accelerator("cpu"), 3, 2)


def test_two_processes_count_what_one_counts(run, tmp_path):
    one = eval_script.main(["--checkpoint", str(run), "--workers", "0", "--out", str(tmp_path / "one.json")])
    done = launch("eval.py", "--checkpoint", run / "best.pt", "--workers", 2, "--batch-size", 4, "--out", "two.json",
                  cwd=tmp_path, processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("count 37 of 37") == 1
    two = json.loads((tmp_path / "two.json").read_text())
    assert (one["processes"], two["processes"]) == (1, 2)
    for key in "count", "top1_count", "top5_count", "weights":
        assert one[key] == two[key]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert one == json.loads((tmp_path / "one.json").read_text())


def test_another_split_has_its_own_size(run, tmp_path):
    out = ["--checkpoint", str(run), "--workers", "0", "--out", str(tmp_path / "out.json")]
    assert eval_script.main([*out, "--split", "train"])["count"] == 70


def test_a_process_without_samples_waits_for_the_others(run, tmp_path):
    lone = write_digits(tmp_path / "lone", "val", 1, shards=1)
    done = launch("eval.py", "--checkpoint", run, "--data", lone, "--samples", 1, "--workers", 0, cwd=tmp_path,
                  processes=2)
    assert done.returncode == 0 and "count 1 of 1" in done.stdout, done.stderr


def test_raw_and_averaged_weights_are_those_of_the_last_epoch(run, tmp_path):
    history = json.loads((run / "metrics.json").read_text())
    out = ["--checkpoint", str(run / "last.pt"), "--workers", "0", "--out", str(tmp_path / "out.json")]
    for option, key in ("--raw", "val"), ("--ema", "val_ema"):
        result = eval_script.main([*out, option])
        assert {name: result[name] for name in history[-1][key]} == history[-1][key]
    assert history[-1]["val"]["loss"] != history[-1]["val_ema"]["loss"]


def test_timm_takes_the_checkpoint_as_it_is(run):
    checkpoint = load_checkpoint(run / "best.pt")
    model = timm.create_model(checkpoint["arch"], num_classes=10, checkpoint_path=str(run / "best.pt"),
                              **checkpoint["config"]["model_kwargs"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, checkpoint["state_dict_ema"][name])


class Opener:
    def __reduce__(self):
        return open, ("ran", "w")


def test_code_in_a_checkpoint_is_not_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.pt").write_bytes(pickle.dumps(Opener()))
    torch.save({"state_dict": Opener()}, tmp_path / "bad2.pt")
    (tmp_path / "ran").unlink(missing_ok=True)
    for name in "bad.pt", "bad2.pt":
        fails_with_one_line(eval_script.main, ["--checkpoint", name, "--data", "x"], capsys, name)
    assert not (tmp_path / "ran").exists()


def test_a_failed_save_leaves_the_old_checkpoint_and_no_litter(tmp_path):
    save_checkpoint(tmp_path / "last.pt", {"state_dict": {}})
    before = (tmp_path / "last.pt").read_bytes()
    with pytest.raises(Exception):
        save_checkpoint(tmp_path / "last.pt", {"state_dict": lambda: None})
    assert (tmp_path / "last.pt").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("arguments, words", [
    (["--checkpoint", "{run}/best.pt", "--model", "vim_test"], ["another model", "vlonghorn_test"]),
    (["--checkpoint", "{run}/best.pt", "--model-kwargs", "depth=2"], ["another model", "absent"]),
    (["--checkpoint", "{run}/best.pt", "--num-classes", "7"], ["another model", "head"]),
    (["--checkpoint", "{run}/config.yaml"], ["config.yaml", "no checkpoint"]),
    (["--checkpoint", "nowhere.pt"], ["nowhere.pt"]),
    (["--checkpoint", "{run}", "--data", "nowhere"], ["nowhere"]),
    (["--checkpoint", "{run}", "--split", "test"], ["test", "val"]),
    (["--checkpoint", "{run}", "--samples", "38"], ["37", "38"]),
    (["--checkpoint", "{run}", "--device", "cuda"], ["cuda", "--device cpu"]),
    (["--checkpoint", "{run}", "--batchsize", "8"], ["--batchsize", "--batch-size"]),
    (["--model", "vlonghorn_tinny", "--data", "x"], ["vlonghorn_tinny", "vlonghorn_tiny"]),
    (["--model", "vlonghorn_test"], ["--data"]),
    ([], ["--checkpoint", "--model"]),
])
def test_mistakes_end_with_one_line(run, monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = [word.format(run=run) for word in arguments]
    fails_with_one_line(eval_script.main, [*arguments, "--workers", "0"], capsys, *words)
