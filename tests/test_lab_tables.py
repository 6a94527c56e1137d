"""Figures of studies and the tables and plots made of them, down to those in the documents."""

import itertools
import math
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.axes import Axes
from scipy import stats
from test_train import REPOSITORY

from lab import tables
from lab.pages import PAGES, pages
from lab.results import Known
from lab.statistics import combination, difference, mean, over_images
from lab.tables import markdown, plot

COMMITTED = sorted((REPOSITORY / "benchmarks" / "results" / "study").glob("*.json"))


def test_the_intervals_are_students_and_welchs():
    one, other = [44.3, 43.7, 44.9, 44.3], [42.6, 41.9, 42.25]
    found = mean(one[:3])
    assert found.value == pytest.approx(44.3)
    assert found.high - found.value == pytest.approx(4.302653 * 0.6 / math.sqrt(3), rel=1e-6)
    found, share = difference(one, other), 0.1225 / 3
    welch = stats.ttest_ind(one, other, equal_var=False).confidence_interval(0.95)
    assert found == pytest.approx((2.05, welch.low, welch.high))
    for few in [1.0], [1.0, 15.0]:  # of two, Student's interval would be 8 ± 88.9
        assert mean(few)[1:] == difference(few, one)[1:] == combination((few, one), (1, -1))[1:] == (None, None)
    # The mean over two settings alike: half the variance, twice the degrees of freedom. By hand, of 0.36 and 0.1225:
    one = one[:3]
    higher = [value + 10 for value in one], [value + 9 for value in other]
    freedom = 2 * (0.12 + share) ** 2 / (0.12**2 / 2 + share**2 / 2)
    half = stats.t.ppf(0.975, freedom) * math.sqrt((0.12 + share) / 2)
    found = combination((one, other, *higher), (0.5, -0.5, 0.5, -0.5))
    assert found == pytest.approx((2.55, 2.55 - half, 2.55 + half))
    # How much more lies between in one than in the other: twice the width.
    assert combination((one, other, *higher), (-1, 1, 1, -1)) == pytest.approx((1, 1 - 2 * half, 1 + 2 * half))
    assert combination(([1.0] * 3, [2.0] * 3), (1, -1)) == (-1, None, None)


def test_the_bootstrap_over_images_pairs_them():
    rng = np.random.default_rng(1)
    other = (rng.random(2000) < 0.5).astype(np.uint8)
    one = other.copy()
    one[np.flatnonzero(other == 0)[:40]] = 1  # right wherever the other is, and on 40 more
    found = over_images([one], [other])
    half = 1.96 * 100 * math.sqrt(0.02 * 0.98 / 2000)  # of a share of 2 %; unpaired it would be 3.1
    assert found.value == pytest.approx(2) and found.high - found.low == pytest.approx(2 * half, rel=0.1)
    assert over_images([one], [other]) == found
    assert over_images([one, other], [other, other]).value == pytest.approx(1)


def content(runs, **others):
    """A study's JSON with these runs: pairs of (variant, accuracy)."""
    arms = [
        dict(setting="", variant=name, key=name, seeds=[0, 1, 2], parameters=1000, images_per_epoch=100, speed={},
             data="made", config={"epochs": 2})
        for name in ("longhorn", "vim")
    ]  # fmt: skip
    seeds = {"longhorn": 0, "vim": 0}
    records = []
    for name, accuracy in runs:
        records.append(
            dict(key=name, seed=seeds[name], final={"ema": accuracy, "raw": accuracy - 1}, seconds=10.0, side_by_side=1,
                 skipped_updates=0, hits={},
                 curve={"epoch": [1, 2], "train_loss": [2, 1], "raw": [1, 2], "ema": [1, accuracy]})
        )  # fmt: skip
        seeds[name] += 1
    return dict(study="pairs", baseline="vim", pair=["longhorn", "vim"], resolutions=[], arms=arms, runs=records,
                unfinished=[], **others)  # fmt: skip


THIRDS = [("longhorn", 45.0), ("vim", 42.5)]  # a third seed, without which there is no interval


def rows(table):
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines}


def test_rows_come_from_the_json_and_fewer_than_three_seeds_have_no_interval():
    table = rows(markdown(content([("longhorn", 44.0), ("longhorn", 46.0), ("vim", 43.0)])))
    assert table["longhorn"] == ["1,000", "2", "45.00 (44.00 and 46.00)", "44.00 (43.00 and 45.00)", "+2.00", "–", "–"]
    assert table["vim"] == ["1,000", "1", "43.00", "42.00", "–", "–", "–"]
    table = rows(markdown(content([("longhorn", 44.0), ("longhorn", 46.0), ("longhorn", 45.0)])))
    assert table["longhorn"][2] == "45.00 ± 2.48"  # 4.303 / sqrt(3)
    assert rows(markdown(content([])))["longhorn"] == ["1,000", "0", "–", "–", "–", "–", "–"]


