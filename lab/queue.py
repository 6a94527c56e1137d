"""Runs processes side by side, on several GPUs or on the CPU, until all are done or a signal comes."""

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

from vision_longhorn.cores import cores
from vision_longhorn.errors import UserError
from vision_longhorn.signals import PARENT, SIGNALS, StopSignals

GRACE = 120  # seconds that a process has to save and end once it was asked to
STOPPED = (-signal.SIGTERM, -signal.SIGKILL, *(128 + number for number in SIGNALS))  # exit codes
FOLDER = str(Path(__file__).parents[1])  # where processes find this package


def find_places(device: str, side_by_side: int) -> list[str]:
    """Lists the places where processes run, one at a time: GPUs as CUDA_VISIBLE_DEVICES numbers them, "" for the CPU.
    Raises UserError if CUDA is asked for and there is none."""
    count = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cuda" and not count:
        raise UserError("device is 'cuda', but PyTorch finds no CUDA GPU here: use --device auto or --device cpu")
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return (shown.split(",")[:count] or [""]) * side_by_side


@dataclass
class Job:
    """A process to run.

    Attributes:
        name: Its name in messages.
        start: Called just before it starts; returns the words after `python -m`, and the file for its output.
        done: Called with the exit code after it has ended; returns whether all is well, a text, and jobs to run next.
    """

    name: str
    start: Callable[[], tuple[list[str], Path]]
    done: Callable[[int], tuple[bool, str, list["Job"]]]
    place: str = ""
    process: Any = None
    started: float = 0.0

    def kill(self) -> int:
        """Ends the process and those of its loader at once, and returns its exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


class Queue:
    """Runs jobs. `failed` counts those that fail; the others go on. A signal asks all to save and end."""

    def __init__(self, places: list[str], signals: StopSignals, say: Callable[[str], Any]) -> None:
        self.places, self.signals, self.say = places, signals, say
        self.failed, self.running = 0, list[Job]()

    def run(self, jobs: list[Job]) -> None:
        """Runs the jobs until all are done or a signal comes."""
        self.waiting = list(jobs)
        try:
            while (self.waiting or self.running) and not self.signals.received:
                for job in [job for job in self.running if job.process.poll() is not None]:
                    self._note(job)
                free = list(self.places)
                for job in self.running:
                    free.remove(job.place)
                for place in free:
                    if self.waiting and not self.signals.received:
                        self._start(self.waiting.pop(0), place)
                time.sleep(0.1)
            self._stop()
        except BaseException as error:
            for job in self.running:
                job.kill()
            if isinstance(error, KeyboardInterrupt):  # Ctrl-C for the second time
                raise KeyboardInterrupt("stopped at once; the same command goes on from the last checkpoints") from None
            raise

    def _start(self, job: Job, place: str) -> None:
        words, log = job.start()
        # If each process had as many threads as there are cores, or idle ones spun, they would wait for one another.
        threads = {"OMP_NUM_THREADS": str(max(1, cores() // len(self.places))), "OMP_WAIT_POLICY": "passive"}
        own = {"PYTHONPATH": os.pathsep.join(filter(None, [FOLDER, os.environ.get("PYTHONPATH")]))}
        own |= {"CUDA_VISIBLE_DEVICES": place} if place else {}
        with open(log, "ab") as output:
            job.process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**threads, **os.environ, PARENT: str(os.getpid()), **own},
                start_new_session=True,  # Ctrl-C reaches this process only, which passes it on
            )
        job.place, job.started = place, time.monotonic()
        self.running.append(job)
        self.say(f"start   {job.name}  {f'GPU {place}' if place else 'CPU'}")

    def _note(self, job: Job) -> None:
        self.running.remove(job)
        well, text, following = job.done(job.process.wait())
        self.waiting[:0] = following
        self.failed += not well
        head, line, details = text.partition("\n")
        seconds, left = time.monotonic() - job.started, f"; {len(self.waiting)} to start" if self.waiting else ""
        self.say(f"{'done   ' if well else 'FAILED '} {job.name}  {head}, {seconds:,.0f} s{left}{line}{details}")

    def _stop(self) -> None:
        """Asks what still runs to save and end, and waits for it."""
        if self.running:
            self.say(f"stopping {len(self.running)}: {', '.join(job.name for job in self.running)}")
        for job in self.running:
            job.process.terminate()
        end = time.monotonic() + GRACE
        for job in list(self.running):
            try:
                code = job.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:  # it may wait for a device or a disk that is gone
                code = job.kill()
            if code in STOPPED:
                self.running.remove(job)
            else:  # it was about to end anyway
                self._note(job)
