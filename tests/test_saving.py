"""Weights in and out of files: the trainer's checkpoints, safetensors, official weights, folders for the hub."""

import argparse
import copy
import json
import os
import pickle

import pytest
import timm
import torch
from PIL import Image
from plain_model import plain_model
from safetensors.torch import load_file, save_file
from scan_cases import relative_rms
from test_official_vim import official_weights, set_directly
from timm.data import resolve_data_config, resolve_input_data_config
from timm.models import get_model_args, resolve_model_input_args, save_for_hf

from vision_longhorn import VisionLonghorn, export, hub, maps
from vision_longhorn import eval as eval_command
from vision_longhorn.checkpoint import save_checkpoint
from vision_longhorn.errors import UserError
from vision_longhorn.loading import load_model
from vision_longhorn.models.vlonghorn import checkpoint_filter_fn
from vision_longhorn.train import load_config
from vision_longhorn.training.init import model_from_weights

SIZES = dict(img_size=(16, 24), patch_size=4, embed_dim=16, depth=2, d_state=4)


def small(name="vlonghorn_test", seed=0, **options):
    """24 patches, two blocks of width 16, every parameter off its initial value."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **{**SIZES, "num_classes": 3, **options}).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value), alpha=0.1)
    return model


@pytest.fixture
def run(tmp_path):
    """A checkpoint as train_imagenet.py writes it: its path, the raw and the averaged model."""
    raw, averaged = small(), small(seed=1)
    cfg, _ = load_config(["--config", "demo_digits"])
    values = {**cfg.values(), "data": str(tmp_path / "shards"), "model_kwargs": SIZES}
    result = {"top1": 91.25, "top5": 99.0, "loss": 0.4, "count": 1360}
    save_checkpoint(
        tmp_path / "best.pt",
        dict(
            arch="vlonghorn_test",
            num_classes=3,
            config=values,
            epoch=7,
            best_metric=91.25,
            optimizer={"state": {}},
            state_dict=raw.state_dict(),
            state_dict_ema=averaged.state_dict(),
            history=[{"epoch": 7, "val": {**result, "top1": 1.0}, "val_ema": result}],
        ),
    )
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "_info.json").write_text(
        json.dumps({"splits": {}, "num_classes": 3, "class_names": ["ash", "beech", "oak"]})
    )
    return tmp_path / "best.pt", raw, averaged


def same(model, expected, size=(16, 24)):
    images = torch.randn(2, 3, *size)
    with torch.no_grad():
        return torch.equal(model.eval()(images), expected(images))


# Into a model


def test_checkpoint_of_the_trainer_and_its_raw_weights(run, tmp_path):
    path, raw, averaged = run
    options = dict(num_classes=3, **SIZES)
    assert same(timm.create_model("vlonghorn_test", checkpoint_path=str(path), **options), averaged)
    model = timm.create_model("vlonghorn_test", **options)
    timm.models.load_checkpoint(model, str(path), use_ema=False)
    assert same(model, raw)


def as_validate_does(model, checkpoint="", use_ema=False, **given):
    """What timm's validate.py makes of its command line: a model, and how it sees images."""
    arguments = dict(pretrained=not checkpoint, num_classes=None, global_pool=None, scriptable=False) | given
    made = timm.create_model(**resolve_model_input_args(model, {}, **arguments))
    if checkpoint:
        timm.models.load_checkpoint(made, checkpoint, use_ema)
    return made, resolve_input_data_config(made, {}, use_test_size=True)


def test_validate_of_timm_takes_a_run_and_its_folder(run, tmp_path):
    path, raw, averaged = run
    for use_ema, right in ((True, averaged), (False, raw)):
        made, _ = as_validate_does("vlonghorn_test", str(path), use_ema, num_classes=3, **SIZES)
        assert same(made, right)
    hub.main([str(path), str(tmp_path / "folder")])
    made, settings = as_validate_does(f"local-dir:{tmp_path / 'folder'}")
    assert same(made, averaged) and made.num_classes == 3
    assert tuple(settings["input_size"]) == (3, 16, 24) and settings["crop_pct"] == 1.0
    assert list(settings["mean"]) == [0.3] * 3 and list(settings["std"]) == [0.4] * 3


