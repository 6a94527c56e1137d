"""Settings of a training run: one dataclass, read from a YAML file and overridden on the command line.

    python train_imagenet.py --config configs/cifar10.yaml --data DIR --lr 1e-3 --model-kwargs depth=6

Every field below is a key of the YAML files and an option of the command line (`-` and `_` are the same there).
"""

import argparse
import dataclasses
import difflib
import json
import types
import typing
from pathlib import Path

import yaml

from vision_longhorn.errors import Parser, UserError, one_line

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
# Optimisers that were tried with fsdp. Others mix shards with whole tensors, or take a shard for the whole.
SHARDED = ("adam", "adamw", "adopt", "lamb", "lion", "momentum", "nadamw", "nesterov", "radam", "rmsprop", "sgd")
DIGITS = "digits"  # value of `data` that stands for the built-in demo set
WORDS = {"none": None, "null": None, "": None, "true": True, "false": False}
TYPES = {int: "a whole number", float: "a number", str: "a word", bool: "true or false", list[float]: "numbers",
         dict: "KEY=VALUE pairs"}


def _value(default, doc):
    factory = {"default_factory": lambda: default.copy()} if isinstance(default, (dict, list)) else {"default": default}
    return dataclasses.field(**factory, metadata={"doc": doc})


@dataclasses.dataclass
class Config:
    """All values of a run. The defaults are the ViM recipe for a tiny model at batch 1024, on one GPU."""

    # Model
    model: str = _value("vlonghorn_tiny", "name of a timm model; importing vision_longhorn adds vlonghorn_* and vim_*")
    model_kwargs: dict = _value({}, "arguments of the model, KEY=VALUE ...; on the command line they add to the file's,"
                                    " KEY=none takes one away")
    drop_path: float = _value(0.0, "stochastic depth rate")
    init: str | None = _value(None, "file of weights to start from, a run's best.pt or others of the model; position "
                                    "embedding, patches and classifier are fitted")
    num_classes: int | None = _value(None, "number of classes; default: from the shards' index")

    # Data
    data: str | None = _value(None, "shards: folder, brace pattern, glob or URL; 'digits' is the built-in demo set")
    val_data: str | None = _value(None, "shards for evaluation, where they are not part of `data`")
    train_split: str = _value("train", "split to train on")
    val_split: str = _value("val", "split to evaluate on")
    train_samples: int | None = _value(None, "training samples, for shards without an index")
    val_samples: int | None = _value(None, "evaluation samples, for shards without an index")
    allow_pipe: bool = _value(False, "run the commands of `pipe:COMMAND` in data and val_data, which print shards; to "
                                     "be given anew to resume a run")
    workers: int = _value(8, "loader processes per training process")
    max_bad_samples: float = _value(0, "training samples that a process may skip in an epoch because they cannot be "
                                       "read, a number, or below 1 a share of them")

    # Image transforms, timm's
    mean: list[float] | None = _value(None, "channel means in 0..1; default: the model's")
    std: list[float] | None = _value(None, "channel standard deviations in 0..1; default: the model's")
    interpolation: str = _value("bicubic", "resampling in training and evaluation")
    crop_pct: float = _value(0.875, "evaluation crop, as a fraction of the resized image")
    scale: list[float] = _value([0.08, 1.0], "area of the random resized crop, as fractions of the image")
    ratio: list[float] = _value([0.75, 1.3333], "aspect ratio of the random resized crop")
    hflip: float = _value(0.5, "probability of a horizontal flip")
    color_jitter: float | None = _value(0.3, "strength of colour jitter; timm leaves it out where auto_augment is on")
    auto_augment: str | None = _value("rand-m9-mstd0.5-inc1", "timm's policy string, such as RandAugment's")
    re_prob: float = _value(0.25, "probability of random erasing")
    re_mode: str = _value("pixel", "filling of the erased part: const, rand or pixel")
    repeats: int = _value(3, "repeated augmentation: views of each decoded sample in an epoch of unchanged size")

    # Loss
    smoothing: float = _value(0.1, "label smoothing")
    mixup: float = _value(0.8, "alpha of mixup, 0 is off")
    cutmix: float = _value(1.0, "alpha of cutmix, 0 is off")
    mixup_prob: float = _value(1.0, "probability that a batch is mixed")

    # Optimiser and schedule
    opt: str = _value("adamw", "timm's name of the optimiser")
    lr: float = _value(1e-3, "peak learning rate, at `lr_base_batch` where that is set")
    lr_base_batch: int | None = _value(1024, "global batch for lr; lr scales with the actual one; none: it does not")
    layer_decay: float | None = _value(None, "factor of the learning rate from a block to the one before, such as 0.75 "
                                             "in fine-tuning")
    weight_decay: float = _value(0.1, "weight decay; the model's no_weight_decay(), biases and norms are spared")
    clip_grad: float | None = _value(None, "largest norm of the gradient; none: no clipping")
    batch_size: int = _value(1024, "samples per process and pass; the global batch is this x processes x grad_accum")
    grad_accum: int = _value(1, "forward passes per update")
    epochs: int = _value(300, "passes over as many samples as the training split holds")
    warmup_epochs: float = _value(5, "epochs of linear warm-up, part of `epochs`")
    warmup_lr: float = _value(1e-6, "learning rate at the start of the warm-up")
    min_lr: float = _value(1e-5, "learning rate at the end of the cosine")
    ema_decay: float = _value(0.99996, "decay of the averaged weights per update; 0: no averaging")
    ema_warmup: bool = _value(False, "let the decay grow from 0 over the first updates")

    # Run
    run_dir: str | None = _value(None, "folder of the run; default: runs/NAME-TIME")
    resume: str | None = _value(None, "go on with this run (its folder, or one of its checkpoints) under its own "
                                      "config; without a value: with the run in --run-dir, if there is one yet")
    seed: int = _value(0, "seed of weights, sample order and augmentation")
    device: str = _value("auto", "auto, cuda or cpu; auto is cuda where there is one")
    precision: str = _value("auto", "auto, bf16 or fp32; auto is bf16 autocast on a GPU, fp32 on a CPU")
    compile: bool = _value(False, "torch.compile the model")
    deterministic: bool = _value(False, "only algorithms of torch that give the same bits again; an error where it has "
                                        "none")
    compress_gradients: bool = _value(False, "average the processes' gradients in bfloat16, at half the traffic")
    fsdp: bool = _value(False, "share out weights, gradients and the optimiser's state over the processes (FSDP2), for "
                               "models too large for one GPU")
    log_interval: int = _value(50, "updates between two entries of the training curves")
    eval_interval: int = _value(1, "epochs between two evaluations; the last epoch is always evaluated")
    checkpoint_interval: int = _value(1000, "updates between two checkpoints within an epoch; its end always has one")
    keep_checkpoints: int = _value(2, "checkpoints to keep, beside the best")
    max_bad_steps: int = _value(10, "stop after so many updates in a row whose loss or gradients are not finite")

    def values(self):
        """Dict of the values that make a run what it is: all but where it lies and what it was allowed."""
        return {key: value for key, value in dataclasses.asdict(self).items()
                if key not in ("run_dir", "resume", "allow_pipe")}

    def __post_init__(self):
        for field in dataclasses.fields(self):
            setattr(self, field.name, _coerce(field.name, getattr(self, field.name), field.type))
        for key in ("batch_size", "grad_accum", "epochs", "repeats", "log_interval", "eval_interval", "lr",
                    "checkpoint_interval", "keep_checkpoints", "max_bad_steps"):
            if getattr(self, key) <= 0:
                raise UserError(f"{key} is {getattr(self, key)}: give a value above 0")
        if self.max_bad_samples < 0:
            raise UserError(f"max_bad_samples is {self.max_bad_samples}: give 0 or more")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise UserError(f"layer_decay is {self.layer_decay}: give a value above 0, up to 1")
        for key in ("drop_path", "hflip", "re_prob", "smoothing", "mixup_prob", "ema_decay"):
            if not 0 <= getattr(self, key) <= 1:
                raise UserError(f"{key} is {getattr(self, key)}: give a value from 0 to 1")
        for key, known in {"device": ("auto", "cuda", "cpu"), "precision": ("auto", "bf16", "fp32"),
                           "interpolation": ("bilinear", "bicubic", "nearest", "lanczos", "random"),
                           "re_mode": ("const", "rand", "pixel")}.items():
            if getattr(self, key) not in known:
                raise UserError(f"{key} is {getattr(self, key)!r}: give one of {', '.join(known)}")
        if self.fsdp and self.opt not in SHARDED:
            raise UserError(f"opt is {self.opt!r}: with fsdp give one of {', '.join(SHARDED)}")
        if self.batch_size % 2 and (self.mixup or self.cutmix):
            raise UserError(f"batch_size is {self.batch_size}: mixup and cutmix pair samples, give an even one")


