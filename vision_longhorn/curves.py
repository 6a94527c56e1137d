"""Draws accuracy, loss and learning rate of one or several runs, from their TensorBoard events, as one PNG.

vision-longhorn curves runs/A runs/B --out curves.png
"""

from collections.abc import Sequence

from vision_longhorn.command_line.parser import Parser
from vision_longhorn.plots import check_png, plot_runs


def main(argv: Sequence[str] | None = None) -> None:
    """Draws as the command line `argv` says, by default the process's own."""
    parser = Parser(description=str(__doc__).splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--out", default="curves.png", help="the PNG to write [curves.png]")
    args = parser.parse_args(argv)
    check_png(args.out, "curves", args.runs)
    plot_runs(args.runs, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    from vision_longhorn.command_line.commands import run

    run("curves")
