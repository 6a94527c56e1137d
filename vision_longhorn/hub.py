"""A training run as a model folder in the Hugging Face hub's layout, or on the hub, with a model card.

    python -m vision_longhorn.hub runs/NAME/best.pt FOLDER              # timm.create_model("local-dir:FOLDER", ...)
    python -m vision_longhorn.hub runs/NAME/best.pt USER/MODEL --push   # timm.create_model("hf-hub:USER/MODEL", ...)

timm's `save_for_hf` does the work. Added are the run's own class names, the card, and a configuration that transformers
takes, too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision_longhorn.class_names import readable_names
from vision_longhorn.command_line.parser import Parser
from vision_longhorn.errors import UserError, one_line, reason
from vision_longhorn.files import write_hash, written_aside
from vision_longhorn.loading import checkpoint_names, load_run
from vision_longhorn.outputs import check_output

# What takes long to import is imported where it is used: the command line is read before.
if TYPE_CHECKING:
    from vision_longhorn.models.create import TimmModel

USAGE = """`import vision_longhorn` makes timm know the architecture.

```python
import timm, torch, vision_longhorn
from PIL import Image

model = timm.create_model("{source}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
with torch.no_grad():
    scores = model(transform(Image.open("image.png").convert("RGB"))[None])   # (1, {num_classes})
```"""
CITATIONS = [
    """@inproceedings{liu2025longhorn,
  title={Longhorn: State Space Models are Amortized Online Learners},
  author={Liu, Bo and Wang, Rui and Wu, Lemeng and Feng, Yihao and Stone, Peter and Liu, Qiang},
  booktitle={International Conference on Learning Representations},
  year={2025}
}""",
    """@inproceedings{zhu2024vim,
  title={Vision Mamba: Efficient Visual Representation Learning with Bidirectional State Space Model},
  author={Zhu, Lianghui and Liao, Bencheng and Zhang, Qian and Wang, Xinlong and Liu, Wenyu and Wang, Xinggang},
  booktitle={International Conference on Machine Learning},
  year={2024}
}""",
]


def model_card(model: TimmModel, source: str, checkpoint: dict[str, Any] | None = None) -> dict[str, Any]:
    """Describe a model, in the form in which `push_to_hf_hub` takes its `model_card`.

    Args:
        model: a model of timm; the licence is that of its `pretrained_cfg`.
        source: what loads it: "hf-hub:USER/MODEL" or "local-dir:FOLDER".
        checkpoint: the dict of the run that it comes from, if it does.
    """
    from vision_longhorn.models.mixers import describe_mixer
    from vision_longhorn.models.vlonghorn import VisionLonghorn

    cfg = model.pretrained_cfg
    ours = isinstance(model, VisionLonghorn)
    details = {
        "Architecture": cfg["architecture"]
        + (", a bidirectional state-space model over image patches" if ours else ""),
        "Parameters": f"{sum(value.numel() for value in model.parameters()):,}",
        "Image size": " x ".join(map(str, cfg["input_size"][1:])),
        "Classes": model.num_classes,
    }
    if ours:
        details["Mixer"] = f"{describe_mixer(model.blocks[0].mixer)}, {len(model.blocks)} blocks"
    if checkpoint is not None:
        details |= _training_details(checkpoint)
    if checkpoint is None or model.num_classes != 1000:
        details["ImageNet-1k top-1"] = "not yet run"
    return {
        "license": cfg.get("license") or "unknown",  # without an entry timm writes apache-2.0
        "tags": ["image-classification", "timm", "vision-longhorn", "state-space-model"],
        "description": "An image classifier of the Python package `vision-longhorn`.",
        "details": details,
        "usage": USAGE.format(source=source, num_classes=model.num_classes),
        "citation": CITATIONS if ours else [],
    }


def _training_details(checkpoint: dict[str, Any]) -> dict[str, str]:
    values = checkpoint["config"]
    details = {
        "Training data": _public(values["data"]),
        "Training": f"{checkpoint['epoch']} of {values['epochs']} epochs, {values['opt']}, seed {values['seed']}",
    }
    last = checkpoint["history"][-1] if checkpoint["history"] else {}  # a run's first epoch may not be finished
    if result := last.get("val_ema" if "state_dict_ema" in checkpoint else "val"):
        details["Top-1"] = (
            f"{result['top1']:.2f} % of {result['count']:,} images, split {values['val_split']!r} of "
            f"{_public(values['val_data'] or values['data'])}, after epoch {last['epoch']}"
        )
    return details


def _public(place: str | None) -> str:
    """A place of data without what may be secret: a URL without user and query, the last name of a path."""
    if place is None:
        return "unknown"
    if place[:5].lower() == "pipe:":
        return "shards that a command prints"
    scheme, colon, rest = place.partition("://")
    if colon and scheme.lower() != "file":
        return f"{scheme}://{re.sub(r'^[^/]*@', '', rest).partition('?')[0]}"
    return next((name for name in re.split(r"[/\\]", place)[::-1] if name.strip(".~")), "a folder")


def _labels(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Class names for timm's config.json: the data's, and beside them those for people where they differ."""
    names, shown = (
        known if known and len(known) == checkpoint["num_classes"] else None for known in checkpoint_names(checkpoint)
    )
    words = readable_names(names, shown)
    if not names or words == names:
        return dict(label_names=words) if words else {}
    return dict(label_names=names, label_descriptions=dict(zip(names, words)))


