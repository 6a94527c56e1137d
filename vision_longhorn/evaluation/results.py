"""Results of evaluations on disk, a JSON file each. Imports no torch, as commands check `--out` first."""

import json
import os
from pathlib import Path
from typing import Any


def read_result(path: str | Path) -> dict[str, Any] | None:
    """The result in a file; None where the file holds anything else."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        return result if {"top1", "top5", "count", "split"} <= result.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def is_free(path: str | Path, about: dict[str, Any]) -> bool:
    """Whether nothing is at `path`, or an earlier result of the evaluation that has the values `about`."""
    before = read_result(path)
    return not os.path.lexists(path) or before is not None and all(before.get(key) == about[key] for key in about)
