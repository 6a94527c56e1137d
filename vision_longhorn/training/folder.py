"""The folder of a run as training writes it: checkpoints, results, and curves for TensorBoard and other trackers."""

import contextlib
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any, TextIO

import torch
import yaml
from accelerate import Accelerator
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from vision_longhorn.environment import describe_environment
from vision_longhorn.files import clear_aside, lock_folder, second_name, write_text
from vision_longhorn.runs import Run
from vision_longhorn.settings import Settings

# TensorBoard sorts settings by name. So the main ones come before all others, which begin with "setting.".
MAIN_SETTINGS = ("model", "mixer", "lr", "epochs", "seed")


class RunFolder:
    """The `Run` that this training writes at `path`, where the folder need not be there yet.

    All processes hold one; only the first writes. The end of `held` closes the curves and frees the folder for others.

    Raises:
        UserError: Where the folder holds another run, or another process writes to it.
    """

    def __init__(self, path: Path, cfg: Any, accelerator: Accelerator, held: contextlib.ExitStack) -> None:
        self.run, self.path = Run(path), path
        self.cfg, self.accelerator, self.held = cfg, accelerator, held
        self.checkpoint = Path(cfg.resume) if cfg.resume and Path(cfg.resume).exists() else None
        self.lock: TextIO | None = None
        self.writer: SummaryWriter | None = None  # from `open` on, in the first process
        str(path).encode()  # TensorBoard would refuse a name that is not UTF-8 once the folder has been made
        self.run.check_free(goes_on=bool(cfg.resume))
        accelerator.wait_for_everyone()  # all have looked before the first one writes
        if path.exists() and accelerator.is_main_process:
            self.lock = held.enter_context(lock_folder(path))

    def open(self, facts: dict[str, Any], started: str, updates: int) -> None:
        """Makes the folder, after the first update, so that a command that fails at once leaves none.

        Earlier checkpoints beyond this number of `updates` are set aside, and earlier curves are hidden. `facts` are
        what the run's bits depend on beside its config. A tracker knows a run by when it first `started`.
        """
        if self.writer or not self.accelerator.is_main_process:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = self.lock or self.held.enter_context(lock_folder(self.path))
        self.run.check_free(goes_on=bool(self.cfg.resume))  # another may have begun and ended since
        clear_aside(self.path / "*.pt")
        if aside := set_aside(self.run, self.checkpoint, updates):
            what = "this run has gone back behind" if self.checkpoint else "an earlier run left"
            self.accelerator.print(f"Note: what {what} is in {aside} now.")
        # The environment comes first: it tells a run's folder from one in which somebody keeps a config.yaml.
        write_text(self.run.environment_file, json.dumps({**describe_environment(), **facts}, indent=2) + "\n")
        config = yaml.safe_dump(self.cfg.values(), sort_keys=False)
        write_text(self.run.config_file, config)
        hidden = updates + 1 if self.checkpoint else None
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
                self.writer.add_scalar(tag, value, step)
            self.accelerator.log(scalars, step)

    def add_results(self, results: dict[str, dict[str, float]], step: int) -> None:
        """Adds the results of an evaluation, "val" of the raw weights and "val_ema" of averaged ones."""
        for weights, result in results.items():
            # TensorBoard sorts curves by name, too, and shows accuracies first.
            ending = weights.removeprefix("val")
            tags = {"top1": f"accuracy/top1{ending}", "top5": f"accuracy/top5{ending}", "loss": f"{weights}/loss"}
            self.add({tag: result[key] for key, tag in tags.items() if key in result}, step)

    def save(self, checkpoint: dict[str, Any], is_best: bool) -> None:
        """Saves a checkpoint, after the curves up to it."""
        if self.writer:
            self.writer.flush()
            self.run.save(checkpoint, self.cfg.keep_checkpoints, is_best)
        self.accelerator.wait_for_everyone()

    def write_history(self, history: list[dict[str, Any]]) -> None:
        """Writes the results of all epochs."""
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


def settings_of(cfg: Settings) -> dict[str, bool | int | float | str]:
    """The settings as words and numbers; other values become text."""
    values = cfg.values()
    values |= {f"model_kwargs.{key}": value for key, value in values.pop("model_kwargs").items()}
    return {key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in values.items()}


def set_aside(run: Run, checkpoint: Path | None = None, updates: int = 0) -> Path | None:
    """Moves all that a run has written beyond a checkpoint into a new folder within, which can be resumed like the run.

    Then last.pt is that checkpoint. Without a checkpoint the run starts anew. `updates` is its number with the present
    number of processes.

    Returns:
        The new folder; None where nothing is beyond.
    """
    made = _epochs_made(checkpoint) if checkpoint else -1
    beyond = [file for number, file in run.checkpoints().items() if number > updates or _epochs_made(file) > made]
    names = [name for name in (run.last, run.best) if name.exists() and _epochs_made(name) > made]
    if checkpoint and not run.last.exists():
        second_name(checkpoint, run.last)
    if not (beyond or names or not checkpoint and run.has_begun()):
        return None
    names_aside = (run.path / f"before-{number}" for number in itertools.count(1))
    aside = next(name for name in names_aside if not name.exists())
    aside.mkdir()
    for file in run.config_file, run.environment_file:
        if file.exists():
            shutil.copyfile(file, aside / file.name)
    # In this order, a kill at any moment loses nothing, and the next resume goes on from here.
    if checkpoint and run.last in names:
        second_name(run.last, aside / run.last.name)
        second_name(checkpoint, run.last)
        names.remove(run.last)
    curves = run.event_files() if not checkpoint else []  # else the new ones hide those beyond
    for file in *names, *beyond, run.history_file, run.summary_file, run.bad_steps_file, run.curves_file, *curves:
        if file.exists():
            file.replace(aside / file.name)
    return aside


def _epochs_made(file: Path) -> float:
    """Epochs at a checkpoint, which compare over other numbers of processes. One that is damaged is beyond all."""
    with contextlib.suppress(Exception):  # torch raises half a dozen types for damaged files
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # its tensors stay on the disk
        return state["updates"] / state.get("facts", {}).get("updates_per_epoch", 1)
    return math.inf
