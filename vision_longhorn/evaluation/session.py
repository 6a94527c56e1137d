"""One evaluation from a command line to its results: model, data, whether their classes agree, and what is saved."""

import argparse
import dataclasses
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from timm.data import create_transform
from tqdm import tqdm

from vision_longhorn.class_names import imagenet_names, match_classes, readable_names
from vision_longhorn.data import eval_loader, open_shards
from vision_longhorn.data.folders import same_split
from vision_longhorn.data.sharding import locate_data
from vision_longhorn.devices import leave, make_accelerator
from vision_longhorn.errors import UserError
from vision_longhorn.evaluation.evaluate import describe, evaluate
from vision_longhorn.evaluation.report import Predictions
from vision_longhorn.files import read_json, write_text
from vision_longhorn.loading import load_model
from vision_longhorn.settings import DIGITS


class Session:
    """An evaluation by the command line `args` from `vision_longhorn.eval.parse`. Each of its processes has one.

    Raises:
        UserError: There is no such model or data, or their classes differ.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.accelerator = args, make_accelerator(args.device, args.precision)
        self.say = self.accelerator.print
        self.loaded = load_model(args.run, args.model, num_classes=args.num_classes, ema=args.ema, **args.model_kwargs)
        self.loaded.check_classes()
        self.model, self.name = self.loaded.model.to(self.accelerator.device), self.loaded.name
        self.find_data()
        self.open_data()

    def find_data(self) -> None:
        """Chooses data, split and size: where the command line leaves them open, those of the run."""
        args, config = self.args, self.loaded.checkpoint.get("config", {})
        self.split = args.split or config.get("val_split", "val")
        own, samples = config.get("data"), None
        if same_split(self.split, config.get("val_split", "")):
            own, samples = config.get("val_data") or own, config.get("val_samples")
        elif same_split(self.split, config.get("train_split", "")):
            samples = config.get("train_samples")
        data = args.data or own
        if data is None:
            raise UserError("no data: give --data DIR, a folder of shards or of images, or --data digits")
        self.is_own = own is not None and _absolute(data) == _absolute(own)
        self.samples = samples if self.is_own and args.samples is None else args.samples
        self.data = locate_data(data, self.accelerator)

    def open_data(self) -> None:
        """Opens the data, and pairs its classes with the model's: `class_map`, None where they are the same."""
        args, self.names, self.class_map = self.args, self.loaded.class_names, None
        # A folder of images may lack some of its run's classes, so its labels follow the model's names.
        follow = self.names if self.is_own and not args.map_classes else None
        self.shards = open_shards(self.data, self.split, self.samples, allow_pipe=args.allow_pipe, class_names=follow)
        if self.shards.left_out:
            self.say(f"note: left out {self.shards.left_out}")
        guess = imagenet_names(self.model.num_classes) if self.names is None else None
        if guess and not set(guess).isdisjoint(self.shards.class_names or ()):
            self.names = guess
            self.say(f"note: the model's class names are unknown, its {len(guess)} classes are taken for ImageNet's")
        if self.is_own and not args.map_classes and not (self.names and self.shards.class_names):
            return  # a run may have been given more classes than its data have
        self.class_map, note = match_classes(
            self.names,
            self.model.num_classes,
            self.shards.class_names,
            self.shards.num_classes,
            by_name=args.map_classes,
            model=f"the model ({self.name})",
            data=self.data,
        )
        if note:
            self.say(f"note: {note}")

    def run(self) -> dict[str, Any]:
        """Evaluates, prints and saves the result, and returns it."""
        args, accelerator, shards, of_model = self.args, self.accelerator, self.shards, self.model.num_classes
        about = self.about()
        if args.out and not _is_free(args.out, about):
            raise UserError(f"--out {args.out} holds the result of another evaluation: name another file")
        used = of_model if self.class_map is None else len(self.class_map.classes)
        predictions = Predictions(used, self.class_map) if args.report or args.predictions else None
        classes = of_model if self.class_map is None else shards.num_classes
        loader = eval_loader(
            dataclasses.replace(shards, num_classes=classes),
            create_transform(**self.loaded.settings),
            keys=args.predictions is not None,
            batch_size=args.batch_size,
            num_workers=args.workers,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            pin_memory=accelerator.device.type == "cuda",
        )
        batches = -(-shards.num_samples // (args.batch_size * accelerator.num_processes))
        hidden = None if accelerator.is_main_process else True  # None: no bar where there is no terminal
        bar = tqdm(loader, total=batches, unit="batch", dynamic_ncols=True, disable=hidden)
        models, data, note = {"model": self.model}, self.timed(bar), predictions.add if predictions else None
        found = evaluate(models, data, accelerator, shards.num_samples, args.batch_size, self.class_map, note)
        rate = torch.tensor(self.images / (time.perf_counter() - self.start), device=accelerator.device)
        result = {
            **found["model"],
            **about,
            "epoch": self.loaded.checkpoint.get("epoch"),
            "classes": used,
            "model_classes": of_model,
            "data_classes": shards.num_classes,
            "samples": shards.num_samples,
            "processes": accelerator.num_processes,
            "batch_size": args.batch_size,
            "images_per_s": accelerator.reduce(rate).item() or None,
        }
        if predictions:
            predictions.gather()
        self.say(f"{self.name}, {self.loaded.weights} weights, {self.split} split of {self.data}")
        if self.class_map is not None:
            of_data = len(shards.class_names or ())
            self.say(f"{used} classes, by name those in both the model's {of_model} and the data's {of_data}")
        speed = f", {result['images_per_s']:.1f} images/s" if result["images_per_s"] else ""
        self.say(f"{describe(result)} of {shards.num_samples}{speed}")
        if accelerator.is_main_process:
            self.save(result, about, predictions)
        leave(accelerator)
        return result

    def timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Passes the batches on, and counts `images` from `start`, the end of the first batch. That one has to wait for
        workers to start and kernels to compile."""
        self.images, self.start = 0, 0.0
        for batch in batches:
            yield batch
            self.images += len(batch[1]) if self.start else 0
            self.start = self.start or time.perf_counter()

    def about(self) -> dict[str, Any]:
        """Returns the values that make two results the same evaluation. Processes, batch size and speed may differ."""
        file, precision = self.loaded.file, self.accelerator.mixed_precision
        return {
            "model": self.name,
            "model_kwargs": self.loaded.model_kwargs,
            "weights": self.loaded.weights,
            "checkpoint": file and os.path.abspath(file),
            "data": _absolute(self.data),
            "split": self.split,
            "input_size": list(self.loaded.settings["input_size"]),
            "precision": "fp32" if precision == "no" else precision,
            "map_classes": self.class_map is not None,
        }

    def save(self, result: dict[str, Any], about: dict[str, Any], predictions: Predictions | None) -> None:
        """Saves what was asked for. The result takes a free name, or that of an earlier result of this evaluation."""
        args, class_names, file = self.args, self.shards.class_names or self.names, self.loaded.file
        shown = self.shards.display_names or (self.loaded.display_names if self.class_map is None else None)
        names = readable_names(class_names, shown, self.model.num_classes)
        if class_names:  # a model may have more classes than its data
            class_names = [*class_names, *[""] * (len(names) - len(class_names))]
        what = "" if file and file.stem == "best" else f"{file.stem if file else self.name}-"
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", f"eval-{what}{self.split}")
        out, number = Path(args.out or (file.parent if file else Path()) / f"{stem}.json"), 1
        while not _is_free(out, about):
            number += 1
            out = out.with_name(f"{stem}-{number}.json")
        write_text(out, json.dumps(result, indent=2) + "\n")
        print(f"saved as {out}")
        if predictions and args.predictions:
            predictions.write_predictions(args.predictions, class_names, names)
            print(f"predictions in {args.predictions}")
        if predictions and args.report:
            predictions.write_report(args.report, class_names, names)
            print(f"accuracy by class and confusion matrix in {args.report}")


def _is_free(path: str | Path, about: dict[str, Any]) -> bool:
    """Tells whether nothing is at `path`, or an earlier result of the evaluation that has the values `about`."""
    before = read_json(Path(path))
    return not os.path.lexists(path) or isinstance(before, dict) and about.items() <= before.items()


def _absolute(spec: str) -> str:
    """Returns the absolute path of data; URLs and commands stay as they are."""
    spec = os.path.join("data", DIGITS) if spec == DIGITS else spec
    return spec if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:", spec) and not os.path.exists(spec) else os.path.abspath(spec)
