"""Multi-query associative recall: the sequences, the models, runs that go on after any end, and studies of them."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from test_lab import Studying, finish, of, server, until  # noqa: F401, the server is needed here, too
from test_train import fails_with_one_line, fresh_process_state  # noqa: F401, which each run here needs, too

from lab import __main__ as lab
from lab import recall
from lab.mqar import RecallModel, draw_sequences
from lab.plan import read_studies
from lab.recall_config import RecallConfig
from lab.results import Known, build
from lab.tables import markdown
from vision_longhorn.errors import UserError

MIXERS = {
    "longhorn": {"mixer": "longhorn"},
    "exact": {"mixer": "longhorn", "rule": "exact"},
    "delta": {"mixer": "longhorn", "rule": "delta"},
    "gla": {"mixer": "longhorn", "rule": "gla"},
    "mamba": {"mixer": "mamba"},
    "mamba_token_A": {"mixer": "mamba", "A_per_token": True},
    "mamba2": {"mixer": "mamba2"},
    "attention": {"mixer": "attention"},
}

# Epochs of 6 updates
TINY = {
    "variants": {"longhorn": {"model": "vlonghorn_tiny_paper"}, "vim": {"model": "vim_tiny"}},
    "studies": {
        "recall": {
            "asks": "Which recalls?",
            "task": "recall",
            "overrides": {"vocab_size": 16, "length": 8, "pairs": 2, "train_samples": 100, "val_samples": 40,
                          "batch_size": 16, "epochs": 2, "width": 8},
            "grid": {"lr": [0.003, 0.01]},
            "variants": ["longhorn", {"name": "attention", "model_kwargs": {"mixer": "attention"}}],
        }
    },
}  # fmt: skip


def test_every_query_asks_for_the_value_that_its_key_was_given():
    length, pairs, vocabulary = 64, 8, 128
    data = draw_sequences(500, length, pairs, vocabulary, 0.01, seed=3)
    keys, values = data.tokens[:, 0 : 2 * pairs : 2], data.tokens[:, 1 : 2 * pairs : 2]
    assert 1 <= keys.min() and keys.max() < vocabulary // 2 <= values.min() and values.max() < vocabulary
    for words in keys, values, data.places:
        assert (words.sort(1).values.diff(dim=1) > 0).all()  # no two alike in a sequence
    # From the tokens alone, as a reader would: a later key's value stands behind its first occurrence.
    labels = torch.full_like(data.tokens, -100).scatter(1, data.places.long(), data.answers)
    for tokens, wanted in zip(data.tokens[:50].tolist(), labels[:50].tolist()):
        for i, token in enumerate(tokens):
            if i >= 2 * pairs and token:
                assert wanted[i] == tokens[tokens.index(token) + 1]
            else:
                assert wanted[i] == -100
    assert (labels >= 0).sum() == 500 * pairs and (data.tokens != 0).sum() == 500 * 3 * pairs


def test_queries_come_soon_by_a_power_law():
    """One query, so that its place has the law's own weights."""
    data = draw_sequences(20_000, 18, 1, 16, 0.5, seed=0)
    shares = torch.bincount((data.places.flatten() - 2) // 2, minlength=8) / 20_000
    weights = torch.arange(1, 9) ** -0.5
    assert shares == pytest.approx(weights / weights.sum(), abs=0.015)
    keys = torch.bincount(data.tokens[:, 0], minlength=8) / 20_000
    assert keys == pytest.approx(torch.tensor([0, *[1 / 7] * 7]), abs=0.015)


def test_the_same_seed_gives_the_same_sequences_and_all_places_may_be_taken():
    shape = (16, 4, 16, 0.01)
    first, again, other = (draw_sequences(5000, *shape, seed=seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, first, again)) and not torch.equal(first.tokens, other.tokens)
    assert first.tokens.shape == (5000, 16) and (first.places.sort(1).values == torch.tensor([8, 10, 12, 14])).all()
    assert not torch.equal(first.tokens[:904], first.tokens[4096:])  # drawn in two parts


@pytest.mark.parametrize("name", MIXERS)
def test_no_model_sees_what_comes_after_a_query(name):
    torch.manual_seed(0)
    model = RecallModel(16, 8, 8, 2, **MIXERS[name])
    tokens, places = torch.randint(16, (3, 8)), torch.tensor([[2, 4, 7]] * 3)
    later = tokens.clone()
    later[:, 5:] = (tokens[:, 5:] + 1) % 16
    scores, others = model(tokens, places), model(later, places)
    torch.testing.assert_close(scores[:, :2], others[:, :2], rtol=0, atol=0)
    assert (scores[:, 2] != others[:, 2]).any()
    assert scores.shape == (3, 3, 16)
    scores.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert (model.pos_embed is not None) == (name == "attention")


def settings(**others):
    return RecallConfig(**{"vocab_size": 16, "length": 8, "pairs": 2, "train_samples": 100, "val_samples": 40,
                           "batch_size": 16, "epochs": 3, "width": 8, "lr": 0.01, **others})  # fmt: skip


def start(folder, cfg, device="cpu"):
    """A run as its process has it."""
    file = folder.parent / f"{folder.name}.yaml"
    file.write_text(yaml.safe_dump(cfg.values()))
    recall.main(["--config", str(file), "--run-dir", str(folder), "--device", device])


def results(folder):
    """The epochs' results but for times."""
    return [{**entry, "images_per_s": 0} for entry in json.loads((folder / "metrics.json").read_text())]


@pytest.mark.parametrize("mixer, width, lr", [("attention", 32, 0.003), ("longhorn", 16, 0.02)])
def test_two_layers_learn_to_recall_and_stop_when_they_have(tmp_path, mixer, width, lr):
    start(tmp_path / "run", settings(mixer=mixer, width=width, lr=lr, train_samples=8192, val_samples=256,
                                     batch_size=64, epochs=6, enough=90))  # fmt: skip
    history = results(tmp_path / "run")
    # Who knows no more than which values were told is right at half of two.
    assert history[-1]["val"]["top1"] > 90 and history[-1]["val"]["loss"] < 0.5 and len(history) < 6


def test_the_rate_falls_by_epochs_along_a_cosine_to_zero(tmp_path):
    start(tmp_path / "run", settings(epochs=4))
    assert [entry["lr"] for entry in results(tmp_path / "run")] == pytest.approx(
        [0.01, 0.01 * (1 + 0.5**0.5) / 2, 0.005, 0.01 * (1 - 0.5**0.5) / 2]
    )


@pytest.mark.parametrize("how", ["signal", "kill", "before its results", "within its first checkpoint"])
def test_a_run_that_is_stopped_goes_on_to_the_same_numbers(tmp_path, monkeypatch, how):
    cfg = settings(model_kwargs={"rule": "exact"})
    start(tmp_path / "whole", cfg)
    real, made = recall.RecallRun.update, []

    def step(run, batch):
        found = real(run, batch)
        made.append(batch)
        if len(made) == 9:  # the third of the second epoch
            if how == "kill":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    if how == "before its results":
        start(tmp_path / "run", cfg)
        (tmp_path / "run/metrics.json").unlink()
    elif how == "within its first checkpoint":
        start(tmp_path / "run", cfg)
        (tmp_path / "run/last.pt").unlink()  # it is there under another name, and the run begins anew
    else:
        with monkeypatch.context() as patch, pytest.raises((SystemExit, KeyboardInterrupt)) as end:
            patch.setattr(recall.RecallRun, "update", step)
            start(tmp_path / "run", cfg)
        assert how == "kill" or end.value.code == 128 + signal.SIGTERM
        assert len(results(tmp_path / "run")) == 1 and len(made) == 9
    start(tmp_path / "run", cfg)
    assert results(tmp_path / "run") == results(tmp_path / "whole")
    weights = [torch.load(tmp_path / name / "last.pt")["state_dict"] for name in ("run", "whole")]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXERS)