def test_safetensors(tmp_path):
    source, path = small(), str(tmp_path / "model.safetensors")
    save_file(source.state_dict(), path)
    assert same(timm.create_model("vlonghorn_test", checkpoint_path=path, num_classes=3, **SIZES), source)
    overlay = dict(file=path, num_classes=3)
    options = dict(pretrained=True, pretrained_cfg_overlay=overlay, **SIZES)
    assert same(timm.create_model("vlonghorn_test", num_classes=3, **options), source)
    assert timm.create_model("vlonghorn_test", num_classes=5, **options).head.out_features == 5


OFFICIAL = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, d_state=4, num_classes=5)


@pytest.mark.parametrize("kind", ("pth", "wrapped", "safetensors"))
def test_official_weights_through_checkpoint_path(kind, tmp_path):
    weights, path = official_weights(), str(tmp_path / f"official.{kind}")
    if kind == "safetensors":
        save_file(weights, path)
    else:
        torch.save({"model": weights, "epoch": 300} if kind == "wrapped" else weights, path)
    model = timm.create_model("vim_test", checkpoint_path=path, **OFFICIAL)
    assert same(model, set_directly(timm.create_model("vim_test", **OFFICIAL).eval(), weights), (32, 32))
    p = {name: value.double() for name, value in model.named_parameters()}
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert relative_rms(model(images), plain_model(p, images.double(), model)) < 1e-5
    with pytest.raises(RuntimeError, match="official Vision Mamba"):
        timm.create_model("vlonghorn_test", checkpoint_path=path, **OFFICIAL)


def test_official_weights_feed_features_only(tmp_path):
    torch.save(official_weights(), tmp_path / "official.pth")
    options = dict(OFFICIAL, checkpoint_path=str(tmp_path / "official.pth"))
    model = timm.create_model("vim_test", features_only=True, out_indices=(0,), **options).eval()
    images = torch.randn(1, 3, 32, 32)
    whole = timm.create_model("vim_test", **options).eval()
    assert torch.equal(model(images)[0], whole.forward_intermediates(images, [0], intermediates_only=True)[0])


def test_official_weights_into_a_part_of_a_model_and_into_its_copies():
    weights = official_weights()
    expected = set_directly(timm.create_model("vim_test", **OFFICIAL).eval(), weights)
    backbone = timm.create_model("vim_test", **OFFICIAL)
    whole = torch.nn.ModuleDict({"backbone": backbone, "layers": torch.nn.Linear(2, 2)})
    given = {f"backbone.{name}": value for name, value in weights.items()}
    given |= {f"layers.{name}": value for name, value in whole["layers"].state_dict().items()}
    names = set(given)
    whole.load_state_dict(given)
    assert set(given) == names and same(backbone, expected, (32, 32))
    for twin in copy.deepcopy(backbone), pickle.loads(pickle.dumps(backbone)):
        for value in twin.parameters():
            value.data.zero_()
        twin.load_state_dict(weights)
        assert same(twin, expected, (32, 32))
    own = {name: torch.zeros_like(value) for name, value in backbone.state_dict().items()}
    backbone.load_state_dict(own)
    assert not any(value.any() for value in backbone.parameters())


# Position embeddings of grids that are no square


def from_file(source, path, **options):
    torch.save(source.state_dict(), path)
    overlay = dict(file=str(path), num_classes=3, **options.pop("overlay", {}))
    return timm.create_model(
        "vlonghorn_test", pretrained=True, pretrained_cfg_overlay=overlay, **{**SIZES, "num_classes": 3, **options}
    ).eval()


@pytest.mark.parametrize("has,words", [("middle", "have a cls_token.*'middle'"), ("none", "have no cls_token.*'none'")])
def test_weights_with_another_kind_of_class_token_are_an_error(tmp_path, has, words):
    source = small(class_token=has, global_pool="avg")
    with pytest.raises(RuntimeError, match=words):
        from_file(source, tmp_path / "model.pt", class_token="none" if has == "middle" else "middle", global_pool="avg")


