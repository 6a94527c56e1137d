"""What an earlier state of the project wrote still loads, and gives the numbers that it gave then.

Commit b5ee357 wrote the files in data_b5ee357/, with Python 3.11.7, torch 2.14.1 on a CPU, timm 1.0.31, onnx 1.23.2 and
onnxscript 0.7.2. In a checkout of it at /tmp/b5, with bash in an empty folder:

    export PYTHONPATH=/tmp/b5 OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
    TRAIN="python /tmp/b5/train_imagenet.py --config demo_digits --workers 0 --device cpu --epochs 2 --warmup-epochs 0"
    SMALL="--model-kwargs img_size=16 patch_size=4 d_state=4 embed_dim=8 depth=1"
    EMA="--lr 8e-3 --ema-decay 0.98 --checkpoint-interval 66"
    BARE="--opt lion --lr 4e-3 --ema-decay 0"
    $TRAIN $EMA --run-dir longhorn $SMALL & until [ -e longhorn/update-0000066.pt ]; do sleep 0.02; done; kill -KILL $!
    $TRAIN $EMA --run-dir whole $SMALL
    $TRAIN $BARE --run-dir vim --model vim_test $SMALL
    $TRAIN $BARE --run-dir shared $SMALL rule=exact wiring=shared
    python /tmp/b5/eval.py --checkpoint longhorn/last.pt --workers 0 --device cpu
    python -m vision_longhorn.export longhorn/last.pt longhorn.onnx

`longhorn` was killed in the middle of its second epoch, `whole` is the same run to its end. Then, in Python:

    import numpy, timm, torch
    from PIL import Image
    from sklearn.datasets import load_digits
    from vision_longhorn.export import export_program
    from vision_longhorn.hub import load_run

    model = load_run("longhorn/last.pt")[0].eval()
    torch.export.save(export_program(model), "longhorn.pt2")
    torch.manual_seed(0)
    images = torch.randn(3, 3, 16, 16).mul(2).round().div(2)  # few different numbers, which compress well
    transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
    digits = [Image.fromarray((digit * 15).astype("uint8")).convert("RGB") for digit in load_digits().images[:3]]
    with torch.no_grad():
        found = {run: load_run(f"{run}/last.pt")[0].eval()(images) for run in ("longhorn", "whole", "vim", "shared")}
        found["digits"] = model(torch.stack([transform(digit) for digit in digits])).softmax(1)
    numpy.savez_compressed("outputs.npz", images=images, **found)

Of the runs' folders are kept: of `longhorn` what resuming reads (last.pt, config.yaml) and the two results that today's
commands find there (summary.csv, eval-val.json); of `vim`, best.pt, which a folder stands for; of `shared`, last.pt.
The package of AOTInductor is left out: it has 1.7 MB, and is for one kind of processor.
"""

import csv
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from PIL import Image
from sklearn.datasets import load_digits

FILES = Path(__file__).resolve().with_name("data_b5ee357")
sys.path.insert(0, str(FILES.parents[1]))

import eval as eval_script  # noqa: E402
import train_imagenet  # noqa: E402
import vision_longhorn  # noqa: E402, F401, brings the operator that an exported program calls
from vision_longhorn import predict  # noqa: E402
from vision_longhorn.hub import load_run  # noqa: E402

ON_CPU = ["--workers", "0", "--device", "cpu"]


@pytest.fixture(autouse=True)
def fresh_process_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where all commands run here: the first one makes the digits' shards in it, and the others find them."""
    return tmp_path_factory.mktemp("place")


@pytest.fixture
def run(place, monkeypatch, tmp_path):
    """A copy of the run that was killed; the working directory is `place`."""
    monkeypatch.chdir(place)
    return shutil.copytree(FILES / "longhorn", tmp_path / "run")


@pytest.fixture(scope="module")
def outputs():
    """Dict of name to tensor: `images`, and what the models made of them when they were written."""
    with np.load(FILES / "outputs.npz") as file:
        return {name: torch.from_numpy(file[name]) for name in file}


def same(found, expected, atol=1e-5):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@torch.no_grad()
def logits(path, images):
    return load_run(path)[0].eval()(images)


