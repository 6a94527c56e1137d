"""Evaluates a checkpoint, or any timm model, on images: prints top-1, top-5, loss and count, and saves JSON."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vision_longhorn.command_line.parser import Parser, add_compute_options
from vision_longhorn.errors import UserError, spelled
from vision_longhorn.files import read_json
from vision_longhorn.model_arguments import check_names
from vision_longhorn.outputs import check_output
from vision_longhorn.settings import COUNT, parse_pairs


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Evaluates as the command line `argv` says, by default the process's own. Returns the result as it is saved."""
    args = parse(argv)
    from vision_longhorn.evaluation.session import Session  # takes seconds, for which --help need not wait

    with spelled(num_samples="--samples"):
        return Session(args).run()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = Parser(description=str(__doc__).splitlines()[0])
    source = "a run's folder (its best.pt) or checkpoint, a model folder, or with --model a file of bare weights"
    parser.add_argument("run", metavar="RUN", nargs="?", help=source)
    parser.add_argument("--checkpoint", metavar="RUN", help="another way to give RUN")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--ema", action="store_true", default=None, help="averaged weights [if any]")
    weights.add_argument("--raw", dest="ema", action="store_false", default=None, help="weights as trained")
    parser.add_argument("--model", help="timm name [the checkpoint's]")
    parser.add_argument(
        "--model-kwargs", nargs="+", default=[], metavar="KEY=VALUE", help="of the model [the checkpoint's]"
    )
    parser.add_argument("--pretrained", action="store_true", help="timm's pretrained weights of --model")
    parser.add_argument("--data", help="folder of shards or of images, pattern or URL, or 'digits' [the checkpoint's]")
    parser.add_argument("--split", help="part of the data, such as train [the checkpoint's, or val]")
    parser.add_argument("--samples", type=COUNT, help="size of the split, for shards without an index")
    pipe = "run the shell command in --data pipe:COMMAND, or in the checkpoint's data"
    parser.add_argument("--allow-pipe", action="store_true", help=pipe)
    parser.add_argument("--num-classes", type=COUNT, help="of the model [the checkpoint's]")
    paired = "data with other classes: evaluate those that model and data both have, paired by name"
    parser.add_argument("--map-classes", action="store_true", help=paired)
    add_compute_options(parser, batch_size=256)
    parser.add_argument("--out", help="JSON file [eval-SPLIT.json beside the checkpoint]")
    report = "accuracy by class and confusion matrix, as CSV and PNG, into a new folder"
    parser.add_argument("--report", metavar="FOLDER", help=report)
    parser.add_argument("--predictions", metavar="FILE", help="every sample's prediction, as a new CSV file")
    args = parser.parse_args(argv)
    if args.run and args.checkpoint:
        raise UserError(f"{args.run} and --checkpoint {args.checkpoint} both say what to evaluate: give one of them")
    args.run = args.run or args.checkpoint
    args.model_kwargs = parse_pairs(args.model_kwargs)
    check_names(args.model_kwargs, {"pretrained": "--pretrained", "num_classes": "--num-classes"})
    if bool(args.run) == args.pretrained or args.pretrained and not args.model:
        raise UserError("say what to evaluate: a run's folder or a checkpoint, or --model NAME --pretrained")
    if args.pretrained and args.num_classes:
        raise UserError("--num-classes with --pretrained: these weights have classes of their own, leave it out")
    if args.out is not None:
        others = [path for path in (args.predictions, args.report) if path]
        check_output("--out", args.out, (".json",), _is_result, others)
    if args.predictions is not None:
        check_output("--predictions", args.predictions, (".csv",), others=[args.report] if args.report else [])
    if args.report is not None:
        check_output("--report", args.report)
    return args


def _is_result(path: Path) -> bool:
    result = read_json(path)
    return isinstance(result, dict) and {"top1", "top5", "count", "split"} <= result.keys()


if __name__ == "__main__":
    from vision_longhorn.command_line.commands import run

    run("eval")
