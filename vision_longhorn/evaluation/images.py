"""Predictions for image files: reads them, tells their classes, and writes those as text, CSV or JSON."""

import argparse
import contextlib
import csv
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from accelerate import Accelerator
from PIL import Image
from timm.data import create_transform
from torch.utils.data import DataLoader
from tqdm import tqdm

from vision_longhorn.class_names import readable_names
from vision_longhorn.data import DataError, decode_image
from vision_longhorn.data.images import EXTENSIONS, too_dark
from vision_longhorn.data.walk import NO_IMAGE, is_notable, list_others, no_file, walk
from vision_longhorn.devices import make_accelerator
from vision_longhorn.errors import UserError, reason
from vision_longhorn.evaluation.maps import plot_maps, shown, token_maps
from vision_longhorn.files import text_file
from vision_longhorn.loading import Loaded, load_model
from vision_longhorn.models.vlonghorn import VisionLonghorn


def predict(args: argparse.Namespace) -> int:
    """Tells the classes of images as `vision_longhorn.predict.parse` has read it from a command line.

    Returns:
        The number of images told.

    Raises:
        UserError: There is no such model or image, or none of the images can be read.
    """
    paths = find_images(args.images)
    accelerator = make_accelerator(args.device, args.precision)
    if accelerator.num_processes > 1:
        raise UserError(
            f"{accelerator.num_processes} processes were started: prediction is for one, start it without a launcher"
        )
    loaded = load_model(args.source, args.model)
    loaded.check_classes()
    teller = Teller(loaded, accelerator, args.top_k, args.maps, len(paths))
    samples = read_images(paths, create_transform(**loaded.settings), args.batch_size, args.workers)
    told, bad, noted = 0, 0, False
    hidden = not args.out and sys.stdout.isatty()  # the lines themselves show the progress
    with (
        text_file(args.out) if args.out else contextlib.nullcontext(sys.stdout) as file,
        Writer(file, args.format) as writer,
        tqdm(total=len(paths), unit="img", disable=hidden or None, dynamic_ncols=True) as bar,
    ):
        for batch in samples:
            good = [one for one in batch if one.image is not None]
            errors = [one for one in batch if one.image is None]
            if errors and args.on_bad == "stop":
                good = list(takewhile(lambda one: one.image is not None, batch))
            for one in good:
                if one.words and not noted:
                    bar.write(f"note: {one.path}: {one.words}", file=sys.stderr)
                    noted = True
            for one, found in zip(good, teller.tell(good)):
                writer.write(one.path, found)
            for one in errors:
                if args.on_bad == "stop":
                    raise UserError(f"{one.path}: {one.words}; --on-bad skip goes on without such files")
                bar.write(f"skipped: {one.path}: {one.words}", file=sys.stderr)
            told, bad = told + len(good), bad + len(errors)
            bar.update(len(batch))
    if bad:
        print(f"{bad} of {len(paths)} images were skipped", file=sys.stderr)
    if not told:
        raise UserError("none of the images can be read")
    written = " and ".join(filter(None, [args.out, args.maps and f"the maps in {args.maps}"]))
    if written:
        print(f"wrote {written}", file=sys.stdout if args.out else sys.stderr)
    return told


def find_images(places: Sequence[str]) -> list[str]:
    """Paths of images, in the order given.

    Args:
        places: Paths of files; of folders, which stand for the images in and below them, by name; "-" for paths from
            standard input, one a line.

    Raises:
        UserError: There is nothing at a path, or no image in a folder.
    """
    found: list[str] = []
    for place in places:
        if place == "-":
            found += _listed_images()
        elif os.path.isdir(place):
            found += _images_below(place)
        elif os.path.isfile(place):
            found.append(place)
        elif os.path.exists(place):
            raise UserError(f"{place} is {no_file(place)}; give a file or a folder")
        else:
            raise UserError(f"there is no file or folder {place}")
    if not found:
        raise UserError("standard input named no images: give one path a line")
    return found


def _listed_images() -> list[str]:
    """Paths from standard input, read as bytes: names of files need not have the terminal's encoding."""
    lines = map(os.fsdecode, getattr(sys.stdin, "buffer", sys.stdin))
    paths = [line.rstrip("\r\n") for line in lines if line.strip()]
    if wrong := next((path for path in paths if "\0" in path), None):
        raise UserError(f"standard input has {wrong[:40]!r}, which is no path: give paths as text, one a line")
    return paths


def _images_below(folder: str) -> list[str]:
    """Images in a folder, then those in the folders in it. Pictures of other kinds are named on stderr."""
    inside = walk(folder)
    if not inside.images:
        raise UserError(f"{folder} holds no images ({', '.join(EXTENSIONS)})")
    pictures = Image.registered_extensions()
    others = [
        (os.path.join(folder, name), why if is_notable(name, why) else f"not of {', '.join(EXTENSIONS)}")
        for name, why in inside.others
        if is_notable(name, why) or why == NO_IMAGE and os.path.splitext(name)[1].lower() in pictures
    ]
    if others:
        print(f"left out: {list_others(others)}", file=sys.stderr)
    inside.images.sort(key=lambda name: [(part.endswith("/"), part) for part in re.findall("[^/]+/?", name)])
    return [os.path.join(folder, name) for name in inside.images]


