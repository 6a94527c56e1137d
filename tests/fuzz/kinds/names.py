"""Names of classes of the weights that a run starts from."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.case import Case, Expect, Place, require
from tests.fuzz.kinds.common import train
from tests.fuzz.material import CLASSES, OTHERS
from tests.fuzz.process import Result

STILL = ("--lr", "1e-9", "--min-lr", "0", "--warmup-lr", "0", "--weight-decay", "0")  # weights stay where they start
HEAD = "head.weight"


def cases() -> Iterator[Case]:
    ash, beech, oak = CLASSES
    people = ["Ash tree", "Beech tree", "Oak tree"]
    # Names in the checkpoint (class names, display names), those of the data, and whether the classifier stays. None:
    # names are unknown.
    situations: dict[str, tuple[Any, Any, Any, Any, bool]] = {
        "same": (CLASSES, None, CLASSES, None, True),
        "rotated": ((beech, oak, ash), None, CLASSES, None, False),
        "turned": ((oak, beech, ash), None, CLASSES, None, False),
        "others": (OTHERS, None, CLASSES, None, False),
        "one-other": ((ash, beech, "elm"), None, CLASSES, None, False),
        "capitals": (("Ash", "Beech", "Oak"), None, CLASSES, None, False),
        "spaces": (("ash ", "beech", "oak"), None, CLASSES, None, False),
        "people-differ": (CLASSES, people, CLASSES, ["Esche", "Buche", "Eiche"], True),
        "people-alone": (CLASSES, people, CLASSES, None, True),
        "people-same": (OTHERS, people, CLASSES, people, False),
        "file-unknown": (None, None, CLASSES, None, True),
        "data-unknown": (CLASSES, None, None, None, True),
        "both-unknown": (None, None, None, None, True),
        "people-known": (None, people, CLASSES, None, True),
        "numbers": (("0", "1", "2"), None, CLASSES, None, False),
        "wordnet": (("n01440764", "n01443537", "n01484850"), None, CLASSES, None, False),
    }
    for name, (file_names, file_people, data_names, data_people, stays) in situations.items():
        unknown = file_names is None or data_names is None
        says = () if not stays else ("(?i)note.*names",) if unknown else ()
        for averaged in (True, False):
            yield Case(
                f"init-names/{name}{'' if averaged else '-raw'}",
                "train",
                _make(file_names, file_people, data_names, data_people, averaged),
                Expect(0, says=says if stays else ("(?i)classif[^\n]*(anew|new)",), check=_check(stays)),
            )
    yield Case(
        "init-names/safetensors", "train", _safetensors, Expect(0, says=("(?i)note.*names",), check=_check(True))
    )
    yield Case("init-names/folder", "train", _folder_of_others, Expect(0, says=("(?i)anew",)))


def _make(
    file_names: Any, file_people: Any, data_names: Any, data_people: Any, averaged: bool
) -> Callable[[Place], Sequence[str | Path]]:
    def made(place: Place) -> Sequence[str | Path]:
        checkpoint = torch.load(place.material / "run" / "best.pt", weights_only=True)
        checkpoint["class_names"] = file_names and list(file_names)
        checkpoint["display_names"] = file_people
        if not averaged:
            del checkpoint["state_dict_ema"]
        torch.save(checkpoint, place / "init.pt")
        place.notes["head"] = checkpoint["state_dict_ema" if averaged else "state_dict"][HEAD]
        path = place.copy("shards") / "_info.json"
        index = json.loads(path.read_text())
        index.pop("class_names")
        if data_names is not None:
            index["class_names"] = list(data_names)
        if data_people is not None:
            index["display_names"] = list(data_people)
        path.write_text(json.dumps(index))
        return train(place, "--init", "init.pt", *STILL)

    return made


def _check(stays: bool) -> Callable[[Place, Result], None]:
    def check(place: Place, result: Result) -> None:
        head = torch.load(place / "new" / "last.pt", weights_only=True)["state_dict"][HEAD]
        stayed = torch.allclose(head, place.notes["head"], atol=1e-5)
        require(stayed == stays, f"the classifier {'starts anew' if stays else 'stays'}, and should not")

    return check


def _safetensors(place: Place) -> Sequence[str | Path]:
    path = place.copy("run.safetensors")
    checkpoint = torch.load(place.material / "run" / "best.pt", weights_only=True)
    place.notes["head"] = checkpoint["state_dict"][HEAD]
    return train(place, "--init", path.name, *STILL)


def _folder_of_others(place: Place) -> Sequence[str | Path]:
    path = place.copy("hub") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "label_names": list(OTHERS)}))
    return train(place, "--init", "hub", *STILL)
