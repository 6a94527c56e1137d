"""`vision-longhorn train`, which is train_imagenet.py: its command line and the config that this names.

    vision-longhorn train --config configs/cifar10.yaml --data DIR --lr 1e-3 --model-kwargs depth=6

Every field of `Config` is an option (`-` and `_` are the same there).
"""

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vision_longhorn.command_line.parser import Parser
from vision_longhorn.demo import DIGITS
from vision_longhorn.errors import UserError, spelled
from vision_longhorn.runs import Run
from vision_longhorn.settings import coerce, parse_pairs, without_none
from vision_longhorn.training.config import Config, config_names, read_config_file, shorten_warmup


def main(argv: Sequence[str] | None = None) -> Path:
    """Trains as the command line `argv` says, by default the process's own. Returns the run's folder."""
    config, name = load_config(argv)
    from vision_longhorn.training.trainer import train  # takes seconds, for which --help and mistakes need not wait

    with spelled(num_samples="train_samples"):
        return train(config, name)


def load_config(argv: Sequence[str] | None = None) -> tuple[Config, str]:
    """Reads the command line and the config that it names.

    With neither a config nor data, that is the demo's. In a resumed run `resume` is the path of the checkpoint, and
    `run_dir` its folder; where `--resume` has no value and `--run-dir` holds no run yet, `resume` is None.

    Args:
        argv: Command line without the program's name; default: the process's own.

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
    if "model_kwargs" in given:
        merged = {**coerce("model_kwargs", values.get("model_kwargs", {}), dict), **parse_pairs(given["model_kwargs"])}
        given["model_kwargs"] = {key: value for key, value in merged.items() if value is not None}
    values = {**values, **given}
    notes = [] if "warmup_epochs" in given or resumes else shorten_warmup(values)
    config = Config(**values)

    unused = [f"--{key}" for key in ("scale", "ratio") if key in given]
    if unused and config.crop_padding is not None:
        notes.append(
            f"with crop_padding {' and '.join(unused)} change{'s' * (len(unused) == 1)} nothing: crops have one size"
        )
    faults = config.faults()
    if faults and not resumes:
        raise UserError(faults[0])
    config.notes = notes + faults
    return config, Path(path).stem if path else config.model


def _find_run(given: dict[str, Any], config: str | None) -> Path:
    """The settings of the run to resume. In `given`, `resume` becomes its checkpoint and `run_dir` its folder."""
    if config:
        raise UserError(f"--resume goes on under the run's own config: drop --config {config}")
    if "run_dir" in given:
        raise UserError(f"--resume goes on in the run's own folder: drop --run-dir {given['run_dir']}")
    file = Path(given["resume"])
    run = Run(file.parent if file.suffix == ".pt" else file)
    file = file if file.suffix == ".pt" else run.last
    if file != run.last and not file.is_file():
        raise UserError(f"cannot resume {file}: there is no such checkpoint; {run.last} is the last")
    if not run.config_file.is_file():
        raise UserError(f"cannot resume {run.path}: it has no {run.config_file.name}; give the folder of a run")
    given.update(resume=str(file), run_dir=str(run.path))
    return run.config_file


def _parser() -> Parser:
    """An option for each field of `Config`."""
    parser = Parser(
        description="Trains a model on image shards or a folder of images. Each value below may stand in the config "
        "file, too; in brackets its default.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", help=f"YAML file, or the bare name of one of {', '.join(config_names())}")
    group: Any = parser
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
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        shown = " ".join(map(str, default)) if isinstance(default, list) else "none" if default == {} else default
        choice = f": {', '.join(words)}" if isinstance(words, tuple) else ""
        about = f"{field.metadata['doc']}{choice} [{'none' if shown is None else shown}]"
        group.add_argument(option, metavar="VALUE", help=about.replace("%", "%%"), **takes)
        parser.synonyms.update({word.replace("_", "-"): option for word in field.metadata["also"]})
    return parser


if __name__ == "__main__":
    from vision_longhorn.command_line.commands import run  # which names this module by its word

    run("train")
