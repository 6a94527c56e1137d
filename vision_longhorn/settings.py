"""Settings: dataclasses whose values are read from YAML or a command line, and are checked."""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from vision_longhorn.errors import UserError, one_line

WORDS = {"none": None, "null": None, "": None, "true": True, "false": False}
NAMED_NONE = "class_token", "gate"  # arguments of models for which "none" is a value
TYPES = {
    int: "a whole number",
    float: "a number",
    str: "a word",
    bool: "true or false",
    list[float]: "numbers",
    dict: "KEY=VALUE pairs",
}


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a setting may be: from `low` to `high`, above `above`, below `below`.

    As the `type` of an argparse option, it reads an option's text as a `kind`, int or float, and checks it.
    """

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    kind: type = float

    def __contains__(self, value: float) -> bool:
        return math.isfinite(value) and self.low <= value <= self.high and self.above < value < self.below

    def __str__(self) -> str:
        bounds = {"{} or more": self.low, "above {}": self.above, "{} at most": self.high, "below {}": self.below}
        text = ", ".join(text.format(bound) for text, bound in bounds.items() if math.isfinite(bound))
        return ("a whole number" if self.kind is int else "a number") + (f" ({text})" if text else "")

    def __call__(self, text: str) -> float:
        try:
            value = self.kind(text)
        except ValueError:
            value = math.nan
        if value not in self:
            raise argparse.ArgumentTypeError(f"{text!r} is not {self}")
        return value


POSITIVE = Range(above=0)
COUNT = Range(1, kind=int)
DIGITS = "digits"  # the built-in demo set, as a user gives it as --data
SHARE = Range(0, 1)


# What a field decides: what comes out of a run ("result"), on which data, machine and tracker it runs ("host"), how
# fast it runs ("speed"), what it writes on the way ("writing"), or something that holds for a single start ("start").
Role = Literal["result", "host", "speed", "writing", "start"]


def option(
    default: Any,
    doc: str,
    allowed: Range | tuple[str, ...] | None = None,
    *,
    role: Role = "result",
    lengths: tuple[int, ...] | None = None,
    group: str | None = None,
) -> Any:
    """Makes a field of a config. `doc` is its line in --help, and `group` the heading for it and the fields after it.

    Its value, or every item of a list, is in the `Range` or among the words `allowed`. A list has one of the `lengths`.
    """
    metadata = dict(doc=doc, allowed=allowed, role=role, lengths=lengths, group=group)
    factory = {"default_factory": default.copy} if isinstance(default, (dict, list)) else {"default": default}
    return dataclasses.field(**factory, metadata=metadata)


@dataclasses.dataclass
class Settings:
    """Base of configs, which are dataclasses of `option`s. Raises UserError for a value that a field does not take."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, self.checked(field.name, getattr(self, field.name)))

    @classmethod
    def checked(cls, name: str, value: Any) -> Any:
        """Returns `value` as the field `name` holds it. Raises UserError if the field does not take it."""
        field = cls.__dataclass_fields__[name]
        allowed, lengths = field.metadata["allowed"], field.metadata["lengths"]
        value = coerce(name, value, field.type)
        if value is None or allowed is None:
            return value
        if lengths and len(value) not in lengths:
            raise UserError(f"{name} is {' '.join(map(str, value))}: give {' or '.join(map(str, lengths))} numbers")
        for item in value if lengths else [value]:
            if item not in allowed:
                words = f"one of {', '.join(allowed)}" if isinstance(allowed, tuple) else allowed
                raise UserError(f"{name} is {item!r}: give {words}")
        return value

    @classmethod
    def named(cls, *roles: Role) -> list[str]:
        """Lists the names of the fields with one of these roles."""
        return [field.name for field in dataclasses.fields(cls) if field.metadata["role"] in roles]

    def values(self) -> dict[str, Any]:
        """Returns the values that are kept with a run: all but those for a single start."""
        values, left_out = dataclasses.asdict(self), self.named("start")
        return {key: value for key, value in values.items() if key not in left_out}

    @classmethod
    def decisive(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those values of a config that can change what comes out of a run."""
        left_out = {*cls.named("speed", "writing", "start"), "model_kwargs"}
        # The model's save_states trades memory for time, with the same bits.
        kwargs = {key: value for key, value in values["model_kwargs"].items() if key != "save_states"}
        return {**{key: value for key, value in values.items() if key not in left_out}, "model_kwargs": kwargs}


def coerce(key: str, value: Any, kind: Any) -> Any:
    """Reads `value`, from YAML or the command line, as the type `kind`. Raises UserError for the setting `key`.

    YAML 1.1 takes 1e-3 for a string, so strings may be numbers.
    """
    inner = without_none(kind)
    word = value.strip().lower() if isinstance(value, str) else value
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if inner is not kind and word in (None, "none", "null", "", ["none"]):  # `--mean none` gives a list
            return None
        if inner is str and isinstance(value, str):
            return value
        if inner is bool and (isinstance(value, bool) or word in ("true", "false")):
            return WORDS[str(word).lower()]
        if inner in (int, float) and not isinstance(value, bool) and inner(float(word)) == float(word):
            return inner(float(word))
        if typing.get_origin(inner) is list and isinstance(value, list):
            return [coerce(key, item, typing.get_args(inner)[0]) for item in value]
        if inner is dict and isinstance(value, list) and all(isinstance(one, str) for one in value):
            return parse_pairs(value)
        if inner is dict and isinstance(value, Mapping):
            return dict(value)
    raise UserError(f"{key} is {value!r}: give {TYPES[inner]}{'' if inner is kind else ', or none'}")


def without_none(kind: Any) -> Any:
    """Returns T for the type `T | None`, and other types as they are."""
    return typing.get_args(kind)[0] if isinstance(kind, types.UnionType) else kind


def parse_pairs(words: Sequence[str]) -> dict[str, Any]:
    """Reads KEY=VALUE words. A value is a number, true, false, none, a [list], or else a string.

    Where "none" names something, as in `class_token=none` and `gate=none`, it is a string, too.

    Raises:
        UserError: For a word without "=".
    """
    pairs = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            hint = ": a run to evaluate or export goes before the options" if os.path.exists(word) else ""
            raise UserError(f"{word!r} is not KEY=VALUE, such as img_size=32{hint}")
        pairs[key] = "none" if key in NAMED_NONE and value.lower() == "none" else _parse_word(value)
    return pairs


def _parse_word(word: str) -> Any:
    if word.lower() in WORDS:
        return WORDS[word.lower()]
    for parse in (int, float, json.loads):
        with contextlib.suppress(ValueError):
            return parse(word)
    return word


def read_yaml(file: Path) -> dict[Any, Any]:
    """Reads the mapping in a YAML file. Raises UserError for any other content, and for a key that stands twice."""
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), Loader=_OnceLoader) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is no valid YAML: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise UserError(f"{file} holds no `key: value` lines")
    return values


class _OnceLoader(yaml.SafeLoader):
    """Refuses a key that stands twice, whose first value YAML would drop."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)
