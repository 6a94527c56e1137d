"""The file of studies: what each compares, and the trials that it is made of. lab/studies.yaml explains the keys."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from lab.recall_config import RecallConfig
from vision_longhorn.errors import UserError, nearest
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
REMEDIES: dict[Any, str] = {dict: "`key: value` pairs", list: "a list", str: "a word", int: "a number"}
REMEDIES[int, list] = "a number or a list"
MIXERS = {"vlonghorn": "longhorn", "vim": "mamba"}  # by the first word of a model's name
# Those that a training step's speed depends on
STEP = ("model", "model_kwargs", "drop_path", "num_classes", "mixup", "cutmix", "mixup_prob", "opt", "layer_decay",
        "clip_grad", "batch_size", "grad_accum", "ema_decay", "precision", "compile", "deterministic",
        "cuda_graphs", "mixer", "width", "depth", "vocab_size", "length", "pairs")  # fmt: skip
# Fields that stand beside `overrides`, and how
BESIDE = {"seed": "`seeds: [0]`", "model_kwargs": "it", "mixer": "`model_kwargs: {mixer: longhorn}`"}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One variant in one setting, which is "" if the study names none. `data` is "" where the task makes its own."""

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
        """Eight hexadecimal digits of its data's name and its settings, without those at their default: so a new field
        of the config changes no key."""
        usual = type(self.config)().values()
        values = {key: value for key, value in self.config.decisive(self.settings()).items() if value != usual[key]}
        return _digest({"data": self.data, **values})

    @cached_property
    def speed_key(self) -> str:
        """The same of those settings alone that the speed of a training step depends on."""
        return _digest({key: value for key, value in self.settings().items() if key in STEP})

    def settings(self) -> Mapping:
        """The effective settings, without places, seed, and what is written on the way."""
        left_out = {*self.config.named("host", "writing"), "seed"}
        return {key: value for key, value in self.config.values().items() if key not in left_out}

    @property
    def images_per_epoch(self) -> int:
        """Samples of an epoch's updates on one process; 0 where only the data tell."""
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
        """The same in two studies that share the trial."""
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
        """Every arm's first seed, then every arm's second, and so on: the first ones done compare, too."""
        longest = max(len(arm.seeds) for arm in self.arms)
        return [Trial(arm, arm.seeds[i]) for i in range(longest) for arm in self.arms if i < len(arm.seeds)]

    def sizes(self, arm: Arm) -> list[int]:
        """Sides of images in pixels at which an arm's final weights are evaluated image by image."""
        native = [arm.config.model_kwargs.get("img_size", 224)] if arm.variant in self.pair else []
        return sorted({*native, *self.resolutions})


def label_of(setting: str, variant: str) -> str:
    return f"{setting}-{variant}" if setting else variant


def unique_trials(studies: Iterable[Study]) -> list[Trial]:
    """The trials of several studies; one that they share stands once."""
    return list({trial.identity: trial for study in studies for trial in study.trials()}.values())


def read_studies(path: str | Path = STUDIES) -> dict[str, Study]:
    """Reads all studies of a file, by name. Raises UserError for what is unknown, missing or contradictory."""
    if not Path(path).is_file():
        raise UserError(f"there is no file of studies at {path}: give a YAML file like lab/studies.yaml")
    try:
        content = _mapping("", read_yaml(Path(path)), FILE)
        facts = {name: _mapping(f"data {name}", one, FACTS) for name, one in content.get("data", {}).items()}
        shared = {name: _mapping(f"variant {name}", v, VARIANT) for name, v in content.get("variants", {}).items()}
        if not content.get("studies"):
            raise UserError("there are no studies: give `studies:` with one by its name")
        return {name: _study(name, spec, facts, shared) for name, spec in content["studies"].items()}
    except UserError as error:
        raise UserError(str(error) if str(error).startswith(str(path)) else f"{path}: {error}") from None


