"""Signals that ask a run to stop, a scheduler's or Ctrl-C: what the training process and its loader's workers do."""

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

# What Slurm and others send before they take a machine away, and Ctrl-C. Windows has no SIGUSR1.
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)]

# Number of the process that started this one, where that is `accelerate launch` or says so in PARENT, and the words of
# the first
LAUNCHER: int | None = None
LAUNCHER_WORDS: list[str] = []
PARENT = "VISION_LONGHORN_PARENT"  # environment variable by which a process that starts runs tells them its number

# Number of a group of processes that runs a shell command, and of the process that started it
COMMANDS: dict[int, int] = {}


def end_command(group: int) -> None:
    """Ends all processes of a group in COMMANDS. The first has not been waited for, so the number is not another's."""
    # Not those of a process that this one was forked from, nor one that another thread has just seen end.
    if COMMANDS.get(group) == os.getpid():
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter where they have ended
            os.killpg(group, signal.SIGKILL)


@atexit.register
def end_commands() -> None:
    """Ends the shell commands that this process has started and not seen end."""
    for group in list(COMMANDS):
        end_command(group)


def note_launcher() -> None:
    """Notes who started this process, a launcher while that is alive for certain."""
    global LAUNCHER, LAUNCHER_WORDS
    if os.environ.get(PARENT, "").isdigit():
        LAUNCHER = int(os.environ[PARENT])  # alive or not: a run whose parent was killed at once ends, too
        return
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process().parent()
        words = parent.cmdline() if parent else []
        if parent and any(Path(word).name == "accelerate" or "accelerate.commands" in word for word in words[:4]):
            LAUNCHER, LAUNCHER_WORDS = parent.pid, words


def launcher_option(name: str) -> str | None:
    """The value that `accelerate launch` was given for its option `name`, written with `_`; None where it was not."""
    for number, word in enumerate(LAUNCHER_WORDS, 1):
        key, equals, value = word.partition("=")
        if key.startswith("--") and key[2:].replace("-", "_") == name:
            return value if equals else " ".join(LAUNCHER_WORDS[number : number + 1])
    return None


class StopSignals:
    """Within this context SIGTERM, SIGUSR1 and the first Ctrl-C do not end the process but stand in `received`
    (before: 0). Ctrl-C after one of them is a KeyboardInterrupt. Only the main thread can have it so; in another one
    they do what they did.

    `accelerate launch` of one process dies of a signal that was meant for it and leaves the process that it started
    alive, as a parent in PARENT does that is killed. So where such a launcher (`note_launcher`) is gone, SIGTERM counts
    as received.

    Args:
        run_dir: What to call the run in messages.
    """

    def __init__(self, run_dir: str | Path = "RUN") -> None:
        self.run_dir, self._received = run_dir, 0

    @property
    def received(self) -> int:
        if not self._received and LAUNCHER and os.getppid() != LAUNCHER:
            self._received = signal.SIGTERM
        return self._received

    def __enter__(self) -> "StopSignals":
        own = SIGNALS if threading.current_thread() is threading.main_thread() else []
        # What is started in the background of a script is not to hear Ctrl-C.
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
                raise KeyboardInterrupt(f"stopped at once; --resume {self.run_dir} goes on from the last checkpoint")
            if os.environ.get("RANK", "0") == "0":
                print("\nCtrl-C: saving after this update; once more ends it at once", file=sys.stderr, flush=True)
        self._received = number


def outlive_signals(_: Any = None) -> None:
    """For a loader's workers: they go on when a scheduler signals all processes of a job, until their parent is done.

    Launchers and terminals, too, signal a training process together with its workers. SIGTERM ends a worker if its
    parent sent it.
    """
    if not hasattr(signal, "sigwaitinfo"):  # macOS, Windows
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return
    trainer = multiprocessing.parent_process()  # not getppid(): that may be a server which forked the worker
    parent = trainer.pid if trainer else os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def wait() -> None:
        while True:
            news = signal.sigwaitinfo(SIGNALS)
            if news.si_signo == signal.SIGTERM and news.si_pid == parent:
                end_commands()
                os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
