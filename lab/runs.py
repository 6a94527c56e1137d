"""A trial's folder: what a study adds to a run on disk, whether the run is finished, and its results."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lab.plan import Trial
from vision_longhorn.checkpoint import load_checkpoint
from vision_longhorn.errors import UserError
from vision_longhorn.files import LOCK, lock_folder, read_json, write_text
from vision_longhorn.plots import read_scalars
from vision_longhorn.runs import Run

Record = dict[str, Any]
WEIGHTS = {"raw": "val", "ema": "val_ema"}  # what the trainer calls the results of each
PATIENCE = 300  # seconds to wait until a process of an earlier, killed study has saved and ended


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content) + "\n")


class TrialFolder(Run):
    """The folder of a trial below `out`: one that another study has made for it, or its own.

    Attributes:
        output_file: What its process prints.
        hits_file: The records of `lab.hits`, by the images' side in pixels.
        failed_file: Exit code and last line of a process that failed.
        beside_file: How many processes shared its device.
    """

    def __init__(self, out: Path, trial: Trial) -> None:
        made = sorted(out.glob(f"runs/*-s{trial.seed}-{trial.arm.key}"))
        super().__init__(made[0] if made else out / "runs" / trial.name)
        self.trial, self.config_given = trial, out / "configs" / f"{self.path.name}.yaml"
        self.output_file, self.hits_file, self.failed_file, self.beside_file = (
            self.path / name for name in ("output.log", "hits.json", "failed.json", "study.json")
        )

    def history(self) -> list[Record]:
        """Reads the results of the finished epochs."""
        return read_json(self.history_file) or []

    def is_held(self) -> bool:
        """Tells whether another process is writing there."""
        if (self.path / LOCK).exists():
            try:
                lock_folder(self.path).close()
            except UserError:
                return True
        return False

    def is_finished(self) -> bool:
        """Tells whether nothing is left to do. Writes the results if a kill came just after the last checkpoint."""
        config, history = self.trial.arm.config, self.history()
        if len(history) == config.epochs - 1 and self.last.exists() and not config.is_over(history):
            checkpoint = load_checkpoint(self.last)
            if checkpoint["epoch"] == config.epochs and not self.is_held():
                history = checkpoint["history"]
                self.write_history(history)
        return config.is_over(history)

    def unseen(self, sizes: list[int]) -> list[int]:
        """Lists those of the sizes at which its final weights can still be evaluated."""
        known = read_json(self.hits_file) or {}
        missing = [size for size in sizes if str(size) not in known]
        return missing if missing and self.last.exists() and self.is_finished() else []

    def prepare(self, beside: int, workers: int) -> Path:
        """Prepares the folder for a process, one of `beside` on its device, that begins the trial or goes on with it.
        Returns the YAML file of its settings."""
        self.path.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + PATIENCE
        while self.is_held() and time.monotonic() < end:
            time.sleep(0.2)
        self.failed_file.unlink(missing_ok=True)
        before = (read_json(self.beside_file) or {}).get("side_by_side", beside)
        write_json(self.beside_file, {"side_by_side": max(before, beside)})
        arm = self.trial.arm
        left_out = arm.config.named("host")
        values = {key: value for key, value in arm.config.values().items() if key not in left_out}
        own = {"seed": self.trial.seed, **({"workers": workers} if arm.data else {})}
        write_text(self.config_given, yaml.safe_dump({**values, **own}, sort_keys=False))
        return self.config_given

    def note_failure(self, code: int) -> str:
        """Records that a process has ended with the exit code `code`, and returns what it printed last."""
        lines = []
        with contextlib.suppress(OSError):
            lines = self.output_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        # The line may name folders of the machine, which results should not.
        last = lines[-1].replace(str(self.path), self.path.name) if lines else ""
        write_json(self.failed_file, {"exit_code": code, "last_line": last})
        return "".join(f"\n    {line}" for line in lines[-8:])

    def unfinished(self) -> Record | None:
        """Tells how far an unfinished trial is, with "exit_code" and "last_line" if it failed; None if not begun."""
        history, failure = self.history(), read_json(self.failed_file)
        if not history and not failure:
            return None
        about = {"key": self.trial.arm.key, "seed": self.trial.seed, "epochs": len(history)}
        return {**about, "curve": curve_of(history), **(failure or {})}

    def result(self) -> Record:
        """Makes the record of a finished trial, for JSON and without paths: "final" is the top-1 in per cent after the
        last epoch, "loss" the cross-entropy of the same images, "seconds" counts training alone. Raises UserError if
        some of its files are lost."""
        history, environment = self.history(), read_json(self.environment_file) or {}
        try:
            _, updates, batch = (environment.pop(key) for key in ("command", "updates_per_epoch", "global_batch"))
        except (AttributeError, KeyError, TypeError):
            raise UserError(f"{self.environment_file} does not describe its run: remove {self.path}") from None
        curve = curve_of(history, scalars := read_scalars(self.path))
        epochs, rates = scalars["train/images_per_s"]  # an entry for each stretch of updates
        seconds = float((np.diff(epochs, prepend=0) * updates * batch / rates).sum())
        return {
            "key": self.trial.arm.key,
            "seed": self.trial.seed,
            "epochs": len(history),
            "final": {name: curve[name][-1] for name in ("raw", "ema") if name in curve},
            "loss": {name: _round(history[-1][tag]["loss"]) for name, tag in WEIGHTS.items() if tag in history[-1]},
            "curve": curve,
            "seconds": _round(seconds),
            "skipped_updates": int(scalars["train/skipped"][1][-1]),
            "side_by_side": (read_json(self.beside_file) or {}).get("side_by_side", 1),
            "environment": environment,
        }


def curve_of(history: list[Record], scalars: Record | None = None) -> dict[str, list[Any]]:
    """Makes lists of "epoch", "train_loss", "raw" and "ema" (top-1 in per cent, None where it was not evaluated).

    With a run's `scalars` the loss is that of the epoch's last updates, as in records of runs that knew no other.
    """
    epochs, losses = [entry["epoch"] for entry in history], [entry["train_loss"] for entry in history]
    if scalars:
        losses = np.interp(epochs, *scalars["train/loss"]).tolist()  # the curve has a point at each epoch's end
    curve: dict[str, list[Any]] = {"epoch": epochs, "train_loss": [_round(loss) for loss in losses]}
    for name, tag in WEIGHTS.items():
        if any(tag in entry for entry in history):
            curve[name] = [_round(entry[tag]["top1"]) if tag in entry else None for entry in history]
    return curve


def _round(number: float) -> float:
    """Keeps six digits: more would only fill files."""
    return float(f"{number:.6g}")