def _study(name: str, spec: Any, facts: Mapping, shared: Mapping) -> Study:
    where = f"study {name}"
    _check_name(name)
    task = spec.get("task", "images") if isinstance(spec, dict) else "images"
    if task not in ("images", "recall"):
        raise UserError(f"{where}: task is {task!r}: give one of images, recall")
    spec = _mapping(where, spec, IMAGES if task == "images" else RECALL)
    if not spec.get("variants"):
        raise UserError(f"{where}: variants is missing")
    variants = [_variant(where, item, shared) for item in spec["variants"]]
    settings = _settings(where, spec, task)
    arms = tuple(_arm(name, task, key, (spec, own, variant), facts)
                 for key, own in settings.items() for variant in variants)  # fmt: skip
    labels, keys = [arm.label for arm in arms], [arm.key for arm in arms]
    for label, key in zip(labels, keys):
        alike = [other for other, own in zip(labels, keys) if own == key or other == label]
        if len(alike) > 1:
            raise UserError(f"{where}: {' and '.join(alike)} have the same name or settings: leave one out")
    names = [variant["name"] for variant in variants]
    pair = _some(f"{where}: pair", spec.get("pair", []), names)
    if len(pair) not in (0, 2):
        raise UserError(f"{where}: pair is {list(pair)}: give two variants")
    baseline = spec.get("baseline") or (pair[1] if pair else names[0])
    _some(f"{where}: baseline", [baseline], names)
    sizes, weights = tuple(spec.get("resolutions", ())), spec.get("weights", "ema")
    if not all(type(size) is int and size > 0 for size in sizes):
        raise UserError(f"{where}: resolutions is {list(sizes)}: give sides of images, in pixels")
    _some(f"{where}: weights", [weights], ["ema", "raw"])
    if weights == "raw" and (pair or sizes):
        raise UserError(f"{where}: weights is 'raw': give neither pair nor resolutions, which need the averaged ones")
    contrasts = tuple(_contrast(where, title, own, labels) for title, own in spec.get("contrasts", {}).items())
    return Study(name, spec.get("asks", ""), task, arms, baseline, weights, pair, contrasts, sizes)


def _contrast(where: str, title: Any, own: Any, labels: list[str]) -> Mapping:
    where = f"{where}: contrast {title!r}"
    own = _mapping(where, own, CONTRAST)
    plus, minus, over = own.get("plus"), own.get("minus"), own.get("over", 1)
    if not plus or not minus:
        raise UserError(f"{where}: plus is {plus}, minus {minus}: give a list of arms for each")
    _some(where, [*plus, *minus], labels)
    if over < 1:
        raise UserError(f"{where}: over is {over}: give 1 or more")
    return {"name": str(title), "plus": plus, "minus": minus, "over": over}


def _settings(where: str, spec: Mapping, task: str) -> dict[str, Mapping]:
    """The settings of a study by name, each with every combination of what its grid overrides; one called "" if it has
    neither."""
    kinds = DIFFERENCES if task == "recall" else SETTING
    settings = {key: _mapping(f"{where}: setting {key}", own, kinds) for key, own in spec.get("settings", {}).items()}
    for name in settings:
        _check_name(name)
    settings = settings or {"": {}}
    for key, values in spec.get("grid", {}).items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{where}: grid: {key} is {values!r}: give a list of values")
        settings = {
            "-".join(filter(None, (name, f"{key}{value}"))): {
                **own, "overrides": {**own.get("overrides", {}), key: value}
            }
            for name, own in settings.items()
            for value in values
        }  # fmt: skip
    return settings


def _variant(where: str, item: Any, shared: Mapping) -> Mapping:
    """A variant as a study lists it, with what it takes over from a shared one."""
    item = _mapping(f"{where}: variant", {"name": item} if isinstance(item, str) else item, VARIANT)
    _check_name(item.get("name"))
    source = item.get("like", item["name"])
    if source not in shared and ("like" in item or len(item) == 1):
        known = ", ".join(map(str, shared)) or "no variant is"
        raise UserError(f"{where}: variant {source!r} is not shared ({known}): say what it is")
    taken = shared.get(source, {})
    merged = {key: {**taken.get(key, {}), **item.get(key, {})} for key in ("model_kwargs", "overrides")}
    return {**taken, **item, **merged}


