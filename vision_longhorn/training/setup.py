"""Makes the parts of a run from its `Config`: processes, data, model, loaders, loss, optimiser, schedule."""

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    broadcast,
    set_seed,
)
from timm.data import Mixup, create_transform
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2, get_optimizer_info
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vision_longhorn.checkpoint import stated_model
from vision_longhorn.class_names import difference
from vision_longhorn.data import (
    ShardSet,
    default_workers,
    eval_loader,
    keep_in_memory,
    open_shards,
    split_transform,
    train_loader,
)
from vision_longhorn.data.sharding import locate_data
from vision_longhorn.data.transforms import train_transform
from vision_longhorn.devices import make_accelerator
from vision_longhorn.errors import UserError, bad_input, one_line, spelled
from vision_longhorn.kernels import HAS_TRITON
from vision_longhorn.models.create import create_model
from vision_longhorn.models.names import RENAMED
from vision_longhorn.settings import DIGITS
from vision_longhorn.training.config import Config
from vision_longhorn.training.fsdp import is_sharded
from vision_longhorn.training.graphs import capture, unchanged_buffers
from vision_longhorn.training.init import model_from_weights
from vision_longhorn.training.muon import Muon

# torch's optimisers that can skip an update on the device, with whole tensors and with shards
FUSED, FUSED_SHARDED = ("adam", "adamw", "momentum", "nesterov", "sgd"), ("adam", "adamw")
# Optimisers that work with fsdp. Others mix shards with whole tensors, or take a shard for the whole.
SHARDED = tuple("adam adamw adopt lamb lion momentum muon nadamw nesterov radam rmsprop sgd".split())
HOW = ("save_states", "residual_in_fp32")  # arguments that say how a model computes, not what
SCALE = 2.0**10  # first scale of the loss in fp16; with torch's 2**16 the first updates would be skipped


def start_processes(cfg: Config, run_dir: Path) -> Accelerator:
    """Joins the processes of the run, on its device and in its precision."""
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use
    torch.use_deterministic_algorithms(cfg.deterministic)
    if cfg.track and cfg.track not in map(str, get_available_trackers()):  # accelerate would leave it out silently
        raise UserError(f"track is {cfg.track!r}, and its package is not installed: install it, or leave track out")
    ddp = DistributedDataParallelKwargs(
        gradient_as_bucket_view=True,
        comm_hook=DDPCommunicationHookType.BF16 if cfg.compress_gradients else DDPCommunicationHookType.NO,
        static_graph=cfg.grad_accum == 1,  # torch does not support it with accumulation
    )
    accelerator = make_accelerator(
        cfg.device,
        cfg.precision,
        cfg.grad_accum,
        kwargs_handlers=[GradScalerKwargs(init_scale=SCALE), ddp],
        log_with=cfg.track,
        project_dir=str(run_dir),
    )
    compiler = shlex.split(os.environ.get("CXX") or "g++")[0]  # what torch starts on a CPU; CXX may be "ccache g++"
    on_cpu = accelerator.device.type == "cpu" and os.name == "posix"
    if cfg.compile and on_cpu and not shutil.which(compiler):
        raise UserError(
            f"compile: on a CPU torch needs a C++ compiler, and {compiler} is not there: install it, or add "
            "--compile false"
        )
    return accelerator


def open_data(cfg: Config, accelerator: Accelerator) -> tuple[ShardSet, ShardSet, int, dict[str, list[str] | None]]:
    """Finds the splits to train and to evaluate on, the number of classes, and the "class_names" and "display_names",
    each None if unknown. The last classes have no names if `num_classes` is larger than the data's."""
    if cfg.data is None:
        raise UserError("no data: give --data DIR, a folder of shards, or of images as train/CLASS/IMAGE and val/...")
    if cfg.data == DIGITS:
        accelerator.print(
            "The data are scikit-learn's handwritten digits, which are built in: --data DIR names others."
        )
    place = locate_data(cfg.data, accelerator)
    if cfg.resume and re.fullmatch("[^{}*?:]+", place) and not os.path.exists(place):
        raise UserError(
            f"the data of the run, {place!r}, are not there: start in the folder that it was started in, or give --data"
        )
    options = cfg.num_classes, cfg.allow_pipe
    with spelled(num_samples="train_samples"):
        train = open_shards(place, cfg.train_split, cfg.train_samples, *options)
    if not cfg.val_data and not os.path.isdir(place):
        raise UserError(f"data is {place!r}, which names training shards only: give --val-data, or a folder of both")
    with spelled(num_samples="val_samples", val_data="--val-data"):
        val = open_shards(cfg.val_data or place, cfg.val_split, cfg.val_samples, *options, train=train)
    check_classes(train.class_names, val.class_names, "the training data", "the evaluation data")
    num_classes = cfg.num_classes or train.num_classes
    if num_classes is None:
        raise UserError(f"the shards in {place} do not say how many classes they have: give --num-classes")
    found = {"class_names": train.class_names, "display_names": train.display_names}
    names = {key: list(words) if words and len(words) <= num_classes else None for key, words in found.items()}
    return train, val, num_classes, names


