"""Results of evaluations on disk, a JSON file each, and their names."""

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

from vision_longhorn.demo import DIGITS

# Values by which two results are of the same evaluation. They may differ in processes, batch size and speed.
SAME = ("model", "model_kwargs", "weights", "checkpoint", "data", "split", "input_size", "precision", "map_classes")


def absolute(spec: str) -> str:
    """The absolute path of data; URLs and commands as they are."""
    if spec == DIGITS:
        spec = os.path.join("data", DIGITS)
    return spec if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:", spec) and not os.path.exists(spec) else os.path.abspath(spec)


def default_name(about: dict[str, Any], own_data: str | None, has_ema: bool) -> Path:
    """The file for a result. Its name tells in what the evaluation differs from a run's own.

    Args:
        about: The values of SAME.
        own_data: Data of the run that is evaluated, absolute; None without a run.
        has_ema: Whether the checkpoint has averaged weights, too.
    """
    file = Path(about["checkpoint"]) if about["checkpoint"] else None
    words = ["eval"]
    if not file:
        words.append(about["model"])
    elif file.stem != "best":
        words.append(file.stem)
    if about["data"] != own_data:
        words.append(Path(about["data"]).name)
    words.append(about["split"])
    if about["weights"] == "raw" and has_ema or "random" in about["weights"]:
        words.append(about["weights"].split()[-1])
    if about["map_classes"]:
        words.append("mapped")
    name = "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", word).strip("_.")[-60:] for word in words)
    return (file.parent if file else Path()) / f"{name}.json"


def free_name(path: Path, about: dict[str, Any]) -> Path:
    """`path`, or the first of `path`-2, -3, ... at which no result of another evaluation stands."""
    names = itertools.chain([path], (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2)))
    return next(name for name in names if is_free(name, about))


def is_free(path: str | Path, about: dict[str, Any]) -> bool:
    """Whether nothing is at `path`, or an earlier result of the same evaluation."""
    before = read_result(path)
    return not os.path.lexists(path) or before is not None and all(before.get(key) == about[key] for key in SAME)


def read_result(path: str | Path) -> dict[str, Any] | None:
    """The result in a file; None where the file holds anything else."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        return result if {"top1", "top5", "count", "split"} <= result.keys() else None
    except (OSError, ValueError, AttributeError):
        return None
