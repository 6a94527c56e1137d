"""Runs that are killed, told to stop, or meet faults: they go on bit for bit, lose nothing, and say what was wrong."""

import copy
import errno
import functools
import importlib
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import forkserver
from types import SimpleNamespace

import psutil
import pytest
import torch
import torchvision
from test_loader import members, write_tar
from test_train import (  # noqa: F401  (two are fixtures)
    QUICK,
    REPOSITORY,
    fails_with_one_line,
    fresh_process_state,
    no_picture,
    scalars,
    write_digits,
)
from timm.optim import create_optimizer_v2

import eval as eval_script
import train_imagenet
from vision_longhorn import files, runs
from vision_longhorn.checkpoint import load_checkpoint
from vision_longhorn.command_line import parser
from vision_longhorn.command_line.parser import run_cli
from vision_longhorn.data import open_shards, train_loader
from vision_longhorn.devices import make_accelerator
from vision_longhorn.plots import read_scalars
from vision_longhorn.signals import StopSignals
from vision_longhorn.training import trainer, updates
from vision_longhorn.training.config import Config
from vision_longhorn.training.folder import set_aside
from vision_longhorn.training.setup import SoftTargetCrossEntropy, build_optimizer, load_optimizer
from vision_longhorn.training.step import TrainStep
from vision_longhorn.training.updates import UpdateMonitor

