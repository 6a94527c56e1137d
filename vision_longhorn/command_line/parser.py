"""What all command lines share: options that check what was typed, and errors of one line with exit code 1."""

import argparse
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from vision_longhorn.cores import share_of_cores
from vision_longhorn.errors import UserError, nearest, one_line
from vision_longhorn.settings import COUNT, Range
from vision_longhorn.signals import end_commands, note_launcher


def run_cli(main: Callable[[], Any], stopped: str = "stopped") -> None:
    """Runs `main()`, and ends the process where it fails.

    A `UserError` or a failure of the system, such as a full disk, prints one line to stderr; the exit code is 1. Ctrl-C
    prints `stopped`, or the text of the KeyboardInterrupt; the code is 130. If the reader of standard output has gone
    (`| head`), nothing is printed, and the code is 141, as in a shell.
    """
    note_launcher()
    if hasattr(sys.stdout, "reconfigure"):
        # Each line appears at once, in a file too. A path may have letters that the terminal's encoding lacks. UTF-8
        # lacks only the bytes of names in other encodings, which go out as they are.
        is_utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        sys.stdout.reconfigure(line_buffering=True, errors="surrogateescape" if is_utf8 else "backslashreplace")
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "1")
    try:
        return main()
    except (UserError, OSError) as error:
        code, message = 1, f"error: {one_line(error)}"
        if isinstance(error, OSError) and error.filename is None and _output_fails():
            message = f"error: standard output cannot be written ({error.strerror})"
            if isinstance(error, BrokenPipeError):
                code, message = 141, ""
    except UnicodeEncodeError as error:  # a library was given a file's name that is not UTF-8
        code, message = 1, f"error: {error.object!r} is not UTF-8: give it another name"
    except KeyboardInterrupt as interrupt:
        code, message = 130, str(interrupt) or stopped
    except Exception as error:
        if not several:
            raise
        code, message = 1, traceback.format_exc().rstrip()
        if type(error).__name__ in ("DistBackendError", "DistNetworkError") or "gloo/transport" in str(error):
            why = re.sub(r"^\[\S*\] ", "", one_line(error)).split(". ")[0]
            message = f"error: another process has ended (killed, if it printed no error) or cannot be reached: {why}"
            time.sleep(5)  # a launcher ends this process meanwhile, so that only the one that failed speaks
    if message:
        print(message, file=sys.stderr, flush=True)
    if several:  # a clean-up might wait for the other processes, and the launcher would not learn of the failure
        sys.stdout.flush()
        end_commands()
        os._exit(code)
    sys.exit(code)


def _output_fails() -> bool:
    """Tells whether standard output cannot be written. If so, what is left to print is discarded."""
    try:
        sys.stdout.write("\n")  # the buffer may have lost what could not be written
        sys.stdout.flush()
        return False
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True


class Parser(argparse.ArgumentParser):
    """Argument parser that raises `UserError`, names the option nearest to an unknown one, and takes `_` for `-`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # argparse takes -1e-3 for an option

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists all options")

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        words = sys.argv[1:] if args is None else args
        words = [re.sub("^--[^=]+", lambda key: key[0].replace("_", "-"), word) for word in words]
        for before, word in zip([self.prog, *words], words):
            if not word or re.fullmatch("--[^=]+=", word):  # most often a shell variable that is not set
                self.error(f"{word[:-1] or before} is followed by an empty word: give a value, or leave it out")
        positional = [action for action in self._actions if not action.option_strings]
        has_commands = any(action.nargs == argparse.PARSER for action in positional)
        parse = self.parse_known_args if has_commands else self.parse_known_intermixed_args
        found, unknown = parse(words)
        if unknown and unknown[0].startswith("--"):
            option = unknown[0].partition("=")[0]
            names = {name.lstrip("-"): name for name in self._option_string_actions}
            near = nearest(option.lstrip("-"), names)
            self.error(f"unknown option {option}" + (f"; the nearest known one is {names[near[0]]}" if near else ""))
        if unknown:
            self.error(f"{unknown[0]!r} " + ("is one word too many" if positional else "follows no option"))
        return found


def add_compute_options(parser: argparse.ArgumentParser, batch_size: int) -> None:
    """Adds the options that say how a model computes; `batch_size` is the default of --batch-size."""
    about = f"images at a time, per process [{batch_size}]"
    parser.add_argument("--batch-size", type=COUNT, default=batch_size, help=about)
    workers, about = share_of_cores(4), "processes that read images, per process that computes [4 at most]"
    parser.add_argument("--workers", type=Range(0, kind=int), default=workers, help=about)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="[cuda if there is one]")
    kinds, about = ("auto", "bf16", "fp16", "fp32"), "[bf16 on a GPU, fp16 on one without bf16, fp32 on a CPU]"
    parser.add_argument("--precision", choices=kinds, default="auto", help=about)
