"""The JSON of a study: from its runs' folders and from earlier JSONs; tables and plots are made of it alone."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lab.plan import Arm, Run, Study
from lab.recall_config import RecallConfig
from lab.runs import FAILED, curve_of, folder_of, history_of, is_finished, read_json, result_of
from vision_longhorn.errors import UserError, one_line
from vision_longhorn.files import write_text

Record = dict[str, Any]
SPEEDS = "speed.json"
_OF_RUNS: dict[str, Any] = {"key": str, "seed": int, "epochs": int, "final": dict, "curve": dict, "hits": dict}


def _expect(field: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{field} is {value!r:.60}")


class Known:
    """What is known of runs from earlier JSONs, and of speeds.

    Args:
        files: JSONs of studies, or speed.json.

    Attributes:
        runs: The records of finished runs by (key of settings, seed).
        failed: Those of runs that were not finished.
        parameters: Numbers of parameters by key of settings.
        configs: Settings by their key.
        speeds: By key of a step's settings, then by hardware.
        environments: Where a study last ran, by its name.

    Raises:
        UserError: For a file that is neither.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.runs: dict[tuple[str, int], Record] = {}
        self.failed: dict[tuple[str, int], Record] = {}
        self.parameters: dict[str, int] = {}
        self.configs: dict[str, Record] = {}
        self.speeds: dict[str, dict[str, Any]] = {}
        self.environments: dict[str, Record] = {}
        for file in files:
            self._read(file)

    def _read(self, file: Path) -> None:
        content = read_json(file)
        if not file.exists():
            raise UserError(f"there is no file {file} of a study's results")
        if not isinstance(content, dict) or not (
            {"arms", "runs", "unfinished"} <= content.keys() or "speeds" in content
        ):
            raise UserError(f"{file} is no result of a study: give a JSON that `python -m lab` has written")
        try:
            self._take(content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
            raise UserError(
                f"{file} is a damaged result of a study ({what}): leave it out, or give a JSON as "
                "`python -m lab` has written it"
            ) from error

    def _take(self, content: Record) -> None:
        if content.get("environment"):
            self.environments[content["study"]] = content["environment"]
        for record in content.get("runs", []):
            before = self.runs.get((record["key"], record["seed"]), {})
            hits = {**before.get("hits", {}), **record["hits"]}  # studies look at different sizes
            for field, kind in _OF_RUNS.items():
                _expect(field, record[field], kind)
            for name, value in record["final"].items():
                _expect(f"final.{name}", value, (int, float))
            self.runs[record["key"], record["seed"]] = {**record, "hits": hits}
        for record in content.get("unfinished", []):
            self.failed[record["key"], record["seed"]] = record
        for arm in content.get("arms", []):
            _expect("key", arm["key"], str)
            _expect("config", arm["config"], dict)
            self.configs[arm["key"]] = arm["config"]
            if arm.get("parameters"):
                self.parameters[arm["key"]] = arm["parameters"]
            if arm.get("speed"):
                self.speeds.setdefault(arm["speed_key"], {}).update(arm["speed"])
        for key, speeds in content.get("speeds", {}).items():
            self.speeds.setdefault(key, {}).update(speeds)

    def check(self, arms: Iterable[Arm]) -> None:
        """Raises UserError where an earlier result of an arm's key was made with other settings: of what a key stands
        for the defaults are no part, and they may have changed since."""
        for arm in arms:
            if arm.key not in self.configs:
                continue
            now = arm.config.decisive(json.loads(json.dumps(arm.settings())))
            for key, value in arm.config.decisive(self.configs[arm.key]).items():
                if key in now and now[key] != value:
                    raise UserError(
                        f"{arm.label}: an earlier result of it had {key}={value!r}, and now that is {now[key]!r} by "
                        "default: state one of them in the file of studies, or leave that result out"
                    )

    def is_done(self, out: Path, run: Run) -> bool:
        """Whether nothing is left to do for a run: it is finished in its folder, or a JSON has it."""
        return run.identity in self.runs or is_finished(folder_of(out, run), run)


def collect(study: Study, out: Path, known: Known, environment: Record | None) -> Record:
    """The content of a study's JSON.

    Args:
        study: The study.
        out: Folder of the studies, with the runs' folders.
        known: What else is known of its runs; a folder's own result comes first.
        environment: What `describe_environment` says of this machine; None: it has run nothing, and where the study
            last ran counts.

    Returns:
        Dict with "study", "task", "asks", "baseline", "weights", "pair", "contrasts", "resolutions", "environment",
        "arms" (a dict for each variant in each setting, with "key", "parameters", "config" and "speed"), "runs" (see
        `result_of`) and "unfinished" (runs that failed, or have not had all epochs, with their curve so far).
    """
    runs, unfinished = [], []
    for run in study.runs():
        folder = folder_of(out, run)
        before = known.runs.get(run.identity, {})
        try:
            record = result_of(folder, run) if is_finished(folder, run) else before
        except UserError as error:  # files of it are lost
            record = before
            known.failed[run.identity] = _unfinished(run, folder, exit_code=0, last_line=one_line(error))
        if record:
            # The weights for the earlier ones may be gone. Those of other studies stand in these.
            hits = {**before.get("hits", {}), **record.get("hits", {})}
            wanted = {str(size): hits[str(size)] for size in study.sizes(run.arm) if str(size) in hits}
            runs.append({**record, "hits": wanted})
        elif failure := read_json(folder / FAILED):
            # What was printed names places of the machine; the last line is what went wrong.
            last = failure["last_lines"][-1:] or [""]
            about = {"exit_code": failure["exit_code"], "last_line": last[0].replace(str(folder), folder.name)}
            unfinished.append(_unfinished(run, folder, **about))
        elif run.identity in known.failed and not 0 < len(history_of(folder)) < run.arm.config.epochs:
            unfinished.append(known.failed[run.identity])
        elif history_of(folder):
            unfinished.append(_unfinished(run, folder))
    return {
        "study": study.name,
        "task": study.task,
        "asks": study.asks,
        "baseline": study.baseline,
        "weights": study.weights,
        "pair": list(study.pair),
        "contrasts": [dataclasses.asdict(contrast) for contrast in study.contrasts],
        "resolutions": list(study.resolutions),
        "environment": environment or known.environments.get(study.name),
        "arms": [_describe(arm, known) for arm in study.arms],
        "runs": runs,
        "unfinished": unfinished,
    }


def _unfinished(run: Run, folder: Path, **about: Any) -> Record:
    history = history_of(folder)
    return {"key": run.arm.key, "seed": run.seed, "epochs": len(history), "curve": curve_of(history), **about}


def _describe(arm: Arm, known: Known) -> Record:
    if arm.key not in known.parameters:
        known.parameters[arm.key] = count_parameters(build(arm))
    return {
        "setting": arm.setting,
        "variant": arm.variant,
        "data": arm.data,
        "key": arm.key,
        "seeds": list(arm.seeds),
        "parameters": known.parameters[arm.key],
        "images_per_epoch": arm.images_per_epoch,
        "speed_key": arm.speed_key,
        "speed": known.speeds.get(arm.speed_key, {}),
        "config": arm.settings(),
    }


def build(arm: Arm) -> Any:
    """The model of an arm, on the CPU. Raises UserError where there is no such model, or it refuses its arguments."""
    cfg = arm.config
    try:
        if isinstance(cfg, RecallConfig):
            from lab.recall import build_model

            return build_model(cfg)
        from vision_longhorn.checkpoint import create_model

        return create_model(
            cfg.model, num_classes=cfg.num_classes, drop_path_rate=cfg.drop_path or None, **cfg.model_kwargs
        )
    except UserError as error:
        raise UserError(f"study {arm.study}, {arm.label}: {error}") from None


def count_parameters(model: Any) -> int:
    """How many numbers of a model are learnt."""
    return sum(parameter.numel() for parameter in model.parameters())


def set_aside(path: Path, content: Record) -> Path | None:
    """Moves a study's JSON that has runs which the new content lacks to a file beside it: their folders may be gone.

    Returns:
        That file, None where nothing would be lost.
    """
    earlier = (read_json(path) or {}).get("runs", [])
    stay = {(run["key"], run["seed"]) for run in content["runs"]}
    if all((run["key"], run["seed"]) in stay for run in earlier):
        return None
    aside = next(
        file for n in range(1, 1 << 30) if not (file := path.with_name(f"{path.stem}-before-{n}.json")).exists()
    )
    path.rename(aside)
    return aside


def write_results(path: Path, content: Record) -> None:
    """Writes a JSON in which each item of a long list has a line of its own."""

    def lines(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n  " + ",\n  ".join(json.dumps(item) for item in value) + "\n ]"
        return json.dumps(value)

    write_text(path, "{\n " + ",\n ".join(f'"{key}": {lines(value)}' for key, value in content.items()) + "\n}\n")