def test_graphs_and_a_compiled_loss_change_nothing_on_a_gpu(tmp_path, monkeypatch, name):
    mixer = dict(MIXERS[name])
    cfg = dict(mixer=mixer.pop("mixer"), model_kwargs=mixer, width=64, length=64, pairs=8, vocab_size=512, lr=0.003,
               train_samples=2048, val_samples=200, batch_size=64)  # fmt: skip
    start(tmp_path / "plain", settings(**cfg, cuda_graphs=False, compile=False), "cuda")
    plain = results(tmp_path / "plain")
    start(tmp_path / "captured", settings(**cfg, compile=False), "cuda")
    assert results(tmp_path / "captured") == plain
    start(tmp_path / "both", settings(**cfg), "cuda")
    both = results(tmp_path / "both")
    for found, expected, rel in zip(both, plain, (2e-3, 2e-2, 2e-2), strict=True):  # differences of rounding grow
        assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=rel)

    def step(run, index):
        made.append(index)
        if len(made) == 50:  # within the second epoch
            os.kill(os.getpid(), signal.SIGTERM)
        return real(run, index)

    real, made = recall.RecallRun.update, []
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(recall.RecallRun, "update", step)
        start(tmp_path / "stopped", settings(**cfg), "cuda")
    start(tmp_path / "stopped", settings(**cfg), "cuda")
    assert results(tmp_path / "stopped") == both


