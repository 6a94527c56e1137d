"""The file of studies: what each compares, and the trials that it is made of. lab/studies.yaml explains the keys."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from lab.recall_config import RecallConfig
from vision_longhorn.errors import UserError, nearest, one_line
from vision_longhorn.models.names import LONGHORN_OPTIONS, RENAMED, all_arguments
from vision_longhorn.settings import read_yaml
from vision_longhorn.training.config import Config, read_config_file

Mapping = dict[str, Any]
STUDIES = Path(__file__).with_name("studies.yaml")
# Keys of the file's mappings, with the type of their values
FILE = {"data": dict, "variants": dict, "studies": dict}
FACTS = {"train_samples": int, "val_samples": int, "num_classes": int}
DIFFERENCES = {"model_kwargs": dict, "overrides": dict, "seeds": (int, list)}
VARIANT = {"name": str, "like": str, "model": str, **DIFFERENCES}
SETTING = {"config": str, "data": str, **DIFFERENCES}
RECALL = {"asks": str, "task": str, **DIFFERENCES, "settings": dict, "grid": dict, "variants": list, "baseline": str}
IMAGES = {**RECALL, **SETTING, "weights": str, "pair": list, "contrasts": dict, "resolutions": list}
CONTRAST = {"plus": list, "minus": list, "over": int}
REMEDIES: dict[Any, str] = {dict: "`key: value` pairs", list: "a list", str: "a word", int: "a whole number"}
REMEDIES[int, list] = "a number or a list"
MIXERS = {"vlonghorn": "longhorn", "vim": "mamba"}  # by the first word of a model's name
# The settings that a training step's speed depends on
STEP = ("model", "model_kwargs", "drop_path", "num_classes", "mixup", "cutmix", "mixup_prob", "opt", "layer_decay",
        "clip_grad", "batch_size", "grad_accum", "ema_decay", "precision", "compile", "deterministic",
        "cuda_graphs", "mixer", "width", "depth", "vocab_size", "length", "pairs")  # fmt: skip
# What a config has where nothing else is said
USUAL: dict[type, Mapping] = {kind: kind().values() for kind in (Config, RecallConfig)}
# Fields that are given beside `overrides`, and in which form
BESIDE = {"seed": "`seeds: [0]`", "model_kwargs": "it", "mixer": "`model_kwargs: {mixer: longhorn}`"}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One variant in one setting. `setting` is "" if the study names none, `data` is "" if the task makes its own."""

    study: str
    setting: str
    variant: str
    data: str
    config: Config | RecallConfig
    seeds: tuple[int, ...]

    @property
    def label(self) -> str:
        """Its name in messages and folders."""
        return label_of(self.setting, self.variant)

    @cached_property
    def key(self) -> str:
        """Eight hexadecimal digits that stand for its data's name and its settings. Defaults are left out, so that a
        new field of the config changes no key."""
        usual, settings = USUAL[type(self.config)], canonical_settings(self.settings())
        values = {key: value for key, value in self.config.decisive(settings).items() if value != usual[key]}
        return _digest({"data": self.data, **values})

    @cached_property
    def speed_key(self) -> str:
        """A key of only those settings that the speed of a training step depends on."""
        return _digest({key: value for key, value in canonical_settings(self.settings()).items() if key in STEP})

    def settings(self) -> Mapping:
        """Returns the effective settings, without the seed and what concerns only the machine or the run's files. They
        state all arguments of the model."""
        left_out = {*self.config.named("host", "writing"), "seed"}
        values = {key: value for key, value in self.config.values().items() if key not in left_out}
        return {**values, "model_kwargs": all_arguments(values.get("model", ""), values["model_kwargs"])}

    @property
    def images_per_epoch(self) -> int:
        """Samples of an epoch's updates on one process; 0 if only the data can tell."""
        batch = self.config.batch_size * self.config.grad_accum
        return (self.config.train_samples or 0) // self.config.batch_size // self.config.grad_accum * batch