@pytest.mark.parametrize(
    "source,target,words",
    [
        (dict(stem="conv"), {}, "with stem='conv', patch_size=4, and this one has stem='patch'"),
        ({}, dict(stem="conv"), "with stem='patch', and this one has stem='conv', patch_size=4"),
        (
            dict(stem="conv"),
            dict(stem="conv", patch_size=8),
            "patch_size=4, and this one has stem='conv', patch_size=8",
        ),
    ],
    ids=("conv", "patch", "other patches"),
)
def test_weights_with_another_stem_are_an_error(source, target, words, tmp_path):
    weights = small(**source)
    with pytest.raises(RuntimeError, match=words):
        from_file(weights, tmp_path / "model.pt", **target)
    with pytest.raises(RuntimeError, match=words):
        timm.create_model(
            "vlonghorn_test", features_only=True, checkpoint_path=str(tmp_path / "model.pt"), **{**SIZES, **target}
        )
    with pytest.raises(UserError, match=words):
        model_from_weights("vlonghorn_test", tmp_path / "model.pt", 3, **{**SIZES, **target})


def test_a_stem_of_convolutions_takes_weights_of_other_images():
    source = small(stem="conv")
    state = {"state_dict": source.state_dict(), "num_classes": 3, "input_size": (3, 16, 24)}
    options = dict(SIZES, stem="conv", num_classes=3, pretrained=True, pretrained_cfg_overlay=state)
    grey = timm.create_model("vlonghorn_test", **{**options, "in_chans": 1})
    first = source.patch_embed.proj[0].weight.sum(1, keepdim=True)
    torch.testing.assert_close(grey.get_submodule(grey.pretrained_cfg["first_conv"]).weight, first)
    large = timm.create_model("vlonghorn_test", **{**options, "img_size": (32, 20)})
    source.set_input_size((32, 20))
    assert same(large, source, (32, 20))


def test_a_grid_that_nothing_tells_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="24 patches, which is no square.*input_size"):
        from_file(small(), tmp_path / "model.pt", img_size=32)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(img_size=(32, 48)),
        dict(img_size=20),
        dict(img_size=(24, 16)),
        dict(img_size=(32, 48), patch_size=8),
        dict(patch_stride=2),
    ],
)
def test_weights_of_a_wide_image_at_another_size(sizes, tmp_path):
    source = small()
    source.pretrained_cfg["input_size"] = (3, 16, 24)  # newer timm does it by itself
    save_for_hf(source, str(tmp_path / "folder"), model_args=SIZES)
    model = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True, **sizes).eval()
    expected = copy.deepcopy(source)
    expected.set_input_size(**sizes)
    assert same(model, expected, model.patch_embed.img_size)
    if sizes["img_size" if "img_size" in sizes else "patch_stride"] != (24, 16):  # as many patches: nothing tells
        model = from_file(source, tmp_path / "model.pt", overlay=dict(input_size=(3, 16, 24)), **sizes)
        assert same(model, expected, model.patch_embed.img_size)


def test_as_many_patches_are_taken_for_the_same_grid(tmp_path):
    """224 x 224 and 112 x 448 pixels are as many patches, and the configuration speaks of the first."""
    options = dict(img_size=(48, 192), patch_size=16)  # the configuration's 96 x 96 are as many
    source = small(**options)
    assert same(from_file(source, tmp_path / "model.pt", **options), source, (48, 192))


def test_overlapping_patches_of_a_wide_image_at_another_size(tmp_path):
    source = small(patch_stride=2)
    source.pretrained_cfg["input_size"] = (3, 16, 24)
    save_for_hf(source, str(tmp_path / "folder"), model_args=dict(SIZES, patch_stride=2))
    model = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True, img_size=(20, 20)).eval()
    source.set_input_size(img_size=(20, 20))
    assert model.patch_embed.grid_size == (9, 9) and same(model, source, (20, 20))


def test_the_filter_alone_asks_for_no_configuration():
    square = small(img_size=20)
    target = VisionLonghorn(**{**SIZES, "img_size": (32, 48), "num_classes": 3})
    target.load_state_dict(checkpoint_filter_fn(square.state_dict(), target))
    square.set_input_size(img_size=(32, 48))
    assert same(target, square, (32, 48))
    with pytest.raises(RuntimeError, match="no square"):
        checkpoint_filter_fn(small().state_dict(), target)