def test_losses_have_a_column_where_runs_record_them():
    made = content([("longhorn", 44.0), ("longhorn", 46.0), ("vim", 43.0)])
    for run, loss in zip(made["runs"], (2.0, 2.1004)):
        run["loss"] = {"raw": 3.0, "ema": loss}
    table = rows(markdown(made))
    assert table["variant"][3] == "EMA loss"
    assert table["longhorn"][3] == "2.050 (2.000 and 2.100)" and table["vim"][3] == "–"  # of an older run


def test_raw_weights_are_compared_where_a_study_says_so():
    made = content([("longhorn", 44.0), ("vim", 43.0)], weights="raw")
    for run, raw in zip(made["runs"], (30.0, 20.0)):
        run["final"]["raw"] = raw
    assert "difference to vim (raw)" in markdown(made)
    assert rows(markdown(made))["longhorn"][2:5] == ["44.00", "30.00", "+10.00"]


def test_a_pair_that_runs_in_several_settings_has_a_mean_over_them():
    made = content([("longhorn", 44.0), ("vim", 43.0), ("longhorn", 46.0), ("vim", 42.0), *THIRDS])
    assert "settings" not in markdown(made)
    made["arms"] += [{**arm, "setting": "long", "key": f"{arm['key']} long"} for arm in made["arms"]]
    made["runs"] += [{**run, "key": f"{run['key']} long", "final": {"raw": 50.0}} for run in made["runs"]]
    assert "- mean over 2 settings: longhorn - vim +1.25 [" in markdown(made)
    for arm in made["arms"][2:]:
        arm["config"] = {"epochs": 60}
    assert "long: longhorn - vim" in markdown(made) and "settings" not in markdown(made)


def test_a_pair_is_compared_on_the_way_where_all_its_runs_were_evaluated():
    made = content([("longhorn", 44.0), ("longhorn", 46.0), ("vim", 43.0), ("vim", 42.0), *THIRDS])
    assert "- on the way +0.00 after epoch 1; " in markdown(made)  # of 2: a quarter is none of them, the others are 1
    for number, run in enumerate(made["runs"]):
        losses = [1, 1, 1, 1, 1, 1, 3, number % 4]  # longhorn's mean is 1/3 at the end, vim's 2
        run["curve"] = {"epoch": list(range(1, 9)), "train_loss": losses, "raw": [9] * 8, "ema": list(range(8))}
        run["curve"]["ema"][0] = run["curve"]["ema"][3] = None
        run["curve"]["ema"][5] = 50 - number
    for arm in made["arms"]:
        arm["config"] = {"epochs": 8}
    found = next(line for line in markdown(made).splitlines() if "way" in line)
    assert re.fullmatch(r"- on the way \+0.00 after epoch 2, \+0.00 after epoch 3, \+1.67 \[.*\] after epoch 6; "
                        "its mean training loss is the lower in 1 of 8 epochs", found)  # fmt: skip


def test_a_pair_is_compared_by_the_seeds_that_both_have():
    accuracies = {"longhorn": (44.0, 46.0, 47.0, 47.0), "vim": (43.0, 44.0, 46.0)}
    made = content([(name, value) for name, values in accuracies.items() for value in values])
    assert "over 4 and 3 seeds; in pairs by seed +1.33 [-0.10, +2.77]\n" in markdown(made)  # 4/3 ± 4.303 / 3
    made["runs"][-1]["seed"] = 9
    assert "over 4 and 3 seeds; in pairs by seed +1.50\n" in markdown(made)  # two pairs have no interval
    made["runs"][-2]["seed"] = 8
    assert "over 4 and 3 seeds\n" in markdown(made)


def test_contrasts_stand_below_the_table_once_each_of_their_arms_has_run():
    lead = {"plus": ["longhorn", "long-vim"], "minus": ["vim", "long-longhorn"]}
    made = content(
        [("longhorn", 44.0), ("vim", 43.0), ("longhorn", 46.0), ("vim", 42.0), *THIRDS],
        contrasts=[{"name": "the lead after more epochs", **lead, "over": 1}],
    )
    made["arms"] += [{**arm, "setting": "long", "key": f"{arm['key']} long"} for arm in made["arms"]]
    assert "after more" not in markdown(made)
    made["runs"] += [{**run, "key": f"{run['key']} long", "final": {"raw": 50.0}} for run in made["runs"][:5]]
    assert "- the lead after more epochs: +2.50 over 2 to 3 seeds each\n" in markdown(made)
    made["runs"].append({**made["runs"][-1], "key": "vim long", "seed": 1})
    assert "- the lead after more epochs: +2.50 [" in markdown(made)


