"""The folder of a run: who may write to it, and what is in it beside the checkpoints' contents."""

import contextlib
import csv
import io
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator

from vision_longhorn.checkpoint import described, epochs_made, save_run, second_name, update_files
from vision_longhorn.errors import UserError
from vision_longhorn.files import RUN_FILES, left_aside, write_text
from vision_longhorn.settings import Settings
from vision_longhorn.training.lock import RunLock
from vision_longhorn.training.runlog import RunLog

# Variable of the environment that names the commit of a copy whose git does not know it
COMMIT = "VISION_LONGHORN_COMMIT"
WRITTEN = *RUN_FILES, "curves.png", "best.pt", "last.pt", "update-*.pt"  # each aside first


class RunFolder:
    """The folder that a run writes to. All processes hold one; only the first writes.

    Args:
        path: The folder, which need not be there yet.
        cfg: The run's config.
        resuming: Whether the run goes on from a checkpoint in there.
        accelerator: Tells which process this is.
        held: Closes the curves and lets others have the folder, when it is closed.

    Attributes:
        log: `RunLog` of the run, from `open` on; None on all processes but one.

    Raises:
        UserError: Where the folder holds another run, or another process writes to it.
    """

    def __init__(
        self, path: Path, cfg: Settings, resuming: bool, accelerator: Accelerator, held: contextlib.ExitStack
    ) -> None:
        self.path, self.cfg, self.resuming, self.accelerator, self.held = path, cfg, resuming, accelerator, held
        self.lock: RunLock | None = None
        self.log: RunLog | None = None
        str(
            path
        ).encode()  # TensorBoard takes no name that is not UTF-8, and would say so when the folder has been made
        self._refuse_others_run()
        accelerator.wait_for_everyone()  # all have looked before the first one writes
        if path.exists() and accelerator.is_main_process:
            self._lock()

    def _refuse_others_run(self) -> None:
        path = self.path
        if not self.cfg.resume and any(path.glob("*.pt")):
            raise UserError(f"{path} holds a run: go on with it by --resume {path}, or give another --run-dir")
        if not self.resuming and not (path / "env.json").exists():
            for name in WRITTEN[:-3]:
                if os.path.lexists(path / name):
                    raise UserError(f"{path} holds a {name} that no run has written: give another --run-dir")

    def _lock(self) -> None:
        if not self.lock:
            self.lock = RunLock(self.path)
            self.held.callback(self.lock.release)
            if self.lock.note:
                self.accelerator.print(f"Note: {self.lock.note}.")

    def open(self, facts: dict[str, Any], started: str, updates: int) -> None:
        """Makes the folder once there is something to put into it, so that a command that fails at once leaves none.

        Args:
            facts: What the run's bits depend on beside its config.
            started: When it first started.
            updates: How many it has made. A run that goes on hides what the curves show beyond them, and sets the
                checkpoints beyond them aside.
        """
        if self.log or not self.accelerator.is_main_process:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock()
        self._refuse_others_run()  # one that began and ended since the first look
        for litter in [path for name in WRITTEN for path in left_aside(self.path / name)]:
            litter.unlink()
        if self.resuming and (aside := go_back(self.path, Path(str(self.cfg.resume)), updates)):
            self.accelerator.print(f"Note: what this run has gone back behind is in {aside} now.")
        if not self.resuming and (aside := set_aside(self.path)):
            self.accelerator.print(f"Note: what a run without a checkpoint left in {self.path} is in {aside} now.")
        write_text(self.path / "config.yaml", yaml.safe_dump(self.cfg.values(), sort_keys=False))
        write_text(self.path / "env.json", json.dumps({**describe_environment(), **facts}, indent=2) + "\n")
        self.log = RunLog(
            self.accelerator, self.path, self.cfg, started, purge_step=updates + 1 if self.resuming else None
        )
        self.held.callback(self.log.close)

    def save(self, checkpoint: dict[str, Any], is_best: bool) -> None:
        """Saves a checkpoint. The curves up to here come first."""
        if self.log:
            self.log.flush()
            save_run(self.path, checkpoint, self.cfg.keep_checkpoints, is_best)
        self.accelerator.wait_for_everyone()

    def write_history(self, history: list[dict[str, Any]]) -> None:
        """Writes the results of all epochs, a dict each, as JSON and as a table."""
        if self.log:
            write_text(self.path / "metrics.json", json.dumps(history, indent=2) + "\n")
            write_summary(self.path / "summary.csv", history)


