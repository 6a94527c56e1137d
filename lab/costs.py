"""What runs will take, from speeds measured alone and from runs that are finished."""

import contextlib
from collections import Counter
from pathlib import Path

from lab.plan import Run
from lab.results import Known, Record
from lab.runs import folder_of, history_of, is_finished, result_of
from vision_longhorn.errors import UserError


def hardware(device: str) -> str:
    """What a speed is a speed of: the GPU's name, or the number of the CPU's threads."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


class Costs:
    """Estimates of what runs take.

    Args:
        runs: All runs that matter; finished ones among them tell of the others of their settings.
        out: Folder of the studies.
        known: Earlier results, and speeds.
        hardware: Whose speeds to go by; where none of it is known, those of the hardware that most is known of.

    Attributes:
        hardware: Whose speeds and runs are gone by, "" where none is known.
    """

    def __init__(self, runs: list[Run], out: Path, known: Known, hardware: str) -> None:
        self.out, self.known = out, known
        names = Counter(_machine(name) for speeds in known.speeds.values() for name in speeds)
        records = [(run, record) for run in runs if (record := self._record(run))]
        names.update(_machine(record["environment"].get("device") or "") for _, record in records)
        own = _machine(hardware)
        self.hardware = own if own in names else names.most_common(1)[0][0] if names else ""
        self.measured: dict[str, float] = {}  # seconds of an epoch by kind of run
        for run, record in records:
            self._learn(run, record)

    def learn(self, run: Run) -> None:
        """Takes in what a run took, if it is finished."""
        if record := self._record(run):
            self._learn(run, record)

    def _record(self, run: Run) -> Record | None:
        """What came of a run, if it is finished and its files are there."""
        folder = folder_of(self.out, run)
        if is_finished(folder, run):
            with contextlib.suppress(UserError):
                return result_of(folder, run)
        return self.known.runs.get(run.identity)

    def _learn(self, run: Run, record: Record) -> None:
        machine = _machine(record["environment"].get("device") or "")
        self.hardware = self.hardware or machine  # the first thing that is known
        if machine == self.hardware:
            # Side by side each takes as many times as long. The slowest had the most beside it, all the time.
            seconds = record["wall_seconds"] / record["epochs"] / record["side_by_side"]
            for kind in _kind(run), _like(run):
                self.measured[kind] = max(seconds, self.measured.get(kind, 0))

    def seconds(self, run: Run) -> float | None:
        """Seconds that the rest of a run takes alone on its device once it has started; None: nothing is known.

        One that leaves much of the device idle takes longer: what was measured side by side says little of that.
        """
        cfg = run.arm.config
        left = 1 - len(history_of(folder_of(self.out, run))) / cfg.epochs
        if measured := self.measured.get(_kind(run)):
            return left * cfg.epochs * measured
        speeds = {_machine(name): speed for name, speed in self.known.speeds.get(run.arm.speed_key, {}).items()}
        rate = speeds.get(self.hardware, {}).get("images_per_s")
        if not rate:
            measured = self.measured.get(_like(run))
            return left * cfg.epochs * measured if measured else None
        # An evaluation is a forward pass, a third of an update, of raw and averaged weights.
        looks = cfg.epochs / cfg.eval_interval * (2 if cfg.ema_decay else 1) / 3
        return left * (run.arm.images_per_epoch * cfg.epochs + looks * (cfg.val_samples or 0)) / rate


def _machine(name: str) -> str:
    """A GPU's name, or "CPU", however many threads it has."""
    return "CPU" if name[:3].upper() == "CPU" else name


def _kind(run: Run) -> str:
    """What runs have in common whose epochs take about as long. Those of recall have no loader, whose work an update's
    speed says nothing of, and often differ in their learning rate alone."""
    return run.arm.key if run.arm.of_images else _like(run)


def _like(run: Run) -> str:
    """What runs of one model have in common over as many samples: they may differ in their number of epochs, say."""
    return f"{run.arm.speed_key} {run.arm.config.train_samples}"
