"""Errors that a user can fix."""

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator


class UserError(ValueError):
    """Bad input. The message is one line that names the value and the remedy."""


def one_line(error: BaseException) -> str:
    """Puts an exception's message on one line; for an error of the system, the file and what is wrong with it."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return " ".join(text.split()) or type(error).__name__


def reason(error: BaseException) -> str:
    """Says what is wrong, for a message that names the file itself."""
    cause = getattr(error, "reason", None)
    if isinstance(cause, OSError):  # within urllib's
        error = cause
    return getattr(error, "strerror", None) or one_line(error)


def nearest(word: str, known: Iterable[str], n: int = 1) -> list[str]:
    """Finds at most `n` of the words `known` that begin with `word`, or else are spelt much like it, or contain it."""
    known = list(known)
    begun = [name for name in known if word and name.startswith(word)]
    alike = difflib.get_close_matches(word, known, n, cutoff=0.75)  # 0.6 takes dropout for root
    return (begun or alike or [name for name in known if len(word) > 2 and word in name])[:n]


@contextlib.contextmanager
def bad_input(what: str) -> Iterator[None]:
    """Turns a library's complaint about the setting `what` into a `UserError`."""
    try:
        yield
    except Exception as error:  # of any type, as libraries rarely say which
        raise UserError(f"{what} is not accepted: {one_line(error)}") from error


@contextlib.contextmanager
def spelled(**names: str) -> Iterator[None]:
    """Makes errors call fields by the names that the user knows: `spelled(num_samples="--samples")`."""
    try:
        yield
    except UserError as error:
        fields = rf"\b({'|'.join(names)})\b"
        error.args = (re.sub(fields, lambda field: names[field[0]], str(error)),)
        raise
