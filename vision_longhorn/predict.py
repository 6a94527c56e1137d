"""Tells the classes of images: the most probable ones of each, by a run, a model folder or a pretrained timm model.

    python -m vision_longhorn.predict runs/NAME IMAGES...                  # files and folders
    python -m vision_longhorn.predict --model resnet50 --pretrained photos --out photos.csv
    find . -name '*.jpg' | python -m vision_longhorn.predict runs/NAME - --format json

Images go through the transform by which the model is evaluated.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from vision_longhorn.command_line.parser import Parser
from vision_longhorn.errors import UserError, reason
from vision_longhorn.files import check_new_folder, check_output, text_file
from vision_longhorn.settings import Range

# What takes long to import is imported where it is used: the command line is read before.
if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from vision_longhorn.checkpoint import TimmModel

FORMATS = ("text", "csv", "json")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this module. Returns the number of images that were told."""
    args = parse(argv)
    import torch
    from timm.data import create_transform, resolve_data_config
    from tqdm import tqdm

    from vision_longhorn.class_names import readable_names
    from vision_longhorn.devices import make_accelerator
    from vision_longhorn.models.vlonghorn import VisionLonghorn

    paths = find_images(args.images)
    accelerator = make_accelerator(args.device, args.precision)
    if accelerator.num_processes > 1:
        raise UserError(
            f"{accelerator.num_processes} processes were started: prediction is for one, start it without a launcher"
        )
    model, class_names, display_names = load_classifier(args.source, args.model)
    if args.maps and not isinstance(model, VisionLonghorn):
        raise UserError(f"--maps is for the models of this package, not for a {type(model).__name__}: leave it out")
    model.to(accelerator.device).eval()
    names = readable_names(class_names, display_names, model.num_classes)
    settings = resolve_data_config(model=model)
    batches = image_loader(
        paths, create_transform(**settings), args.batch_size, args.workers, accelerator.device.type == "cuda"
    )
    k = min(args.top_k, model.num_classes)

    told, bad, has_noted = 0, list[str](), False
    # Where the lines themselves are watched, they tell the progress.
    watched = not args.out and sys.stdout.isatty()
    with (
        text_file(args.out) if args.out else contextlib.nullcontext(sys.stdout) as file,
        _Writer(file, args.format) as writer,
        tqdm(total=len(paths), unit="img", disable=True if watched else None, dynamic_ncols=True) as bar,
        torch.no_grad(),
    ):
        for numbers, images, errors, notes in batches:
            for number, note in notes[:1] if not has_noted else ():
                has_noted = True
                bar.write(f"note: {paths[number]}: {note}", file=sys.stderr)
            if errors and args.on_bad == "stop":  # after those before it
                numbers = [number for number in numbers if number < errors[0][0]]
            if numbers:
                images = images[: len(numbers)]
                images = images.to(accelerator.device, non_blocking=True)
                with accelerator.autocast():
                    logits = model(images)
                # Sorted, as topk's order of ties is not defined
                scores, classes = logits.float().softmax(1).sort(dim=1, descending=True, stable=True)
                for number, row, which in zip(numbers, scores[:, :k].tolist(), classes[:, :k].tolist(), strict=True):
                    writer.write(
                        paths[number],
                        [
                            {
                                "index": i,
                                "class": class_names[i] if class_names and i < len(class_names) else None,
                                "name": names[i],
                                "probability": score,
                            }
                            for i, score in zip(which, row, strict=True)
                        ],
                    )
                if args.maps:
                    with accelerator.autocast():
                        _draw_maps(args.maps, model, images, settings, [(n, paths[n]) for n in numbers], len(paths))
                told += len(numbers)
            for number, error in errors:
                if args.on_bad == "stop":
                    raise UserError(f"{paths[number]}: {error}; --on-bad skip goes on without such files")
                bad.append(paths[number])
                bar.write(f"skipped: {paths[number]}: {error}", file=sys.stderr)
            bar.update(len(numbers) + len(errors))
    if bad:
        print(f"{len(bad)} of {len(paths)} images were skipped", file=sys.stderr)
    if not told:
        raise UserError("none of the images can be read")
    written = [args.out] if args.out else []
    written += [f"the maps in {args.maps}"] if args.maps else []
    if written:
        print(f"wrote {' and '.join(written)}", file=sys.stdout if args.out else sys.stderr)
    return told


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line; in brackets what an option stands at where it is not given."""
    parser = Parser(
        description=__doc__.splitlines()[0],
        usage="%(prog)s [options] MODEL IMAGES... | --model NAME --pretrained [options] IMAGES...",
    )
    parser.add_argument(
        "images",
        metavar="MODEL IMAGES",
        nargs="*",
        help="a run's folder (then best.pt), a checkpoint "
        "of it, or a folder in the hub's layout, if there is no --model; and image files, folders of "
        "them, or - for paths from standard input, one a line",
    )
    parser.add_argument("--model", help="timm name, hf-hub:USER/MODEL or local-dir:FOLDER, with its pretrained weights")
    parser.add_argument(
        "--pretrained", action="store_true", help="as in eval.py; --model always means these weights here"
    )
    parser.add_argument("--top-k", type=Range(1, kind=int), default=5, help="classes to name for each image [5]")
    parser.add_argument("--format", choices=FORMATS, help="[by the ending of --out, else text]")
    parser.add_argument("--out", metavar="FILE", help="a new file for the results [standard output]")
    parser.add_argument(
        "--maps",
        metavar="FOLDER",
        help="a new folder for a picture of each image: what the model forgets and writes at each of its patches",
    )
    parser.add_argument(
        "--on-bad", choices=("stop", "skip"), default="stop", help="at an image that cannot be read [stop]"
    )
    parser.add_argument("--batch-size", type=Range(1, kind=int), default=64, help="[64]")
    parser.add_argument(
        "--workers",
        type=Range(0, kind=int),
        default=min(4, os.cpu_count() or 1),
        help="processes that read images [4, or one per core]",
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="[cuda if there is one]")
    parser.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="[bf16 on a GPU, fp16 on one without bf16, fp32 on a CPU]",
    )
    args = parser.parse_args(argv)
    args.source = None if args.model or not args.images else args.images.pop(0)
    if not (args.source or args.model):
        raise UserError("no model: give a run's folder or a checkpoint before the images, or --model NAME --pretrained")
    if not args.images:
        raise UserError(f"no images: give files, folders or - beside the model {args.source or args.model}")
    ending = Path(args.out).suffix[1:].lower() if args.out else ""
    args.format = args.format or (ending if ending in FORMATS else "text")
    if args.out is not None:
        check_output("--out", args.out, (".txt", ".csv", ".json"))
    if args.maps is not None:
        check_new_folder("--maps", args.maps, [args.out] if args.out else [])
    return args


def find_images(places: Sequence[str]) -> list[str]:
    """Paths of images, in the order given.

    Args:
        places: paths of files; of folders, which stand for the images in them and their folders, by name; "-" for paths
            from standard input, one a line.

    Raises:
        UserError: where there is nothing at a path, or no image in a folder.
    """
    from PIL import Image

    from vision_longhorn.data.images import EXTENSIONS
    from vision_longhorn.data.walk import NO_IMAGE, is_notable, list_others, no_file, walk

    found: list[str] = []
    for place in places:
        if place == "-":
            # As bytes, since names of files need not be of the encoding of the terminal
            lines = map(os.fsdecode, getattr(sys.stdin, "buffer", sys.stdin))
            paths = [line.rstrip("\r\n") for line in lines if line.strip()]
            if wrong := next((path for path in paths if "\0" in path), None):
                raise UserError(f"standard input has {wrong[:40]!r}, which is no path: give paths as text, one a line")
            found += paths
        elif os.path.isdir(place):
            inside = walk(place)
            if not inside.images:
                raise UserError(f"{place} holds no images ({', '.join(EXTENSIONS)})")
            pictures = Image.registered_extensions()
            others = [
                (os.path.join(place, name), why if is_notable(name, why) else f"not of {', '.join(EXTENSIONS)}")
                for name, why in inside.others
                if is_notable(name, why) or why == NO_IMAGE and os.path.splitext(name)[1].lower() in pictures
            ]
            if others:
                print(f"left out: {list_others(others)}", file=sys.stderr)
            # The files of each folder before the folders in it
            inside.images.sort(key=lambda name: [(part.endswith("/"), part) for part in re.findall("[^/]+/?", name)])
            found += [os.path.join(place, name) for name in inside.images]
        elif os.path.isfile(place):
            found.append(place)
        elif os.path.exists(place):
            raise UserError(f"{place} is {no_file(place)}; give a file or a folder")
        else:
            raise UserError(f"there is no file or folder {place}")
    if not found:
        raise UserError("standard input named no images: give one path a line")
    return found


def load_classifier(
    source: str | os.PathLike[str] | None = None, name: str | None = None
) -> tuple[TimmModel, list[str] | None, list[str] | None]:
    """A classifier and the names of its classes.

    Args:
        source: a run's folder (then its best.pt), a checkpoint of a run, or as `runs.timm_source` takes it.
        name: instead of it, a timm name, "hf-hub:USER/MODEL" or "local-dir:FOLDER"; pretrained weights are loaded.

    Returns:
        (model, class names, names for people): the model in training mode on the CPU, its `pretrained_cfg` with the
        evaluation transform; lists by index, None where unknown.

    Raises:
        UserError: where there is no such model, or it has no classes.
    """
    from vision_longhorn.checkpoint import create_model
    from vision_longhorn.class_names import checkpoint_names, model_names
    from vision_longhorn.runs import load_run, timm_source

    if name is None and source is not None:
        name = timm_source(source)
    if name is not None:
        model = create_model(name, pretrained=True)
        names = model_names(model, name)
    elif source is not None:
        model, checkpoint = load_run(source)
        names = checkpoint_names(checkpoint)
    else:
        raise UserError("no model: give a run's folder or a checkpoint, or the name of a model")
    if not model.num_classes:
        raise UserError(f"{name or source} has no classifier: give a model with classes")
    return model, *names


class _Images:
    """Dataset of (number, image (3, H, W) or what is wrong with it, a line about one that is used or "")."""

    def __init__(self, paths: Sequence[str], transform: Callable[[Any], torch.Tensor]) -> None:
        self.paths = paths
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor | str, str]:
        from vision_longhorn.data import DataError, decode_image
        from vision_longhorn.data.images import too_dark
        from vision_longhorn.data.walk import no_file

        try:
            if what := no_file(self.paths[number]):  # which might never end
                return number, f"it is {what}", ""
            data = Path(self.paths[number]).read_bytes()
            image = decode_image(data)
            return number, self.transform(image), too_dark(data, image)
        except OSError as error:
            return number, reason(error), ""
        except DataError as error:
            return number, str(error), ""


def image_loader(
    paths: Sequence[str],
    transform: Callable[[Any], torch.Tensor],
    batch_size: int = 64,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader:
    """Batches of images in the order of `paths`; upright and in sRGB, as `data.decode_image` reads them.

    Returns:
        Batches of (numbers: list of B places in `paths`, images (B, 3, H, W), errors: list of (place, text) of what
        could not be read, notes: the same of what comes out dark); images is None where there is none.
    """
    from torch.utils.data import DataLoader

    batches = -(-len(paths) // batch_size)
    dataset: Any = _Images(paths, transform)  # a dataset by its methods
    return DataLoader(
        dataset, batch_size, num_workers=min(num_workers, batches - 1), collate_fn=_collate, pin_memory=pin_memory
    )


def _collate(
    samples: list[tuple[int, Any, str]],
) -> tuple[list[int], torch.Tensor | None, list[tuple[int, str]], list[tuple[int, str]]]:
    import torch

    good = [(number, image) for number, image, _ in samples if not isinstance(image, str)]
    errors = [(number, image) for number, image, _ in samples if isinstance(image, str)]
    notes = [(number, note) for number, _, note in samples if note]
    images = torch.stack([image for _, image in good]) if good else None
    return [number for number, _ in good], images, errors, notes


class _Writer:
    """Writes the results of one image after the other as text, CSV or JSON."""

    def __init__(self, file: TextIO, kind: str) -> None:
        self.file = file
        self.kind = kind
        self.count = 0

    def __enter__(self) -> _Writer:
        if self.kind == "csv":
            self.table = csv.writer(self.file, lineterminator="\n")
            self.table.writerow(["image", "rank", "index", "class", "name", "probability"])
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self.kind == "json" and kind is None:
            self.file.write("\n]\n" if self.count else "[]\n")

    def write(self, path: str, found: list[dict[str, Any]]) -> None:
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


def _draw_maps(
    folder: str, model: Any, images: torch.Tensor, settings: dict[str, Any], chosen: list[tuple[int, str]], total: int
) -> None:
    """Draws the maps of a batch, each into NUMBER-NAME.png of `folder`; `chosen` has (number from 0, path) of each."""
    import torch

    from vision_longhorn.maps import plot_maps, token_maps

    mean, std = (torch.tensor(settings[key])[:, None, None] for key in ("mean", "std"))
    maps = token_maps(model, images)
    for sample, ((number, path), image) in enumerate(zip(chosen, images.cpu(), strict=True)):
        shown = (image * std + mean).clamp(0, 1).permute(1, 2, 0).numpy()  # (H, W, 3)
        plot_maps(maps, shown, Path(folder, f"{number + 1:0{len(str(total))}d}-{Path(path).stem}.png"), sample=sample)


if __name__ == "__main__":
    from vision_longhorn.command_line.commands import run

    run("predict")