def _arm(study: str, task: str, setting: str, parts: tuple[Mapping, ...], facts: Mapping) -> Arm:
    """An arm of what a study, a setting and a variant say, of which the latter wins."""
    whole = {key: value for part in parts for key, value in part.items()}
    try:
        config = (_recall_config if task == "recall" else _image_config)(whole, parts, facts)
        seeds = _seeds(whole.get("seeds", 1))
    except UserError as error:
        raise UserError(f"study {study}, {label_of(setting, whole['name'])}: {error}") from None
    return Arm(study, setting, whole["name"], whole.get("data", ""), config, seeds)


def _image_config(whole: Mapping, parts: tuple[Mapping, ...], facts: Mapping) -> Config:
    for key in "data", "config":
        if key not in whole:
            raise UserError(f"{key} is missing")
    beside = STUDIES.with_name(f"{whole['config']}.yaml")  # other names are those of configs/
    base = read_config_file(beside if beside.is_file() else whole["config"])
    values = _merge(Config, {"model": Config.model, **base, **facts.get(whole["data"], {})}, parts)
    values["model"] = whole.get("model", values["model"])
    config = Config(**{key: value for key, value in values.items() if key not in Config.named("host", "start")})
    config.check_new(own_warmup=any("warmup_epochs" in part.get("overrides", {}) for part in parts))
    return config


def _recall_config(whole: Mapping, parts: tuple[Mapping, ...], _: Mapping) -> RecallConfig:
    """The settings of a variant's mixer in a language model."""
    values, model = _merge(RecallConfig, {}, parts), whole.get("model", "vlonghorn")
    mixer = values["model_kwargs"].pop("mixer", MIXERS.get(model.partition("_")[0]))
    if mixer is None:
        raise UserError(f"model is {model!r}: recall takes the mixers of vlonghorn_* and vim_*")
    return RecallConfig(**{**values, "mixer": mixer})


def _merge(kind: Any, values: Mapping, parts: tuple[Mapping, ...]) -> Mapping:
    """Values of a config of that kind with what each of the parts, a study's first, overrides."""
    kwargs, places = dict(values.get("model_kwargs") or {}), kind.named("host", "start")
    allowed = [field.name for field in dataclasses.fields(kind) if field.name not in (*places, *BESIDE)]
    for part in parts:
        overrides = part.get("overrides", {})
        for key in BESIDE.keys() & overrides:
            raise UserError(f"overrides has {key!r}: give {BESIDE[key]} beside them")
        values = {**values, **_mapping("overrides", overrides, dict.fromkeys(allowed, object), empty=True)}
        kwargs.update(part.get("model_kwargs", {}))
    return {**values, "model_kwargs": {key: value for key, value in kwargs.items() if value is not None}}


def _seeds(seeds: Any) -> tuple[int, ...]:
    """Seeds from their number, or from a list of them."""
    found = list(range(seeds)) if isinstance(seeds, int) else seeds
    if not found or len(set(map(str, found))) < len(found):
        raise UserError(f"seeds is {seeds!r}: give how many, 1 or more, or a list of different ones")
    for seed in found:
        Config(seed=seed)  # which says what a seed may be
    return tuple(found)


def _some(where: str, given: list[Any], known: list[str]) -> tuple[str, ...]:
    for word in given:
        if word not in known or given.count(word) > 1:
            raise UserError(f"{where}: {word!r} is unknown or stands twice: give some of {', '.join(known)}")
    return tuple(given)


def _mapping(where: str, value: Any, kinds: Mapping, empty: bool = False) -> Mapping:
    """Checks keys and types of a mapping of the file, and drops empty values unless `empty`."""
    at = f"{where}: " if where else ""
    if not isinstance(value or {}, dict) or value is False:
        raise UserError(f"{where or 'this file'} is {value!r}: give {REMEDIES[dict]}")
    for key, found in (value or {}).items():
        if key not in kinds:
            known = nearest(str(key), kinds) or kinds
            raise UserError(f"{at}unknown key {key!r}: give one of {', '.join(known)}")
        kind = kinds[key]
        if found is not None and kind is not object and (isinstance(found, bool) or not isinstance(found, kind)):
            raise UserError(f"{at}{key} is {found!r}: give {REMEDIES[kind]}")
    return {key: found for key, found in (value or {}).items() if empty or found is not None}


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError(f"the name {name!r} cannot be a folder's: give letters, digits, and . _ - between them")


def _digest(values: Mapping) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
