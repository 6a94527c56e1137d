"""Config files and the command line: what is read, what is overridden, and what is said about mistakes."""

import dataclasses
import math

import pytest
import timm
import torch
import yaml
from PIL import Image
from timm.data import create_transform
from vision_longhorn.kernels.mixing import GATES
from vision_longhorn.kernels.rules import NAMES

import vision_longhorn  # noqa: F401, registers the models
from vision_longhorn.data.transforms import input_settings, train_transform
from vision_longhorn.errors import UserError
from vision_longhorn.models.backbone import CLASS_TOKENS, SCAN_ORDERS
from vision_longhorn.models.mixers import MIXERS
from vision_longhorn.models.mixers.state_space import BETAS, CONVS, WIRINGS
from vision_longhorn.models.patch_embed import STEMS
from vision_longhorn.settings import coerce, parse_pairs
from vision_longhorn.train import load_config
from vision_longhorn.training.config import CONFIGS, Config, config_names


@pytest.mark.parametrize("stem", config_names())
def test_every_config_loads_by_its_bare_name_and_makes_its_model(stem):
    config, name = load_config(["--config", stem, "--data", "DIR"])
    assert name == stem
    with torch.device("meta"):
        timm.create_model(config.model, **config.model_kwargs)
    # A file that leaves a value of the recipe to the defaults would change silently with them.
    recipe = {"scale", "auto_augment", "mixup", "cutmix", "smoothing", "repeats", "lr", "lr_base_batch", "weight_decay",
              "batch_size", "epochs", "warmup_epochs", "min_lr", "ema_decay", "clip_grad", "drop_path"}  # fmt: skip
    assert recipe <= yaml.safe_load((CONFIGS / f"{stem}.yaml").read_text()).keys()
    # One's own images have their own classes, which a folder or an index tells. CIFAR-10's shards have no index.
    assert config.num_classes == (10 if stem == "cifar10" else None)


def test_no_config_and_no_data_is_the_demo():
    config, name = load_config(["--epochs", "2"])
    assert (config.data, config.epochs, name) == ("digits", 2, "demo_digits")
    assert load_config(["--data", "digits", "--epochs", "2"]) == (config, name)


def test_none_empties_a_list_and_the_case_of_an_optimisers_name_is_timms():
    config, _ = load_config(["--config", "own_data", "--data", "DIR", "--opt", "SGD", "--opt-betas", "none"])
    assert (config.opt, config.opt_betas) == ("sgd", None)
    for kind in int, bool, float | None:
        with pytest.raises(UserError, match="epochs is"):
            coerce("epochs", ["3"], kind)


def test_data_without_config_takes_the_defaults_and_not_the_demo():
    config, name = load_config(["--data", "DIR"])
    assert (config.data, config.epochs, name) == ("DIR", Config().epochs, "vlonghorn_tiny")


def test_command_line_overrides_the_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("model: vim_tiny\nmodel_kwargs: {img_size: 64, depth: 4}\nlr: 1e-3\nmean: [0, 0.5, 1]\n")
    config, name = load_config([
        "--config", str(file), "--model-kwargs", "img_size=[32,48]", "beta=scalar", "depth=none", "class_token=none",
        "gate=NONE",
        "--batch_size", "64",
        "--std", "0.1", "2e-1", "0.3", "--clip-grad=1", "--auto-augment", "none", "--compile", "--ema-warmup", "false",
    ])  # fmt: skip
    assert name == "mine"
    assert config.model_kwargs == {"img_size": [32, 48], "beta": "scalar", "class_token": "none", "gate": "none"}
    twice = ["--data", "DIR", "--model-kwargs", "img_size=64", "depth=2", "--model-kwargs", "depth=3"]
    assert load_config(twice)[0].model_kwargs == {"img_size": 64, "depth": 3}
    assert (config.model, config.lr, config.batch_size, config.clip_grad) == ("vim_tiny", 1e-3, 64, 1.0)
    assert (config.mean, config.std) == ([0.0, 0.5, 1.0], [0.1, 0.2, 0.3])
    assert (config.auto_augment, config.compile, config.ema_warmup) == (None, True, False)


