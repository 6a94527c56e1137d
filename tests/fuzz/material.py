"""The material of all cases: drawn pictures, shards, a trained run, and what the tools make of it. Made once a fuzz.

| | |
|---|---|
| `pictures/` | `train/` and `val/`, three classes of 24-pixel pictures each |
| `photos/` | pictures of no class |
| `shards/` | `pictures/` as shards, with an index |
| `run/`, `other/` | a trained run, with checkpoints of its updates; one with other names for its classes |
| `begun/` | the same run, stopped after the first of its two epochs |
| `hub/`, `model.onnx` | `run/` as a model folder and as ONNX |
| `run.safetensors` | its weights alone |
| `eval.json`, `predict.csv` | what `eval` and `predict` say of `run/` |
| `goes-on.json`, `starts-from.json` | digests of the weights that `begun/` and `--init run/best.pt` come to |
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file

from tests.fuzz.process import Result, forked
from vision_longhorn.command_line import commands

CLASSES = ("ash", "beech", "oak")
OTHERS = ("bus", "car", "tram")
SIZE = 24
MODEL_KWARGS = (f"img_size={SIZE}", "patch_size=8", "embed_dim=16", "depth=2", "d_state=4")
EPOCHS = 2
# A run of a few updates on the CPU, each time to the same bits
TRAIN = (
    "--model", "vlonghorn_test", "--device", "cpu", "--workers", "0", "--batch-size", "6", "--repeats", "1",
    "--lr", "3e-3", "--lr-base-batch", "none", "--warmup-epochs", "0", "--mixup", "0", "--cutmix", "0",
    "--auto-augment", "none", "--re-prob", "0", "--ema-decay", "0.5", "--log-interval", "2",
    "--checkpoint-interval", "2", "--keep-checkpoints", "9",
)  # fmt: skip
EVAL = ("--device", "cpu", "--workers", "0", "--batch-size", "7")
SAME = ("top1", "top5", "loss", "count", "samples", "classes")  # keys of a result of `eval` by which two are compared


def picture(seed: int, kind: int, size: int = SIZE, noise: int = 60) -> Image.Image:
    """A picture of a kind: a red disc, a green square or a blue triangle on noise."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, noise, (size, size, 3), np.uint8))
    draw, left, top = ImageDraw.Draw(image), *rng.integers(1, max(2, size // 3), 2).tolist()
    right, bottom = left + size // 2, top + size // 2
    if kind == 0:
        draw.ellipse((left, top, right, bottom), fill=(210, 50, 40))
    elif kind == 1:
        draw.rectangle((left, top, right, bottom), fill=(40, 200, 60))
    else:
        draw.polygon(((left, bottom), (right, bottom), (left, top)), fill=(50, 60, 220))
    return image


def draw_folder(
    folder: Path, count: int, classes: tuple[str, ...] = CLASSES, seed: int = 0, ending: str = "png"
) -> Path:
    """A folder of `count` pictures for each class."""
    for kind, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            picture(1000 * seed + 100 * kind + number, kind).save(folder / name / f"{name}-{number:02d}.{ending}")
    return folder


def tool(folder: Path, word: str, *argv: str | Path, limit: float = 300) -> Result:
    """Returns what a tool says to a command line that is right. Raises RuntimeError where it fails all the same."""
    result = forked(lambda: commands.run(word, [str(each) for each in argv]), folder, limit)
    if result.code != 0:
        raise RuntimeError(f"{word} {argv} has failed with exit code {result.code}:\n{result.said}")
    return result


def digest_of(path: Path, key: str = "state_dict") -> str:
    """A digest of the weights in a checkpoint."""
    weights = torch.load(path, map_location="cpu", weights_only=True)[key]
    whole = hashlib.sha256()
    for name in sorted(weights):
        whole.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    return whole.hexdigest()


def train(folder: Path, run: str, data: str | Path, *more: str | Path) -> Result:
    """A run as `TRAIN` has it."""
    words = [*TRAIN, "--model-kwargs", *MODEL_KWARGS, "--epochs", str(EPOCHS), "--data", data, "--run-dir", run]
    return tool(folder, "train", *words, *more)


def make_material(folder: Path) -> Path:
    """Makes all of it in `folder`, which is new."""
    folder.mkdir(parents=True)
    draw_folder(folder / "pictures" / "train", 6)
    draw_folder(folder / "pictures" / "val", 4, seed=5)
    draw_folder(folder / "vehicles" / "train", 6, OTHERS, seed=6)
    draw_folder(folder / "vehicles" / "val", 4, OTHERS, seed=7)
    (folder / "photos").mkdir()
    for number in range(5):
        picture(900 + number, number % 3, size=20 + 5 * number).save(folder / "photos" / f"photo{number}.jpg")
    tool(folder, "shards", "imagefolder", "pictures", "shards", "--shard-size", "7")
    train(folder, "run", "shards")
    train(folder, "other", "vehicles")
    begun = shutil.copytree(folder / "run", folder / "begun")
    for path in begun.glob("*"):
        if path.name not in ("config.yaml", "env.json", "run.lock", "update-0000003.pt", "update-0000002.pt"):
            path.unlink()
    shutil.copyfile(begun / "update-0000003.pt", begun / "last.pt")
    tool(folder, "eval", "run", *EVAL, "--out", "eval.json", "--predictions", "eval.csv")
    tool(folder, "predict", "run", "photos", "--workers", "0", "--out", "predict.csv")
    tool(folder, "hub", "run", "hub")
    tool(folder, "export", "run", "model.onnx")
    tool(folder, "curves", "run", "--out", "curves.png")
    tool(folder, "maps", "run", "photos/photo0.jpg", "--out", "maps.png")
    checkpoint = torch.load(folder / "run" / "best.pt", map_location="cpu", weights_only=True)
    save_file(
        {name: value.contiguous() for name, value in checkpoint["state_dict"].items()}, folder / "run.safetensors"
    )
    shutil.copytree(begun, folder / "goes-on")
    tool(folder, "train", "--resume", "goes-on")
    train(folder, "starts-from", "shards", "--init", "run/best.pt", "--epochs", "1")
    for name in ("goes-on", "starts-from"):
        (folder / f"{name}.json").write_text(json.dumps(digest_of(folder / name / "last.pt")))
        shutil.rmtree(folder / name)
    if json.loads((folder / "goes-on.json").read_text()) != digest_of(folder / "run" / "last.pt"):
        raise RuntimeError("a run that went on does not have the weights of one that never stopped")
    for stream in folder.parent.glob(f"{folder.name}.std*"):
        stream.unlink()
    return folder
