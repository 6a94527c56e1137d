"""The folder of a run as training writes it."""

import contextlib
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator

from vision_longhorn.environment import describe_environment
from vision_longhorn.files import FolderLock, second_name, write_text
from vision_longhorn.runs import Run
from vision_longhorn.settings import Settings
from vision_longhorn.training.runlog import RunLog


class RunFolder:
    """The `Run` that this training writes at `path`, where the folder need not be there yet.

    All processes hold one; only the first writes. The end of `held` closes the curves and frees the folder for others.

    Raises:
        UserError: Where the folder holds another run, or another process writes to it.
    """

    def __init__(self, path: Path, cfg: Settings, accelerator: Accelerator, held: contextlib.ExitStack) -> None:
        self.run, self.path = Run(path), path
        self.cfg, self.accelerator, self.held = cfg, accelerator, held
        self.checkpoint = Path(cfg.resume) if cfg.resume and Path(cfg.resume).exists() else None
        self.lock: FolderLock | None = None
        self.log: RunLog | None = None  # from `open` on, in the first process
        str(path).encode()  # TensorBoard would refuse a name that is not UTF-8 once the folder has been made
        self.run.check_free(goes_on=bool(cfg.resume))
        accelerator.wait_for_everyone()  # all have looked before the first one writes
        if path.exists() and accelerator.is_main_process:
            self._lock()

    def _lock(self) -> None:
        if not self.lock:
            self.lock = FolderLock(self.path)
            self.held.callback(self.lock.release)
            if self.lock.note:
                self.accelerator.print(f"Note: {self.lock.note}.")

    def open(self, facts: dict[str, Any], started: str, updates: int) -> None:
        """Makes the folder, after the first update, so that a command that fails at once leaves none.

        Earlier checkpoints beyond this number of `updates` are set aside, and earlier curves are hidden. `facts` are
        what the run's bits depend on beside its config.
        """
        if self.log or not self.accelerator.is_main_process:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock()
        self.run.check_free(goes_on=bool(self.cfg.resume))  # another may have begun and ended since
        self.run.clear()
        if aside := set_aside(self.run, self.checkpoint, updates):
            what = "this run has gone back behind" if self.checkpoint else "an earlier run left"
            self.accelerator.print(f"Note: what {what} is in {aside} now.")
        # The environment comes first: it tells a run's folder from one in which somebody keeps a config.yaml.
        write_text(self.run.environment_file, json.dumps({**describe_environment(), **facts}, indent=2) + "\n")
        write_text(self.run.config_file, yaml.safe_dump(self.cfg.values(), sort_keys=False))
        self.log = RunLog(self.accelerator, self.run, self.cfg, started, updates + 1 if self.checkpoint else None)
        self.held.callback(self.log.close)

    def save(self, checkpoint: dict[str, Any], is_best: bool) -> None:
        """Saves a checkpoint, after the curves up to it."""
        if self.log:
            self.log.writer.flush()
            self.run.save(checkpoint, self.cfg.keep_checkpoints, is_best)
        self.accelerator.wait_for_everyone()

    def write_history(self, history: list[dict[str, Any]]) -> None:
        """Writes the results of all epochs."""
        if self.log:
            self.run.write_history(history)


def set_aside(run: Run, checkpoint: Path | None = None, updates: int = 0) -> Path | None:
    """Moves all that a run has written beyond a checkpoint into a new folder within, which can be resumed like the run.

    Then last.pt is that checkpoint, and best.pt the best of those up to it, if that is still there. Without a
    checkpoint the run starts anew. `updates` is its number with the present number of processes.

    Returns:
        The new folder; None where nothing is beyond.
    """
    made, files = _epochs_made(checkpoint) if checkpoint else -1, run.checkpoints()
    up_to = [file for file in files.values() if _epochs_made(file) <= made]
    beyond = [file for number, file in files.items() if number > updates or file not in up_to]
    if checkpoint and not run.last.exists():
        second_name(checkpoint, run.last)
    names = [name for name in (run.last, run.best) if name.exists() and _epochs_made(name) > made]
    if not (beyond or names or not checkpoint and run.has_begun()):
        return None
    names_aside = (run.path / f"before-{number}" for number in itertools.count(1))
    aside = next(name for name in names_aside if not name.exists())
    aside.mkdir()
    for file in run.config_file, run.environment_file:
        if file.exists():
            shutil.copyfile(file, aside / file.name)
    # In this order, a kill at any moment loses nothing, and the next resume goes on from here.
    for name in names:
        second_name(name, aside / name.name)
        if held := checkpoint if name == run.last else _best_of(checkpoint, up_to):
            second_name(held, name)
        else:
            name.unlink()
    curves = run.event_files() if not checkpoint else []  # else the new ones hide those beyond
    for file in *beyond, run.history_file, run.summary_file, run.bad_steps_file, run.curves_file, *curves:
        if file.exists():
            file.replace(aside / file.name)
    return aside


def _best_of(checkpoint: Path | None, files: list[Path]) -> Path | None:
    """Finds the one of `files` with the best weights up to a checkpoint of their run."""
    best = _facts(checkpoint).get("best_metric") if checkpoint else None
    for state, file in ((_facts(file), file) for file in files):
        # Within an epoch, the history ends with the accuracy of the epoch before.
        if state["updates"] == state["epoch"] * state["facts"]["updates_per_epoch"]:
            weights = "val_ema" if "state_dict_ema" in state else "val"
            if state["history"][-1].get(weights, {}).get("top1") == best:
                return file
    return None


def _epochs_made(file: Path) -> float:
    """Epochs at a checkpoint, which compare over other numbers of processes. One that is damaged is beyond all."""
    state = _facts(file)
    return state["updates"] / state.get("facts", {}).get("updates_per_epoch", 1) if "updates" in state else math.inf


def _facts(file: Path) -> dict[str, Any]:
    """A checkpoint whose tensors stay on the disk; {} where it cannot be read."""
    with contextlib.suppress(Exception):  # torch raises half a dozen types for damaged files
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return {}
