"""Models: their arguments, their operations, their weights from elsewhere, and what other libraries do with them."""

import argparse
import functools
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from timm.data import create_transform
from timm.optim import list_optimizers
from torch.utils.flop_counter import FlopCounterMode

from tests.fuzz.case import PYTHON, Case, Expect, Place, require
from tests.fuzz.kinds.common import (
    draw_maps,
    evaluate,
    predict,
    same_evaluation,
    same_maps,
    same_predictions,
    train,
)
from tests.fuzz.material import CLASSES, EVAL, MODEL_KWARGS, SIZE
from tests.fuzz.process import Result
from vision_longhorn.models.vlonghorn import VisionLonghorn

Words = Sequence[str | Path]
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2}


def cases() -> Iterator[Case]:
    yield from _counts()
    yield from _erasing()
    yield from _arguments()
    yield from _words()
    yield from _others()
    yield from _hub_forms()
    yield from _libraries()
    yield from _asked()


def _call(function: Callable[[], None]) -> Callable[[Place], Callable[[], None]]:
    """A case that calls a function, in which whatever is raised is a failure."""
    return lambda place: function


# ------------------------------------------------------------------------------------------------- operations, counted


def _counts() -> Iterator[Case]:
    """torch's counter gives of a model at least its products by hand, and no more than twice."""

    def by_hand(model: VisionLonghorn, tokens: int) -> int:
        """Products of matrices with tokens, two operations each."""
        macs = model.patch_embed.proj.weight.numel() * model.patch_embed.num_patches
        macs += model.head.weight.numel() if model.num_classes else 0
        for block in model.blocks:
            for name, value in block.mixer.named_parameters():
                if name in ("in_proj.weight", "out_proj.weight", "x_proj", "dt_proj", "conv_weight"):
                    macs += value.numel() * tokens
        return 2 * macs

    def check(name: str, kwargs: dict[str, Any], backward: bool, batch: int) -> None:
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=5, **SMALL, **kwargs)
        images = torch.randn(batch, 3, 32, 32)
        with FlopCounterMode(display=False) as counter:
            loss = model(images).sum()
            if backward:
                loss.backward()
        found = counter.get_total_flops() / batch
        wanted = by_hand(model, model.patch_embed.num_patches + model.num_prefix_tokens) * (3 if backward else 1)
        # The first layer wants no gradient of its input.
        low = 0.9 if backward else 1.0
        require(
            low * wanted < found < 2 * wanted,
            f"{found:,.0f} operations are counted, and the products alone are {wanted:,}",
        )

    models: list[tuple[str, dict[str, Any]]] = [
        ("vlonghorn_test", {}), ("vlonghorn_test", {"rule": "exact"}), ("vlonghorn_test", {"rule": "delta"}),
        ("vlonghorn_test", {"rule": "gla"}), ("vlonghorn_test", {"rule": "diagonal_unit"}),
        ("vlonghorn_test", {"wiring": "shared"}), ("vlonghorn_test", {"wiring": "alternate"}),
        ("vlonghorn_test", {"d_state": 3, "d_conv": 3}), ("vlonghorn_test", {"save_states": True}),
        ("vlonghorn_test", {"class_token": "none", "global_pool": "avg", "scan_order": "rows_columns"}),
        ("vlonghorn_test", {"class_token": "none", "global_pool": "avg", "conv": "grid"}),
        ("vlonghorn_test", {"patch_stride": 4}), ("vim_test", {}), ("vim_test", {"A_per_token": True}),
    ]  # fmt: skip
    for number, (name, kwargs) in enumerate(models):
        for backward in (False, True):
            about = "-".join([name, *map(str, kwargs.values())]).replace(" ", "")
            run = functools.partial(check, name, kwargs, backward, 1 + number % 3)
            yield Case(f"counts/{about}{'-backward' if backward else ''}", PYTHON, _call(run), Expect(0))

    def tiny() -> None:
        model = timm.create_model("vlonghorn_tiny_paper").eval()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.randn(1, 3, 224, 224))
        found = counter.get_total_flops() / 2e9
        require(1.40 < found < 1.60, f"vlonghorn_tiny_paper is counted with {found:.3f} GMACs, and has 1.47")

    yield Case("counts/vlonghorn_tiny_paper", PYTHON, _call(tiny), Expect(0))