@dataclasses.dataclass(frozen=True)
class Trial:
    """A training run of an arm with one seed."""

    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.arm.label}-s{self.seed}-{self.arm.key}"

    @property
    def identity(self) -> tuple[str, int]:
        """What two studies that share the trial have in common: the arm's key and the seed."""
        return self.arm.key, self.seed


@dataclasses.dataclass(frozen=True)
class Study:
    """A study; lab/studies.yaml explains its parts. `contrasts` are dicts with "name", "plus", "minus" and "over"."""

    name: str
    asks: str
    task: str
    arms: tuple[Arm, ...]
    baseline: str
    weights: str
    pair: tuple[str, ...]
    contrasts: tuple[Mapping, ...]
    resolutions: tuple[int, ...]

    def trials(self) -> list[Trial]:
        """Lists every arm's first seed, then every arm's second, and so on, so that early results can be compared."""
        longest = max(len(arm.seeds) for arm in self.arms)
        return [Trial(arm, arm.seeds[i]) for i in range(longest) for arm in self.arms if i < len(arm.seeds)]

    def sizes(self, arm: Arm) -> list[int]:
        """Lists the sides of images, in pixels, at which an arm's final weights are evaluated image by image."""
        native = [arm.config.model_kwargs.get("img_size", 224)] if arm.variant in self.pair else []
        return sorted({*native, *self.resolutions})


def canonical_settings(settings: Mapping) -> Mapping:
    """Returns settings as keys are made of them, so that a key outlives a change of names: "model" is the family and
    size in the name, "model_kwargs" only those arguments that differ from what this meant in version 0.1.

    Settings that do not state all arguments are of records of version 0.1.
    """
    name: str = settings.get("model", "")
    stated: Mapping = settings["model_kwargs"]
    if "all_arguments" not in stated:
        stated = all_arguments(RENAMED.get(name, name), stated)
    if "all_arguments" not in stated:  # a mixer, or a model of timm's own
        return settings
    kind = "_".join(name.partition(".")[0].split("_")[:2])
    then = all_arguments(RENAMED.get(kind, kind), {})
    return {**settings, "model": kind, "model_kwargs": {k: v for k, v in stated.items() if then.get(k) != v}}


def label_of(setting: str, variant: str) -> str:
    return f"{setting}-{variant}" if setting else variant


def unique_trials(studies: Iterable[Study]) -> list[Trial]:
    """Lists the trials of several studies, shared ones once."""
    return list({trial.identity: trial for study in studies for trial in study.trials()}.values())


def read_studies(path: str | Path = STUDIES) -> dict[str, Study]:
    """Reads all studies of a file, by name. Raises UserError for what is unknown, missing or contradictory."""
    if not Path(path).is_file():
        raise UserError(f"there is no file of studies at {path}: give a YAML file like lab/studies.yaml")
    content, studies, name = read_yaml(Path(path)), {}, ""
    _base.cache_clear()
    try:
        content = _known(content, FILE)
        facts = {key: _known(own, FACTS) for key, own in content.get("data", {}).items()}
        shared = {key: _known(own, VARIANT) for key, own in content.get("variants", {}).items()}
        for name, spec in content.get("studies", {}).items():
            studies[name] = _study(name, spec, facts, shared)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # items of lists may be of any type
        raise UserError(f"{path}: {f'study {name}: ' if name else ''}{missing_or_wrong(error)}") from error
    if not studies:
        raise UserError(f"{path}: there are no studies: give `studies:` with one by its name")
    return studies


def missing_or_wrong(error: Exception) -> str:
    """Says in one line what an error means for a file."""
    return f"{error} is missing" if isinstance(error, KeyError) else one_line(error)


