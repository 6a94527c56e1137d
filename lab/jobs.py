"""The processes of a study: the trainer's, and those that look at the images one by one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lab.costs import Costs
from lab.plan import Run, Study
from lab.runner import Job, Place
from lab.runs import (
    HITS,
    OUTPUT,
    complete_history,
    folder_of,
    history_of,
    holder_of,
    is_finished,
    note_failure,
    prepare,
    read_json,
)
from vision_longhorn.demo import DIGITS
from vision_longhorn.runs import Run as RunFiles

Unseen = dict[tuple[str, Path], set[int]]


def unseen(studies: list[Study], out: Path) -> Unseen:
    """Sizes of images that the final weights of finished runs have still to be evaluated at, by (name of the data,
    folder of the run). Runs whose weights are gone are left out."""
    found: Unseen = {}
    for study in studies:
        for run in study.runs():
            folder = folder_of(out, run)
            missing = {size for size in study.sizes(run.arm) if str(size) not in (read_json(folder / HITS) or {})}
            if missing and is_finished(folder, run) and RunFiles(folder).last.exists():
                found.setdefault((run.arm.data, folder), set()).update(missing)
    return found


@dataclass
class Jobs:
    """Makes jobs.

    Attributes:
        studies: The studies that are asked for.
        out: Folder of the studies.
        data: Place of each kind of data, by name.
        device: "auto", "cuda" or "cpu".
        places: Where processes run.
        costs: What runs take by estimate; learns of each that ends.
        say: Takes a line.
    """

    studies: list[Study]
    out: Path
    data: dict[str, str]
    device: str
    places: list[Place]
    costs: Costs
    say: Callable[[str], Any]

    @property
    def workers(self) -> int:
        """Loader processes for each of the processes that run side by side."""
        from vision_longhorn.data.loader import cores

        return max(1, min(8, cores() // len(self.places)))

    def trainings(self, runs: list[Run]) -> list[Job]:
        """A job for each run, which begins it or goes on with it."""
        if any(self.data.get(run.arm.data) == DIGITS for run in runs):
            from vision_longhorn.data.sharding import make_digits

            make_digits(Path("data", DIGITS))  # once, before each run would
        return [self._training(run) for run in runs]

    def _training(self, run: Run) -> Job:
        folder = folder_of(self.out, run)

        def start() -> tuple[list[str], Path]:
            config = prepare(self.out, folder, run, self.places.count(self.places[0]), self.workers)
            words = ["--config", str(config), "--run-dir", str(folder), "--device", self.device]
            if run.arm.of_images:
                data = self.data[run.arm.data]
                return ["vision_longhorn", "train", *words, "--resume", "--data", data], folder / OUTPUT
            return ["lab.recall", *words], folder / OUTPUT

        def done(code: int) -> tuple[str, bool]:
            complete_history(folder, run)
            if is_finished(folder, run):
                self.costs.learn(run)
                last = history_of(folder)[-1]
                return f"top-1 {last.get('val_ema', last['val'])['top1']:.2f} %", True
            lines = "".join(f"\n    {line}" for line in note_failure(folder, code)["last_lines"])
            return f"exit code {code}\n    {folder / OUTPUT} ends with{lines}", False

        def then() -> list[Job]:
            return self.looks(folder)  # at once: where time is short, the machine may soon be gone with the weights

        return Job(folder.name, start, partial(self.costs.seconds, run), done, partial(holder_of, folder), then)

    def looks(self, only: Path | None = None) -> list[Job]:
        """Jobs that evaluate what is `unseen` (of one run's folder, or of all): a process for each place, as its start
        takes a while."""
        wanted = {key: sizes for key, sizes in unseen(self.studies, self.out).items() if only in (None, key[1])}
        jobs = []
        for data in sorted({data for data, _ in wanted}):
            if data not in self.data:
                self.say(f"images are not looked at one by one without --data {data}=DIR")
                continue
            words = [
                f"{folder}:{','.join(map(str, sorted(sizes)))}"
                for (own, folder), sizes in wanted.items()
                if own == data
            ]
            parts = [words[i :: len(self.places)] for i in range(min(len(self.places), len(words)))]
            name = f"images-{only.name if only else data}"
            jobs += [self._look(f"{name}-{i}" if len(parts) > 1 else name, part, data) for i, part in enumerate(parts)]
        return jobs

    def _look(self, name: str, words: list[str], data: str) -> Job:
        log = self.out / "runs" / f"{name}.log"
        command = ["lab.hits", *words, "--data", self.data[data]]
        command += ["--device", self.device, "--workers", str(self.workers)]

        def done(code: int) -> tuple[str, bool]:
            return (f"{len(words)} run(s)", True) if code == 0 else (f"exit code {code}, {log} says why", False)

        return Job(name, lambda: (command, log), lambda: None, done)
