"""A training run on disk: the files in its folder, and the model that it trained.

Every module asks `Run` for the names of a run's files. Every command gets its model here, from a run's folder, one of
its checkpoints, a model folder in the hub's layout, or the hub.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision_longhorn.class_names import Names
from vision_longhorn.demo import DIGITS
from vision_longhorn.errors import UserError
from vision_longhorn.files import csv_file, left_aside, second_name, write_text
from vision_longhorn.lock import NAME, FolderLock

# Commands read their arguments before anything imports torch, so what needs it is imported in functions.
if TYPE_CHECKING:
    from vision_longhorn.models.create import TimmModel


class Run:
    """The folder of a training run. Neither the folder nor any of its files has to be there.

    Attributes:
        path: The folder.
        last, best: The latest checkpoint, and that of the epoch with the best top-1.
        config_file: The run's settings, YAML.
        environment_file: What else its bits depended on, JSON. Every run begins by writing it.
        history_file, summary_file: The results of all epochs, JSON and CSV.
        bad_steps_file: The evidence of updates that were not finite, JSON.
        curves_file: The picture of its curves, PNG.
        texts: All of these files but checkpoints and the picture.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.last, self.best = self.path / "last.pt", self.path / "best.pt"
        self.texts = tuple(
            self.path / name for name in ("config.yaml", "env.json", "metrics.json", "summary.csv", "bad_steps.json")
        )
        (
            self.config_file,
            self.environment_file,
            self.history_file,
            self.summary_file,
            self.bad_steps_file,
        ) = self.texts
        self.curves_file = self.path / "curves.png"

    def checkpoints(self) -> dict[int, Path]:
        """The checkpoints update-NUMBER.pt by their number, the earliest first."""
        files = {file.stem[7:]: file for file in self.path.glob("update-*.pt")}
        return dict(sorted((int(number), file) for number, file in files.items() if number.isdecimal()))

    def event_files(self) -> list[Path]:
        """TensorBoard's files, one for each time that the run was begun or gone on with, by the time in their names."""
        return sorted(self.path.glob("events.out.tfevents.*"))

    def history(self) -> list[dict[str, Any]]:
        """The results of the finished epochs, a dict each."""
        return _read_json(self.history_file) or []

    def environment(self) -> dict[str, Any]:
        """What the run's bits depended on beside its settings."""
        return _read_json(self.environment_file) or {}

    def has_begun(self) -> bool:
        """Whether a run has written here."""
        return self.environment_file.exists() or any(self.path.glob("*.pt"))

    def check_free(self, goes_on: bool) -> None:
        """Raises UserError where the folder holds another run, or files of these names that no run has written.

        Args:
            goes_on: Whether a run in the folder is the one to go on with.
        """
        if not goes_on and any(self.path.glob("*.pt")):
            raise UserError(
                f"{self.path} holds a run: go on with it by --resume {self.path}, or give another --run-dir"
            )
        for file in (*self.texts, self.curves_file) if not self.has_begun() else ():
            if os.path.lexists(file):
                raise UserError(f"{self.path} holds a {file.name} that no run has written: give another --run-dir")

    def holder(self) -> str:
        """Which other process holds the folder, in a sentence; "" where none does."""
        if (self.path / NAME).exists():
            try:
                FolderLock(self.path).release()
            except UserError as error:
                return str(error)
        return ""

    def clear(self) -> None:
        """Removes temporary files left by processes that were killed while writing."""
        for name in *self.texts, self.curves_file, self.last, self.best, self.path / "update-*.pt":
            for file in left_aside(name):
                file.unlink()

    def save(self, state: dict[str, Any], keep: int, is_best: bool = False) -> None:
        """Saves the checkpoint `state` as update-NUMBER.pt, as last.pt, and where it is the best as best.pt.

        The latest `keep` of update-NUMBER.pt stay.

        Raises:
            UserError: Where a file cannot be written. All earlier checkpoints are still there.
        """
        from vision_longhorn.checkpoint import save_checkpoint

        newest = self.path / f"update-{state['updates']:07d}.pt"
        save_checkpoint(newest, state)
        for name in (self.best, self.last) if is_best else (self.last,):  # no kill lets last.pt promise a missing best
            second_name(newest, name)
        # By number, as clocks may go back. Checkpoints beyond this one are those that the run went back behind.
        earlier = [file for number, file in self.checkpoints().items() if number < state["updates"]]
        for file in earlier[: max(0, len(earlier) + 1 - keep)]:
            file.unlink()

    def write_history(self, history: list[dict[str, Any]]) -> None:
        """Writes the results of all epochs as JSON and as a table with a row for each.

        A nested dict's keys get its own key before them in the table, as in "val_top1". An epoch may lack what others
        have, such as an evaluation.
        """
        write_text(self.history_file, json.dumps(history, indent=2) + "\n")
        rows = []
        for entry in history:
            row: dict[str, Any] = {}
            for key, value in entry.items():
                row |= {f"{key}_{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {key: value}
            rows.append(row)
        columns = list(dict.fromkeys(key for row in rows for key in row))
        with csv_file(self.summary_file) as writer:
            writer.writerow(columns)
            writer.writerows([row.get(column) for column in columns] for row in rows)


def _read_json(file: Path) -> Any:
    """The content of a JSON file; None where there is none, or it is damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


# ------------------------------------------------------------------------------------------------ from a run to a model


def run_file(path: str | os.PathLike[str]) -> Path:
    """The checkpoint that `path` stands for: a folder's best.pt, or the file itself."""
    run = Run(path)
    if not run.path.is_dir():
        return run.path
    if run.last.exists() and not run.best.exists():
        raise UserError(
            f"no checkpoint at {run.best}: the run has not been evaluated yet; {run.last} has its newest weights"
        )
    return run.best


def timm_source(path: str | os.PathLike[str]) -> str | None:
    """timm's name for a model and its weights: "local-dir:FOLDER" for a folder in the hub's layout, "hf-hub:USER/MODEL"
    as it is. None where `path` stands for a run's folder or file."""
    name = os.fspath(path)
    if name.startswith(("local-dir:", "hf-hub:")):
        return name
    is_model_folder = Path(path, "config.json").is_file() and not Run(path).best.is_file()
    return f"local-dir:{name}" if is_model_folder else None


def load_model(path: str | os.PathLike[str], **model_kwargs: Any) -> tuple[TimmModel, dict[str, Any] | None]:
    """The model of a run, as `load_run` gives it, or of a folder in the hub's layout, or on the hub.

    Args:
        path: As for `load_run`, or for `timm_source`.
        **model_kwargs: Arguments of the model; they override its own.

    Returns:
        (model, checkpoint): the checkpoint is None where there is no run.

    Raises:
        UserError: Where `path` holds no such model.
    """
    name = timm_source(path)
    if name is None:
        return load_run(path, **model_kwargs)
    from vision_longhorn.models.create import create_model

    return create_model(name, pretrained=True, **model_kwargs), None


def load_run(path: str | os.PathLike[str], **model_kwargs: Any) -> tuple[TimmModel, dict[str, Any]]:
    """The model of a training run, with its averaged weights if it has any, and the checkpoint.

    Its `pretrained_cfg` gets the run's input size, normalisation, resampling and crop, so that
    `timm.data.resolve_data_config(model=model)` gives the run's evaluation transform. It names no licence.

    Args:
        path: A run's folder (then its best.pt), or a checkpoint of train_imagenet.py.
        **model_kwargs: Arguments of the model; they override the run's own.

    Returns:
        (model, checkpoint): the model in training mode on the CPU, the dict as `load_checkpoint` reads it.

    Raises:
        UserError: Where `path` holds no such checkpoint.
    """
    from vision_longhorn.checkpoint import load_checkpoint
    from vision_longhorn.data.transforms import input_settings

    path = run_file(path)
    checkpoint = load_checkpoint(path)
    if not {"arch", "num_classes", "config"} <= checkpoint.keys():
        raise UserError(f"{path} does not say which model it holds: give a checkpoint of train_imagenet.py")
    model, _ = model_of_checkpoint(checkpoint, path, **model_kwargs)
    settings = input_settings(model, checkpoint["config"])
    # What timm knows about other weights of this architecture does not hold for these.
    model.pretrained_cfg.update(settings, num_classes=model.num_classes, tag=None, license=None, origin_url=None)
    return model, checkpoint


def model_of_checkpoint(
    checkpoint: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    arch: str | None = None,
    num_classes: int | None = None,
    ema: bool | None = None,
    **model_kwargs: Any,
) -> tuple[TimmModel, str]:
    """The model whose weights a checkpoint holds.

    Args:
        checkpoint: The dict that `load_checkpoint` read.
        path: Where it was read, for messages.
        arch, num_classes: timm's name of the model and its number of classes; default: the checkpoint's.
        ema: Take the averaged weights, or the raw ones; None: the averaged ones where there are any.
        **model_kwargs: Arguments of the model; they override the checkpoint's.

    Returns:
        (model, weights): the model in training mode on the CPU; "EMA" or "raw".

    Raises:
        UserError: Where nothing says which model it is, or the weights do not fit it.
    """
    from vision_longhorn.checkpoint import load_weights
    from vision_longhorn.models.create import create_model

    arch = arch or checkpoint.get("arch")
    if arch is None:
        raise UserError(f"{path} does not say which model it holds: give --model NAME")
    own = checkpoint.get("config", {}).get("model_kwargs", {})
    classes = checkpoint.get("num_classes") if num_classes is None else num_classes
    model = create_model(arch, **{**own, **model_kwargs, "num_classes": classes})
    ema = "state_dict_ema" in checkpoint if ema is None else ema
    load_weights(model, checkpoint, path, ema)
    return model, "EMA" if ema else "raw"


def checkpoint_names(checkpoint: dict[str, Any]) -> Names:
    """Names of a run's classes, as its checkpoint has them; for an older one, as the index of the run's data has them.

    Args:
        checkpoint: The dict that `load_checkpoint` read.
    """
    from vision_longhorn.data.index import read_index

    if "class_names" in checkpoint:
        return checkpoint["class_names"], checkpoint.get("display_names")
    config = checkpoint.get("config")
    data = config.get("data") if isinstance(config, dict) else None
    if data is None:
        return None, None
    try:
        index = read_index(Path("data", DIGITS) if data == DIGITS else data) or {}
    except UserError:  # a broken index does not matter to the model
        index = {}
    names = index.get("class_names")
    return (names, index.get("display_names")) if names and len(names) <= checkpoint["num_classes"] else (None, None)
