"""The lab: its file of studies, runs that go on after any end, and what is reused."""

import contextlib
import io
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from PIL import Image
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from test_train import REPOSITORY, fails_with_one_line, write_digits
from torch.utils.benchmark import Timer

from lab import __main__ as lab
from lab import hits, holdout, queue, recall, session, tiny_imagenet
from lab.plan import STUDIES, read_studies, unique_trials
from lab.results import Known, build, write_results
from lab.statistics import read_bits
from lab.tables import markdown
from vision_longhorn.command_line.parser import run_cli
from vision_longhorn.data.places import open_shards
from vision_longhorn.data.samples import image_of
from vision_longhorn.data.sharding import make_digits
from vision_longhorn.data.tars import read_shard
from vision_longhorn.errors import UserError
from vision_longhorn.models.names import DEFINITIONS, RENAMED
from vision_longhorn.train import load_config
from vision_longhorn.training import trainer

STUDY_RESULTS = REPOSITORY / "benchmarks" / "results" / "study"
PROCESSES = multiprocessing.get_context("forkserver")

# Models of 4 tokens, and data of which an epoch is 6 updates.
TINY = {
    "data": {"few": {"train_samples": 96, "val_samples": 37, "num_classes": 10}},
    "variants": {"longhorn": {"model": "vlonghorn_test"}},
    "studies": {
        "pairs": {
            "asks": "Which is better?",
            "config": "demo_digits",
            "data": "few",
            "seeds": 2,
            "pair": ["longhorn", "vim"],
            "model_kwargs": {"depth": 1, "embed_dim": 16, "patch_size": 8},
            "overrides": {"epochs": 2, "warmup_epochs": 0, "batch_size": 16, "checkpoint_interval": 2, "mixup": 0.5},
            "variants": ["longhorn", {"name": "vim", "model": "vim_test"}],
            "resolutions": [16, 24],
        },
    },
}
PAIRS = TINY["studies"]["pairs"]
TINY["studies"]["more"] = {
    **{key: value for key, value in PAIRS.items() if key not in ("pair", "resolutions")},
    "seeds": 1,
    "settings": {"as-before": {}, "slow": {"overrides": {"lr": 1e-3}}},
    "variants": ["longhorn"],
}
TINY["studies"]["faulty"] = {
    **TINY["studies"]["more"],
    "settings": {"good": {}, "bad": {"overrides": {"train_samples": 7}}},  # less than a batch
}