def save_run_for_hub(path: str | os.PathLike[str], folder: str | os.PathLike[str], license: str | None = None) -> None:
    """Write a training run as a folder in the hub's layout: model.safetensors and its hash, config.json, README.md.

    `path` is as `load_run` takes it, `license` the hub's identifier of the weights' licence, such as "mit".
    """
    from safetensors import SafetensorError

    _check_license(license)
    folder = Path(folder)
    check_output("folder", folder)
    run = load_run(path)
    try:
        with written_aside(folder) as aside:
            aside.mkdir()
            _write(aside, *run, license, f"local-dir:{folder.name}")
            write_hash(aside / "model.safetensors")
    except (OSError, SafetensorError) as error:  # the second on a full disk, for one
        raise UserError(
            f"{folder} cannot be written ({reason(error)}): name a folder where you may write, with room for it"
        ) from error


def _write(folder: Path, model: TimmModel, checkpoint: dict[str, Any], license: str | None, source: str) -> None:
    """Write weights, configuration and card into `folder`; `source` is what will load them."""
    from timm.models import save_for_hf
    from timm.models._hub import generate_readme

    model.pretrained_cfg["license"] = license
    arguments = checkpoint["config"]["model_kwargs"]
    save_for_hf(model, str(folder), _labels(checkpoint), arguments, safe_serialization=True)
    # timm writes the number of classes beside the model's arguments and among them, and transformers hands on both.
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["model_args"].pop("num_classes", None)
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")
    # safetensors lets only the owner read what it writes.
    shutil.copymode(file, folder / "model.safetensors")
    card = generate_readme(model_card(model, source, checkpoint), re.split("[:/]", source)[-1])
    (folder / "README.md").write_text(card, encoding="utf-8")


def _push_run(path: str, name: str, license: str | None, private: bool) -> str:
    """Upload a run as the model `name` of the hub, and return the address. A card that is there already stays."""
    from huggingface_hub import HfApi

    _check_license(license)
    run = load_run(path)
    try:
        with tempfile.TemporaryDirectory() as folder:
            _write(Path(folder), *run, license, f"hf-hub:{name}")
            api = HfApi(library_name="vision-longhorn")
            repo = api.create_repo(name, private=private, exist_ok=True).repo_id
            kept = ["README.md"] if api.file_exists(repo_id=repo, filename="README.md") else None
            return str(api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=kept))
    except Exception as error:  # the hub's client raises its own types, and those of its HTTP library, by versions
        raise UserError(
            f"{name} could not be pushed ({type(error).__name__}: {one_line(error)}): give USER/MODEL; `hf auth "
            "whoami` tells whether you are logged in"
        ) from error


def _check_license(license: str | None) -> None:
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        raise UserError(f"--license is {license!r}: give an identifier of the hub, in small letters, such as mit")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="of train_imagenet.py, a run's folder or file")
    parser.add_argument("target", help="the folder to make, or with --push the hub's USER/MODEL")
    parser.add_argument("--license", metavar="ID", help="the hub's identifier, such as mit [the card says unknown]")
    parser.add_argument("--push", action="store_true", help="to the hub, with the token of `hf auth login`")
    parser.add_argument("--private", action="store_true", help="with --push: make a repository that only you can see")
    args = parser.parse_args(argv)
    if args.private and not args.push:
        raise UserError("--private goes with --push: give both, or neither")
    if args.push:
        print(f"pushed: {_push_run(args.checkpoint, args.target, args.license, args.private)}")
        return
    save_run_for_hub(args.checkpoint, args.target, args.license)
    print(f"wrote {args.target}")


if __name__ == "__main__":
    from vision_longhorn.command_line.commands import run

    run("hub")
