"""The file of studies: what each asks, and the runs that it is made of. lab/studies.yaml explains the keys."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from lab.recall_config import RecallConfig
from vision_longhorn.errors import UserError, nearest
from vision_longhorn.settings import read_yaml
from vision_longhorn.training.config import Config, read_config_file, shorten_warmup

STUDIES = Path(__file__).with_name("studies.yaml")
DATA_KEYS = ("train_samples", "val_samples", "num_classes")
VARIANT_KEYS = ("name", "like", "model", "model_kwargs", "overrides", "seeds")
SETTING_KEYS = ("config", "data", "model_kwargs", "overrides", "seeds")
STUDY_KEYS = (
    "asks",
    "task",
    *SETTING_KEYS,
    "settings",
    "grid",
    "variants",
    "baseline",
    "weights",
    "pair",
    "contrasts",
    "resolutions",
)
CONTRAST_KEYS = ("plus", "minus", "over")
TASKS = {"images": Config, "recall": RecallConfig}
OF_IMAGES = ("config", "data", "weights", "pair", "contrasts", "resolutions")  # keys that mean nothing to other tasks
WEIGHTS = ("ema", "raw")
MIXERS = {"vlonghorn": "longhorn", "vim": "mamba"}  # by the first word of a model's name
# Those that a training step's speed depends on.
STEP = ("model", "model_kwargs", "drop_path", "num_classes", "mixup", "cutmix", "mixup_prob", "opt", "layer_decay",
        "clip_grad", "batch_size", "grad_accum", "ema_decay", "precision", "compile", "deterministic",
        "cuda_graphs", "mixer", "width", "depth", "vocab_size", "length", "pairs")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Arm:
    """One variant in one setting: what runs of different seeds have in common.

    Attributes:
        study, setting, variant: Their names; the setting of a study that names none is "".
        data: Name of its data, "" where the task makes its own.
        config: Its settings, all of them; places, workers and device are those of the defaults.
        seeds: Seeds of its runs.
    """

    study: str
    setting: str
    variant: str
    data: str
    config: Config | RecallConfig
    seeds: tuple[int, ...]

    @property
    def of_images(self) -> bool:
        """Whether its runs are the trainer's."""
        return isinstance(self.config, Config)

    @property
    def label(self) -> str:
        """What it is called in messages and folders."""
        return f"{self.setting}-{self.variant}" if self.setting else self.variant

    @cached_property
    def key(self) -> str:
        """Eight hexadecimal digits of its effective settings and the name of its data.

        What is as its config has it by default is left out, so that a field that is added there changes no key.
        """
        usual = type(self.config)().values()
        values = {key: value for key, value in self.config.decisive(self.settings()).items() if value != usual[key]}
        return _digest({"data": self.data, **values})

    @cached_property
    def speed_key(self) -> str:
        """The like of those settings alone that the speed of a training step depends on."""
        return _digest({key: value for key, value in self.settings().items() if key in STEP})

    def settings(self) -> dict[str, Any]:
        """Dict of the effective settings, without places, seed, and what is written on the way."""
        left_out = {*self.config.named("host", "writing"), "seed"}
        return {key: value for key, value in self.config.values().items() if key not in left_out}

    @property
    def images_per_epoch(self) -> int:
        """Samples of an epoch's updates on one process."""
        batch = self.config.batch_size * self.config.grad_accum
        return (self.config.train_samples or 0) // self.config.batch_size // self.config.grad_accum * batch


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of an arm.

    Attributes:
        arm, seed: What it is.
    """

    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.arm.label}-s{self.seed}-{self.arm.key}"

    @property
    def identity(self) -> tuple[str, int]:
        """Alike in two studies' runs that are one and the same."""
        return self.arm.key, self.seed


@dataclasses.dataclass(frozen=True)
class Contrast:
    """What several arms' means make together: the sum of some, less that of others, divided.

    Attributes:
        name: What it is, for readers of the table.
        plus, minus: Labels of the arms that are added, and that are taken away: each stands once.
        over: What the sum is divided by: 3 makes the mean of three differences.
    """

    name: str
    plus: tuple[str, ...]
    minus: tuple[str, ...]
    over: int


