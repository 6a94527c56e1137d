"""What a study's runs leave on disk: whether they are finished, and what came of them."""

import json
import time
from pathlib import Path
from typing import Any

import yaml

from lab.plan import Run
from vision_longhorn.files import write_text
from vision_longhorn.runs import Run as RunFiles
from vision_longhorn.runs import read_json

BESIDE, FAILED, HITS, OUTPUT = "study.json", "failed.json", "hits.json", "output.log"  # beside the trainer's own files


def folder_of(out: Path, run: Run) -> Path:
    """Folder of a run in the folder `out` of studies: the one that another study has made for it, or its own."""
    made = sorted(out.glob(f"runs/*-s{run.seed}-{run.arm.key}"))
    return made[0] if made else out / "runs" / run.name


def history_of(folder: Path) -> list[dict[str, Any]]:
    """The results of a run's finished epochs, a dict each."""
    return RunFiles(folder).history()


def is_finished(folder: Path, run: Run) -> bool:
    """Whether the run in the folder has nothing left to do."""
    return run.arm.config.is_over(history_of(folder))


def holder_of(folder: Path) -> str:
    """What another process that writes to the folder calls itself; "" where there is none."""
    return RunFiles(folder).holder()


def prepare(out: Path, folder: Path, run: Run, beside: int, workers: int) -> Path:
    """Makes the folder of a run that is to begin or to go on, and mends what a kill has left half there.

    Args:
        out: Folder of the studies.
        folder, run: The run's folder, and the run.
        beside: Runs that share its device, itself included.
        workers: Loader processes, if it begins: the order of its samples depends on them, so it keeps them.

    Returns:
        The YAML file of its effective settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FAILED).unlink(missing_ok=True)
    before = (read_json(folder / BESIDE) or {}).get("side_by_side", beside)
    write_text(folder / BESIDE, json.dumps({"side_by_side": max(before, beside)}) + "\n")
    file = out / "configs" / f"{folder.name}.yaml"
    config = run.arm.config
    values = {key: value for key, value in config.values().items() if key not in config.named("host")}
    own = {"seed": run.seed, **({"workers": workers} if run.arm.of_images else {})}
    write_text(file, yaml.safe_dump({**values, **own}, sort_keys=False))
    return file


def complete_history(folder: Path, run: Run) -> None:
    """Writes the results of a run that was killed between its last checkpoint and them; without this it could neither
    go on nor count as finished."""
    files = RunFiles(folder)
    if len(files.history()) != run.arm.config.epochs - 1 or not files.last.exists():
        return
    from vision_longhorn.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(files.last)
    if checkpoint["epoch"] == run.arm.config.epochs:
        files.write_history(checkpoint["history"])


def note_failure(folder: Path, code: int) -> dict[str, Any]:
    """Records that a run has ended by the exit code `code`; the record, with the last lines it has printed."""
    try:
        lines = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    record = {"exit_code": code, "last_lines": lines[-8:], "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    write_text(folder / FAILED, json.dumps(record, indent=2) + "\n")
    return record


def result_of(folder: Path, run: Run) -> dict[str, Any]:
    """What came of a finished run, fit for JSON and without a path.

    Returns:
        Dict with "key" (of its settings), "seed", "epochs", "final" ("raw", "ema": top-1 in per cent of the last
        epoch), "curve" (a list for each: "epoch", "train_loss", "raw", "ema"), "seconds" (of training, without
        evaluation), "images_per_s", "wall_seconds" (from its first update, evaluation included), "side_by_side" (runs
        on its device), "skipped_updates", "environment", and "hits" by image size (see `hits_of`), as far as
        they were looked at. A run of recall has the share of answered queries as its top-1, and sequences for images.
    """
    history, environment = history_of(folder), RunFiles(folder).environment()
    facts = {key: environment.pop(key, None) for key in ("command", "updates_per_epoch", "global_batch")}
    curve = curve_of(history)
    images = len(history) * facts["updates_per_epoch"] * facts["global_batch"]
    clock = _clock(folder, images / len(history))
    return {
        "key": run.arm.key,
        "seed": run.seed,
        "epochs": len(history),
        "final": {name: curve[name][-1] for name in ("raw", "ema") if name in curve},
        "curve": curve,
        **clock,
        "images_per_s": _round(images / clock["seconds"]) if clock["seconds"] else None,
        "side_by_side": (read_json(folder / BESIDE) or {}).get("side_by_side", 1),
        "environment": environment,
        "hits": read_json(folder / HITS) or {},
    }


def curve_of(history: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """What a run's epochs came to: lists "epoch" and "train_loss", and "raw" and "ema" (top-1 in per cent, None where
    it was not evaluated), as far as an epoch has them."""
    curve: dict[str, list[Any]] = {
        "epoch": [entry["epoch"] for entry in history],
        "train_loss": [_round(entry["train_loss"]) for entry in history],
    }
    for name, tag in ("raw", "val"), ("ema", "val_ema"):
        if any(tag in entry for entry in history):
            curve[name] = [_round(entry[tag]["top1"]) if tag in entry else None for entry in history]
    return curve


def _clock(folder: Path, images_per_epoch: float) -> dict[str, Any]:
    """Seconds and skipped updates, from a run's events: it may have been stopped and gone on several times."""
    import numpy as np
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    from vision_longhorn.plots import read_scalars

    scalars = read_scalars(folder)
    epochs, rates = scalars["train/images_per_s"]  # an entry for each stretch of updates
    seconds = float((np.diff(epochs, prepend=0) * images_per_epoch / rates).sum())
    wall = 0.0
    for file in RunFiles(folder).event_files():
        times = [event.wall_time for event in EventFileLoader(str(file)).Load()]
        wall += times[-1] - times[0] if times else 0
    return {
        "seconds": _round(seconds),
        "wall_seconds": _round(max(wall, seconds)),  # what a kill kept from the file is in neither event
        "skipped_updates": int(scalars["train/skipped"][1][-1]),
    }


def _round(number: float) -> float:
    """Six digits: more say nothing, and fill files."""
    return float(f"{number:.6g}")
