"""Signals that ask a run to stop, and what its process, its loader's workers and its shell commands do with them."""

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

# Slurm and others send the first two before they take a machine away; the third is Ctrl-C. Windows has no SIGUSR1.
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)]

PARENT = "VISION_LONGHORN_PARENT"  # environment variable in which a process that starts runs gives its own number
LAUNCHER: int | None = None  # when this process has ended, the run stops
COMMANDS: dict[int, int] = {}  # maps each group of processes that runs a shell command to the process that started it


def end_command(group: int) -> None:
    """Kills a group of COMMANDS. Its first process has not been waited for, so no other group can have its number."""
    if COMMANDS.get(group) == os.getpid():  # a forked process must not kill its parent's commands
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS raises the second for the first
            os.killpg(group, signal.SIGKILL)


@atexit.register
def end_commands() -> None:
    """Kills the shell commands of this process that are still running."""
    for group in list(COMMANDS):
        end_command(group)


def note_launcher() -> None:
    """Sets LAUNCHER to the process in PARENT, or to `accelerate launch`, if that is certain to be alive."""
    global LAUNCHER
    if os.environ.get(PARENT, "").isdigit():
        LAUNCHER = int(os.environ[PARENT])
        return
    with contextlib.suppress(psutil.Error):
        parent = os.getppid()
        words = psutil.Process(parent).cmdline()[:4]
        if any(Path(word).name == "accelerate" or "accelerate.commands" in word for word in words):
            LAUNCHER = parent


class StopSignals:
    """Notes SIGTERM, SIGUSR1 and the first Ctrl-C in `received` (before: 0) instead of ending the process.

    A Ctrl-C after that raises KeyboardInterrupt. Threads other than the main one cannot take signals over.
    """

    _received = 0

    @property
    def received(self) -> int:
        # `accelerate launch` of one process dies of a signal, and leaves the process that it started alive.
        if not self._received and LAUNCHER and os.getppid() != LAUNCHER:
            self._received = signal.SIGTERM
        return self._received

    def __enter__(self) -> "StopSignals":
        own = SIGNALS if threading.current_thread() is threading.main_thread() else []
        # A shell lets its background processes ignore Ctrl-C; that stays so.
        self._before = {
            number: signal.signal(number, self._note) for number in own if signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._received:
                raise KeyboardInterrupt("stopped at once; --resume RUN goes on from the last checkpoint")
            if os.environ.get("RANK", "0") == "0":
                print("\nCtrl-C: saving after this update; once more ends it at once", file=sys.stderr, flush=True)
        self._received = number


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Blocks the signals to stop while workers are started. All their threads then have them blocked, also those that
    torch starts before `outlive_signals` runs: one that had not would let a signal end its process."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_signals(_: Any = None) -> None:
    """Lets a loader's worker ignore the signals to stop, which schedulers and terminals send to all processes of a job
    at once, except for a SIGTERM from its parent: until then, the parent still needs it."""
    if not hasattr(signal, "sigwaitinfo"):  # macOS, Windows
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return
    trainer = multiprocessing.parent_process()  # getppid() may be a server that forked the worker
    parent = trainer.pid if trainer else os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def wait() -> None:
        while True:
            news = signal.sigwaitinfo(SIGNALS)
            if news.si_signo == signal.SIGTERM and news.si_pid == parent:
                end_commands()
                os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
