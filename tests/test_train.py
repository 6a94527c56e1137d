"""Training runs, short ones: one process and two, what they leave on disk, going on after a stop, and mistakes."""

import importlib
import io
import json
import os
import runpy
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import tracking
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from PIL import Image
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import train_imagenet  # noqa: E402
from vision_longhorn import devices, runs  # noqa: E402
from vision_longhorn.checkpoint import load_checkpoint  # noqa: E402
from vision_longhorn.command_line.commands import COMMANDS  # noqa: E402
from vision_longhorn.command_line.parser import run_cli  # noqa: E402
from vision_longhorn.errors import UserError  # noqa: E402
from vision_longhorn.models.create import create_model  # noqa: E402
from vision_longhorn.shards import index_shards  # noqa: E402
from vision_longhorn.training import setup, trainer  # noqa: E402

SMALL = ["--model", "vlonghorn_test", "--model-kwargs", "depth=1", "embed_dim=32", "img_size=8", "patch_size=4"]
QUICK = [*SMALL, "--num-classes", "10", "--workers", "0", "--device", "cpu", "--batch-size", "16", "--repeats", "1",
         "--lr-base-batch", "none", "--log-interval", "1", "--warmup-epochs", "0"]  # fmt: skip
PLAIN = ["--mixup", "0", "--cutmix", "0", "--auto-augment", "none", "--re-prob", "0", "--ema-decay", "0"]


@pytest.fixture(autouse=True)
def fresh_process_state():
    """Accelerate keeps its state for the life of the process; every run here is to be the first."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    """Drawing its curves would be two thirds of a small run's time. Runs that are started as processes draw theirs."""
    monkeypatch.setattr(trainer, "plot_runs", lambda *_: None)