# --------------------------------------------------------------------------------------------------------- erased boxes


def _erasing() -> Iterator[Case]:
    """Every box that a worker has drawn is erased by the device's half, and nothing else is."""

    def check(place: Place, mode: str, probability: float) -> Callable[[], None]:
        seed, size = place.rng.randrange(1 << 30), place.rng.choice((16, 24, 33))

        def function() -> None:
            from vision_longhorn.data import split_transform

            torch.manual_seed(seed)
            random.seed(seed)
            transform = create_transform(
                size, is_training=True, re_prob=probability, re_mode=mode, auto_augment=None, color_jitter=None,
                hflip=0.0, mean=(0.0,) * 3, std=(1.0,) * 3,
            )  # fmt: skip
            crops, finish = split_transform(transform)
            image = torch.full((3, 40, 40), 200, dtype=torch.uint8)
            pairs = [crops((image, None)) for _ in range(400)]
            table = torch.stack([row for _, row in pairs])
            found = finish((torch.stack([one for one, _ in pairs]), table), torch.device("cpu"))
            changed = (found - 200 / 255).abs().amax(1) > 1e-4  # (n, H, W)
            y, x = torch.arange(size)[:, None], torch.arange(size)
            top, left, bottom, right = table[:, 1:5].T[..., None, None]
            inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)
            require(not (changed & ~inside).any(), "pixels outside of the boxes have changed")
            missed = (inside & ~changed).flatten(1).float().sum(1) / inside.flatten(1).float().sum(1).clamp_min(1)
            require(missed.max() < 0.02, f"{(missed > 0.02).sum()} of {len(pairs)} boxes are not erased")
            share = inside.flatten(1).any(1).float().mean().item()
            require(abs(share - probability) < 0.12, f"{share:.0%} of the pictures have a box, of {probability:.0%}")

        return function

    for mode in ("const", "rand", "pixel"):
        for number in range(4):
            make = functools.partial(check, mode=mode, probability=(0.25, 0.5, 1.0, 0.0)[number])
            yield Case(f"erasing/{mode}-{number}", PYTHON, make, Expect(0))


# -------------------------------------------------------------------------------------------------- arguments of models

VALUES = (
    "0", "-1", "1.5", '"32"', "true", "none", "abc", "3", "[1,2]", "[]", "{}", "0.1", "[32,0]", "nan", "1", "[[1]]",
    "",
)  # fmt: skip


