"""Evaluation: exact on any number of processes, honest about ties and broken scores, and clear about wrong files."""

import csv
import io
import json
import pickle
import shutil
import tarfile

import pytest
import timm
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from test_resume import Processes, server  # noqa: F401  (a fixture)
from test_shards import full_disk
from test_train import (  # noqa: F401  (two are fixtures)
    PLAIN,
    QUICK,
    fails_with_one_line,
    fresh_process_state,
    no_picture,
    write_digits,
)

import eval as eval_script
import train_imagenet
from vision_longhorn import hub
from vision_longhorn.checkpoint import load_checkpoint, save_checkpoint
from vision_longhorn.class_names import ClassMap, imagenet_names, match_classes, model_names, readable_names
from vision_longhorn.command_line.parser import run_cli
from vision_longhorn.data.index import write_index
from vision_longhorn.devices import make_accelerator
from vision_longhorn.errors import UserError
from vision_longhorn.evaluation.evaluate import evaluate
from vision_longhorn.evaluation.report import draw_confusion


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder. Its 37 evaluation samples lie in one shard: fewer shards than processes and workers."""
    folder = tmp_path_factory.mktemp("eval")
    write_digits(folder / "data", "train", 70)
    write_digits(folder / "data", "val", 37, shards=1)
    data = ["--data", str(folder / "data")]
    train_imagenet.main([*QUICK, *PLAIN, *data, "--train-samples", "70", "--val-samples", "37", "--epochs", "2",
                         "--ema-decay", "0.9", "--run-dir", str(folder / "run")])  # fmt: skip
    return folder / "run"


DIGITS = [f"digit {i}" for i in range(10)]


@pytest.fixture
def named(run, tmp_path):
    """A copy of the run whose checkpoint names its classes."""
    folder = tmp_path / "named"
    folder.mkdir()
    for name in "best.pt", "last.pt":
        save_checkpoint(folder / name, {**load_checkpoint(run / name), "class_names": DIGITS, "display_names": None})
    return folder


def renamed(run, folder, class_names, order=None):
    """The run's evaluation samples as other data: classes called `class_names`, and by `order` (names) numbered in
    another way; samples of other classes are left out. Returns its folder."""
    folder.mkdir()
    order, kept = order or DIGITS, 0
    data = load_checkpoint(run / "best.pt")["config"]["data"]
    with tarfile.open(f"{data}/val-0.tar") as source, tarfile.open(folder / "val-0.tar", "w") as target:
        members = [(member, source.extractfile(member).read()) for member in source]
        for image, label in zip(members[::2], members[1::2], strict=True):
            name = f"digit {int(label[1])}"
            if name in order:
                text = b"%d" % order.index(name)
                label[0].size = len(text)
                target.addfile(image[0], io.BytesIO(image[1]))
                target.addfile(label[0], io.BytesIO(text))
                kept += 1
    entry = {"filenames": ["val-0.tar"], "shard_lengths": [kept]}
    write_index(folder, {"val": entry}, class_names, None if class_names else len(order))
    return folder


def scores(logits, targets, batch=2, **options):
    """`evaluate` of a model that passes its input on as logits."""
    logits, targets = torch.tensor(logits), torch.tensor(targets)
    loader = list(zip(logits.split(batch), targets.split(batch), strict=True))
    return evaluate({"it": torch.nn.Identity()}, loader, make_accelerator("cpu"), len(targets), batch, **options)["it"]


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
        evaluate(
            {"it": torch.nn.Identity()},
            [(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))],
            make_accelerator("cpu"),
            3,
            2,
        )


def test_two_processes_count_what_one_counts(run, tmp_path):
    def details(name):
        return ["--report", name, "--predictions", f"{name}.csv"]

    one = eval_script.main(
        [
            "--checkpoint",
            str(run),
            "--workers",
            "0",
            "--out",
            str(tmp_path / "one.json"),
            *details(str(tmp_path / "one")),
        ]
    )
    done = Processes("eval", tmp_path / "log", [
        "--checkpoint", str(run / "best.pt"), "--workers", "2", "--batch-size", "4", "--device", "cpu",
        "--out", str(tmp_path / "two.json"), *details(str(tmp_path / "two"))])  # fmt: skip
    assert done.wait() == [0, 0], done.text
    assert done.text.count("count 37 of 37") == done.text.count("images/s") == 1
    two = json.loads((tmp_path / "two.json").read_text())
    assert (one["processes"], two["processes"]) == (1, 2)
    for key in "count", "top1_count", "top5_count", "weights":
        assert one[key] == two[key]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert one == json.loads((tmp_path / "one.json").read_text())
    assert one["images_per_s"] is None and two["images_per_s"] > 0  # one batch, and several
    assert one["precision"] == "fp32"

    # What they say of every sample is the same, and adds up to the totals.
    for name in "classes.csv", "confusion.csv":
        assert (tmp_path / "one" / name).read_text() == (tmp_path / "two" / name).read_text()
    rows = [table(tmp_path / f"{name}.csv") for name in ("one", "two")]
    assert [[row[key] for key in ("key", "target", "predicted", "top5", "hit")] for row in rows[0]] == [
        [row[key] for key in ("key", "target", "predicted", "top5", "hit")] for row in rows[1]
    ]
    assert len({row["key"] for row in rows[0]}) == 37 and rows[0][0]["shard"].endswith("val-0.tar")
    assert sum(row["target"] == row["predicted"] for row in rows[0]) == one["top1_count"]
    assert sum(row["target"] in row["top5"].split() for row in rows[0]) == one["top5_count"]
    classes = table(tmp_path / "one" / "classes.csv")
    for key, total in ("count", 37), ("top1_count", one["top1_count"]), ("top5_count", one["top5_count"]):
        assert sum(int(row[key]) for row in classes) == total
    confusion = [list(map(int, list(row.values())[1:])) for row in table(tmp_path / "one" / "confusion.csv")]
    assert sum(confusion[i][i] for i in range(10)) == one["top1_count"] and sum(map(sum, confusion)) == 37
    assert [sum(row) for row in confusion] == [int(row["count"]) for row in classes]
    with Image.open(tmp_path / "one" / "confusion.png") as picture:
        picture.verify()


def table(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_thousand_classes_make_a_picture_that_can_be_looked_at(tmp_path, recwarn):
    numbers = torch.arange(5000).numpy() % 1000
    draw_confusion(tmp_path / "many.png", numbers, numbers[::-1], [f"class {i}" for i in range(1000)])
    # No score of the model was a number, no font here has the first name, and the second is no text.
    draw_confusion(tmp_path / "none.png", numbers[:0], numbers[:0], ["\u732b", "\udcff"])
    with Image.open(tmp_path / "many.png") as picture:
        assert 500 < picture.width < 4000 and 500 < picture.height < 4000
    assert not [one for one in recwarn if "Glyph" in str(one.message)]


def test_a_run_of_more_classes_than_its_data_has_a_report_and_predictions(run, tmp_path):
    file, kwargs = tmp_path / "best.pt", load_checkpoint(run / "best.pt")["config"]["model_kwargs"]
    model = timm.create_model("vlonghorn_test", num_classes=12, **kwargs)
    names = ["a$b^$", *DIGITS[1:]]
    config = {**load_checkpoint(run / "best.pt")["config"], "data": str(renamed(run, tmp_path / "data", names, DIGITS))}
    about = dict(arch="vlonghorn_test", num_classes=12, class_names=names, display_names=None, config=config)
    save_checkpoint(file, {**about, "state_dict": model.state_dict(), "epoch": 1, "history": []})
    words = ["--device", "cpu", "--report", str(tmp_path / "report"), "--predictions", str(tmp_path / "all.csv")]
    eval_script.main([str(file), "--samples", "37", *words])
    classes = table(tmp_path / "report" / "classes.csv")
    assert [row["class"] for row in classes] == [*names, "", ""] and [row["name"] for row in classes][10] == "class 10"
    assert len(table(tmp_path / "all.csv")) == 37
    hub.main([str(file), str(tmp_path / "hub")])
    assert json.loads((tmp_path / "hub/config.json").read_text())["label_names"] == [*names, "class 10", "class 11"]


def test_only_classes_of_the_map_take_part():
    logits = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(20) % 4  # the data's classes 0 to 3 are the model's 5, none, 0 and 2
    result = scores(logits.tolist(), targets.tolist(), class_map=ClassMap([5, 0, 2], [0, 2, 3], [0, -1, 1, 2]))
    kept = targets != 1
    found = logits[kept][:, [5, 0, 2]].argmax(1)
    expected = torch.tensor([0, 9, 1, 2])[targets[kept]]
    assert result["count"] == 15 and result["top1_count"] == int((found == expected).sum()) not in (0, 15)
    with pytest.raises(UserError, match="none of the 2 samples"):
        scores([[0.0, 1.0]] * 2, [0, 0], class_map=ClassMap([0], [1], [-1, 0]))


@pytest.mark.parametrize(
    "names, order, words",
    [
        (["ant", *DIGITS[1:]], None, ["class 0", "'digit 0'", "'ant'", "--map-classes", "9 classes"]),
        ([*DIGITS, "ten"], None, ["class 10", "none", "'ten'", "--map-classes"]),
        (DIGITS[:9], DIGITS[:9], ["class 9", "'digit 9'", "none", "--map-classes"]),
        (DIGITS[::-1], DIGITS[::-1], ["class 0", "'digit 9'", "10 classes"]),
        (None, DIGITS[:8], ["10 classes", "8", "--classes"]),
        (list("abcdefghij"), None, ["class 0", "'a'", "no class"]),
    ],
)
def test_data_of_other_classes_is_refused_and_costs_no_result(run, named, tmp_path, capsys, names, order, words):
    (named / "eval-val.json").write_text("kept")
    data = renamed(run, tmp_path / "data", names, order)
    fails_with_one_line(eval_script.main, ["--checkpoint", named, "--data", data, "--workers", "0"], capsys, *words)
    assert (named / "eval-val.json").read_text() == "kept" and len(list(named.iterdir())) == 3


def test_classes_are_paired_by_name(run, named, tmp_path, capsys):
    arguments = ["--checkpoint", str(named), "--workers", "0"]
    whole = eval_script.main([*arguments, "--predictions", str(tmp_path / "whole.csv")])
    assert not whole["map_classes"]

    # The same samples, numbered in another way, with two more classes
    order = ["nine and more", *DIGITS[::-1], "none"]
    mapped = eval_script.main(
        [
            *arguments,
            "--data",
            str(renamed(run, tmp_path / "more", order, order)),
            "--map-classes",
            "--predictions",
            str(tmp_path / "mapped.csv"),
        ]
    )
    assert {key: mapped[key] for key in ("top1_count", "top5_count", "count")} == {
        key: whole[key] for key in ("top1_count", "top5_count", "count")
    }
    assert (mapped["classes"], mapped["model_classes"], mapped["data_classes"]) == (10, 10, 12)
    assert "10 classes, by name those in both the model's 10 and the data's 12" in capsys.readouterr().out
    one, other = (table(tmp_path / f"{name}.csv") for name in ("whole", "mapped"))
    assert [DIGITS[int(row["target"])] for row in one] == [row["target_class"] for row in other]
    assert [DIGITS[int(row["predicted"])] for row in one] == [row["predicted_class"] for row in other]

    # Fewer classes: the best of these counts.
    few = ["digit 7", "digit 2", "digit 3"]
    part = eval_script.main([*arguments, "--data", str(renamed(run, tmp_path / "few", few, few)), "--map-classes"])
    assert part["classes"] == 3 and part["top5_count"] == part["count"] == sum(
        DIGITS[int(row["target"])] in few for row in one
    )
    assert part["top1_count"] >= sum(row["hit"] == "1" and DIGITS[int(row["target"])] in few for row in one)


def test_unknown_names_are_said(run, named, tmp_path, capsys):
    data = renamed(run, tmp_path / "data", None)
    arguments = ["--checkpoint", str(named), "--workers", "0"]
    eval_script.main([*arguments, "--data", str(data)])
    assert (
        f"note: the class names of {data} are unknown, only their number was compared, 10\n" in capsys.readouterr().out
    )
    fails_with_one_line(eval_script.main, [*arguments, "--data", data, "--map-classes"], capsys, str(data), "unknown")
    eval_script.main(arguments)
    assert "note" not in capsys.readouterr().out  # the run's own data


def test_names_of_classes():
    names = imagenet_names(1000)
    assert (names[0], names[-1], imagenet_names(10)) == ("n01440764", "n15075141", None)
    assert readable_names(names)[0].startswith("tench") and readable_names(["n99999999", "x"]) == ["n99999999", "x"]
    assert readable_names(["a"], ["Ash"]) == ["Ash"] and readable_names(None, None, 2) == ["class 0", "class 1"]
    model = timm.create_model("test_vit.r160_in1k")
    assert model_names(model, "test_vit.r160_in1k")[0] == names
    model.reset_classifier(7)
    assert model_names(model, "test_vit.r160_in1k") == (None, None)
    # Imagenette on a model of ImageNet-1k
    few = ["n01440764", "n02102040", "n02979186"]
    found, note = match_classes(names, 1000, few, 3, by_name=True, model="it", data="they")
    assert found == ClassMap([0, 217, 482], [0, 1, 2], [0, 1, 2]) and not note
    with pytest.raises(UserError, match="two classes 'a'"):
        match_classes(["a", "a"], 2, ["a"], 1, by_name=True, model="it", data="they")


def test_every_evaluation_has_its_own_file(run, named, tmp_path, capsys):
    data = renamed(run, tmp_path / "other", DIGITS)
    arguments = ["--checkpoint", str(named), "--workers", "0"]

    def files(*options):
        AcceleratorState._reset_state(reset_partial_state=True)
        eval_script.main([*arguments, *options])
        return sorted(path.name for path in named.glob("*.json"))

    assert files() == ["eval-val.json"]
    assert files("--data", str(data)) == ["eval-val-2.json", "eval-val.json"]
    assert files("--raw") == ["eval-val-2.json", "eval-val-3.json", "eval-val.json"]
    before = {path: path.read_bytes() for path in named.glob("*.json")}
    capsys.readouterr()
    assert "eval-val-4.json" in files("--precision", "bf16")
    assert f"saved as {named / 'eval-val-4.json'}\n" in capsys.readouterr().out
    assert "eval-last-val.json" in files("--checkpoint", str(named / "last.pt"))
    assert all(path.read_bytes() == text for path, text in before.items())

    # The same evaluation again replaces its result, also by way of another batch size.
    assert len(files("--batch-size", "5")) == 5
    assert json.loads((named / "eval-val.json").read_text())["batch_size"] == 5
    assert json.loads((named / "eval-val-4.json").read_text())["precision"] == "bf16"


def test_what_is_there_is_not_written_over(named, tmp_path, capsys):
    (tmp_path / "notes.json").write_text('{"mine": 1}')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("")
    for option, name in ("--out", "notes.json"), ("--predictions", "notes.json"), ("--report", "folder"):
        fails_with_one_line(
            eval_script.main, ["--checkpoint", named, "--workers", "0", option, tmp_path / name], capsys, option, name
        )
    assert (tmp_path / "notes.json").read_text() == '{"mine": 1}'
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["mine"]


def test_a_result_that_cannot_be_saved_is_printed(named, capsys):
    given = ["--checkpoint", str(named), "--workers", "0", "--out"]
    with pytest.raises(SystemExit) as exit, full_disk(100):
        run_cli(lambda: eval_script.main([*given, str(named / "out.json")]))
    said = capsys.readouterr()
    assert exit.value.code == 1 and "count 37 of 37" in said.out
    assert said.err == f"error: {named / 'out.json'}: File too large\n"
    words = str(named / "best.pt"), "is no folder where you may write"
    fails_with_one_line(eval_script.main, [*given, named / "best.pt" / "out.json"], capsys, *words)


def test_a_bare_state_dict_brings_no_data(run, tmp_path, capsys):
    checkpoint = load_checkpoint(run / "best.pt")
    torch.save(checkpoint["state_dict"], tmp_path / "bare.pt")
    kwargs = [f"{key}={value}" for key, value in checkpoint["config"]["model_kwargs"].items()]
    words = [tmp_path / "bare.pt", "--model", "vlonghorn_test", "--num-classes", "10", "--model-kwargs", *kwargs]
    fails_with_one_line(eval_script.main, words, capsys, "no data", "--data")


def test_another_split_has_its_own_size(run, tmp_path):
    out = ["--checkpoint", str(run), "--workers", "0", "--out", str(tmp_path / "out.json")]
    assert eval_script.main([*out, "--split", "train"])["count"] == 70


def test_a_split_in_another_spelling_is_the_runs_own(run, tmp_path):
    other = write_digits(tmp_path / "other", "val", 5, shards=1)
    checkpoint = load_checkpoint(run / "best.pt")
    config = {**checkpoint["config"], "val_data": str(other), "val_samples": 5}
    save_checkpoint(tmp_path / "best.pt", {**checkpoint, "config": config})
    assert eval_script.main([str(tmp_path), "--workers", "0", "--split", "Validation"])["count"] == 5


def test_a_process_without_samples_waits_for_the_others(run, tmp_path):
    lone = write_digits(tmp_path / "lone", "val", 1, shards=1)
    done = Processes(
        "eval",
        tmp_path / "log",
        ["--checkpoint", str(run), "--data", str(lone), "--samples", "1", "--workers", "0", "--device", "cpu"],
    )
    assert done.wait() == [0, 0] and done.text.count("count 1 of 1") == 1, done.text


def test_raw_and_averaged_weights_are_those_of_the_last_epoch(run, tmp_path):
    history = json.loads((run / "metrics.json").read_text())
    arguments = ["--checkpoint", str(run / "last.pt"), "--workers", "0"]
    for option, key in ("--raw", "val"), ("--ema", "val_ema"):
        out = tmp_path / f"{key}.json"
        result = eval_script.main([*arguments, option, "--out", str(out)])
        assert {name: result[name] for name in history[-1][key]} == history[-1][key]
        assert eval_script.main([*arguments, option, "--out", str(out)])["top1"] == result["top1"]  # its own place
    with pytest.raises(UserError, match="val.json holds the result of another evaluation"):
        eval_script.main([*arguments, "--ema", "--out", str(tmp_path / "val.json")])
    assert history[-1]["val"]["loss"] != history[-1]["val_ema"]["loss"]


def test_a_run_stands_before_or_behind_the_options_or_is_their_checkpoint(run, tmp_path):
    options = ["--raw", "--workers", "0", "--out", str(tmp_path / "out.json")]
    found = [
        eval_script.main(words)
        for words in ([str(run), *options], [*options, str(run)], [*options, "--checkpoint", str(run)])
    ]
    for result in found:
        result.pop("images_per_s")
    assert found[0] == found[1] == found[2] and found[0]["checkpoint"] == str(run / "best.pt")


def test_timm_takes_the_checkpoint_as_it_is(run):
    checkpoint = load_checkpoint(run / "best.pt")
    model = timm.create_model(
        checkpoint["arch"], num_classes=10, checkpoint_path=str(run / "best.pt"), **checkpoint["config"]["model_kwargs"]
    )
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
    for name, reason in ("bad.pt", "damaged"), ("bad2.pt", "more than tensors and plain values"):
        fails_with_one_line(eval_script.main, ["--checkpoint", name, "--data", "x"], capsys, name, reason)
    assert not (tmp_path / "ran").exists()


def test_a_failed_save_leaves_the_old_checkpoint_and_no_litter(tmp_path):
    save_checkpoint(tmp_path / "last.pt", {"state_dict": {}})
    before = (tmp_path / "last.pt").read_bytes()
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save_checkpoint(tmp_path / "last.pt", {"state_dict": lambda: None})
    assert (tmp_path / "last.pt").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--checkpoint", "{run}/best.pt", "--model", "vim_test"], ["another model", "vlonghorn_test"]),
        (["--checkpoint", "{run}/best.pt", "--model-kwargs", "depth=2"], ["another model", "absent"]),
        (["--checkpoint", "{run}/best.pt", "--num-classes", "7"], ["another model", "head"]),
        (["--checkpoint", "{run}/config.yaml"], ["config.yaml", "no checkpoint"]),
        (["--checkpoint", "nowhere.pt"], ["nowhere.pt"]),
        (["nowhere/run"], ["nowhere/run", "there is no folder nowhere"]),
        (["--checkpoint", "{run}", "--data", "nowhere"], ["nowhere"]),
        (["--checkpoint", "{run}", "--split", "test"], ["test", "val"]),
        (["--checkpoint", "{run}", "--samples", "38"], ["37", "38"]),
        (["--checkpoint", "{run}", "--batch-size", "0"], ["--batch-size", "0"]),
        (["--checkpoint", "{run}", "--workers", "-1"], ["--workers", "-1"]),
        (["--checkpoint", "{run}", "--samples", "0"], ["--samples", "0"]),
        (["--checkpoint", "{run}", "--num-classes", "0"], ["--num-classes", "0"]),
        (["--checkpoint", "{run}", "--device", "cuda"], ["device is 'cuda'", "give auto or cpu"]),
        (["--checkpoint", "{run}", "--batchsize", "8"], ["--batchsize", "--batch-size"]),
        (["--model", "vlonghorn_tinny", "--pretrained", "--data", "x"], ["vlonghorn_tinny", "vlonghorn_tiny"]),
        (["--model", "vlonghorn_test", "--data", "x"], ["a run's folder", "--pretrained"]),
        (["--model", "resnet50", "--pretrained", "--num-classes", "3"], ["--num-classes", "leave it out"]),
        (["--model", "vim_test", "--model-kwargs", "depth=1", "{run}"], ["KEY=VALUE", "before the options"]),
        (
            ["--model", "nonsense", "--pretrained"],
            ["unknown model 'nonsense': timm.list_models() has them all"],
        ),
        (
            ["--model", "vim_test", "--pretrained", "--model-kwargs", "num_classes=3"],
            ["num_classes", "--num-classes"],
        ),
        (
            ["--model", "vim_test", "--pretrained", "--data", "x", "--model-kwargs", 'img_size="32"'],
            ["img_size is '32'", "whole number"],
        ),
        ([], ["a run's folder", "--model"]),
        (["{run}", "--pretrained"], ["a run's folder", "--model"]),
        (["{run}", "--checkpoint", "{run}/last.pt"], ["last.pt both say what to evaluate", "give one"]),
    ],
)
def test_mistakes_end_with_one_line(run, monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = [word.format(run=run) for word in arguments]
    fails_with_one_line(eval_script.main, ["--workers", "0", *arguments], capsys, *words)


def test_a_run_that_was_never_evaluated_names_its_newest_weights(run, tmp_path, capsys):
    shutil.copy(run / "last.pt", tmp_path / "last.pt")
    fails_with_one_line(eval_script.main, [str(tmp_path)], capsys, "not been evaluated", str(tmp_path / "last.pt"))
