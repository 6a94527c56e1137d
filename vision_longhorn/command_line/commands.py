"""The command `vision-longhorn`, one word for each tool: `vision-longhorn train --help`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from vision_longhorn import __version__
from vision_longhorn.command_line.parser import Parser, run_cli

# Word: module with a `main(argv)`, what it does, what is said after Ctrl-C
COMMANDS = {
    "train": ("train", "train on shards or a folder of images", "stopped"),
    "eval": ("eval", "evaluate a checkpoint, or any timm model", "stopped"),
    "predict": ("predict", "images to class names", "stopped"),
    "shards": ("shards", "make, check and index shards", "stopped; the same command goes on from here"),
    "curves": ("curves", "draw the curves of runs", "stopped"),
    "export": ("export", "a run as ONNX, AOTInductor package or model folder", "stopped"),
    "hub": ("hub", "a run as a model folder for timm, or on the Hugging Face hub", "stopped"),
    "maps": ("maps", "what a model's states forget and write, as pictures", "stopped"),
}


def run(command: str, argv: Sequence[str] | None = None) -> None:
    """Runs one of the commands with the words `argv` (default: the process's own), and ends the process on an error."""
    module, _, stopped = COMMANDS[command]
    run_cli(lambda: import_module(f"vision_longhorn.{module}").main(argv), stopped=stopped)


def main() -> None:
    """`vision-longhorn COMMAND ...` and `python -m vision_longhorn COMMAND ...`."""
    word = sys.argv[1] if len(sys.argv) > 1 else None
    if word in COMMANDS:
        sys.argv[:2] = [f"vision-longhorn {word}"]  # as --help shows it
        return run(word)
    parser = Parser(prog="vision-longhorn", description=str(__doc__).splitlines()[0])
    parser.add_argument("--version", action="version", version=f"vision-longhorn {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for name, (_, about, _) in COMMANDS.items():
        commands.add_parser(name, help=about)
    run_cli(parser.parse_args)


if __name__ == "__main__":
    main()
