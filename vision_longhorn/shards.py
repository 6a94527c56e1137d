"""Make, check and index shards: `vision-longhorn shards --help`.

In Python, the functions are those of `vision_longhorn.data.sharding`, which this module has under the same names.
"""

import argparse
import signal
import threading
from collections.abc import Sequence
from typing import Any

from vision_longhorn.command_line.parser import Parser
from vision_longhorn.settings import COUNT, Range


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    from vision_longhorn.data import sharding  # imports torch, for which --help need not wait

    return getattr(sharding, name)


def _parser() -> Parser:
    parser = Parser(description=__doc__.split(":")[0] + ".")
    commands: Any = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    making = argparse.ArgumentParser(add_help=False)
    making.add_argument("--shard-size", type=COUNT, default=1000, help="images per shard at most [1000]")
    making.add_argument("--seed", type=Range(0, kind=int), default=0, help="seed of the images' order [0]")
    making.add_argument(
        "--on-bad",
        choices=("stop", "skip"),
        default="stop",
        help="what to do at an image that cannot be decoded [stop]",
    )
    making.add_argument(
        "--max-side",
        type=COUNT,
        help="scale larger images to this side, and make turned ones and those with a colour profile upright and sRGB, "
        "for faster training",
    )

    out = "folder for the shards and their index"
    folder = commands.add_parser("imagefolder", parents=[making], help="from a folder of one folder per class")
    folder.add_argument("src", metavar="SRC", help="folder with CLASS/IMAGE.jpg, or train/CLASS/IMAGE.jpg and val/...")
    folder.add_argument("out", metavar="OUT", help=out)
    folder.add_argument("--split", help="name of the split, where SRC holds classes [train]")

    imagenet = commands.add_parser("imagenet", parents=[making], help="from the ILSVRC-2012 tars as downloaded")
    imagenet.add_argument("train_tar", metavar="TRAIN_TAR", help="ILSVRC2012_img_train.tar, or - for validation only")
    imagenet.add_argument("val_tar", metavar="VAL_TAR", help="ILSVRC2012_img_val.tar, or - for training only")
    imagenet.add_argument(
        "truth",
        metavar="GROUND_TRUTH",
        help="ILSVRC2012_devkit_t12.tar.gz, its folder, or one WordNet id a line; - without VAL_TAR",
    )
    imagenet.add_argument("out", metavar="OUT", help=out)

    demo = commands.add_parser("digits", help="scikit-learn's handwritten digits, the built-in demo set")
    demo.add_argument("out", metavar="OUT", help=out)

    check = commands.add_parser("verify", help="read shards again and compare them with their index")
    check.add_argument("out", metavar="DIR", help="folder of shards")
    check.add_argument("--full", action="store_true", help="decode every image")

    count = commands.add_parser("index", help="write the index of shards made by others")
    count.add_argument("out", metavar="DIR", help="folder of shards")
    count.add_argument("--classes", help="text file, the name of class n on line n + 1")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv`, by default the process's own. Raises UserError."""
    args = _parser().parse_args(argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no half-written shard is left
    from vision_longhorn.data.sharding import carry_out

    carry_out(args)


if __name__ == "__main__":
    from vision_longhorn.command_line.commands import run

    run("shards")