class Sample(NamedTuple):
    """An image file that was read, or could not be."""

    number: int  # in the order of the paths
    path: str
    image: torch.Tensor | None  # (3, H, W); None where it cannot be read
    words: str  # why it cannot, or a note about one that comes out dark


class _Images:
    """Dataset of `Sample`s."""

    def __init__(self, paths: Sequence[str], transform: Callable[[Any], torch.Tensor]) -> None:
        self.paths, self.transform = paths, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Sample:
        path = self.paths[number]
        try:
            if what := no_file(path):  # a pipe, say, might never end
                return Sample(number, path, None, f"it is {what}")
            data = Path(path).read_bytes()
            image = decode_image(data)
            return Sample(number, path, self.transform(image), too_dark(data, image))
        except (DataError, OSError) as error:
            return Sample(number, path, None, reason(error))


def read_images(
    paths: Sequence[str], transform: Callable[[Any], torch.Tensor], batch_size: int, num_workers: int
) -> DataLoader:
    """Lists of `batch_size` samples in the order of `paths`; upright and in sRGB, as `data.decode_image` reads them."""
    dataset: Any = _Images(paths, transform)  # DataLoader wants a Dataset, and takes anything with its methods
    workers = min(num_workers, -(-len(paths) // batch_size) - 1)
    return DataLoader(dataset, batch_size, num_workers=workers, collate_fn=list)


class Teller:
    """Tells the most probable classes of images, and draws maps of what the model makes of them.

    Args:
        loaded: The model.
        accelerator: Gives device and precision.
        top_k: Classes for each image, at most.
        maps: Folder for the maps; None: they are not drawn.
        total: Number of all images.
    """

    def __init__(self, loaded: Loaded, accelerator: Accelerator, top_k: int, maps: str | None, total: int) -> None:
        if maps and not isinstance(loaded.model, VisionLonghorn):
            kind = type(loaded.model).__name__
            raise UserError(f"--maps is for the models of this package, not for a {kind}: leave it out")
        self.loaded, self.accelerator, self.top_k, self.maps = loaded, accelerator, top_k, maps
        self.digits = len(str(total))
        self.model = loaded.model.to(accelerator.device).eval()
        self.names = readable_names(loaded.class_names, loaded.display_names, self.model.num_classes)

    @torch.no_grad()
    def tell(self, samples: Sequence[Sample]) -> list[list[dict[str, Any]]]:
        """For each sample dicts of "index", "class", "name" and "probability", the most probable first."""
        if not samples:
            return []
        images = torch.stack([one.image for one in samples if one.image is not None])
        on_device = images.to(self.accelerator.device)
        with self.accelerator.autocast():
            logits = self.model(on_device)
            maps = token_maps(self.model, on_device) if self.maps else None
        for number, one in enumerate(samples):
            if self.maps and maps:
                file = Path(self.maps, f"{one.number + 1:0{self.digits}d}-{Path(one.path).stem}.png")
                plot_maps(maps, shown(images[number], self.loaded.settings), file, sample=number)
        # topk has no defined order of ties.
        scores, classes = logits.float().softmax(1).sort(dim=1, descending=True, stable=True)
        rows = zip(scores[:, : self.top_k].tolist(), classes[:, : self.top_k].tolist())
        return [[self.describe(i, score) for i, score in zip(which, row)] for row, which in rows]

    def describe(self, i: int, score: float) -> dict[str, Any]:
        known = self.loaded.class_names or []
        name = known[i] if i < len(known) else None
        return {"index": i, "class": name, "name": self.names[i], "probability": score}


class Writer:
    """Writes the classes of one image after the other as text, CSV or JSON."""

    def __init__(self, file: TextIO, kind: str) -> None:
        self.file, self.kind, self.count = file, kind, 0

    def __enter__(self) -> "Writer":
        if self.kind == "csv":
            self.table = csv.writer(self.file, lineterminator="\n")
            self.table.writerow(["image", "rank", "index", "class", "name", "probability"])
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self.kind == "json" and kind is None:
            self.file.write("\n]\n" if self.count else "[]\n")

    def write(self, path: str, found: list[dict[str, Any]]) -> None:
        """Writes the classes of an image: dicts of "index", "class", "name" and "probability", the best first."""
        if self.kind == "text":
            told = ", ".join(f"{one['name']} {100 * one['probability']:.1f} %" for one in found)
            self.file.write(f"{path}: {told}\n")
        elif self.kind == "csv":
            self.table.writerows(
                [path, rank, one["index"], one["class"] or "", one["name"], f"{one['probability']:.6f}"]
                for rank, one in enumerate(found, 1)
            )
        else:
            self.file.write(",\n" if self.count else "[\n")
            self.file.write(json.dumps({"image": path, "predictions": found}))
        self.count += 1
        self.file.flush()