def write_digits(folder, split, count, shards=2):
    """Shards `split`-N.tar without an index, `count` handwritten digits in all."""
    digits = load_digits()
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        with tarfile.open(folder / f"{split}-{shard}.tar", "w") as tar:
            for i in range(shard, count, shards):
                png = io.BytesIO()
                Image.fromarray((digits.images[i] * 15).astype("uint8")).save(png, "PNG")
                for extension, data in ("png", png.getvalue()), ("cls", b"%d" % digits.target[i]):
                    member = tarfile.TarInfo(f"{i:04d}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return folder


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """Arguments for 70 training and 37 evaluation samples."""
    folder = tmp_path_factory.mktemp("shards")
    write_digits(folder, "train", 70)
    write_digits(folder, "val", 37)
    return ["--data", str(folder), "--train-samples", "70", "--val-samples", "37"]


def scalars(run):
    """Dict of tag to {step: value} of a run's TensorBoard events."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def fails_with_one_line(main, arguments, capsys, *words):
    """Runs a command line that has to end with exit code 1 and one line on stderr which holds `words`."""
    with pytest.raises(SystemExit) as exit:
        run_cli(lambda: main([str(argument) for argument in arguments]))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert exit.value.code == 1 and len(lines) == 1
    assert all(word in lines[0] for word in words), lines[0]


def test_two_processes_train_the_demo_where_no_data_is_given(tmp_path):
    words = (
        "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
        "--dynamo_backend no -m vision_longhorn train --epochs 1 --model-kwargs depth=1 embed_dim=32 patch_size=8 "
        "--run-dir run"
    )
    done = subprocess.run(
        [sys.executable, *words.split()],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    text = done.stdout.decode()
    assert done.returncode == 0, text
    assert "handwritten digits" in text and "2 process(es)" in text
    assert text.count("count 360 of 360") == 2  # raw and averaged weights
    # Where no terminal shows it, every line stands alone.
    assert "\r" not in text and any(line.startswith("epoch   1  loss ") for line in text.splitlines()), text
    run = tmp_path / "run"
    promised = {"config.yaml", "env.json", "metrics.json", "summary.csv", "last.pt", "best.pt", "curves.png"}
    assert promised <= set(os.listdir(run))
    assert not list(run.glob("*.tmp"))
    environment = json.loads((run / "env.json").read_text())
    assert environment["processes"] == 2 and environment["global_batch"] == 64
    assert environment["versions"]["torch"] == torch.__version__.split("+")[0]
    assert "commit" in environment
    curves = scalars(run)
    promised = {
        "train/loss",
        "train/lr",
        "train/images_per_s",
        "train/grad_norm",
        "train/data_wait",
        "train/skipped",
        "train/host_gib",
        "val/loss",
        "val_ema/loss",
    }
    accuracies = ["accuracy/top1", "accuracy/top1_ema", "accuracy/top5", "accuracy/top5_ema"]
    assert promised <= curves.keys()
    # TensorBoard shows groups by the alphabet: accuracies first, and last what has one point even in a longer run.
    assert sorted(curves)[:4] == accuracies and sorted(curves)[-1] == "when_finished/best_top1"
    assert all(0 <= share <= 1 for share in curves["train/data_wait"].values())
    assert all(0.05 < memory < 50 for memory in curves["train/host_gib"].values())
    assert max(scalars(run)["train/loss"]) == 1437 // 64  # an epoch is the split's samples, over both processes


def test_every_augmentation_and_the_schedule(tmp_path, shards):
    train_imagenet.main([
        *QUICK, *shards, "--run-dir", str(tmp_path / "run"), "--epochs", "3", "--warmup-epochs", "1", "--lr", "1e-3",
        "--mixup", "0.8", "--cutmix", "1", "--repeats", "2", "--re-prob", "0.5", "--auto-augment", "rand-m10-inc1",
        "--clip-grad", "1", "--ema-decay", "0.9", "--drop-path", "0.1",
    ])  # fmt: skip
    curves = scalars(tmp_path / "run")
    lr = curves["train/lr"]
    assert sorted(lr) == list(range(1, 3 * 4 + 1))  # 70 // 16 updates per epoch
    assert lr[1] == pytest.approx(1e-6) and max(lr, key=lr.get) == 5 and lr[12] < 0.1 * lr[5]
    assert lr[5] == pytest.approx(1e-3), "the peak that the run prints is reached when the warm-up ends"
    assert sorted(curves["accuracy/top1"]) == [4, 8, 12] == sorted(curves["accuracy/top1_ema"])
    assert [entry["val"]["count"] for entry in json.loads((tmp_path / "run/metrics.json").read_text())] == [37] * 3


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path, shards):
    runs = {}
    for batch, passes in (32, 1), (16, 2):
        folder = tmp_path / f"{batch}"
        # Crops of the whole image and no flips: both runs see the same pixels.
        train_imagenet.main([*QUICK, *PLAIN, *shards, "--run-dir", str(folder), "--epochs", "1",
                             "--batch-size", str(batch), "--grad-accum", str(passes), "--hflip", "0",
                             "--scale", "1", "1", "--ratio", "1", "1", "--color-jitter", "none"])  # fmt: skip
        runs[batch] = scalars(folder)
    assert sorted(runs[16]["train/loss"]) == [1, 2]
    for tag in "train/loss", "train/grad_norm":
        assert runs[16][tag][1] == pytest.approx(runs[32][tag][1], rel=1e-4)


def test_a_stopped_run_goes_on_as_if_it_had_never_stopped(tmp_path, shards, monkeypatch):
    arguments = [*QUICK, *shards, "--epochs", "3", "--mixup", "0.8", "--ema-decay", "0.9", "--drop-path", "0.2"]
    whole = train_imagenet.main([*arguments, "--run-dir", str(tmp_path / "whole")])

    write, stopped = runs.Run.write_history, tmp_path / "stopped"

    def stop_after_second_epoch(run, history):
        if len(history) == 2:
            raise KeyboardInterrupt
        write(run, history)

    with monkeypatch.context() as patch:
        patch.setattr(runs.Run, "write_history", stop_after_second_epoch)
        with pytest.raises(KeyboardInterrupt):
            train_imagenet.main([*arguments, "--run-dir", str(stopped)])
    train_imagenet.main(["--resume", str(stopped)])

    ends = [torch.load(run / "last.pt", weights_only=True) for run in (whole, stopped)]
    assert ends[0]["epoch"] == ends[1]["epoch"] == 3
    for key in "state_dict", "state_dict_ema":
        for name, value in ends[0][key].items():
            torch.testing.assert_close(ends[1][key][name], value, rtol=0, atol=0, msg=f"{key} {name}")
    assert [entry["epoch"] for entry in ends[1]["history"]] == [1, 2, 3]
    losses = scalars(whole)["train/loss"]
    assert scalars(stopped)["train/loss"] == losses
    for number, entry in enumerate(ends[1]["history"]):  # 4 updates an epoch, each with an entry
        mean = sum(losses[4 * number + update] for update in (1, 2, 3, 4)) / 4
        assert entry["train_loss"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--model", "vlonghorn_tinny"], ["vlonghorn_tinny", "vlonghorn_tiny"]),
        (["--model-kwargs", "img_size=2"], ["img_size=2"]),
        (["--model-kwargs", "dept=3"], ["dept"]),
        (["--epocs", "3"], ["--epocs", "--epochs"]),
        (["--device", "cuda"], ["device is 'cuda'", "give auto or cpu"]),
        (["--precision", "fp16"], ["fp16", "GPU"]),
        (["--model-kwargs", "in_chans=1"], ["in_chans is 1", "3 channels"]),
        (["--num-classes", "3"], ["label", "3", "sample"]),
        (["--val-samples", "36"], ["37", "36"]),
        (["--batch-size", "128"], ["70 samples", "batch of 128", "batch_size to 70"]),
        (["--grad-accum", "8"], ["8", "grad_accum"]),
        (["--lr", "1e30"], ["loss", "lr"]),
        (["--opt", "adamq"], ["adamq"]),
        (["--model", "hf-hub:a/b"], ["model is hf-hub:a/b", "--init"]),
        (["--auto-augment", "foo"], ["auto_augment is 'foo'"]),
        (["--interpolation", "bicubi"], ["bicubi", "bicubic"]),
        (["--data", "nowhere/train-{0..3}.tar"], ["nowhere/train-0.tar"]),
        (["--data", "none"], ["--data DIR"]),
    ],
)
def test_mistakes_end_with_one_line(tmp_path, shards, monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fails_with_one_line(
        train_imagenet.main,
        [*QUICK, *PLAIN, *shards, "--run-dir", tmp_path / "run", "--epochs", "2", *arguments],
        capsys,
        *words,
    )


def test_a_pattern_of_training_shards_is_not_evaluated_on(tmp_path, shards, capsys):
    """A pattern names files, whatever the split: without --val-data the accuracy would be that of the training data."""
    pattern = str(Path(shards[shards.index("--data") + 1], "train-*.tar*"))
    arguments = [*QUICK, *PLAIN, *shards, "--run-dir", tmp_path / "run", "--data", pattern]
    fails_with_one_line(train_imagenet.main, arguments, capsys, "train-*", "--val-data")


def test_a_finished_run_is_neither_overwritten_nor_resumed_as_another_model(tmp_path, shards, capsys):
    run = train_imagenet.main([*QUICK, *PLAIN, *shards, "--run-dir", str(tmp_path / "run"), "--epochs", "1"])
    before = (run / "last.pt").read_bytes()
    fails_with_one_line(train_imagenet.main, [*QUICK, *shards, "--run-dir", run], capsys, str(run), "--resume")
    fails_with_one_line(train_imagenet.main, ["--resume", run], capsys, str(run), "--epochs")
    fails_with_one_line(train_imagenet.main, ["--resume", run, "--run-dir", "elsewhere"], capsys, "elsewhere")
    fails_with_one_line(
        train_imagenet.main,
        ["--resume", run, "--epochs", "2", "--model", "vim_test"],
        capsys,
        "another model",
        "vlonghorn_test",
    )
    assert (run / "last.pt").read_bytes() == before


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_a_mistake_in_one_line(command, capsys):
    main = importlib.import_module(f"vision_longhorn.{command}").main
    fails_with_one_line(main, ["--no-such-option"], capsys, "--help lists all")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_takes_an_empty_word(command, capsys):
    main = importlib.import_module(f"vision_longhorn.{command}").main
    for words in [""], ["--out", ""], ["--out="]:
        fails_with_one_line(main, words, capsys, "empty word", "leave it out")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_what_an_output_cannot_show_is_written_another_way(encoding, monkeypatch):
    """Names of files are printed by every command: one of a byte that is not UTF-8, one of Japan and one of France."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
    run_cli(lambda: print("b\udcffn", "日本", "é"))
    sys.stdout.flush()
    shown = {"ascii": rb"\u65e5\u672c \xe9", "cp1252": b"\\u65e5\\u672c \xe9", "utf-8": "日本 é".encode()}[encoding]
    assert written.getvalue() == (b"b\xffn " if encoding == "utf-8" else rb"b\udcffn ") + shown + b"\n"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.filterwarnings("ignore:'vision_longhorn:RuntimeWarning")  # the module is imported, too
def test_every_command_is_a_module_to_run(command, monkeypatch, capsys):
    """`python -m vision_longhorn.COMMAND`, and with it `accelerate launch -m`."""
    monkeypatch.setattr(sys, "argv", [command, "--no-such-option"])
    with pytest.raises(SystemExit) as exit:
        runpy.run_module(f"vision_longhorn.{command}", run_name="__main__")
    said = capsys.readouterr().err
    assert exit.value.code == 1 and said.count("\n") == 1 and "--help lists all" in said


def test_a_mistake_shows_no_traceback_in_a_shell(tmp_path):
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "train_imagenet.py"), "--lr", "fast", "--data", "x"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
    assert os.listdir(tmp_path) == []