# Out of a model


@pytest.mark.parametrize(
    "name,options",
    [
        ("vlonghorn_test", dict(rule="exact", class_token="last")),
        ("vlonghorn_test", dict(wiring="shared", in_chans=1, stem="conv")),
        ("vim_test", dict(patch_stride=2, global_pool="avg", wiring="alternate")),
    ],
)
def test_folder_in_the_layout_of_the_hub_gives_the_model_back(name, options, tmp_path):
    source = small(name, **options)
    overlay = dict(
        mean=[0.1, 0.2, 0.3],
        std=[0.4, 0.5, 0.6],
        interpolation="bilinear",
        crop_pct=1.0,
        input_size=[options.get("in_chans", 3), 16, 24],
    )
    source.pretrained_cfg.update(overlay)
    save_for_hf(
        source,
        str(tmp_path),
        model_config=dict(label_names=["ash", "beech", "oak"]),
        model_args={**SIZES, **options},
        safe_serialization=True,
    )
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(2, options.get("in_chans", 3), 16, 24)
    with torch.no_grad():
        assert torch.equal(model(images), source(images))
    data = resolve_data_config(model=model)
    assert list(data["input_size"]) == overlay["input_size"] and data["interpolation"] == "bilinear"
    if "in_chans" not in options:
        assert [list(data["mean"]), list(data["std"]), data["crop_pct"]] == [overlay["mean"], overlay["std"], 1.0]
    assert model.num_classes == 3 and model.pretrained_cfg["label_names"] == ["ash", "beech", "oak"]
    tuned = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=9)
    assert torch.equal(tuned.blocks[1].mixer.D, source.blocks[1].mixer.D) and tuned.head.out_features == 9


def test_a_resized_model_is_saved_as_it_is(tmp_path):
    source = small()
    sizes = dict(img_size=(24, 20), patch_size=8, patch_stride=4)
    source.set_input_size(**sizes)
    source.reset_classifier(4, "max")
    arguments = {**SIZES, **sizes, "global_pool": "max"}
    save_for_hf(source, str(tmp_path), model_args=arguments, safe_serialization=True)
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert model.patch_embed.grid_size == (5, 4) and same(model, source.eval(), (24, 20))


def test_command_makes_a_folder_of_a_run(run, tmp_path, monkeypatch):
    path, _, averaged = run
    monkeypatch.chdir(tmp_path)
    hub.main([str(tmp_path), str(tmp_path / "folder")])
    model = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True)
    assert same(model, averaged)
    data = resolve_data_config(model=model)
    assert list(data["mean"]) == [0.3] * 3 and list(data["std"]) == [0.4] * 3 and data["crop_pct"] == 1.0
    assert tuple(data["input_size"]) == (3, 16, 24) and model.pretrained_cfg["label_names"] == ["ash", "beech", "oak"]
    card = (tmp_path / "folder" / "README.md").read_text()
    count = sum(value.numel() for value in averaged.parameters())
    for words in (
        f"{count:,}",
        "91.25 % of 1,360 images",
        "7 of 12 epochs",
        "not yet run",
        "import vision_longhorn",
        "library_name: timm",
        "license: unknown",
        "16 x 24",
        "@inproceedings",
    ):
        assert words in card, words
    assert "transformers" not in card and str(tmp_path) not in card
    assert "license" not in (tmp_path / "folder" / "config.json").read_text()
    # The card's own lines load the model.
    lines = card.split("```python\n")[1].split("```")[0].replace("image.png", str(tmp_path / "image.png"))
    Image.new("L", (50, 40)).save(tmp_path / "image.png")
    scope = {}
    exec(lines, scope)
    assert scope["scores"].shape == (1, 3)
    before = card
    with pytest.raises(UserError, match="there already"):
        hub.main([str(path), str(tmp_path / "folder")])
    assert (tmp_path / "folder" / "README.md").read_text() == before