@dataclasses.dataclass(frozen=True)
class Study:
    """A study. `lab/studies.yaml` says what its parts mean.

    Attributes:
        name, asks: Its name, and the question that it asks.
        task: What its runs are: "images" or "recall".
        arms: What it compares: all variants in the first setting, in the second, ...
        baseline: Variant that others are compared with, in the same setting.
        weights: Which weights of a run count, "ema" or "raw".
        pair: The main pair of variants, or ().
        contrasts: What else of the arms is compared.
        resolutions: Sides of images in pixels at which the final weights are evaluated, or ().
    """

    name: str
    asks: str
    task: str
    arms: tuple[Arm, ...]
    baseline: str
    weights: str
    pair: tuple[str, ...]
    contrasts: tuple[Contrast, ...]
    resolutions: tuple[int, ...]

    def runs(self) -> list[Run]:
        """All its runs: every arm's first seed, then every arm's second, so that a part of them compares, too."""
        longest = max(len(arm.seeds) for arm in self.arms)
        return [Run(arm, arm.seeds[i]) for i in range(longest) for arm in self.arms if i < len(arm.seeds)]

    def sizes(self, arm: Arm) -> list[int]:
        """Sides of images in pixels at which an arm's final weights are evaluated image by image."""
        native = [arm.config.model_kwargs.get("img_size", 224)] if arm.variant in self.pair else []
        return sorted({*native, *self.resolutions})


def read_studies(path: str | Path = STUDIES) -> dict[str, Study]:
    """All studies of a file, by name.

    Raises:
        UserError: For whatever in the file is unknown, missing or contradicts something else.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"there is no file of studies at {path}: give a YAML file like {STUDIES.name} of configs/")
    try:
        content = read_yaml(file)
        _check_keys("", content, ("data", "variants", "studies"))
        data, shared = _mapping("data", content.get("data")), _mapping("variants", content.get("variants"))
        if not _mapping("studies", content.get("studies")):
            raise UserError("there are no studies: give `studies:` with one by its name")
        for name, facts in data.items():
            _check_keys(f"data {name}: ", _mapping(name, facts), DATA_KEYS)
            for key in DATA_KEYS:
                if key not in _mapping(name, facts):
                    raise UserError(f"data {name}: {key} is missing: give {', '.join(DATA_KEYS)}")
        for name, spec in shared.items():
            _check_name(name)
            _check_keys(f"variant {name}: ", _mapping(name, spec), VARIANT_KEYS[2:-1])
        studies = _mapping("studies", content.get("studies"))
        return {name: _study(name, _mapping(name, spec), data, shared) for name, spec in studies.items()}
    except UserError as error:
        raise UserError(str(error) if str(error).startswith(str(file)) else f"{file}: {error}") from None


def _study(name: str, spec: dict[str, Any], data: dict[str, Any], shared: dict[str, Any]) -> Study:
    where = f"study {name}: "
    _check_name(name)
    task = spec.get("task", "images")
    if task not in TASKS:
        raise UserError(f"{where}task is {task!r}: give one of {', '.join(TASKS)}")
    _check_keys(where, spec, [key for key in STUDY_KEYS if task == "images" or key not in OF_IMAGES])
    for key in ("asks", "variants"):
        if not spec.get(key):
            raise UserError(f"{where}{key} is missing")
    for key in ("variants", "pair", "resolutions"):
        if not isinstance(spec.get(key) or [], list):
            raise UserError(f"{where}{key} is {spec[key]!r}: give a list")
    settings = _settings(where, spec)
    variants = [_variant(where, item, shared) for item in spec["variants"]]
    make = partial(_arm, data=data) if task == "images" else _recall_arm
    arms = tuple(make(name, setting, spec, own, variant) for setting, own in settings.items() for variant in variants)
    for i, arm in enumerate(arms):
        for other in arms[:i]:
            if arm.label == other.label:
                raise UserError(f"{where}the variant {arm.label} stands twice: give one another name")
            if arm.key == other.key:
                raise UserError(f"{where}{other.label} and {arm.label} have the same settings: leave one out")
    names = [variant["name"] for variant in variants]
    pair = tuple(spec.get("pair") or ())
    baseline = spec.get("baseline") or (pair[1] if len(pair) == 2 else names[0])
    for word in (*pair, baseline):
        if word not in names:
            raise UserError(f"{where}{word!r} is none of its variants: give one of {', '.join(names)}")
    if len(pair) not in (0, 2) or len(set(pair)) != len(pair):
        raise UserError(f"{where}pair is {list(pair)}: give two variants")
    sizes = spec.get("resolutions") or ()
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise UserError(f"{where}resolutions is {sizes}: give sides of images, in pixels")
    weights = spec.get("weights", WEIGHTS[0])
    if weights not in WEIGHTS:
        raise UserError(f"{where}weights is {weights!r}: give one of {', '.join(WEIGHTS)}")
    if weights == "raw" and (pair or sizes):
        raise UserError(
            f"{where}weights is 'raw': give neither pair nor resolutions, for which the averaged weights are evaluated"
        )
    contrasts = tuple(
        _contrast(f"{where}contrast {title!r}: ", title, _mapping(f"{where}contrast {title!r}", own), arms)
        for title, own in _mapping(f"{where}contrasts", spec.get("contrasts")).items()
    )
    return Study(name, str(spec["asks"]), task, arms, baseline, weights, pair, contrasts, tuple(sizes))


def _contrast(where: str, title: str, own: dict[str, Any], arms: tuple[Arm, ...]) -> Contrast:
    _check_keys(where, own, CONTRAST_KEYS)
    labels = [arm.label for arm in arms]
    plus, minus = own.get("plus"), own.get("minus")
    if not (isinstance(plus, list) and isinstance(minus, list) and plus and minus):
        raise UserError(f"{where}plus is {plus!r}, minus {minus!r}: give a list of arms for each")
    named = [str(label) for label in (*plus, *minus)]
    for label in named:
        if label not in labels:
            raise UserError(f"{where}{label!r} is none of its arms: give some of {', '.join(labels)}")
        if named.count(label) > 1:
            raise UserError(f"{where}{label} stands twice: give each once")
    over = own.get("over", 1)
    if type(over) is not int or over < 1:
        raise UserError(f"{where}over is {over!r}: give a whole number, 1 or more")
    return Contrast(str(title), tuple(named[: len(plus)]), tuple(named[len(plus) :]), over)


def _settings(where: str, spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of a study by name, each with every combination of what its grid overrides; one called "" if it has
    neither."""
    settings = {name: _mapping(name, own) for name, own in _mapping("settings", spec.get("settings")).items()}
    settings = settings or {"": {}}
    for key, values in _mapping(f"{where}grid", spec.get("grid")).items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{where}grid: {key} is {values!r}: give a list of values")
        settings = {
            "-".join(filter(None, (name, f"{key}{value}"))): {
                **own,
                "overrides": {**_mapping(f"{where}overrides", own.get("overrides")), key: value},
            }
            for name, own in settings.items()
            for value in values
        }
    return settings


