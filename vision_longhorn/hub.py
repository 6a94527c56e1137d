"""Writes a training run as a model folder in the Hugging Face hub's layout, with a model card.

    vision-longhorn hub runs/NAME/best.pt FOLDER      # timm.create_model("local-dir:FOLDER", ...)
    hf upload USER/MODEL FOLDER                                 # timm.create_model("hf-hub:USER/MODEL", ...)

timm's `save_for_hf` does the work. This module adds the run's own class names, the card, and what transformers needs in
the configuration.
"""

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vision_longhorn.class_names import readable_names
from vision_longhorn.command_line.parser import Parser
from vision_longhorn.errors import UserError, reason
from vision_longhorn.files import write_hash, written_aside
from vision_longhorn.loading import checkpoint_names, load_run
from vision_longhorn.outputs import check_output

# Slow imports stand where they are used, so that the command line is read first.
USAGE = """`import vision_longhorn` makes timm know the architecture.

```python
import timm, torch, vision_longhorn
from PIL import Image

model = timm.create_model("{source}", pretrained=True).eval()    # on the hub: "hf-hub:USER/MODEL"
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


def model_card(model: Any, source: str, checkpoint: dict[str, Any] | None = None) -> dict[str, Any]:
    """Describe a model, in the form that timm's `push_to_hf_hub` takes as `model_card`.

    Args:
        model: a model of timm; the licence is that of its `pretrained_cfg`.
        source: the name that loads it: "hf-hub:USER/MODEL" or "local-dir:FOLDER".
        checkpoint: the checkpoint's dict, if the model comes from a run.
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
        "license": cfg.get("license") or "unknown",  # if there is none, timm writes apache-2.0
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
    last = checkpoint["history"][-1] if checkpoint["history"] else {}  # the run's first epoch may not be finished
    if result := last.get("val_ema" if "state_dict_ema" in checkpoint else "val"):
        details["Top-1"] = (
            f"{result['top1']:.2f} % of {result['count']:,} images, split {values['val_split']!r} of "
            f"{_public(values['val_data'] or values['data'])}, after epoch {last['epoch']}"
        )
    return details


def _public(place: str | None) -> str:
    """Return the last name of a path, but nothing of a URL or a command, which may hold a password."""
    if place is None:
        return "unknown"
    is_path = "://" not in place and not place.startswith("pipe:")
    return re.split(r"[/\\]", place.rstrip("/\\"))[-1] if is_path else "shards from a URL or a command"


def _labels(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return class names for timm's config.json: the data's, and readable ones beside them where they differ."""
    classes = checkpoint["num_classes"]
    names, shown = (known if known and len(known) <= classes else None for known in checkpoint_names(checkpoint))
    if not names and not shown:
        return {}
    words = readable_names(names, shown, classes)
    names = [*names, *words[len(names) :]] if names else words  # timm wants a name for each class
    return dict(label_names=names) | ({} if words == names else dict(label_descriptions=dict(zip(names, words))))


def save_run_for_hub(path: str | os.PathLike[str], folder: str | os.PathLike[str], license: str | None = None) -> None:
    """Write a training run as a folder in the hub's layout: model.safetensors and its hash, config.json, README.md.

    `path` is a run's folder or checkpoint, `license` the hub's identifier of the weights' licence, such as "mit".

    Raises:
        UserError: the run cannot be read, `folder` is not new or empty or cannot be written, or the licence is none.
    """
    from safetensors import SafetensorError
    from timm.models import save_for_hf
    from timm.models._hub import generate_readme

    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        raise UserError(f"--license is {license!r}: give an identifier of the hub, in small letters, such as mit")
    folder = Path(folder)
    str(folder).encode()  # fails here if it is not UTF-8, which the model card would have to be
    check_output("folder", folder)
    model, checkpoint = load_run(path)
    model.pretrained_cfg["license"] = license
    try:
        with written_aside(folder) as aside:
            save_for_hf(model, str(aside), _labels(checkpoint), safe_serialization=True)
            # timm writes the number of classes twice, beside the model's arguments and among them; transformers would
            # pass on both.
            file = aside / "config.json"
            config = json.loads(file.read_text(encoding="utf-8"))
            config["model_args"].pop("num_classes", None)
            file.write_text(json.dumps(config, indent=2), encoding="utf-8")
            # safetensors makes its files readable for their owner only.
            shutil.copymode(file, aside / "model.safetensors")
            card = generate_readme(model_card(model, f"local-dir:{folder.name}", checkpoint), folder.name)
            (aside / "README.md").write_text(card, encoding="utf-8")
            write_hash(aside / "model.safetensors")
    except (OSError, SafetensorError) as error:  # the second comes from a full disk, for example
        raise UserError(f"{folder} cannot be written ({reason(error)}): name another place for it") from error


def main(argv: Sequence[str] | None = None) -> None:
    """Writes a model folder as the command line `argv` says, by default the process's own."""
    parser = Parser(description=str(__doc__).splitlines()[0])
    parser.add_argument("checkpoint", help="a run's folder (then its best.pt), or a checkpoint of it")
    parser.add_argument("target", help="the folder to make")
    parser.add_argument("--license", metavar="ID", help="the hub's identifier, such as mit [the card says unknown]")
    args = parser.parse_args(argv)
    save_run_for_hub(args.checkpoint, args.target, args.license)
    print(f"wrote {args.target}")


if __name__ == "__main__":
    from vision_longhorn.command_line.commands import run

    run("hub")