@pytest.mark.parametrize(
    "policy",
    ["rand-m9-mstd0.5-inc1", "rand", "rand-n3-m7-p0.5-mmax5-tweights", "augmix-m3-w3-d2-a0.5-b1", "original",
     "v0r-mstd0.5", "3a", "cifar10", "none"],
)  # fmt: skip
def test_policies_of_timm_are_taken_as_they_are_and_timm_takes_them(policy):
    config, _ = load_config(["--data", "x", "--auto-augment", policy])
    settings = dict(input_size=(3, 8, 8), interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3)
    assert len(train_transform(settings, config.values()).transforms) >= 4


@pytest.mark.parametrize("interpolation", ("random", "lanczos"))
@pytest.mark.parametrize("policy", ("none", "rand-m9-mstd0.5-inc1", "augmix-m3-w3", "original", "cifar10"))
def test_every_resampling_trains_with_every_policy_and_evaluates(interpolation, policy):
    config, _ = load_config(["--data", "x", "--auto-augment", policy, "--interpolation", interpolation])
    settings = input_settings(timm.create_model("vlonghorn_test"), config.values())
    image = Image.effect_noise((50, 40), 99).convert("RGB")
    train, padded = (
        train_transform(settings, {**config.values(), "crop_padding": padding, "ratio": (1.0, 1.0)})
        for padding in (None, 2)
    )
    for transform in (*[train] * 20, padded, create_transform(**settings)):
        assert transform(image).shape == (3, 96, 96)


def test_a_value_called_none_reaches_the_model():
    """On a command line "none" takes an argument away, except where a model has a value of this name."""
    known = dict(class_token=CLASS_TOKENS, gate=GATES, wiring=WIRINGS, conv=CONVS, stem=STEMS, beta=BETAS)
    for key, words in {**known, "scan_order": SCAN_ORDERS, "rule": NAMES, "mixer": tuple(MIXERS)}.items():
        assert [parse_pairs([f"{key}={word}"]) for word in words] == [{key: word} for word in words]


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--epocs", "3"], ["--epocs", "--epochs"]),
        (["--lr", "fast"], ["lr", "'fast'", "number"]),
        (["--epochs", "1.5"], ["epochs", "1.5", "whole number"]),
        (["--compile", "maybe"], ["compile", "'maybe'", "true or false"]),
        (["--model-kwargs", "img_size"], ["img_size", "KEY=VALUE"]),
        (["--mean", "a", "b", "c"], ["mean", "numbers"]),
        (["--batch-size", "0"], ["batch_size", "0"]),
        (["--device", "gpu"], ["device", "gpu", "cuda"]),
        (["--batch-size", "5", "--mixup", "0.8"], ["batch_size", "5", "even"]),
        (["--config", "nowhere"], ["nowhere", "demo_digits"]),
        (["--resume", "nowhere"], ["nowhere", "config.yaml"]),
        (["digits"], ["digits"]),
        (["--lr"], ["--lr"]),
        (["--num_workers", "1"], ["--num-workers", "--workers"]),
        (["--scale", "1", "0.5"], ["scale", "1.0 0.5", "smaller number first"]),
        (["--scale", "0.5"], ["scale", "2 numbers"]),
        (["--mean", "1", "2", "3", "4"], ["mean", "1 or 3 numbers"]),
        (["--seed", str(2**32)], ["seed", "4294967296"]),  # more than NumPy takes
        (["--lr", "nan"], ["lr", "nan"]),
        (["--epochs", "2", "--warmup-epochs", "2"], ["warmup_epochs", "2", "0.1"]),
        *(
            (["--auto-augment", word], ["auto_augment", repr(word), "rand-m9", "augmix", "original", "none"])
            for word in ("randaugment", "autoaugment", "rand-mx", "rand-m9-n", "rand-m9.5", "augmix-w-1", "3a-x", "-")
        ),
        (["--init", ""], ["--init", "empty word", "leave it out"]),
        (["--init="], ["--init", "empty word"]),
        (["--model-kwargs", "depth=1", ""], ["depth=1", "empty word"]),
    ],
)
def test_mistakes_on_the_command_line_name_value_and_remedy(words, expected):
    with pytest.raises(UserError) as caught:
        load_config(words)
    message = str(caught.value)
    assert all(word in message for word in expected) and "\n" not in message