def _variant(where: str, item: Any, shared: dict[str, Any]) -> dict[str, Any]:
    """A variant as a study lists it, with what it takes over from a shared one."""
    item = {"name": item} if isinstance(item, str) else _mapping(f"{where}variant", item)
    _check_keys(f"{where}variant {item.get('name')}: ", item, VARIANT_KEYS)
    _check_name(item.get("name"))
    if item.get("like", item["name"]) not in shared and ("like" in item or len(item) == 1):
        unknown = item.get("like", item["name"])
        near = f"give one of {', '.join(shared)}, or " if shared else "no variant is shared here, "
        raise UserError(f"{where}variant {unknown!r} is not known: {near}say what it is")
    taken = shared.get(item.get("like", item["name"])) or {}
    merged = {key: {**(taken.get(key) or {}), **(item.get(key) or {})} for key in ("model_kwargs", "overrides")}
    return {**taken, **item, **merged}


def _arm(
    study: str, setting: str, spec: dict[str, Any], own: dict[str, Any], variant: dict[str, Any], data: dict[str, Any]
) -> Arm:
    label = f"{setting}-{variant['name']}" if setting else variant["name"]
    where = f"study {study}, {label}: "
    if setting:
        _check_name(setting)
        _check_keys(where, own, SETTING_KEYS)
    place, config = own.get("data", spec.get("data")), own.get("config", spec.get("config"))
    if place not in data:
        described = f"give one of {', '.join(data)}, which the file describes" if data else "the file describes none"
        raise UserError(f"{where}data is {place!r}: {described}")
    if not isinstance(config, str):
        raise UserError(f"{where}config is {config!r}: give the name of one in configs/, or a YAML file")
    values = _merge(where, Config, {**_base(config), **data[place]}, (spec, own, variant))
    values["model"] = variant.get("model", values.get("model", Config.model))
    for key in Config.named("host", "start"):
        values.pop(key, None)
    try:
        if not any("warmup_epochs" in (part.get("overrides") or {}) for part in (spec, own, variant)):
            shorten_warmup(values)
        checked = Config(**values)
        faults = checked.faults()
        if faults:
            raise UserError(faults[0])
    except UserError as error:
        raise UserError(f"{where}{error}") from None
    return Arm(study, setting, variant["name"], place, checked, _seeds(where, spec, own, variant))


