"""Tests that a file keeps its model whatever its name comes to mean. Files state all arguments of their model. Those of
version 0.1 do not, and mean what the name meant then."""

import json
import shutil

import pytest
import timm
import torch
from safetensors.torch import save_file
from test_train import PLAIN, QUICK, fresh_process_state, no_picture, shards  # noqa: F401  (three are fixtures)
from timm.models import save_for_hf

import eval as eval_script
import train_imagenet
from vision_longhorn import VisionLonghorn, hub
from vision_longhorn.checkpoint import load_checkpoint, save_checkpoint
from vision_longhorn.errors import UserError
from vision_longhorn.loading import load_model
from vision_longhorn.models import names
from vision_longhorn.models.create import create_model
from vision_longhorn.training.init import model_from_weights

# What version 0.1 meant by its names, beside their sizes
CROSS = dict(scan_order="rows_columns", class_token="none", global_pool="avg")
MEANT = {"vlonghorn_test": {}, "vim_test": dict(mixer="mamba")}
for _size in "tiny", "small", "base":
    MEANT |= {
        f"vlonghorn_{_size}": {},
        f"vlonghorn_{_size}_cross": dict(rule="exact", **CROSS),
        f"vlonghorn_{_size}_exact": dict(rule="exact"),
        f"vlonghorn_{_size}_shared": dict(wiring="shared"),
        f"vim_{_size}": dict(mixer="mamba"),
        f"vim_{_size}_cross": dict(mixer="mamba", **CROSS),
    }
for _size in "tiny", "small":
    MEANT[f"vim_{_size}_stride8"] = dict(mixer="mamba", patch_stride=8)
GIVEN = dict(embed_dim=16, depth=2, img_size=32, patch_size=16)


def of_then(name):
    """A model that version 0.1 made by `name` and the arguments GIVEN, and its outputs for `IMAGES`."""
    torch.manual_seed(0)
    model = VisionLonghorn(num_classes=5, **{**MEANT[name], **GIVEN}).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value), alpha=0.1)
    return model, outputs(model)


@torch.no_grad()
def outputs(model):
    return model.eval()(torch.linspace(-2, 2, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32))


def write_checkpoint(path, name, model):
    """A checkpoint as version 0.1 wrote it."""
    config = {"model": name, "model_kwargs": GIVEN}
    state = dict(arch=name, num_classes=5, config=config, state_dict=model.state_dict(), facts={})
    save_checkpoint(path, state)
    return path


def write_folder(path, name, model):
    """A model folder as version 0.1 wrote it."""
    path.mkdir()
    save_file(model.state_dict(), path / "model.safetensors")
    cfg = dict(input_size=[3, 32, 32], fixed_input_size=True, first_conv="patch_embed.proj", classifier="head")
    config = dict(architecture=name, num_classes=5, model_args=GIVEN, pretrained_cfg=cfg)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", MEANT)
def test_what_version_0_1_saved_under_a_name_opens_as_the_model_that_it_was(name, tmp_path):
    model, wanted = of_then(name)
    file, folder = write_checkpoint(tmp_path / "best.pt", name, model), write_folder(tmp_path / "f", name, model)
    loaded = load_model(file)
    assert torch.equal(outputs(loaded.model), wanted)
    assert loaded.name == loaded.model.pretrained_cfg["architecture"] == names.RENAMED.get(name, name)
    opened = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert torch.equal(outputs(opened), wanted)
    for source in file, folder:  # by the name of then, and without the arguments that have to match
        started, _ = model_from_weights(name, source, 5, img_size=32, patch_size=16)
        assert torch.equal(outputs(started), wanted)
    # What is saved now states the same model.
    save_for_hf(opened, str(tmp_path / "again"), safe_serialization=True)
    assert torch.equal(outputs(timm.create_model(f"local-dir:{tmp_path / 'again'}", pretrained=True)), wanted)


def other_meanings(monkeypatch):
    """Lets every name mean another model, with arguments that it did not set before."""
    for own in names.DEFINITIONS.values():
        other = dict(mixer="longhorn", rule="delta", qk_norm=True, wiring="alternate", class_token="first")
        other |= dict(conv="causal", rope=False, mlp_conv=0)
        plain = "stem" in own or "patch_stride" in own  # such a stem takes no patches that overlap
        other |= dict(stem="patch", gate="output") if plain else dict(stem="conv", gate="skip")
        other |= dict(global_pool="max", scan_order="rows", embed_dim=24, depth=3)
        for key, value in other.items():
            monkeypatch.setitem(own, key, value)