def test_a_reader_that_has_enough_ends_a_command_without_a_word():
    """As `| head` does; here it is gone from the start."""
    reader, writer = os.pipe()
    os.close(reader)
    script = "OWN_COMMAND = True; from vision_longhorn.command_line.parser import run_cli; run_cli(lambda: print('a'))"
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, cwd=REPOSITORY, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_lines_in_a_file_come_in_time(tmp_path):
    script = "OWN_COMMAND = True; import sys; from vision_longhorn.command_line.parser import run_cli\n"
    script += "run_cli(lambda: print('a line') or sys.stdin.read())"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with open(tmp_path / "log", "w") as log:
        running = subprocess.Popen(
            [sys.executable, "-c", script], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=log, env=environment
        )
    end = time.monotonic() + 30
    while not (tmp_path / "log").read_text() and time.monotonic() < end:
        time.sleep(0.02)
    assert running.poll() is None and (tmp_path / "log").read_text() == "a line\n"
    running.communicate()
    assert running.returncode == 0


def test_what_a_run_says_of_itself_is_in_tensorboard_and_in_its_checkpoint(tmp_path):
    write_digits(tmp_path / "data", "train", 70)
    write_digits(tmp_path / "data", "val", 37)
    names = [f"digit {i}" for i in range(10)]
    index_shards(tmp_path / "data", names)
    run = train_imagenet.main(
        [*QUICK, *PLAIN, "--data", str(tmp_path / "data"), "--epochs", "1", "--run-dir", str(tmp_path / "run")]
    )
    events = EventAccumulator(str(run), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "model: vlonghorn_test" in text
    results = json.loads((run / "metrics.json").read_text())[-1]
    best = max(results[weights]["top1"] for weights in ("val", "val_ema") if weights in results)
    assert scalars(run)["when_finished/best_top1"] == {0: pytest.approx(best)}
    # By which TensorBoard compares runs. It lists names by the alphabet, and opens with five.
    plugin = events.PluginTagToContent("hparams")
    assert "_hparams_/experiment" not in plugin, "a list of one run's settings would stand for those of all runs"
    settings = parse_session_start_info_plugin_data(plugin["_hparams_/session_start_info"]).hparams
    opening = sorted(settings)[:4]
    assert opening == ["epochs", "lr", "model", "seed"] and settings["model"].string_value == "vlonghorn_test"
    assert settings["setting.batch_size"].number_value == 16 and "setting.model_kwargs.depth" in settings
    assert "setting.log_interval" in settings and "setting.min_lr" not in settings, "not the defaults"
    checkpoint = torch.load(run / "last.pt", weights_only=True)
    assert checkpoint["class_names"] == names


def test_curves_go_to_a_tracker_as_well(tmp_path, shards, monkeypatch, capsys):
    fails_with_one_line(train_imagenet.main, [*QUICK, *PLAIN, *shards, "--track", "wandb"], capsys, "wandb", "install")

    class Tracker(tracking.GeneralTracker):
        """Notes what accelerate gives to a tracker."""

        name, requires_logging_directory, main_process_only = "wandb", False, False
        said, closed = {}, 0

        def __init__(self, project, **options):
            super().__init__()
            self.said["options"] = options

        start = tracker = lambda self: None
        store_init_configuration = lambda self, values: self.said.update(config=values)  # noqa: E731
        log = lambda self, values, step, **_: self.said.setdefault(step, {}).update(values)  # noqa: E731

        def finish(self):
            Tracker.closed += 1

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", Tracker)
    for module in tracking, setup:
        monkeypatch.setattr(module, "get_available_trackers", lambda: [tracking.LoggerType.WANDB])
    run = train_imagenet.main(
        [*QUICK, *PLAIN, *shards, "--track", "wandb", "--epochs", "1", "--run-dir", str(tmp_path / "run")]
    )
    curves = scalars(run)
    assert Tracker.said["config"]["batch_size"] == 16 and Tracker.said["options"]["name"] == "run"
    assert Tracker.said[4]["accuracy/top1"] == pytest.approx(curves["accuracy/top1"][4])
    assert {
        step: values["train/loss"] for step, values in Tracker.said.items() if isinstance(step, int)
    } == pytest.approx(curves["train/loss"])
    assert Tracker.closed == 1


def test_averages_that_could_not_leave_their_start_warm_up(tmp_path, shards, capsys):
    """At the default decay, 8 updates would leave the averaged weights, and best.pt by them, where they started."""
    arguments = [*QUICK, *PLAIN, *shards, "--ema-decay", "0.99996", "--epochs", "2", "--lr", "1e-3"]
    run = train_imagenet.main([*arguments, "--run-dir", str(tmp_path / "auto")])
    assert "averages over 25,000 updates and this run has 8" in capsys.readouterr().out
    state = torch.load(run / "last.pt", weights_only=True)
    assert state["config"]["ema_warmup"] is True
    start = create_model("vlonghorn_test", num_classes=10, **state["config"]["model_kwargs"])
    set_seed(0)
    start.init_weights()

    def distance(weights):
        return sum((weights[name] - state["state_dict"][name]).norm() for name in ("head.weight", "norm.weight"))

    moved = distance(
        {name: value for name, value in torch.load(run / "best.pt", weights_only=True)["state_dict_ema"].items()}
    )
    stuck = train_imagenet.main([*arguments, "--ema-warmup", "false", "--run-dir", str(tmp_path / "stuck")])
    assert "averages over" not in capsys.readouterr().out
    assert moved < 0.5 * distance(torch.load(stuck / "last.pt", weights_only=True)["state_dict_ema"])


def test_a_mistake_found_late_leaves_no_folder_that_refuses_the_right_command(tmp_path, shards, capsys):
    run = tmp_path / "run"
    arguments = [*QUICK, *PLAIN, *shards, "--epochs", "1", "--run-dir", run]
    fails_with_one_line(train_imagenet.main, [*arguments, "--num-classes", "3"], capsys, "label")  # at the first batch
    assert not run.exists()
    fails_with_one_line(
        train_imagenet.main, [*arguments, "--lr", "1e30", "--max-bad-steps", "2"], capsys, "loss"
    )  # after some updates
    assert (run / "bad_steps.json").exists() and (run / "config.yaml").exists()
    train_imagenet.main([*map(str, arguments)])
    assert (run / "best.pt").exists() and not (run / "bad_steps.json").exists()
    assert {"bad_steps.json", "config.yaml"} <= set(os.listdir(run / "before-1")), "nothing is lost"
    assert sorted(scalars(run)["train/loss"]) == [1, 2, 3, 4]


def test_evaluation_data_with_other_classes_is_refused(tmp_path, capsys):
    for part, names in ("a", "0123456789"), ("b", "0123456798"), ("c", "abcdefghij"):
        write_digits(tmp_path / part, "train", 40)
        write_digits(tmp_path / part, "val", 20)
        index_shards(tmp_path / part, list(names))
    for part, words in ("b", ["class '9' has index 8", "but 9"]), ("c", ["class 0", "'0'", "'a'"]):
        fails_with_one_line(
            train_imagenet.main,
            [*QUICK, *PLAIN, "--data", tmp_path / "a", "--val-data", tmp_path / part, "--run-dir", tmp_path / "run"],
            capsys,
            *words,
        )


def test_more_classes_in_a_folder_than_in_the_model_are_found_before_it_is_built(tmp_path, monkeypatch, capsys):
    for path in (tmp_path / split / name / "0.png" for split in ("train", "val") for name in "abc"):
        path.parent.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(path)
    monkeypatch.delattr(setup, "build_model")
    arguments = [*QUICK, *PLAIN, "--data", tmp_path, "--run-dir", tmp_path / "run", "--num-classes", "2"]
    fails_with_one_line(train_imagenet.main, arguments, capsys, "num_classes=2", "has 3 classes", "3 or more")


def test_a_rate_that_would_rise_to_its_end_is_refused_before_the_data_are_opened(tmp_path, capsys):
    fails_with_one_line(
        train_imagenet.main,
        [*QUICK, *PLAIN, "--data", tmp_path / "none", "--run-dir", tmp_path / "run"]
        + ["--lr-base-batch", "16384", "--lr", "1e-3"],
        capsys,
        "min_lr",
        "9.77e-07",
        "batch of 16384",
    )


def test_a_scaled_loss_gives_the_same_weights_and_its_scale_is_kept(tmp_path, shards, monkeypatch):
    """What fp16 on a GPU needs, here in fp32, where a power of two changes nothing."""
    arguments = [*QUICK, *PLAIN, *shards, "--clip-grad", "0.5"]
    plain = train_imagenet.main([*arguments, "--epochs", "2", "--run-dir", str(tmp_path / "plain")])
    make = setup.make_accelerator

    def scaled(*words, **options):
        accelerator = make(*words, **options)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=setup.SCALE, growth_interval=3)
        return accelerator

    monkeypatch.setattr(setup, "make_accelerator", scaled)
    run = train_imagenet.main([*arguments, "--epochs", "1", "--run-dir", str(tmp_path / "scaled"), "--min-lr", "1e-3"])
    assert torch.load(run / "last.pt", weights_only=True)["scaler"]["scale"] == 2 * setup.SCALE  # after 4 updates
    AcceleratorState._reset_state(reset_partial_state=True)
    run = train_imagenet.main([*arguments, "--epochs", "2", "--run-dir", str(tmp_path / "whole")])
    ends = [torch.load(folder / "last.pt", weights_only=True) for folder in (plain, run)]
    for name, value in ends[0]["state_dict"].items():
        torch.testing.assert_close(ends[1]["state_dict"][name], value, rtol=1e-5, atol=1e-7)
    assert ends[1]["scaler"]["scale"] == 4 * setup.SCALE  # after 8
    AcceleratorState._reset_state(reset_partial_state=True)
    train_imagenet.main(["--resume", str(tmp_path / "scaled"), "--epochs", "2"])
    assert torch.load(tmp_path / "scaled" / "last.pt", weights_only=True)["scaler"] == ends[1]["scaler"]


