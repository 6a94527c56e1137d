"""A training run as a model folder in the Hugging Face hub's layout, or on the hub, with a model card.

    python -m vision_longhorn.hub runs/NAME/best.pt FOLDER              # timm.create_model("local-dir:FOLDER", ...)
    python -m vision_longhorn.hub runs/NAME/best.pt USER/MODEL --push   # timm.create_model("hf-hub:USER/MODEL", ...)

timm's `save_for_hf` and `push_to_hf_hub` do the work. What is added: the run's own normalisation, crop and class names,
weights as safetensors only, and the card.
"""

import argparse
import os
import shutil
from pathlib import Path

from timm.models import push_to_hf_hub, save_for_hf
from timm.models._hub import generate_readme

from vision_longhorn.checkpoint import create_model, load_checkpoint, load_weights
from vision_longhorn.config import DIGITS
from vision_longhorn.data.index import read_index
from vision_longhorn.errors import UserError, run_cli
from vision_longhorn.evaluate import input_settings
from vision_longhorn.vlonghorn import VisionLonghorn

CITATIONS = ["""@inproceedings{liu2025longhorn,
  title={Longhorn: State Space Models are Amortized Online Learners},
  author={Liu, Bo and Wang, Rui and Wu, Lemeng and Feng, Yihao and Stone, Peter and Liu, Qiang},
  booktitle={International Conference on Learning Representations},
  year={2025}
}""", """@inproceedings{zhu2024vim,
  title={Vision Mamba: Efficient Visual Representation Learning with Bidirectional State Space Model},
  author={Zhu, Lianghui and Liao, Bencheng and Zhang, Qian and Wang, Xinlong and Liu, Wenyu and Wang, Xinggang},
  booktitle={International Conference on Machine Learning},
  year={2024}
}"""]


def load_run(path):
    """The model of a training run, with its averaged weights if it has any, and the checkpoint.

    Its `pretrained_cfg` gets the run's input size, normalisation, resampling and crop, so that
    `timm.data.resolve_data_config(model=model)` gives the run's evaluation transform.

    Args:
        path: a run's folder (then its best.pt), or a checkpoint of train_imagenet.py.

    Returns:
        (model, checkpoint): the model in training mode on the CPU, the dict as `load_checkpoint` reads it.

    Raises:
        UserError: where `path` holds no such checkpoint.
    """
    path = Path(path, "best.pt") if Path(path).is_dir() else Path(path)
    checkpoint = load_checkpoint(path)
    if "arch" not in checkpoint or "config" not in checkpoint:
        raise UserError(f"{path} does not say which model it holds: give a checkpoint of train_imagenet.py")
    values = checkpoint["config"]
    model = create_model(checkpoint["arch"], num_classes=checkpoint["num_classes"], **values["model_kwargs"])
    load_weights(model, checkpoint, path, ema="state_dict_ema" in checkpoint)
    model.pretrained_cfg.update(input_settings(model, values), num_classes=model.num_classes, tag=None)
    return model, checkpoint


def model_card(model, source, checkpoint=None):
    """What is known of a model, as `push_to_hf_hub` takes it in `model_card`.

    Args:
        model: a model of timm.
        source: what loads it: "hf-hub:USER/MODEL" or "local-dir:FOLDER".
        checkpoint: the dict of the run that it comes from; None for a model that no run of this trainer made.
    """
    cfg = model.pretrained_cfg
    ours = isinstance(model, VisionLonghorn)
    details = {
        "Architecture": f"{cfg['architecture']}, a bidirectional state-space model over image patches" if ours
        else cfg["architecture"],
        "Parameters": f"{sum(value.numel() for value in model.parameters()):,}",
        "Image size": " x ".join(map(str, cfg["input_size"][1:])),
        "Classes": model.num_classes,
    }
    if ours:
        mixer = model.blocks[0].mixer
        details["Scan"] = f"{mixer.rule if mixer.is_mamba else 'longhorn, ' + mixer.rule + ' rule'}, state size " \
            f"{mixer.d_state}, {'shared' if mixer.shared else 'vim'} wiring, {len(model.blocks)} blocks"
    if checkpoint is not None:
        values = checkpoint["config"]
        details["Training data"] = str(values["data"])
        details["Training"] = f"{checkpoint['epoch']} of {values['epochs']} epochs, {values['opt']}, " \
            f"seed {values['seed']}"
        weights = "val_ema" if "state_dict_ema" in checkpoint else "val"
        result = checkpoint["history"][-1].get(weights)
        if result:
            details["Top-1"] = f"{result['top1']:.2f} % of {result['count']:,} images, split " \
                f"{values['val_split']!r} of {values['val_data'] or values['data']}"
    if checkpoint is None or model.num_classes != 1000:
        details["ImageNet-1k top-1"] = "not yet run"
    return {
        "license": cfg.get("license") or "apache-2.0",
        "tags": ["image-classification", "timm", "vision-longhorn", "state-space-model"],
        "description": "An image classifier of the Python package `vision-longhorn`.",
        "details": details,
        "usage": f"""`import vision_longhorn` makes timm know the architecture.

```python
import timm, torch, vision_longhorn
from PIL import Image

model = timm.create_model("{source}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
with torch.no_grad():
    scores = model(transform(Image.open("image.png").convert("RGB"))[None])   # (1, {model.num_classes})
```""",
        "citation": CITATIONS if ours else [],
    }


def class_names(checkpoint):
    """Names of a run's classes by index, from the index of its training data; None where that is not at hand."""
    data = checkpoint["config"]["data"]
    names = (read_index(Path("data", DIGITS) if data == DIGITS else data) or {}).get("class_names")
    return names if names and len(names) == checkpoint["num_classes"] else None


def main(argv=None):
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="of train_imagenet.py, a run's folder or file")
    parser.add_argument("target", help="the folder to make, or with --push the hub's USER/MODEL")
    parser.add_argument("--push", action="store_true", help="to the hub, with the token of `hf auth login`")
    parser.add_argument("--private", action="store_true", help="make a repository that only you can see")
    args = parser.parse_args(argv)
    model, checkpoint = load_run(args.checkpoint)
    names = class_names(checkpoint)
    given = dict(model_config=dict(label_names=names) if names else None,
                 model_args=checkpoint["config"]["model_kwargs"], safe_serialization=True)
    if args.push:
        card = model_card(model, f"hf-hub:{args.target}", checkpoint)
        print(f"pushed: {push_to_hf_hub(model, args.target, model_card=card, private=args.private, **given)}")
        return
    folder = Path(args.target)
    if folder.exists():
        raise UserError(f"{folder} is there already: remove it, or name another folder")
    card = model_card(model, f"local-dir:{args.target}", checkpoint)
    aside = Path(f"{folder}.tmp")
    try:
        save_for_hf(model, str(aside), **given)
        (aside / "README.md").write_text(generate_readme(card, folder.name), encoding="utf-8")
        os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(f"wrote {folder}")


if __name__ == "__main__":
    run_cli(main)