def test_updates_that_are_not_finite_are_skipped_and_an_epoch_of_them_ends_the_run(tmp_path, monkeypatch):
    real, seen = recall.mean_loss, []

    def loss(scores, answers):
        found = real(scores, answers)
        if not scores.requires_grad:  # an evaluation's
            return found
        seen.append(found)
        return found * float("nan") if len(seen) - 1 in bad else found

    monkeypatch.setattr(recall, "mean_loss", loss)
    bad = {2, 7}
    start(tmp_path / "some", settings())
    assert all(entry["train_loss"] < 10 for entry in results(tmp_path / "some"))
    assert torch.load(tmp_path / "some/last.pt")["skipped"] == 2
    seen, bad = [], range(6, 12)
    with pytest.raises(UserError, match="epoch 2 were skipped.*lower lr than 0.01"):
        start(tmp_path / "all", settings())


@pytest.mark.parametrize(
    "values, words",
    [
        ({"pairs": 3}, ["length is 8", "even one of 12"]),
        ({"vocab_size": 4}, ["vocab_size is 4", "even one of 6"]),
        ({"batch_size": 101}, ["batch_size is 101", "100"]),
        ({"model_kwargs": {"wiring": "vim"}}, ["wiring", "forward"]),
        ({"lr": 0}, ["lr is 0"]),
    ],
)
def test_settings_that_cannot_be_are_named(values, words):
    with pytest.raises(UserError) as error:
        settings(**values)
    assert all(word in str(error.value) for word in words), error.value


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "studies.yaml").write_text(yaml.safe_dump(TINY))
    return tmp_path


def figures(folder):
    """What of a study's JSON no machine and no interruption may change."""
    content = json.loads((folder / "studies/recall.json").read_text())
    return [(run["key"], run["seed"], run["final"], run["curve"]) for run in content["runs"]]


def test_a_study_is_run_killed_and_gone_on_with(folder):
    assert finish(folder, "recall", "--dry-run").count(" 0 of 2 epochs\n") == 4
    first = Studying(folder, "recall", "--per-gpu", 2, SLOW="0.1")
    until(lambda: list(folder.glob("studies/runs/*/last.pt")))
    first.process.kill()  # its runs notice and end
    first.process.join()
    said = finish(folder, "recall", "--per-gpu", 2, PLOTS="1")
    assert "FAILED" not in said
    content = json.loads((folder / "studies/recall.json").read_text())
    assert len(content["runs"]) == 4 and not content["unfinished"] and content["task"] == "recall"
    for run in content["runs"]:
        assert run["epochs"] == 2 and run["seconds"] > 0 and set(run["final"]) == {"raw"}
    table = (folder / "studies/recall.md").read_text()
    assert f"recall\n\n{table}" in said and markdown(content) == table
    assert (folder / "studies/recall.png").read_bytes().startswith(b"\x89PNG")
    # An undisturbed one gives the same figures.
    before = figures(folder)
    shutil.rmtree(folder / "studies")
    finish(folder, "recall", "--per-gpu", 2)
    assert figures(folder) == before


