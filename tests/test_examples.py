"""The programs in examples/, in small: that they run, and that what they train has learned."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "examples")]

import finetune  # noqa: E402
import segmentation  # noqa: E402

import train_imagenet  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The demo's best.pt, after one epoch of training."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("demo"))
        run = train_imagenet.main(["--epochs", "1", "--warmup-epochs", "0", "--workers", "0", "--device", "cpu",
                                   "--ema-decay", "0", "--run-dir", "run"])  # fmt: skip
        return str((run / "best.pt").resolve())


def test_the_notebook_learns_and_shows_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plt.switch_backend("Agg")
    cells = json.loads((REPOSITORY / "examples" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    names = {}
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        exec(source.replace("epochs, batch = 6", "epochs, batch = 4"), names)  # enough to see that it learns
    plt.close("all")
    assert names["top1"] > 90 and [tuple(each.shape) for each in names["maps"]] == [(4, 64, 4, 4)] * 2
    assert (tmp_path / "maps.png").read_bytes().startswith(b"\x89PNG")


def test_segmentation_finds_more_than_background(capsys):
    found, trivial = segmentation.main(["--steps", "60"])
    assert found > 1.3 * trivial
    assert f"{found:.1f} %" in capsys.readouterr().out


def test_scores_of_segmentation():
    scenes = torch.tensor([[0, 0, 1, 2], [3, 3, 3, 0]])
    assert segmentation.mean_iou(scenes, scenes) == 100
    # Of class 0 one pixel of three is taken for 1, so that 0 has 2 of 3 and 1 has 1 of 2.
    guess = torch.tensor([[0, 1, 1, 2], [3, 3, 3, 0]])
    assert segmentation.mean_iou(guess, scenes) == pytest.approx(100 * (2 / 3 + 1 / 2 + 1 + 1) / 4)


def test_finetuning_learns_a_new_task_from_few_pictures(checkpoint, capsys):
    tuned = finetune.main([checkpoint])
    _, labels = finetune.odd_or_even()
    share = 100 * float(labels.float().mean())
    assert tuned > max(share, 100 - share) + 15
    assert f"{tuned:.1f} %" in capsys.readouterr().out


def test_finetuning_starts_from_the_checkpoint_and_slows_the_lower_blocks(checkpoint):
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    model = finetune.load(checkpoint)
    assert model.patch_embed.grid_size == (4, 5) and model.head.out_features == 2
    for name, value in model.state_dict().items():
        if name.startswith(("blocks.", "norm.", "cls_token")):
            assert torch.equal(value, weights[name]), name
    images, labels = finetune.odd_or_even()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    finetune.finetune(model, images[:8], labels[:8], epochs=2, layer_decay=0.05, batch_size=8)
    moved = {name: float((value - before[name]).abs().max()) for name, value in model.state_dict().items()}
    rates = [
        moved[f"{part}"]
        for part in (
            "patch_embed.proj.weight",
            "blocks.0.mixer.in_proj.weight",
            "blocks.2.mixer.in_proj.weight",
            "head.weight",
        )
    ]
    assert all(0 < low < 0.1 * high for low, high in zip(rates, rates[1:])), rates