def load_config(argv=None):
    """Reads the command line and the config that it names.

    With neither a config nor data, the demo's config is taken. In a resumed run `resume` is the path of the checkpoint,
    and `run_dir` its folder; where `--resume` has no value and `--run-dir` holds no run yet, `resume` is None.

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
        if Path(given["run_dir"], "config.yaml").is_file():
            given["resume"], path = given.pop("run_dir"), None
        else:
            del given["resume"]
    if "resume" in given:
        if path:
            raise UserError(f"--resume goes on under the run's own config: drop --config {path}")
        if "run_dir" in given:
            raise UserError(f"--resume goes on in the run's own folder: drop --run-dir {given['run_dir']}")
        file = Path(given["resume"])
        file = file if file.suffix == ".pt" else file / "last.pt"
        if file.name != "last.pt" and not file.is_file():
            raise UserError(f"cannot resume {file}: there is no such checkpoint; {file.parent / 'last.pt'} is the last")
        path = file.parent / "config.yaml"
        if not path.is_file():
            raise UserError(f"cannot resume {file.parent}: it has no config.yaml; give the folder of a run")
        given.update(resume=str(file), run_dir=str(file.parent))
    elif path is None and given.get("data", DIGITS) == DIGITS:
        path = "demo_digits"
    values = read_config_file(path) if path else {}
    if "resume" in given:  # the folder of a run may come from a stranger
        values.pop("allow_pipe", None)
    if "model_kwargs" in given:
        merged = {**_coerce("model_kwargs", values.get("model_kwargs", {}), dict), **parse_pairs(given["model_kwargs"])}
        given["model_kwargs"] = {key: value for key, value in merged.items() if value is not None}
    config = Config(**{**values, **given})
    return config, Path(path).stem if path else config.model


def read_config_file(path):
    """Values of a YAML config, given by path or by its bare name in configs/.

    Raises:
        UserError: Where the file is missing, is no YAML mapping, or has a key that `Config` lacks.
    """
    file = next((f for f in (Path(path), CONFIGS / f"{path}.yaml") if f.is_file()), None)
    if file is None:
        known = sorted(f.stem for f in CONFIGS.glob("*.yaml"))
        raise UserError(f"no config at {path}: give a YAML file or one of {', '.join(known)}")
    try:
        values = yaml.safe_load(file.read_text()) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{file} is no valid YAML: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise UserError(f"{file} holds no `key: value` lines")
    for key in values:
        if key not in Config.__dataclass_fields__:
            near = difflib.get_close_matches(str(key), Config.__dataclass_fields__, n=1, cutoff=0)[0]
            raise UserError(f"{file}: unknown key {key!r}; the nearest known one is {near!r}")
    return values


def _parser():
    parser = Parser(
        description=f"{__doc__.splitlines()[0]} Each value below may stand in the config file, too.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", help="YAML file, or the bare name of one in configs/")
    for field in dataclasses.fields(Config):
        kind = _without_none(field.type)
        many = {"nargs": "+"} if kind is dict or typing.get_origin(kind) is list else {}
        flag = {"nargs": "?", "const": True} if kind is bool or field.name == "resume" else {}
        default = "" if field.default is dataclasses.MISSING else f" [{field.default}]"
        parser.add_argument(f"--{field.name.replace('_', '-')}", metavar="VALUE", **many, **flag,
                            help=f"{field.metadata['doc']}{default}".replace("%", "%%"))
    return parser


def _without_none(kind):
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return next(option for option in typing.get_args(kind) if option is not type(None))
    return kind


def _coerce(key, value, kind):
    """`value`, from YAML or as typed, as the type `kind`. Strings are parsed in both: YAML 1.1 takes 1e-3 for one."""
    inner = _without_none(kind)
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
            return [_coerce(key, item, typing.get_args(inner)[0]) for item in value]
        if inner is dict:
            return parse_pairs(value) if isinstance(value, list) else dict(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise UserError(f"{key} is {value!r}: give {TYPES[inner]}{'' if inner is kind else ', or none'}")


def parse_pairs(words):
    """Dict of KEY=VALUE words; a value is a number, true, false, none, a [list], or else a string.

    Raises:
        UserError: For a word without "=".
    """
    for word in words:
        if "=" not in word:
            raise UserError(f"{word!r} is not KEY=VALUE, such as img_size=32")
    return {key: _parse_word(value) for key, _, value in (word.partition("=") for word in words)}


def _parse_word(word):
    if word.lower() in WORDS:
        return WORDS[word.lower()]
    for parse in (int, float, json.loads):
        try:
            return parse(word)
        except ValueError:
            pass
    return word