@pytest.mark.parametrize(
    "hardware, precision, expected",
    [(True, "auto", "bf16"), (False, "auto", "fp16"), (False, "bf16", "bf16"), (False, "fp32", "no")],
)
def test_a_gpu_without_bf16_gets_fp16_and_says_so(monkeypatch, capsys, hardware, precision, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: hardware)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(
        devices, "Accelerator", lambda **options: SimpleNamespace(print=print, device=torch.device("cuda"), **options)
    )
    assert devices.make_accelerator("auto", precision).mixed_precision == expected
    assert ("Tesla T4 has no bf16" in capsys.readouterr().out) == (expected == "fp16")


@pytest.mark.parametrize(
    "words, said",
    [
        (["ACCELERATE_USE_FSDP", "true"], ["--use_fsdp", "setting fsdp"]),
        (["ACCELERATE_USE_DEEPSPEED", "true"], ["--use_deepspeed"]),
        (["ACCELERATE_USE_MEGATRON_LM", "true"], ["--use_megatron_lm"]),
        (["ACCELERATE_USE_PARALLELISM_CONFIG", "true"], ["--use_parallelism_config"]),
        (["ACCELERATE_USE_CPU", "maybe"], ["maybe"]),
        (["LOCAL_RANK", "first"], ["first"]),
    ],
)
def test_what_accelerate_cannot_be_asked_for_here_is_refused(monkeypatch, words, said):
    monkeypatch.setenv(*words)
    with pytest.raises(UserError) as caught:
        devices.make_accelerator("cpu")
    assert all(word in str(caught.value) for word in said) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "variable, value, grad_accum",
    [
        ("ACCELERATE_MIXED_PRECISION", "fp16", 1),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", 1),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", 2),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", 1),
    ],
)
def test_what_accelerate_is_asked_for_beside_the_options_changes_nothing(monkeypatch, variable, value, grad_accum):
    monkeypatch.setenv(variable, value)
    accelerator = devices.make_accelerator("cpu", "bf16", grad_accum)
    assert accelerator.mixed_precision == "bf16" and accelerator.state.dynamo_plugin.backend == "NO"
    assert accelerator.gradient_accumulation_steps == grad_accum


