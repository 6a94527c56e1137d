"""What results depend on beside their settings: the commit, the versions of libraries, the machine."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

LIBRARIES = "torch", "torchvision", "triton", "timm", "accelerate", "webdataset", "numpy", "pillow"


def find_commit() -> tuple[str | None, bool | None]:
    """The commit of this code, and whether there are changes beside it; None where git does not know.

    The variable VISION_LONGHORN_COMMIT names the commit of a copy that git does not know.
    """

    def git(*words: str) -> str | None:
        try:
            answer = subprocess.run(
                ["git", *words], cwd=Path(__file__).resolve().parent, capture_output=True, text=True
            )
        except OSError:  # no git on this machine
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    if told := os.environ.get("VISION_LONGHORN_COMMIT"):
        return told, None
    changes = git("status", "--porcelain")
    return git("rev-parse", "HEAD"), None if changes is None else bool(changes)


def describe_environment() -> dict[str, Any]:
    """The command, the commit, versions and the machine, for JSON."""
    versions: dict[str, str | None] = dict.fromkeys(LIBRARIES)
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    commit, changed = find_commit()
    return {
        "command": sys.argv,
        "commit": commit,
        "uncommitted_changes": changed,
        "python": platform.python_version(),
        "versions": versions,
        "platform": f"{platform.system()} {platform.machine()}",
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cpus": os.cpu_count(),
    }
