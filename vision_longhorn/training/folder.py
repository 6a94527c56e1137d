"""The folder of a run as training writes it: checkpoints, results, and curves for TensorBoard and other trackers."""

import contextlib
import filecmp
import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any, TextIO

import yaml
from accelerate import Accelerator
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from vision_longhorn.environment import describe_environment
from vision_longhorn.files import LOCK, clear_aside, lock_folder, second_name, write_text
from vision_longhorn.runs import Run

# TensorBoard sorts settings by name. The others begin with "setting.", so that these come first.
MAIN_SETTINGS = ("model", "mixer", "lr", "epochs", "seed")


class RunFolder:
    """The `Run` that this training writes to the folder `path`, which need not exist yet.

    All processes have one; only the first writes. The end of `held` closes the curves and unlocks the folder.

    Attributes:
        step_shift: Added to the updates in curves and names of checkpoints, so that they never go back where a run
            has gone on with larger batches, and so with fewer updates.

    Raises:
        UserError: Where the folder holds another run, or another process writes to it.
    """

    def __init__(self, path: Path, cfg: Any, accelerator: Accelerator, held: contextlib.ExitStack) -> None:
        self.run, self.path = Run(path), path
        self.cfg, self.accelerator, self.held = cfg, accelerator, held
        self.checkpoint = Path(cfg.resume) if cfg.resume and Path(cfg.resume).exists() else None
        self.step_shift = 0
        self.lock: TextIO | None = None
        self.writer: SummaryWriter | None = None  # from `open` on, in the first process
        str(path).encode()  # fails here if it is not UTF-8; TensorBoard would fail after the folder has been made
        self.run.check_free(goes_on=bool(cfg.resume))
        accelerator.wait_for_everyone()  # all have looked before the first one writes
        if path.exists() and accelerator.is_main_process:
            self.lock = held.enter_context(lock_folder(path))
            held.callback(self._leave_no_lock)

    def _leave_no_lock(self) -> None:
        """Removes the lock's file from a folder in which no run has begun."""
        if not self.run.has_begun():
            with contextlib.suppress(OSError):  # Windows keeps files that are open
                (self.path / LOCK).unlink()

    def open(self, facts: dict[str, Any], started: str, updates: int) -> None:
        """Makes the folder. To be called after the first update, so that a command that fails at once leaves none.

        Points of earlier curves after this number of `updates` are hidden. `facts` are what the run's bits depend on
        beside its config. `started` is when the run first started, by which a tracker identifies it.
        """
        if self.writer or not self.accelerator.is_main_process:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = self.lock or self.held.enter_context(lock_folder(self.path))
        self.run.check_free(goes_on=bool(self.cfg.resume))  # another run may have begun and ended since
        for name in "*.pt", "*.json", "*.csv", "*.yaml", "curves.png":
            clear_aside(self.path / name)
        if aside := set_aside(self.run, self.checkpoint):
            what = "else this run has written" if self.checkpoint else "an earlier run left"
            self.accelerator.print(f"Note: what {what} is in {aside} now.")
        # The environment comes first: it marks the folder as a run's, not one in which somebody keeps a config.yaml.
        write_text(self.run.environment_file, json.dumps({**describe_environment(), **facts}, indent=2) + "\n")
        config = yaml.safe_dump(self.cfg.values(), sort_keys=False)
        write_text(self.run.config_file, config)
        hidden = updates + self.step_shift + 1 if self.checkpoint else None
        keep_order(self.run)
        self.writer = self.held.enter_context(SummaryWriter(self.path, purge_step=hidden))
        self.writer.add_text("config", f"```yaml\n{config}```")
        if self.cfg.track:
            name = self.path.name
            options = dict(name=name, id=f"{name}-{started}", dir=str(self.path), resume="allow")
            self.accelerator.init_trackers("vision-longhorn", settings_of(self.cfg), {"wandb": options})
            for tracker in self.accelerator.trackers:
                self.held.callback(tracker.finish)

    def add(self, scalars: dict[str, float], step: int) -> None:
        """Adds numbers to the curves, by tag, at the update `step`."""
        if self.writer:
            for tag, value in scalars.items():
                self.writer.add_scalar(tag, value, step + self.step_shift)
            self.accelerator.log(scalars, step + self.step_shift)

    def add_results(self, results: dict[str, dict[str, float]], step: int) -> None:
        """Adds the results of an evaluation, "val" of the raw weights and "val_ema" of averaged ones."""
        for weights, result in results.items():
            # TensorBoard sorts curves by name, too, so accuracies come first.
            ending = weights.removeprefix("val")
            tags = {"top1": f"accuracy/top1{ending}", "top5": f"accuracy/top5{ending}", "loss": f"{weights}/loss"}
            self.add({tag: result[key] for key, tag in tags.items() if key in result}, step)

    def save(self, checkpoint: dict[str, Any], is_best: bool) -> None:
        """Writes the curves to the disk, and then saves a checkpoint."""
        if self.writer:
            self.writer.flush()
            self.run.save(checkpoint, self.cfg.keep_checkpoints, is_best)
        self.accelerator.wait_for_everyone()

    def write_history(self, history: list[dict[str, Any]]) -> None:
        if self.writer:
            self.run.write_history(history)

    def finish(self, best: float) -> None:
        """Writes a finished run's main settings, and those that are not their defaults, for TensorBoard's HPARAMS."""
        if not self.writer:
            return
        defaults = settings_of(type(self.cfg)())
        settings = {
            key if key in MAIN_SETTINGS else f"setting.{key}": value
            for key, value in settings_of(self.cfg).items()
            if key in MAIN_SETTINGS or defaults.get(key) != value
        }
        # Without the first summary, TensorBoard lists the settings of all runs, and puts those that differ in front.
        for summary in hparams(settings, {})[1:]:
            self.writer._get_file_writer().add_summary(summary)
        self.writer.add_scalar("when_finished/best_top1", best)
        self.writer.flush()


