"""Settings of a training run: one dataclass, whose fields are keys of YAML files and options of the command line."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import vision_longhorn
from vision_longhorn.errors import UserError, nearest
from vision_longhorn.model_arguments import check_names
from vision_longhorn.settings import COUNT, POSITIVE, SHARE, Range, Settings, option, read_yaml

_HERE = Path(vision_longhorn.__file__).resolve().parent  # has the configs in it; in a checkout they are beside it
CONFIGS = next((f for f in (_HERE / "configs", _HERE.parent / "configs") if f.is_dir()), _HERE / "configs")
_NUMBER = r"\d+(\.\d+)?"
# timm's policies, checked here because timm silently ignores words that it does not know.
POLICIES = "|".join((
    "cifar10",
    rf"(original|originalr|v0|v0r|3a)(-mstd{_NUMBER})?",
    rf"rand(-([mn]\d+|mmax\d+|inc[01]|p{_NUMBER}|mstd{_NUMBER}|t[a-z0-9_]+))*",
    rf"augmix(-([mwdb]\d+|a{_NUMBER}|mstd{_NUMBER}))*",
))  # fmt: skip
TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio", "wandb")  # those of accelerate
FRACTION = Range(above=0, high=1)
BELOW_ONE = Range(0, below=1)
NOT_NEGATIVE = Range(0)
WHOLE = Range(0, kind=int)


@dataclasses.dataclass
class Config(Settings):
    """All values of a run. The defaults are Vision Mamba's recipe (arXiv 2401.09417) for a tiny model: batch 1024, here
    on one GPU."""

    # Model
    model: str = option("vlonghorn_tiny", "timm's name of the model, such as vlonghorn_* and vim_*", group="model")
    model_kwargs: dict = option(
        {},
        "arguments of the model, KEY=VALUE ..., added to the config's; KEY=none removes one (for class_token and gate, "
        "none is a value)",
    )
    drop_path: float = option(0.0, "stochastic depth rate", BELOW_ONE)
    init: str | None = option(
        None,
        "weights to start from: a run, a file or a model folder in the hub's layout; position embedding, patches and "
        "classifier are fitted",
    )
    num_classes: int | None = option(None, "number of classes; default: that of the data", COUNT)

    # Data
    data: str | None = option(
        None,
        "shards (folder, brace pattern, glob or URL), a folder of images with train/ and val/, or 'digits', the "
        "built-in demo set",
        role="host",
        group="data",
    )
    val_data: str | None = option(None, "shards or images to evaluate on, if `data` does not hold them", role="host")
    train_split: str = option("train", "split to train on")
    val_split: str = option("val", "split to evaluate on")
    train_samples: int | None = option(None, "number of training samples, for shards without an index", COUNT)
    val_samples: int | None = option(None, "number of evaluation samples, for shards without an index", COUNT)
    allow_pipe: bool = option(
        False, "run the commands of `pipe:COMMAND` in data and val_data; a resumed run needs it again", role="start"
    )
    workers: int | None = option(
        None, "loader processes per training process; default: its share of the cores, 1 to 8", WHOLE, role="host"
    )
    keep_in_memory: bool = option(
        False, "decode all images once and keep them in memory, three bytes per pixel, for small data", role="speed"
    )
    max_bad_samples: float = option(
        0, "unreadable training samples that a process may skip in an epoch; below 1, a share of them", NOT_NEGATIVE
    )

    # Image transforms, timm's
    mean: list[float] | None = option(
        None, "channel means in 0..1; default: the model's", SHARE, lengths=(1, 3), group="image transforms, timm's"
    )
    std: list[float] | None = option(
        None, "channel standard deviations in 0..1; default: the model's", FRACTION, lengths=(1, 3)
    )
    interpolation: str = option(
        "bicubic",
        "resampling; random: by chance bilinear or bicubic in training, bilinear in evaluation",
        ("bilinear", "bicubic", "nearest", "lanczos", "random"),
    )
    crop_pct: float = option(0.875, "evaluation crop, as a fraction of the resized image", FRACTION)
    scale: list[float] = option(
        [0.08, 1.0], "area of the random resized crop, as fractions of the image", FRACTION, lengths=(2,)
    )
    ratio: list[float] = option([0.75, 1.3333], "aspect ratio of the random resized crop", POSITIVE, lengths=(2,))
    crop_padding: int | None = option(
        None, "pad by so many black pixels, then crop to the input size; scale and ratio are then unused", WHOLE
    )
    hflip: float = option(0.5, "probability of a horizontal flip", SHARE)
    color_jitter: float | None = option(0.3, "strength of colour jitter; unused with auto_augment", NOT_NEGATIVE)
    auto_augment: str | None = option(
        "rand-m9-mstd0.5-inc1", "timm's policy, such as RandAugment's; cifar10 is AutoAugment's for CIFAR-10"
    )
    re_prob: float = option(0.25, "probability of random erasing", SHARE)
    re_mode: str = option("pixel", "filling of the erased part", ("const", "rand", "pixel"))
    repeats: int = option(3, "repeated augmentation: views of each image; an epoch gets no longer", COUNT)

    # Loss
    smoothing: float = option(0.1, "label smoothing", BELOW_ONE, group="loss")
    mixup: float = option(0.8, "alpha of mixup, 0 is off", NOT_NEGATIVE)
    cutmix: float = option(1.0, "alpha of cutmix, 0 is off", NOT_NEGATIVE)
    mixup_prob: float = option(1.0, "probability that a batch is mixed", SHARE)

    # Optimiser and schedule
    opt: str = option("adamw", "timm's name of the optimiser", group="optimiser and schedule")
    opt_betas: list[float] | None = option(
        None,
        "decays of the optimiser's averages, such as 0.9 0.95; default: the optimiser's own",
        BELOW_ONE,
        lengths=(2, 3),
    )
    lr: float = option(1e-3, "peak learning rate, for a batch of lr_base_batch", POSITIVE)
    lr_base_batch: int | None = option(1024, "batch for which lr is given; none: lr is used as it is", COUNT)
    layer_decay: float | None = option(
        None, "factor of the learning rate from each block to the one before it; 0.75 is usual in fine-tuning", FRACTION
    )
    weight_decay: float = option(0.1, "weight decay, but not of biases, norms and no_weight_decay()", NOT_NEGATIVE)
    clip_grad: float | None = option(None, "largest norm of the gradient", POSITIVE)
    batch_size: int = option(1024, "samples per process and pass (see grad_accum)", COUNT)
    grad_accum: int = option(1, "forward passes per update", COUNT)
    epochs: int = option(300, "passes over the training data", COUNT)
    warmup_epochs: float = option(5, "epochs of linear warm-up, part of `epochs`", NOT_NEGATIVE)
    warmup_lr: float = option(1e-6, "learning rate at the start of the warm-up", NOT_NEGATIVE)
    min_lr: float = option(1e-5, "learning rate at the end of the cosine", NOT_NEGATIVE)
    ema_decay: float = option(0.99996, "decay of the averaged weights per update; 0: no averaging", BELOW_ONE)
    ema_warmup: bool | None = option(
        None, "let the decay grow from 0 over the first updates; default: only in a run that is too short otherwise"
    )

    # Run
    run_dir: str | None = option(None, "folder of the run; default: runs/NAME-TIME", role="start", group="run")
    resume: str | None = option(
        None,
        "go on with this run (its folder, or one of its checkpoints) under its own config; without a value: with the "
        "run in --run-dir, if there is one",
        role="start",
    )
    seed: int = option(0, "seed of weights, sample order and augmentation", Range(0, 2**32 - 1, kind=int))
    device: str = option("auto", "auto is cuda where there is a GPU", ("auto", "cuda", "cpu"), role="host")
    precision: str = option(
        "auto",
        "auto is bf16 autocast on a GPU (fp16 on one without bf16), and fp32 on a CPU",
        ("auto", "bf16", "fp16", "fp32"),
    )
    compile: bool = option(False, "torch.compile the model")
    cuda_graphs: bool = option(
        False, "launch the model's passes as CUDA graphs: faster where the CPU is too slow for the GPU", role="speed"
    )
    deterministic: bool = option(False, "use only deterministic algorithms of torch; an error where it has none")
    compress_gradients: bool = option(False, "average the processes' gradients in bfloat16, at half the traffic")
    fsdp: bool = option(
        False, "shard weights, gradients and optimiser over the processes (FSDP2), for models too large for one GPU"
    )
    track: str | None = option(
        None,
        "also send the curves to this tracker of accelerate, whose package has to be installed",
        TRACKERS,
        role="host",
    )
    log_interval: int = option(50, "updates between two entries of the training curves", COUNT, role="writing")
    eval_interval: int = option(1, "epochs between two evaluations; the last epoch always has one", COUNT)
    checkpoint_interval: int = option(
        1000, "updates between two checkpoints; an epoch's end has one too", COUNT, role="writing"
    )
    keep_checkpoints: int = option(2, "checkpoints to keep, beside the best", COUNT, role="writing")
    max_bad_steps: int = option(
        10, "stop after so many updates in a row whose loss or gradients are not finite", COUNT, role="writing"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.notes: list[str] = []  # printed at the start of the run
        for key in ("scale", "ratio"):
            low, high = getattr(self, key)
            if low > high:
                raise UserError(f"{key} is {low} {high}: give the smaller number first")
        self.opt = self.opt.lower()  # as timm reads it
        self.model_kwargs = {key: value for key, value in self.model_kwargs.items() if value is not None}
        check_names(self.model_kwargs, {"drop_path_rate": "drop_path", "pretrained": "init"})
        if self.batch_size % 2 and (self.mixup or self.cutmix):
            raise UserError(f"batch_size is {self.batch_size}: mixup and cutmix pair samples, give an even number")

    def is_over(self, history: list[dict[str, Any]]) -> bool:
        """Tells whether a run with these results of its epochs is finished."""
        return len(history) >= self.epochs

    def check_new(self, own_warmup: bool) -> None:
        """Raises UserError for values that a new run must not have. A run that began with them may go on.

        A warm-up that would fill the run is shortened instead, with a note, unless the user has set it.
        """
        if self.auto_augment and not re.fullmatch(POLICIES, self.auto_augment):
            raise UserError(
                f"auto_augment is {self.auto_augment!r}: give none, cifar10, a policy of timm (original, originalr, "
                "v0, v0r, 3a), or its rand or augmix with settings such as rand-m9-n2-mstd0.5-inc1 and augmix-m3-w3"
            )
        if self.warmup_epochs < self.epochs:
            return
        less = self.epochs / 20
        fills = f"a warm-up of {self.warmup_epochs:g} epochs would fill this run of {self.epochs}"
        if own_warmup:
            raise UserError(f"warmup_epochs is {self.warmup_epochs:g}: {fills}, give less, such as {less:g}")
        self.notes.append(f"{fills}, so it takes {less:g} epochs; --warmup-epochs gives another")
        self.warmup_epochs = less


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Reads a YAML config, given by path or by its bare name in configs/.

    Raises:
        UserError: Where the file is missing, is no YAML mapping, or has a key that `Config` lacks.
    """
    file = next((f for f in (Path(path), CONFIGS / f"{path}.yaml") if f.is_file()), None)
    if file is None:
        raise UserError(f"no config at {path}: give a YAML file or one of {', '.join(config_names())}")
    values, names = read_yaml(file), Config.__dataclass_fields__
    for key in (key for key in values if key not in names):
        near = nearest(str(key), names)
        hint = f"the nearest known one is {near[0]!r}, " if near else ""
        raise UserError(f"{file}: unknown key {key!r}; {hint}`vision-longhorn train --help` lists all")
    return values


def config_names() -> list[str]:
    """Lists the bare names of the configs in configs/, sorted."""
    return sorted(file.stem for file in CONFIGS.glob("*.yaml"))