def check_classes(names: list[str] | None, others: list[str] | None, here: str, there: str) -> None:
    """Raises UserError where the places `here` and `there` both name their classes, and differ."""
    if names and others and (wrong := difference(names, others, here, there)):
        raise UserError(f"{wrong}: give data with the same classes")


def build_model(
    cfg: Config,
    num_classes: int,
    accelerator: Accelerator,
    checkpoint: dict[str, Any] | None,
    class_names: list[str] | None = None,
) -> tuple[Any, ModelEmaV3 | None]:
    """Makes the model on its device, and its averaged weights (EMA) if the run has them, which start as a copy.

    The model is that of the `checkpoint` to go on from, if there is one, with what `cfg` has changed since. The
    `class_names` of the data, if they are known, decide whether the classifier of `cfg.init` stays.
    """
    set_seed(cfg.seed)
    kwargs = {**cfg.model_kwargs, "num_classes": num_classes, "drop_path_rate": cfg.drop_path or None}
    try:
        if checkpoint:
            name, stated = stated_model(checkpoint, cfg.model)
            before = {key for key, value in checkpoint["config"]["model_kwargs"].items() if value is not None}
            stated = {key: value for key, value in stated.items() if key not in before}
            model = create_model(name or cfg.model, **stated | kwargs)
        elif cfg.init:
            model, loaded = model_from_weights(cfg.model, cfg.init, class_names=class_names, **kwargs)
            accelerator.print(f"init    {loaded}")
        elif ":" in cfg.model:  # a name of weights, which would not be loaded here
            raise UserError(f"model is {cfg.model}: give it as --init, and the name of its architecture as --model")
        else:
            model = create_model(cfg.model, **kwargs)
    except UserError as error:
        # A config's arguments are for its own model, and --model may name one that lacks them.
        unknown = [key for key in cfg.model_kwargs if f"unexpected keyword argument '{key}'" in str(error)]
        if unknown and unknown[0] in HOW:
            accelerator.print(f"Note: this model has no {unknown[0]}, and trains without it.")
            cfg.model_kwargs = {key: value for key, value in cfg.model_kwargs.items() if key not in unknown}
            return build_model(cfg, num_classes, accelerator, checkpoint, class_names)
        hint = f"; `--model-kwargs {unknown[0]}=none` leaves it out" if unknown and "nearest" not in str(error) else ""
        raise UserError(f"{error}{hint}") from error
    if cfg.model in RENAMED:  # a file of version 0.1 may have given it another name
        cfg.model = model.pretrained_cfg["architecture"]
    model.to(accelerator.device)
    if not cfg.ema_decay:
        return model, None
    # timm updates fastest by parameters, with the same bits. With fsdp, only a state dict is sure to have the shards.
    by_parameters = not cfg.fsdp and not any(True for _ in model.buffers())
    return model, ModelEmaV3(model, decay=cfg.ema_decay, exclude_buffers=by_parameters)


def build_loaders(
    cfg: Config, splits: list[ShardSet], settings: dict[str, Any], accelerator: Accelerator
) -> tuple[Any, Any, Any]:
    """Makes the loaders of both splits, and on a GPU the part of the augmentation that happens there, else None."""
    if cfg.workers is None:
        cfg.workers = default_workers()
    on_gpu = accelerator.device.type == "cuda"
    transform, finish = train_transform(settings, cfg.values()), None
    if on_gpu:
        try:
            transform, finish = split_transform(transform, crop_on_device=HAS_TRITON and cfg.repeats > 1)
        except UserError as error:
            accelerator.print(f"Note: {error}.")
    if cfg.keep_in_memory:
        splits = [keep_in_memory(split, cfg.workers) for split in splits]
        kept = sum(split.kept_bytes for split in splits) / 1e6
        accelerator.print(f"images  kept in the memory of each process: {kept:,.1f} MB")
    share: dict[str, Any] = dict(
        batch_size=cfg.batch_size,
        num_workers=cfg.workers,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        pin_memory=on_gpu,
    )
    own: dict[str, Any] = dict(seed=cfg.seed, repeats=cfg.repeats, max_bad_samples=cfg.max_bad_samples, keys=True)
    train = train_loader(splits[0], transform, **own, **share)
    if len(train) < cfg.grad_accum:
        raise UserError(
            f"grad_accum is {cfg.grad_accum}, but an epoch has only {len(train)} batches per process: give a smaller "
            "grad_accum or batch_size"
        )
    return train, eval_loader(splits[1], create_transform(**settings), **share), finish


