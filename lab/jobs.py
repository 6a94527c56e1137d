"""The processes of a study: the trainer's, and those that look at the images one by one."""

from collections.abc import Callable
from typing import Any

from lab.plan import Study, Trial
from lab.queue import Job
from lab.results import Known
from lab.runs import TrialFolder
from vision_longhorn.data.loader import cores


class Jobs:
    """Makes jobs.

    Args:
        studies, trials: The studies that are asked for, and their trials.
        known: What is known of these.
        data: Place of each kind of data, by name.
        device: "auto", "cuda" or "cpu".
        places: Where processes run.
    """

    def __init__(
        self,
        studies: list[Study],
        trials: list[Trial],
        known: Known,
        data: dict[str, str],
        device: str,
        places: list[str],
    ) -> None:
        self.known, self.data, self.device, self.places = known, data, device, places
        self.trials = trials
        self.sizes: dict[tuple[str, int], set[int]] = {}  # of images, by trial
        for study in studies:
            for trial in study.trials():
                self.sizes.setdefault(trial.identity, set()).update(study.sizes(trial.arm) if trial.arm.data else ())

    def training(self, trial: Trial) -> Job:
        """Begins a trial or goes on with it."""
        folder = TrialFolder(self.known.out, trial)

        def start() -> tuple[list[str], Any]:
            config = folder.prepare(self.places.count(self.places[0]), len(self.places))
            words = ["--config", str(config), "--run-dir", str(folder.path), "--device", self.device]
            if trial.arm.data:
                more = ["--resume", "--data", self.data[trial.arm.data]]
                return ["vision_longhorn", "train", *words, *more], folder.output_file
            return ["lab.recall", *words], folder.output_file

        def done(code: int) -> tuple[bool, str, list[Job]]:
            if folder.is_finished():
                last = folder.history()[-1]
                top1 = last.get("val_ema", last["val"])["top1"]
                # Looked at at once: where time is short, the machine may soon be gone with the weights.
                return True, f"top-1 {top1:.2f} %", self._look(trial)
            return False, f"exit code {code}\n    {folder.output_file} ends with{folder.note_failure(code)}", []

        return Job(folder.path.name, start, done)

    def looks(self, say: Callable[[str], Any]) -> list[Job]:
        """Evaluates the final weights of all trials, as far as that was not done."""
        jobs = []
        for trial in self.trials:
            if trial.arm.data in self.data:
                jobs += self._look(trial)
            elif TrialFolder(self.known.out, trial).unseen(sorted(self.sizes[trial.identity])):
                say(f"{trial.name}: its images are not looked at one by one without --data {trial.arm.data}=DIR")
        return jobs

    def _look(self, trial: Trial) -> list[Job]:
        folder = TrialFolder(self.known.out, trial)
        sizes = folder.unseen(sorted(self.sizes[trial.identity]))
        words = ["lab.hits", f"{folder.path}:{','.join(map(str, sizes))}", "--data", self.data.get(trial.arm.data, "")]
        words += ["--device", self.device, "--workers", str(max(1, min(8, cores() // len(self.places))))]
        log = folder.path / "images.log"

        def done(code: int) -> tuple[bool, str, list[Job]]:
            return code == 0, "1 run" if code == 0 else f"exit code {code}, {log} says why", []

        return [Job(f"images-{folder.path.name}", lambda: (words, log), done)] if sizes else []