@pytest.mark.parametrize("path, name", [("longhorn/last.pt", "longhorn"), ("vim", "vim"), ("shared/last.pt", "shared")])
def test_an_old_run_gives_its_model(path, name, outputs):
    same(logits(FILES / path, outputs["images"]), outputs[name])


def test_an_old_run_that_was_killed_goes_on_to_the_end_it_would_have_had(run, outputs, capsys):
    """To the bit where it was written; elsewhere, other kernels round in another way. Lost moments, step counts or
    averages make a difference of 0.03 and more.

    A change to training that is meant to give runs another course, such as another augmentation, may loosen the last
    comparison. The others hold for any change.
    """
    before = torch.load(run / "last.pt", weights_only=True)
    train_imagenet.main(["--resume", str(run)])
    assert f"Going on with {run / 'last.pt'} after epoch 1 and 22 of 44 updates." in capsys.readouterr().out

    after = torch.load(run / "last.pt", weights_only=True)
    assert (after["epoch"], after["updates"]) == (2, 88)
    assert after["history"][0] == before["history"][0] and after["history"][1]["epoch"] == 2
    assert {int(state["step"]) for state in after["optimizer"]["state"].values()} == {88}
    old, new = (list(csv.DictReader((folder / "summary.csv").open())) for folder in (FILES / "longhorn", run))
    assert len(old) == 1 and len(new) == 2
    assert {column: new[0][column] for column in old[0]} == old[0]

    same(logits(run / "last.pt", outputs["images"]), outputs["whole"], atol=1e-3)


def agree(found, expected):
    """Asserts that two results of an evaluation are the same, but for a sample that rounding may turn over."""
    assert found["count"] == expected["count"] == 360
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    for key in "top1_count", "top5_count":
        assert found[key] == pytest.approx(expected[key], abs=1)


def test_an_old_checkpoint_is_evaluated_and_its_old_result_is_kept(run):
    old = (run / "eval-val.json").read_text()
    found = eval_script.main(["--checkpoint", str(run / "last.pt"), *ON_CPU])
    expected = json.loads(old)
    agree(found, expected)
    assert (found["model"], found["weights"]) == (expected["model"], expected["weights"]) == ("vlonghorn_test", "EMA")
    assert (run / "eval-val.json").read_text() == old


def test_an_old_run_without_averaged_weights_is_evaluated(run, tmp_path):
    folder = shutil.copytree(FILES / "vim", tmp_path / "vim")
    found = eval_script.main(["--checkpoint", str(folder), *ON_CPU])
    agree(found, load_run(folder)[1]["history"][-1]["val"])
    assert (found["model"], found["weights"]) == ("vim_test", "raw")


def test_an_old_run_predicts(run, tmp_path, outputs):
    """With the normalisation that its checkpoint holds."""
    images = []
    for i, digit in enumerate(load_digits().images[:3]):
        images.append(str(tmp_path / f"{i}.png"))
        Image.fromarray((digit * 15).astype("uint8")).save(images[-1])
    predict.main([str(run / "last.pt"), *images, "--top-k", "10", "--out", str(tmp_path / "out.json"), *ON_CPU])
    for image, expected in zip(json.loads((tmp_path / "out.json").read_text()), outputs["digits"], strict=True):
        found = {one["index"]: one["probability"] for one in image["predictions"]}
        same(torch.tensor([found[i] for i in range(10)]), expected)


@pytest.mark.skipif(
    torch.__version__ < "2.9",
    reason="torch 2.14 wrote the program, as an archive with a file for "
    "each weight, which torch before 2.9 cannot read",
)
def test_an_old_exported_program_runs(outputs):
    model = torch.export.load(FILES / "longhorn.pt2").module()
    for batch in 3, 1:  # it was exported for any number of images
        same(model(outputs["images"][:batch]).detach(), outputs["longhorn"][:batch])


def test_an_old_onnx_file_runs(outputs):
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(FILES / "longhorn.onnx", providers=["CPUExecutionProvider"])
    for batch in 3, 1:
        (found,) = session.run(["output"], {"images": outputs["images"][:batch].numpy()})
        same(torch.from_numpy(found), outputs["longhorn"][:batch])
