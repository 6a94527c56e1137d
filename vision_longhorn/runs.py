"""A training run on disk: the files in its folder, their names, and how they are written."""

import json
import os
from pathlib import Path
from typing import Any

from vision_longhorn.errors import UserError
from vision_longhorn.files import csv_file, second_name, write_text


class Run:
    """The folder of a training run. Neither the folder nor any of its files has to be there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.last, self.best = self.path / "last.pt", self.path / "best.pt"  # best: of the epoch with the best top-1
        self.curves_file = self.path / "curves.png"
        names = "config.yaml", "env.json", "metrics.json", "summary.csv", "bad_steps.json"
        # Every run begins by writing its environment: what its bits depend on beside its settings.
        self.texts = [self.path / name for name in names]
        self.config_file, self.environment_file, self.history_file, self.summary_file, self.bad_steps_file = self.texts

    def checkpoints(self) -> dict[int, Path]:
        """Finds the checkpoints update-NUMBER.pt by their number, the earliest first."""
        files = {file.stem[7:]: file for file in self.path.glob("update-*.pt")}
        return dict(sorted((int(number), file) for number, file in files.items() if number.isdecimal()))

    def event_files(self) -> list[Path]:
        """Finds TensorBoard's files, one for each start of the run, sorted by the time in their names."""
        return sorted(self.path.glob("events.out.tfevents.*"))

    def has_begun(self) -> bool:
        return self.environment_file.exists() or any(self.path.glob("*.pt"))

    def check_free(self, goes_on: bool) -> None:
        """Raises UserError where the folder holds a run that is not to go on, or files that no run has written."""
        if not goes_on and any(self.path.glob("*.pt")):
            raise UserError(
                f"{self.path} holds a run: go on with it by --resume {self.path}, or give another --run-dir"
            )
        for file in (*self.texts, self.curves_file) if not self.has_begun() else ():
            if os.path.lexists(file):
                raise UserError(f"{self.path} holds a {file.name} that no run has written: give another --run-dir")

    def save(self, state: dict[str, Any], keep: int, is_best: bool = False) -> None:
        """Saves a checkpoint as update-NUMBER.pt, of which `keep` stay, as last.pt, and perhaps as best.pt."""
        from vision_longhorn.checkpoint import save_checkpoint  # imports torch, for which --help need not wait

        last = state["updates"] + state.get("step_shift", 0)
        newest = self.path / f"update-{last:07d}.pt"
        save_checkpoint(newest, state)
        for name in (self.best, self.last) if is_best else (self.last,):  # best.pt first, in case a kill comes between
            second_name(newest, name)
        # By number, as clocks may be set back. Checkpoints after this one are from before the run went back to it.
        earlier = [file for number, file in self.checkpoints().items() if number < last]
        for file in earlier[: max(0, len(earlier) + 1 - keep)]:
            file.unlink()

    def write_history(self, history: list[dict[str, Any]]) -> None:
        """Writes the results of all epochs as JSON, and as a table in which {"val": {"top1": 1.0}} is "val_top1"."""
        write_text(self.history_file, json.dumps(history, indent=2) + "\n")
        rows = []
        for entry in history:
            row: dict[str, Any] = {}
            for key, value in entry.items():
                row |= {f"{key}_{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {key: value}
            rows.append(row)
        columns = list(dict.fromkeys(key for row in rows for key in row))
        with csv_file(self.summary_file) as writer:
            writer.writerow(columns)
            writer.writerows([row.get(column) for column in columns] for row in rows)


def run_file(path: str | os.PathLike[str]) -> Path:
    """Returns the checkpoint that `path` stands for: a folder's best.pt, or the file itself."""
    run = Run(path)
    if not run.path.is_dir():
        return run.path
    if run.last.exists() and not run.best.exists():
        raise UserError(
            f"no checkpoint at {run.best}: the run has not been evaluated yet; {run.last} has its newest weights"
        )
    return run.best


def timm_source(path: str | os.PathLike[str]) -> str | None:
    """Returns timm's name for a folder in the hub's layout or a model on the hub; None for a run's folder or file."""
    name = os.fspath(path)
    if name.startswith(("local-dir:", "hf-hub:")):
        return name
    is_model_folder = Path(path, "config.json").is_file() and not Run(path).best.is_file()
    return f"local-dir:{name}" if is_model_folder else None