def _known(given: Any, kinds: Mapping) -> Mapping:
    """Returns a mapping of the file without its empty values. Raises UserError for a key that is not in `kinds`, and
    for a value that is not of its type."""
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise UserError(f"{given!r} is not a mapping: give `key: value` pairs")
    for key, value in given.items():
        if key not in kinds:
            raise UserError(f"unknown key {key!r}: give one of {', '.join(nearest(str(key), kinds) or kinds)}")
        kind = kinds[key]
        if value is not None and kind is not object and (isinstance(value, bool) or not isinstance(value, kind)):
            raise UserError(f"{key} is {value!r}: give {REMEDIES[kind]}")
    return {key: value for key, value in given.items() if value is not None}


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError(f"the name {name!r} cannot be a folder's: give letters, digits, and . _ - between them")


def _study(name: str, spec: Any, facts: Mapping, shared: Mapping) -> Study:
    task = spec.get("task", "images") if isinstance(spec, dict) else "images"
    if task not in ("images", "recall"):
        raise UserError(f"task is {task!r}: give one of images, recall")
    spec = _known(spec, IMAGES if task == "images" else RECALL)
    if not spec.get("variants"):
        raise UserError("variants is missing")
    variants, settings = [_variant(item, shared) for item in spec["variants"]], _settings(spec, task)
    names = [variant["name"] for variant in variants]
    for word in (name, *spec.get("settings", {}), *names):
        _check_name(word)
    arms = tuple(_arm(name, task, key, (spec, own, variant), facts)
                 for key, own in settings.items() for variant in variants)  # fmt: skip
    labels, keys = [arm.label for arm in arms], [arm.key for arm in arms]
    for label, key in zip(labels, keys):
        alike = [other for other, own in zip(labels, keys) if own == key or other == label]
        if len(alike) > 1:
            raise UserError(f"{' and '.join(alike)} have the same name or settings: leave one out")
    pair, sizes, weights = (tuple(spec.get("pair", ())), tuple(spec.get("resolutions", ())), spec.get("weights", "ema"))
    if len(pair) not in (0, 2) or len({*pair}) < len(pair):
        raise UserError(f"pair is {list(pair)}: give two variants")
    if not all(type(size) is int and size > 0 for size in sizes):
        raise UserError(f"resolutions is {list(sizes)}: give sides of images, in pixels")
    if weights not in ("ema", "raw"):
        raise UserError(f"weights is {weights!r}: give one of ema, raw")
    if weights == "raw" and (pair or sizes):
        raise UserError("weights is 'raw': give neither pair nor resolutions, which need the averaged ones")
    baseline = spec.get("baseline") or (pair[1] if pair else names[0])
    contrasts = tuple(_contrast(str(title), own) for title, own in spec.get("contrasts", {}).items())
    compared = {label for one in contrasts for label in one["plus"] + one["minus"]}
    for known, words in (names, {*pair, baseline}), (labels, compared):
        for word in words - {*known}:
            raise UserError(f"{word!r} is unknown: give some of {', '.join(known)}")
    return Study(name, spec.get("asks", ""), task, arms, baseline, weights, pair, contrasts, sizes)


def _contrast(title: str, own: Any) -> Mapping:
    contrast = {"name": title, "plus": [], "minus": [], "over": 1, **_known(own, CONTRAST)}
    if not contrast["plus"] or not contrast["minus"] or contrast["over"] < 1:
        raise UserError(f"contrast {title!r} is {own}: give lists of arms as plus and minus, and over as 1 or more")
    return contrast


def _settings(spec: Mapping, task: str) -> dict[str, Mapping]:
    """Returns the settings of a study by name, each with every combination of its grid's values. Without settings or
    grid there is one, called ""."""
    kinds = DIFFERENCES if task == "recall" else SETTING
    settings = {key: _known(own, kinds) for key, own in (spec.get("settings") or {"": {}}).items()}
    for key, values in spec.get("grid", {}).items():
        if not isinstance(values, list) or not values:
            raise UserError(f"grid: {key} is {values!r}: give a list of values")
        settings = {
            "-".join(filter(None, (name, f"{key}{value}"))): {
                **own, "overrides": {**own.get("overrides", {}), key: value}
            }
            for name, own in settings.items()
            for value in values
        }  # fmt: skip
    return settings