PROCESSES = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module", autouse=True)
def server():
    """Forks the processes of all runs: it has imported everything, so that they start at once."""
    PROCESSES.set_forkserver_preload(["train_imagenet", "eval", "test_resume", "loaded"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}", prepend=os.pathsep)
        forkserver.ensure_running()


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """A run with all that draws random numbers: 2 epochs; 9 updates each on 2 processes, 6 on 3."""
    folder = tmp_path_factory.mktemp("resume")
    write_digits(folder, "train", 150)
    write_digits(folder, "val", 37)
    return [*QUICK, "--data", str(folder), "--train-samples", "150", "--val-samples", "37", "--batch-size", "8",
            "--epochs", "2", "--repeats", "3", "--re-prob", "0.5", "--mixup", "0.8", "--ema-decay", "0.9",
            "--drop-path", "0.2", "--log-interval", "2", "--checkpoint-interval", "3"]  # fmt: skip


class Processes:
    """A command in several processes, as a launcher would start them; what they print is in `text`, a file `log`."""

    def __init__(self, script, log, arguments, processes=2, **fault):
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = [
            PROCESSES.Process(target=work, args=(script, rank, processes, port, log, arguments, fault))
            for rank in range(processes)
        ]
        for process in self.processes:
            process.start()

    def wait(self):
        """Exit codes by rank, when all have ended by themselves."""
        for process in self.processes:
            process.join(60)
            assert process.exitcode is not None, f"it hangs: {self.text}"
        return [process.exitcode for process in self.processes]

    def die_with(self, rank):
        """Kills all processes once `rank` has been killed."""
        self.processes[rank].join(60)
        assert self.processes[rank].exitcode == -signal.SIGKILL, self.text
        for process in self.processes:
            process.kill()
            process.join()

    @property
    def text(self):
        return self.log.read_text()


class Run(Processes):
    """A training run, begun or gone on with."""

    def __init__(self, folder, arguments, processes=2, **fault):
        super().__init__(
            "train_imagenet",
            folder.parent / f"{folder.name}-{time.time_ns()}.log",
            [*arguments, "--run-dir", str(folder), "--resume"],
            processes,
            **fault,
        )


def work(script, rank, processes, port, log, arguments, fault):
    """One process of a command. A `fault` is {"rank", "at", "kind"}: what happens to whom, at which update or write."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    multiprocessing.set_start_method("fork", force=True)  # of the loader's workers, as in a process started by a shell
    torch.set_num_threads(1)
    if processes > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(processes),
            MASTER_ADDR="127.0.0.1",
            LOCAL_WORLD_SIZE=str(processes),
            MASTER_PORT=str(port),
        )
    os.environ.update(fault.pop("environment", {}))
    if "mark" in fault:
        mark(fault["mark"], rank)
    elif fault and rank == fault["rank"]:
        inflict(**fault)
    trainer.plot_runs = lambda *_: None  # as in `no_picture`
    wait = parser.time.sleep
    parser.time = SimpleNamespace(sleep=lambda seconds: wait(seconds / 2))  # for a launcher, and there is none
    run_cli(lambda: importlib.import_module(script).main(arguments))


def inflict(rank, at, kind):
    """Brings about what a machine does to a process; `at` counts updates, or files brought to the disk."""

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def signal_all(number):  # as Slurm does: the loader's workers get it too, and not from their parent
        pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
        subprocess.run(["kill", f"-{int(number)}", *map(str, pids)], check=True)

    def fail():
        raise ZeroDivisionError("the fault of this test")

    def limit_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    act = {
        "kill": kill,
        "kill in write": kill,
        "fail": fail,
        "limit files": limit_files,
        **{name: lambda name=name: signal_all(getattr(signal, name)) for name in ("SIGTERM", "SIGUSR1", "SIGINT")},
    }[kind]
    owner, name = (os, "fsync") if kind == "kill in write" else (UpdateMonitor, "update")
    real, count = getattr(owner, name), itertools.count(1)

    def replacement(*args):
        if next(count) == at:
            act()
        return real(*args)

    setattr(owner, name, replacement)


def mark(folder, rank):
    """The sample of class 50 makes a loss not a number. The classes of each batch are written down."""
    real = trainer.device_batches

    def marked(*given):
        for images, targets, *others in real(*given):
            with open(folder / f"classes-{rank}", "a") as file:
                file.write(f"{json.dumps(targets.tolist())}\n")
            yield images * (math.nan if 50 in targets else 1), targets, *others

    trainer.device_batches = marked


def same(one, other, where="checkpoint"):
    """Asserts that two nests of dicts, lists, tensors and plain values agree to the bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            same(one[key], other[key], f"{where} {key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{where} {i}")
    elif torch.is_tensor(one):
        assert torch.equal(one, other), where
    else:
        assert one == other, where


def same_run(one, other):
    """Asserts that two runs had the same losses, accuracies and gradients, and ended with the same state."""
    curves = [scalars(run) for run in (one, other)]
    for tag in "train/loss", "train/grad_norm", "train/lr", "accuracy/top1", "val/loss", "val_ema/loss":
        assert curves[0][tag] == curves[1][tag], tag
    ends = [load_checkpoint(run / "last.pt") for run in (one, other)]
    for end in ends:
        del end["started"]
        for entry in (*end["history"], end["watch"]["last"]):
            del entry["images_per_s"]
    same(*ends)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, arguments):
    """Function from numbers of processes and of workers to the folder of a whole run."""

    @functools.cache
    def whole(processes, workers):
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        run = Run(folder, [*arguments, "--workers", str(workers)], processes)
        assert not any(run.wait()), run.text
        return folder

    return whole


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_killed_again_and_again_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path, arguments, undisturbed, workers
):
    arguments, draw = [*arguments, "--workers", str(workers)], random.Random()
    for kind in "kill", "kill in write", "kill":
        fault = dict(rank=0, at=draw.randint(1, 2), kind=kind)  # the second or third file, or ...
        if kind == "kill":
            fault.update(rank=draw.randrange(2), at=draw.randint(1, 6))
        print(fault)  # to be seen where this fails
        Run(tmp_path / "run", arguments, **fault).die_with(fault["rank"])
    last = Run(tmp_path / "run", arguments)
    assert last.wait() == [0, 0], last.text
    same_run(undisturbed(2, workers), tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.tmp"))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gpu_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(tmp_path, arguments, precision):
    arguments = [*arguments, "--workers", "2", "--device", "cuda", "--deterministic", "--precision", precision]
    whole = Run(tmp_path / "whole", arguments, processes=1)
    assert not any(whole.wait()), whole.text
    for at in 5, 7:  # of 18 updates in an epoch, with a checkpoint after every third
        Run(tmp_path / "killed", arguments, processes=1, rank=0, at=at, kind="kill").die_with(0)
    last = Run(tmp_path / "killed", arguments, processes=1)
    assert not any(last.wait()), last.text
    assert "Going on with" in last.text
    same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("name, at", [("SIGTERM", 4), ("SIGINT", 5)])  # of 6 updates in an epoch
def test_a_signal_to_one_process_saves_and_stops_all_and_they_go_on_bit_for_bit(
    tmp_path, arguments, undisturbed, name, at
):
    """Three processes: only then does the order of the sum over them show."""
    arguments = [*arguments, "--workers", "1"]
    stopped = Run(tmp_path / "run", arguments, processes=3, rank=2, at=at, kind=name)
    assert stopped.wait() == [128 + getattr(signal, name)] * 3, stopped.text
    assert f"Stopped by {name} after update {at + 1}" in stopped.text and "Traceback" not in stopped.text
    assert load_checkpoint(tmp_path / "run" / "last.pt")["updates"] == at + 1  # one later, to agree upon it
    resumed = Run(tmp_path / "run", arguments, processes=3)
    assert resumed.wait() == [0] * 3, resumed.text
    same_run(undisturbed(3, 1), tmp_path / "run")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_is_noted_and_ends_nothing(name):
    with StopSignals() as signals:
        assert signals.received == 0
        os.kill(os.getpid(), getattr(signal, name))
        assert signals.received == getattr(signal, name)


def test_a_second_ctrl_c_stops_at_once():
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt, match="last checkpoint"):
            os.kill(os.getpid(), signal.SIGINT)


