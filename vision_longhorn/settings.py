"""Settings: what a value may be, how it is read from YAML or from a command line, and dataclasses of such values."""

import argparse
import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from vision_longhorn.errors import UserError, one_line

WORDS = {"none": None, "null": None, "": None, "true": True, "false": False}
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
    """Numbers that a setting may be. As the `type` of an argparse option it reads and checks its text.

    Attributes:
        low, high: Smallest and largest.
        above, below: Exclusive bounds.
        kind: int or float, what the option's text is read as.
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

    def check(self, name: str, value: float) -> None:
        """Raises UserError that calls the setting `name` where `value` is none of these."""
        if value not in self:
            raise UserError(f"{name} is {value}: give {self}")

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
SHARE = Range(0, 1)


# The question about a run that a field of a config answers: what comes out of it ("result"), on which data, machine and
# tracker it runs ("host"), how fast it runs ("speed"), what it writes on the way ("writing"), or what holds for one
# start of it alone ("start").
Role = Literal["result", "host", "speed", "writing", "start"]


def option(
    default: Any,
    doc: str,
    allowed: Range | tuple[str, ...] | None = None,
    *,
    role: Role = "result",
    also: tuple[str, ...] = (),
    lengths: tuple[int, ...] | None = None,
    group: str | None = None,
) -> Any:
    """Field of a config.

    Args:
        default: Its default.
        doc: What it is, for --help.
        allowed: `Range` or tuple of words that it, or every item of a list, may be; None: whatever its type allows.
        role: What it says of a run.
        also: Names for it in other trainers.
        lengths: For a list, the numbers of items that it may have.
        group: Heading in --help for this field and those that follow.
    """
    metadata = dict(doc=doc, allowed=allowed, role=role, also=also, lengths=lengths, group=group)
    factory = {"default_factory": default.copy} if isinstance(default, (dict, list)) else {"default": default}
    return dataclasses.field(**factory, metadata=metadata)


class Settings:
    """Base of configs, which are dataclasses of `option`s: checks the values, and sorts them by role.

    Raises:
        UserError: For a value of the wrong type or out of its range.
    """

    resume: str | None
    track: str | None
    keep_checkpoints: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(cast(Any, self)):
            value = coerce(field.name, getattr(self, field.name), field.type)
            _check(field, value)
            setattr(self, field.name, value)

    @classmethod
    def named(cls, *roles: Role) -> list[str]:
        """Names of the fields with one of these roles."""
        return [field.name for field in dataclasses.fields(cast(Any, cls)) if field.metadata["role"] in roles]

    def values(self) -> dict[str, Any]:
        """The values that are kept with a run: all but those for one start of it."""
        left_out = self.named("start")
        return {key: value for key, value in dataclasses.asdict(cast(Any, self)).items() if key not in left_out}

    @classmethod
    def decisive(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a config's values that can change what comes out of a run."""
        left_out = cls.named("speed", "writing", "start")
        # The model's save_states takes memory for time, to the same bits.
        kwargs = {key: value for key, value in values["model_kwargs"].items() if key != "save_states"}
        return {**{key: value for key, value in values.items() if key not in left_out}, "model_kwargs": kwargs}


def _check(field: dataclasses.Field, value: Any) -> None:
    """Raises UserError where the field does not allow a value of the right type."""
    allowed, lengths = field.metadata["allowed"], field.metadata["lengths"]
    if value is None or allowed is None:
        return
    if lengths and len(value) not in lengths:
        raise UserError(f"{field.name} is {' '.join(map(str, value))}: give {' or '.join(map(str, lengths))} numbers")
    for item in value if lengths else [value]:
        if isinstance(allowed, Range):
            allowed.check(field.name, item)
        elif item not in allowed:
            raise UserError(f"{field.name} is {item!r}: give one of {', '.join(allowed)}")


def coerce(key: str, value: Any, kind: Any) -> Any:
    """`value`, from YAML or the command line, as the type `kind`. YAML 1.1 takes 1e-3 for a string, too.

    Raises:
        UserError: For any other value; it calls the setting `key`.
    """
    inner = without_none(kind)
    word = value.strip().lower() if isinstance(value, str) else value
    try:
        if inner is not kind and word in (None, "none", "null", ""):
            return None
        if inner is str and isinstance(value, str):
            return value
        if inner is bool and (isinstance(value, bool) or word in ("true", "false")):
            return WORDS[str(word).lower()]
        if inner in (int, float) and not isinstance(value, bool) and inner(float(word)) == float(word):
            return inner(float(word))
        if typing.get_origin(inner) is list and isinstance(value, list):
            return [coerce(key, item, typing.get_args(inner)[0]) for item in value]
        if inner is dict:
            return parse_pairs(value) if isinstance(value, list) else dict(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise UserError(f"{key} is {value!r}: give {TYPES[inner]}{'' if inner is kind else ', or none'}")


def without_none(kind: Any) -> Any:
    """T where `kind` is `T | None`, else `kind`."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return next(option for option in typing.get_args(kind) if option is not type(None))
    return kind


def parse_pairs(words: Sequence[str]) -> dict[str, Any]:
    """Dict of KEY=VALUE words. A value is a number, true, false, none, a [list], or else a string.

    The value in `class_token=none` is a string, too: it names the model without a class token.

    Raises:
        UserError: For a word without "=".
    """
    for word in words:
        if "=" not in word:
            hint = ": a run to evaluate or export goes before the options" if os.path.exists(word) else ""
            raise UserError(f"{word!r} is not KEY=VALUE, such as img_size=32{hint}")
    pairs = (word.partition("=") for word in words)
    return {key: value if (key, value) == ("class_token", "none") else _parse_word(value) for key, _, value in pairs}


def _parse_word(word: str) -> Any:
    if word.lower() in WORDS:
        return WORDS[word.lower()]
    for parse in (int, float, json.loads):
        try:
            return parse(word)
        except ValueError:
            pass
    return word


def read_yaml(file: Path) -> dict[Any, Any]:
    """The mapping in a YAML file. Raises UserError for any other content, and for a key that stands twice."""
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
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)