def _arguments() -> Iterator[Case]:
    own = [
        name for name in inspect.signature(VisionLonghorn).parameters if name not in ("device", "dtype", "mixer_args")
    ]
    keys = (*own, "d_state", "d_conv", "expand", "dt_rank", "rule", "wiring", "beta", "A_per_token", "save_states",
            "num_classes", "drop_path_rate", "pretrained", "features_only", "out_indices", "checkpoint_path", "nosuch",
            "pretrained_cfg", "scriptable", "cache_dir", "img_size", "patch_size", "depth", "embed_dim")  # fmt: skip
    named = (
        "drop_path_rate=0.1", "num_classes=3", "patch_size=0", 'img_size="32"', "depth=0", "embed_dim=-4",
        "in_chans=1", "in_chans=0", "pretrained=true", "features_only=true", "img_size=[24]", "patch_size=[8,8,8]",
        "depth=2.5", "name=x", "model_name=x", "drop_rate=2", "norm_eps=abc", "global_pool=3",
        "checkpoint_path=nosuch.pt", "patch_stride=0", "pretrained_cfg=x", "d_state=0", "dt_rank=0", "expand=0",
        "d_conv=0", "img_size=1e400", "class_token=5", "mixer=5", "rule=5", "out_indices=[9]", "kwargs=1", "self=1",
        "device=cuda",
    )  # fmt: skip
    weird = ("=5", "a=b=c", "img-size=32", " img_size=24", "IMG_SIZE=24")

    def of(word: str, pair: Callable[[random.Random], str]) -> Callable[[Place], Words]:
        def made(place: Place) -> Words:
            words = ["--model-kwargs", *MODEL_KWARGS, pair(place.rng)]
            if word == "train":
                line = train(place)
                at = line.index("--model-kwargs")
                return [*line[:at], *line[at + 1 + len(MODEL_KWARGS) :], *words]
            if word == "eval-run":
                return [*evaluate(place, place.material / "run"), words[0], words[-1]]
            if word == "eval":
                named = ["--model", "vlonghorn_test", "--num-classes", "3"]
                return [*evaluate(place, place.material / "run"), *named, *words]
            return ["vlonghorn_test", "model.onnx", *words]

        return made

    def drawn(rng: random.Random) -> str:
        return f"{rng.choice(keys)}={rng.choice(VALUES)}"

    expect = Expect(leaves=("new/*",))
    for number, pair in enumerate((*named, *weird)):
        about = "".join(letter if letter.isalnum() else "_" for letter in pair)
        words = ("train", "eval", "eval-run") if number < 8 else (("train", "eval", "eval-run")[number % 3],)
        for word in words:
            make = of(word, lambda rng, pair=pair: pair)
            yield Case(f"model-kwargs/{word}-{about}-{number}", word.partition("-")[0], make, expect)
    for number in range(24):
        for word in ("train", "eval", "eval-run"):
            if word == "eval" or number % 2:
                yield Case(f"model-kwargs/{word}-drawn-{number}", word.partition("-")[0], of(word, drawn), expect)
    for number in range(10):
        pair = named[number]
        make = of("export", lambda rng, pair=pair: pair)
        about = "".join(letter if letter.isalnum() else "_" for letter in pair)
        yield Case(f"model-kwargs/export-{about}", "export", make, expect, limit=120)


# ---------------------------------------------------------------------------------------------------------------- words


