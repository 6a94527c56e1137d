"""Times loaders of training images side by side: this package's beside timm's, at the same augmentation.

    python benchmarks/bench_loader.py IMAGES                 # a folder of CLASS/IMAGE.JPEG, on one core
    python benchmarks/bench_loader.py IMAGES --workers 1 16  # on one and on sixteen

The pictures are repeated, in shards in a temporary folder for this package, and by name for timm's ImageFolder. Files
come from the operating system's cache. Each loader runs with N workers, and the whole process is bound to N cores. The
loaders take five turns each: after the batches that a loader has ready, its batches are counted for some seconds. The
results are medians of the turns. With a GPU, batches are copied to it and finished there; without one, its part is left
out. So the rates are those of the cores in both cases. Images per CPU second, of main process and workers together,
suffer least from other work on the machine; the ratio to timm is one of these.

Augmentation: random resized crop to 224 pixels (or --size), bicubic; flip; RandAugment rand-m9-mstd0.5-inc1;
normalisation; random erasing 0.25 by pixels. A view is what a network sees; with three views of each decoded image
(repeated augmentation) rates count views, and a GPU crops, unless the row says that workers do. "In memory" means that
the images were decoded before.

Stages are timed in one process on one core; shards are read by webdataset's parser, too. On a GPU, its part and
decoding JPEGs there are timed in milliseconds per image.
"""

import dataclasses
import functools
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path
from statistics import median

import numpy as np
import PIL
import torch
import torch.nn.functional as F
import torchvision

# First, since it lets a checkout do without installation.
from common import RESULTS, describe, environment, print_environment, table
from PIL import Image
from timm.data import Mixup, create_dataset, create_loader, create_transform
from timm.data.loader import PrefetchLoader
from timm.data.transforms import RandomResizedCropAndInterpolation
from webdataset import TarWriter
from webdataset.tariterators import group_by_keys, tar_file_expander

from vision_longhorn.command_line.parser import Parser, run_cli
from vision_longhorn.data import (
    ShardSet,
    decode_image,
    device_batches,
    keep_in_memory,
    split_transform,
    train_loader,
)
from vision_longhorn.data.images import decode_tensor
from vision_longhorn.data.sharding import stored_form
from vision_longhorn.data.sources import Sample
from vision_longhorn.data.tars import read_shard
from vision_longhorn.data.transforms import mend_posterize
from vision_longhorn.errors import UserError

SIZE = 224
RECIPE = dict(interpolation="bicubic", auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25, re_mode="pixel", hflip=0.5)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PER_SHARD, MAX_SIDES, MANY, ROUNDS = 512, (500, 400), 1 << 20, 5


def files_of(folder: Path, min_side: int) -> list[bytes]:
    """Read the JPEG files of a folder and those below it, except tiny pictures."""
    files = [path.read_bytes() for path in sorted(folder.rglob("*")) if path.suffix.lower() in (".jpeg", ".jpg")]
    return [data for data in files if max(decode_image(data).size) >= min_side]


def write_shard(path: Path, files: list[bytes]) -> ShardSet:
    """Write a shard of the files, repeated, and list it so often that a pass over it does not end."""
    with TarWriter(str(path), encoder=False, mtime=0) as tar:  # as in the shards that we make
        for number, data in enumerate(islice(cycle(files), PER_SHARD)):
            tar.write({"__key__": f"{number:06d}", "jpg": data, "cls": b"%d" % (number % 10), "json": b"{}"})
    count = MANY // PER_SHARD
    return ShardSet([str(path)] * count, count * PER_SHARD, 10, samples_per_shard=[PER_SHARD] * count)


def kept(shards: ShardSet) -> ShardSet:
    """Return the same shards with the images decoded, once for all that are listed."""
    one = dataclasses.replace(shards, urls=shards.urls[:1], num_samples=PER_SHARD, samples_per_shard=[PER_SHARD])
    once = keep_in_memory(one)
    return dataclasses.replace(shards, kept=once.kept * len(shards.urls))


def shrunk(files: list[bytes], max_side: int) -> list[bytes]:
    """Return the files as the shard maker stores them with --max-side."""
    return [stored_form(Sample("0.jpg", 0, size=len(data), data=data), max_side)[0] for data in files]


def image_folder(root: Path, files: list[bytes]) -> str:
    for number, data in enumerate(islice(cycle(files), PER_SHARD)):
        path = root / f"class{number % 10}" / f"{number:06d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return str(root)


