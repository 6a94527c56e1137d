"""What a run does with signals that ask it to stop: its training process, its loader's workers, its shell commands."""

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

# Slurm and others send the first two before they take a machine away; the third is Ctrl-C. Windows has no SIGUSR1.
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)]

PARENT = "VISION_LONGHORN_PARENT"  # environment variable by which a process that starts runs tells them its number
LAUNCHER: int | None = None  # number of the process without which this one is to stop

COMMANDS: dict[int, int] = {}  # for each group of processes that runs a shell command, who started it


def end_command(group: int) -> None:
    """Kills a group of COMMANDS. Its first process has not been waited for, so no other group can have its number."""
    # A forked process does not end its parent's, and another thread may just have seen this one end.
    if COMMANDS.get(group) == os.getpid():
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the second is macOS's word for the first
            os.killpg(group, signal.SIGKILL)


@atexit.register
def end_commands() -> None:
    """Kills the shell commands of this process that are still running."""
    for group in list(COMMANDS):
        end_command(group)


def note_launcher() -> None:
    """Notes the LAUNCHER while it is certainly alive: the process in PARENT, or `accelerate launch`."""
    global LAUNCHER
    if os.environ.get(PARENT, "").isdigit():
        LAUNCHER = int(os.environ[PARENT])  # if it has already been killed, the run is to stop as well
        return
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process().parent()
        words = parent.cmdline()[:4] if parent else []
        if parent and any(Path(word).name == "accelerate" or "accelerate.commands" in word for word in words):
            LAUNCHER = parent.pid


class StopSignals:
    """Within this context SIGTERM, SIGUSR1 and the first Ctrl-C do not end the process but stand in `received`
    (before: 0). Ctrl-C after one of them raises KeyboardInterrupt. In a thread other than the main one, signals do what
    they did before.

    `accelerate launch` of one process dies of a signal and leaves the process that it started alive, and so does a
    parent that is killed. So the end of the LAUNCHER counts as a SIGTERM.

    Args:
        run_dir: Name of the run in messages.
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
                raise KeyboardInterrupt(f"stopped at once; --resume {self.run_dir} goes on from the last checkpoint")
            if os.environ.get("RANK", "0") == "0":
                print("\nCtrl-C: saving after this update; once more ends it at once", file=sys.stderr, flush=True)
        self._received = number


def outlive_signals(_: Any = None) -> None:
    """Lets a loader's worker ignore the signals to stop, except a SIGTERM from its parent.

    Schedulers, launchers and terminals signal all processes of a job at once, and the parent still needs its workers.
    """
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