def _recall_arm(study: str, setting: str, spec: dict[str, Any], own: dict[str, Any], variant: dict[str, Any]) -> Arm:
    """An arm of recall: a variant's mixer in a language model."""
    label = f"{setting}-{variant['name']}" if setting else variant["name"]
    where = f"study {study}, {label}: "
    if setting:
        _check_name(setting)
        _check_keys(where, own, [key for key in SETTING_KEYS if key not in OF_IMAGES])
    values = _merge(where, RecallConfig, {}, (spec, own, variant))
    word = str(variant.get("model", "vlonghorn")).partition("_")[0]
    mixer = values["model_kwargs"].pop("mixer", MIXERS.get(word))
    if mixer is None:
        raise UserError(f"{where}model is {variant['model']!r}: recall takes the mixers of vlonghorn_* and vim_*")
    try:
        config = RecallConfig(**{**values, "mixer": mixer})
    except UserError as error:
        raise UserError(f"{where}{error}") from None
    return Arm(study, setting, variant["name"], "", config, _seeds(where, spec, own, variant))


def _merge(where: str, kind: Any, values: dict[str, Any], parts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Values of a config of that kind with what each of the parts, a study's first, overrides."""
    kwargs = _mapping("model_kwargs", values.get("model_kwargs"))
    taken = (*kind.named("host", "start"), "seed", "model_kwargs", "mixer")
    for part in parts:
        overrides = _mapping(f"{where}overrides", part.get("overrides"))
        if elsewhere := [key for key in ("seed", "model_kwargs", "mixer") if key in overrides]:
            place = {"seed": "`seeds: [0]`", "mixer": "`model_kwargs: {mixer: longhorn}`"}.get(elsewhere[0], "it")
            raise UserError(f"{where}overrides has {elsewhere[0]!r}: give {place} beside them")
        _check_keys(f"{where}overrides: ", overrides, [key for key in kind.__dataclass_fields__ if key not in taken])
        values = {**values, **overrides}
        kwargs.update(_mapping(f"{where}model_kwargs", part.get("model_kwargs")))
    return {**values, "model_kwargs": {key: value for key, value in kwargs.items() if value is not None}}


@cache
def _base(config: str) -> dict[str, Any]:
    own = STUDIES.with_name(f"{config}.yaml")  # beside the studies of this folder; others are in configs/
    return read_config_file(own if own.is_file() else config)


def _seeds(where: str, spec: dict[str, Any], own: dict[str, Any], variant: dict[str, Any]) -> tuple[int, ...]:
    """Seeds as the file gives them: their number, or a list of them."""
    seeds = variant.get("seeds", own.get("seeds", spec.get("seeds", 1)))
    found = list(range(seeds)) if type(seeds) is int else seeds
    if not isinstance(found, list) or not found or len(set(found)) < len(found):
        raise UserError(f"{where}seeds is {seeds!r}: give how many, 1 or more, or a list of different ones")
    for seed in found:
        Config(seed=seed)  # which says what a seed may be
    return tuple(found)


def _mapping(what: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{what} is {value!r}: give `key: value` pairs")
    return dict(value or {})


def _check_keys(where: str, given: dict[str, Any], known: Any) -> None:
    for key in given:
        if key not in known:
            near = nearest(str(key), known)
            few = (
                f"give one of {', '.join(known)}" if len(known) < 20 else "`vision-longhorn train --help` has them all"
            )
            remedy = f"the nearest known one is {near[0]!r}" if near else few
            raise UserError(f"{where}unknown key {key!r}; {remedy}")


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError(f"the name {name!r} cannot be a folder's: give letters, digits, and . _ - between them")


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def unique_runs(studies: list[Study]) -> Iterator[Run]:
    """The runs of several studies, those that are one and the same once."""
    seen = set()
    for study in studies:
        for run in study.runs():
            if run.identity not in seen:
                seen.add(run.identity)
                yield run