def test_runs_of_other_precisions_follow_each_other_in_one_process_also_in_a_thread(tmp_path, shards, capsys):
    """As in a notebook. Signals, which only the main thread can take, end the process as ever there."""
    runs, arguments = [], [*QUICK, *PLAIN, *shards, "--epochs", "1", "--run-dir"]
    for name, more in ("first", []), ("second", ["--precision", "bf16", "--grad-accum", "2"]):
        words = [*arguments, str(tmp_path / name), *more]
        thread = threading.Thread(target=lambda words=words: runs.append(train_imagenet.main(words)))
        thread.start()
        thread.join()
    said = capsys.readouterr().out
    assert "on cpu in fp32, 1 epochs of 4 updates" in said and "on cpu in bf16, 1 epochs of 2 updates" in said
    assert [(run / "best.pt").exists() for run in runs] == [True, True]


WORDS_OF_HELP = dict.fromkeys(["adahessian", "lookahead_adahessian"], ["second derivatives", "adamw"])


@pytest.mark.parametrize("name", ["adahessian", "lookahead_adahessian", "bnbadam", "fusedadam", "nonsense"])
def test_an_optimiser_that_cannot_be_used_is_one_line_before_anything_is_made(tmp_path, shards, capsys, name):
    words = [*QUICK, *PLAIN, *shards, "--opt", name, "--run-dir", tmp_path / "run"]
    fails_with_one_line(train_imagenet.main, words, capsys, f"opt={name} is", *WORDS_OF_HELP.get(name, []))
    assert not (tmp_path / "run").exists()


