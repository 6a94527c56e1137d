"""A function in a process of its own, forked from this one: its output, its exit code, and whether it ends in time."""

import contextlib
import ctypes
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRACE = 3.0  # seconds that are left to a process for ending once it was asked to


@dataclass(frozen=True)
class Result:
    """The end of a process.

    Attributes:
        code: Its exit code, the negative number of the signal that ended it, or None where it had to be ended.
        out, err: What it printed. Bytes that are no UTF-8 are kept as surrogates.
        seconds: What it took.
        left: Whether processes of it were still there when it had ended.
    """

    code: int | None
    out: str
    err: str
    seconds: float
    left: bool = False

    @property
    def said(self) -> str:
        """All that it printed."""
        return self.out + self.err


def forked(
    function: Callable[[], Any],
    folder: Path,
    limit: float,
    stdin: bytes = b"",
    encoding: str = "utf-8",
    environment: Mapping[str, str | None] | None = None,
) -> Result:
    """Calls `function` in a forked process.

    Args:
        function: What it does. It may leave by SystemExit, as a command does.
        folder: Its working folder, beside which the files of its output lie.
        limit: Seconds after which it is ended.
        stdin: What it can read.
        encoding: Of its streams, as PYTHONIOENCODING would say it.
        environment: Variables that are others in it, None for one that is missing there.
    """
    names = {stream: folder.with_name(f"{folder.name}.{stream}") for stream in ("stdin", "stdout", "stderr")}
    names["stdin"].write_bytes(stdin)
    start = time.monotonic()
    pid = os.fork()
    if not pid:
        _be_child(function, folder, names, encoding, environment or {})
    code = _wait(pid, limit)
    seconds = time.monotonic() - start
    left = _has_group(pid)
    if left:  # a worker of a loader, say, that is on its way out
        time.sleep(GRACE / 3)
        left = _has_group(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    out, err = (names[stream].read_bytes().decode("utf-8", "surrogateescape") for stream in ("stdout", "stderr"))
    return Result(code, out, err, seconds, left)


def _wait(pid: int, limit: float) -> int | None:
    end, asked = time.monotonic() + limit, False
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return None if asked else os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL if asked else signal.SIGTERM)
            end, asked = time.monotonic() + GRACE, True
        time.sleep(0.005)


def _has_group(group: int) -> bool:
    """Whether a process of a group is alive. One that has ended, and that nobody has waited for, is not."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == group and fields[0] != "Z":
                    return True
    return False


def _be_child(
    function: Callable[[], Any],
    folder: Path,
    names: Mapping[str, Path],
    encoding: str,
    environment: Mapping[str, str | None],
) -> None:
    code = 70
    try:
        os.setsid()
        # It ends with the process that has started it.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        for number, stream in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(os.open(names[stream], flags if number else os.O_RDONLY, 0o644), number)
        # As the interpreter sets them up: strict, but for errors, which are always told.
        sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False), encoding=encoding)
        sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), encoding=encoding)
        sys.stderr = io.TextIOWrapper(
            open(2, "wb", closefd=False), encoding=encoding, errors="backslashreplace", line_buffering=True
        )
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        os.chdir(folder)
        for key, value in environment.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        code = _called(function)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _called(function: Callable[[], Any]) -> int:
    """The exit code that the interpreter would end with."""
    try:
        function()
        code = 0
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
            code = 1
        else:
            code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads, as at the end of a process
    return code
