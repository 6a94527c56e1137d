"""Command lines that are right, and checks of what comes of them."""

from pathlib import Path

from tests.fuzz.case import Place, require
from tests.fuzz.material import EVAL, MODEL_KWARGS, SAME, TRAIN, digest_of
from tests.fuzz.process import Result


def link(place: Place, *names: str) -> None:
    """Links to parts of the material that are only read."""
    for name in names:
        (place / name).symlink_to(place.material / name)


def evaluate(place: Place, run: str | Path = "run", *more: str | Path) -> list[str | Path]:
    """`eval` of a run on the material's shards, into eval.json."""
    return [run, *EVAL, "--data", place.material / "shards", "--out", "eval.json", *more]


def same_evaluation(place: Place, result: Result) -> None:
    """`evaluate` gave what the sound run gives."""
    found, wanted = place.json("eval.json"), place.json("/eval.json")
    other = [f"{key} {found.get(key)} for {wanted[key]}" for key in SAME if found.get(key) != wanted[key]]
    require(not other, f"it evaluates to something else: {', '.join(other)}")


def predict(place: Place, model: str | Path = "run", *more: str | Path) -> list[str | Path]:
    """`predict` of the material's photos, into predict.csv."""
    link(place, "photos")
    return [model, "photos", "--workers", "0", "--device", "cpu", "--out", "predict.csv", *more]


def same_predictions(place: Place, result: Result) -> None:
    """`predict` gave what the sound run gives."""
    same = (place / "predict.csv").read_text() == (place.material / "predict.csv").read_text()
    require(same, "it predicts something else")


def draw_maps(place: Place, model: str | Path = "run", *more: str | Path) -> list[str | Path]:
    """`maps` of one of the material's photos, into maps.png."""
    return [model, place.material / "photos" / "photo0.jpg", "--out", "maps.png", *more]


def same_maps(place: Place, result: Result) -> None:
    """`maps` drew what it draws of the sound run."""
    same = (place / "maps.png").read_bytes() == (place.material / "maps.png").read_bytes()
    require(same, "it draws something else")


def train(place: Place, *more: str | Path, data: str = "shards", run: str = "new") -> list[str | Path]:
    """`train` for one epoch on a part of the material."""
    if not (place / data).exists():
        link(place, data)
    return [*TRAIN, "--model-kwargs", *MODEL_KWARGS, "--epochs", "1", "--data", data, "--run-dir", run, *more]


def same_start(place: Place, result: Result) -> None:
    """A run that started from the weights of the sound run ended as it should."""
    require(digest_of(place / "new" / "last.pt") == place.json("/starts-from.json"), "it has trained something else")


def same_end(place: Place, result: Result) -> None:
    """The begun run went on as it should."""
    require(digest_of(place / "begun" / "last.pt") == place.json("/goes-on.json"), "it went on to something else")


def is_png(path: Path) -> bool:
    """Whether a file is a picture."""
    return path.is_file() and path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