def test_what_was_started_not_to_hear_ctrl_c_does_not():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert not signals.received
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def hold(folder, connection):
    """Holds a run's folder until it is killed."""
    with files.lock_folder(folder):
        connection.send("held")
        time.sleep(600)


def test_two_processes_do_not_write_one_run(tmp_path, undisturbed, capsys):
    """A launcher that a signal ends leaves its training alive, and what starts the run anew would write beside it."""
    run = tmp_path / "run"
    shutil.copytree(undisturbed(3, 1), run)
    here, there = PROCESSES.Pipe()
    holder = PROCESSES.Process(target=hold, args=(run, there))
    holder.start()
    try:
        assert here.poll(60) and here.recv() == "held"
        before = (run / "last.pt").read_bytes()
        for words in ["--resume", run, "--epochs", "3"], ["--run-dir", run, "--resume", "--epochs", "3"]:
            fails_with_one_line(train_imagenet.main, words, capsys, str(run), str(holder.pid), socket.gethostname())
        assert (run / "last.pt").read_bytes() == before
    finally:
        holder.kill()
        holder.join()
    train_imagenet.main(["--resume", str(run), "--epochs", "3"])  # the system has freed it
    assert len(load_checkpoint(run / "last.pt")["history"]) == 3


def test_a_run_whose_launcher_was_ended_saves_and_ends(tmp_path, arguments):
    """`accelerate launch` of one process passes no signal on."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--num_processes", "1", "--num_machines", "1",
         "--mixed_precision", "no", "--dynamo_backend", "no", str(REPOSITORY / "train_imagenet.py"), *arguments,
         "--epochs", "10000", "--run-dir", "run"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True)  # fmt: skip
    file = tmp_path / "run" / files.LOCK
    while not file.exists() and launcher.poll() is None:
        time.sleep(0.1)
    time.sleep(1)  # until its text is there
    training = psutil.Process(int(file.read_text().split()[1]))
    launcher.terminate()
    said = launcher.communicate(timeout=60)[0]  # until all that holds its output has ended, the training too
    assert training in psutil.wait_procs([training], timeout=30)[0]
    assert "Stopped by SIGTERM after update" in said, said
    assert (tmp_path / "run" / "last.pt").exists()


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "lockf", refuse)
    files.lock_folder(tmp_path).close()
    assert "cannot be locked" in capsys.readouterr().out


def test_on_another_number_of_processes_it_goes_on_and_says_what_differs(tmp_path, undisturbed, capsys, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)  # of which the sums' last bits depend
    shutil.copytree(undisturbed(3, 1), tmp_path / "run")
    middle = max((tmp_path / "run").glob("update-*.pt"), key=lambda file: -int(file.stem[7:]))
    state = load_checkpoint(middle)
    assert (state["epoch"], state["updates"]) == (1, 9)  # half of the second epoch
    train_imagenet.main(["--resume", str(middle), "--workers", "0"])
    said = capsys.readouterr().out
    assert "after epoch 1 and 9 of 18 updates" in said
    assert "processes 3 -> 1" in said and "updates_per_epoch 6 -> 18" in said and "workers 1 -> 0" in said
    assert "threads 1 -> 7" in said
    end = load_checkpoint(tmp_path / "run" / "last.pt")
    assert (end["epoch"], end["updates"], len(end["history"])) == (2, 36, 2)


def test_a_process_that_fails_ends_all_and_alone_says_why(tmp_path, arguments):
    """Its fellow waits for it in a sum over the processes, and is ended by the launcher, which looks now and then."""
    failed = Run(tmp_path / "run", arguments, rank=1, at=2, kind="fail")
    failed.processes[1].join(60)
    time.sleep(1)
    failed.processes[0].terminate()
    assert failed.wait() == [-signal.SIGTERM, 1]
    assert failed.text.count("Traceback") == 1 and "the fault of this test" in failed.text
    assert "another process" not in failed.text and "gloo" not in failed.text


def test_the_loss_of_a_process_that_was_killed_is_said_in_one_line(tmp_path, arguments):
    run = Run(tmp_path / "run", arguments, rank=1, at=2, kind="kill")
    assert run.wait() == [1, -signal.SIGKILL]
    assert run.text.count("error: another process has ended") == 1 and "Traceback" not in run.text


def quick(folder, arguments, *more):
    """A run in this process: 4 updates, a checkpoint after each."""
    return train_imagenet.main([
        *arguments, "--run-dir", str(folder), "--epochs", "1", "--batch-size", "32",
        "--checkpoint-interval", "1", "--keep-checkpoints", "9", "--log-interval", "1", *more,
    ])  # fmt: skip


def test_curves_and_checkpoints_go_on_where_the_batches_have_grown(tmp_path, arguments):
    folder = tmp_path / "run"
    train_imagenet.main([*arguments, "--run-dir", str(folder), "--batch-size", "32", "--epochs", "1"])  # 4 updates
    train_imagenet.main(["--resume", str(folder), "--batch-size", "64", "--epochs", "3"])  # 2 in each of 2 epochs
    assert list(scalars(folder)["accuracy/top1"]) == [4, 6, 8]
    assert read_scalars(folder)["accuracy/top1"][0].tolist() == [1, 2, 3]
    assert sorted(file.name for file in folder.glob("update-*.pt")) == ["update-0000006.pt", "update-0000008.pt"]


@pytest.mark.parametrize(
    "more",
    [*(["--opt", name] for name in ("adamw", "momentum", "muon", "lamb")), ["--batch-size", "16", "--grad-accum", "2"]],
    ids=lambda words: words[1],
)
def test_an_update_that_is_not_finite_changes_no_weights_no_moments_and_no_step_count(
    tmp_path, arguments, monkeypatch, more
):
    """The first and the third of 4 updates have a bad loss: not a number, and infinite."""
    parts = 2 if "--grad-accum" in more else 1
    calls = itertools.count()

    def sometimes(self, scores, targets):
        loss = (-targets * scores.log_softmax(1)).sum(1).mean()
        return loss * {0: math.nan, 2 * parts: math.inf}.get(next(calls), 1)

    monkeypatch.setattr(SoftTargetCrossEntropy, "forward", sometimes)
    torch.manual_seed(0)
    run = quick(tmp_path / "run", arguments, *more)
    states = [load_checkpoint(run / f"update-{number:07d}.pt") for number in (1, 2, 3, 4)]
    assert states[0]["optimizer"]["state"] == {}
    for key in "state_dict", "optimizer":
        groups = [state[key] if key == "state_dict" else state[key]["state"] for state in states]
        same(groups[1], groups[2])
        with pytest.raises(AssertionError):
            same(groups[2], groups[3])
    steps = [float(entry["step"]) for entry in states[3]["optimizer"]["state"].values() if "step" in entry]
    assert all(step == 2 for step in steps)
    curves = scalars(run)
    assert list(curves["train/skipped"].values()) == [1, 1, 2, 2]
    assert all(math.isfinite(value) for value in states[3]["state_dict"]["head.weight"].flatten())


def test_too_many_updates_that_are_not_finite_stop_the_run_with_evidence(tmp_path, arguments, monkeypatch, capsys):
    real, calls = SoftTargetCrossEntropy.forward, itertools.count()
    monkeypatch.setattr(
        SoftTargetCrossEntropy,
        "forward",
        lambda self, *given: real(self, *given) * (1 if next(calls) == 0 else math.nan),
    )
    fails_with_one_line(
        lambda words: quick(words[0], arguments, "--max-bad-steps", "2"),
        [tmp_path / "run"],
        capsys,
        "2 updates in a row, 2 to 3",
        "loss nan",
        "--clip-grad",
        "bad_steps.json",
    )
    evidence = json.loads((tmp_path / "run" / "bad_steps.json").read_text())
    assert [(bad["update"], bad["epoch"], bad["update_of_epoch"]) for bad in evidence["updates"]] == [
        (2, 0, 1),
        (3, 0, 2),
    ]
    assert math.isnan(evidence["updates"][0]["losses"][0])
    good = load_checkpoint(tmp_path / "run" / "last.pt")
    assert all(value.isfinite().all() for value in good["state_dict"].values())


@pytest.mark.parametrize("workers, repeats, parts", [(0, 1, 1), (2, 3, 2)])
def test_the_evidence_names_the_samples_of_every_process(tmp_path, workers, repeats, parts):
    """Each sample is of a class of its own. One cannot be read, and each process may skip it."""
    for shard in range(2):
        files = dict(members(range(32 * shard, 32 * shard + 32), label=lambda number: number))
        write_tar(tmp_path / f"train-{shard}.tar", (files | {"s0007.jpg": b"text"} if shard == 0 else files).items())
    write_tar(tmp_path / "val-0.tar", members(range(4)))
    run = Run(tmp_path / "run", [*QUICK, "--data", str(tmp_path), "--train-samples", "64", "--val-samples", "4",
                                 "--num-classes", "64", "--batch-size", "4", "--grad-accum", str(parts), "--epochs",
                                 "9", "--repeats", str(repeats), "--workers", str(workers), "--max-bad-samples", "1",
                                 "--max-bad-steps", "1"], mark=tmp_path)  # fmt: skip
    assert run.wait() == [1, 1] and "1 updates in a row" in run.text, run.text
    evidence = json.loads((tmp_path / "run" / "bad_steps.json").read_text())
    (bad,) = evidence["updates"]
    found = []
    for rank in range(2):
        batches = [json.loads(line) for line in (tmp_path / f"classes-{rank}").read_text().splitlines()]
        first = (bad["update"] - 1) * parts
        found.append(sum(batches[first : first + parts], []))
    assert bad["samples"] == [
        [f"shard {tmp_path}/train-{number // 32}.tar, sample s{number:04d}" for number in numbers] for numbers in found
    ]
    assert 50 in found[0] + found[1]


@pytest.mark.parametrize("resumed", [False, True])
def test_evidence_without_samples_says_why(tmp_path, arguments, monkeypatch, capsys, resumed):
    """The shards may be gone; an update from before a run was resumed has none."""
    folder = shutil.copytree(arguments[arguments.index("--data") + 1], tmp_path / "data")
    arguments = [*arguments, "--data", str(folder)]

    def spoil(self, *given):
        if not resumed:
            shutil.rmtree(folder, ignore_errors=True)
        return given[0].sum() * math.nan

    monkeypatch.setattr(SoftTargetCrossEntropy, "forward", spoil)
    fails_with_one_line(
        lambda words: quick(words[0], arguments, "--max-bad-steps", "2"),
        [tmp_path / "run"],
        capsys,
        "2 updates in a row, 1 to 2",
        "bad_steps.json",
    )
    evidence = json.loads((tmp_path / "run" / "bad_steps.json").read_text())
    if not resumed:
        assert [len(bad["samples"][0]) for bad in evidence["updates"]] == [32, 32]
        return
    assert [len(bad["samples"][0]) for bad in evidence["updates"]] == [32, 32]
    fails_with_one_line(train_imagenet.main, ["--resume", tmp_path / "run", "--max-bad-steps", "2"], capsys, "1 to 2")
    evidence = json.loads((tmp_path / "run" / "bad_steps.json").read_text())
    first, second = evidence["updates"]
    assert first["before_resuming"] and first["samples"] == [None]
    assert "before_resuming" not in second and len(second["samples"][0]) == 32


def test_the_last_checkpoints_and_the_best_are_kept(tmp_path):
    for count in 1, 2, 3, 4:
        runs.Run(tmp_path).save({"updates": count, "state_dict": {"a": torch.zeros(1)}}, keep=2, is_best=count == 1)
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt", "update-0000003.pt", "update-0000004.pt"]
    assert [load_checkpoint(tmp_path / name)["updates"] for name in ("best.pt", "last.pt")] == [1, 4]
    for count in 5, 6:
        for file in tmp_path.glob("*.pt"):
            os.utime(file, (2e9, 2e9))  # then the clock went back
        runs.Run(tmp_path).save({"updates": count, "state_dict": {"a": torch.zeros(1)}}, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt", "update-0000005.pt", "update-0000006.pt"]


def updates_in(folder):
    return list(runs.Run(folder).checkpoints())


def save_updates(folder, count, best):
    """Saves what a run does, each update; its number stands for the weights."""
    for number in range(1, count + 1):
        state = {"updates": number, "state_dict": {"a": torch.tensor([number])}}
        runs.Run(folder).save(state, keep=99, is_best=number == best)
    (folder / "metrics.json").write_text("[]")


@pytest.mark.parametrize("start", ["update-0000003.pt", "best.pt"])
@pytest.mark.parametrize("links", [True, False])
def test_a_run_that_goes_back_sets_aside_all_but_its_checkpoint(tmp_path, monkeypatch, links, start):
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: os.stat(tmp_path / "nowhere"))
    save_updates(tmp_path, 6, best=3)
    aside = set_aside(runs.Run(tmp_path), tmp_path / start)
    assert aside == tmp_path / "before-1"
    names = {name: [path.name for path in sorted(folder.glob("*.pt"))] for name, folder in
             {"left": tmp_path, "aside": aside}.items()}  # fmt: skip
    assert names["left"] == ["best.pt", "last.pt"] if start == "best.pt" else ["last.pt", start]
    assert names["aside"] == sorted({"best.pt", "last.pt", *(f"update-000000{n}.pt" for n in range(1, 7))} - {start})
    assert load_checkpoint(tmp_path / "last.pt")["updates"] == 3 and load_checkpoint(aside / "last.pt")["updates"] == 6
    assert (aside / "metrics.json").exists() and not (tmp_path / "metrics.json").exists()
    assert set_aside(runs.Run(tmp_path), tmp_path / "last.pt") is None


@pytest.mark.parametrize("links", [True, False])
def test_the_last_checkpoint_by_either_name_is_no_way_back(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: os.stat(tmp_path / "nowhere"))
    save_updates(tmp_path, 2, best=1)
    for name in "last.pt", "update-0000002.pt":
        assert set_aside(runs.Run(tmp_path), tmp_path / name) is None
    assert updates_in(tmp_path) == [1, 2] and load_checkpoint(tmp_path / "best.pt")["updates"] == 1


def test_a_run_resumed_from_an_earlier_checkpoint_makes_the_same_way_again(tmp_path, arguments, capsys):
    run = quick(tmp_path / "run", arguments, "--epochs", "2", "--keep-checkpoints", "6")  # 3 to 8
    train_imagenet.main(["--resume", str(run / "update-0000005.pt")])
    assert f"what else this run has written is in {run / 'before-1'} now" in capsys.readouterr().out
    old, new = load_checkpoint(run / "before-1" / "last.pt"), load_checkpoint(run / "last.pt")
    assert all(torch.equal(value, old["state_dict"][key]) for key, value in new["state_dict"].items())
    assert updates_in(run) == [5, 6, 7, 8] and updates_in(run / "before-1") == [3, 4, 6, 7, 8]
    assert [entry["epoch"] for entry in json.loads((run / "metrics.json").read_text())] == [1, 2]
    assert new["history"][-1]["val_ema"] == old["history"][-1]["val_ema"]
    assert (
        new["best_metric"] == new["history"][-1]["val_ema"]["top1"] and load_checkpoint(run / "best.pt")["epoch"] == 2
    )


def test_the_summary_is_a_table_also_where_epochs_were_not_evaluated(tmp_path):
    history = [{"epoch": 1, "lr": 0.5}, {"epoch": 2, "lr": 0.1, "val": {"top1": 9.5}}]
    runs.Run(tmp_path).write_history(history)
    assert json.loads((tmp_path / "metrics.json").read_text()) == history
    assert (tmp_path / "summary.csv").read_text() == "epoch,lr,val_top1\n1,0.5,\n2,0.1,9.5\n"


def test_gradients_sent_in_bfloat16_are_nearly_those_sent_whole(tmp_path, arguments, undisturbed):
    run = Run(tmp_path / "run", [*arguments, "--workers", "0", "--compress-gradients", "--epochs", "1"])
    assert run.wait() == [0, 0], run.text
    norms = [scalars(folder)["train/grad_norm"][2] for folder in (undisturbed(2, 0), tmp_path / "run")]
    assert norms[0] != norms[1] and norms[1] == pytest.approx(norms[0], rel=2e-2)


def test_an_accumulation_that_accelerate_is_told_of_changes_nothing(tmp_path, arguments, undisturbed):
    """It would leave out the sum over the processes in three of four updates, and their weights would part."""
    asked = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    run = Run(tmp_path / "run", [*arguments, "--workers", "0"], environment=asked)
    assert run.wait() == [0, 0], run.text
    same_run(undisturbed(2, 0), tmp_path / "run")


def test_without_hard_links_checkpoints_are_copied(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    runs.Run(tmp_path).save({"updates": 1, "state_dict": {"a": torch.zeros(1)}}, keep=1, is_best=True)
    assert load_checkpoint(tmp_path / "best.pt") == load_checkpoint(tmp_path / "last.pt")


def test_what_a_killed_process_of_the_same_number_left_harms_no_checkpoint(tmp_path):
    """It was killed between giving a checkpoint its second name and moving that into place: both are one file."""
    states = [{"updates": updates, "state_dict": {"a": torch.zeros(1)}} for updates in (1, 2)]
    runs.Run(tmp_path).save(states[0], keep=2)
    os.link(tmp_path / "update-0000001.pt", tmp_path / f"last.pt.{os.getpid()}.tmp")
    runs.Run(tmp_path).save(states[1], keep=2)
    assert [load_checkpoint(tmp_path / f"{name}.pt")["updates"] for name in ("update-0000001", "last")] == [1, 2]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_full_disk_costs_no_earlier_checkpoint(tmp_path, arguments, monkeypatch, capsys):
    real, calls = os.fsync, itertools.count(1)

    def full(handle):
        if next(calls) > 8:  # a checkpoint is four: the file, and its name in the folder, by two names
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        fails_with_one_line(
            lambda words: quick(words[0], arguments),
            [tmp_path / "run"],
            capsys,
            "No space left",
            "update-0000003.pt",
            "--resume",
        )
    assert load_checkpoint(tmp_path / "run" / "last.pt")["updates"] == 2
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_a_write_cut_short_costs_no_earlier_checkpoint_and_ends_all_processes(tmp_path, arguments):
    run = Run(tmp_path / "run", [*arguments, "--checkpoint-interval", "1"], rank=0, at=3, kind="limit files")
    assert run.wait() == [1, 1], run.text
    assert "File too large" in run.text and "--resume" in run.text
    assert load_checkpoint(tmp_path / "run" / "last.pt")["updates"] == 2
    assert not list((tmp_path / "run").glob("*.tmp"))


class Opener:
    def __reduce__(self):
        return open, ("ran", "w")


def test_code_in_a_checkpoint_is_not_run_by_resuming(tmp_path, arguments, monkeypatch, capsys):
    run = quick(tmp_path / "run", arguments)
    monkeypatch.chdir(tmp_path)
    (run / "last.pt").write_bytes(pickle.dumps(Opener()))
    torch.save({"state_dict": Opener()}, run / "other.pt")
    (tmp_path / "ran").unlink(missing_ok=True)
    for path in run, run / "other.pt":
        fails_with_one_line(train_imagenet.main, ["--resume", path, "--epochs", "2"], capsys, "no checkpoint")
    assert not (tmp_path / "ran").exists()


def test_a_run_on_commands_asks_for_leave_each_time(tmp_path, arguments, capsys):
    folder = arguments[arguments.index("--data") + 1]
    words = [
        *arguments,
        "--val-data",
        f"pipe:echo >> {tmp_path}/ran; cat {folder}/val-{{0..1}}.tar",
        "--data",
        f"pipe:echo >> {tmp_path}/ran; cat {folder}/train-{{0..1}}.tar",
    ]
    fails_with_one_line(lambda words: quick(tmp_path / "run", words), words, capsys, "--allow-pipe", "train-{0..1}.tar")
    run = quick(tmp_path / "run", words, "--allow-pipe")
    with open(run / "config.yaml", "a") as file:
        file.write("allow_pipe: true\n")  # by a stranger, say
    (tmp_path / "ran").unlink()
    fails_with_one_line(train_imagenet.main, ["--resume", run, "--epochs", "2"], capsys, "--allow-pipe", "resume")
    fails_with_one_line(eval_script.main, ["--checkpoint", run], capsys, "--allow-pipe", "checkpoint")
    assert not (tmp_path / "ran").exists()
    train_imagenet.main(["--resume", str(run), "--epochs", "2", "--allow-pipe"])
    assert eval_script.main(["--checkpoint", str(run), "--workers", "0", "--allow-pipe"])["count"] == 37
    assert (tmp_path / "ran").exists()


def test_a_bare_resume_starts_a_run_or_goes_on_with_it_and_needs_its_folder(tmp_path, arguments, capsys):
    fails_with_one_line(train_imagenet.main, [*arguments, "--resume"], capsys, "--run-dir", "--resume RUN")
    fails_with_one_line(train_imagenet.main, ["--resume", tmp_path / "nowhere.pt"], capsys, "nowhere.pt", "last.pt")
    quick(tmp_path / "run", arguments, "--resume")
    (tmp_path / "run" / "last.pt").unlink()  # killed before the first checkpoint
    quick(tmp_path / "run", arguments, "--resume")
    said = capsys.readouterr().out
    assert said.count("no checkpoint yet") == 1 and "Going on" not in said
    quick(tmp_path / "run", arguments, "--resume", "--epochs", "2")
    assert "Going on with" in capsys.readouterr().out
    elsewhere = ["--resume", tmp_path / "run", "--epochs", "3", "--data", "photos"]
    fails_with_one_line(
        train_imagenet.main, elsewhere, capsys, "'photos'", "the folder that it was started in", "--data"
    )


def test_a_resumed_run_takes_new_settings_but_no_other_optimiser(tmp_path, arguments, capsys):
    run = quick(tmp_path / "run", arguments)
    for words in ["--opt", "lamb"], ["--weight-decay", "0"]:
        fails_with_one_line(train_imagenet.main, ["--resume", run, "--epochs", "2", *words], capsys, words[1])
    train_imagenet.main(["--resume", str(run), "--epochs", "2", "--weight-decay", "0.7"])
    assert "weight_decay 0.1 -> 0.7" in capsys.readouterr().out
    groups = load_checkpoint(run / "last.pt")["optimizer"]["param_groups"]
    assert sorted(group["weight_decay"] for group in groups) == [0, 0.7]


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon", "nadamw", "lookahead_adamw"])
def test_an_optimiser_goes_on_where_it_stopped_wherever_it_counts_its_steps(name, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 5)
    inputs = torch.randn(13, 8, 4)

    def step(optimizer, x):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    first = create_optimizer_v2(model, name, lr=0.1, weight_decay=0.1)
    for x in inputs[:8]:
        step(first, x)
    torch.save({"model": model.state_dict(), "optimizer": first.state_dict()}, tmp_path / "saved.pt")
    for x in inputs[8:]:
        step(first, x)
    wanted = model.weight.detach().clone()
    saved = torch.load(tmp_path / "saved.pt")
    model.load_state_dict(saved["model"])
    second = create_optimizer_v2(model, name, lr=0.1, weight_decay=0.1)
    settings = SimpleNamespace(opt=name, resume="saved.pt", weight_decay=0.1, layer_decay=None)
    load_optimizer(settings, second, {"optimizer": saved["optimizer"], "config": {"opt": name}})
    for x in inputs[8:]:
        step(second, x)
    assert torch.equal(model.weight, wanted)


def test_an_optimiser_draws_the_numbers_that_it_would_have_drawn():
    model, settings = (
        torch.nn.Linear(4, 5),
        SimpleNamespace(opt="kron", resume="saved.pt", weight_decay=0.1, layer_decay=None),
    )
    first, second = (create_optimizer_v2(model, "kron", lr=0.1, weight_decay=0.1) for _ in range(2))
    model(torch.randn(8, 4)).square().sum().backward()
    first.step()
    saved = copy.deepcopy(first.state_dict())
    load_optimizer(settings, second, {"optimizer": saved, "config": {"opt": "kron"}})
    assert second.state_dict()["rng_state"] == first.state_dict()["rng_state"]


def test_the_best_epoch_is_known_after_a_stop():
    def new():
        made = object.__new__(trainer.Trainer)
        made.cfg, made.ema, made.model = Config(opt="sgd", resume="last.pt"), None, torch.nn.Linear(2, 2)
        made.optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
        made.accelerator = SimpleNamespace(scaler=None, is_main_process=True)
        made.monitor = SimpleNamespace(state={}, load=lambda state: None)
        made.num_classes, made.names, made.folder = 2, {}, SimpleNamespace(step_shift=0)
        made.facts = lambda: {"updates_per_epoch": 4}
        made.updates_per_epoch, made.epoch, made.updates = 4, 0, 0
        made.best, made.history, made.started = -1.0, [], "now"
        return made

    def ends(state, *top1):
        return state.end_epoch({}, {"val": {"top1": top1[0]}} if top1 else {})

    state = new()
    assert ends(state, 50.0) and not ends(state, 50.0) and not ends(state)  # as good is no better
    other = new()
    other.load_state_dict(state.state_dict())
    assert (other.epoch, other.best, len(other.history)) == (3, 50.0, 3)
    assert not ends(other, 49.0) and ends(other, 51.0)


def test_a_loader_outlives_a_schedulers_signals_but_not_its_parent(arguments):
    """Workers of training and evaluation; one that a signal kills would stop the run before it has saved. If torch has
    several threads, a worker has some, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(1 << 20).exp()  # they exist from now on
    shards = open_shards(arguments[arguments.index("--data") + 1], "train", 150, 10)
    loader = train_loader(shards, torchvision.transforms.ToTensor(), batch_size=8, num_workers=2)
    batches = iter(loader)
    next(batches)
    workers = [child for child in psutil.Process().children() if child.name() == "pt_data_worker"]
    for worker in workers:
        for number in signal.SIGUSR1, signal.SIGTERM:
            subprocess.run(["kill", f"-{int(number)}", str(worker.pid)], check=True)  # another process sends it
    assert len(list(batches)) == len(loader) - 1 and len(workers) == 2
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    gone, alive = psutil.wait_procs(workers, 20)
    torch.set_num_threads(before)
    assert not alive


