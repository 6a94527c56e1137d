"""Settings of a training run: one dataclass, read from a YAML file and overridden on the command line.

    python train_imagenet.py --config configs/cifar10.yaml --data DIR --lr 1e-3 --model-kwargs depth=6

Every field below is a key of the YAML files and an option of the command line (`-` and `_` are the same there).
"""

import argparse
import dataclasses
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vision_longhorn
from vision_longhorn.command_line.parser import Parser
from vision_longhorn.demo import DIGITS
from vision_longhorn.errors import UserError, nearest
from vision_longhorn.model_arguments import check_names
from vision_longhorn.settings import (
    COUNT,
    POSITIVE,
    SHARE,
    Range,
    Settings,
    coerce,
    option,
    parse_pairs,
    read_yaml,
    without_none,
)

_HERE = Path(vision_longhorn.__file__).resolve().parent  # installed, the configs are in the package, else beside it
CONFIGS = next((f for f in (_HERE / "configs", _HERE.parent / "configs") if f.is_dir()), _HERE / "configs")
# Optimisers that were tried with fsdp. Others mix shards with whole tensors, or take a shard for the whole.
SHARDED = ("adam", "adamw", "adopt", "lamb", "lion", "momentum", "nadamw", "nesterov", "radam", "rmsprop", "sgd")
SAME_BITS = (
    "cuda_graphs",
    "keep_in_memory",
    "save_states",
)  # fields, and arguments of models, of how fast, not what comes out
_NUMBER = r"\d+(\.\d+)?"
# timm's strings: it leaves out without a word what it does not know of them
POLICIES = "|".join((
    "cifar10",
    rf"(original|originalr|v0|v0r|3a)(-mstd{_NUMBER})?",
    rf"rand(-([mn]\d+|mmax\d+|inc[01]|p{_NUMBER}|mstd{_NUMBER}|t[a-z0-9_]+))*",
    rf"augmix(-([mwdb]\d+|a{_NUMBER}|mstd{_NUMBER}))*",
))  # fmt: skip
TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio", "wandb")  # of accelerate


