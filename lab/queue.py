"""Runs processes side by side, on several GPUs or on the CPU, until all are done, a signal comes, or time is over."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vision_longhorn.data.loader import cores
from vision_longhorn.errors import UserError
from vision_longhorn.signals import PARENT, SIGNALS, StopSignals

START = 15  # seconds from a process's start to its first update
POLL = 0.1  # seconds between two looks at the processes
GRACE = 120  # seconds that a process has to save and end, once it was asked to
PATIENCE = 600  # seconds to leave a run alone that a process of an earlier, killed study has not let go
FOLDER = str(Path(__file__).parents[1])  # where processes find this package, wherever they start


def find_places(device: str, side_by_side: int) -> list[str]:
    """Where processes run, one at a time each: numbers of GPUs as CUDA_VISIBLE_DEVICES has them, "" for the CPU.

    Args:
        device: "auto", "cuda" or "cpu", as the trainer has it.
        side_by_side: Processes on each GPU that CUDA shows, or on the CPU.

    Raises:
        UserError: Where CUDA is asked for and there is none.
    """
    count = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cuda" and not count:
        raise UserError("device is 'cuda', but PyTorch finds no CUDA GPU here: use --device auto or --device cpu")
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return (shown.split(",")[:count] or [""]) * side_by_side


@dataclass
class Job:
    """A process to run.

    Attributes:
        name: For messages.
        start: Called when it is about to start; gives the words after `python -m`, and the file for its output.
        seconds: Gives how long the rest of it takes alone on its device, by estimate; None: unknown.
        done: Called with the exit code when it has ended by itself; gives whether all is well, a text, and jobs that
            come next, before all others.
        held: Gives why it cannot start yet, or "".
    """

    name: str
    start: Callable[[], tuple[list[str], Path]]
    seconds: Callable[[], float | None]
    done: Callable[[int], tuple[bool, str, list["Job"]]]
    held: Callable[[], str] = lambda: ""


class Queue:
    """Runs jobs. A failing one stops no other.

    Args:
        places: Where processes run, see `find_places`.
        signals: When one has come, what still runs is asked to save and end.
        deadline: Time of `time.monotonic()` at which it is asked, too; None: never.
        say: Takes a line.

    Attributes:
        failed, left: How many jobs failed, and how many are left undone.
    """

    def __init__(
        self, places: list[str], signals: StopSignals, deadline: float | None, say: Callable[[str], Any] = print
    ) -> None:
        self.places, self.signals, self.deadline, self.say = places, signals, deadline, say
        self.beside = places.count(places[0])  # processes that share a device
        self.failed, self.left = 0, 0
        self.running: list[tuple[Job, str, subprocess.Popen, float]] = []

    def run(self, jobs: list[Job]) -> None:
        """Runs the jobs, as far as they can be run."""
        self.waiting, self.begun, self.told = list(jobs), time.monotonic(), False
        try:
            while (self.waiting or self.running) and not self.signals.received and self._time_left() > 0:
                self._reap()
                self._start()
                if not self.running and not any(map(self._fits, self.waiting)):
                    break
                time.sleep(POLL)
            self._stop()
        except BaseException as error:
            for _, _, process, _ in self.running:
                _kill(process)
            if isinstance(error, KeyboardInterrupt):  # Ctrl-C for the second time
                raise KeyboardInterrupt("stopped at once; the same command goes on from the last checkpoints") from None
            raise
        self.left += len(self.waiting)

    def _time_left(self) -> float:
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def _fits(self, job: Job) -> bool:
        """Whether the job would end in time beside as many as share a device."""
        seconds = None if self.deadline is None else job.seconds()
        return seconds is None or START + seconds * self.beside < self._time_left()

    def _start(self) -> None:
        """Starts what can start on the places that are free."""
        free = list(self.places)
        for _, place, _, _ in self.running:
            free.remove(place)
        patient = time.monotonic() < self.begun + PATIENCE
        for place in free:
            fitting = [job for job in self.waiting if self._fits(job)]
            job = next((job for job in fitting if not (patient and job.held())), None)
            if job is None:
                if fitting and not self.running and not self.told:
                    self.say(f"waiting: {fitting[0].held()}")
                    self.told = True
                return
            self.waiting.remove(job)
            seconds = job.seconds()
            words, log = job.start()
            # Threads of their own, as many as cores, would wait for those of the others.
            own = {"OMP_NUM_THREADS": str(max(1, cores() // len(self.places))), **os.environ, PARENT: str(os.getpid())}
            own |= {"PYTHONPATH": os.pathsep.join(filter(None, [FOLDER, os.environ.get("PYTHONPATH")]))}
            own |= {"CUDA_VISIBLE_DEVICES": place} if place else {}
            with open(log, "ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=own,
                    start_new_session=True,  # Ctrl-C is for this process, which hands it on
                )
            self.running.append((job, place, process, time.monotonic()))
            about = "" if seconds is None else f", about {START + seconds * self.beside:,.0f} s"
            self.say(f"start   {job.name}  {f'GPU {place}' if place else 'CPU'}{about}")

    def _reap(self) -> None:
        """Takes note of what has ended."""
        for child in list(self.running):
            job, _, process, started = child
            code = process.poll()
            if code is None:
                continue
            self.running.remove(child)
            well, text, following = job.done(code)
            self.waiting[:0] = following
            self.failed += not well
            head, line, details = text.partition("\n")
            left = f"; {len(self.waiting)} to start" if self.waiting else ""
            self.say(
                f"{'done   ' if well else 'FAILED '} {job.name}  {head}, "
                f"{time.monotonic() - started:,.0f} s{left}{line}{details}"
            )

    def _stop(self) -> None:
        """Asks what still runs to save and end, and waits for it."""
        if not self.running:
            return
        self.say(f"stopping {len(self.running)}: {', '.join(job.name for job, *_ in self.running)}")
        for _, _, process, _ in self.running:
            process.terminate()
        end = time.monotonic() + GRACE
        for job, _, process, _ in self.running:
            try:
                code = process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = _kill(process)
            if code in (-signal.SIGTERM, -signal.SIGKILL, *(128 + number for number in SIGNALS)):
                self.left += 1
            else:  # it was about to end anyway
                self.failed += not job.done(code)[0]
        self.running = []


def _kill(process: subprocess.Popen) -> int:
    """Ends a process with its loader's at once; its exit code."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