def timms(root: str, workers: int, batch: int, prefetcher: bool) -> Iterable:
    """Make timm's loader of an image folder; without a GPU, only the workers' part of the one with a prefetcher."""
    dataset = create_dataset("", root)
    dataset.reader.samples *= MANY // len(dataset.reader.samples)
    loader = create_loader(
        dataset,
        (3, SIZE, SIZE),
        batch,
        is_training=True,
        use_prefetcher=prefetcher,
        num_workers=workers,
        pin_memory=DEVICE.type == "cuda",
        device=DEVICE,
        **RECIPE,
    )
    if isinstance(loader, PrefetchLoader):
        return loader if DEVICE.type == "cuda" else loader.loader
    return device_batches(loader, DEVICE)


def ours(
    shards: ShardSet, workers: int, batch: int, split: bool, repeats: int = 1, crop_on_device: bool = False
) -> Iterable:
    transform, finish = create_transform(SIZE, is_training=True, **RECIPE), None
    if split:
        transform, finish = split_transform(transform, crop_on_device)
    loader = train_loader(
        shards, transform, batch_size=batch, num_workers=workers, repeats=repeats, pin_memory=DEVICE.type == "cuda"
    )
    return loader if split and DEVICE.type == "cpu" else device_batches(loader, DEVICE, finish)


def cpu_seconds() -> float:
    """Return the CPU time of this process and its workers so far; of this process alone where there is no /proc."""
    used = sum(os.times()[:2])
    for child in multiprocessing.active_children():
        try:
            fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
            used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            pass
    return used


def rate(batches: Iterator, workers: int, batch: int, seconds: float) -> tuple[float, float]:
    """Measure a loader's views per second and per CPU second, after the batches that it has ready."""
    for _ in range(3 * workers + 2):
        next(batches)
    count, start, used = 0, time.perf_counter(), cpu_seconds()
    while time.perf_counter() - start < seconds:
        next(batches)
        count += batch
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    used = max(cpu_seconds() - used, 0.01)  # at least one tick of the clock that counts the workers' time
    return count / (time.perf_counter() - start), count / used


def measure_loaders(files: list[bytes], workers: int, batch: int, seconds: float) -> list[dict]:
    rows, rounds, running = [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        root = image_folder(folder / "images", files)
        shards = write_shard(folder / "train-0.tar", files)
        small = {side: write_shard(folder / f"small-{side}.tar", shrunk(files, side)) for side in MAX_SIDES}
        for name, make in {
            "timm": lambda: timms(root, workers, batch, False),
            "timm, prefetcher": lambda: timms(root, workers, batch, True),
            "ours, all in workers": lambda: ours(shards, workers, batch, False),
            "ours, split": lambda: ours(shards, workers, batch, True),
            "ours, split, workers crop, 3 views": lambda: ours(shards, workers, batch, True, 3),
            "ours, split, 3 views": lambda: ours(shards, workers, batch, True, 3, True),
            "ours, split, in memory": lambda: ours(kept(shards), workers, batch, True),
            **{
                f"ours, split, --max-side {side}": functools.partial(ours, small[side], workers, batch, True)
                for side in MAX_SIDES
            },
        }.items():
            rows.append(dict(loader=name, workers=workers))
            try:
                running[name] = iter(make())
            except Exception as error:  # the others are measured all the same
                rows[-1]["error"] = describe(error)
        # In turns, so that other work on the machine slows all alike. A loader that nobody asks soon rests.
        for _ in range(ROUNDS):
            rounds.append({name: rate(it, workers, batch, seconds / ROUNDS) for name, it in running.items()})
            print("images/s  " + "  ".join(f"{name} {found[0]:.0f}" for name, found in rounds[-1].items()), flush=True)
    for row in rows:
        found = [turn[row["loader"]] for turn in rounds if row["loader"] in turn]
        if found:
            row["images_per_s"], row["per_cpu_second"] = (median(values) for values in zip(*found, strict=True))
            row["per_core"] = row["images_per_s"] / workers
            row["times_timm"] = median(turn[row["loader"]][1] / turn["timm"][1] for turn in rounds)
    return rows


def stage(name: str, work: Callable, items: list) -> dict:
    """Measure CPU milliseconds per item, the best of five rounds."""

    def once() -> float:
        start = time.process_time()
        for item in items:
            work(item)
        return (time.process_time() - start) / len(items) * 1e3

    once()
    return dict(stage=name, ms=min(once() for _ in range(5)))


def crop_difference(files: list[bytes]) -> dict:
    """Measure how much the same crops differ, of 255, if uint8 tensors are resampled and not PIL's pictures."""
    random.seed(0)
    crop, off = RandomResizedCropAndInterpolation(SIZE, interpolation="bicubic"), []
    for data in files * 3:
        picture = decode_image(data)
        top, left, height, width = crop.get_params(picture, crop.scale, crop.ratio)
        one = np.asarray(picture.crop((left, top, left + width, top + height)).resize((SIZE, SIZE), Image.BICUBIC))
        tensor = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None, :, top : top + height, left : left + width]
        other = F.interpolate(tensor, crop.size, mode="bicubic", antialias=True)[0].permute(1, 2, 0)
        off.append(np.abs(one.astype(int) - other.numpy()))
    return dict(
        crops=len(off),
        mean=float(np.mean(off)),
        max=int(np.max(off)),
        above_1=float(np.mean([(value > 1).mean() for value in off])),
    )