def test_decays_of_the_optimisers_averages_are_those_asked_for(tmp_path, shards, capsys):
    words = [*QUICK, *PLAIN, *shards, "--epochs", "1", "--opt-betas", "0.8", "0.95"]
    train_imagenet.main(list(map(str, [*words, "--run-dir", tmp_path / "run"])))
    groups = load_checkpoint(tmp_path / "run" / "last.pt")["optimizer"]["param_groups"]
    assert all(tuple(group["betas"]) == (0.8, 0.95) for group in groups)
    words += ["--opt", "momentum", "--run-dir", tmp_path / "other"]
    fails_with_one_line(train_imagenet.main, words, capsys, "opt=momentum", "leave opt_betas=[0.8, 0.95] out")
    words += ["--opt", "adan"]
    fails_with_one_line(train_imagenet.main, words, capsys, "opt=adan", "opt_betas is [0.8, 0.95]", "has 3")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "more, words",
    [
        (["dynamic_img_size=true", "img_size=18"], "images are 18 x 18, which patches of 4 x 4"),
        (['global_pool=""'], "scores of (1, 17, 10), where (1, 10) are due"),
    ],
    ids=["size", "pool"],
)
def test_a_model_that_cannot_score_the_runs_images_is_one_line(tmp_path, capsys, more, words):
    arguments = [*PLAIN, "--data", "digits", "--model", "vlonghorn_test", "--run-dir", tmp_path / "run"]
    sizes = ["depth=1", "embed_dim=32", "img_size=16", "patch_size=4"]
    fails_with_one_line(train_imagenet.main, [*arguments, "--model-kwargs", *sizes, *more], capsys, words)