@pytest.mark.gpu
@pytest.mark.parametrize("opt", ["adamw", "muon"])
def test_a_step_on_a_gpu_is_skipped_without_waiting_for_it(opt):
    model = torch.nn.Linear(5, 6, device="cuda")
    optimizer = build_optimizer(Config(opt=opt), model, 0.1)
    step = TrainStep(SimpleNamespace(scaler=None, num_processes=1), model, None, None, optimizer)

    def apply(value):
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, value)
        step.apply(model.weight.grad.norm())

    apply(1.0)
    before = copy.deepcopy([*model.parameters(), *optimizer.state.values()])
    torch.cuda.set_sync_debug_mode("error")
    try:
        apply(math.nan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    same(before, [*model.parameters(), *optimizer.state.values()])


def test_where_no_bar_shows_it_a_line_now_and_then_says_how_far_a_run_is(monkeypatch):
    monkeypatch.setattr(updates, "QUIET", -1)
    lines = []
    monitor = UpdateMonitor(
        SimpleNamespace(cfg=Config(log_interval=1, max_bad_steps=2), accelerator=make_accelerator("cpu"), writer=None),
        SimpleNamespace(received=0),
        images=4,
        updates_per_epoch=3,
        say=lines.append,
    )
    for number in range(1, 5):
        monitor.update(number, torch.tensor(2.0), torch.tensor(1.0), 0.1)
    monitor.read_all()
    assert [line.partition("  loss 2.0000  ")[0] for line in lines] == [
        "update 1 of 3, epoch 1",
        "update 2 of 3, epoch 1",
        "update 1 of 3, epoch 2",
    ]