def build_loss(cfg: Config, num_classes: int) -> tuple[Mixup | None, nn.Module]:
    """Makes mixup and CutMix, if the run has them, and the loss for their targets."""
    if not (cfg.mixup or cfg.cutmix):
        return None, LabelSmoothingCrossEntropy(cfg.smoothing)
    mixup = Mixup(cfg.mixup, cfg.cutmix, prob=cfg.mixup_prob, label_smoothing=cfg.smoothing, num_classes=num_classes)
    return mixup, SoftTargetCrossEntropy()


def peak_rate(cfg: Config, global_batch: int, resuming: bool) -> float:
    """Returns the learning rate at the end of the warm-up, for updates of `global_batch` samples."""
    peak = cfg.lr * global_batch / cfg.lr_base_batch if cfg.lr_base_batch else cfg.lr
    if cfg.min_lr > peak and not resuming:
        raise UserError(
            f"min_lr is {cfg.min_lr}, above the peak of {peak:.2e} (lr {cfg.lr} at a batch of {cfg.lr_base_batch}, "
            f"here {global_batch}): give a smaller min_lr, or a larger lr, batch_size or grad_accum"
        )
    return peak


def build_optimizer(cfg: Config, model: nn.Module, peak_lr: float) -> torch.optim.Optimizer:
    """Makes timm's optimiser, fused where the device can then skip an update by itself."""
    if cfg.fsdp and cfg.opt not in SHARDED:
        raise UserError(f"opt is {cfg.opt!r}: with fsdp give one of {', '.join(SHARDED)}")
    options: dict[str, Any] = {"fused": True} if cfg.opt in (FUSED_SHARDED if is_sharded(model) else FUSED) else {}
    if cfg.opt_betas:
        options["betas"] = tuple(cfg.opt_betas)
    with bad_input(f"opt={cfg.opt}"):
        info = get_optimizer_info(cfg.opt.removeprefix("lookahead_"))
        if cfg.opt_betas and not info.has_betas:  # timm would drop them without a word
            raise UserError(f"it has no betas; leave opt_betas={cfg.opt_betas} out, as by `--opt-betas none`")
        if info.second_order:
            raise UserError("it takes second derivatives; give another, such as adamw or lamb")
        if cfg.opt_betas:
            known = len(create_optimizer_v2(model, cfg.opt).param_groups[0].get("betas", (0, 0)))
            if known != len(cfg.opt_betas):
                raise UserError(f"opt_betas is {cfg.opt_betas}, where it has {known}")
        optimizer = create_optimizer_v2(
            model, cfg.opt, lr=peak_lr, weight_decay=cfg.weight_decay, layer_decay=cfg.layer_decay, **options
        )
    return Muon(optimizer, cfg.cuda_graphs) if cfg.opt == "muon" else optimizer


def load_optimizer(cfg: Config, optimizer: torch.optim.Optimizer, checkpoint: dict[str, Any]) -> None:
    """Loads the moments and step counts of a checkpoint; if the model is sharded, only this process's part of them.

    The settings stay those of `cfg`, which may have changed.
    """
    if (before := checkpoint["config"]["opt"].lower()) != cfg.opt:
        raise UserError(
            f"opt is {cfg.opt!r}, but {cfg.resume} has the moments of {before!r}: give --opt {before}, or begin "
            f"a new run with --init {cfg.resume}"
        )
    saved = checkpoint["optimizer"]
    # Some of timm's optimisers keep counts of steps among the settings.
    groups = [
        {**group, **own, "params": group["params"], **{key: group[key] for key in group if key.endswith("step")}}
        for own, group in zip(optimizer.param_groups, saved["param_groups"], strict=False)
    ]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in saved["state"].items():
        one = parameters[number]
        for key, value in values.items() if isinstance(one, DTensor) else ():
            if torch.is_tensor(value) and value.shape == one.shape:
                values[key] = distribute_tensor(value.to(one.device), one.device_mesh, one.placements)
    # Weight decay and layer decay decide on the groups of parameters.
    with bad_input(f"resuming with weight_decay={cfg.weight_decay} and layer_decay={cfg.layer_decay}"):
        optimizer.load_state_dict({**saved, "param_groups": groups})