def measure_stages(files: list[bytes]) -> list[dict]:
    """Measure the CPU time of the parts."""
    transform = create_transform(SIZE, is_training=True, **RECIPE)
    crop, flip, policy, to_tensor, normalise, erase = transform.transforms
    crops, _ = split_transform(transform)
    pictures, tensors = [decode_image(data) for data in files], [decode_tensor(data) for data in files]
    cropped = [crop(picture) for picture in pictures]

    def crop_tensor(image: torch.Tensor) -> torch.Tensor:
        top, left, height, width = crop.get_params(image, crop.scale, crop.ratio)
        image = image[None, :, top : top + height, left : left + width]
        return F.interpolate(image, crop.size, mode="bicubic", antialias=True)

    def read(path: str) -> int:
        return sum(1 for _ in read_shard(path))

    def read_by_webdataset(path: str) -> int:
        with open(path, "rb") as file:
            return sum(1 for _ in group_by_keys(tar_file_expander([{"url": path, "stream": file}])))

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "0.tar")
        with TarWriter(path, encoder=False, mtime=0) as tar:
            for number, data in enumerate(files):
                tar.write({"__key__": f"{number:06d}", "jpg": data, "cls": b"0", "json": b"{}"})
        reading = [
            stage("read from a shard", read, [path] * 20),
            stage("read from a shard, webdataset's parser", read_by_webdataset, [path] * 20),
        ]
    for row in reading:
        row["ms"] /= len(files)
    return [
        *reading,
        stage("decode, PIL", decode_image, files),
        stage("decode, torchvision to tensor", decode_tensor, files),
        stage("crop, PIL", crop, pictures * 5),
        stage("crop, uint8 tensor", crop_tensor, [image for image, _ in tensors] * 5),
        stage("RandAugment, PIL", policy, cropped * 5),
        stage("to tensor, normalise, erase", lambda image: erase(normalise(to_tensor(image))), cropped * 5),
        stage("split: all after decoding", crops, tensors * 5),
    ]