def _words() -> Iterator[Case]:
    """Optimisers, policies of augmentation, and other words that a library is to understand."""

    def option(name: str, choose: Callable[[random.Random], str]) -> Callable[[Place], Words]:
        return lambda place: [*train(place), name, choose(place.rng)]

    def random_policy(rng: random.Random) -> str:
        start = rng.choice(("rand", "augmix", "original", "originalr", "v0", "v0r", "3a", "cifar10", "randaugment"))
        parts = [rng.choice("mnwpi") + rng.choice(("9", "", "x", "99", "-1", "0.5")) for _ in range(rng.randrange(3))]
        return "-".join([start, *parts, *rng.choice(([], ["mstd0.5"], ["mstdx"], ["inc1"], ["inc"], ["zz9"]))])

    expect = Expect(leaves=("new/*",))
    optimisers = [name for name in list_optimizers() if "kron" not in name]  # which compiles itself for minutes
    for number in range(16):
        make = option("--opt", lambda rng: rng.choice(optimisers))
        yield Case(f"words/opt-{number}", "train", make, expect)
    for opt in (
        "adahessian",
        "lookahead_adamw",
        "ADAMW",
        "adamw ",
        "",
        "nosuch",
        "fusedadam",
        "bnbadam8bit",
        "sgdp",
        "muon",
    ):
        yield Case(
            f"words/opt-{opt or 'empty'}".replace(" ", "_"), "train", option("--opt", lambda rng, opt=opt: opt), expect
        )
    for number in range(12):
        yield Case(f"words/augment-{number}", "train", option("--auto-augment", random_policy), expect)
    for policy in (
        "randaugment",
        "rand",
        "rand-",
        "rand-m",
        "augmix",
        "autoaugment",
        "rand-m9-n",
        "rand-m9-mstd",
        "v1",
        "x",
    ):
        make = option("--auto-augment", lambda rng, policy=policy: policy)
        yield Case(f"words/augment-{policy}", "train", make, expect)
    empties: dict[str, Callable[[Place], Words]] = {
        "curves": lambda place: [""],
        "curves-out": lambda place: [place.material / "run", "--out", ""],
        "curves-two": lambda place: [place.material / "run", "", "--out", "c.png"],
        "maps-run": lambda place: ["", place.material / "photos/photo0.jpg"],
        "maps-image": lambda place: [place.material / "run", ""],
        "maps-out": lambda place: [place.material / "run", place.material / "photos/photo0.jpg", "--out", ""],
        "hub-run": lambda place: ["", "folder"],
        "hub-target": lambda place: [place.material / "run", ""],
        "hub-licence": lambda place: [place.material / "run", "folder", "--license", ""],
        "export-run": lambda place: ["", "folder/"],
        "export-target": lambda place: [place.material / "run", ""],
        "export-size": lambda place: [place.material / "run", "m.onnx", "--img-size", ""],
        "export-device": lambda place: [place.material / "run", "m.pt2", "--device", "nosuch"],
        "predict-run": lambda place: ["", place.material / "photos"],
        "predict-image": lambda place: [place.material / "run", ""],
        "predict-model": lambda place: ["--model", "", place.material / "photos"],
        "eval-run": lambda place: ["", *EVAL],
        "eval-data": lambda place: [place.material / "run", *EVAL, "--data", ""],
        "eval-split": lambda place: [*evaluate(place, place.material / "run"), "--split", ""],
        "eval-model": lambda place: ["--model", "", "--pretrained", *EVAL, "--data", place.material / "shards"],
        "eval-report": lambda place: [*evaluate(place, place.material / "run"), "--report", ""],
        "eval-predictions": lambda place: [*evaluate(place, place.material / "run"), "--predictions", ""],
        "shards-src": lambda place: ["imagefolder", "", "out"],
        "shards-out": lambda place: ["imagefolder", place.material / "pictures", ""],
        "shards-verify": lambda place: ["verify", ""],
        "shards-index": lambda place: ["index", ""],
        "shards-split": lambda place: ["imagefolder", place.material / "pictures" / "val", "out", "--split", ""],
        "shards-digits": lambda place: ["digits", ""],
        "lab-name": lambda place: [""],
        "lab-out": lambda place: ["mixers", "--list", "--out", ""],
        "lab-file": lambda place: ["--file", "", "--list"],
        "lab-data": lambda place: ["mixers", "--dry-run", "--data", ""],
        "lab-merge": lambda place: ["mixers", "--list", "--merge", ""],
    }
    defaults = ("lab-out", "eval-split", "shards-split")  # where nothing may stand for the default
    for name, make in empties.items():
        yield Case(f"words/empty-{name}", name.partition("-")[0], make, Expect(None if name in defaults else 1))
    fields = (
        "model", "data", "val-data", "train-split", "val-split", "init", "run-dir", "resume", "track", "opt",
        "auto-augment", "config", "interpolation", "re-mode", "mean", "std", "model-kwargs", "device", "precision",
    )  # fmt: skip
    for field in fields:
        make = option(f"--{field}", lambda rng: "")
        yield Case(f"words/empty-train-{field}", "train", make, Expect(leaves=("new/*",)))


# ----------------------------------------------------------------------------------------------- checkpoints of others


