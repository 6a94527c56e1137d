"""One evaluation from a command line to its results: model, data, whether their classes agree, and what is saved."""

import argparse
import json
import os
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
from vision_longhorn.demo import locate_data
from vision_longhorn.devices import leave, make_accelerator
from vision_longhorn.errors import UserError
from vision_longhorn.evaluation.evaluate import describe, evaluate
from vision_longhorn.evaluation.report import Predictions
from vision_longhorn.evaluation.results import absolute, default_name, free_name, is_free
from vision_longhorn.files import write_text
from vision_longhorn.loading import load_model


class Session:
    """An evaluation on all of its processes.

    Args:
        args: Values of the command line, as `vision_longhorn.eval.parse` gives them.

    Raises:
        UserError: There is no such model or data, or their classes differ.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.accelerator = args, make_accelerator(args.device, args.precision)
        self.say = self.accelerator.print
        self.loaded = load_model(
            args.run,
            args.model,
            pretrained=args.pretrained,
            num_classes=args.num_classes,
            ema=args.ema,
            **args.model_kwargs,
        )
        self.model, self.name = self.loaded.model, self.loaded.name
        self.loaded.check_classes()
        self.is_random = "random" in self.loaded.weights
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
        self.own_data = own and absolute(own)
        self.is_own = absolute(data) == self.own_data
        self.samples = samples if self.is_own and args.samples is None else args.samples
        self.data = locate_data(data, self.accelerator)

    def open_data(self) -> None:
        """Opens the data, and guesses class names of the model that its weights do not tell."""
        names = self.loaded.class_names
        # A folder of images may lack some of its run's classes, so its labels follow the model's names.
        follow = names if self.is_own and not self.args.map_classes else None
        self.shards = open_shards(
            self.data, self.split, self.samples, allow_pipe=self.args.allow_pipe, class_names=follow
        )
        if self.shards.hint:
            self.say(f"note: {self.shards.hint}")
        if self.shards.left_out:
            self.say(f"note: left out {self.shards.left_out}")
        if names is None and not self.is_random:
            guess = imagenet_names(self.model.num_classes)
            if guess and not set(guess).isdisjoint(self.shards.class_names or ()):
                names = guess
                self.say(f"note: the model's class names are unknown, its {len(guess)} are taken for ImageNet's")
        self.names = names

    def match_classes(self) -> ClassMap | None:
        """Pairs the classes of model and data; None where they are the same. Says what cannot be compared."""
        args, shards, class_map = self.args, self.shards, None
        # A run may have been given more classes than its data have.
        if args.map_classes or not self.is_own or self.names and shards.class_names:
            remedy = (
                "give data of the model's classes; --map-classes could pair them by name, which `python -m "
                "vision_longhorn.shards index DIR --classes FILE` gives to data"
            )
            class_map, note = match_classes(
                self.names,
                self.model.num_classes,
                shards.class_names,
                shards.num_classes,
                by_name=args.map_classes,
                model=f"the model ({self.name})",
                data=self.data,
                remedy=f"give --num-classes {shards.num_classes}" if self.is_random else remedy,
            )
            if note and not self.is_random:
                self.say(f"note: {note}")
        if self.is_random:
            what = "random weights" if self.loaded.weights == "random" else "a random classifier"
            self.say(f"note: {what}: the accuracy is chance")
        return class_map

    def run(self) -> dict[str, Any]:
        """Evaluates, prints and saves the result, and returns it."""
        args, accelerator, num_samples = self.args, self.accelerator, self.shards.num_samples
        about = self.about()
        if args.out and not is_free(args.out, about):
            raise UserError(f"--out {args.out} holds the result of another evaluation: name another file")
        batches, predictions = self.batches(), Predictions(self.used, self.class_map)
        on_batch = predictions.add if args.report or args.predictions else None
        self.model.to(accelerator.device)
        found = evaluate(
            {"model": self.model}, batches, accelerator, num_samples, args.batch_size, self.class_map, on_batch
        )
        images, seconds = batches.read()
        rates = accelerator.gather(torch.tensor([[images, seconds]], dtype=torch.float64, device=accelerator.device))
        images, seconds = rates[:, 0].sum().item(), rates[:, 1].max().item()
        result = {
            **found["model"],
            **about,
            "epoch": self.loaded.checkpoint.get("epoch"),
            "classes": self.used,
            "model_classes": self.model.num_classes,
            "data_classes": self.shards.num_classes,
            "samples": num_samples,
            "processes": accelerator.num_processes,
            "batch_size": args.batch_size,
            "images_per_s": images / seconds if images else None,
        }
        if on_batch:
            predictions.gather()
        self.tell(result)
        if accelerator.is_main_process:
            self.save(result, about, predictions)
        leave(accelerator)
        return result

    def about(self) -> dict[str, Any]:
        """The values that make it this evaluation, `results.SAME`."""
        file, precision = self.loaded.file, self.accelerator.mixed_precision
        return {
            "model": self.name,
            "model_kwargs": self.loaded.model_kwargs,
            "weights": self.loaded.weights,
            "checkpoint": file and os.path.abspath(file),
            "data": absolute(self.data),
            "split": self.split,
            "input_size": list(self.loaded.settings["input_size"]),
            "precision": "fp32" if precision == "no" else precision,
            "map_classes": self.class_map is not None,
        }

    def batches(self) -> "Clock":
        """This process's share of the data."""
        args, shards, accelerator = self.args, self.shards, self.accelerator
        loader = eval_loader(
            shards,
            create_transform(**self.loaded.settings),
            keys=args.predictions is not None,
            batch_size=args.batch_size,
            num_workers=args.workers,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            num_classes=self.model.num_classes if self.class_map is None else len(shards.class_names or ()),
            pin_memory=accelerator.device.type == "cuda",
        )
        total = shards.num_samples // accelerator.num_processes if accelerator.is_main_process else None
        return Clock(loader, accelerator.device, total)

    def tell(self, result: dict[str, Any]) -> None:
        """Prints the result."""
        self.say(f"{self.name}, {self.loaded.weights} weights, {self.split} split of {self.data}")
        if self.class_map is not None:
            of_model, of_data = self.model.num_classes, len(self.shards.class_names or ())
            self.say(f"{self.used} classes, those of one name of the model's {of_model} and the data's {of_data}")
        self.say(f"{describe(result)} of {self.shards.num_samples}")
        rate = result["images_per_s"]
        self.say(f"{rate:.1f} images/s without the first batch" if rate else "images/s not measured: all was one batch")

    def save(self, result: dict[str, Any], about: dict[str, Any], predictions: Predictions) -> None:
        """Saves what was asked for. The result takes a free name, or that of an earlier result of this evaluation."""
        args, shards, loaded = self.args, self.shards, self.loaded
        default = default_name(about, self.own_data, "state_dict_ema" in loaded.checkpoint)
        class_names = shards.class_names or self.names
        shown = shards.display_names or (loaded.display_names if self.class_map is None else None)
        names = readable_names(class_names, shown, self.model.num_classes)
        out = Path(args.out) if args.out else free_name(default, about)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_text(out, json.dumps(result, indent=2) + "\n")
            other = "" if args.out or out == default else f"; {default.name} is another evaluation's"
            print(f"saved as {out}{other}")
            if args.predictions:
                out = Path(args.predictions)
                predictions.write_predictions(out, class_names, names)
                print(f"predictions in {out}")
            if args.report:
                out = Path(args.report)
                predictions.write_report(out, class_names, names)
                print(f"accuracy by class and confusion matrix in {out}")
        except OSError as error:
            raise UserError(
                f"{out} cannot be written ({error.strerror or error}): the result is what was printed; name a place "
                "that can by --out, --predictions or --report"
            ) from error


class Clock:
    """Iterates over batches, and measures the time from the end of the first one's evaluation to the end of all.

    Args:
        loader: The batches, (images, targets, ...).
        device: What computes.
        total: Images of the progress bar; None: no bar.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device, total: int | None = None) -> None:
        self.loader, self.device, self.total = loader, device, total
        self.start: float | None = None
        self.images = 0

    def __iter__(self) -> Iterator[Any]:
        hidden = True if self.total is None else None  # None: no bar where there is no terminal
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
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
