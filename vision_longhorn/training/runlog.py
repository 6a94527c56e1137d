"""Where the curves of a run go: TensorBoard, and a tracker of accelerate's where the user asks for one."""

import time
from pathlib import Path

import yaml
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from torch.utils.tensorboard import SummaryWriter

from vision_longhorn.errors import UserError
from vision_longhorn.training.config import Settings

PROJECT = "vision-longhorn"


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

    def flush(self) -> None:
        """Brings what was written so far to the file."""
        self.writer.flush()

    def finish(self, cfg: Settings, results: dict[str, dict[str, float]], best: float) -> None:
        """Writes the settings of a finished run with its results, by which TensorBoard's HPARAMS page compares runs."""
        metrics = {f"final/{tag}_{key}": result[key] for tag, result in results.items() for key in ("top1", "loss")}
        self.writer.add_hparams(settings_of(cfg), {**metrics, "final/best_top1": best}, run_name=".")
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
