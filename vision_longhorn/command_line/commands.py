"""Vision Longhorn's tools; `vision-longhorn train --help` explains one."""

import sys
from collections.abc import Sequence
from importlib import import_module

from vision_longhorn import __version__
from vision_longhorn.command_line.parser import Parser, run_cli

# What each word does; it is the name of a module with a `main(argv)`
COMMANDS = {
    "train": "train on shards or a folder of images",
    "eval": "evaluate a checkpoint, or any timm model",
    "predict": "classify images",
    "shards": "make, check and index shards",
    "curves": "draw the curves of runs",
    "export": "write a model as ONNX, .pt2 or model folder",
    "hub": "write a run as a model folder for timm and the hub",
    "maps": "draw what a model's states forget and write",
}


def run(command: str, argv: Sequence[str] | None = None) -> None:
    """Runs a command with the words `argv`, by default the process's own, and ends the process on an error."""
    stopped = "stopped; the same command goes on from here" if command == "shards" else "stopped"
    run_cli(lambda: import_module(f"vision_longhorn.{command}").main(argv), stopped=stopped)


def main() -> None:
    word = sys.argv[1] if len(sys.argv) > 1 else None
    if word in COMMANDS:
        sys.argv[:2] = [f"vision-longhorn {word}"]  # as --help shows it
        return run(word)
    parser = Parser(prog="vision-longhorn", description=str(__doc__).splitlines()[0])
    parser.add_argument("--version", action="version", version=f"vision-longhorn {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for name, about in COMMANDS.items():
        commands.add_parser(name, help=about)
    run_cli(parser.parse_args)
