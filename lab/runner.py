"""Runs commands side by side, on several devices, until they are done, a signal comes, or time is over."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vision_longhorn.errors import UserError
from vision_longhorn.signals import PARENT, SIGNALS, StopSignals

CPU = "CPU"  # name of a place
START = 15  # seconds from a process's start to its first update
POLL = 0.1  # seconds between two looks at the processes
GRACE = 120  # seconds that a process has to save and end, once it was asked to
# Variable with which a process finds this folder, wherever it starts
FOUND = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])}
PATIENCE = 600  # seconds to wait for a folder that a process of an earlier, killed study has not let go


@dataclass(frozen=True)
class Place:
    """Where one process at a time runs.

    Attributes:
        name: "CPU", or "GPU" and what CUDA_VISIBLE_DEVICES calls it: places of one name share the device.
        variables: Of its environment.
    """

    name: str
    variables: dict[str, str]


def find_places(device: str, per_gpu: int, jobs: int) -> list[Place]:
    """Places of this machine, with loaders and threads shared out.

    Args:
        device: "auto", "cuda" or "cpu", as the trainer has it.
        per_gpu: Processes side by side on each GPU that CUDA shows.
        jobs: Processes side by side on a CPU.

    Raises:
        UserError: Where CUDA is asked for and there is none.
    """
    import torch

    from vision_longhorn.data.loader import cores

    count = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cuda" and not count:
        raise UserError("device is 'cuda', but PyTorch finds no CUDA GPU here: use --device auto or --device cpu")
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    gpus = shown.split(",")[:count]
    number = len(gpus) * per_gpu or jobs
    # Threads of their own, as many as cores, would wait for those of the others.
    share = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // number)))}
    if not gpus:
        return [Place(CPU, share)] * jobs
    return [Place(f"GPU {gpu}", {**share, "CUDA_VISIBLE_DEVICES": gpu}) for _ in range(per_gpu) for gpu in gpus]


@dataclass
class Job:
    """A command to run.

    Attributes:
        name: For messages.
        prepare: Called when it is about to start; gives the words after `python -m`, and the file for its output.
        seconds: Gives how long the rest of it takes alone on its device after its start, by estimate; None: unknown.
        done: Called when it has ended by itself, with its exit code; gives a text for the message, and whether all is
            well.
        held: Gives why it cannot start yet, or "".
        then: Gives what comes next, before all others, once it is done.
    """

    name: str
    prepare: Callable[[], tuple[list[str], Path]]
    seconds: Callable[[], float | None]
    done: Callable[[int], tuple[str, bool]]
    held: Callable[[], str] = lambda: ""
    then: Callable[[], list["Job"]] = list


@dataclass
class _Child:
    job: Job
    place: Place
    process: subprocess.Popen
    started: float


@dataclass
class Outcome:
    """What came of running jobs: numbers of those that are done, that failed, and that are left."""

    done: int = 0
    failed: int = 0
    left: int = 0

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(self.done + other.done, self.failed + other.failed, self.left + other.left)


@dataclass
class Runner:
    """Runs jobs, in their order, one on each place at a time.

    Attributes:
        places: Where.
        signals: Which have come.
        deadline: Time of `time.monotonic()` at which what still runs is asked to stop; None: never.
        say: Takes a line.
    """

    places: list[Place]
    signals: StopSignals
    deadline: float | None
    say: Callable[[str], Any] = print
    children: list[_Child] = field(default_factory=list)
    known: dict[int, float | None] = field(default_factory=dict)  # what jobs said of their seconds at this look

    def run(self, jobs: list[Job]) -> Outcome:
        """Runs the jobs. A failing one stops no other."""
        waiting, outcome, self.numbers = list(jobs), Outcome(), {id(job): i for i, job in enumerate(jobs, 1)}
        self.waits_since: float | None = None
        try:
            while (waiting or self.children) and not self._is_over():
                self.known.clear()
                self._reap(outcome, waiting)
                self._start(waiting, outcome)
                if not self.children and waiting and not any(self._fits(job, self.places[0]) for job in waiting):
                    break
                time.sleep(POLL)
            outcome.left += len(waiting) + self._stop(outcome)
        except BaseException as error:
            for child in self.children:
                _kill(child)
            if isinstance(error, KeyboardInterrupt):  # Ctrl-C for the second time
                raise KeyboardInterrupt("stopped at once; the same command goes on from the last checkpoints") from None
            raise
        return outcome

    @property
    def _beside(self) -> int:
        """Places of a device."""
        return self.places.count(self.places[0])

    def _is_over(self) -> bool:
        return bool(self.signals.received) or self.deadline is not None and time.monotonic() > self.deadline

    def _fits(self, job: Job, place: Place) -> bool:
        """Whether the job would end in time there, and make no other late."""
        if self.deadline is None or (seconds := self._seconds(job)) is None:
            return True
        left = self.deadline - time.monotonic() - START
        if place.name == CPU:  # whose threads are shared out for good
            return seconds * self._beside < left
        others = [self._seconds(child.job) or 0 for child in self.children if child.place.name == place.name]
        return _late([*others, seconds], left) == _late(others, left)

    def _seconds(self, job: Job) -> float | None:
        if id(job) not in self.known:
            self.known[id(job)] = job.seconds()
        return self.known[id(job)]

    def _start(self, waiting: list[Job], outcome: Outcome) -> None:
        """Starts what can start on the places that are free."""
        busy = [child.place for child in self.children]
        for place in [place for place in self.places if not busy or not _take(busy, place)]:
            job = next((job for job in waiting if self._fits(job, place) and not job.held()), None)
            if job is None:
                if waiting and not self.children and (why := waiting[0].held()):
                    self._give_up_late(waiting, outcome, why)
                    return
                continue
            waiting.remove(job)
            self.waits_since = None
            seconds = job.seconds()
            words, log = job.prepare()
            with open(log, "ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **place.variables, PARENT: str(os.getpid()), **FOUND},
                    start_new_session=True,  # Ctrl-C is for this process, which hands it on
                )
            self.children.append(_Child(job, place, process, time.monotonic()))
            about = "" if seconds is None else f", about {START + seconds * self._beside:,.0f} s"
            number = f"[{self.numbers[id(job)]}/{len(self.numbers)}] " if id(job) in self.numbers else ""
            self.say(f"{number}start   {job.name}  {place.name}{about}")

    def _give_up_late(self, waiting: list[Job], outcome: Outcome, why: str) -> None:
        if self.waits_since is None:
            self.waits_since = time.monotonic()
            self.say(f"waiting: {why}")
        if time.monotonic() > self.waits_since + PATIENCE:
            self.say(f"FAILED  {waiting.pop(0).name}  {why}")
            outcome.failed += 1

    def _reap(self, outcome: Outcome, waiting: list[Job]) -> None:
        """Takes note of what has ended."""
        for child in list(self.children):
            code = child.process.poll()
            if code is None:
                continue
            self.children.remove(child)
            seconds = time.monotonic() - child.started
            text, well = child.job.done(code)
            outcome.done, outcome.failed = outcome.done + well, outcome.failed + (not well)
            if well:
                following = child.job.then()
                waiting[:0] = following
            known = [job.seconds() for job in waiting]  # of the others, the last one tells
            to_come = sum(seconds if own is None else START + own * self._beside for own in known) / len(self.places)
            count = sum(id(job) in self.numbers for job in waiting)
            left = f"; {count} to start, about {to_come:,.0f} s" if count else ""
            text, line, details = text.partition("\n")
            came = "done   " if well else "FAILED "
            self.say(f"{came} {child.job.name}  {text}, {seconds:,.0f} s{left}{line}{details}")

    def _stop(self, outcome: Outcome) -> int:
        """Asks what still runs to save and end, and waits for it; how many these are."""
        if not self.children:
            return 0
        self.say(f"stopping {len(self.children)}: {', '.join(child.job.name for child in self.children)}")
        for child in self.children:
            child.process.terminate()
        end, left = time.monotonic() + GRACE, 0
        for child in self.children:
            try:
                code = child.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = _kill(child)
            if code == 0 or code not in (-signal.SIGTERM, -signal.SIGKILL, *(128 + number for number in SIGNALS)):
                _, well = child.job.done(code)  # it was about to end anyway
                outcome.done, outcome.failed = outcome.done + well, outcome.failed + (not well)
            else:
                left += 1
        self.children = []
        return left


def _late(seconds: list[float], left: float) -> int:
    """How many of the jobs of one device, which shares its time out equally, are not done after `left` seconds, from
    what each would take alone."""
    return sum(sum(min(own, other) for other in seconds) >= left for own in seconds)


def _take(busy: list[Place], place: Place) -> bool:
    """Whether the place is among the busy ones, which then lack it: several may be alike."""
    if place in busy:
        busy.remove(place)
        return True
    return False


def _kill(child: _Child) -> int:
    """Ends a process with its loader's at once; its exit code."""
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):  # all but Windows
            os.killpg(child.process.pid, signal.SIGKILL)
        else:
            child.process.kill()
    return child.process.wait()
