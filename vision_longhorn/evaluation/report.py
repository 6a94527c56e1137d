"""Tables and a picture of an evaluation: every sample's prediction, accuracy by class, the confusion matrix."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from matplotlib.colors import PowerNorm
from sklearn.metrics import ConfusionMatrixDisplay

from vision_longhorn.class_names import ClassMap
from vision_longhorn.files import csv_file
from vision_longhorn.plots import new_figure, plain, save_png

MOST_DRAWN = 1000  # most classes for which a confusion matrix is drawn


class Predictions:
    """Predictions of all samples, gathered from all processes. `add` is an `on_batch` of `evaluate`.

    Classes are numbered as in the data. A sample whose scores are not all numbers has the prediction -1.
    """

    def __init__(self, num_classes: int, class_map: ClassMap | None = None) -> None:
        self.classes = np.arange(num_classes) if class_map is None else np.array(class_map.classes)
        self.batches: list[tuple[Any, ...]] = []

    def add(self, logits: torch.Tensor, targets: torch.Tensor, rank: torch.Tensor, places: Any) -> None:
        order = logits.argsort(dim=1, descending=True, stable=True)[:, :5]  # (B, 5)
        scores = logits.softmax(1).gather(1, order)
        order[logits.isnan().any(1)] = -1
        arrays = (value.cpu().numpy() for value in (targets, rank, order, scores))
        self.batches.append((places or [("", "")] * len(targets), *arrays))

    def gather(self) -> None:
        """Collects the predictions of all processes, each of which has to call it, sorted by shard and key."""
        parts = [part for part in gather_object(self.batches) if len(part[1])]
        places = [place for part in parts for place in part[0]]
        order = sorted(range(len(places)), key=places.__getitem__)
        self.places = [places[i] for i in order]
        targets, self.rank, top, self.scores = (np.concatenate([part[i] for part in parts])[order] for i in range(1, 5))
        self.targets = self.classes[targets]
        self.top = np.where(top < 0, -1, self.classes[top])  # (samples, 5)

    def write_predictions(
        self, path: str | os.PathLike[str], class_names: Sequence[str] | None, names: Sequence[str]
    ) -> None:
        """Writes a CSV, a row for each sample, with the data's class names, if they are known, and names for people."""

        def words(i: int) -> list[Any]:
            return [i, class_names[i] if class_names else "", names[i]] if i >= 0 else ["", "", ""]

        with csv_file(path) as writer:
            writer.writerow([
                "shard", "key", "target", "target_class", "target_name", "predicted", "predicted_class",
                "predicted_name", "probability", "hit", "top5", "top5_names", "top5_probabilities",
            ])  # fmt: skip
            columns = (values.tolist() for values in (self.targets, self.rank, self.top, self.scores))
            for place, target, rank, top, scores in zip(self.places, *columns, strict=True):
                five = [i for i in top if i >= 0]
                hit, shown = int(rank == 0), [f"{score:.6f}" for score in scores]
                five_names = "; ".join(names[i] for i in five)
                row = [*place, *words(target), *words(top[0]), shown[0], hit, " ".join(map(str, five)), five_names]
                writer.writerow([*row, " ".join(shown)])

    def write_report(
        self, folder: str | os.PathLike[str], class_names: Sequence[str] | None, names: Sequence[str]
    ) -> None:
        """Writes classes.csv, confusion.csv (rows: true classes, columns: predicted ones) and confusion.png."""
        folder = Path(folder)
        k = len(self.classes)
        counts, top1, top5 = (
            np.bincount(self.targets[chosen], minlength=self.classes[-1] + 1)[self.classes]
            for chosen in (slice(None), self.rank == 0, self.rank < min(5, k))
        )
        with csv_file(folder / "classes.csv") as writer:
            writer.writerow(["index", "class", "name", "count", "top1", "top5", "top1_count", "top5_count"])
            for i, n, one, five in np.stack([self.classes, counts, top1, top5], axis=1).tolist():
                rates = [f"{100 * hits / n:.4f}" if n else "" for hits in (one, five)]
                writer.writerow([i, class_names[i] if class_names else "", names[i], n, *rates, one, five])

        known = self.top[:, 0] >= 0
        rows, columns = (np.searchsorted(self.classes, values[known]) for values in (self.targets, self.top[:, 0]))
        labels = [(class_names and class_names[i]) or i for i in self.classes.tolist()]
        with csv_file(folder / "confusion.csv") as writer:
            writer.writerow(["target", *labels])
            for i, label in enumerate(labels):
                writer.writerow([label, *np.bincount(columns[rows == i], minlength=k).tolist()])
        if k <= MOST_DRAWN:
            draw_confusion(folder / "confusion.png", rows, columns, [names[i] for i in self.classes.tolist()])


def draw_confusion(
    path: str | os.PathLike[str], targets: np.ndarray, predicted: np.ndarray, names: Sequence[str]
) -> None:
    """Draws a confusion matrix into a PNG, each row as shares of its class's samples.

    Targets and predictions are int arrays (samples,), indices into `names`.
    """
    k = len(names)
    matrix = np.bincount(targets * k + predicted, minlength=k * k).reshape(k, k)  # scikit-learn takes no empty arrays
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    inches = 4.5 + 0.3 * min(k, 20)
    figure = new_figure(inches + 1, inches)
    axes = figure.subplots()
    # On a linear scale rare confusions, the usual kind with many classes, would look as white as none.
    colours: Any = dict(cmap="Blues", im_kw=dict(norm=PowerNorm(0.4, 0, 1)))
    shown = ConfusionMatrixDisplay(shares, display_labels=[plain(name[:24]) for name in names])
    shown.plot(ax=axes, include_values=k <= 20, values_format=".2g", xticks_rotation="vertical", **colours)
    if k > 40:
        axes.set(xticks=[], yticks=[])
    save_png(figure, path, dpi=max(100, 2 * k / inches), tool="eval")