@pytest.mark.parametrize(
    "argument, instead",
    {"drop_path_rate": "drop_path", "num_classes": "num_classes", "pretrained": "init", "device": "device",
     "name": "model", "path": "arguments", "features_only": "classes"}.items(),
)  # fmt: skip
def test_an_argument_of_the_model_that_has_a_place_of_its_own_is_sent_there(argument, instead, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"model_kwargs: {{{argument}: 1}}\n")
    for words in ["--model-kwargs", f"{argument}=1"], ["--config", str(tmp_path / "mine.yaml")]:
        with pytest.raises(UserError, match=f"^model_kwargs has {argument}: leave it out and give .*{instead}"):
            load_config(["--data", "x", *words])


@pytest.mark.parametrize("option", ["--dropout", "--gpus", "--xyz"])
def test_no_option_is_hinted_at_that_is_not_near(option):
    with pytest.raises(UserError, match=f"^unknown option {option}; --help lists all options$"):
        load_config([option, "1"])


def bounds(allowed):
    """Numbers just beyond a `Range`, and just within it."""
    step = 1 if allowed.kind is int else 1e-6
    low, high = max(allowed.low, allowed.above), min(allowed.high, allowed.below)
    beyond = [end for end in (allowed.above, allowed.below) if math.isfinite(end)]
    beyond += [end + sign * step for end, sign in ((allowed.low, -1), (allowed.high, 1)) if math.isfinite(end)]
    within = [low + step] + ([high - step] if math.isfinite(high) else [])
    return [*beyond, math.nan, math.inf], within


@pytest.mark.parametrize("field", dataclasses.fields(Config), ids=lambda field: field.name)
def test_every_value_of_a_config_has_its_range(field):
    """A number that nobody can mean is refused before anything is made; a new field has to say what it takes."""
    allowed, option = field.metadata["allowed"], f"--{field.name.replace('_', '-')}"
    many = field.metadata["lengths"]
    if allowed is None:
        assert isinstance(getattr(Config(), field.name), (bool, str, dict, type(None))), "a number without a range"
        return
    # What another value of the config forbids is not the matter here.
    free = ["--data", "x", "--mixup", "0", "--cutmix", "0", "--warmup-epochs", "0", "--min-lr", "0"]
    words = ["nonsense"] if isinstance(allowed, tuple) else [f"{number!r}" for number in bounds(allowed)[0]]
    for word in words:
        with pytest.raises(UserError) as caught:
            load_config([*free, option, *[word] * (many[-1] if many else 1)])
        assert str(caught.value).startswith(f"{field.name} is ") and ": give " in str(caught.value)
    for value in allowed if isinstance(allowed, tuple) else bounds(allowed)[1]:
        load_config([*free, option, *[str(value)] * (many[-1] if many else 1)])


def test_a_warm_up_longer_than_the_run_is_shortened_and_said_where_nobody_gave_it():
    config, _ = load_config(["--data", "x", "--epochs", "2"])
    assert config.warmup_epochs == 0.1 and "5 epochs" in config.notes[0] and "0.1" in config.notes[0]
    config, _ = load_config(["--data", "x", "--epochs", "20"])
    assert config.warmup_epochs == 5 and not config.notes


