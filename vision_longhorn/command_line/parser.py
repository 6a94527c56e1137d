"""What all command lines have in common: options that check what was typed, and errors of one line with exit code 1."""

import argparse
import codecs
import contextlib
import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import vision_longhorn
from vision_longhorn.errors import UserError, nearest, one_line
from vision_longhorn.processes import has_lost_another, is_first_to_fail, is_one_of_several
from vision_longhorn.signals import end_commands, note_launcher

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC))
# How a letter is printed that an output's encoding lacks: a byte of a file's name as it is, others as \u65e5
SHOWN = "vision_longhorn_shown"
STRICT = ("strict", "surrogateescape")  # Python's own ways, which stop there


def _show(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeEncodeError):
        error.end = error.start + 1  # one letter after the other
        with contextlib.suppress(UnicodeEncodeError):
            return codecs.lookup_error("surrogateescape")(error)
    return codecs.lookup_error("backslashreplace")(error)


codecs.register_error(SHOWN, _show)


def run_cli(main: Callable[[], Any], stopped: str = "stopped") -> None:
    """Runs `main()`. A `UserError` or a failure of the system (a full disk, say) prints one line to stderr and exits
    with code 1; Ctrl-C prints `stopped`, or what the KeyboardInterrupt says, and exits with code 130.

    One of several processes exits at once, without the clean-up in which it might wait for the others, so that
    whoever started them learns of its failure. Those that fail only because it has gone leave the word to it.
    """
    note_launcher()
    if hasattr(sys.stdout, "reconfigure"):
        # In a file, too, where else lines would come late or never. A terminal need not know all letters of a path.
        sys.stdout.reconfigure(line_buffering=True, errors=SHOWN if sys.stdout.errors in STRICT else None)
    lost = False
    try:
        main()
        return
    except (UserError, OSError) as error:
        code, message = 1, f"error: {one_line(error)}"
        if isinstance(error, BrokenPipeError) and _has_lost_its_reader(sys.stdout):
            code, message = 141, ""  # as a shell has it for a process that SIGPIPE ended
        elif isinstance(error, OSError) and error.filename is None and error.errno in _FULL and _is_full(sys.stdout):
            message = f"error: standard output cannot be written ({error.strerror})"
    except UnicodeEncodeError as error:  # a name that only the file system takes, given to a library
        code, message = 1, f"error: {error.object!r} is not UTF-8: give it another name"
    except KeyboardInterrupt as interrupt:
        code, message = 130, str(interrupt) or stopped
    except Exception as error:
        if not is_one_of_several():
            raise
        code, message = 1, traceback.format_exc().rstrip()
        if lost := has_lost_another(error):
            reason = re.sub(r"^\[\S*\] ", "", one_line(error)).split(". ")[0]
            message = f"error: another process has ended without a word, killed perhaps, or is out of reach: {reason}"
    several = is_one_of_several()
    if several and not is_first_to_fail() and lost:
        message = ""
    if message:
        print(message, file=sys.stderr, flush=True)
    if several:
        if code != 141:
            sys.stdout.flush()
        end_commands()
        os._exit(code)
    sys.exit(code)


def _is_full(stream: TextIO) -> bool:
    """Whether a stream can still not be written to. (Files tell their names by themselves.)"""
    try:
        stream.write("\n")
        stream.flush()
        return False
    except OSError:
        return True


def _has_lost_its_reader(stream: TextIO) -> bool:
    """Whether whoever read a stream, `head` say, has enough. Then what is left goes nowhere."""
    try:
        stream.write("\n")  # what could not be written before may be gone from the buffer
        stream.flush()
        return False
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return True


class Parser(argparse.ArgumentParser):
    """Argument parser that raises `UserError`, names an option that is near to an unknown one, and takes `_` for `-`.

    Its `synonyms` maps what others call an option, without dashes at the front, to the option.
    """

    def __init__(self, **kwargs: Any) -> None:
        started = Path(sys.argv[0])
        if started.parent == Path(vision_longhorn.__file__).parent:
            kwargs.setdefault("prog", f"python -m vision_longhorn.{started.stem}")
        super().__init__(allow_abbrev=False, **kwargs)
        self.synonyms: dict[str, str] = {}
        self._negative_number_matcher = re.compile(r"-\.?\d")  # argparse takes -1e-3 for an option

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists all options")

    def parse_args(  # type: ignore[override]  # any namespace of argparse's, no other object
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        words = [_with_dashes(word) for word in (sys.argv[1:] if args is None else args)]
        for number, word in enumerate(words):
            if not word or re.fullmatch("--[^=]+=", word):  # most often a variable of a shell that is not set
                before = word[:-1] or (words[number - 1] if number else self.prog)
                self.error(f"{before} is followed by an empty word: give a value, or leave it out")
        found, unknown = self.parse_known_args(words, namespace)
        if unknown and unknown[0].startswith("--"):
            key = unknown[0].partition("=")[0]
            own = (option for option in self._option_string_actions if option not in ("-h", "--help"))
            # Without their dashes, in which all options are alike
            names = {**self.synonyms, **{option.lstrip("-"): option for option in own}}
            near = nearest(key.lstrip("-"), names)
            hint = f"the nearest known one is {names[near[0]]}, " if near else ""
            raise UserError(f"unknown option {key}; {hint}--help lists all")
        if unknown:
            takes_words = any(not action.option_strings for action in self._actions)
            self.error(f"{unknown[0]!r} " + ("is one word too many" if takes_words else "follows no option"))
        return found


class IntermixedParser(Parser):
    """Lets options stand before, between and after words that follow none."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        if self.__dict__.setdefault("within", False):
            return super().parse_known_args(args, namespace)
        self.within = True
        return self.parse_known_intermixed_args(args, namespace)


def _with_dashes(word: str) -> str:
    key, equals, value = word.partition("=")
    return f"{key.replace('_', '-')}{equals}{value}" if key.startswith("--") else word