def test_variants_are_the_studies_own_mixers_and_a_grid_makes_settings():
    arms = of(TINY)["recall"].arms
    assert [arm.label for arm in arms] == [
        "lr0.003-longhorn", "lr0.003-attention", "lr0.01-longhorn", "lr0.01-attention"]  # fmt: skip
    assert len({arm.key for arm in arms}) == 4 and len({arm.speed_key for arm in arms}) == 2
    studies = read_studies()
    mixers, recalled = (
        {arm.variant: build(arm).blocks[0].mixer for arm in studies[name].arms} for name in ("mixers", "recall-small")
    )
    for name, mixer in recalled.items():
        assert type(mixer) is type(mixers[name]) and getattr(mixer, "rule", 0) == getattr(mixers[name], "rule", 0)
    assert {arm.variant for arm in studies["recall"].arms} == {*mixers, "exact-unit"}
    assert len(studies["recall"].arms) == 8 * 2 * 3 and len(studies["recall-full"].arms) == 8 * 5 * 4 * 4
    full = {run.identity for run in studies["recall-full"].trials()}
    assert {run.identity for run in studies["recall"].trials()} <= full
    known = Known(Path("nowhere"))
    wide = {arm.variant: known.count_parameters(arm) for arm in studies["recall"].arms if arm.config.width == 128}
    assert max(wide.values()) < 1.1 * min(wide.values())


def changed(**values):
    return {**TINY, "studies": {"recall": {**TINY["studies"]["recall"], **values}}}


@pytest.mark.parametrize(
    "content, words",
    [
        (changed(task="remember"), ["task is 'remember'"]),
        (changed(overrides={"weigth": 3}), ["'weigth'", "give one of"]),
        (changed(grid={"lr": 3}), ["grid", "lr is 3"]),
        (changed(grid={"pairs": [2, 200]}), ["pairs200-longhorn", "800"]),
        (changed(variants=[{"name": "vit", "model": "vit_tiny_patch16_224"}]), ["vit_tiny", "vim_*"]),
    ],
)
def test_mistakes_in_the_file_are_named(content, words):
    with pytest.raises(UserError) as error:
        of(content)
    assert all(word in str(error.value) for word in [*words, "studies.yaml"]), error.value


def test_what_recall_cannot_do_is_said(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    words = ["recall", "--file", "studies.yaml", "--device", "cpu"]
    fails_with_one_line(lab.main, [*words, "--speed"], capsys, "leave recall out")
    fails_with_one_line(lab.main, [*words, "--data", "DIR"], capsys, "need no data")
    made = changed(variants=[{"name": "longhorn", "model_kwargs": {"wings": 2}}])
    (folder / "studies.yaml").write_text(yaml.safe_dump(made))
    fails_with_one_line(lab.main, words, capsys, "lr0.003-longhorn", "wings")


def test_the_table_shows_the_best_rate_and_all_of_them():
    arms, runs = [], []
    for width in 64, 128:
        for lr, accuracy in (1e-3, 40.0), (1e-2, 90.0 if width == 128 else 20.0):
            key = f"{width} {lr}"
            config = dict(lr=lr, length=256, pairs=64, width=width, depth=2, epochs=64)
            arms.append(dict(setting=f"width{width}-lr{lr}", variant="longhorn", key=key, seeds=[0], parameters=1000,
                             speed={}, config=config))  # fmt: skip
            runs.append(dict(key=key, seed=0, epochs=64, final={"raw": accuracy}, seconds=10.0, side_by_side=1,
                             skipped_updates=0, hits={}, curve={}))  # fmt: skip
    text = markdown(dict(study="recall", task="recall", arms=arms, runs=runs, unfinished=[]))
    best, everything = text.split("\n\n")[:2]
    assert best.splitlines()[0] == "| length, pairs | variant | n | width 64 | width 128 |"
    assert best.splitlines()[2:] == ["| 256, 64 | longhorn | 1 | 40.00 (0.001) | 90.00 (0.01) |"]
    assert everything.splitlines()[2:] == [
        "| 256, 64 | longhorn | 64 | 1,000 | 40.00 (64) | 20.00 (64) |",
        "| 256, 64 | longhorn | 128 | 1,000 | 40.00 (64) | 90.00 (64) |",
    ]
    assert "4 of 4 runs" in text
    for arm in arms:
        arm["config"]["enough"] = 89.0
    text = markdown(dict(study="recall", task="recall", arms=arms, runs=[*runs, {**runs[3], "seed": 1},
                         {**runs[3], "seed": 2, "epochs": 9, "final": {"raw": 60.0}}], unfinished=[]))  # fmt: skip
    assert re.search(r"\| 40.00 \(64\) \| 80.00 ± [0-9.]+ \(2 of 3, 9 to 64\) \|", text)
    text = markdown(dict(study="recall", task="recall", arms=arms, runs=[], unfinished=[]))
    assert "| 256, 64 | longhorn | 0 | – | – |" in text