@pytest.mark.parametrize(
    "place,shown",
    [
        ("/home/me/photos/", "photos"),
        ("~/trees/train-{000000..000009}.tar", "train-{000000..000009}.tar"),
        ("C:\\Users\\me\\photos", "photos"),
        ("..", ".."),
        ("https://me:secret@example.org/train-{0..9}.tar?token=secret", "shards from a URL or a command"),
        ("pipe:cat /home/me/train.tar", "shards from a URL or a command"),
        ("digits", "digits"),
    ],
)
def test_the_card_says_of_the_data_what_is_nobodys_secret(place, shown, run):
    model, checkpoint = hub.load_run(run[0])
    checkpoint["config"].update(data=place, val_data=place)
    details = hub.model_card(model, "hf-hub:someone/trees", checkpoint)["details"]
    assert details["Training data"] == shown and f"split 'val' of {shown}, after" in details["Top-1"]


def test_transformers_makes_the_model_of_a_folder(run, tmp_path):
    """Its TimmWrapper hands timm the number of classes, and beside it the model's arguments."""
    path, _, averaged = run
    hub.main([str(path), str(tmp_path / "folder")])
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    model = timm.create_model(config["architecture"], num_classes=config["num_classes"], **config["model_args"])
    model.load_state_dict(load_file(tmp_path / "folder" / "model.safetensors"))
    assert same(model, averaged)
    assert len(config["label_names"]) == config["num_classes"] == 3


def test_synsets_get_their_words(run, tmp_path):
    path, *_ = run
    save_checkpoint(path, torch.load(path) | dict(class_names=["n01440764", "n01443537", "n01484850"]))
    hub.main([str(path), str(tmp_path / "folder")])
    cfg = timm.create_model(f"local-dir:{tmp_path / 'folder'}").pretrained_cfg
    assert cfg["label_names"][1] == "n01443537" and cfg["label_descriptions"]["n01443537"] == "goldfish"


@pytest.mark.parametrize("prefix", ["", "local-dir:"])
def test_tools_take_a_folder_as_they_take_a_run(prefix, run, tmp_path):
    path, _, averaged = run
    hub.main([str(path), str(tmp_path / "folder")])
    source = f"{prefix}{tmp_path / 'folder'}"
    loaded = load_model(eval_command.parse([source]).run)
    assert same(loaded.model, averaged)
    assert (loaded.name, loaded.weights, loaded.file) == (f"local-dir:{tmp_path / 'folder'}", "pretrained", None)
    args = argparse.Namespace(model=source, is_run=True, img_size=None, model_kwargs=None)
    assert same(export._load(args)[0], averaged)
    model, text = model_from_weights("vlonghorn_test", source, 3, **SIZES)
    assert same(model, averaged) and "resampled" not in text and "anew" not in text
    sizes = SIZES | dict(img_size=(24, 16))
    model, text = model_from_weights("vlonghorn_test", source, 5, **sizes)
    of_run, _ = model_from_weights("vlonghorn_test", path, 5, **sizes)
    assert torch.equal(model.pos_embed, of_run.pos_embed) and "classifier of 5 classes anew" in text
    assert "state_dict" not in model.pretrained_cfg
    with pytest.raises(UserError, match="another model .vlonghorn_test."):
        model_from_weights("vim_test", source, 3, **SIZES)
    with pytest.raises(UserError, match="is no run of train_imagenet.py"):
        export.main([source, f"{tmp_path}/other/"])


def test_maps_of_a_folder_are_those_of_the_run(run, tmp_path):
    hub.main([str(run[0]), str(tmp_path / "folder")])
    Image.linear_gradient("L").save(tmp_path / "image.png")
    for source in ("best.pt", "folder"):
        words = [str(tmp_path / source), str(tmp_path / "image.png"), "--layers", "0"]
        maps.main([*words, "--out", str(tmp_path / f"{source}.png")])
    assert (tmp_path / "best.pt.png").read_bytes() == (tmp_path / "folder.png").read_bytes()


def test_a_run_folder_is_a_place_to_start_from(run):
    path, _, averaged = run
    assert same(model_from_weights("vlonghorn_test", path.parent, 3, **SIZES)[0], averaged)