def test_a_folder_that_tensorboard_cannot_name_is_one_line_before_it_is_made(tmp_path, shards, capsys):
    words = [*QUICK, *PLAIN, *shards, "--run-dir", f"{tmp_path}/a\udcffb"]
    fails_with_one_line(train_imagenet.main, words, capsys, r"a\udcffb", "not UTF-8")
    assert not os.listdir(tmp_path)


def test_a_script_of_a_strangers_own_gets_the_models_whatever_it_is_called(tmp_path):
    """A stand-in, for speed: whether the module that registers the models is imported along with the package."""
    (tmp_path / "eval.py").write_text(
        "import sys, types\n"
        "name = 'vision_longhorn.models.vlonghorn'\n"
        "sys.modules[name] = types.SimpleNamespace(VisionLonghorn='the model')\n"
        "import vision_longhorn\nprint(vars(vision_longhorn).get('VisionLonghorn'))\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "eval.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.stdout == "the model\n", done.stderr


def test_files_of_ones_own_in_a_runs_folder_stay(tmp_path, shards, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.tmp").write_text("mine")
    (run / "config.yaml").write_text("mine: 1")
    arguments = [*QUICK, *PLAIN, *shards, "--epochs", "1", "--run-dir", str(run)]
    fails_with_one_line(train_imagenet.main, arguments, capsys, "config.yaml", "--run-dir")
    assert (run / "config.yaml").read_text() == "mine: 1"
    (run / "config.yaml").unlink()
    train_imagenet.main(arguments)
    assert (run / "notes.tmp").read_text() == "mine"


@pytest.mark.parametrize("command", [["train_imagenet.py"], ["eval.py"], ["-m", "vision_longhorn", "eval"]])
def test_help_does_not_wait_for_torch(command):
    """Importing torch and timm takes seconds; the stand-ins here fail where they are imported."""
    code = (
        "import runpy, sys\nsys.modules.update(torch=None, timm=None)\n"
        "sys.argv = sys.orig_argv = ['python', *sys.argv[1:], '--help']\n"
        "if sys.argv[1] == '-m':\n    sys.argv = ['-m', *sys.argv[3:]]\n"
        "    runpy.run_module('vision_longhorn', run_name='__main__', alter_sys=True)\n"
        "else:\n    sys.argv = sys.argv[1:]\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    command = [str(REPOSITORY / word) if word.endswith(".py") else word for word in command]
    done = subprocess.run([sys.executable, "-c", code, *command], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0 and "--device" in done.stdout, done.stderr
