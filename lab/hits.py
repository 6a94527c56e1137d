"""Which images the final weights of runs get right, by `vision-longhorn eval`, in a process of its own.

python -m lab.hits RUN:SIZE,SIZE ... --data DIR
"""

import base64
import csv
import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.runs import read_json, write_json
from vision_longhorn import eval
from vision_longhorn.command_line.parser import Parser, run_cli

PIXELS = 256 * 224**2  # of the images of a batch, at most


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluates each run at its sizes, and adds what it finds to the run's hits.json."""
    parser = Parser(description=str(__doc__).splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN:SIZE,SIZE", help="folder of a run, and sides of images")
    parser.add_argument("--data", required=True, help="folder of shards or images")
    parser.add_argument("--device", default="auto", help="as in `eval` [auto]")
    parser.add_argument("--workers", default="1", help="loader processes [1]")
    args = parser.parse_args(argv)
    for word in args.runs:
        folder, _, sizes = word.rpartition(":")
        file = Path(folder, "hits.json")
        for size in map(int, sizes.split(",")):
            batch = str(max(1, min(256, PIXELS // size**2)))
            more = ["--batch-size", batch, "--workers", args.workers, "--device", args.device]
            found = hits_of(Path(folder, "last.pt"), size, ["--data", args.data, *more])
            write_json(file, {**(read_json(file) or {}), str(size): found})


def hits_of(checkpoint: Path, size: int, words: list[str]) -> dict[str, Any]:
    """What the averaged weights of a checkpoint get right, or its raw ones where it has no others.

    Args:
        checkpoint: The file.
        size: Height and width of the images in pixels; the model's position embedding is resampled.
        words: Other words for `vision-longhorn eval`.

    Returns:
        Dict with "count", "top1" in per cent, "bits": base64 of a bit for each image, in the order of the names of
        shards and keys, and "images", a digest of these names.
    """
    with tempfile.TemporaryDirectory() as folder:
        table, result = Path(folder, "predictions.csv"), str(Path(folder, "eval.json"))
        own = ["--model-kwargs", f"img_size={size}", "--out", result, "--predictions", str(table)]
        eval.main([str(checkpoint), *own, *words])
        with open(table, encoding="utf-8", errors="surrogateescape", newline="") as file:
            found = sorted((Path(row["shard"]).name, row["key"], row["hit"] == "1") for row in csv.DictReader(file))
    hits = [hit for _, _, hit in found]
    names = "\n".join(f"{shard} {key}" for shard, key, _ in found)
    return {
        "count": len(hits),
        "top1": 100 * sum(hits) / len(hits),
        "bits": base64.b64encode(np.packbits(hits).tobytes()).decode(),
        "images": hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()[:8],
    }


if __name__ == "__main__":
    run_cli(main)
