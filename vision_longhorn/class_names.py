"""Names of classes: those of a model and of data, which of them are the same, and how people read them."""

import contextlib
import re
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from vision_longhorn.errors import UserError

_SYNSET = re.compile(r"n\d{8}")  # WordNet's number of a noun, by which ImageNet names its classes


class ClassMap(NamedTuple):
    """The classes that a model and data both have, in the data's order."""

    columns: list[int]  # the model's index of each
    classes: list[int]  # the data's index of each
    targets: list[int]  # for each class of the data its place among these, -1 for one that the model lacks


Names = tuple[list[str] | None, list[str] | None]  # class names, names for people; None: unknown


def model_names(model: Any, name: str) -> Names:
    """Finds the class names of a timm model with pretrained weights: those that came with these, or ImageNet's. The
    `name` is the one in timm's registry, "hf-hub:..." or "local-dir:..."."""
    cfg = model.pretrained_cfg
    if cfg.get("num_classes") != model.num_classes:  # then the classifier is new
        return None, None
    names = cfg.get("label_names")
    if isinstance(names, dict):  # by index, which JSON turns into text
        names = [names.get(str(i), names.get(i)) for i in range(model.num_classes)]
    if names and not isinstance(names, str) and None not in names:
        texts = cfg.get("label_descriptions") or {}
        return list(names), [texts.get(label, label) for label in names] if texts else None
    # Only in timm's own models does the number of classes tell the data they were trained on.
    return (imagenet_names(model.num_classes) if ":" not in name or "hf-hub:timm/" in name else None), None


def imagenet_names(num_classes: int) -> list[str] | None:
    """Lists the synsets of ImageNet, or of a larger set with `num_classes` classes, by index; None if there is none."""
    from timm.data import ImageNetInfo, infer_imagenet_subset  # takes seconds, for which --help need not wait

    subset = infer_imagenet_subset({"num_classes": num_classes})
    names = subset and ImageNetInfo(subset).label_names()
    return list(names) if names and len(names) == num_classes else None


def readable_names(
    class_names: Sequence[str] | None, display_names: Sequence[str] | None = None, num_classes: int | None = None
) -> list[str]:
    """Lists names of classes for people, by index: `display_names` if there are any, else `class_names`. ImageNet's
    synsets become their first word, with the synset where two share a word, as both cranes do. "class 7" and so on fill
    up to `num_classes`."""
    names = list(display_names or class_names or [])
    if not display_names and any(map(_SYNSET.fullmatch, names)):
        from timm.data import ImageNetInfo  # as above

        table, words = ImageNetInfo(), list(names)
        for i, name in enumerate(names):
            with contextlib.suppress(KeyError):  # no synset, or one that timm does not know
                words[i] = table.label_name_to_description(name).partition(", ")[0]
        counts = Counter(words)
        names = [word if counts[word] == 1 else f"{word} ({name})" for name, word in zip(names, words, strict=True)]
    return names + [f"class {i}" for i in range(len(names), num_classes or 0)]


def difference(names: Sequence[str], others: Sequence[str], here: str, there: str) -> str:
    """Says which class is the first with other names in the places `here` and `there`; "" where all are the same."""
    for i, pair in enumerate(zip_longest(names, others)):
        if pair[0] != pair[1]:
            own, other = ("none" if name is None else repr(name) for name in pair)
            return f"class {i} is {own} in {here} and {other} in {there}"
    return ""


def match_classes(
    names: Sequence[str] | None,
    num_classes: int,
    data_names: Sequence[str] | None,
    data_classes: int | None,
    *,
    by_name: bool,
    model: str,
    data: str,
) -> tuple[ClassMap | None, str]:
    """Compares a model's classes with those of the data, by names and numbers, where they are known (not None), and
    pairs them `by_name` where they differ. Messages call the two `model` and `data`.

    Returns:
        (ClassMap, or None where index i is the same class in both; note: what could not be compared, "" if nothing).

    Raises:
        UserError: The classes differ and `by_name` is not set, or there is nothing to pair.
    """
    if names and data_names:
        if list(names) == list(data_names):
            return None, ""
        shared = set(names) & set(data_names)
        differ = f"{difference(names, data_names, model, data)} ({len(names)} and {len(data_names)} classes)"
        if not shared:
            raise UserError(f"{differ}, and they share no class: give the data, or a model, of the same classes")
        if not by_name:
            raise UserError(f"{differ}: --map-classes evaluates the {len(shared)} classes that both have, by name")
        for whose, known in ((model, names), (data, data_names)):
            if twice := [name for name, count in Counter(known).items() if name in shared and count > 1]:
                raise UserError(f"{whose} has two classes {twice[0]!r}: --map-classes needs names that differ")
        classes = [i for i, name in enumerate(data_names) if name in shared]
        column, place = {name: i for i, name in enumerate(names)}, {i: n for n, i in enumerate(classes)}
        targets = [place.get(i, -1) for i in range(len(data_names))]
        return ClassMap([column[data_names[i]] for i in classes], classes, targets), ""
    unknown = [whose for whose, known in ((model, names), (data, data_names)) if not known]
    text = f"the class names of {' and '.join(unknown)} are unknown"
    remedy = "`vision-longhorn shards index DIR --classes FILE` gives data their names"
    if by_name:
        raise UserError(f"{text}, and --map-classes goes by them: {remedy}")
    if data_classes is None:
        return None, f"{text}, labels are taken as the model's"
    if data_classes != num_classes:
        raise UserError(
            f"{model} has {num_classes} classes, {data} has {data_classes}: give data of the model's classes; "
            f"--map-classes could pair them by name: {remedy}"
        )
    return None, f"{text}, only their number was compared, {num_classes}"