@pytest.fixture(scope="module", autouse=True)
def server():
    """Forks the studies' processes: it has imported everything, so that they start at once."""
    PROCESSES.set_forkserver_preload(["test_lab", "vision_longhorn.training.trainer", "lab.speed", "loaded"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}", prepend=os.pathsep)
        forkserver.ensure_running()


class Forked:
    """Stands for subprocess.Popen: forks a runner's process where a user's is started anew, without its imports."""

    def __init__(self, command, stdout, env, **_):
        words = command[command.index("-m") + 1 :]
        self.process = multiprocessing.get_context("fork").Process(target=self.run, args=(words, stdout, env))
        self.process.start()
        self.pid, self.terminate = self.process.pid, self.process.terminate

    def run(self, words, stdout, env):
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for stream in 1, 2:
            os.dup2(stdout.fileno(), stream)
        os.environ.clear()
        os.environ.update(env)
        own = {"lab.hits": hits.main, "lab.recall": recall.main}
        run_cli(lambda: own[words[0]](words[1:]) if words[0] in own else train(words[2:]))

    def poll(self):
        return self.process.exitcode

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("run", timeout)
        return self.poll()


def train(words):
    cfg, name = load_config(words)
    trainer.plot_runs = lambda *_: None  # most of a small run's time
    if "SLOW" in os.environ:
        real = trainer.Trainer.train_step
        trainer.Trainer.train_step = lambda *given: (time.sleep(float(os.environ["SLOW"])), real(*given))[1]
    trainer.train(cfg, name)


def work(folder, log, words, environment):
    """The process of a study."""
    os.chdir(folder)
    os.environ.update(environment)
    if "PLOTS" not in environment:
        session.plot = lambda *_: None  # nine tenths of a small report's time
    if "SLOW" in environment:
        step = recall.RecallRun.update
        recall.RecallRun.update = lambda *given: (time.sleep(float(environment["SLOW"])), step(*given))[1]
    measure = Timer.blocked_autorange
    Timer.blocked_autorange = lambda timer, min_run_time: measure(timer, min_run_time=min_run_time / 20)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    multiprocessing.set_start_method("fork", force=True)  # of the loaders' workers
    torch.set_num_threads(1)  # a fork would wait for threads that its parent alone has
    queue.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
    run_cli(lambda: lab.main(words))


class Studying:
    """`python -m lab` in a folder, with what it prints in `text`."""

    def __init__(self, folder, *words, **environment):
        self.log = folder / f"{time.time_ns()}.log"
        if not (folder / "studies.yaml").exists():
            (folder / "studies.yaml").write_text(yaml.safe_dump(TINY))
            write_digits(folder / "few", "train", 96)
            write_digits(folder / "few", "val", 37)
        data = ["--data", "few"] if (folder / "few").exists() else []
        words = [*map(str, words), "--file", "studies.yaml", *data, "--device", "cpu"]
        self.process = PROCESSES.Process(target=work, args=(folder, self.log, words, environment))
        self.process.start()

    def wait(self):
        self.process.join(90)
        assert self.process.exitcode is not None, f"it hangs: {self.text}"
        return self.process.exitcode

    @property
    def text(self):
        return self.log.read_text() if self.log.exists() else ""


def finish(folder, *words, code=0, **environment):
    """Runs a study to its end, and gives what it printed."""
    studying = Studying(folder, *words, **environment)
    assert studying.wait() == code, studying.text
    return studying.text


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def figures(path):
    """What of a study's JSON no machine and no interruption may change."""
    content = json.loads(path.read_text())
    return [(run["key"], run["seed"], run["final"], run["curve"], run["hits"]) for run in content["runs"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of a study that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "said").write_text(finish(folder, "pairs", "--per-gpu", 2, PLOTS="1"))
    return folder


def test_a_study_ends_in_a_json_a_table_a_plot_and_runs_that_tensorboard_compares(whole):
    out, said = whole / "studies", (whole / "said").read_text()
    content = json.loads((out / "pairs.json").read_text())
    assert [(run["seed"], run["epochs"]) for run in content["runs"]] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    for run in content["runs"]:
        assert set(run["final"]) == {"raw", "ema"} and len(run["curve"]["train_loss"]) == 2
        assert run["loss"].keys() == run["final"].keys() and all(loss > 0 for loss in run["loss"].values())
        assert run["seconds"] > 0 and run["side_by_side"] == 2 and run["skipped_updates"] == 0
        assert {"commit", "versions", "gpus", "cpus"} <= run["environment"].keys()
        for size in "16", "24":
            assert 100 * read_bits(run["hits"][size]).mean() == pytest.approx(run["hits"][size]["top1"])
        assert run["hits"]["16"]["top1"] == pytest.approx(run["final"]["ema"], abs=0.01)
    assert str(whole) not in (out / "pairs.json").read_text()
    assert content["arms"][0]["config"]["epochs"] == 2 and content["arms"][0]["parameters"] > 1000
    table = (out / "pairs.md").read_text()
    assert f"pairs\n\n{table}" in said and markdown(content) == table
    assert (out / "pairs.png").read_bytes().startswith(b"\x89PNG")
    board = EventMultiplexer().AddRunsFromDirectory(str(out / "runs")).Reload()
    assert {name.rpartition("-")[0] for name in board.Runs()} == {"longhorn-s0", "longhorn-s1", "vim-s0", "vim-s1"}


def test_what_is_done_is_not_done_again_and_shared_with_other_studies(whole, tmp_path):
    shutil.copytree(whole / "studies", tmp_path / "studies")
    said = finish(tmp_path, "pairs")
    assert "start" not in said and figures(tmp_path / "studies/pairs.json") == figures(whole / "studies/pairs.json")
    assert "1 of   2 runs done" in finish(tmp_path, "more", "--list")
    said = finish(tmp_path, "more")
    assert "1 of 2 runs to do" in said and "slow-longhorn-s0" in said and "as-before-longhorn" not in said
    content = json.loads((tmp_path / "studies/more.json").read_text())
    first = json.loads((whole / "studies/pairs.json").read_text())["runs"][0]
    assert content["runs"][0]["curve"] == first["curve"] != content["runs"][1]["curve"]
    assert "| slow, longhorn |" in (tmp_path / "studies/more.md").read_text()


def test_a_json_alone_stands_for_runs_whose_folders_are_gone(whole, tmp_path):
    earlier = json.loads((whole / "studies/pairs.json").read_text())
    earlier["runs"] = earlier["runs"][:3]
    changed_since = json.loads(json.dumps(earlier))
    changed_since["arms"][0]["config"]["ema_decay"] = 0.5  # a default, which the key leaves out
    write_results(tmp_path / "earlier.json", changed_since)
    assert "ema_decay=0.5" in finish(tmp_path, "pairs", "--list", "--merge", tmp_path / "earlier.json", code=1)
    write_results(tmp_path / "earlier.json", earlier)
    listed = finish(tmp_path, "pairs", "--list", "--merge", tmp_path / "earlier.json")
    assert "3 of   4 runs done" in listed
    said = finish(tmp_path, "pairs", "--per-gpu", 2, "--merge", tmp_path / "earlier.json")
    assert "1 of 4 runs to do" in said
    assert figures(tmp_path / "studies/pairs.json") == figures(whole / "studies/pairs.json")
    # And from its own JSON, without any folder, the same table comes again.
    shutil.rmtree(tmp_path / "studies/runs")
    before = [(tmp_path / "studies" / name).read_text() for name in ("pairs.json", "pairs.md")]
    said = finish(tmp_path, "pairs", "--report")
    assert before == [(tmp_path / "studies" / name).read_text() for name in ("pairs.json", "pairs.md")]
    assert before[1] in said
    # Elsewhere, too, where nothing ran.
    finish(tmp_path, "pairs", "--report", "--out", "other", "--merge", tmp_path / "studies/pairs.json")
    assert (tmp_path / "other/pairs.json").read_text() == before[0]
    # Other settings are other runs, and their table does not take the only copy of these away.
    other = changed(*PLACE, overrides={**PAIRS["overrides"], "lr": 5e-4})
    (tmp_path / "studies.yaml").write_text(yaml.safe_dump(other))
    assert "0 of   4 runs done" in finish(tmp_path, "pairs", "--list")
    finish(tmp_path, "pairs", "--report")
    finish(tmp_path, "pairs", "--report")
    found = json.loads((tmp_path / "studies/pairs.json").read_text())
    assert found["runs"] == [] and found["before"] == json.loads(before[0])["runs"]
    (tmp_path / "studies.yaml").write_text(yaml.safe_dump(TINY))
    finish(tmp_path, "pairs", "--report")
    assert figures(tmp_path / "studies/pairs.json") == figures(whole / "studies/pairs.json")


def test_a_run_whose_files_are_lost_takes_no_other_with_it(whole, tmp_path):
    shutil.copytree(whole / "studies", tmp_path / "studies")
    lost = next((tmp_path / "studies/runs").glob("longhorn-s0-*"))
    for file in lost.glob("events*"):
        file.unlink()
    finish(tmp_path, "pairs", "--report")  # the JSON still has it
    assert figures(tmp_path / "studies/pairs.json") == figures(whole / "studies/pairs.json")
    (tmp_path / "studies/pairs.json").unlink()
    finish(tmp_path, "pairs", "--report")
    content = json.loads((tmp_path / "studies/pairs.json").read_text())
    assert len(content["runs"]) == 3 and "no training curves" in content["unfinished"][0]["last_line"]
    finish(tmp_path, "pairs", "--dry-run")
    (lost / "env.json").unlink()
    (tmp_path / "studies/pairs.json").unlink()
    others = sorted(tmp_path.glob("studies/runs/vim*/env.json"))
    others[0].write_text("{}")
    assert "Traceback" not in finish(tmp_path, "pairs", "--report")
    content = json.loads((tmp_path / "studies/pairs.json").read_text())
    assert len(content["runs"]) == 2 and all("env.json" in run["last_line"] for run in content["unfinished"])


def begun(folder):
    return list(folder.glob("studies/runs/*/last.pt"))


def test_a_study_that_is_killed_and_stopped_goes_on_to_the_figures_of_an_undisturbed_one(whole, tmp_path):
    first = Studying(tmp_path, "pairs", "--per-gpu", 2, SLOW="0.3")
    until(lambda: len(begun(tmp_path)) > 1)
    orphans = psutil.Process(first.process.pid).children()
    first.process.kill()  # its runs notice, save and end
    first.process.join()
    # So slow that no run ends before it is stopped, however late the first one's are to end.
    second = Studying(tmp_path, "pairs", "--per-gpu", 2, SLOW="1")
    until(lambda: "start" in second.text)
    until(lambda: not any(child.is_running() and child.status() != "zombie" for child in orphans))
    until(lambda: second.text.count("start") > 1)
    time.sleep(0.5)
    second.process.terminate()
    assert second.wait() == 128 + signal.SIGTERM, second.text
    assert "stopping 2" in second.text and "wrote" in second.text
    # One whose process is killed in the middle of it, and what that leaves.
    third = Studying(tmp_path, "pairs", "--per-gpu", 2, SLOW="0.3")  # each run's loader has as many processes
    until(lambda: "start" in third.text)
    time.sleep(1)
    for child in psutil.Process(third.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    assert third.wait() == 1 and "FAILED" in third.text and "exit code -9" in third.text
    said = finish(tmp_path, "pairs", "--per-gpu", 2)
    assert "FAILED" not in said
    assert figures(tmp_path / "studies/pairs.json") == figures(whole / "studies/pairs.json")
    assert not json.loads((tmp_path / "studies/pairs.json").read_text())["unfinished"]


@pytest.mark.parametrize("kind", ["no results", "no settings"])
def test_what_a_kill_between_two_files_leaves_is_mended(whole, tmp_path, kind):
    shutil.copytree(whole / "studies", tmp_path / "studies")
    (tmp_path / "studies/pairs.json").unlink()
    run = next(tmp_path.glob("studies/runs/vim-s1-*"))
    if kind == "no results":  # the last checkpoint was written, its results were not
        history = json.loads((run / "metrics.json").read_text())
        (run / "metrics.json").write_text(json.dumps(history[:1]))
    else:  # only the first file was written
        for path in run.iterdir():
            if path.name != "env.json":
                path.unlink()
    said = finish(tmp_path, "pairs", "--per-gpu", 2)  # of two, as each run's loader then has as many processes
    assert ("start" in said) == (kind == "no settings")
    assert figures(tmp_path / "studies/pairs.json") == figures(whole / "studies/pairs.json")


def of(content):
    """The studies of a file that holds `content`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "studies.yaml")
        file.write_text(yaml.safe_dump(content))
        return read_studies(file)


def test_a_failing_run_is_recorded_and_stops_no_other(tmp_path):
    said = finish(tmp_path, "faulty", code=1)
    assert "FAILED  bad-longhorn-s0" in said and "error: 7 samples" in said and "done" in said
    content = json.loads((tmp_path / "studies/faulty.json").read_text())
    assert len(content["runs"]) == 1 and content["unfinished"][0]["exit_code"] == 1
    assert "7 samples" in content["unfinished"][0]["last_line"]
    assert "bad, longhorn seed 0 after 0 epochs: failed" in (tmp_path / "studies/faulty.md").read_text()
    finish(tmp_path, "faulty", code=1)  # is tried again, and again recorded once
    assert len(json.loads((tmp_path / "studies/faulty.json").read_text())["unfinished"]) == 1


def test_speeds_are_measured_alone_those_that_are_unknown_first(tmp_path):
    said = finish(tmp_path, "pairs", "--speed")
    assert said.count("images/s") == 2 and said.index("longhorn") < said.index("vim")
    speeds = json.loads((tmp_path / "studies/speed.json").read_text())["speeds"]
    assert speeds.keys() == {arm.speed_key for arm in of(TINY)["pairs"].arms}
    assert all(found["images_per_s"] > 0 for speed in speeds.values() for found in speed.values())
    known = {key: speed for key, speed in speeds.items() if speed["CPU"]["variant"] == "longhorn"}
    (tmp_path / "studies/speed.json").write_text(json.dumps({"speeds": known}))
    said = finish(tmp_path, "pairs", "--speed")
    assert said.index("vim") < said.index("longhorn") and not (tmp_path / "studies/runs").exists()
    finish(tmp_path, "pairs", "--report")
    assert "images/s alone, CPU" in (tmp_path / "studies/pairs.md").read_text()


def test_places_go_over_all_gpus_that_cuda_shows_before_they_share_one(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert queue.find_places("auto", 2) == ["4", "7", "4", "7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert queue.find_places("cuda", 1) == ["0", "1"] and queue.find_places("cpu", 3) == [""] * 3
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UserError, match="device is 'cuda'"):
        queue.find_places("cuda", 1)


def test_two_studies_do_not_share_a_folder_at_once(tmp_path):
    first = Studying(tmp_path, "pairs", SLOW="0.3")
    until(lambda: "start" in first.text)
    assert "is being written by process" in finish(tmp_path, "pairs", code=1)
    assert " of 4 runs" in finish(tmp_path, "pairs", "--report")  # only looks, while the first goes on
    first.process.terminate()
    assert first.wait() == 128 + signal.SIGTERM


def test_the_command_as_users_start_it_with_the_built_in_digits(tmp_path, monkeypatch):
    """Its run is a process of its own."""
    content = yaml.safe_load(STUDIES.read_text())
    digits = {**content["studies"]["digits"], "seeds": 1, "variants": content["studies"]["digits"]["variants"][:1]}
    del digits["pair"], digits["resolutions"]
    digits["overrides"] = {"epochs": 1, "warmup_epochs": 0, "batch_size": 256}
    (tmp_path / "few.yaml").write_text(yaml.safe_dump({**content, "studies": {"digits": digits}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", "lab digits --file few.yaml --device cpu --out there".split())
    with pytest.raises(SystemExit) as end:
        runpy.run_module("lab", run_name="__main__")
    assert end.value.code == 0
    assert json.loads((tmp_path / "there/digits.json").read_text())["runs"][0]["epochs"] == 1


def changed(*path, **values):
    """TINY, the mapping at `path` with other values; None takes one away."""
    content = json.loads(json.dumps(TINY))
    part = content
    for key in path:
        part = part[key]
    part.update(values)
    for key in [key for key, value in values.items() if value is None]:
        del part[key]
    return content


PLACE = "studies", "pairs"


@pytest.mark.parametrize(
    "content, words",
    [
        (changed(*PLACE, sedes=3), ["study pairs", "'sedes'", "give one of seeds"]),
        (changed(*PLACE, overrides={"epochs": "three"}), ["pairs: longhorn", "epochs is 'three'"]),
        (changed(*PLACE, overrides={"epochs": 2, "warmup_epochs": 2}), ["warmup_epochs is 2"]),
        (changed(*PLACE, overrides={"seed": 3}), ["'seed'", "give `seeds: [0]` beside them"]),
        (changed(*PLACE, data=None), ["pairs: longhorn", "'data' is missing"]),
        (changed(*PLACE, pair=["longhorn", "exact"]), ["'exact'", "longhorn, vim"]),
        (changed(*PLACE, variants=["longhorn", {"name": "vim", "like": "longhorn"}]), ["longhorn and vim", "settings"]),
        (changed(*PLACE, variants=["unheard-of"]), ["'unheard-of'", "longhorn"]),
        (changed(*PLACE, variants=["longhorn", {"name": "a/b", "model": "vim_test"}]), ["'a/b'"]),
        (changed(*PLACE, variants="longhorn"), ["variants is 'longhorn': give a list"]),
        (changed(*PLACE, variants=[]), ["variants is missing"]),
        (changed(*PLACE, seeds=[1, 1]), ["seeds is [1, 1]"]),
        (changed(*PLACE, seeds=[1, "1"]), ["seeds is [1, 1]"]),
        (changed(*PLACE, resolutions=["big"]), ["resolutions is ['big']"]),
        (changed(*PLACE, weights="rwa"), ["weights is 'rwa'", "ema, raw"]),
        (changed(*PLACE, grid={"lr": []}), ["lr is []: give a list of values"]),
        (changed(*PLACE, weights="raw"), ["weights is 'raw': give neither pair nor resolutions"]),
        (changed(*PLACE, contrasts={"a": {"plus": ["vim"], "minus": ["exact"]}}), ["'exact' is unknown"]),
        (
            changed(*PLACE, contrasts={"a": {"plus": ["vim"], "minus": ["longhorn"], "over": 0}}),
            ["contrast 'a'", "over"],
        ),
        (changed(*PLACE, contrasts={"a": {"plus": ["vim"], "minus": ["longhorn"], "ovr": 2}}), ["'ovr'"]),
        ({}, ["there are no studies"]),
        ({**TINY, "varients": {}}, ["'varients'", "give one of variants"]),
        ({"studies": {"one": True}}, ["study one", "True", "give `key: value` pairs"]),
        (changed(*PLACE, overrides=True), ["study pairs: overrides is True", "give `key: value` pairs"]),
        (changed(*PLACE, settings={"a": False}), ["study pairs", "False"]),
        (changed("data", few=[3]), ["[3]", "give `key: value` pairs"]),
        (changed("variants", exact={"modl": "vim_test"}), ["'modl'", "give one of model"]),
    ],
)
def test_mistakes_in_the_file_are_named(content, words):
    with pytest.raises(UserError) as error:
        of(content)
    assert all(word in str(error.value) for word in [*words, "studies.yaml"]), error.value


def test_mistakes_on_the_command_line_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lab, "read_studies", cache(read_studies))
    for words, found in [
        ([], ["which study", "mixers"]),
        (["mixer"], ["'mixer'", "give mixers"]),
        (["mixers"], ["--data tiny-imagenet-100=DIR"]),
        (["mixers", "--data", "cifar10=DIR"], ["cifar10=DIR", "tiny-imagenet-100"]),
        (["epochs", "--data", "DIR"], ["need --data cifar10=DIR tiny-imagenet-100=DIR"]),
        (["digits", "--data", "DIR"], ["--data DIR", "need no data"]),
        (["--merge", "old.json", "mixers"], ["say which study, before the options"]),
        (["mixers", "--merge", "old.json"], ["no file old.json"]),
        (["mixers", "--report", "--speed"], ["--report", "--speed"]),
        (["mixers", "--data", "nowhere"], ["nowhere"]),
        (["mixers", "--merge", str(REPOSITORY / "benchmarks/results/soak.json")], ["not a study's result"]),
        (["mixers", "--file", "nowhere.yaml"], ["nowhere.yaml"]),
        (
            ["mixers", "--dry-run", "--data", "nowhere"],
            ["no file or folder 'nowhere'", "the data tiny-imagenet-100"],
        ),
        (["mixers", "--report", "--out", "nowhere"], ["no folder nowhere"]),
    ]:
        fails_with_one_line(lab.main, [*words, "--device", "cpu"], capsys, *found)
    content = changed(*PLACE, model_kwargs={"wings": 2})
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    for words in ["--data", "few"], ["--dry-run"]:
        fails_with_one_line(lab.main, ["pairs", "--file", "mine.yaml", *words], capsys, "longhorn", "wings=2")
    assert not (tmp_path / "nowhere").exists()


def draw_photos(folder):
    """Two images of each of two classes, to train on and to evaluate on."""
    for split in "train", "val":
        for name in "cat", "dog":
            (folder / split / name).mkdir(parents=True)
            for i in range(2):
                Image.new("RGB", (8, 8)).save(folder / split / name / f"{i}.png")


def test_data_of_other_sizes_are_named_before_the_first_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw_photos(tmp_path / "photos")
    for facts, found in [
        (dict(train_samples=5, val_samples=4, num_classes=2), ["train_samples=5", "holds 4", "the data few"]),
        (dict(train_samples=4, val_samples=3, num_classes=2), ["val_samples=3"]),
        (dict(train_samples=4, val_samples=4, num_classes=3), ["num_classes=3", "has 2 classes"]),
    ]:
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(changed("data", few=facts)))
        for more in ["--dry-run"], ["--device", "cpu"]:
            words = ["pairs", "--file", "mine.yaml", "--data", "photos", *more]
            fails_with_one_line(lab.main, words, capsys, *found)


def test_a_key_is_that_of_what_a_run_computes_and_of_nothing_else():
    base = of(TINY)["pairs"].arms[0]
    for same in (
        changed(*PLACE, asks="Another question?"),
        changed(*PLACE, overrides={**PAIRS["overrides"], "log_interval": 1, "keep_checkpoints": 1}),
        changed(*PLACE, overrides={**PAIRS["overrides"], "crop_pct": 1}),  # as the config has it
    ):
        assert of(same)["pairs"].arms[0].key == base.key
    for other in ({"lr": 4e-3}, {"epochs": 3}):
        arm = of(changed(*PLACE, overrides={**PAIRS["overrides"], **other}))["pairs"].arms[0]
        assert arm.key != base.key and arm.speed_key == base.speed_key
    assert of(changed(*PLACE, model_kwargs={"depth": 1}))["pairs"].arms[0].speed_key != base.speed_key
    for alike in (
        changed(*PLACE, overrides={**PAIRS["overrides"], "cuda_graphs": True}),
        changed(*PLACE, model_kwargs={**PAIRS["model_kwargs"], "save_states": False}),  # the config has True
    ):
        arm = of(alike)["pairs"].arms[0]
        assert arm.key == base.key and arm.speed_key != base.speed_key
        known = Known(Path("nowhere"))
        known.configs[base.key] = base.settings()
        known.check([arm])  # the same bits


def test_a_key_is_that_of_the_model_whatever_its_name_means(monkeypatch):
    def keys(content):
        arm = of(content)["pairs"].arms[0]
        return arm.key, arm.speed_key

    base = keys(TINY)
    stated = of(TINY)["pairs"].arms[0].settings()
    meaning = {**DEFINITIONS["vlonghorn_test"], "rule": "exact"}
    by_hand = keys(changed(*PLACE, model_kwargs={**PAIRS["model_kwargs"], "rule": "exact"}))
    assert by_hand[0] != base[0] and by_hand[1] != base[1]
    monkeypatch.setitem(DEFINITIONS, "vlonghorn_test", meaning)
    monkeypatch.setitem(DEFINITIONS, "vlonghorn_test_exact", meaning)
    # What keys leave out is what the family and size meant in version 0.1.
    monkeypatch.setitem(DEFINITIONS, "vlonghorn_test_then", {k: v for k, v in meaning.items() if k != "rule"})
    monkeypatch.setitem(RENAMED, "vlonghorn_test", "vlonghorn_test_then")
    assert keys(TINY) == keys(changed("variants", longhorn={"model": "vlonghorn_test_exact"})) == by_hand
    content = changed("variants", longhorn={"model": "vlonghorn_test_then"})
    assert keys(content) == base
    then, known = of(content)["pairs"].arms[0], Known(Path("nowhere"))
    version_0_1 = {**stated, "model_kwargs": then.config.model_kwargs}
    for record in stated, version_0_1:  # both say what `then` says now
        known.configs[then.key] = record
        known.check([then])
    known.configs[then.key] = of(TINY)["pairs"].arms[0].settings()
    with pytest.raises(UserError, match="an earlier result of it had model_kwargs"):
        known.check([then])


shipped = cache(read_studies)  # which reads for a second
parameters = {}


# Of what was tried and left the code the record alone stays.
LEFT = {"heads", "parallel"}


@pytest.mark.parametrize("file", sorted(STUDY_RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_the_shipped_studies_find_their_records(file):
    content = json.loads(file.read_text())
    if file.stem in LEFT:
        assert content["study"] == file.stem and file.stem not in shipped()
        return
    arms = {(arm.setting, arm.variant): arm for arm in shipped()[content["study"]].arms}
    assert {(arm["setting"], arm["variant"]): arm["key"] for arm in content["arms"]} == {
        place: arm.key for place, arm in arms.items()
    }
    known = Known(Path("nowhere"), [file])
    known.check(arms.values())
    for arm in arms.values():
        if arm.data:
            model = arm.config.model, str(arm.config.model_kwargs), arm.config.num_classes
            if model not in parameters:  # many arms have it
                with torch.device("meta"):  # where weights take no time
                    built = build(arm)
                parameters[model] = sum(value.numel() for value in built.parameters())
                assert built.num_classes == arm.config.num_classes
            assert parameters[model] == known.parameters[arm.key]


def test_runs_go_by_seeds_first_so_that_a_part_of_them_compares():
    content = changed(*PLACE, variants=["longhorn", {"name": "vim", "model": "vim_test", "seeds": [5, 7, 9]}])
    assert [(run.arm.variant, run.seed) for run in of(content)["pairs"].trials()] == [
        ("longhorn", 0), ("vim", 5), ("longhorn", 1), ("vim", 7), ("vim", 9)]  # fmt: skip


def test_the_shipped_studies_are_sound_and_share_what_they_can():
    studies = shipped()
    assert {"mixers", "inside", "epochs", "rate", "resolution", "recipe", "anchor", "digits"} <= studies.keys()
    trials = {name: {trial.identity: trial for trial in one.trials()} for name, one in studies.items()}
    for name in "resolution", "inside", "epochs", "rate":
        shared = [trials[name][identity] for identity in trials["mixers"].keys() & trials[name].keys()]
        assert ("longhorn", 0) in {(trial.arm.variant, trial.seed) for trial in shared}
    assert trials["resolution"].keys() <= trials["mixers"].keys()
    recorded = {file.stem for file in STUDY_RESULTS.glob("*.json")}  # whose models the test above builds
    for arm in {arm.speed_key: arm for one in studies.values() for arm in one.arms if arm.data}.values():
        assert arm.study in recorded or build(arm).num_classes == arm.config.num_classes
    assert len(unique_trials(list(studies.values()))) < sum(map(len, trials.values()))


def test_twelve_lines_make_a_study_as_the_help_shows(tmp_path, monkeypatch, capsys):
    example = lab.EXAMPLE.partition("\n")[2]
    assert example.count("\n") <= 12
    (tmp_path / "mine.yaml").write_text(example)
    study = read_studies(tmp_path / "mine.yaml")["mine"]
    assert len(study.trials()) == 6 and study.arms[0].config.num_classes is None
    assert study.arms[0].config.warmup_epochs < 30
    draw_photos(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    words = ["mine", "--file", "mine.yaml", "--device", "cpu"]
    lab.main([*words, "--data", "photos", "--dry-run"])  # which opens the data and builds the models
    assert "6 of 6 runs to do" in capsys.readouterr().out


def test_the_data_of_the_studies_are_made_of_tiny_imagenet(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_imagenet, "CLASSES", 4)
    monkeypatch.setattr(tiny_imagenet, "IMAGES", 2)
    source, rows = tmp_path / "tiny", []
    for color, name in enumerate(f"n{number}" for number in range(8)):
        for place, files in ((f"train/{name}/images", [f"{name}_{i}" for i in range(3)]), ("val/images", [f"v{name}"])):
            (source / place).mkdir(parents=True, exist_ok=True)
            for file in files:
                Image.new("RGB", (4, 4), (30 * color, 0, 0)).save(source / place / f"{file}.JPEG")
        rows.append(f"v{name}.JPEG\t{name}\t0\t0\t3\t3")
    with pytest.raises(UserError, match="no file .*val_annotations.txt: unpack"):
        tiny_imagenet.samples_of(source, 4)
    (source / "val" / "val_annotations.txt").write_text("\n".join(rows[::-1]))
    tiny_imagenet.main([str(source), str(tmp_path / "out")])
    train, val = (open_shards(tmp_path / "out", split) for split in ("train", "val"))
    assert train.class_names == val.class_names == ["n1", "n3", "n5", "n7"]
    for part, each in ((train, 2), (val, 1)):
        found = [sample for url in part.urls for sample in read_shard(url)]
        assert Counter(int(sample["cls"]) for sample in found) == dict.fromkeys(range(4), each)
        reds = [Image.open(io.BytesIO(image_of(sample))).getpixel((1, 1))[0] for sample in found]
        assert all(abs(red - 30 * (2 * int(sample["cls"]) + 1)) < 9 for red, sample in zip(reds, found, strict=True))
    assert tiny_imagenet.samples_of(source, 2)[1] == ["n1", "n5"]
    assert tiny_imagenet.samples_of(source, 2, 1)[1] == ["n3", "n7"]
    with pytest.raises(UserError, match="first is 1, which leaves 3 classes, not 4"):
        tiny_imagenet.samples_of(source, 4, 1)
    (source / "train" / "n1" / "images" / "n1_0.JPEG").unlink()
    (source / "train" / "n1" / "images" / "n1_1.JPEG").unlink()
    with pytest.raises(UserError, match="n1/images has 1 JPEG files, not 2 or more"):
        tiny_imagenet.samples_of(source, 4)
    with pytest.raises(UserError, match="train has 0 folders and not 8"):
        tiny_imagenet.samples_of(tmp_path, 4)


def test_a_tenth_of_each_class_is_held_out(tmp_path, capsys):
    make_digits(tmp_path / "digits")
    holdout.main([str(tmp_path / "digits"), str(tmp_path / "held"), "--tenth", "3"])
    whole = [sample for url in open_shards(tmp_path / "digits").urls for sample in read_shard(url)]
    train, val = (open_shards(tmp_path / "held", split) for split in ("train", "val"))
    parts = [[sample for url in part.urls for sample in read_shard(url)] for part in (train, val)]
    keys = [{sample["__key__"] for sample in part} for part in parts]
    assert not keys[0] & keys[1] and keys[0] | keys[1] == {sample["__key__"] for sample in whole}
    labels = [Counter(int(sample["cls"]) for sample in part) for part in (whole, parts[1])]
    assert all(abs(labels[1][label] - count / 10) < 1 for label, count in labels[0].items())
    assert (train.num_samples, val.num_samples) == tuple(map(len, parts)) and train.class_names == val.class_names
    with pytest.raises(UserError, match="held is there already"):
        holdout.hold_out(str(tmp_path / "digits"), str(tmp_path / "held"))
