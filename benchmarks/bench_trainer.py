"""Times the trainer itself on JPEG files, beside its update alone on images that are already on the GPU.

    python benchmarks/bench_trainer.py IMAGES                                # the small model by its ImageNet config
    python benchmarks/bench_trainer.py IMAGES --repeats 1 2 3 --max-side 500

The pictures are repeated in shards in a temporary folder, which the operating system caches. A run trains for two
epochs with the augmentation of its config, and the last half of the second counts. An image that is augmented R times
(`repeats`) counts R times. Both rates are of one process, on a GPU with --compile and --cuda-graphs.
If the ratio of the two is below 1, the model waits for images.
"""

import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

# First, since they let a checkout do without installation.
from bench_loader import PER_SHARD, files_of, shrunk, write_shard
from common import RESULTS, ROOT, environment, print_environment, table

from lab.speed import time_update
from vision_longhorn.command_line.parser import Parser, run_cli
from vision_longhorn.devices import make_accelerator
from vision_longhorn.errors import UserError
from vision_longhorn.models.names import all_arguments
from vision_longhorn.settings import parse_pairs
from vision_longhorn.training.config import Config, read_config_file

SHARDS, MIN_SIDE = 64, 200


def train(cfg: Config, folder: Path) -> float:
    """Trains as `cfg` says in a new folder, and returns the images per second of the last epoch."""
    folder.mkdir()
    settings = folder / "settings.yaml"
    settings.write_text(yaml.safe_dump(cfg.values()))
    command = [sys.executable, "-m", "vision_longhorn", "train", "--config", str(settings)]
    command += ["--run-dir", str(folder / "run")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise UserError(f"the trainer ended with {done.returncode}:\n{done.stdout[-2000:]}")
    with open(folder / "run" / "summary.csv") as file:
        return float(list(csv.DictReader(file))[-1]["images_per_s"])


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="original JPEG files, in folders or not")
    parser.add_argument("--config", default="vlonghorn_small", help="(vlonghorn_small)")
    parser.add_argument("--batch-size", type=int, default=256, help="(256)")
    workers = max(1, (os.cpu_count() or 1) - 1)
    parser.add_argument("--workers", type=int, nargs="+", default=[workers], help="of the loader (cores - 1)")
    parser.add_argument("--repeats", type=int, nargs="+", default=[3, 1], help="views of each decoded image (3 1)")
    parser.add_argument("--max-side", type=int, help="store larger pictures with this longer side, as the shard maker")
    parser.add_argument("--updates", type=int, default=300, help="of an epoch (300)")
    parser.add_argument("--model-kwargs", nargs="*", default=[], metavar="KEY=VALUE", help="arguments of the model")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="for trainer.json")
    args = parser.parse_args(argv)
    found = environment()
    print_environment(found)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        files = files_of(args.folder, MIN_SIDE)
        if not files:
            raise UserError(f"{args.folder} has no JPEG files of {MIN_SIDE} pixels or more: name a folder with some")
        if args.max_side:
            files = shrunk(files, args.max_side)
        shard = Path(folder, "train-000000.tar")
        write_shard(shard, files)
        for name in ("val-000000.tar", *(f"train-{number:06d}.tar" for number in range(1, SHARDS))):
            os.symlink(shard, Path(folder, name))
        settings = read_config_file(args.config)
        settings |= dict(
            data=folder,
            train_samples=args.updates * args.batch_size,
            val_samples=PER_SHARD,
            num_classes=1000,  # as ImageNet has; the shards do not say
            epochs=2,
            log_interval=max(1, args.updates // 2),
            warmup_epochs=1,
            min_lr=0.0,  # the peak may be low, as it follows the batch
            batch_size=args.batch_size,
            compile=torch.cuda.is_available(),
            cuda_graphs=True,
            model_kwargs=(settings.get("model_kwargs") or {}) | parse_pairs(args.model_kwargs),
        )
        for workers, repeats in itertools.product(args.workers, args.repeats):
            cfg = Config(**settings | dict(workers=workers, repeats=repeats))
            rate = train(cfg, Path(folder, f"{workers}-{repeats}"))
            rows.append(dict(workers=workers, repeats=repeats, images_per_s=rate))
            print(f"{workers} workers, {repeats} views of an image: {rate:,.0f} images/s", flush=True)
    alone = time_update(cfg, make_accelerator("auto", cfg.precision, cfg.grad_accum))
    for row in rows:
        row["ratio"] = row["images_per_s"] / alone
    columns = dict(workers=("workers", "d"), repeats=("views", "d"), images_per_s=("images/s", ".0f"))
    table(f"{cfg.model}: {alone:,.0f} images/s without a loader", rows, **columns, ratio=("ratio", ".2f"))
    args.out.mkdir(parents=True, exist_ok=True)
    images = dict(files=len(files), mean_bytes=sum(map(len, files)) / len(files), max_side=args.max_side)
    result = dict(
        environment=found,
        images=images,
        config={key: value for key, value in cfg.values().items() if key not in ("data", "workers", "repeats")},
        args=all_arguments(cfg.model, cfg.model_kwargs),
        update_alone=alone,
        trainer=rows,
    )
    path = args.out / "trainer.json"
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    run_cli(main)