def _variant(item: Any, shared: Mapping) -> Mapping:
    """Completes a variant that a study lists by what it takes over from a shared one."""
    item = _known({"name": item} if isinstance(item, str) else item, VARIANT)
    source = item.get("like", item["name"])
    if source not in shared and ("like" in item or len(item) == 1):
        known = ", ".join(map(str, shared)) or "no variant is"
        raise UserError(f"variant {source!r} is not a shared one ({known}): give its model here")
    taken = shared.get(source, {})
    merged = {key: {**taken.get(key, {}), **item.get(key, {})} for key in ("model_kwargs", "overrides")}
    return {**taken, **item, **merged}


def _arm(study: str, task: str, setting: str, parts: tuple[Mapping, ...], facts: Mapping) -> Arm:
    """Makes an arm of what a study, a setting and a variant say. Where they differ, the later one wins."""
    whole = {key: value for part in parts for key, value in part.items()}
    seeds = whole.get("seeds", 1)
    try:
        config = (_recall_config if task == "recall" else _image_config)(whole, parts, facts)
        each = range(seeds) if isinstance(seeds, int) else seeds
        seeds = tuple(Config.checked("seed", seed) for seed in each)
        if not seeds or len(set(seeds)) < len(seeds):
            raise UserError(f"seeds is {list(seeds)}: give how many, 1 or more, or a list of different ones")
    except (KeyError, UserError) as error:
        raise UserError(f"{label_of(setting, whole['name'])}: {missing_or_wrong(error)}") from None
    return Arm(study, setting, whole["name"], whole.get("data", ""), config, seeds)


@cache  # while a file of studies is read, whose arms have few configs
def _base(name: str) -> Mapping:
    beside = STUDIES.with_name(f"{name}.yaml")  # other names are those of configs/
    return read_config_file(beside if beside.is_file() else name)


def _image_config(whole: Mapping, parts: tuple[Mapping, ...], facts: Mapping) -> Config:
    values = _merge(Config, {"model": Config.model, **_base(whole["config"]), **facts.get(whole["data"], {})}, parts)
    values["model"] = whole.get("model", values["model"])
    left_out = Config.named("host", "start")
    config = Config(**{key: value for key, value in values.items() if key not in left_out})
    config.check_new(own_warmup=any("warmup_epochs" in part.get("overrides", {}) for part in parts))
    return config


def _recall_config(whole: Mapping, parts: tuple[Mapping, ...], _: Mapping) -> RecallConfig:
    """Makes the settings of a variant's mixer in a language model."""
    values, model = _merge(RecallConfig, {}, parts), whole.get("model", "vlonghorn")
    given = values["model_kwargs"]
    # A name's other options are for images.
    own = {key: value for key, value in all_arguments(model, given).items() if key in LONGHORN_OPTIONS}
    kwargs = {"mixer": MIXERS.get(model.partition("_")[0]), **own, **given}
    mixer = kwargs.pop("mixer")
    if mixer is None:
        raise UserError(f"model is {model!r}: recall takes the mixers of vlonghorn_* and vim_*")
    return RecallConfig(**{**values, "model_kwargs": kwargs, "mixer": mixer})


def _merge(kind: Any, values: Mapping, parts: tuple[Mapping, ...]) -> Mapping:
    """Returns values of a config of that kind, after what each of the parts, the study first, overrides."""
    kwargs, places = dict(values.get("model_kwargs") or {}), kind.named("host", "start")
    allowed = [field.name for field in dataclasses.fields(kind) if field.name not in (*places, *BESIDE)]
    for part in parts:
        overrides = part.get("overrides", {})
        for key in BESIDE.keys() & overrides:
            raise UserError(f"overrides has {key!r}: give {BESIDE[key]} beside them")
        _known(overrides, dict.fromkeys(allowed, object))
        values = {**values, **overrides}
        kwargs.update(part.get("model_kwargs", {}))
    return {**values, "model_kwargs": {key: value for key, value in kwargs.items() if value is not None}}


def _digest(values: Mapping) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
