"""Predictions for image files: reads them, tells their classes, and writes those as text, CSV or JSON."""

import argparse
import contextlib
import csv
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
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
from vision_longhorn.data.images import EXTENSIONS
from vision_longhorn.data.walk import NO_FILE, NO_IMAGE, list_others, no_file, walk
from vision_longhorn.devices import make_accelerator
from vision_longhorn.errors import UserError, reason
from vision_longhorn.evaluation.maps import plot_maps, shown, token_maps
from vision_longhorn.files import text_file
from vision_longhorn.loading import Loaded, load_model
from vision_longhorn.models.vlonghorn import VisionLonghorn

Found = list[dict[str, Any]]  # classes of an image: "index", "class", "name", "probability"; the most probable first


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
        raise UserError(f"prediction is for one process, not for {accelerator.num_processes}: start no launcher")
    loaded = load_model(args.source, args.model)
    loaded.check_classes()
    if args.maps and not isinstance(loaded.model, VisionLonghorn):
        kind = type(loaded.model).__name__
        raise UserError(f"--maps is for the models of this package, not for a {kind}: leave it out")
    loaded.model.to(accelerator.device).eval()
    names = readable_names(loaded.class_names, loaded.display_names, loaded.model.num_classes)
    workers = min(args.workers, -(-len(paths) // args.batch_size) - 1)
    samples: Any = _Images(paths, create_transform(**loaded.settings))  # DataLoader wants a Dataset and needs no more
    told, bad = 0, 0
    hidden = not args.out and sys.stdout.isatty()  # the lines themselves show the progress
    with (
        text_file(args.out) if args.out else contextlib.nullcontext(sys.stdout) as file,
        _writer(file, args.format) as write,
        tqdm(total=len(paths), unit="img", disable=hidden or None, dynamic_ncols=True) as bar,
    ):
        for batch in DataLoader(samples, args.batch_size, num_workers=workers, collate_fn=list):
            good = [one for one in batch if not one.error]
            if args.on_bad == "stop":
                good = list(itertools.takewhile(lambda one: not one.error, batch))
            for one, found in zip(good, _tell(loaded, names, accelerator, args, good) if good else ()):
                write(one.path, found)
            for one in batch:
                if one.error and args.on_bad == "stop":
                    raise UserError(f"{one.error}; --on-bad skip goes on without such files")
                if one.error:
                    bar.write(f"skipped: {one.error}", file=sys.stderr)
            told, bad = told + len(good), bad + len(batch) - len(good)
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
        elif os.path.exists(place):
            raise UserError(f"{place} is {NO_FILE}; give a file or a folder")
        else:
            raise UserError(f"there is no file or folder {place}")
    if wrong := next((path for path in found if "\0" in path), None):
        raise UserError(f"standard input has {wrong[:40]!r}, which is no path: give paths as text, one a line")
    if not found:
        raise UserError("standard input named no images: give one path a line")
    return found


def _images_below(folder: str) -> list[str]:
    """Finds the images in a folder and below, and names pictures of other kinds on stderr."""
    inside = walk(folder)
    if not inside.images:
        raise UserError(f"{folder} holds no images ({', '.join(EXTENSIONS)})")
    pictures = Image.registered_extensions()
    others = [
        (os.path.join(folder, name), why)
        for name, why in inside.others
        if why != NO_IMAGE or os.path.splitext(name)[1].lower() in pictures
    ]
    if others:
        print(f"left out: {list_others(others)}", file=sys.stderr)
    return [os.path.join(folder, name) for name in inside.images]


class Sample(NamedTuple):
    """An image file that was read, or could not be."""

    number: str  # in the order of the paths, from 1, with zeros before it
    path: str
    image: torch.Tensor | None  # (3, H, W)
    error: str


class _Images:
    """Dataset of samples."""

    def __init__(self, paths: Sequence[str], transform: Callable[[Any], torch.Tensor]) -> None:
        self.paths, self.transform = paths, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Sample:
        path, number = self.paths[index], str(index + 1).zfill(len(str(len(self))))
        try:
            return Sample(number, path, read_image(path, self.transform), "")
        except UserError as error:
            return Sample(number, path, None, str(error))


def read_image(path: str, transform: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """Reads an image file, as `decode_image` does, into what `transform` makes of it: (3, H, W).

    Raises:
        UserError: It cannot be read.
    """
    try:
        if no_file(path):  # a pipe, say, might never end
            raise DataError(f"it is {NO_FILE}")
        image = decode_image(Path(path).read_bytes())
    except (DataError, OSError) as error:
        raise UserError(f"{path}: {reason(error)}") from error
    return transform(image)


@torch.no_grad()
def _tell(
    loaded: Loaded, names: list[str], accelerator: Accelerator, args: argparse.Namespace, samples: Sequence[Sample]
) -> Iterator[Found]:
    """Gives the classes of each sample, and draws its maps where they are wanted."""
    images = torch.stack([one.image for one in samples if one.image is not None]).to(accelerator.device)
    with accelerator.autocast():
        logits = loaded.model(images)
        maps = token_maps(loaded.model, images) if args.maps else None
    # topk has no defined order of ties.
    scores, classes = logits.float().softmax(1).sort(dim=1, descending=True, stable=True)
    known = loaded.class_names or []
    for i, one in enumerate(samples):
        if maps:
            picture = shown(images[i].cpu(), loaded.settings)
            plot_maps(maps, picture, Path(args.maps, f"{one.number}-{Path(one.path).stem}.png"), sample=i)
        yield [
            {"index": k, "class": known[k] if k < len(known) else None, "name": names[k], "probability": score}
            for k, score in zip(classes[i, : args.top_k].tolist(), scores[i, : args.top_k].tolist(), strict=True)
        ]


@contextlib.contextmanager
def _writer(file: TextIO, kind: str) -> Iterator[Callable[[str, Found], None]]:
    """Gives a function that writes the classes of an image as text, CSV or JSON."""
    table, count = csv.writer(file, lineterminator="\n"), 0

    def write(path: str, found: Found) -> None:
        nonlocal count
        if kind == "text":
            told = ", ".join(f"{one['name']} {100 * one['probability']:.1f} %" for one in found)
            file.write(f"{path}: {told}\n")
        elif kind == "csv":
            for rank, one in enumerate(found, 1):
                name = one["class"] or ""
                table.writerow([path, rank, one["index"], name, one["name"], f"{one['probability']:.6f}"])
        else:
            file.write(",\n" if count else "\n")
            file.write(json.dumps({"image": path, "predictions": found}))
        count += 1
        file.flush()

    if kind == "csv":
        table.writerow(["image", "rank", "index", "class", "name", "probability"])
    elif kind == "json":
        file.write("[")
    yield write
    if kind == "json":
        file.write("\n]\n")