def test_help_shows_groups_and_every_default(capsys):
    with pytest.raises(SystemExit):
        load_config(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "optimiser and schedule:" in text and "fractions of the image [0.08 1.0]" in text
    for field in dataclasses.fields(Config):
        assert f"--{field.name.replace('_', '-')} " in text


@pytest.mark.parametrize(
    "text, expected",
    [
        ("epoch: 3\n", ["'epoch'", "'epochs'"]),
        ("lr: [1]\n", ["lr", "[1]"]),
        ("hflip: 2\n", ["hflip", "2"]),
        ("seed: true\n", ["seed", "True"]),
        ("model_kwargs: [1]\n", ["model_kwargs", "[1]"]),
        ("- a\n", ["mine.yaml"]),
        ("a: b: c\n", ["mine.yaml", "YAML"]),
        ("? [a, b]\n: 1\n", ["mine.yaml", "YAML"]),
        ("lr: 1\nmin_lr: 0\nlr: 2\n", ["mine.yaml", "'lr' stands twice", "line 3"]),
        ("model_kwargs: {depth: 1, depth: 2}\n", ["mine.yaml", "'depth' stands twice"]),
        ("\x00\x01\udcff", ["mine.yaml", "YAML"]),
    ],
)
def test_mistakes_in_a_file_name_value_and_remedy(tmp_path, text, expected):
    file = tmp_path / "mine.yaml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError) as caught:
        load_config(["--config", str(file), "--data", "DIR"])
    message = str(caught.value)
    assert all(word in message for word in expected) and "\n" not in message


def test_no_key_is_hinted_at_that_is_not_near(tmp_path):
    (tmp_path / "mine.yaml").write_text("dropout: 0.1\n")
    with pytest.raises(UserError, match="unknown key 'dropout'; `vision-longhorn train --help` lists all$"):
        load_config(["--config", str(tmp_path / "mine.yaml"), "--data", "DIR"])


def test_merge_keys_of_yaml_are_read(tmp_path):
    (tmp_path / "mine.yaml").write_text("model_kwargs: {<<: {depth: 3}, img_size: 32}\n")
    config, _ = load_config(["--config", str(tmp_path / "mine.yaml"), "--data", "DIR"])
    assert config.model_kwargs == {"depth": 3, "img_size": 32}


def test_a_run_that_was_begun_with_what_is_refused_now_goes_on(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(Config(data="DIR", epochs=2, auto_augment="x").values()))
    config, _ = load_config(["--resume", str(tmp_path)])
    assert (config.warmup_epochs, config.auto_augment) == (5, "x")


def test_a_resumed_run_brings_its_own_config(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(Config(data="DIR", lr=0.5, model="vim_test").values()))
    for path in (tmp_path, tmp_path / "last.pt"):
        config, _ = load_config(["--resume", str(path), "--epochs", "7"])
        assert (config.lr, config.model, config.epochs, config.run_dir) == (0.5, "vim_test", 7, str(tmp_path))
    with pytest.raises(UserError, match="--config"):
        load_config(["--resume", str(tmp_path), "--config", "cifar10"])


def test_what_only_changes_speed_or_writing_does_not_decide_what_comes_out():
    plain = Config(data="DIR", model_kwargs={"depth": 2})
    kwargs = {"depth": 2, "save_states": True}
    other = Config(data="DIR", model_kwargs=kwargs, cuda_graphs=True, keep_in_memory=True, log_interval=1, run_dir="x")
    assert other.values() != plain.values() and other.decisive(other.values()) == plain.decisive(plain.values())
    for change in dict(lr=0.5), dict(data="ELSE"), dict(workers=1), dict(model_kwargs={"depth": 3}), dict(seed=1):
        changed = Config(**{**plain.values(), **change})
        assert changed.decisive(changed.values()) != plain.decisive(plain.values()), change


def test_what_a_run_was_allowed_is_neither_saved_nor_believed(tmp_path):
    config, _ = load_config(["--data", "pipe:cat x.tar", "--allow-pipe"])
    assert config.allow_pipe and "allow_pipe" not in config.values()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**config.values(), "allow_pipe": True}))  # by a stranger
    for words in ["--resume", str(tmp_path)], ["--run-dir", str(tmp_path), "--resume"]:
        assert not load_config(words)[0].allow_pipe
        assert load_config([*words, "--allow-pipe"])[0].allow_pipe