class _Foreign:
    """A value that no checkpoint should hold."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code in a checkpoint was run",))


def _others() -> Iterator[Case]:
    """Checkpoints as timm's train.py and others write them: they load as timm loads them, or an error says why not."""

    def timm_like(place: Place, what: str) -> dict[str, Any]:
        checkpoint = torch.load(place.material / "run" / "best.pt", weights_only=True)
        weights, averaged = checkpoint["state_dict"], checkpoint["state_dict_ema"]
        args = argparse.Namespace(
            model="vlonghorn_test", lr=0.1, epochs=3, data_dir="/data", opt_betas=None, img_size=SIZE
        )
        made = {
            "epoch": 3, "arch": "vlonghorn_test", "state_dict": weights, "optimizer": {}, "version": 2, "args": args,
            "metric": 71.0,
        }  # fmt: skip
        if what == "ema":
            made["state_dict_ema"] = averaged
        elif what == "amp":
            made["amp_scaler"] = {"scale": 65536.0}
        elif what == "numpy":
            made["metric"] = np.float64(71.0)
        elif what == "module":
            made["state_dict"] = {f"module.{key}": value for key, value in weights.items()}
        elif what == "compiled":
            made["state_dict"] = {f"_orig_mod.{key}": value for key, value in weights.items()}
        elif what == "model":
            made = {"model": weights, "args": args, "epoch": 3}
        elif what == "model-ema":
            made = {"model": weights, "model_ema": averaged, "args": args}
        elif what == "path":
            made["args"] = argparse.Namespace(output=Path("/tmp/x"), model="vlonghorn_test")
        elif what == "bare":
            made = dict(weights)
        return made

    def save(place: Place, what: str, old: bool = False) -> None:
        torch.save(timm_like(place, what), place / "theirs.pth", _use_new_zipfile_serialization=not old)

    def started(place: Place, what: str, old: bool) -> Words:
        save(place, what, old)
        return train(place, "--init", "theirs.pth")

    def evaluated(place: Place, what: str) -> Words:
        save(place, what)
        return [
            *evaluate(place, "theirs.pth"),
            "--model",
            "vlonghorn_test",
            "--num-classes",
            "3",
            "--model-kwargs",
            *MODEL_KWARGS,
        ]

    whats = ("plain", "ema", "amp", "numpy", "module", "compiled", "model", "model-ema", "path", "bare")
    for _number, what in enumerate(whats):
        fine = what not in ("path", "numpy")  # which timm does not load either
        for old in (False, True):
            make = functools.partial(started, what=what, old=old)
            expect = Expect(0 if fine else None, says=(r"init .*theirs\.pth",) if fine else ())
            yield Case(f"others/train-{what}{'-old' if old else ''}", "train", make, expect)
        expect = Expect(0 if fine else None, check=same_evaluation if what in ("ema",) else None)
        yield Case(f"others/eval-{what}", "eval", functools.partial(evaluated, what=what), expect)

    def evil(place: Place, key: str) -> Words:
        torch.save({**timm_like(place, "plain"), key: _Foreign()}, place / "theirs.pth")
        return train(place, "--init", "theirs.pth")

    for key in ("args", "metric", "extra", "optimizer"):
        expect = Expect(1, never=("code in a checkpoint was run",))
        yield Case(f"others/train-code-in-{key}", "train", functools.partial(evil, key=key), expect)

    def without_crc(place: Place) -> Words:
        """A zip whose check sums are zero, as torch writes them where it is told to compute none."""
        data = torch.serialization.get_crc32_options() if hasattr(torch.serialization, "get_crc32_options") else None
        if data is not None:
            torch.serialization.set_crc32_options(False)
        save(place, "ema")
        if data is not None:
            torch.serialization.set_crc32_options(data)
        return train(place, "--init", "theirs.pth")

    yield Case("others/train-without-crc", "train", without_crc, Expect(0))


# ------------------------------------------------------------------------------------------------------- model folders