def test_a_plot_has_one_kind_of_seconds(tmp_path, monkeypatch):
    costs = []
    monkeypatch.setattr(Axes, "errorbar", lambda self, cost, *_, **__: costs.extend(cost))
    made = content([("longhorn", 44.0), ("vim", 43.0)])
    made["arms"][0]["speed"] = {"GPU": {"images_per_s": 100.0}}
    plot(made, tmp_path / "plot.png")
    assert costs == [10.0, 10.0]  # as the runs had it
    made["arms"][1]["speed"] = {"GPU": {"images_per_s": 50.0}}
    plot(made, tmp_path / "plot.png")
    assert costs[2:] == [2.0, 4.0]  # alone: two epochs of 100 images


def test_plots_of_percentages_end_at_0_and_100_and_show_both_of_two_seeds(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(tables, "save_png", lambda figure, *_, **__: figures.append(figure))
    made = content([("longhorn", 99.0), ("longhorn", 97.0), ("longhorn", 80.0), ("vim", 0.0), ("vim", 14.0)])
    plot(made, tmp_path / "plot.png")
    cost, epochs, _ = figures[0].axes
    for panel in cost, epochs:
        assert panel.get_ylim()[0] >= 0 and panel.get_ylim()[1] <= 100
    bars = [collection.get_segments()[0][:, 1].tolist() for collection in cost.collections]
    assert bars == [[pytest.approx(66.1, abs=0.1), 100], [7, 7]]  # 92 ± 25.9, and a mean of two
    (pair,) = [line.get_ydata() for line in cost.get_lines() if line.get_marker() == "_" and len(line.get_ydata()) == 2]
    assert list(pair) == [0, 14]


def test_images_are_compared_with_the_same_images_alone():
    made = content([("longhorn", 44.0), ("vim", 43.0)])
    for run in made["runs"]:
        run["hits"] = {"64": {"count": 16, "top1": 50.0, "bits": "//8=", "images": "abc"}}
    assert "over the 16 images" in markdown(made)
    made["runs"][0]["hits"]["64"]["images"] = "def"
    assert "over the 16 images" not in markdown(made)


def test_what_went_wrong_stands_below_the_table():
    made = content([("longhorn", 44.0), ("longhorn", 46.0), ("vim", 43.0), ("vim", 42.0), *THIRDS])
    made["runs"][0]["skipped_updates"] = 3
    made["unfinished"] = [
        dict(key="vim", seed=2, epochs=1, exit_code=1, last_line="error: no memory"),
        dict(key="vim", seed=4, epochs=3, curve=dict(epoch=[1, 2, 3], train_loss=[3, 2, 1], raw=[8, 9.75, None])),
    ]
    text = markdown(made)
    assert "longhorn seed 0: 3" in text and "6 of 6 runs" in text
    assert "vim seed 2 after 1 epoch: failed with exit code 1: error: no memory" in text
    assert "vim seed 4 after 3 epochs at raw 9.75 % in epoch 2: unfinished" in text


def test_each_committed_result_has_its_page(monkeypatch):
    """The bootstrap, which takes nearly all of the time, is drawn three times; then any interval will do."""
    real, calls = stats.bootstrap, itertools.count()
    any_interval = SimpleNamespace(confidence_interval=SimpleNamespace(low=-1e3, high=1e3))
    monkeypatch.setattr(stats, "bootstrap", lambda *a, **k: real(*a, **k) if next(calls) < 3 else any_interval)
    made = pages()
    assert next(calls) > 9
    assert len(made) == len(COMMITTED) and {path.name for path in made} == set(os.listdir(REPOSITORY / PAGES))
    for path, text in made.items():
        wanted = re.escape(text).replace(re.escape("[-1000.00, +1000.00]"), r"\[[-+.\d]+, [-+.\d]+\]")
        assert re.fullmatch(wanted, (REPOSITORY / path).read_text("utf-8")), f"python -m lab.pages writes {path} anew"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_results_are_read_and_name_no_place(path):
    Known(path.parent, [path])
    assert not re.search(r'"/(home|root|tmp|work)/', path.read_text())


def test_the_legend_of_many_arms_leaves_the_panels_alone(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(tables, "save_png", lambda figure, *_, **__: figures.append(figure))
    made = content([("longhorn", 44.0), ("vim", 43.0)])
    arms, runs = made["arms"], made["runs"]
    for number in range(9):
        made["arms"] = made["arms"] + [{**arm, "setting": f"{number}", "key": f"{arm['key']} {number}"} for arm in arms]
        made["runs"] = made["runs"] + [{**run, "key": f"{run['key']} {number}"} for run in runs]
    plot(made, tmp_path / "plot.png")
    (figure,) = figures
    figure.draw_without_rendering()
    boxes = [panel.get_tightbbox() for panel in figure.axes]
    assert not figure.legends[0].get_window_extent().count_overlaps(boxes)
    assert all(panel.get_window_extent().height > 300 for panel in figure.axes)
    lines = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in figure.axes[1].get_lines()]
    assert len({color for color, *_ in lines}) == 2  # one a variant
    assert len(set(lines)) == len(made["arms"])