@dataclasses.dataclass
class Config(Settings):
    """All values of a run. The defaults are the ViM recipe for a tiny model at batch 1024, on one GPU."""

    # Model
    model: str = option(
        "vlonghorn_tiny",
        "name of a timm model; importing vision_longhorn adds vlonghorn_* and vim_*",
        also=("arch", "model_name"),
    )
    model_kwargs: dict = option(
        {},
        "arguments of the model, KEY=VALUE ...; on the command line they add to the file's, KEY=none takes one away",
        also=("img_size", "image_size", "depth", "patch_size"),
    )
    drop_path: float = option(0.0, "stochastic depth rate", Range(0, below=1), also=("drop_path_rate",))
    init: str | None = option(
        None,
        "weights to start from: a run or another file of the model's, or a folder in the hub's layout; position "
        "embedding, patches and classifier are fitted",
        also=("pretrained", "finetune", "checkpoint", "initial_checkpoint", "weights"),
    )
    num_classes: int | None = option(
        None, "number of classes; default: from the data", COUNT, also=("nb_classes", "classes")
    )

    # Data
    data: str | None = option(
        None,
        "shards (folder, brace pattern, glob or URL), or a folder of images with train/ "
        "and val/; 'digits' is the built-in demo set",
        also=("data_path", "data_dir", "dataset", "root"),
    )
    val_data: str | None = option(None, "shards or images for evaluation, where they are not part of `data`")
    train_split: str = option("train", "split to train on")
    val_split: str = option("val", "split to evaluate on")
    train_samples: int | None = option(None, "training samples, for shards without an index", COUNT)
    val_samples: int | None = option(None, "evaluation samples, for shards without an index", COUNT)
    allow_pipe: bool = option(
        False,
        "run the commands of `pipe:COMMAND` in data and val_data, which print shards; to be given anew to resume a run",
    )
    workers: int | None = option(
        None,
        "loader processes per training process; default: one to a core, 8 at most",
        Range(0, kind=int),
        also=("num_workers", "dataloader_workers"),
    )
    keep_in_memory: bool = option(
        False,
        "decode all images at the start and keep them, three bytes a pixel, in the memory of each process: for small "
        "data, to the same bits",
        also=("cache", "cache_images", "in_memory"),
    )
    max_bad_samples: float = option(
        0,
        "training samples that a process may skip in an epoch because they cannot be "
        "read, a number, or below 1 a share of them",
        Range(0),
    )

    # Image transforms, timm's
    mean: list[float] | None = option(None, "channel means in 0..1; default: the model's", SHARE, lengths=(1, 3))
    std: list[float] | None = option(
        None, "channel standard deviations in 0..1; default: the model's", Range(above=0, high=1), lengths=(1, 3)
    )
    interpolation: str = option(
        "bicubic", "resampling in training and evaluation", ("bilinear", "bicubic", "nearest", "lanczos", "random")
    )
    crop_pct: float = option(0.875, "evaluation crop, as a fraction of the resized image", Range(above=0, high=1))
    scale: list[float] = option(
        [0.08, 1.0], "area of the random resized crop, as fractions of the image", Range(above=0, high=1), lengths=(2,)
    )
    ratio: list[float] = option([0.75, 1.3333], "aspect ratio of the random resized crop", POSITIVE, lengths=(2,))
    crop_padding: int | None = option(
        None,
        "black pixels around an image, from which a crop of its size is cut in the place of the random resized crop: 4 "
        "is usual on CIFAR",
        Range(0, kind=int),
    )
    hflip: float = option(0.5, "probability of a horizontal flip", SHARE)
    color_jitter: float | None = option(
        0.3, "strength of colour jitter; timm leaves it out where auto_augment is on", Range(0)
    )
    auto_augment: str | None = option(
        "rand-m9-mstd0.5-inc1",
        "timm's policy string, such as RandAugment's; cifar10: AutoAugment's for that",
        also=("aa", "randaugment"),
    )
    re_prob: float = option(0.25, "probability of random erasing", SHARE, also=("reprob", "random_erasing"))
    re_mode: str = option("pixel", "filling of the erased part", ("const", "rand", "pixel"))
    repeats: int = option(3, "repeated augmentation: views of each decoded sample in an epoch of unchanged size", COUNT)

    # Loss
    smoothing: float = option(0.1, "label smoothing", Range(0, below=1), also=("label_smoothing",))
    mixup: float = option(0.8, "alpha of mixup, 0 is off", Range(0))
    cutmix: float = option(1.0, "alpha of cutmix, 0 is off", Range(0))
    mixup_prob: float = option(1.0, "probability that a batch is mixed", SHARE)

    # Optimiser and schedule
    opt: str = option("adamw", "timm's name of the optimiser", also=("optimizer", "optim"))
    lr: float = option(
        1e-3,
        "peak learning rate, at `lr_base_batch` where that is set",
        POSITIVE,
        also=("learning_rate", "peak_lr", "max_lr", "base_lr", "blr"),
    )
    lr_base_batch: int | None = option(
        1024, "global batch for lr; lr scales with the actual one; none: it does not", COUNT
    )
    layer_decay: float | None = option(
        None,
        "factor of the learning rate from a block to the one before, such as 0.75 in fine-tuning",
        Range(above=0, high=1),
    )
    weight_decay: float = option(
        0.1, "weight decay; the model's no_weight_decay(), biases and norms are spared", Range(0), also=("wd",)
    )
    clip_grad: float | None = option(
        None,
        "largest norm of the gradient; none: no clipping",
        POSITIVE,
        also=("max_grad_norm", "grad_clip", "gradient_clipping"),
    )
    batch_size: int = option(
        1024,
        "samples per process and pass; the global batch is this x processes x grad_accum",
        COUNT,
        also=("per_device_train_batch_size", "bs", "batch"),
    )
    grad_accum: int = option(
        1, "forward passes per update", COUNT, also=("gradient_accumulation_steps", "accum_iter", "grad_accum_steps")
    )
    epochs: int = option(
        300,
        "passes over as many samples as the training split holds",
        COUNT,
        also=("num_epochs", "num_train_epochs", "max_epochs"),
    )
    warmup_epochs: float = option(5, "epochs of linear warm-up, part of `epochs`", Range(0), also=("warmup",))
    warmup_lr: float = option(1e-6, "learning rate at the start of the warm-up", Range(0))
    min_lr: float = option(1e-5, "learning rate at the end of the cosine", Range(0))
    ema_decay: float = option(
        0.99996,
        "decay of the averaged weights per update; 0: no averaging",
        Range(0, below=1),
        also=("model_ema_decay", "ema"),
    )
    ema_warmup: bool | None = option(
        None, "let the decay grow from 0 over the first updates; default: where the run is too short for it otherwise"
    )

    # Run
    run_dir: str | None = option(
        None, "folder of the run; default: runs/NAME-TIME", also=("output_dir", "output", "out", "save_dir", "log_dir")
    )
    resume: str | None = option(
        None,
        "go on with this run (its folder, or one of its checkpoints) under its own "
        "config; without a value: with the run in --run-dir, if there is one yet",
    )
    seed: int = option(0, "seed of weights, sample order and augmentation", Range(0, 2**32 - 1, kind=int))
    device: str = option("auto", "auto is cuda where there is one", ("auto", "cuda", "cpu"))
    precision: str = option(
        "auto",
        "auto is bf16 autocast on a GPU (fp16 on one without bf16), and fp32 on a CPU",
        ("auto", "bf16", "fp16", "fp32"),
        also=("amp", "mixed_precision", "dtype"),
    )
    compile: bool = option(False, "torch.compile the model")
    cuda_graphs: bool = option(
        False,
        "on a GPU, launch the model's passes as CUDA graphs: faster where the CPU cannot keep up, to the same bits; "
        "not with fsdp",
    )
    deterministic: bool = option(
        False, "only algorithms of torch that give the same bits again; an error where it has none"
    )
    compress_gradients: bool = option(False, "average the processes' gradients in bfloat16, at half the traffic")
    fsdp: bool = option(
        False,
        "share out weights, gradients and the optimiser's state over the processes (FSDP2), for "
        "models too large for one GPU",
    )
    track: str | None = option(
        None,
        "send the curves to this tracker of accelerate as well; its package has to be installed",
        TRACKERS,
        also=("report_to", "log_with", "wandb", "tracker"),
    )
    log_interval: int = option(50, "updates between two entries of the training curves", COUNT)
    eval_interval: int = option(1, "epochs between two evaluations; the last epoch is always evaluated", COUNT)
    checkpoint_interval: int = option(
        1000,
        "updates between two checkpoints within an epoch; its end always has one",
        COUNT,
        also=("save_interval", "save_steps"),
    )
    keep_checkpoints: int = option(2, "checkpoints to keep, beside the best", COUNT, also=("checkpoint_hist",))
    max_bad_steps: int = option(10, "stop after so many updates in a row whose loss or gradients are not finite", COUNT)

    notes = list[str]()  # what to say at the start of the run

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("scale", "ratio"):
            low, high = getattr(self, key)
            if low > high:
                raise UserError(f"{key} is {low} {high}: give the smaller number first")
        check_names(self.model_kwargs, {"drop_path_rate": "--drop-path", "pretrained": "--init FILE"})
        if self.fsdp and self.opt not in SHARDED:
            raise UserError(f"opt is {self.opt!r}: with fsdp give one of {', '.join(SHARDED)}")
        if self.batch_size % 2 and (self.mixup or self.cutmix):
            raise UserError(f"batch_size is {self.batch_size}: mixup and cutmix pair samples, give an even one")

    def is_over(self, history: list[dict[str, Any]]) -> bool:
        """Whether a run with these results of epochs has nothing left to do."""
        return len(history) >= self.epochs

    def faults(self) -> list[str]:
        """What a new run is refused for, and one that goes on was begun with: a list of lines."""
        faults = []
        if self.auto_augment and not re.fullmatch(POLICIES, self.auto_augment):
            faults.append(
                f"auto_augment is {self.auto_augment!r}: give none, cifar10, a policy of timm (original, originalr, "
                "v0, v0r, 3a), or its rand or augmix with settings such as rand-m9-n2-mstd0.5-inc1 and augmix-m3-w3"
            )
        if self.warmup_epochs >= self.epochs:
            faults.append(
                f"warmup_epochs is {self.warmup_epochs:g} in a run of {self.epochs} epochs, which would not "
                f"leave its warm-up: give less, such as {self.epochs / 20:g}"
            )
        if self.min_lr > self.lr:
            faults.append(f"min_lr is {self.min_lr} and lr {self.lr}: the cosine ends at min_lr, give one below lr")
        return faults