def _hub_forms() -> Iterator[Case]:
    """A model folder serves every tool as a run does, and says what it has to."""

    def on_copy(make: Callable[..., Words]) -> Callable[[Place], Words]:
        def made(place: Place) -> Words:
            place.copy("hub")
            return make(place, "hub")

        return made

    def exported(place: Place, result: Result) -> None:
        from vision_longhorn.export import load_onnx

        images = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
        found, wanted = (load_onnx(folder / "model.onnx")(images)[0] for folder in (place.folder, place.material))
        require(torch.allclose(found, wanted, atol=1e-4), "the exported model computes something else")

    yield Case("hub-forms/eval", "eval", on_copy(evaluate), Expect(0, check=same_evaluation))
    yield Case("hub-forms/predict", "predict", on_copy(predict), Expect(0, check=same_predictions))
    yield Case("hub-forms/maps", "maps", on_copy(draw_maps), Expect(0, check=same_maps))
    yield Case("hub-forms/train-init", "train", on_copy(lambda place, hub: train(place, "--init", hub)), Expect(0))
    yield Case(
        "hub-forms/export", "export", on_copy(lambda place, hub: [hub, "model.onnx"]), Expect(0, check=exported), 120
    )
    for word, words in (
        ("maps", ["local-dir:hub", "photo.jpg", "--out", "maps.png"]),
        ("predict", ["--model", "local-dir:hub", "photo.jpg"]),
    ):

        def by_source(place: Place, words: list[str] = words) -> Words:
            place.copy("hub")
            place.copy("photos/photo0.jpg", "photo.jpg")
            return words

        yield Case(f"hub-forms/{word}-local-dir", word, by_source, Expect(0 if word == "predict" else None))

    def named(place: Place, display: Any, data: str) -> Words:
        checkpoint = torch.load(place.material / "run" / "best.pt", weights_only=True)
        checkpoint["display_names"] = display
        checkpoint["config"]["data"] = data
        (place / "named").mkdir()
        torch.save(checkpoint, place / "named" / "best.pt")
        place.notes.update(display=display, data=data)
        return ["named", "folder"]

    def content(place: Place, result: Result) -> None:
        config = place.json("folder/config.json")
        card = (place / "folder" / "README.md").read_text()
        require(place.notes["data"] not in card, f"the card publishes {place.notes['data']}")
        text = (place / "folder" / "config.json").read_text()
        require(place.notes["data"] not in text, f"config.json publishes {place.notes['data']}")
        require(str(place.folder) not in card + text, "a path of this machine is published")
        names = config.get("label_names") or config.get("pretrained_cfg", {}).get("label_names")
        require(names == list(CLASSES), f"label_names are {names}")
        people = config.get("label_descriptions") or config.get("pretrained_cfg", {}).get("label_descriptions")
        if place.notes["display"]:
            require(people and set(people.values()) == set(place.notes["display"]), f"label_descriptions are {people}")

    for number, (display, data) in enumerate(
        (
            (None, "/home/anna/secret/trees"),
            (["Esche", "Buche", "Eiche"], "/mnt/data/trees"),
            (["a", "a", "b"], "../trees"),
            (None, "~/trees"),
            (["日本", "é", "x"], "C:\\data\\trees"),
            (None, "/data/{000..004}.tar"),
        )
    ):
        make = functools.partial(named, display=display, data=data)
        yield Case(f"hub-forms/content-{number}", "hub", make, Expect(0, check=content))


# ------------------------------------------------------------------------------------------------------ other libraries


def _libraries() -> Iterator[Case]:
    """Cases of timm and torch with our models and checkpoints."""

    def checkpoint_path(place: Place) -> Callable[[], None]:
        def function() -> None:
            from vision_longhorn.loading import load_run

            sizes = dict(img_size=SIZE, patch_size=8, embed_dim=16, depth=2, d_state=4)
            model = timm.create_model(
                "vlonghorn_test", num_classes=3, checkpoint_path=str(place.material / "run/best.pt"), **sizes
            )
            averaged = load_run(place.material / "run")[0]
            images = torch.randn(2, 3, SIZE, SIZE)
            require(torch.equal(model.eval()(images), averaged.eval()(images)), "timm has loaded other weights")

        return function

    yield Case("libraries/timm-checkpoint", PYTHON, checkpoint_path, Expect(0))

    def with_model(check: Callable[[Any], None], name: str, kwargs: dict[str, Any]) -> None:
        torch.manual_seed(0)
        check(timm.create_model(name, num_classes=3, **SMALL, **kwargs))

    images = torch.randn(2, 3, 32, 32)

    def grad_checkpointing(model: Any) -> None:
        wanted = torch.autograd.grad(model(images).sum(), list(model.parameters()))
        model.set_grad_checkpointing(True)
        found = torch.autograd.grad(model(images).sum(), list(model.parameters()))
        require(all(torch.allclose(a, b, atol=1e-5) for a, b in zip(wanted, found)), "gradients are others")

    def features(model: Any) -> None:
        tokens = model.forward_features(images)
        require(torch.allclose(model.forward_head(tokens), model(images)), "head of the features is another")

    def intermediates(model: Any) -> None:
        final, found = model.eval().forward_intermediates(images)
        require(len(found) == 2 and torch.allclose(final, model.forward_features(images)), "intermediates are others")

    def no_classes(model: Any) -> None:
        model.reset_classifier(0)
        require(model.eval()(images).shape == (2, 32), "no features without a classifier")

    def copies(model: Any) -> None:
        import copy

        require(
            torch.equal(copy.deepcopy(model).eval()(images), model.eval()(images)), "a copy computes something else"
        )

    def double(model: Any) -> None:
        found = model.double().eval()(images.double())
        require(found.dtype == torch.float64, "float64 images give another type")

    checks = (grad_checkpointing, features, intermediates, no_classes, copies, double)
    for name, kwargs in (
        ("vlonghorn_test", {}),
        ("vlonghorn_test", {"rule": "exact"}),
        ("vim_test", {}),
        ("vlonghorn_test", {"wiring": "shared"}),
    ):
        for check in checks:
            about = "-".join([name, *map(str, kwargs.values())])
            run = functools.partial(with_model, check, name, kwargs)
            yield Case(f"libraries/{check.__name__}-{about}", PYTHON, _call(run), Expect(0))

    def own_mixer() -> None:
        class MyMixer(torch.nn.Module):
            def __init__(self, dim: int, **_: Any) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(dim, dim)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layer(x)

        model = timm.create_model("vlonghorn_test", num_classes=3, mixer=MyMixer, **SMALL)
        model(images).sum().backward()
        require(isinstance(model.blocks[0].mixer, MyMixer), "the blocks have another mixer")

    yield Case("libraries/own-mixer", PYTHON, _call(own_mixer), Expect(0))

    def block(kwargs: dict[str, Any]) -> None:
        from vision_longhorn.models.mixers import BidirectionalMixer

        mixer = BidirectionalMixer(12, **kwargs)
        x = torch.randn(2, 7, 12, requires_grad=True)
        out = mixer(x)
        out.sum().backward()
        require(
            out.shape == x.shape and x.grad is not None and x.grad.isfinite().all(), "the block gives another shape"
        )

    for number, kwargs in enumerate(
        ({}, {"rule": "exact"}, {"wiring": "forward"}, {"rule": "mamba", "A_per_token": True}, {"d_state": 1})
    ):
        yield Case(f"libraries/block-{number}", PYTHON, _call(functools.partial(block, kwargs)), Expect(0))