def build_scheduler(cfg: Config, optimizer: torch.optim.Optimizer, peak_lr: float, updates_per_epoch: int) -> Any:
    """Makes the schedule, by updates: a linear warm-up, then a whole cosine."""
    # timm takes fractions of epochs, although its types say int.
    scheduler, _ = create_scheduler_v2(
        optimizer,
        "cosine",
        num_epochs=max(cfg.epochs - cfg.warmup_epochs, 1 / updates_per_epoch),  # type: ignore[arg-type]
        warmup_epochs=cfg.warmup_epochs,  # type: ignore[arg-type]
        warmup_prefix=True,
        warmup_lr=min(cfg.warmup_lr, peak_lr),
        min_lr=cfg.min_lr,
        step_on_epochs=False,
        updates_per_epoch=updates_per_epoch,
    )
    return scheduler


def choose_ema_warmup(cfg: Config, ema: ModelEmaV3, updates: int, accelerator: Accelerator) -> None:
    """Lets the decay grow from 0 where the first weights would still count in the average after so many `updates`."""
    if cfg.ema_warmup is None:
        cfg.ema_warmup = cfg.ema_decay**updates > 0.05
        if cfg.ema_warmup:
            accelerator.print(
                f"Note: an EMA of decay {cfg.ema_decay} averages over {1 / (1 - cfg.ema_decay):,.0f} updates and this "
                f"run has {updates:,}, so its decay grows from 0 (ema_warmup)."
            )
    ema.use_warmup = cfg.ema_warmup


def check_scores(cfg: Config, model: Any, size: Any, num_classes: int, accelerator: Accelerator) -> None:
    """Raises UserError unless `model` scores `num_classes` classes for an image of a size (3, H, W)."""
    training = model.training
    what = f"model={cfg.model}, model_kwargs={cfg.model_kwargs}"
    try:
        with torch.no_grad(), accelerator.autocast():
            scores = model.eval()(torch.zeros(1, *size, device=accelerator.device))
    except (AssertionError, ValueError) as error:  # of images that it does not take
        raise UserError(f"{what}: {one_line(error)}") from error
    model.train(training)
    if scores.shape != (1, num_classes):
        raise UserError(f"{what}: an image gets scores of {tuple(scores.shape)}, where (1, {num_classes}) are due")


def wrap(cfg: Config, model: Any, optimizer: torch.optim.Optimizer, size: Any, accelerator: Accelerator) -> Any:
    """Wraps the model for training on images of a size (3, H, W): autocast, processes, compiler, CUDA graphs."""
    # Optimiser, scheduler and loaders stay out of prepare(): it would step the scheduler once per process, and feed
    # every process from the first one's stream.
    if cfg.cuda_graphs and cfg.fsdp:
        accelerator.print("Note: fsdp runs without cuda_graphs.")
    graphs = cfg.cuda_graphs and not cfg.fsdp and accelerator.device.type == "cuda"
    if graphs:
        images = torch.zeros(cfg.batch_size, *size, device=accelerator.device)
        capture(accelerator, model, images, cfg.grad_accum, compiled=cfg.compile)
    elif cfg.compile and is_sharded(model):  # block by block, since torch gathers weights between them
        config = torch._dynamo.config  # each rate of drop path needs a program of its own, and torch gives up after 8
        config.recompile_limit = max(config.recompile_limit, 4 * len(model.blocks))
        for block in model.blocks:
            block.forward = torch.compile(block.forward)
    elif cfg.compile:
        model.compile()
    # A graph gives all gradients at once, and `TrainStep` averages them in one exchange. DistributedDataParallel would
    # copy each by itself. In two graphs one half's gradients could travel while the other's are computed: with the
    # small model on two H200s, that took as long. What is sharded averages by itself. Both need autocast only.
    at_once = graphs and not any(True for _ in model.buffers())
    if at_once:
        broadcast([parameter.data for parameter in model.parameters()])
    if is_sharded(model) or at_once:
        return accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    net = accelerator.prepare(model)
    if accelerator.num_processes > 1:
        # DistributedDataParallel orders its buckets by the gradients of its first pass (with a static graph, of its
        # second), and the order decides how a gradient is summed over the processes. Without these passes, the first
        # updates of a resumed run would differ in the last bit.
        images = torch.zeros(cfg.batch_size, *size, device=accelerator.device)
        with unchanged_buffers(net):
            for _ in range(2):
                accelerator.backward(net(images).sum())
                optimizer.zero_grad()
    return net