def test_a_file_tells_all_arguments_of_its_model_but_those_of_training(tmp_path):
    options = dict(norm_eps=0.1, d_state=3, drop_rate=0.3, save_states=True)
    model = small(**options)
    save_checkpoint(
        tmp_path / "model.pt",
        dict(arch="vlonghorn_test", model_args=get_model_args(model), num_classes=3, state_dict=model.state_dict(),
             config=dict(model_kwargs={**SIZES, **options})),
    )  # fmt: skip
    sizes = {key: SIZES[key] for key in ("img_size", "patch_size")}
    found, _ = model_from_weights("vlonghorn_test", tmp_path / "model.pt", 3, **sizes)
    images = torch.randn(2, 3, 16, 24)
    assert torch.equal(found.eval()(images), model.eval()(images))
    assert found.head_drop.p == 0 and not found.blocks[0].mixer.save_states


def test_the_licence_is_the_users_to_give(run, tmp_path):
    hub.main([str(tmp_path), str(tmp_path / "folder"), "--license", "cc-by-4.0"])
    assert "license: cc-by-4.0" in (tmp_path / "folder" / "README.md").read_text()
    assert timm.create_model(f"local-dir:{tmp_path / 'folder'}").pretrained_cfg["license"] == "cc-by-4.0"


def test_others_may_read_the_folder_as_the_umask_says(run, tmp_path):
    before = os.umask(0o027)
    try:
        hub.main([str(tmp_path), str(tmp_path / "folder")])
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "folder").iterdir()} == {0o640}


def test_names_of_classes_are_those_that_the_run_was_trained_with(run, tmp_path):
    path, *_ = run
    state = torch.load(path)
    state |= dict(class_names=["n1", "n2", "n3"], display_names=["Esche", "Buche", "Eiche"], history=[])
    save_checkpoint(path, state)
    hub.main([str(path), str(tmp_path / "folder")])
    cfg = timm.create_model(f"local-dir:{tmp_path / 'folder'}").pretrained_cfg
    assert cfg["label_names"] == ["n1", "n2", "n3"]
    assert cfg["label_descriptions"] == {"n1": "Esche", "n2": "Buche", "n3": "Eiche"}
    assert "Top-1" not in (tmp_path / "folder" / "README.md").read_text()  # its first epoch was not finished


def test_nothing_is_left_where_saving_fails(run, tmp_path, monkeypatch):
    (tmp_path / "folder.tmp").mkdir()  # someone's own
    monkeypatch.setattr("timm.models._hub.generate_readme", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hub.main([str(tmp_path), str(tmp_path / "folder")])
    assert [path.name for path in tmp_path.glob("folder*")] == ["folder.tmp"]


@pytest.mark.parametrize(
    "words,message",
    [
        (["best.pt/folder"], "best.pt/folder cannot be written"),
        (["folder", "--license", "My Own"], "--license is 'My Own'"),
        (["folder", "--licence", "mit"], "nearest known one is --license"),
        ([], "required: target"),
    ],
)
def test_what_the_command_cannot_use_is_named(words, message, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        hub.main([".", *words])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "shards"]


@pytest.mark.parametrize("config", [None, "a.yaml", {"model_kwargs": None}, {"data": {"root": "x"}}])
def test_a_config_that_is_not_ours_does_not_matter(config, tmp_path):
    model = small()
    torch.save({"state_dict": model.state_dict(), "config": config}, tmp_path / "other.pt")
    loaded = load_model(tmp_path / "other.pt", "vlonghorn_test", num_classes=3, **SIZES)
    assert all(torch.equal(value, loaded.model.state_dict()[key]) for key, value in model.state_dict().items())


def test_a_bare_state_dict_is_no_run(tmp_path):
    torch.save(small().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(UserError, match="which model"):
        hub.load_run(tmp_path / "weights.pt")


def test_card_of_a_model_without_a_run():
    card = hub.model_card(timm.create_model("vim_test"), "hf-hub:someone/vim")
    assert card["details"]["ImageNet-1k top-1"] == "not yet run" and "Top-1" not in card["details"]
    assert "mamba" in card["details"]["Mixer"]