# ----------------------------------------------------------------------------------------------------------- asked for


def _asked() -> Iterator[Case]:
    """A thing that users ask for works, or a command says no in a line, or the docs do."""
    docs = Path(__file__).parents[3]

    def in_docs(words: str) -> None:
        import re

        text = "\n".join(path.read_text() for path in [docs / "README.md", *sorted((docs / "docs").glob("*.md"))])
        require(re.search(words, text), f"the docs say nothing of {words}")

    for name, words in {
        "mps": r"\bMPS\b",
        "rocm": r"ROCm",
        "fp16": r"fp16",
        "tensorrt": r"TensorRT",
        "masked": r"(?i)masked (image|autoencod|pre)|MAE\b",
        "self-supervised": r"(?i)self-supervised|DINO",
        "packed": r"(?i)packed|cu_seqlens",
        "pretrained": r"(?i)pretrained weights",
        "cpu": r"\bCPU\b",
        "onnx": r"ONNX",
        "windows": r"Windows",
    }.items():
        yield Case(f"asked/docs-{name}", PYTHON, _call(functools.partial(in_docs, words)), Expect(0))
    for device in ("mps", "rocm", "xpu", "cuda", "cuda:0", "tpu", "gpu"):
        yield Case(
            f"asked/train-device-{device}",
            "train",
            lambda place, device=device: [*train(place), "--device", device],
            Expect(1),
        )
        make = functools.partial(
            lambda place, device: [*evaluate(place, place.material / "run"), "--device", device], device=device
        )
        yield Case(f"asked/eval-device-{device}", "eval", make, Expect(1))
    for precision in ("fp16", "bf16", "fp8", "tf32", "float16"):
        make = functools.partial(
            lambda place, precision: [*train(place), "--precision", precision], precision=precision
        )
        yield Case(f"asked/train-{precision}", "train", make, Expect(0 if precision == "bf16" else 1))
    for target in ("model.engine", "model.trt", "model.mlpackage", "model.tflite", "model.ts", "model.safetensors"):
        make = functools.partial(lambda place, target: [place.material / "run", target], target=target)
        yield Case(f"asked/export-{target}", "export", make, Expect(1))