def set_aside(run_dir: Path) -> Path | None:
    """Moves what a run that never came to a checkpoint left in its folder into a folder within, where it stays.

    Returns:
        That folder, None where there was nothing.
    """
    if not (run_dir / "env.json").exists():  # none of ours
        return None
    aside = _new_folder(run_dir)
    for path in sorted(run_dir.iterdir()):
        if any(map(path.match, WRITTEN)) or "tfevents" in path.name:
            path.rename(aside / path.name)
    return aside


def go_back(run_dir: Path, checkpoint: Path, updates: int) -> Path | None:
    """Moves checkpoints from beyond the one that a run goes on with, and what tells of them, into a folder within. That
    one is last.pt then, and best.pt is the best of those up to it, if it is still there.

    Args:
        run_dir: The run's folder.
        checkpoint: The file that it goes on with, in there.
        updates: How many it has made by it. On another number of processes, an epoch has another number of them.

    Returns:
        The folder, None where there was nothing. It can be resumed like the run's.
    """
    made, best, last = epochs_made(checkpoint), run_dir / "best.pt", run_dir / "last.pt"
    files = update_files(run_dir)
    beyond = [file for number, file in files.items() if number > updates or epochs_made(file) > made]
    if not last.exists():
        second_name(checkpoint, last)
    names = [name for name in (last, best) if name.exists() and epochs_made(name) > made]
    if not (beyond or names):
        return None
    aside, not_beyond = _new_folder(run_dir), [file for file in files.values() if epochs_made(file) <= made]
    for file in run_dir / "config.yaml", run_dir / "env.json":
        if file.exists():
            shutil.copyfile(file, aside / file.name)
    # In this order, a kill at any moment loses nothing, and the next resume goes on from here.
    for name in names:
        second_name(name, aside / name.name)
        if held := checkpoint if name == last else _best_of(checkpoint, not_beyond):
            second_name(held, name)
        else:
            name.unlink()
    for path in *beyond, *(run_dir / name for name in ("metrics.json", "summary.csv", "curves.png")):
        if path.exists():
            path.replace(aside / path.name)
    return aside


def _best_of(checkpoint: Path, files: list[Path]) -> Path | None:
    """That of the `files` which holds the best weights up to a checkpoint of their run."""
    best = described(checkpoint).get("best_metric")
    for file in files:
        state = described(file)
        history, weights = state.get("history"), "val_ema" if "state_dict_ema" in state else "val"
        if not history or state["updates"] != state["epoch"] * state["facts"]["updates_per_epoch"]:
            continue  # those within an epoch have the accuracy of the one before it in their history
        if history[-1].get(weights, {}).get("top1") == best == state["best_metric"]:
            return file
    return None


def _new_folder(run_dir: Path) -> Path:
    aside = next(path for n in range(1, 1 << 30) if not (path := run_dir / f"before-{n}").exists())
    aside.mkdir()
    return aside


def describe_environment() -> dict[str, Any]:
    """What a run depended on beside its config: command, commit, versions, machine. Fit for JSON."""

    def git(*arguments: str) -> str | None:
        try:
            here = Path(__file__).resolve().parent
            answer = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True)
        except FileNotFoundError:  # no git on this machine
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    versions: dict[str, str | None] = {}
    for name in ("torch", "torchvision", "triton", "timm", "accelerate", "webdataset", "numpy", "pillow"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    told = os.environ.get(COMMIT)
    changed = None if told else git("status", "--porcelain")
    return {
        "command": sys.argv,
        "commit": told or git("rev-parse", "HEAD"),
        "uncommitted_changes": None if changed is None else bool(changed),
        "python": platform.python_version(),
        "versions": versions,
        "platform": f"{platform.system()} {platform.machine()}",
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cpus": os.cpu_count(),
    }


def write_summary(path: str | os.PathLike[str], history: list[dict[str, Any]]) -> None:
    """Writes the results of all epochs as a CSV table, a row per epoch.

    Args:
        path: The file.
        history: A dict per epoch; a nested dict's keys get its own key before them, as in "val_top1". An epoch may lack
            what others have, such as an evaluation.
    """
    rows = []
    for entry in history:
        nested = [
            ({f"{key}_{inner}": number for inner, number in value.items()} if isinstance(value, dict) else {key: value})
            for key, value in entry.items()
        ]
        rows.append({key: value for part in nested for key, value in part.items()})
    table = io.StringIO()
    writer = csv.DictWriter(table, dict.fromkeys(key for row in rows for key in row), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, table.getvalue())
