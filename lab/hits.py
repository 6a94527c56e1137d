"""Finds which images the final weights of a run get right, one by one. A study starts this process.

python -m lab.hits RUN:SIZE,SIZE --data DIR
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from timm.data import create_transform

from lab.runs import write_json
from vision_longhorn.command_line.parser import Parser, run_cli
from vision_longhorn.data import eval_loader, open_shards
from vision_longhorn.data.sharding import locate_data
from vision_longhorn.data.transforms import input_settings
from vision_longhorn.devices import make_accelerator
from vision_longhorn.evaluation.evaluate import evaluate
from vision_longhorn.files import read_json
from vision_longhorn.loading import load_model
from vision_longhorn.runs import Run

BATCH = 256  # images of the model's own size; batches of larger images have as many tokens


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluates a run at the given sizes, and adds what it finds to the run's hits.json."""
    parser = Parser(description=str(__doc__).splitlines()[0])
    parser.add_argument("run", metavar="RUN:SIZE,SIZE", help="folder of a run, and sides of images")
    parser.add_argument("--data", required=True, help="folder of shards or images")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"), help="[cuda if there is one]")
    parser.add_argument("--workers", type=int, default=1, help="loader processes [1]")
    args = parser.parse_args(argv)
    accelerator = make_accelerator(args.device)
    folder, _, sizes = args.run.rpartition(":")
    file = Path(folder, "hits.json")
    for size in map(int, sizes.split(",")):
        found = hits_of(Run(folder).last, size, args.data, args.workers, accelerator)
        write_json(file, {**(read_json(file) or {}), str(size): found})


def hits_of(checkpoint: Path, size: int, data: str, workers: int, accelerator: Accelerator) -> dict[str, Any]:
    """Evaluates the averaged weights of a checkpoint, or its raw ones if it has no others, on images of `size` pixels.
    The position embedding is resampled.

    Returns:
        Dict with "count", "top1" in per cent, "bits": base64 of a bit for each image, in the order of the names of
        shards and keys, and "images", a digest of these names.
    """
    loaded = load_model(checkpoint)
    model, values, native = loaded.model, loaded.checkpoint["config"], loaded.settings["input_size"][-1]
    if size != native:
        model.set_input_size(img_size=size)
    model.to(accelerator.device)
    settings = input_settings(model, {**values, "model_kwargs": {**values["model_kwargs"], "img_size": size}})
    classes, batch = model.num_classes, max(1, min(BATCH, round(BATCH * (native / size) ** 2)))
    shards = open_shards(locate_data(data, accelerator), values["val_split"], values["val_samples"], classes)
    loader = eval_loader(
        shards,
        create_transform(**settings),
        batch_size=batch,
        num_workers=workers,
        pin_memory=accelerator.device.type == "cuda",
        keys=True,
    )
    found: list[tuple[str, str, bool]] = []

    def note(logits: Any, targets: Any, rank: Any, places: list[tuple[str, str]]) -> None:
        found.extend((Path(url).name, key, hit) for (url, key), hit in zip(places, (rank < 1).tolist(), strict=True))

    result = evaluate({"model": model}, loader, accelerator, shards.num_samples, batch, on_batch=note)["model"]
    found.sort()
    names = "\n".join(f"{shard} {key}" for shard, key, _ in found)
    return {
        "count": result["count"],
        "top1": result["top1"],
        "bits": base64.b64encode(np.packbits([hit for _, _, hit in found]).tobytes()).decode(),
        "images": hashlib.sha256(names.encode()).hexdigest()[:8],
    }


if __name__ == "__main__":
    run_cli(main)
