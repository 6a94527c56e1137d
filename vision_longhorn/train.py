"""`vision-longhorn train`, which is train_imagenet.py: reads the command line and the config that it names.

vision-longhorn train --config configs/cifar10.yaml --data DIR --lr 1e-3 --model-kwargs depth=6
"""

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vision_longhorn.command_line.parser import Parser
from vision_longhorn.errors import UserError, spelled
from vision_longhorn.files import read_json
from vision_longhorn.models.names import RENAMED
from vision_longhorn.runs import Run
from vision_longhorn.settings import DIGITS, coerce, parse_pairs, without_none
from vision_longhorn.training.config import Config, config_names, read_config_file


def main(argv: Sequence[str] | None = None) -> Path:
    """Trains as the command line `argv` says, by default the process's own. Returns the run's folder."""
    config, name = load_config(argv)
    from vision_longhorn.training.trainer import train  # takes seconds, for which --help and mistakes need not wait

    with spelled(num_samples="train_samples"):
        return train(config, name)


def load_config(argv: Sequence[str] | None = None) -> tuple[Config, str]:
    """Reads the command line `argv` (default: the process's own) and the config that it names.

    With neither a config nor data, it is the demo's. In a resumed run, `resume` is the path of the checkpoint, and
    `run_dir` its folder; where `--resume` has no value and `--run-dir` holds no run yet, `resume` is None.

    Returns:
        The `Config`, and the name of its file without the suffix (or the model's name).

    Raises:
        UserError: For an unknown key, a value of the wrong type, or a missing or broken file.
    """
    given = vars(_parser().parse_args(argv))
    path = given.pop("config", None)
    if given.get("resume") is True:
        if "run_dir" not in given:
            raise UserError("--resume without a value goes on with the run in --run-dir: give that, or --resume RUN")
        if Run(given["run_dir"]).config_file.is_file():
            given["resume"], path = given.pop("run_dir"), None
        else:
            del given["resume"]
    resumes = "resume" in given
    if resumes:
        path = _find_run(given, path)
    elif path is None and given.get("data", DIGITS) == DIGITS:
        path = "demo_digits"

    values = read_config_file(path) if path else {}
    if resumes:
        values.pop("allow_pipe", None)  # the folder of a run may come from a stranger
        environment = read_json(Run(given["run_dir"]).environment_file)
        if "model" in values and not (isinstance(environment, dict) and "version" in environment):  # of version 0.1
            values["model"] = next((new for old, new in RENAMED.items() if old == values["model"]), values["model"])
    if "model_kwargs" in given:
        merged = {**coerce("model_kwargs", values.get("model_kwargs", {}), dict), **parse_pairs(given["model_kwargs"])}
        given["model_kwargs"] = {key: value for key, value in merged.items() if value is not None}
    config = Config(**{**values, **given})
    if not resumes:
        config.check_new(own_warmup="warmup_epochs" in given)
    return config, Path(path).stem if path else config.model


def _find_run(given: dict[str, Any], config: str | None) -> Path:
    """Finds the settings of the run to resume. In `given`, `resume` becomes its checkpoint and `run_dir` its folder."""
    if config or "run_dir" in given:
        more = f"--config {config}" if config else f"--run-dir {given['run_dir']}"
        raise UserError(f"--resume goes on in the run's own folder, under its own config: drop {more}")
    file = Path(given["resume"])
    if file.suffix != ".pt":
        file = Run(file).last
    run = Run(file.parent)
    if file != run.last and not file.is_file():
        raise UserError(f"cannot resume {file}: there is no such checkpoint; {run.last} is the last")
    if not run.config_file.is_file():
        raise UserError(f"cannot resume {run.path}: it has no {run.config_file.name}; give the folder of a run")
    given.update(resume=str(file), run_dir=str(run.path))
    return run.config_file


def _parser() -> Parser:
    """Makes an option for each field of `Config`."""
    parser = Parser(
        description="Trains a model on image shards or a folder of images. The config file may set each value below, "
        "too; its default is in brackets.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", help=f"YAML file, or the bare name of one of {', '.join(config_names())}")
    group: Any = parser
    defaults = Config()
    for field in dataclasses.fields(Config):
        if field.metadata["group"]:
            group = parser.add_argument_group(field.metadata["group"])
        option, kind, words = f"--{field.name.replace('_', '-')}", without_none(field.type), field.metadata["allowed"]
        takes: dict[str, Any] = {}
        if kind is dict:
            takes = {"nargs": "+", "action": "extend"}  # given twice, both count
        elif typing.get_origin(kind) is list:
            takes = {"nargs": "+"}
        elif kind is bool or field.name == "resume":
            takes = {"nargs": "?", "const": True}
        default = getattr(defaults, field.name)
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        choice = f": {', '.join(words)}" if isinstance(words, tuple) else ""
        about = f"{field.metadata['doc']}{choice} [{'none' if shown in (None, {}) else shown}]"
        group.add_argument(option, metavar="VALUE", help=about.replace("%", "%%"), **takes)
    return parser


if __name__ == "__main__":
    from vision_longhorn.command_line.commands import run  # which names this module by its word

    run("train")
