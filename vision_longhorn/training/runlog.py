"""The curves of a run, for TensorBoard and, where the user asks for one, for a tracker of accelerate's."""

import time

import yaml
from accelerate import Accelerator
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from vision_longhorn.runs import Run
from vision_longhorn.settings import Settings

# TensorBoard sorts curves and settings by name. So accuracies come first, the one result last, and the main settings
# before all others, which begin with "setting.".
ACCURACIES = {
    "val": {"top1": "accuracy/top1", "top5": "accuracy/top5"},
    "val_ema": {"top1": "accuracy/top1_ema", "top5": "accuracy/top5_ema"},
}
MAIN_SETTINGS = ("model", "mixer", "lr", "epochs", "seed")


class RunLog:
    """Writes a run's curves and settings. Only the first process has one.

    A tracker knows a run that goes on by when it first `started`. Earlier entries are hidden from `purge_step` on.
    """

    def __init__(
        self, accelerator: Accelerator, run: Run, cfg: Settings, started: str, purge_step: int | None = None
    ) -> None:
        self.accelerator, self.tracked = accelerator, cfg.track is not None
        keep_order(run)
        self.writer = SummaryWriter(run.path, purge_step=purge_step)
        self.writer.add_text("config", "```yaml\n" + yaml.safe_dump(cfg.values(), sort_keys=False) + "```")
        if self.tracked:
            name = run.path.name
            options = dict(name=name, id=f"{name}-{started}", dir=str(run.path), resume="allow")
            accelerator.init_trackers("vision-longhorn", config=settings_of(cfg), init_kwargs={"wandb": options})

    def add(self, scalars: dict[str, float], step: int) -> None:
        """Writes numbers by tag, at the update `step`."""
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, step)
        if self.tracked:
            self.accelerator.log(scalars, step=step)

    def add_results(self, results: dict[str, dict[str, float]], step: int) -> None:
        """Writes the results of an evaluation, "val" of the raw weights and "val_ema" of averaged ones."""
        for weights, result in results.items():
            keys = [key for key in ("top1", "top5", "loss") if key in result]
            self.add({ACCURACIES[weights].get(key, f"{weights}/{key}"): result[key] for key in keys}, step)

    def finish(self, cfg: Settings, best: float) -> None:
        """Writes a finished run's main settings, and those that are not their defaults, for TensorBoard's HPARAMS."""
        defaults = settings_of(type(cfg)())
        settings = {
            key if key in MAIN_SETTINGS else f"setting.{key}": value
            for key, value in settings_of(cfg).items()
            if key in MAIN_SETTINGS or defaults.get(key) != value
        }
        # Without the first summary, TensorBoard lists the settings of all runs, and puts those that differ in front.
        for summary in hparams(settings, {})[1:]:
            self.writer._get_file_writer().add_summary(summary)
        self.writer.add_scalar("when_finished/best_top1", best)
        self.writer.flush()

    def close(self) -> None:
        """Closes the files, and ends the tracker's run."""
        self.writer.close()
        if self.tracked:
            for tracker in self.accelerator.trackers:
                tracker.finish()


def keep_order(run: Run) -> None:
    """Renames event files from the future: readers sort by the time in the names, and the clock has gone back."""
    now = int(time.time())
    later = [file for file in run.event_files() if file.name.split(".")[3] >= f"{now:010d}"]
    for number, file in enumerate(later):
        *words, _, rest = file.name.split(".", 4)  # events.out.tfevents.TIME.REST
        file.rename(file.with_name(".".join((*words, f"{now - 1:010d}.{number:03d}", rest))))


def settings_of(cfg: Settings) -> dict[str, bool | int | float | str]:
    """The settings as words and numbers; other values become text."""
    values = cfg.values()
    values |= {f"model_kwargs.{key}": value for key, value in values.pop("model_kwargs").items()}
    return {key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in values.items()}
