"""Evaluates a checkpoint, or any timm model, on image shards: top-1, top-5, loss and count, printed and saved as JSON.

The command of eval.py. Samples of data with other classes than the model's are never counted as if they had the same:
classes are compared by number and name, and `--map-classes` pairs them by name.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision_longhorn.command_line.parser import Parser
from vision_longhorn.demo import DIGITS
from vision_longhorn.errors import UserError, spelled
from vision_longhorn.files import check_new_folder, check_output, write_text
from vision_longhorn.model_arguments import check_names
from vision_longhorn.runs import model_of_checkpoint, run_file, timm_source
from vision_longhorn.settings import Range, parse_pairs

# What takes long to import is imported where it is used: the command line is read before.
if TYPE_CHECKING:
    import torch

    from vision_longhorn.evaluation.report import Predictions

# What makes two results those of the same evaluation. Processes, batch size and speed do not.
SAME = ("model", "model_kwargs", "weights", "checkpoint", "data", "split", "input_size", "precision", "map_classes")


@spelled(num_samples="--samples")
def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Evaluates as the command line `argv` says (default: the process's own) and returns the result, a dict."""
    args = parse(argv)
    import torch
    from timm.data import create_transform

    from vision_longhorn.checkpoint import create_model, load_checkpoint
    from vision_longhorn.class_names import (
        checkpoint_names,
        imagenet_names,
        match_classes,
        model_names,
        readable_names,
    )
    from vision_longhorn.data import eval_loader, open_shards
    from vision_longhorn.data.folders import same_split
    from vision_longhorn.data.transforms import input_settings
    from vision_longhorn.demo import locate_data
    from vision_longhorn.devices import leave, make_accelerator
    from vision_longhorn.evaluation.evaluate import describe, evaluate
    from vision_longhorn.evaluation.report import Predictions

    accelerator = make_accelerator(args.device, args.precision)
    say = accelerator.print

    # What the checkpoint says of itself stands in for what the command line leaves open.
    path = run_file(args.checkpoint) if args.checkpoint else None
    checkpoint = load_checkpoint(path) if path else {}
    values = checkpoint.get("config", {})
    name = args.model or checkpoint.get("arch")
    if name is None:
        raise UserError(f"{path} does not say which model it holds: give --model NAME")
    split = args.split or values.get("val_split", "val")
    own_data, own_samples = values.get("data"), None
    if same_split(split, values.get("val_split", "")):
        own_data, own_samples = values.get("val_data") or own_data, values.get("val_samples")
    elif same_split(split, values.get("train_split", "")):
        own_samples = values.get("train_samples")
    data = args.data or own_data
    if data is None:
        raise UserError("no data: give --data DIR, a folder of shards or of images, or --data digits")
    is_own = own_data is not None and _place(data) == _place(own_data)
    samples = own_samples if is_own and args.samples is None else args.samples
    values = {**values, "model_kwargs": {**values.get("model_kwargs", {}), **args.model_kwargs}}

    # Model and weights
    if path:
        model, weights = model_of_checkpoint(
            checkpoint, path, arch=args.model, num_classes=args.num_classes, ema=args.ema, **values["model_kwargs"]
        )
    else:
        model = create_model(name, pretrained=args.pretrained, num_classes=args.num_classes, **values["model_kwargs"])
        weights = "pretrained" if args.pretrained else "random"
        if args.pretrained and model.pretrained_cfg.get("num_classes") != model.num_classes:
            weights = "pretrained, random classifier"
    if not model.num_classes:
        raise UserError(f"{name} has no classifier: give a model with classes, or --num-classes for a random one")
    model.to(accelerator.device)

    # Data, and whether its classes are the model's
    data = locate_data(data, accelerator)
    names, display_names = checkpoint_names(checkpoint) if checkpoint else model_names(model, name, args.pretrained)
    # An image folder of the run's may lack images of some classes: its labels follow the model's.
    shards = open_shards(
        data,
        split,
        samples,
        allow_pipe=args.allow_pipe,
        class_names=names if is_own and not args.map_classes else None,
    )
    if shards.hint:
        say(f"note: {shards.hint}")
    if shards.left_out:
        say(f"note: left out {shards.left_out}")
    if names is None and "random" not in weights:
        guess = imagenet_names(model.num_classes)
        if guess and not set(guess).isdisjoint(shards.class_names or ()):
            names = guess
            say(f"note: the model's class names are unknown, its {model.num_classes} are taken for ImageNet's")
    class_map = None
    # A run may have been given more classes than its data has.
    if args.map_classes or not is_own or names and shards.class_names:
        class_map, note = match_classes(
            names,
            model.num_classes,
            shards.class_names,
            shards.num_classes,
            by_name=args.map_classes,
            model=f"the model ({name})",
            data=data,
            remedy=f"give --num-classes {shards.num_classes}"
            if "random" in weights
            else "give data of the model's "
            "classes; --map-classes could pair them by name, which `python -m vision_longhorn.shards index DIR "
            "--classes FILE` gives to data",
        )
        if note and "random" not in weights:
            say(f"note: {note}")
    if "random" in weights:
        say(f"note: {'a random classifier' if args.pretrained else 'random weights'}: the accuracy is chance")
    used = model.num_classes if class_map is None else len(class_map.classes)
    settings = input_settings(model, values)
    batches = Clock(
        eval_loader(
            shards,
            create_transform(**settings),
            keys=args.predictions is not None,
            batch_size=args.batch_size,
            num_workers=args.workers,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            num_classes=model.num_classes if class_map is None else len(shards.class_names or ()),
            pin_memory=accelerator.device.type == "cuda",
        ),
        accelerator.device,
        shards.num_samples // accelerator.num_processes if accelerator.is_main_process else None,
    )

    about = dict(
        model=name,
        model_kwargs=values["model_kwargs"],
        weights=weights,
        checkpoint=path and os.path.abspath(path),
        data=_place(data),
        split=split,
        input_size=list(settings["input_size"]),
        precision={"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
        map_classes=class_map is not None,
    )
    if args.out and not _is_free(args.out, about):
        raise UserError(f"--out {args.out} holds the result of another evaluation: name another file")

    # Result
    predictions = Predictions(used, class_map) if args.report or args.predictions else None
    result = evaluate(
        {"model": model},
        batches,
        accelerator,
        shards.num_samples,
        args.batch_size,
        class_map,
        predictions.add if predictions else None,
    )["model"]
    images, seconds = batches.read()
    rates = accelerator.gather(torch.tensor([[images, seconds]], dtype=torch.float64, device=accelerator.device))
    images, seconds = rates[:, 0].sum().item(), rates[:, 1].max().item()
    result.update(
        **about,
        epoch=checkpoint.get("epoch"),
        classes=used,
        model_classes=model.num_classes,
        data_classes=shards.num_classes,
        samples=shards.num_samples,
        processes=accelerator.num_processes,
        batch_size=args.batch_size,
        images_per_s=images / seconds if images else None,
    )
    if predictions:
        predictions.gather()
    say(f"{name}, {weights} weights, {split} split of {data}")
    if class_map is not None:
        say(
            f"{used} classes, those of one name of the model's {model.num_classes} and the data's "
            f"{len(shards.class_names or ())}"
        )
    say(f"{describe(result)} of {shards.num_samples}")
    say(
        f"{images / seconds:.1f} images/s without the first batch"
        if images
        else "images/s not measured: all was one batch"
    )
    if accelerator.is_main_process:
        own_names = getattr(shards, "display_names", None), display_names if class_map is None else None
        words = readable_names(shards.class_names or names, next(filter(None, own_names), None), model.num_classes)
        _save(
            args,
            result,
            predictions,
            shards.class_names or names,
            words,
            _default_name(result, path, data, is_own, checkpoint),
        )
    leave(accelerator)
    return result


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line; in brackets what an option stands at where it is not given."""
    count = Range(1, kind=int)
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="a run's folder (then best.pt) or file, or a state dict with --model, or a folder in the hub's layout",
    )
    parser.add_argument("--checkpoint", metavar="RUN", help="the same")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--ema", action="store_true", default=None, help="averaged weights [where there are]")
    weights.add_argument("--raw", dest="ema", action="store_false", default=None, help="weights as trained")
    parser.add_argument("--model", help="timm name [the checkpoint's]")
    parser.add_argument("--model-kwargs", nargs="+", default=[], metavar="KEY=VALUE", help="[the checkpoint's]")
    parser.add_argument("--pretrained", action="store_true", help="timm's pretrained weights of --model")
    parser.add_argument("--data", help="folder of shards or of images, pattern or URL, or 'digits' [the checkpoint's]")
    parser.add_argument("--split", help="[the checkpoint's, or val]")
    parser.add_argument("--samples", type=count, help="size of the split, for shards without an index")
    parser.add_argument(
        "--allow-pipe",
        action="store_true",
        help="run the command of --data pipe:COMMAND, or of the checkpoint's data, which prints shards",
    )
    parser.add_argument("--num-classes", type=count, help="[the checkpoint's, or the model's own]")
    parser.add_argument(
        "--map-classes",
        action="store_true",
        help="data with other classes: evaluate those that model and data both have, paired by name",
    )
    parser.add_argument("--batch-size", type=count, default=256, help="per process [256]")
    parser.add_argument(
        "--workers",
        type=Range(0, kind=int),
        default=min(4, os.cpu_count() or 1),
        help="loader processes per process [4, or one per core]",
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="[cuda if there is one]")
    parser.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="[bf16 on a GPU, fp16 on one without bf16, fp32 on a CPU]",
    )
    parser.add_argument(
        "--out", help="JSON file [eval-SPLIT.json beside the checkpoint; its name tells what else is not the run's own]"
    )
    parser.add_argument(
        "--report", metavar="FOLDER", help="accuracy by class and confusion matrix, as CSV and PNG, into a new folder"
    )
    parser.add_argument("--predictions", metavar="FILE", help="every sample's prediction, as a new CSV file")
    args = parser.parse_args(argv)
    if args.run and args.checkpoint:
        raise UserError(f"{args.run} and --checkpoint {args.checkpoint} both say what to evaluate: give one of them")
    args.checkpoint = args.run or args.checkpoint
    if args.checkpoint and not args.model and (source := timm_source(args.checkpoint)):
        args.model, args.pretrained, args.checkpoint = source, True, None
    args.model_kwargs = parse_pairs(args.model_kwargs)
    check_names(args.model_kwargs, {"pretrained": "--pretrained"})
    if not (args.checkpoint or args.model) or args.checkpoint and args.pretrained:
        raise UserError("say what to evaluate: a run's folder or a checkpoint, or --model NAME --pretrained")
    # Before the work, not after it.
    others = [path for path in (args.predictions, args.report) if path]
    if args.out is not None:
        check_output("--out", args.out, (".json",), lambda path: _read_result(path) is not None, others)
    if args.predictions is not None:
        check_output("--predictions", args.predictions, (".csv",), others=[args.report] if args.report else [])
    if args.report is not None:
        check_new_folder("--report", args.report)
    return args


class Clock:
    """Batches of a loader, with the time that passes from the end of the first one's evaluation to the end of all. It
    shows a bar of `total` images, None: it does not."""

    def __init__(self, loader: Iterable[Any], device: torch.device, total: int | None = None) -> None:
        self.loader = loader
        self.device = device
        self.total = total
        self.start: float | None = None
        self.images = 0

    def __iter__(self) -> Iterator[Any]:
        from tqdm import tqdm

        hidden = True if self.total is None else None  # None: where there is no terminal
        with tqdm(total=self.total, unit="img", dynamic_ncols=True, disable=hidden) as bar:
            for batch in self.loader:
                if self.start is not None:
                    self.images += len(batch[1])
                yield batch
                bar.update(len(batch[1]))
                if self.start is None:
                    self.start = self._now()

    def read(self) -> tuple[int, float]:
        """(images after the first batch, seconds that they took)"""
        return self.images, 0.0 if self.start is None or not self.images else self._now() - self.start

    def _now(self) -> float:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _place(spec: str) -> str:
    """A path as it is from anywhere; URLs and commands as they are."""
    if spec == DIGITS:
        spec = os.path.join("data", DIGITS)
    return spec if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:", spec) and not os.path.exists(spec) else os.path.abspath(spec)


def _default_name(
    result: dict[str, Any], path: Path | None, data: str, is_own: bool, checkpoint: dict[str, Any]
) -> Path:
    """The file for a result. It tells what was evaluated, but for what a run's own evaluation has as well."""
    words = ["eval"]
    if not path:
        words.append(result["model"])
    elif path.stem != "best":
        words.append(path.stem)
    if not is_own:
        words.append(Path(_place(data)).name)
    words.append(result["split"])
    if result["weights"] == "raw" and "state_dict_ema" in checkpoint or "random" in result["weights"]:
        words.append(result["weights"].split()[-1])
    if result["map_classes"]:
        words.append("mapped")
    name = "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", word).strip("_.")[-60:] for word in words)
    return (path.parent if path else Path()) / f"{name}.json"


