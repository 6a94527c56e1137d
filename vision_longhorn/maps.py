"""Draws maps over an image: how much each token makes a model's states forget, and how strongly it writes to them.

    vision-longhorn maps runs/NAME/best.pt IMAGE --out maps.png

In Python, the functions are those of `vision_longhorn.evaluation.maps`, under the same names.
"""

from collections.abc import Sequence
from typing import Any

from vision_longhorn.command_line.parser import Parser
from vision_longhorn.plots import check_png
from vision_longhorn.settings import Range


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    from vision_longhorn.evaluation import maps  # this takes seconds, and --help does not need it

    return getattr(maps, name)


def main(argv: Sequence[str] | None = None) -> None:
    """Draws what the command line `argv` says, by default the process's own."""
    parser = Parser(description=str(__doc__).splitlines()[0])
    parser.add_argument("checkpoint", help="a run's folder or file, or a folder in the hub's layout")
    parser.add_argument("image", help="image file: JPEG, PNG, WebP or PPM")
    parser.add_argument("--out", default="maps.png", help="the PNG to write [maps.png]")
    blocks = "blocks to show, from 0, or from the last at -1 [all]"
    parser.add_argument("--layers", nargs="+", type=Range(kind=int), metavar="N", help=blocks)
    args = parser.parse_args(argv)
    check_png(args.out, "maps", [args.checkpoint, args.image])

    from timm.data import create_transform

    from vision_longhorn.evaluation.images import read_image
    from vision_longhorn.evaluation.maps import plot_maps, shown, token_maps
    from vision_longhorn.loading import load_model

    loaded = load_model(args.checkpoint)
    tensor = read_image(args.image, create_transform(**loaded.settings))  # (3, H, W)
    maps = token_maps(loaded.model.eval(), tensor[None])
    plot_maps(maps, shown(tensor, loaded.settings), args.out, args.layers)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    from vision_longhorn.command_line.commands import run

    run("maps")