@pytest.mark.parametrize("name", [*names.DEFINITIONS])
def test_a_folder_opens_as_it_was_written_whatever_its_name_means_later(name, tmp_path, monkeypatch):
    """Also one that timm writes by itself."""
    model = create_model(name, **GIVEN, num_classes=5)
    wanted = outputs(model)
    save_for_hf(model, str(tmp_path / "folder"), safe_serialization=True)
    stated = json.loads((tmp_path / "folder" / "config.json").read_text())["model_args"]
    assert stated.items() >= {**names.DEFINITIONS[name], **GIVEN, "img_size": [32, 32], "all_arguments": True}.items()
    assert [key for key in stated if key in names.DEFINITIONS[name]] == [*names.DEFINITIONS[name]]  # files compare
    other_meanings(monkeypatch)
    assert create_model(name, **GIVEN).class_token == "first"
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True)
    assert torch.equal(outputs(opened), wanted)
    save_for_hf(opened, str(tmp_path / "again"), safe_serialization=True)
    assert torch.equal(outputs(timm.create_model(f"local-dir:{tmp_path / 'again'}", pretrained=True)), wanted)
    started, _ = model_from_weights(name, tmp_path / "folder", 5, img_size=32, patch_size=16)
    assert torch.equal(outputs(started), wanted)
    features = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True, features_only=True)
    assert [one["num_chs"] for one in features.feature_info.get_dicts()] == [16, 16]


SHORT = [*QUICK, *PLAIN, "--epochs", "1", "--model"]


def train(words, folder):
    run = train_imagenet.main([*words, "--run-dir", str(folder)])
    return run, load_checkpoint(run / "last.pt")


def same_weights(checkpoint, other):
    return all(torch.equal(value, other["state_dict"][key]) for key, value in checkpoint["state_dict"].items())


def test_a_run_goes_on_and_is_read_as_it_began_whatever_its_name_means_later(
    tmp_path,
    shards,  # noqa: F811
    monkeypatch,
    capsys,
):
    words = [*SHORT, "vlonghorn_test", *shards]
    begun, checkpoint = train([*words, "--checkpoint-interval", "2", "--keep-checkpoints", "9"], tmp_path / "run")
    wanted = outputs_of_run(begun)
    given = {"model": "vlonghorn_test", **checkpoint["config"]["model_kwargs"]}
    other_meanings(monkeypatch)
    assert torch.equal(outputs_of_run(begun), wanted)
    hub.save_run_for_hub(begun / "last.pt", tmp_path / "folder")
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True)
    assert all(torch.equal(value, checkpoint["state_dict"][key]) for key, value in opened.state_dict().items())
    found = eval_script.main(["--checkpoint", str(begun / "last.pt"), "--workers", "0", "--device", "cpu"])
    assert found["top1"] == pytest.approx(checkpoint["history"][-1]["val"]["top1"], abs=1e-3)

    shutil.copytree(begun, tmp_path / "copy")
    capsys.readouterr()
    train_imagenet.main(["--resume", str(tmp_path / "copy" / "update-0000002.pt")])
    assert "have changed since it stopped" not in capsys.readouterr().out
    again = load_checkpoint(tmp_path / "copy" / "last.pt")
    assert same_weights(again, checkpoint) and again["model_args"] == checkpoint["model_args"]
    assert {"model": again["arch"], **again["config"]["model_kwargs"]} == given


def outputs_of_run(run):
    model = load_model(run / "last.pt").model.eval()
    side = model.patch_embed.img_size[0]
    with torch.no_grad():
        return model(torch.linspace(-2, 2, 3 * side * side).reshape(1, 3, side, side))


