"""The JSON of a study, made of its trials' folders and earlier JSONs. Tables and plots are made of it alone."""

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lab.plan import Arm, Study, Trial, canonical_settings, missing_or_wrong
from lab.recall_config import RecallConfig
from lab.runs import Record, TrialFolder
from vision_longhorn.errors import UserError, one_line
from vision_longhorn.files import read_json, write_text
from vision_longhorn.models.create import create_model

SPEEDS = "speed.json"
RUN = {"key": str, "seed": int, "epochs": int, "final": dict, "curve": dict, "hits": dict}  # and more


class Known:
    """Results from earlier JSONs (`files`: of studies, or speed.json) and from the trials' folders below `out`.

    Attributes:
        runs, unfinished: The records of trials by (key of settings, seed).
        parameters, configs: Numbers of parameters, and settings, by key of settings.
        speeds: Measured speeds by key of a step's settings, then by hardware.
    """

    def __init__(self, out: Path, files: Iterable[Path] = ()) -> None:
        self.out = out
        self.runs: dict[tuple[str, int], Record] = {}
        self.unfinished: dict[tuple[str, int], Record] = {}
        self.parameters: dict[str, int] = {}
        self.configs: dict[str, Record] = {}
        self.speeds: dict[str, dict[str, Any]] = defaultdict(dict)
        for file in files:
            content = read_json(file)
            if not file.exists():
                raise UserError(f"there is no file {file} of a study's results")
            if not isinstance(content, dict) or not ({"arms", "runs"} <= content.keys() or "speeds" in content):
                raise UserError(f"{file} is not a study's result: give a JSON that `python -m lab` has written")
            try:
                self._take(content)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                what = missing_or_wrong(error)
                raise UserError(f"{file} is a damaged result of a study ({what}): leave it out") from error

    def _take(self, content: Record) -> None:
        for record in [*content.get("runs", []), *content.get("before", [])]:
            for field, kind in RUN.items():
                _expect(field, record[field], kind)
            for name, value in record["final"].items():
                _expect(f"final.{name}", value, (int, float))
            identity = record["key"], record["seed"]
            hits = {**self.runs.get(identity, {}).get("hits", {}), **record["hits"]}  # studies evaluate different sizes
            self.runs[identity] = {**record, "hits": hits}
        for record in content.get("unfinished", []):
            self.unfinished[record["key"], record["seed"]] = record
        for arm in content.get("arms", []):
            _expect("key", arm["key"], str)
            _expect("config", arm["config"], dict)
            _expect("model_kwargs", arm["config"].get("model_kwargs", {}), dict)
            self.configs[arm["key"]] = arm["config"]
            if arm.get("parameters"):
                self.parameters[arm["key"]] = arm["parameters"]
            if arm.get("speed"):
                self.speeds[arm["speed_key"]].update(arm["speed"])
        for key, speeds in content.get("speeds", {}).items():
            self.speeds[key].update(speeds)

    def check(self, arms: Iterable[Arm]) -> None:
        """Raises UserError if a default, which an arm's key leaves out, has changed since an earlier result of it."""
        for arm in arms:
            now = arm.config.decisive(canonical_settings(json.loads(json.dumps(arm.settings()))))
            before = arm.config.decisive(
                canonical_settings({"model_kwargs": {}, **self.configs.get(arm.key, arm.settings())})
            )
            for key, value in before.items():
                if key in now and now[key] != value:
                    raise UserError(
                        f"{arm.label}: an earlier result of it had {key}={value!r}, and the default is {now[key]!r} "
                        "now: give one of them in the file of studies, or leave that result out"
                    )

    def is_done(self, trial: Trial) -> bool:
        return trial.identity in self.runs or TrialFolder(self.out, trial).is_finished()

    def result(self, trial: Trial) -> Record:
        """Returns the record of a trial, from its folder if it is finished there, else from a JSON; {} if not done."""
        folder, before = TrialFolder(self.out, trial), self.runs.get(trial.identity, {})
        with contextlib.suppress(UserError):  # some of its files are lost
            if folder.is_finished():
                # Keep earlier hits: their weights may be gone.
                hits = {**before.get("hits", {}), **(read_json(folder.hits_file) or {})}
                return {**folder.result(), "hits": hits}
        return before

    def count_parameters(self, arm: Arm, num_classes: int | None = None) -> int | None:
        """Counts the parameters of an arm's model; None if only the data tell its number of classes."""
        classes = num_classes or getattr(arm.config, "num_classes", 0)
        if arm.key not in self.parameters and classes is not None:
            model = build(arm, classes)
            self.parameters[arm.key] = sum(parameter.numel() for parameter in model.parameters())
        return self.parameters.get(arm.key)


