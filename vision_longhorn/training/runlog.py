"""Where the curves of a run go: TensorBoard, and a tracker of accelerate's where the user asks for one."""

import time
from pathlib import Path

import yaml
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from vision_longhorn.errors import UserError
from vision_longhorn.settings import Settings

PROJECT = "vision-longhorn"

# TensorBoard sorts groups of curves and settings by name. So accuracies have a group of their own, which comes first,
# what has one point has one that comes last, and all settings but these have a prefix that puts them behind these.
ACCURACIES = {
    "val": {"top1": "accuracy/top1", "top5": "accuracy/top5"},
    "val_ema": {"top1": "accuracy/top1_ema", "top5": "accuracy/top5_ema"},
}
BEST = "when_finished/best_top1"
MAIN_SETTINGS = ("model", "mixer", "lr", "epochs", "seed")
OTHER_SETTINGS = "setting."


def check_tracker(name: str | None) -> None:
    """Raises UserError where accelerate would leave the tracker out without a word, as its package is missing."""
    if name and name not in map(str, get_available_trackers()):
        raise UserError(f"track is {name!r}, and its package is not installed: install it, or leave track out")


class RunLog:
    """Writes a run's scalars, its config, and its settings beside its results. For the first process alone.

    Args:
        accelerator: Brings the tracker, if there is one.
        run_dir: Folder of the run.
        cfg: Its config.
        started: When it first started, a word that stays when it goes on.
        purge_step: Entries from this step on that stand there already are hidden.
    """

    def __init__(
        self, accelerator: Accelerator, run_dir: Path, cfg: Settings, started: str, purge_step: int | None = None
    ) -> None:
        self.accelerator, self.tracked = accelerator, cfg.track is not None
        keep_order(run_dir)
        self.writer = SummaryWriter(run_dir, purge_step=purge_step)
        self.writer.add_text("config", "```yaml\n" + yaml.safe_dump(cfg.values(), sort_keys=False) + "```")
        if self.tracked:
            # A run that goes on is the same run there, another one in its folder is not.
            options = dict(name=run_dir.name, id=f"{run_dir.name}-{started}", dir=str(run_dir), resume="allow")
            accelerator.init_trackers(PROJECT, config=settings_of(cfg), init_kwargs={"wandb": options})

    def add(self, scalars: dict[str, float], step: int) -> None:
        """Writes a dict of tag to number, at the update `step`."""
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, step)
        if self.tracked:
            self.accelerator.log(scalars, step=step)

    def add_results(self, results: dict[str, dict[str, float]], step: int) -> None:
        """Writes what an evaluation came to, "val" of the raw weights and "val_ema" of averaged ones."""
        self.add(
            {
                ACCURACIES[weights].get(key, f"{weights}/{key}"): result[key]
                for weights, result in results.items()
                for key in ("top1", "top5", "loss")
                if key in result
            },
            step,
        )

    def flush(self) -> None:
        """Brings what was written so far to the file."""
        self.writer.flush()

    def finish(self, cfg: Settings, best: float) -> None:
        """Writes the settings of a finished run, by which TensorBoard's HPARAMS page compares runs: the main ones, and
        those that are not their defaults."""
        defaults = settings_of(type(cfg)())
        settings = {
            key if key in MAIN_SETTINGS else OTHER_SETTINGS + key: value
            for key, value in settings_of(cfg).items()
            if key in MAIN_SETTINGS or defaults.get(key) != value
        }
        # Without the first of the three, a list of settings and results, TensorBoard makes one out of all runs: what
        # differs between these then stands in front, and each curve's last value is a result.
        for summary in hparams(settings, {})[1:]:
            self.writer._get_file_writer().add_summary(summary)
        self.writer.add_scalar(BEST, best)
        self.writer.flush()

    def close(self) -> None:
        """Closes the files, and ends the tracker's run."""
        self.writer.close()
        if self.tracked:
            for tracker in self.accelerator.trackers:
                tracker.finish()


def keep_order(run_dir: Path) -> None:
    """Renames event files that are of a later time than now, as the clock has gone back since: those who read them go
    by the time in their names, and would take what they hold for newer than what is still to come."""
    now = int(time.time())
    later = [file for file in sorted(run_dir.glob("events.out.tfevents.*")) if file.name.split(".")[3] >= f"{now:010d}"]
    for number, file in enumerate(later):
        rest = file.name.split(".", 4)[-1]
        file.rename(file.with_name(f"events.out.tfevents.{now - 1:010d}.{number:03d}.{rest}"))


def settings_of(cfg: Settings) -> dict[str, bool | int | float | str]:
    """Dict of the run's values that are words or numbers; what is neither becomes its text."""
    values = cfg.values()
    flat = {key: value for key, value in values.items() if key != "model_kwargs"}
    flat.update({f"model_kwargs.{key}": value for key, value in values["model_kwargs"].items()})
    return {key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in flat.items()}