def keep_order(run: Run) -> None:
    """Renames event files dated in the future, as after a clock was set back: readers sort by the time in the names."""
    now = int(time.time())
    later = [file for file in run.event_files() if file.name.split(".")[3] >= f"{now:010d}"]
    for number, file in enumerate(later):
        *words, _, rest = file.name.split(".", 4)  # events.out.tfevents.TIME.REST
        file.rename(file.with_name(".".join((*words, f"{now - 1:010d}.{number:03d}", rest))))


def settings_of(cfg: Any) -> dict[str, bool | int | float | str]:
    """Returns the settings as words and numbers; other values become text."""
    values = cfg.values()
    values |= {f"model_kwargs.{key}": value for key, value in values.pop("model_kwargs").items()}
    return {key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in values.items()}


def set_aside(run: Run, checkpoint: Path | None = None) -> Path | None:
    """Moves what a run has written into a new folder inside its own, which can be resumed like the run.

    Only the `checkpoint` that the run goes on from stays, and becomes last.pt. Without one the run starts again.

    Returns:
        The new folder; None where the checkpoint is the last one, or nothing has been written.
    """
    if not run.has_begun():
        return None
    # On a file system without hard links, last.pt is a copy.
    if checkpoint and run.last.exists() and filecmp.cmp(checkpoint, run.last, shallow=checkpoint.samefile(run.last)):
        return None
    names = (run.path / f"before-{number}" for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    aside.mkdir()
    for file in run.config_file, run.environment_file:
        if file.exists():
            shutil.copyfile(file, aside / file.name)
    curves = run.event_files() if not checkpoint else []  # else the new curves hide the points after the checkpoint
    results = run.history_file, run.summary_file, run.bad_steps_file, run.curves_file
    for file in *run.checkpoints().values(), run.best, *results, *curves:
        if file.exists() and file != checkpoint:
            file.replace(aside / file.name)
    if checkpoint:  # at the end: a run that is killed before this goes on from its old last.pt
        if run.last.exists():
            second_name(run.last, aside / run.last.name)
        second_name(checkpoint, run.last)
    return aside