def train_for_0_1(folder, words):
    """A run as version 0.1 left it: its files know `vlonghorn_tiny` alone. Also its model's state at the end."""
    run, end = train([*SHORT, "vlonghorn_tiny_paper", *words, "--checkpoint-interval", "2"], folder)
    for file in run.glob("*.pt"):
        state = load_checkpoint(file)
        del state["model_args"]
        save_checkpoint(
            file, {**state, "arch": "vlonghorn_tiny", "config": {**state["config"], "model": "vlonghorn_tiny"}}
        )
    config, environment = run / "config.yaml", run / "env.json"
    config.write_text(config.read_text().replace("vlonghorn_tiny_paper", "vlonghorn_tiny"))
    environment.write_text(json.dumps({k: v for k, v in json.loads(environment.read_text()).items() if k != "version"}))
    return run, end


def test_runs_of_version_0_1_go_on_as_the_model_that_they_were(tmp_path, shards, capsys):  # noqa: F811
    run, end = train_for_0_1(tmp_path / "run", [*shards, "--keep-checkpoints", "9"])
    assert "model: vlonghorn_tiny\n" in (run / "config.yaml").read_text()
    shutil.copytree(run, tmp_path / "copy")
    capsys.readouterr()
    train_imagenet.main(["--resume", str(tmp_path / "copy" / "update-0000002.pt")])
    said = capsys.readouterr().out
    assert "model   vlonghorn_tiny_paper, " in said and "have changed since it stopped" not in said
    again = load_checkpoint(tmp_path / "copy" / "last.pt")
    assert again["arch"] == again["config"]["model"] == "vlonghorn_tiny_paper"
    assert same_weights(again, end) and again["model_args"] == end["model_args"]
    assert "model: vlonghorn_tiny_paper\n" in (tmp_path / "copy" / "config.yaml").read_text()

    # One that was killed before its first checkpoint, too
    begun = shutil.copytree(run, tmp_path / "begun")
    for file in begun.glob("*.pt"):
        file.unlink()
    train_imagenet.main(["--resume", str(begun)])
    assert same_weights(load_checkpoint(begun / "last.pt"), end)

    # Weights to start from: the name of then, and today's
    for name in "vlonghorn_tiny", "vlonghorn_tiny_paper":
        words = [*SHORT, name, *shards, "--init", str(run / "last.pt"), "--lr", "1e-9", "--min-lr", "0"]
        _, started = train(words, tmp_path / name)
        assert started["arch"] == "vlonghorn_tiny_paper" and started["model_args"] == end["model_args"]
        for key, value in end["state_dict"].items():
            torch.testing.assert_close(started["state_dict"][key], value, rtol=0, atol=1e-6)
    with pytest.raises(UserError, match="these weights have a cls_token, .*called vlonghorn_tiny are those of vlongh"):
        state = {"state_dict": end["state_dict"]}  # which does not tell
        save_checkpoint(tmp_path / "bare.pt", state)
        train([*SHORT, "vlonghorn_tiny", *shards, "--init", str(tmp_path / "bare.pt")], tmp_path / "other")


def test_timm_takes_a_checkpoint_with_the_arguments_that_it_states(tmp_path, shards):  # noqa: F811
    run, end = train([*SHORT, "vlonghorn_tiny_fast", *shards], tmp_path / "run")
    model = timm.create_model(end["arch"], **end["model_args"], checkpoint_path=str(run / "last.pt"))
    assert all(torch.equal(value, end["state_dict"][key]) for key, value in model.state_dict().items())
    assert not load_model(run / "last.pt", "vlonghorn_tiny_fast").model.cls_token


@pytest.mark.parametrize("options", [{}, {"features_only": True}], ids=str)
def test_weights_of_a_former_name_are_told_from_todays(options, tmp_path):
    model, _ = of_then("vlonghorn_tiny")
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    words = "weights that version 0.1 called vlonghorn_tiny are those of vlonghorn_tiny_paper"
    with pytest.raises(RuntimeError, match=words):
        timm.create_model(
            "vlonghorn_tiny", **GIVEN, num_classes=5, checkpoint_path=str(tmp_path / "bare.pt"), **options
        )
    if not options:
        with pytest.raises(UserError, match=words):
            load_model(tmp_path / "bare.pt", "vlonghorn_tiny", num_classes=5, **GIVEN)
        loaded = load_model(tmp_path / "bare.pt", "vlonghorn_tiny_paper", num_classes=5, **GIVEN)
        assert torch.equal(loaded.model.cls_token, model.cls_token)
