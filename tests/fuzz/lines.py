"""Command lines drawn from the options that a tool's own parser has."""

import argparse
import random
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from unittest import mock

from tests.fuzz.case import MODULES
from vision_longhorn.command_line.parser import Parser

# Words that somebody might type, or a script of theirs
WORDS = (
    "", " ", "0", "-1", "1", "2", "3", "0.5", "1.5", "1e3", "-0.0", "nan", "inf", "1e309", "none", "true", "cpu",
    "cuda", "auto", "日本", "naïve", "a b", "%s", "{}", "{1..", "[1,2", "a=b", "a=", "=b", "--", "-", "-x", "~", ".",
    "..", "/", "*", "nosuchfile", "nosuchfolder/", "val", "train", "x" * 300, "\udcff", "/dev/null", "pictures",
    "run", "photos",
)  # fmt: skip


class _Found(Exception):
    def __init__(self, parser: Parser) -> None:
        self.parser = parser


def _raise_found(self: Parser, *_: object) -> None:
    raise _Found(self)


@cache
def parser_of(tool: str) -> Parser:
    """The parser of a tool, caught where it is about to read a command line."""
    main = import_module(MODULES[tool]).main
    with mock.patch.object(Parser, "parse_args", _raise_found):
        try:
            main([])
        except _Found as found:
            return found.parser
    raise RuntimeError(f"{tool} has no parser of this package's")


def options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Its options, but for help."""
    return [action for action in parser._actions if action.option_strings and action.dest != "help"]


def subcommands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Its commands, by their words."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def draw_option(action: argparse.Action, rng: random.Random, words: tuple[str, ...] = WORDS) -> list[str]:
    """An option with a value: one of its choices, or whatever `words` has."""
    name = action.option_strings[-1]
    if action.nargs == 0:
        return [name]
    if action.choices and rng.random() < 0.5:
        return [name, str(rng.choice(list(action.choices)))]
    count = rng.choice((1, 1, 2)) if action.nargs in ("+", "*") else 1
    return [name, *(rng.choice(words) for _ in range(count))]


def spoil_line(words: list[str], rng: random.Random) -> Iterator[str]:
    """The words of a command line of which one is missing, stands twice, is another or is misspelt."""
    at = rng.randrange(len(words))
    how = rng.randrange(5)
    for number, word in enumerate(words):
        if number != at:
            yield word
        elif how == 1:
            yield from (word, word)
        elif how == 2:
            yield rng.choice(WORDS)
        elif how == 3 and len(word) > 3:
            cut = rng.randrange(2, len(word))
            yield word[:cut] + word[cut + 1 :]
        elif how == 4:
            yield f"{word}{rng.choice(WORDS)}"
