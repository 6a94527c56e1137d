"""Predicts the most probable classes of images, with a run, a model folder or a pretrained timm model.

    vision-longhorn predict runs/NAME IMAGES...                  # files and folders
    vision-longhorn predict --model resnet50 --pretrained photos --out photos.csv
    find . -name '*.jpg' | vision-longhorn predict runs/NAME - --format json

Images go through the transform with which the model is evaluated.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vision_longhorn.command_line.parser import Parser, add_compute_options
from vision_longhorn.errors import UserError
from vision_longhorn.outputs import check_output
from vision_longhorn.settings import COUNT

FORMATS = ("text", "csv", "json")


def main(argv: Sequence[str] | None = None) -> int:
    """Predicts as the command line `argv` says, by default the process's own. Returns how many images it classified."""
    args = parse(argv)
    from vision_longhorn.evaluation.images import predict  # takes seconds, for which --help need not wait

    return predict(args)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = Parser(
        description=str(__doc__).splitlines()[0],
        usage="%(prog)s [options] MODEL IMAGES... | --model NAME --pretrained [options] IMAGES...",
    )
    parser.add_argument(
        "images",
        metavar="MODEL IMAGES",
        nargs="*",
        help="MODEL, unless --model names one: a run's "
        "folder (its best.pt), checkpoint or a model folder; IMAGES: files, folders, or - for "
        "paths from standard input, one a line",
    )
    parser.add_argument("--model", help="timm name, hf-hub:USER/MODEL or local-dir:FOLDER, with its pretrained weights")
    parser.add_argument(
        "--pretrained", action="store_true", help="implied: --model always takes timm's pretrained weights here"
    )
    parser.add_argument("--top-k", type=COUNT, default=5, help="classes to name for each image [5]")
    parser.add_argument("--format", choices=FORMATS, help="[by the ending of --out, else text]")
    parser.add_argument("--out", metavar="FILE", help="a new file for the results [standard output]")
    parser.add_argument(
        "--maps",
        metavar="FOLDER",
        help="a new folder for a picture of each image: what the model forgets and writes at each of its patches",
    )
    parser.add_argument(
        "--on-bad", choices=("stop", "skip"), default="stop", help="what to do at an image that cannot be read [stop]"
    )
    add_compute_options(parser, batch_size=64)
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
        check_output("--maps", args.maps, others=[args.out] if args.out else [])
    return args


if __name__ == "__main__":
    from vision_longhorn.command_line.commands import run

    run("predict")
