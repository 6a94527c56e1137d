"""How this process was started. Imported before all else, so it imports next to nothing."""

import sys
from pathlib import PurePath


def is_own_command() -> bool:
    """Whether this process was started as one of this package's commands: by `vision-longhorn`, by `python -m
    vision_longhorn...`, or as a script that says so by a global OWN_COMMAND."""
    if getattr(sys.modules.get("__main__"), "OWN_COMMAND", False):
        return True
    started = PurePath(sys.argv[0]) if sys.argv and sys.argv[0] else PurePath()
    if started.name in ("vision-longhorn", "vision-longhorn.exe"):
        return True
    words = sys.orig_argv
    module = words[words.index("-m") + 1] if "-m" in words[1:-1] else ""
    return sys.argv[:1] == ["-m"] and module.partition(".")[0] == "vision_longhorn"
