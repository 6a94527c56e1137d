"""The commit, the versions of libraries and the machine, on which results depend beside their settings."""

import contextlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from vision_longhorn import __version__

LIBRARIES = "torch", "torchvision", "triton", "numba", "timm", "accelerate", "webdataset", "numpy", "pillow"


def find_commit() -> tuple[str | None, bool | None]:
    """Finds this code's commit (in a copy without git, VISION_LONGHORN_COMMIT), and whether there are changes."""
    if told := os.environ.get("VISION_LONGHORN_COMMIT"):
        return told, None
    file = Path(__file__)
    here: Any = dict(cwd=file.parent, stderr=subprocess.DEVNULL, text=True)
    try:
        # The first fails in a repository of somebody else, into which this package was installed.
        _, commit, changes = (
            subprocess.check_output(["git", *words], **here).strip()
            for words in (("ls-files", "--error-unmatch", file.name), ("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.CalledProcessError):  # no git on this machine, or no clone
        return None, None
    return commit, bool(changes)


def describe_environment() -> dict[str, Any]:
    """Returns the package's version, the command line, the commit, the libraries' versions and the hardware."""
    versions: dict[str, str | None] = dict.fromkeys(LIBRARIES)
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    commit, changed = find_commit()
    return {
        "version": __version__,
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