def that_count(values: dict[str, Any]) -> dict[str, Any]:
    """Those of a config's values that what comes out of a run depends on."""
    kwargs = {key: value for key, value in values["model_kwargs"].items() if key not in SAME_BITS}
    return {**{key: value for key, value in values.items() if key not in SAME_BITS}, "model_kwargs": kwargs}


def load_config(argv: Sequence[str] | None = None) -> tuple[Config, str]:
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
        merged = {**coerce("model_kwargs", values.get("model_kwargs", {}), dict), **parse_pairs(given["model_kwargs"])}
        given["model_kwargs"] = {key: value for key, value in merged.items() if value is not None}
    values = {**values, **given}
    notes = [] if "warmup_epochs" in given or "resume" in given else shorten_warmup(values)
    config = Config(**values)
    unused = [f"--{key}" for key in ("scale", "ratio") if key in given]
    if unused and config.crop_padding is not None:
        notes.append(
            f"with crop_padding {' and '.join(unused)} change{'s' * (len(unused) == 1)} nothing: crops have one size"
        )
    faults = config.faults()
    if faults and "resume" not in given:
        raise UserError(faults[0])
    config.notes = notes + faults
    return config, Path(path).stem if path else config.model


def shorten_warmup(values: dict[str, Any]) -> list[str]:
    """Makes a warm-up that `values` leave to a file or the default fit into their epochs; what to say of that."""
    fields = Config.__dataclass_fields__
    epochs, warmup = (
        coerce(key, values.get(key, fields[key].default), fields[key].type) for key in ("epochs", "warmup_epochs")
    )
    if not warmup >= epochs > 0:
        return []
    values["warmup_epochs"] = epochs / 20
    return [
        f"a warm-up of {warmup:g} epochs would fill this run of {epochs}, so it takes {epochs / 20:g} epochs; "
        "--warmup-epochs gives another"
    ]


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Values of a YAML config, given by path or by its bare name in configs/.

    Raises:
        UserError: Where the file is missing, is no YAML mapping, or has a key that `Config` lacks.
    """
    file = next((f for f in (Path(path), CONFIGS / f"{path}.yaml") if f.is_file()), None)
    if file is None:
        raise UserError(f"no config at {path}: give a YAML file or one of {', '.join(config_names())}")
    values = read_yaml(file)
    for key in values:
        if key not in Config.__dataclass_fields__:
            names = {
                word: field.name
                for field in dataclasses.fields(Config)
                for word in (*field.metadata["also"], field.name)
            }
            near = nearest(str(key), names)
            hint = f"the nearest known one is {names[near[0]]!r}, " if near else ""
            raise UserError(f"{file}: unknown key {key!r}; {hint}`vision-longhorn train --help` lists all")
    return values


def config_names() -> list[str]:
    """Bare names of the configs in configs/, sorted."""
    return sorted(file.stem for file in CONFIGS.glob("*.yaml"))


# The first field of each group of options in --help
GROUPS = {
    "model": "model",
    "data": "data",
    "mean": "image transforms, timm's",
    "smoothing": "loss",
    "opt": "optimiser and schedule",
    "run_dir": "run",
}


def _parser() -> Parser:
    parser = Parser(
        description="Trains a model on image shards or a folder of images. Each value below may stand in the config "
        "file, too; in brackets its default.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--config",
        help=f"YAML file, or the bare name of one of {', '.join(config_names())}",
    )
    for field in dataclasses.fields(Config):
        if field.name in GROUPS:
            group = parser.add_argument_group(GROUPS[field.name])
        kind, option = without_none(field.type), f"--{field.name.replace('_', '-')}"
        many: dict[str, Any] = {"nargs": "+"} if kind is dict or typing.get_origin(kind) is list else {}
        if kind is dict:
            many["action"] = "extend"  # given twice, both count
        flag: dict[str, Any] = {"nargs": "?", "const": True} if kind is bool or field.name == "resume" else {}
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = " ".join(map(str, default)) if isinstance(default, list) else default
        words = field.metadata["allowed"]
        choice = f": {', '.join(words)}" if isinstance(words, tuple) else ""
        group.add_argument(
            option,
            metavar="VALUE",
            **many,
            **flag,
            help=f"{field.metadata['doc']}{choice} [{'none' if default in (None, {}) else default}]".replace("%", "%%"),
        )
        parser.synonyms.update({word.replace("_", "-"): option for word in field.metadata["also"]})
    return parser
