"""Images per second of training on several GPUs of one machine, and how much of the single GPU's rate is left.

    python benchmarks/bench_scaling.py                                   # 1, 2, 4, ... up to all GPUs
    python benchmarks/bench_scaling.py --processes 1 4 --model vlonghorn_base --batch 64 --arg mlp_conv=3

Each process has its own GPU and a batch of images in its memory. The step is the trainer's, with AdamW and without
augmentation and averaged weights; the model has the arguments that the configs set. With --fsdp several processes shard
as the trainer does. All start together, and the slowest one's time counts. With CUDA graphs, "exchange ms" is
how much longer a step takes than the slowest process needs without exchanging gradients. Without a GPU it runs on the
CPU, in float32.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F

# First, since it lets a checkout do without installation.
from common import OF_CONFIGS, RESULTS, ROOT, environment, print_environment, table

from vision_longhorn.command_line.parser import Parser, run_cli
from vision_longhorn.errors import UserError
from vision_longhorn.models.names import all_arguments
from vision_longhorn.settings import parse_pairs
from vision_longhorn.training import setup
from vision_longhorn.training.config import Config
from vision_longhorn.training.fsdp import shard
from vision_longhorn.training.step import TrainStep

CLASSES = 1000


def model_arguments(args: argparse.Namespace) -> dict[str, Any]:
    own = OF_CONFIGS if timm.models.is_model_in_modules(args.model, "vlonghorn") else {}
    return {"img_size": args.resolution, **own, **parse_pairs(args.arg)}


def work(args: argparse.Namespace) -> None:
    """Run as one process of several; the first one prints what was measured."""
    size = (3, args.resolution, args.resolution)
    plain: dict[str, Any] = dict(mixup=0, cutmix=0, ema_decay=0, lr=1e-4)
    cfg = Config(
        model=args.model,
        model_kwargs=model_arguments(args),
        batch_size=args.batch,
        compile=args.compile,
        cuda_graphs=args.cuda_graphs,
        compress_gradients=args.compress_gradients,
        fsdp=args.fsdp,
        **plain,
    )
    accelerator = setup.start_processes(cfg, Path())
    device, gpu = accelerator.device, accelerator.device.type == "cuda"
    model, _ = setup.build_model(cfg, CLASSES, accelerator, checkpoint=None)
    if cfg.fsdp:
        shard(accelerator, model, compress_gradients=cfg.compress_gradients)
    optimizer = setup.build_optimizer(cfg, model, cfg.lr)
    net = setup.wrap(cfg, model, optimizer, size, accelerator).train()
    step = TrainStep(accelerator, model, net, F.cross_entropy, optimizer, compress=cfg.compress_gradients)
    images = torch.randn(args.batch, *size, device=device)
    labels = torch.randint(CLASSES, (args.batch,), device=device)

    def run(steps: int) -> float:
        """Measure the milliseconds that a step takes in the slowest process."""
        accelerator.wait_for_everyone()
        start = time.perf_counter()
        for _ in range(steps):
            step([(images, labels)])
        if gpu:
            torch.cuda.synchronize()
        seconds = torch.tensor([time.perf_counter() - start], device=device)
        return accelerator.gather(seconds).max().item() / steps * 1e3

    run(args.warm_up)
    ms = sorted(run(args.steps) for _ in range(3))[1]
    exchange = None
    if step.sums:  # how long the slowest process would take by itself: GPUs differ, and all wait for it
        step.sums = False
        exchange = ms - sorted(run(args.steps) for _ in range(3))[1]
    if accelerator.is_main_process:
        count = accelerator.num_processes
        print(
            json.dumps(
                dict(
                    processes=count,
                    ms=ms,
                    exchange_ms=exchange,
                    images_per_s=count * args.batch / ms * 1e3,
                    GiB=torch.cuda.max_memory_allocated() / 2**30 if gpu else None,
                )
            )
        )
    if gpu:
        accelerator.end_training()
        return
    # With gloo, torch 2.7 can hang for ever when it leaves the group, and newer versions abort if it does not leave.
    accelerator.wait_for_everyone()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    count = torch.cuda.device_count()
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--processes",
        type=int,
        nargs="+",
        metavar="N",
        default=[2**i for i in range(max(1, count).bit_length())],
        help="(1, 2, 4, ... all GPUs)",
    )
    parser.add_argument("--model", default="vlonghorn_small", help="(vlonghorn_small)")
    parser.add_argument(
        "--arg", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="arguments for the model"
    )
    parser.add_argument("--resolution", type=int, default=224, help="(224)")
    parser.add_argument("--batch", type=int, default=256, help="images of each process (256)")
    parser.add_argument("--steps", type=int, default=20, help="of each of three timings (20)")
    parser.add_argument("--warm-up", type=int, default=10, help="steps before them (10)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="(yes)")
    parser.add_argument("--cuda-graphs", action=argparse.BooleanOptionalAction, default=True, help="(yes, on a GPU)")
    parser.add_argument("--compress-gradients", action="store_true", help="average them in bfloat16")
    parser.add_argument("--fsdp", action="store_true", help="shard weights, gradients and AdamW's state (FSDP2)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="for scaling.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # for the processes it starts itself
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    if count and max(args.processes) > count:
        raise UserError(f"--processes {max(args.processes)}: there are {count} GPUs here, and each takes one process")
    found = environment()
    print_environment(found)
    rows = []
    for processes in args.processes:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={processes}",
            __file__,
            "--worker",
            *sys.argv[1:],
        ]
        # One process alone would get as many threads as there are cores.
        run = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={"OMP_NUM_THREADS": "1"} | os.environ
        )
        if run.returncode:
            raise UserError(f"with {processes} processes it ended with {run.returncode}; its own message is above")
        rows.append(json.loads(run.stdout.splitlines()[-1]))
    fewest = min(rows, key=lambda row: row["processes"])
    for row in rows:
        row["efficiency"] = row["images_per_s"] / row["processes"] / (fewest["images_per_s"] / fewest["processes"])
    table(
        f"{args.model}, {args.batch} x {args.resolution} px on each, training",
        rows,
        processes=("processes", "d"),
        images_per_s=("images/s", ".0f"),
        ms=("ms/step", ".2f"),
        efficiency=("efficiency", ".3f"),
        exchange_ms=("exchange ms", ".2f"),
        GiB=("GiB", ".1f"),
    )
    args.out.mkdir(parents=True, exist_ok=True)
    options = {key: value for key, value in vars(args).items() if key not in ("out", "worker", "processes")}
    options["args"] = all_arguments(args.model, model_arguments(args))
    del options["arg"]
    path = args.out / "scaling.json"
    path.write_text(json.dumps(dict(environment=found, options=options, scaling=rows), indent=1) + "\n")
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    run_cli(main)
