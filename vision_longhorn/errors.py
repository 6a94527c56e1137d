"""Errors that a user can mend."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class UserError(ValueError):
    """Bad input. The message is one line that names the value and the remedy."""


def one_line(error: BaseException) -> str:
    """Message of an exception without its line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def nearest(word: str, known: Iterable[str], n: int = 1) -> list[str]:
    """Those of the words `known`, `n` at most, that are spelt much like `word`, or else begin with it."""
    known = list(known)
    begun = [name for name in known if word and name.startswith(word)]
    return difflib.get_close_matches(word, known, n, cutoff=0.75) or begun[:n]  # 0.6 takes dropout for root


@contextlib.contextmanager
def bad_input(what: str) -> Iterator[None]:
    """Turns a library's complaint about the setting `what` into a `UserError`."""
    try:
        yield
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{what} is not accepted: {one_line(error)}") from error
