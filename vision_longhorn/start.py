"""How this process was started. Imported before all else, so it imports next to nothing."""

import sys
from pathlib import Path

SCRIPTS = ("train_imagenet.py", "eval.py")  # at the top of the repository


def is_own_command():
    """Whether this process was started as one of this package's commands: by `vision-longhorn`, by `python -m
    vision_longhorn...`, or as a script at the top of the repository that holds the package."""
    started = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path()
    if started.stem == "vision-longhorn":
        return True
    if started.name in SCRIPTS:
        return started.resolve().parent == Path(__file__).resolve().parents[1]
    words = sys.orig_argv
    module = words[words.index("-m") + 1] if "-m" in words[1:-1] else ""
    return sys.argv[:1] == ["-m"] and module.partition(".")[0] == __package__
