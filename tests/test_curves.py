"""Curves of runs, drawn from TensorBoard events."""

import time

import numpy as np
import pytest
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from vision_longhorn import curves, plots
from vision_longhorn.errors import UserError
from vision_longhorn.runs import Run
from vision_longhorn.training.folder import keep_order


def write_run(folder, updates_per_epoch, averaged):
    with SummaryWriter(folder) as writer:
        for update in range(updates_per_epoch, 4 * updates_per_epoch, updates_per_epoch):
            writer.add_scalar("train/epoch", update / updates_per_epoch, update)
            writer.add_scalar("train/loss", 1 / update, update)
            writer.add_scalar("train/lr", 0.1, update)
            for tag in ("val", "val_ema") if averaged else ("val",):
                writer.add_scalar(f"accuracy/top1{tag[3:]}", update, update)
                writer.add_scalar(f"{tag}/loss", 1 / update, update)
    return folder


def test_curves_of_runs_with_different_batches_share_the_axis_of_epochs(tmp_path):
    for updates_per_epoch in (10, 25):
        run = write_run(tmp_path / str(updates_per_epoch), updates_per_epoch, averaged=False)
        epochs, top1 = plots.read_scalars(run)["accuracy/top1"]
        np.testing.assert_allclose(epochs, [1, 2, 3])
        np.testing.assert_allclose(top1, [updates_per_epoch, 2 * updates_per_epoch, 3 * updates_per_epoch])


def test_a_clock_that_went_back_leaves_curves_in_their_order(tmp_path, monkeypatch):
    for clock, first, last in (2e9, 1, 6), (1.9e9, 4, 9), (1.8e9, 8, 11):
        monkeypatch.setattr(time, "time", lambda: clock)
        keep_order(Run(tmp_path))
        with SummaryWriter(tmp_path, purge_step=first) as writer:
            for update in range(first, last):
                writer.add_scalar("train/epoch", update, update)
                writer.add_scalar("train/loss", first, update)
    epochs, losses = plots.read_scalars(tmp_path)["train/loss"]
    assert epochs.tolist() == list(range(1, 11)) and losses.tolist() == [1] * 3 + [4] * 4 + [8] * 3


def test_a_run_that_began_under_former_names_of_curves_is_read_as_one(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        for update in (10, 20, 30):
            writer.add_scalar("train/epoch", update / 10, update)
            for tag in ("val/top1", "val_ema/top1") if update < 30 else ("accuracy/top1", "accuracy/top1_ema"):
                writer.add_scalar(tag, update, update)
    scalars = plots.read_scalars(tmp_path)
    for tag in "accuracy/top1", "accuracy/top1_ema":
        np.testing.assert_allclose(scalars[tag], [[1, 2, 3], [10, 20, 30]])
    assert set(scalars) == {"train/epoch", "accuracy/top1", "accuracy/top1_ema"}


def test_dollars_in_the_name_of_a_run_are_no_formula(tmp_path):
    plots.plot_runs([write_run(tmp_path / "a$b^$", 10, averaged=False)], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()


def test_several_runs_make_one_png(tmp_path):
    one, two = write_run(tmp_path / "one", 10, averaged=True), write_run(tmp_path / "two", 25, averaged=False)
    out = tmp_path / "new" / "curves.png"
    curves.main([str(one), "--out", str(out)])
    alone = np.asarray(Image.open(out).convert("RGB"))
    curves.main([str(one), str(two), "--out", str(out)])
    both = np.asarray(Image.open(out).convert("RGB"))
    assert both.shape == alone.shape and (both != alone).any()
    assert [path.name for path in out.parent.iterdir()] == ["curves.png"]


def test_legend_tells_runs_and_weights_apart(tmp_path, monkeypatch):
    """Raw and averaged weights of one run, and two runs whose folders have one name."""
    runs = [write_run(tmp_path / "one" / "run", 10, averaged=True), write_run(tmp_path / "two" / "run", 33, False)]
    figures = []
    monkeypatch.setattr(plots, "save_png", lambda figure, *_, **__: figures.append(figure))
    plots.plot_runs(runs, tmp_path / "curves.png")
    (legend,) = figures[0].legends
    looks = {
        text.get_text(): (line.get_color(), line.get_linestyle())
        for text, line in zip(legend.texts, legend.get_lines())
    }
    top1 = [(line.get_color(), line.get_linestyle()) for line in figures[0].axes[0].get_lines()]
    assert figures[0].axes[0].get_ylim()[1] == 100  # the highest value is 99 %
    (one, _), (other, _) = looks[str(runs[0])], looks[str(runs[1])]
    (_, raw), (_, averaged) = looks["raw weights"], looks["EMA weights"]
    assert one != other and raw != averaged and top1 == [(one, raw), (one, averaged), (other, raw)]


def test_a_picture_that_cannot_be_written_is_named(tmp_path):
    run = write_run(tmp_path / "run", 10, averaged=False)
    (tmp_path / "file").touch()
    for out, named in ("file/curves.png", "file"), ("run", "run"):
        with pytest.raises((OSError, UserError), match=f"{tmp_path / named}"):
            curves.main([str(run), "--out", str(tmp_path / out)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()], ids=["missing", "empty"])
def test_a_folder_without_curves_is_named(tmp_path, make):
    make(tmp_path / "run")
    with pytest.raises(UserError, match="run holds no training curves"):
        plots.plot_runs([tmp_path / "run"], tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()