def on_gpu(name: str, work: Callable, images: int) -> dict:
    """Measure GPU and host milliseconds per image of `work`, called again and again without waiting."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start, rounds = time.perf_counter(), 20
    begin.record()
    for _ in range(rounds):
        work()
    end.record()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    return dict(
        stage=name,
        images=images,
        gpu_ms=begin.elapsed_time(end) / rounds / images,
        host_ms=host / rounds / images * 1e3,
    )


def measure_gpu(files: list[bytes], batch: int) -> list[dict]:
    """Measure what the GPU does in place of the cores, per image. If host_ms is as large, launches limit the time."""
    crops, finish = split_transform(create_transform(SIZE, is_training=True, **RECIPE))
    views = [crops(decode_tensor(data)) for data in islice(cycle(files), batch)]
    inputs, targets = [value.pin_memory() for value in crops.collate(views)], torch.zeros(batch, dtype=torch.int64)
    on_device, finish_whole = split_transform(create_transform(SIZE, is_training=True, **RECIPE), True)
    decoded = [on_device.decode(data) for data in islice(cycle(files), max(1, batch // 3))]
    sent, *others = on_device.collate([on_device(image) for image in decoded for _ in range(3)])
    whole = sent.pin_memory(), *others
    planes = inputs[0].permute(0, 3, 1, 2).contiguous().pin_memory()  # (B, 3, H, W)
    erasing = {name: RECIPE[name] for name in ("re_prob", "re_mode")}
    prefetch = PrefetchLoader([(planes, targets.pin_memory())], device=DEVICE, **erasing)
    mixup, images, targets = Mixup(0.8, 1.0, num_classes=10), finish(inputs, DEVICE), targets.to(DEVICE)
    rows = [
        on_gpu("copy, RandAugment, normalise, erase", lambda: finish(inputs, DEVICE), batch),
        on_gpu("copy, crop, RandAugment, normalise, erase", lambda: finish_whole(whole, DEVICE), len(others[0])),
        on_gpu("timm's prefetcher: copy, normalise, erase", lambda: list(prefetch), batch),
        on_gpu("mixup and cutmix, timm's", lambda: mixup(images, targets), batch),
    ]
    # Some files are gray or progressive, which the hardware may leave to the cores.
    encoded = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in islice(cycle(files), batch)]
    crop = crops.crop

    def decode() -> list[torch.Tensor]:
        return torchvision.io.decode_jpeg(encoded, mode="RGB", device=DEVICE)

    def decode_and_crop() -> torch.Tensor:
        crops = []
        for image in decode():
            top, left, height, width = crop.get_params(image, crop.scale, crop.ratio)
            image = image[None, :, top : top + height, left : left + width].float()
            crops.append(F.interpolate(image, crop.size, mode="bicubic", antialias=True))
        return torch.cat(crops).clamp_(0, 255).round_()

    for name, work in (("decode JPEGs", decode), ("decode JPEGs and crop", decode_and_crop)):
        try:
            rows.append(on_gpu(name, work, batch))
        except Exception as error:
            rows.append(dict(stage=name, images=batch, error=describe(error)))
    try:
        pairs = [(image.cpu(), decode_tensor(data)[0]) for image, data in zip(decode(), files, strict=False)]
        rows[-2]["difference"] = float(
            np.mean([(one.float() - other).abs().mean().item() for one, other in pairs if one.shape == other.shape])
        )  # files may ask to be turned
    except Exception:
        pass  # the row says already why
    return rows


def main(argv: list[str] | None = None) -> None:
    global SIZE
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="original JPEG files, in folders or not")
    parser.add_argument(
        "--workers",
        type=int,
        nargs="*",
        default=[1],
        metavar="N",
        help="workers, and cores to run on [1]; no number: stages and GPU alone",
    )
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=15, help="of each loader, after its warm-up [15]")
    parser.add_argument("--min-side", type=int, default=200, help="leave out pictures whose longer side is below [200]")
    parser.add_argument("--size", type=int, default=SIZE, help=f"pixels of the network's input [{SIZE}]")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    SIZE = args.size
    files = files_of(args.folder, args.min_side) if args.folder.is_dir() else []
    if not files:
        raise UserError(f"{args.folder} holds no JPEG file with a side of at least {args.min_side} pixels")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    for workers in args.workers:
        if not 1 <= workers <= len(cores):
            raise UserError(f"--workers {workers}: give 1 to {len(cores)}, the number of cores")
    mend_posterize()
    torch.set_num_threads(1)
    sides = [decode_image(data).size for data in files]
    results = {
        "environment": environment() | dict(torchvision=torchvision.__version__, pillow=PIL.__version__),
        "images": dict(
            files=len(files),
            mean_bytes=float(np.mean([len(data) for data in files])),
            mean_pixels=float(np.mean([width * height for width, height in sides])),
        ),
        "batch_size": args.batch_size,
        "size": SIZE,
        "loaders": [],
    }
    print_environment(results["environment"])
    print("{files} files, on average {mean_bytes:,.0f} bytes and {mean_pixels:,.0f} pixels".format(**results["images"]))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / ("loader.json" if DEVICE.type == "cuda" else "loader_cpu.json")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores[:1])
    results["stages"] = measure_stages(files)
    table("one core", results["stages"], stage=("stage", ""), ms=("ms per image", ".3f"))
    results["crop"] = crop_difference(files)
    print(
        "\ncrops of uint8 tensors differ from PIL's by {mean:.3f} of 255 on average, by more than 1 in {above_1:.1%} "
        "of the pixels, by {max} at most".format(**results["crop"])
    )
    for workers in args.workers:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores[:workers])
        results["loaders"] += measure_loaders(files, workers, args.batch_size, args.seconds)
        path.write_text(json.dumps(results, indent=1) + "\n")
    if args.workers:
        table(
            "loaders",
            results["loaders"],
            loader=("loader", ""),
            workers=("workers", "d"),
            images_per_s=("images/s", ".0f"),
            per_core=("per core", ".0f"),
            per_cpu_second=("per CPU second", ".0f"),
            times_timm=("times timm's", ".2f"),
            error=("", ""),
        )
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    if DEVICE.type == "cuda":
        results["gpu"] = measure_gpu(files, args.batch_size)
        table(
            "on the GPU, ms per image",
            results["gpu"],
            stage=("stage", ""),
            gpu_ms=("GPU", ".4f"),
            host_ms=("host", ".4f"),
            difference=("mean difference of 255", ".2f"),
            error=("", ""),
        )
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    run_cli(main)
