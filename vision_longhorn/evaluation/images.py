"""Predicts the classes of image files, and writes them as text, CSV or JSON."""

import argparse
import contextlib
import csv
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from timm.data import create_transform
from torch.utils.data import DataLoader
from tqdm import tqdm

from vision_longhorn.class_names import readable_names
from vision_longhorn.data import DataError, decode_image
from vision_longhorn.data.images import EXTENSIONS, warn_if_dark
from vision_longhorn.data.walk import NO_FILE, list_others, no_file, walk
from vision_longhorn.devices import make_accelerator
from vision_longhorn.errors import UserError, reason
from vision_longhorn.evaluation.maps import plot_maps, shown, token_maps
from vision_longhorn.files import text_file
from vision_longhorn.loading import Loaded, load_model


def predict(args: argparse.Namespace) -> int:
    """Predicts the classes of images, with the command line `args` from `vision_longhorn.predict.parse`.

    Returns:
        The number of images classified.

    Raises:
        UserError: There is no such model or image, or none of the images can be read.
    """
    paths = find_images(args.images)
    accelerator = make_accelerator(args.device, args.precision)
    if accelerator.num_processes > 1:
        raise UserError(f"prediction runs in one process, not in {accelerator.num_processes}: use no launcher")
    loaded = load_model(args.source, args.model)
    loaded.check_classes()
    loaded.model.to(accelerator.device).eval()
    count = 0
    with text_file(args.out) if args.out else contextlib.nullcontext(sys.stdout) as file:
        table = csv.writer(file, lineterminator="\n")
        if args.format == "csv":
            table.writerow(["image", "rank", "index", "class", "name", "probability"])
        for path, found in _results(args, paths, loaded, accelerator):
            if args.format == "text":
                words = ", ".join(f"{one['name']} {100 * one['probability']:.1f} %" for one in found)
                file.write(f"{path}: {words}\n")
            elif args.format == "csv":
                for rank, one in enumerate(found, 1):
                    share = f"{one['probability']:.6f}"
                    table.writerow([path, rank, one["index"], one["class"] or "", one["name"], share])
            else:
                file.write((",\n" if count else "[\n") + json.dumps({"image": path, "predictions": found}))
            count += 1
        if not count:
            raise UserError("none of the images can be read: the lines above say why")
        if args.format == "json":
            file.write("\n]\n")
    written = " and ".join(filter(None, [args.out, args.maps and f"the maps in {args.maps}"]))
    if written:
        print(f"wrote {written}", file=sys.stdout if args.out else sys.stderr)
    return count


@torch.no_grad()
def _results(
    args: argparse.Namespace, paths: list[str], loaded: Loaded, accelerator: Accelerator
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the path and the classes, the most probable first, of each image, and draws its maps if they are asked
    for."""
    names = readable_names(loaded.class_names, loaded.display_names, loaded.model.num_classes)
    known = loaded.class_names or []
    workers = min(args.workers, -(-len(paths) // args.batch_size) - 1)
    samples: Any = _Images(paths, create_transform(**loaded.settings))  # DataLoader wants a Dataset and needs no more
    bad, count = 0, 0
    batches = DataLoader(samples, args.batch_size, num_workers=workers, collate_fn=list)
    for batch in tqdm(batches, unit="batch", dynamic_ncols=True, disable=None if args.out else True):
        errors = [image for _, image in batch if isinstance(image, str)]
        good = [(path, image) for path, image in batch if not isinstance(image, str)]
        if errors and args.on_bad == "stop":
            good = list(itertools.takewhile(lambda one: not isinstance(one[1], str), batch))
        if good:
            images = torch.stack([image for _, image in good]).to(accelerator.device)
            with accelerator.autocast():
                logits = loaded.model(images)
                maps = token_maps(loaded.model, images) if args.maps else None
            # topk has no defined order of ties.
            scores, classes = logits.float().softmax(1).sort(dim=1, descending=True, stable=True)
        for i, (path, image) in enumerate(good):
            count += 1
            if maps:
                out = Path(args.maps, f"{str(count).zfill(len(str(len(paths))))}-{Path(path).stem}.png")
                plot_maps(maps, shown(image, loaded.settings), out, sample=i)
            found = []
            for k, score in zip(classes[i, : args.top_k].tolist(), scores[i, : args.top_k].tolist(), strict=True):
                label = known[k] if k < len(known) else None
                found.append({"index": k, "class": label, "name": names[k], "probability": score})
            yield path, found
        if errors and args.on_bad == "stop":
            raise UserError(f"{errors[0]}; --on-bad skip goes on without such files")
        for error in errors:
            tqdm.write(f"skipped: {error}", file=sys.stderr)
        bad += len(errors)
    if bad:
        print(f"{bad} of {len(paths)} images were skipped", file=sys.stderr)


def find_images(places: Sequence[str]) -> list[str]:
    """Finds the paths of images, in the order given.

    Args:
        places: Paths of files; of folders, which stand for the images in and below them; "-" for paths from standard
            input, one a line.

    Raises:
        UserError: There is nothing at a path, or no image in a folder.
    """
    found: list[str] = []
    for place in places:
        if place == "-":
            # As bytes: names of files need not have the terminal's encoding.
            lines = map(os.fsdecode, getattr(sys.stdin, "buffer", sys.stdin))
            found += [line.rstrip("\r\n") for line in lines if line.strip()]
        elif os.path.isdir(place):
            found += _images_below(place)
        elif os.path.isfile(place):
            found.append(place)
        else:
            raise UserError(f"{place} is no file or folder: check the path")
    if not found:
        raise UserError("standard input named no images: give one path a line")
    return found


def _images_below(folder: str) -> list[str]:
    """Finds the images in a folder and below, and names what else is there on stderr."""
    inside = walk(folder)
    if not inside.images:
        raise UserError(f"{folder} holds no images ({', '.join(EXTENSIONS)})")
    others = [(os.path.join(folder, name), why) for name, why in inside.others]
    if others:
        print(f"left out: {list_others(others)}", file=sys.stderr)
    return [os.path.join(folder, name) for name in inside.images]


class _Images:
    """Dataset of paths with their images (3, H, W) or, in place of one that cannot be read, the error."""

    def __init__(self, paths: Sequence[str], transform: Callable[[Any], torch.Tensor]) -> None:
        self.paths, self.transform = paths, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[str, torch.Tensor | str]:
        try:
            return self.paths[index], read_image(self.paths[index], self.transform)
        except UserError as error:
            return self.paths[index], str(error)


def read_image(path: str, transform: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """Reads an image file by `decode_image`, and returns what `transform` makes of it: (3, H, W).

    Raises:
        UserError: It cannot be read.
    """
    try:
        if no_file(path):  # a pipe, say, might never end
            raise DataError(f"it is {NO_FILE}")
        data = Path(path).read_bytes()
        image = decode_image(data)
    except (OSError, ValueError) as error:  # ValueError: a DataError, or a path with a null byte
        raise UserError(f"{path}: {reason(error)}") from error
    warn_if_dark(data, image, path)
    try:
        return transform(image)
    except MemoryError:
        size = f"{image.width} x {image.height} pixels"
        raise UserError(f"{path}: {size} do not fit into memory once their shorter side is enlarged: crop it") from None
