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

from vision_longhorn.class_names import ClassMap, imagenet_names, match_classes, readable_names
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
    """An evaluation as `vision_longhorn.eval.parse` has read it from a command line, on each of its processes.

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
        self.class_map = self.match_classes()
        self.used = self.model.num_classes if self.class_map is None else len(self.class_map.classes)

    def find_data(self) -> None:
        """Chooses data, split and size: what the command line leaves open is the run's own."""
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
        """Opens the data, and guesses class names of the model that its weights do not tell."""
        args, self.names = self.args, self.loaded.class_names
        # A folder of images may lack some of its run's classes, so its labels follow the model's names.
        follow = self.names if self.is_own and not args.map_classes else None
        self.shards = open_shards(self.data, self.split, self.samples, allow_pipe=args.allow_pipe, class_names=follow)
        if self.shards.left_out:
            self.say(f"note: left out {self.shards.left_out}")
        guess = imagenet_names(self.model.num_classes) if self.names is None else None
        if guess and not set(guess).isdisjoint(self.shards.class_names or ()):
            self.names = guess
            self.say(f"note: the model's class names are unknown, its {len(guess)} are taken for ImageNet's")

    def match_classes(self) -> ClassMap | None:
        """Pairs the classes of model and data; None where they are the same."""
        shards, by_name = self.shards, self.args.map_classes
        if self.is_own and not by_name and not (self.names and shards.class_names):
            return None  # a run may have been given more classes than its data have
        class_map, note = match_classes(
            self.names,
            self.model.num_classes,
            shards.class_names,
            shards.num_classes,
            by_name=by_name,
            model=f"the model ({self.name})",
            data=self.data,
        )
        if note:
            self.say(f"note: {note}")
        return class_map

    def run(self) -> dict[str, Any]:
        """Evaluates, prints and saves the result, and returns it."""
        args, accelerator, shards = self.args, self.accelerator, self.shards
        about = self.about()
        if args.out and not _is_free(args.out, about):
            raise UserError(f"--out {args.out} holds the result of another evaluation: name another file")
        predictions = Predictions(self.used, self.class_map) if args.report or args.predictions else None
        note = predictions.add if predictions else None
        batches, models = self.watched(self.batches()), {"model": self.model}
        found = evaluate(models, batches, accelerator, shards.num_samples, args.batch_size, self.class_map, note)
        result = {
            **found["model"],
            **about,
            "epoch": self.loaded.checkpoint.get("epoch"),
            "classes": self.used,
            "model_classes": self.model.num_classes,
            "data_classes": shards.num_classes,
            "samples": shards.num_samples,
            "processes": accelerator.num_processes,
            "batch_size": args.batch_size,
            "images_per_s": accelerator.reduce(self.rate).item() or None,
        }
        if predictions:
            predictions.gather()
        self.tell(result)
        if accelerator.is_main_process:
            self.save(result, about, predictions)
        leave(accelerator)
        return result

    def about(self) -> dict[str, Any]:
        """The values by which two results are of the same evaluation. Processes, batch size and speed may differ."""
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

    def batches(self) -> Iterable[Any]:
        args, accelerator = self.args, self.accelerator
        classes = self.model.num_classes if self.class_map is None else self.shards.num_classes
        return eval_loader(
            dataclasses.replace(self.shards, num_classes=classes),
            create_transform(**self.loaded.settings),
            keys=args.predictions is not None,
            batch_size=args.batch_size,
            num_workers=args.workers,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            pin_memory=accelerator.device.type == "cuda",
        )

    def watched(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Hands on the batches under a progress bar, and measures `rate`, this process's images/s, () float64; 0 where
        there is one batch. The first one is left out: it waits for the workers to start and kernels to compile."""
        device, images, start = self.accelerator.device, 0, 0.0
        self.rate = torch.zeros((), dtype=torch.float64, device=device)
        total = self.shards.num_samples // self.accelerator.num_processes
        hidden = None if self.accelerator.is_main_process else True  # None: no bar where there is no terminal

        def now() -> float:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter()

        with tqdm(total=total, unit="img", dynamic_ncols=True, disable=hidden) as bar:
            for batch in batches:
                yield batch
                bar.update(len(batch[1]))
                images += len(batch[1]) if start else 0
                start = start or now()
        if images:
            self.rate.fill_(images / (now() - start))

    def tell(self, result: dict[str, Any]) -> None:
        self.say(f"{self.name}, {self.loaded.weights} weights, {self.split} split of {self.data}")
        if self.class_map is not None:
            of_model, of_data = self.model.num_classes, len(self.shards.class_names or ())
            self.say(f"{self.used} classes, those of one name of the model's {of_model} and the data's {of_data}")
        self.say(f"{describe(result)} of {self.shards.num_samples}")
        rate = result["images_per_s"]
        self.say(f"{rate:.1f} images/s without the first batch" if rate else "images/s not measured: all was one batch")

    def save(self, result: dict[str, Any], about: dict[str, Any], predictions: Predictions | None) -> None:
        """Saves what was asked for. The result takes a free name, or that of an earlier result of this evaluation."""
        args, class_names = self.args, self.shards.class_names or self.names
        shown = self.shards.display_names or (self.loaded.display_names if self.class_map is None else None)
        names = readable_names(class_names, shown, self.model.num_classes)
        default = self.default_name()
        out = Path(args.out or default)
        number = 1
        while not _is_free(out, about):  # where --out names it, only if another has written there meanwhile
            number += 1
            out = default.with_stem(f"{default.stem}-{number}")
        wanted = Path(args.out or default)
        other = "" if out == wanted else f"; {wanted.name} is another evaluation's"
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_text(out, json.dumps(result, indent=2) + "\n")
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
                f"{out} cannot be written ({error.strerror or error}): the result is what was printed; name a place "
                "that can by --out, --predictions or --report"
            ) from error

    def default_name(self) -> Path:
        """A file whose name tells in what the evaluation differs from a run's own."""
        file, loaded = self.loaded.file, self.loaded
        words = [
            "eval",
            "" if file and file.stem == "best" else file.stem if file else self.name,
            "" if self.is_own else Path(_absolute(self.data)).name,
            self.split,
            "raw" if loaded.weights == "raw" and "state_dict_ema" in loaded.checkpoint else "",
            "mapped" if self.class_map is not None else "",
        ]
        name = "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", word).strip("_.")[-60:] for word in words if word)
        return (file.parent if file else Path()) / f"{name}.json"


def _is_free(path: str | Path, about: dict[str, Any]) -> bool:
    """Tells whether nothing is at `path`, or an earlier result of the evaluation that has the values `about`."""
    before = read_json(Path(path))
    return not os.path.lexists(path) or isinstance(before, dict) and about.items() <= before.items()


def _absolute(spec: str) -> str:
    """The absolute path of data; URLs and commands as they are."""
    spec = os.path.join("data", DIGITS) if spec == DIGITS else spec
    return spec if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:", spec) and not os.path.exists(spec) else os.path.abspath(spec)