def _save(
    args: argparse.Namespace,
    result: dict[str, Any],
    predictions: Predictions | None,
    class_names: Sequence[str] | None,
    names: Sequence[str],
    default: Path,
) -> None:
    """Saves what was asked for. A result's own file is taken, or else a free one's name: no other is written over."""
    out = Path(args.out or default)
    if not args.out:
        for number in itertools.count(2):
            if _is_free(out, result):
                break
            out = default.with_stem(f"{default.stem}-{number}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, json.dumps(result, indent=2) + "\n")
        other = "" if args.out or out == default else f"; {default.name} is another evaluation's"
        print(f"saved as {out}{other}")
        if predictions and args.predictions:
            out = Path(args.predictions)
            predictions.write_predictions(out, class_names, names)
            print(f"predictions in {out}")
        if predictions and args.report:
            out = Path(args.report)
            predictions.write_report(out, class_names, names)
            print(f"accuracy by class and confusion matrix in {out}")
    except OSError as error:
        raise UserError(
            f"{out} cannot be written ({error.strerror or error}): the result is what was printed; name a "
            "place that can by --out, --predictions or --report"
        ) from error


def _is_free(path: str | Path, result: dict[str, Any]) -> bool:
    """Whether nothing is at `path`, or what the same evaluation has left there."""
    if not os.path.lexists(path):
        return True
    before = _read_result(path)
    return before is not None and all(before.get(key) == result[key] for key in SAME)


def _read_result(path: str | Path) -> dict[str, Any] | None:
    """The result that a file holds, a dict; None where it holds anything else."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        return result if {"top1", "top5", "count", "split"} <= result.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


if __name__ == "__main__":
    from vision_longhorn.command_line.commands import run

    run("eval")
