"""Errors that a user can mend."""

import contextlib
from collections.abc import Iterator


class UserError(ValueError):
    """Bad input. The message is one line that names the value and the remedy."""


def one_line(error: BaseException) -> str:
    """Message of an exception without its line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def bad_input(what: str) -> Iterator[None]:
    """Turns a library's complaint about the setting `what` into a `UserError`."""
    try:
        yield
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{what} is not accepted: {one_line(error)}") from error
