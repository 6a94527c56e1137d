"""Predictions for image files: reads them, tells their classes, and writes those as text, CSV or JSON."""

import argparse
import contextlib
import csv
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
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
    if args.maps and not isinstance(loaded.model, VisionLonghorn):
        kind = type(loaded.model).__name__
        raise UserError(f"--maps is for the models of this package, not for a {kind}: leave it out")
    batches = image_loader(
        paths, create_transform(**loaded.settings), args.batch_size, args.workers, accelerator.device.type == "cuda"
    )
    told, bad, noted = 0, 0, False
    bar_hidden = not args.out and sys.stdout.isatty()  # there the lines themselves show the progress
    with (
        text_file(args.out) if args.out else contextlib.nullcontext(sys.stdout) as file,
        Writer(file, args.format) as writer,
        tqdm(total=len(paths), unit="img", disable=bar_hidden or None, dynamic_ncols=True) as bar,
    ):
        teller = Teller(args, paths, loaded, accelerator, writer)
        for batch in batches:
            if batch.notes and not noted:
                noted = True
                number, note = batch.notes[0]
                bar.write(f"note: {paths[number]}: {note}", file=sys.stderr)
            if batch.errors and args.on_bad == "stop":
                number, error = batch.errors[0]
                teller.tell(batch.numbers[: sum(n < number for n in batch.numbers)], batch.images)
                raise UserError(f"{paths[number]}: {error}; --on-bad skip goes on without such files")
            teller.tell(batch.numbers, batch.images)
            for number, error in batch.errors:
                bar.write(f"skipped: {paths[number]}: {error}", file=sys.stderr)
            told, bad = told + len(batch.numbers), bad + len(batch.errors)
            bar.update(len(batch.numbers) + len(batch.errors))
    if bad:
        print(f"{bad} of {len(paths)} images were skipped", file=sys.stderr)
    if not told:
        raise UserError("none of the images can be read")
    written = [args.out] if args.out else []
    written += [f"the maps in {args.maps}"] if args.maps else []
    if written:
        print(f"wrote {' and '.join(written)}", file=sys.stdout if args.out else sys.stderr)
    return told


# ----------------------------------------------------------------------------------------------------- which images


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


class Batch(NamedTuple):
    numbers: list[int]  # of the images that could be read, in the list of all paths
    images: torch.Tensor | None  # (B, 3, H, W); None where there is none
    errors: list[tuple[int, str]]  # (number, text) of each other one
    notes: list[tuple[int, str]]  # (number, text) of images that come out dark


class _Images:
    """Dataset of (number, image (3, H, W) or an error in words, note or "")."""

    def __init__(self, paths: Sequence[str], transform: Callable[[Any], torch.Tensor]) -> None:
        self.paths, self.transform = paths, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor | str, str]:
        try:
            if what := no_file(self.paths[number]):  # a pipe, say, might never end
                return number, f"it is {what}", ""
            data = Path(self.paths[number]).read_bytes()
            image = decode_image(data)
            return number, self.transform(image), too_dark(data, image)
        except OSError as error:
            return number, reason(error), ""
        except DataError as error:
            return number, str(error), ""


def _collate(samples: list[tuple[int, Any, str]]) -> Batch:
    good = {number: image for number, image, _ in samples if not isinstance(image, str)}
    errors = [(number, image) for number, image, _ in samples if isinstance(image, str)]
    notes = [(number, note) for number, _, note in samples if note]
    return Batch(list(good), torch.stack(list(good.values())) if good else None, errors, notes)


def image_loader(
    paths: Sequence[str],
    transform: Callable[[Any], torch.Tensor],
    batch_size: int = 64,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader:
    """`Batch`es of images in the order of `paths`; upright and in sRGB, as `data.decode_image` reads them."""
    dataset: Any = _Images(paths, transform)  # DataLoader wants a Dataset, and takes anything with its methods
    workers = min(num_workers, -(-len(paths) // batch_size) - 1)
    return DataLoader(dataset, batch_size, num_workers=workers, collate_fn=_collate, pin_memory=pin_memory)


# ------------------------------------------------------------------------------------------------------ what they show


class Teller:
    """Runs the model on images, writes their most probable classes, and draws their maps where they are asked for."""

    def __init__(
        self,
        args: argparse.Namespace,
        paths: Sequence[str],
        loaded: Loaded,
        accelerator: Accelerator,
        writer: "Writer",
    ) -> None:
        self.paths, self.settings, self.accelerator, self.writer = paths, loaded.settings, accelerator, writer
        self.model = loaded.model.to(accelerator.device).eval()
        self.class_names = loaded.class_names or []
        self.names = readable_names(loaded.class_names, loaded.display_names, self.model.num_classes)
        self.top_k, self.maps = args.top_k, args.maps

    @torch.no_grad()
    def tell(self, numbers: Sequence[int], images: torch.Tensor | None) -> None:
        """Tells the images (B, 3, H, W), whose paths have these numbers; further images are left out."""
        if images is None or not numbers:
            return
        images = images[: len(numbers)].to(self.accelerator.device, non_blocking=True)
        with self.accelerator.autocast():
            logits = self.model(images)
        # topk has no defined order of ties.
        scores, classes = logits.float().softmax(1).sort(dim=1, descending=True, stable=True)
        k = self.top_k
        for number, row, which in zip(numbers, scores[:, :k].tolist(), classes[:, :k].tolist(), strict=True):
            self.writer.write(
                self.paths[number],
                [
                    {
                        "index": i,
                        "class": self.class_names[i] if i < len(self.class_names) else None,
                        "name": self.names[i],
                        "probability": score,
                    }
                    for i, score in zip(which, row, strict=True)
                ],
            )
        if self.maps:
            self.draw(numbers, images)

    def draw(self, numbers: Sequence[int], images: torch.Tensor) -> None:
        """Draws the maps of each image into NUMBER-NAME.png."""
        with self.accelerator.autocast():
            maps = token_maps(self.model, images)
        digits = len(str(len(self.paths)))
        for sample, (number, image) in enumerate(zip(numbers, images.cpu(), strict=True)):
            file = Path(self.maps, f"{number + 1:0{digits}d}-{Path(self.paths[number]).stem}.png")
            plot_maps(maps, shown(image, self.settings), file, sample=sample)


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