def _expect(field: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{field} is {value!r:.60}")


def build(arm: Arm, num_classes: int | None = None) -> torch.nn.Module:
    """Builds the model of an arm on the CPU, by default with the number of classes in its settings."""
    cfg = arm.config
    try:
        if isinstance(cfg, RecallConfig):
            from lab.recall import build_model  # tables do not need it

            return build_model(cfg)
        number = num_classes or cfg.num_classes
        classes = {} if number is None else {"num_classes": number}
        return create_model(cfg.model, drop_path_rate=cfg.drop_path or None, **classes, **cfg.model_kwargs)
    except UserError as error:
        raise UserError(f"study {arm.study}, {arm.label}: {error}") from None


def machine(device: str) -> str:
    """Returns the name of the GPU, or CPU."""
    return torch.cuda.get_device_name() if device != "cpu" and torch.cuda.is_available() else "CPU"


def collect(study: Study, known: Known) -> Record:
    """Makes the content of a study's JSON: its fields, "arms", "runs" (see `TrialFolder.result`), "unfinished" (trials
    that failed, or have not had all epochs) and "before" (runs of other settings or seeds that its last JSON had)."""
    runs, unfinished, classes = [], [], dict[str, int | None]()
    for trial in study.trials():
        folder, record = TrialFolder(known.out, trial), known.result(trial)
        if record:
            classes[trial.arm.key] = record.get("environment", {}).get("num_classes")
            wanted = [str(size) for size in study.sizes(trial.arm) if str(size) in record["hits"]]
            runs.append({**record, "hits": {size: record["hits"][size] for size in wanted}})
        elif found := _unfinished(folder) or known.unfinished.get(trial.identity):
            unfinished.append(found)
    earlier = read_json(known.out / f"{study.name}.json") or {}
    stay = {(run["key"], run["seed"]) for run in runs}
    left = [run for part in ("runs", "before") for run in earlier.get(part, [])]
    fields = "task", "asks", "baseline", "weights", "pair", "contrasts", "resolutions"
    return {
        "study": study.name,
        **{field: getattr(study, field) for field in fields},
        "arms": [_describe(arm, known, classes.get(arm.key)) for arm in study.arms],
        "runs": runs,
        "unfinished": unfinished,
        "before": [run for run in left if (run["key"], run["seed"]) not in stay],
    }


def _unfinished(folder: TrialFolder) -> Record | None:
    """Returns the record of a trial that is not done, or says what the folder of a finished one lacks."""
    if folder.is_finished():
        try:
            folder.result()
        except UserError as error:
            return {**(folder.unfinished() or {}), "exit_code": 0, "last_line": one_line(error)}
    return folder.unfinished()


def _describe(arm: Arm, known: Known, num_classes: int | None) -> Record:
    return {
        "setting": arm.setting,
        "variant": arm.variant,
        "data": arm.data,
        "key": arm.key,
        "seeds": list(arm.seeds),
        "parameters": known.count_parameters(arm, num_classes),
        "images_per_epoch": arm.images_per_epoch,
        "speed_key": arm.speed_key,
        "speed": known.speeds.get(arm.speed_key, {}),
        "config": arm.settings(),
    }


def write_results(path: Path, content: Record) -> None:
    """Writes a JSON in which each item of a long list has a line of its own."""

    def lines(value: Any) -> str:
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
            return "[\n  " + ",\n  ".join(json.dumps(item) for item in value) + "\n ]"
        return json.dumps(value)

    write_text(path, "{\n " + ",\n ".join(f'"{key}": {lines(value)}' for key, value in content.items()) + "\n}\n")
