"""What code built on timm asks of a backbone, beside what test_models.py and test_ops.py check.

`run_timm_suite.py` runs timm's own model tests on every name; these here need neither its repository nor the network.
"""

import copy

import pytest
import run_timm_suite
import timm
import torch
from timm.data import resolve_data_config
from timm.models import is_model_pretrained, save_for_hf
from timm.models._features import FeatureGetterNet

import vision_longhorn  # noqa: F401  (registers the models)

DEPTH = 4
SIZES = dict(img_size=32, patch_size=8, embed_dim=32, depth=DEPTH, num_classes=5)
MODELS = ("vlonghorn_test", "vim_test")
both_models = pytest.mark.parametrize("name", MODELS)


def small(name="vlonghorn_test", **options):
    """16 patches, 4 blocks of width 32, 5 classes, every parameter off its initial value."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SIZES, **options}).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value), alpha=0.1)
    return model


def from_file(folder, source, name="vlonghorn_test", **options):
    """A model that takes the weights of `source` from a file, as timm takes pretrained ones."""
    torch.save(source.state_dict(), folder / "weights.pth")
    overlay = dict(file=str(folder / "weights.pth"), num_classes=source.num_classes)
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **{**SIZES, **options}).eval()


def streams_of(model):
    """A list that each forward pass fills with what the blocks give, in order."""
    found = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, out: found.append(out))
    return found


# Head and pooling


@both_models
@pytest.mark.parametrize("pool", ("token", "avg", "max"))
def test_features_and_head_make_up_the_model(name, pool):
    model, images = small(name, global_pool=pool), torch.randn(2, 3, 32, 32)
    features = model.forward_features(images)
    assert features.shape == (2, 17, model.num_features)
    pooled = model.forward_head(features, pre_logits=True)
    assert pooled.shape == (2, model.head_hidden_size)
    expected = model(images)
    assert expected.shape == (2, 5)
    assert torch.equal(model.forward_head(features), expected)
    assert torch.equal(model.get_classifier()(pooled), expected)


@both_models
def test_model_made_without_a_head(name):
    whole, images = small(name), torch.randn(2, 3, 32, 32)
    features = whole.forward_features(images)
    pooled = whole.forward_head(features, pre_logits=True)
    for options, expected in ((dict(), pooled), (dict(global_pool=""), features)):
        model = small(name, num_classes=0, **options)
        assert model.num_classes == 0 and isinstance(model.get_classifier(), torch.nn.Identity)
        missing = model.load_state_dict(whole.state_dict(), strict=False)
        assert not missing.missing_keys and set(missing.unexpected_keys) == {"head.weight", "head.bias"}
        assert torch.equal(model(images), expected)


# Features of single blocks


@both_models
@pytest.mark.parametrize("class_token,index", [("first", 0), ("middle", 8), ("last", 16)])
@pytest.mark.parametrize("indices,taken", [(None, [0, 1, 2, 3]), (2, [2, 3]), ([-3, -1], [1, 3]), ([0, 2], [0, 2])])
def test_intermediates_are_what_the_blocks_give(name, class_token, index, indices, taken):
    model, images = small(name, class_token=class_token), torch.randn(2, 3, 32, 32)
    streams = streams_of(model)
    maps = model.forward_intermediates(images, indices=indices, intermediates_only=True)
    assert len(streams) == DEPTH
    for found, stream in zip(maps, [streams[i] for i in taken], strict=True):
        patches = stream[:, [i for i in range(17) if i != index]]
        assert torch.equal(found, patches.transpose(1, 2).reshape(2, 32, 4, 4))

    streams.clear()
    pairs = model.forward_intermediates(
        images, indices=indices, output_fmt="NLC", return_prefix_tokens=True, stop_early=True, intermediates_only=True
    )
    assert len(streams) == taken[-1] + 1  # the blocks behind the last one asked for did not run
    for (patches, token), stream in zip(pairs, [streams[i] for i in taken], strict=True):
        assert torch.equal(patches, stream[:, [i for i in range(17) if i != index]])
        assert torch.equal(token, stream[:, index : index + 1])


def test_intermediates_by_dinos_name():
    model, images = small(), torch.randn(2, 3, 32, 32)
    expected = model.forward_intermediates(
        images, [1, 3], return_prefix_tokens=True, norm=True, output_fmt="NLC", intermediates_only=True
    )
    found = model.get_intermediate_layers(images, [1, 3], return_prefix_tokens=True, norm=True)
    for pair, right in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(pair, right, strict=True))
    (maps,) = model.get_intermediate_layers(images, reshape=True)
    assert torch.equal(maps, model.forward_intermediates(images, 1, intermediates_only=True)[0])


def test_intermediates_that_are_not_there_are_refused():
    model, images = small(), torch.randn(1, 3, 32, 32)
    with pytest.raises(AssertionError):
        model.forward_intermediates(images, indices=[DEPTH])
    with pytest.raises(ValueError, match="output_fmt='NHWC'"):
        model.forward_intermediates(images, output_fmt="NHWC")


@both_models
def test_checkpointed_intermediates_train_alike(name):
    model, images, found = small(name), torch.randn(2, 3, 32, 32), []
    calls = []
    model.blocks[1].mixer.in_proj.register_forward_hook(lambda *_: calls.append(1))
    for enable, runs in ((False, 1), (True, 2)):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        calls.clear()
        final, maps = model.forward_intermediates(images, indices=[1, 3])
        (final.square().mean() + sum(part.square().mean() for part in maps)).backward()
        assert len(calls) == runs
        found.append({key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None})
    assert set(found[0]) == {key for key, _ in model.named_parameters() if not key.startswith("head")}
    for key, grad in found[0].items():
        assert torch.equal(grad, found[1][key]), key


@pytest.mark.parametrize("indices,taken", [(1, [3]), ([-3], [1]), ([0, 2], [0, 2])])
def test_pruned_model_still_gives_its_features(indices, taken):
    model, images = small(), torch.randn(2, 3, 32, 32)
    expected = model.forward_intermediates(images, taken, norm=True, intermediates_only=True)
    assert model.prune_intermediate_layers(indices) == taken
    assert len(model.blocks) == taken[-1] + 1 and model.num_classes == 0
    # Their indices are now counted from the first block, and the norm stays unless asked away.
    for found, right in zip(
        model.forward_intermediates(images, taken, norm=True, intermediates_only=True), expected, strict=True
    ):
        assert torch.equal(found, right)
    assert torch.equal(model(images), model.forward_features(images))

    model = small()
    head = model.head.weight
    model.prune_intermediate_layers(indices, prune_head=False)
    assert model.head.weight is head and model(images).shape == (2, 5)


@both_models
@pytest.mark.parametrize(
    "options,taken",
    [
        (dict(), [1, 2, 3]),
        (dict(out_indices=2), [2, 3]),
        (dict(out_indices=(-4, -2)), [0, 2]),
        (dict(out_indices=[1]), [1]),
    ],
)
def test_features_only_takes_blocks_from_either_end(name, options, taken):
    whole, model = small(name), small(name, features_only=True, **options)
    info = model.feature_info
    assert info.channels() == [32] * len(taken) and info.reduction() == [8] * len(taken)
    assert info.module_name() == [f"blocks.{i}" for i in taken] and list(model.out_indices) == taken
    model.model.load_state_dict(whole.state_dict(), strict=False)
    images = torch.randn(2, 3, 32, 32)
    expected = whole.forward_intermediates(images, taken, intermediates_only=True)
    maps = model(images)
    for found, right in zip(maps, expected, strict=True):
        assert torch.equal(found, right)
    # What has no part in the features is gone: DistributedDataParallel stops at parameters that get no gradient.
    sum(part.square().mean() for part in maps).backward()
    assert [key for key, value in model.named_parameters() if value.grad is None] == []
    assert len(model.model.blocks) == taken[-1] + 1


@pytest.mark.parametrize("depth", (1, 2))
def test_features_only_of_few_blocks_takes_all_of_them(depth):
    assert list(small(depth=depth, features_only=True).out_indices) == list(range(depth))


def test_features_with_norm_at_any_image_size():
    whole = small(dynamic_img_size=True)
    model = FeatureGetterNet(copy.deepcopy(whole), out_indices=(0, 3), norm=True)
    for height, width in ((32, 32), (24, 56)):
        images = torch.randn(2, 3, height, width)
        streams = whole.forward_intermediates(images, [0, 3], intermediates_only=True)
        for found, stream in zip(model(images), streams, strict=True):
            assert found.shape == (2, 32, height // 8, width // 8)
            torch.testing.assert_close(found, whole.norm(stream.movedim(1, -1)).movedim(-1, 1))


# Pretrained weights and their configuration


@both_models
@pytest.mark.parametrize("channels", (1, 6))
def test_weights_of_three_channels_fit_other_images(name, channels, tmp_path):
    """Grey images give what they gave as three equal channels; six channels share the weights of the three."""
    source = small(name)
    model = from_file(tmp_path, source, name, in_chans=channels)
    images = torch.randn(2, 3, 32, 32)
    if channels == 1:
        images = images[:, :1]
        expected = source(images.expand(-1, 3, -1, -1))
    else:
        expected = source(images)
        images = images.repeat(1, 2, 1, 1)
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)


@both_models
def test_weights_of_other_classes_leave_a_new_head(name, tmp_path):
    source, images = small(name), torch.randn(2, 3, 32, 32)
    features = source.forward_features(images)
    assert torch.equal(from_file(tmp_path, source, name)(images), source(images))
    for classes in (7, 0):
        model = from_file(tmp_path, source, name, num_classes=classes)
        assert model.num_classes == classes and torch.equal(model.forward_features(images), features)
        assert model(images).shape == (2, classes or 32)


def test_weights_feed_features_only(tmp_path):
    source, images = small(), torch.randn(2, 3, 32, 32)
    model = from_file(tmp_path, source, features_only=True, out_indices=(0, 1))
    expected = source.forward_intermediates(images, [0, 1], intermediates_only=True)
    for found, right in zip(model(images), expected, strict=True):
        assert torch.equal(found, right)


@both_models
def test_a_checkpoint_of_the_whole_model_feeds_features_only(name, tmp_path):
    whole, images, path = small(name), torch.randn(2, 3, 32, 32), str(tmp_path / "best.pt")
    raw = {key: torch.zeros_like(value) for key, value in whole.state_dict().items()}
    torch.save(dict(arch=name, state_dict=raw, state_dict_ema=whole.state_dict()), path)
    options = dict(SIZES, features_only=True, out_indices=(0, 2))
    model = timm.create_model(name, checkpoint_path=path, **options).eval()
    expected = whole.forward_intermediates(images, [0, 2], intermediates_only=True)
    assert all(map(torch.equal, model(images), expected))
    timm.models.load_checkpoint(model, path, use_ema=False)
    assert not any(value.any() for value in model.parameters())
    # As part of a larger module, copied, and with its own names.
    larger = torch.nn.ModuleDict({"backbone": copy.deepcopy(model)})
    larger.load_state_dict({f"backbone.{key}": value for key, value in whole.state_dict().items()})
    model.load_state_dict(larger["backbone"].state_dict())
    assert all(map(torch.equal, model(images), expected))


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(depth=5), "Unexpected.*blocks.4"),
        (dict(embed_dim=16), "size mismatch"),
    ],
)
def test_a_checkpoint_of_another_model_feeds_no_features(options, message, tmp_path):
    torch.save(small(**options).state_dict(), tmp_path / "weights.pth")
    with pytest.raises(RuntimeError, match=message):
        small(features_only=True, out_indices=(0, 1), checkpoint_path=str(tmp_path / "weights.pth"))


@both_models
def test_model_comes_back_from_its_folder(name, tmp_path):
    """The layout of a model on the Hugging Face hub, as timm writes it."""
    source, images = small(name, class_token="last", global_pool="avg"), torch.randn(2, 3, 32, 32)
    save_for_hf(
        source, str(tmp_path), model_args=dict(img_size=32, patch_size=8, embed_dim=32, depth=DEPTH, class_token="last")
    )
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert model.num_classes == 5 and model.global_pool == "avg"
    assert torch.equal(model(images), source(images))


@both_models
def test_configuration_by_tag(name):
    model = timm.create_model(f"{name}.untrained")
    cfg = model.pretrained_cfg
    assert cfg["architecture"] == name and cfg["tag"] == "untrained" and cfg["num_classes"] == model.num_classes == 1000
    assert not is_model_pretrained(f"{name}.untrained")
    with pytest.raises(RuntimeError, match="nowhere"):
        timm.create_model(f"{name}.nowhere")
    with pytest.raises(RuntimeError, match="[Nn]o pretrained weights"):
        timm.create_model(f"{name}.untrained", pretrained=True)
    data = resolve_data_config(model=model)
    assert data["input_size"] == (3, 96, 96) and data["interpolation"] == "bicubic"
    assert data["mean"] == (0.485, 0.456, 0.406) and data["std"] == (0.229, 0.224, 0.225)


@pytest.mark.parametrize("name", timm.list_models(module="vlonghorn", include_tags=True))
def test_configuration_names_parts_of_the_model(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    cfg = model.pretrained_cfg
    assert model.get_submodule(cfg["classifier"]) is model.get_classifier()
    first = model.get_submodule(cfg["first_conv"])
    assert first is next(module for module in model.modules() if isinstance(module, torch.nn.Conv2d))
    assert model.patch_embed.img_size == cfg["input_size"][1:]
    assert cfg["tag"] != "untrained" or not cfg.get("license")  # of weights, and there are none
    assert model.head.out_features == cfg["num_classes"] and first.in_channels == cfg["input_size"][0]


# timm's own suite


def test_lines_added_to_the_suite_reach_its_lists():
    source = "FEAT_INTER_FILTERS = [\n  'cait',\n  'eva'\n]\nNON_STD_FILTERS = [\n 'vit_*'\n]\nB = [*NON_STD_FILTERS]"
    changed = run_timm_suite.add_lines(source)
    added = [line for line in changed.splitlines() if line not in source.splitlines()]
    assert sorted(added) == sorted(run_timm_suite.ADDED.values())
    scope = {}
    exec(changed, scope)
    ours = set(timm.list_models(module="vlonghorn"))
    assert ours.issuperset(MODELS)
    assert scope["B"][0] == "vit_*" and set(timm.list_models(filter=scope["B"][1:])) == ours
    assert set(timm.list_models(module=scope["FEAT_INTER_FILTERS"][2:])) == ours
    with pytest.raises(SystemExit, match="NON_STD_FILTERS"):
        run_timm_suite.add_lines("FEAT_INTER_FILTERS = []")


def test_features_by_torch_fx():
    images, options = torch.randn(2, 3, 32, 32), dict(SIZES, num_classes=0, out_indices=(1, 3), features_only=True)
    torch.manual_seed(0)
    model = timm.create_model("vlonghorn_tiny", **options, feature_cls="fx").eval()
    torch.manual_seed(0)
    other = timm.create_model("vlonghorn_tiny", **options).eval()
    for tokens, maps in zip(model(images), other(images), strict=True):  # (2, 16, 32) and (2, 32, 4, 4)
        torch.testing.assert_close(tokens.mT.reshape(maps.shape), maps)
