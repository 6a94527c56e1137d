"""`vision-longhorn train`, which is train_imagenet.py."""

from collections.abc import Sequence
from pathlib import Path

from vision_longhorn.errors import spelled
from vision_longhorn.training.config import load_config


def main(argv: Sequence[str] | None = None) -> Path:
    """Trains as the command line `argv` says, by default the process's own. Returns the run's folder."""
    config, name = load_config(argv)
    from vision_longhorn.training.trainer import train  # takes seconds, for which --help and mistakes need not wait

    with spelled(num_samples="train_samples"):
        return train(config, name)


if __name__ == "__main__":
    from vision_longhorn.command_line.commands import run

    run("train")
