"""Weights under the names of the official Vision Mamba code, and overlapping patches."""

import argparse
import math

import pytest
import timm
import torch
import torch.nn.functional as F
from huggingface_hub.utils import EntryNotFoundError
from plain_model import plain_model
from scan_cases import relative_rms

from vision_longhorn.models.vlonghorn import checkpoint_filter_fn

SIDE, PATCH, DIM, DEPTH, N, K, CLASSES = 32, 8, 32, 2, 4, 4, 5
INNER, RANK = 2 * DIM, math.ceil(DIM / 16)


def small(name="vim_test", **options):
    sizes = dict(img_size=SIDE, patch_size=PATCH, embed_dim=DIM, depth=DEPTH, d_state=N, num_classes=CLASSES)
    return timm.create_model(name, **{**sizes, **options}).eval()


def official_weights(patches=16):
    """Random values under the official names and shapes."""
    shapes = {
        "cls_token": (1, 1, DIM),
        "pos_embed": (1, patches + 1, DIM),
        "patch_embed.proj.weight": (DIM, 3, PATCH, PATCH),
        "patch_embed.proj.bias": (DIM,),
        "head.weight": (CLASSES, DIM),
        "head.bias": (CLASSES,),
        "norm_f.weight": (DIM,),
    }
    for i in range(DEPTH):
        shapes[f"layers.{i}.norm.weight"] = (DIM,)
        mixer = f"layers.{i}.mixer."
        shapes[mixer + "in_proj.weight"] = (2 * INNER, DIM)
        shapes[mixer + "out_proj.weight"] = (DIM, INNER)
        for back, decay in (("", "A_log"), ("_b", "A_b_log")):
            shapes |= {
                mixer + decay: (INNER, N),
                f"{mixer}D{back}": (INNER,),
                f"{mixer}conv1d{back}.weight": (INNER, 1, K),
                f"{mixer}conv1d{back}.bias": (INNER,),
                f"{mixer}x_proj{back}.weight": (RANK + 2 * N, INNER),
                f"{mixer}dt_proj{back}.weight": (INNER, RANK),
                f"{mixer}dt_proj{back}.bias": (INNER,),
            }
    generator = torch.Generator().manual_seed(7)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@torch.no_grad()
def set_directly(model, weights):
    """Each parameter of `model` from its official counterpart, one by one, without the code under test."""
    done = {"cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias", "head.weight", "head.bias"}
    for name in done:
        model.get_parameter(name).copy_(weights[name])
    model.norm.weight.copy_(weights["norm_f.weight"])
    for i, block in enumerate(model.blocks):
        mixer, prefix = block.mixer, f"layers.{i}.mixer."
        block.norm.weight.copy_(weights[f"layers.{i}.norm.weight"])
        mixer.in_proj.weight.copy_(weights[prefix + "in_proj.weight"])
        mixer.out_proj.weight.copy_(weights[prefix + "out_proj.weight"])
        for direction, (back, decay) in enumerate((("", "A_log"), ("_b", "A_b_log"))):
            mixer.A_log[direction] = weights[prefix + decay]
            mixer.D[direction] = weights[f"{prefix}D{back}"]
            mixer.conv_weight[direction] = weights[f"{prefix}conv1d{back}.weight"][:, 0]
            mixer.conv_bias[direction] = weights[f"{prefix}conv1d{back}.bias"]
            mixer.x_proj[direction] = weights[f"{prefix}x_proj{back}.weight"]
            mixer.dt_proj[direction] = weights[f"{prefix}dt_proj{back}.weight"]
            mixer.dt_bias[direction] = weights[f"{prefix}dt_proj{back}.bias"]
    return model


def load(weights, path, **options):
    """As a user loads a file: through timm, which loads strictly. The classes are those of the file unless given."""
    torch.save(weights, path)
    overlay = dict(file=str(path), num_classes=CLASSES)
    return small(pretrained=True, pretrained_cfg_overlay=overlay, **options)


def check_same(model, expected):
    for (name, value), (right_name, right) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert name == right_name and torch.equal(value, right), name
    images = torch.randn(2, 3, *model.patch_embed.img_size)
    with torch.no_grad():
        assert torch.equal(model(images), expected(images))


# Official weights


@pytest.mark.parametrize(
    "wrap",
    [
        lambda weights: weights,
        lambda weights: {
            "model": weights,
            "optimizer": {"state": {}},
            "epoch": 299,
            "scaler": "none",
            "args": argparse.Namespace(lr=5e-4),
        },
        lambda weights: {"model": {f"module.{name}": value for name, value in weights.items()}},
    ],
    ids=("bare", "wrapped", "parallel"),
)
def test_official_weights_load_strictly(wrap, tmp_path):
    weights = official_weights()
    model = load(wrap(weights), tmp_path / "official.pth")
    check_same(model, set_directly(small(), weights))
    with torch.no_grad():
        images = torch.randn(2, 3, SIDE, SIDE)
        plain = {name: value.double() for name, value in model.named_parameters()}
        assert relative_rms(model(images), plain_model(plain, images.double(), model)) < 1e-5


def test_averaged_weights_come_first_from_a_file_and_from_a_checkpoint_in_memory(tmp_path):
    raw, averaged = official_weights(), official_weights()
    for value in averaged.values():
        value.mul_(0.9)
    checkpoint = {"model": raw, "model_ema": averaged}
    expected = set_directly(small(), averaged)
    check_same(load(checkpoint, tmp_path / "official.pth"), expected)
    unaveraged = timm.models.load_state_dict(str(tmp_path / "official.pth"), use_ema=False)  # as in docs/models.md
    check_same(
        small(pretrained=True, pretrained_cfg_overlay=dict(state_dict=unaveraged, num_classes=CLASSES)),
        set_directly(small(), raw),
    )
    # The hub and the overlay's "state_dict" hand the checkpoint over whole, and with "model" alone the raw ones.
    for given, right in (
        (checkpoint, expected),
        (raw, set_directly(small(), raw)),
        ({"model": raw, "model_ema": None}, set_directly(small(), raw)),
    ):
        names = set(given)
        check_same(small(pretrained=True, pretrained_cfg_overlay=dict(state_dict=given, num_classes=CLASSES)), right)
        assert set(given) == names, "the caller's weights were changed"


@pytest.mark.parametrize("size", (64, (24, 40)))
def test_official_weights_at_another_image_size_keep_the_class_token_in_the_middle(size, tmp_path):
    weights = official_weights()
    model = load(weights, tmp_path / "official.pth", img_size=size)
    rows, columns = model.patch_embed.grid_size
    old = weights["pos_embed"]
    maps = torch.cat([old[:, :8], old[:, 9:]], 1).reshape(1, 4, 4, DIM).permute(0, 3, 1, 2)
    maps = F.interpolate(maps, (rows, columns), mode="bicubic", antialias=True).flatten(2).transpose(1, 2)
    middle = rows * columns // 2
    expected = torch.cat([maps[:, :middle], old[:, 8:9], maps[:, middle:]], 1)
    torch.testing.assert_close(model.pos_embed.detach(), expected)
    weights["pos_embed"] = model.pos_embed.detach()
    check_same(model, set_directly(small(img_size=size), weights))


def test_another_head_and_maps_take_the_body(tmp_path):
    weights = official_weights()
    expected = set_directly(small(), weights)
    model = load(weights, tmp_path / "official.pth", num_classes=3)
    images = torch.randn(2, 3, SIDE, SIDE)
    with torch.no_grad():
        assert model(images).shape == (2, 3)
        assert torch.equal(model.forward_features(images), expected.forward_features(images))
        grey = load(weights, tmp_path / "official.pth", in_chans=1).patch_embed.proj.weight
        torch.testing.assert_close(grey, weights["patch_embed.proj.weight"].sum(1, keepdim=True))
        maps = load(weights, tmp_path / "official.pth", features_only=True, out_indices=(1,))(images)
        assert torch.equal(maps[0], expected.forward_intermediates(images, [1], intermediates_only=True)[0])


def lose(name):
    return lambda weights: weights.pop(name)


def gain(name):
    return lambda weights: weights.update({name: torch.zeros(DIM)})


@pytest.mark.parametrize(
    "change,words",
    [
        (lose("layers.1.mixer.A_b_log"), "A_log"),
        (lose("layers.0.mixer.conv1d.weight"), "directions of blocks.0.mixer.conv_weight"),
        (lose("layers.0.norm.weight"), "blocks.0.norm.weight"),
        (lose("norm_f.weight"), "norm.weight"),
        (lose("cls_token"), "cls_token"),
        (gain("rope.freqs_cos"), "rope.freqs_cos"),
        (gain("norm_f.bias"), "norm.bias"),
        (gain("layers.0.mixer.gamma"), "blocks.0.mixer.gamma"),
        (gain("layers.2.norm.weight"), "blocks.2.norm.weight"),
        (gain("layers.0.A_log"), "blocks.0.A_log"),
        (lambda weights: weights.update({"layers.0.mixer.D": torch.ones(3)}), "directions of blocks.0.mixer.D"),
    ],
)
@pytest.mark.parametrize("classes", (CLASSES, 3))
def test_a_missing_or_extra_tensor_is_an_error_that_names_it(change, words, classes, tmp_path):
    weights = official_weights()
    change(weights)
    with pytest.raises(RuntimeError) as error:
        load(weights, tmp_path / "official.pth", num_classes=classes)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("change", (lose("head.bias"), gain("head.scale")))
def test_a_head_that_is_not_whole_is_an_error(change, tmp_path):
    weights = official_weights()
    change(weights)
    with pytest.raises(RuntimeError, match="head"):
        load(weights, tmp_path / "official.pth")


def test_another_architecture_refuses_official_weights(tmp_path):
    torch.save(official_weights(), tmp_path / "official.pth")
    overlay = dict(file=str(tmp_path / "official.pth"), num_classes=CLASSES)
    for options in (dict(name="vlonghorn_test"), dict(wiring="shared"), dict(wiring="alternate"), dict(depth=1)):
        with pytest.raises(RuntimeError, match="of the official Vision Mamba"):
            small(pretrained=True, pretrained_cfg_overlay=overlay, **options)


class Marks:
    """What a file with code in it does when it is unpickled."""

    ran = False

    def __reduce__(self):
        return setattr, (Marks, "ran", True)


def test_code_in_a_file_is_refused_and_never_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(Marks, "ran", False)
    with pytest.raises(Exception, match="[Ww]eights.only"):
        load({"model": official_weights(), "args": Marks()}, tmp_path / "official.pth")
    assert not Marks.ran
    torch.load(tmp_path / "official.pth", weights_only=False)
    assert Marks.ran, "the file does hold code"


def test_a_file_of_the_hub_loads_without_its_code(tmp_path, monkeypatch):
    """The hub's part of timm as it is, with the download alone replaced."""

    def download(repo_id, filename, **options):
        if filename != "official.pth":  # timm asks for a safer format first
            raise EntryNotFoundError(f"no {filename}")
        return str(tmp_path / filename)

    monkeypatch.setattr("timm.models._hub.hf_hub_download", download)
    weights = official_weights()
    overlay = dict(hf_hub_id="someone/something", hf_hub_filename="official.pth", num_classes=CLASSES)
    torch.save({"model": weights, "args": argparse.Namespace(lr=5e-4)}, tmp_path / "official.pth")
    check_same(small(pretrained=True, pretrained_cfg_overlay=overlay), set_directly(small(), weights))
    monkeypatch.setattr(Marks, "ran", False)
    torch.save({"model": weights, "args": Marks()}, tmp_path / "official.pth")
    with pytest.raises(Exception, match="[Ww]eights.only"):
        small(pretrained=True, pretrained_cfg_overlay=overlay)
    assert not Marks.ran


@pytest.mark.parametrize(
    "name,hub,stride",
    [
        ("vim_tiny", "hustvl/Vim-tiny-midclstok", 16),
        ("vim_tiny_stride8", "hustvl/Vim-tiny-midclstok", 8),
        ("vim_small", "hustvl/Vim-small-midclstok", 16),
        ("vim_small_stride8", "hustvl/Vim-small-midclstok", 8),
        ("vim_base", "hustvl/Vim-base-midclstok", 16),
    ],
)
def test_published_weights_are_the_default(name, hub, stride, monkeypatch):
    """What timm asks the hub for; the answer here is a file of zeros."""
    with torch.device("meta"):
        wanted = timm.create_model(name, depth=1)
    assert wanted.patch_embed.patch_stride == (stride, stride)
    assert wanted.pos_embed.shape[1] == {16: 197, 8: 730}[stride]
    own = {key: torch.zeros(value.shape) for key, value in wanted.state_dict().items()}
    asked = []

    def answer(repository, filename, **options):
        asked.append((repository, filename))
        return {"model": own}

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", answer)
    monkeypatch.setattr("timm.models._builder.has_hf_hub", lambda necessary=False: True)
    model = timm.create_model(name, depth=1, pretrained=True)
    assert not model.head.weight.any()
    ((repository, filename),) = asked
    assert repository == hub and filename.endswith(".pth") and ("_ft_" in filename) == (stride == 8)
    assert timm.is_model_pretrained(name) and not timm.is_model_pretrained(name.replace("vim", "vlonghorn"))


# Overlapping patches

STRIDES = [(4, 8, 32), (3, 8, 30), ((4, 2), 8, (24, 20)), ((2, 4), (8, 4), (24, 20)), (1, 2, 6), (4, 8, 33)]


@pytest.mark.parametrize("stride,patch,size", STRIDES)
def test_overlapping_patches_are_a_convolution(stride, patch, size):
    model = small(img_size=size, patch_size=patch, patch_stride=stride)
    proj, images = model.patch_embed.proj, torch.randn(2, 3, *model.patch_embed.img_size)
    expected = F.conv2d(images, proj.weight, proj.bias, stride)
    rows, columns = expected.shape[-2:]
    assert model.patch_embed.grid_size == (rows, columns) == model.patch_embed.dynamic_feat_size(images.shape[-2:])
    assert model.patch_embed.num_patches == rows * columns == model.pos_embed.shape[1] - 1
    with torch.no_grad():
        torch.testing.assert_close(model.patch_embed(images).permute(0, 3, 1, 2), expected)
        # The rest of the model takes these tokens as it takes those of patches side by side: patches of one pixel
        # over a map of as many channels are the same tokens.
        plain = {name: value.double() for name, value in model.named_parameters()}
        plain["patch_embed.proj.weight"] = torch.eye(DIM, dtype=torch.float64).reshape(DIM, DIM, 1, 1)
        plain["patch_embed.proj.bias"] = torch.zeros(DIM, dtype=torch.float64)
        twin = small(img_size=(rows, columns), patch_size=1, in_chans=DIM)
        assert relative_rms(model(images), plain_model(plain, expected.double(), twin)) < 1e-5
    maps = model.forward_intermediates(images, intermediates_only=True)
    assert maps[-1].shape == (2, DIM, rows, columns)
    step = stride if isinstance(stride, int) else max(stride)
    assert {info["reduction"] for info in model.feature_info} == {step} and model.patch_embed.feat_ratio() == step


def test_stride_of_the_patch_size_changes_nothing():
    images = torch.randn(2, 3, SIDE, SIDE)
    model, given = small(), small(patch_stride=PATCH)
    given.load_state_dict(model.state_dict())
    assert type(given.patch_embed.proj) is type(model.patch_embed.proj) is not torch.nn.Conv2d
    assert torch.equal(model(images), given(images))


def test_overlapping_patches_at_other_image_sizes(tmp_path):
    model = small(patch_stride=4)  # 7 x 7 patches
    assert model.patch_embed.grid_size == (7, 7)
    resized = small(patch_stride=4)
    resized.load_state_dict(model.state_dict())
    resized.set_input_size(img_size=(24, 40))
    assert resized.patch_embed.grid_size == (5, 9) and resized.pos_embed.shape[1] == 46
    images = torch.randn(2, 3, 24, 40)
    dynamic = small(patch_stride=4, dynamic_img_size=True)
    dynamic.load_state_dict(model.state_dict())
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = small(
        patch_stride=4,
        img_size=(24, 40),
        pretrained=True,
        pretrained_cfg_overlay=dict(file=str(tmp_path / "model.pt"), num_classes=CLASSES),
    )
    with torch.no_grad():
        for other in (dynamic, loaded):
            torch.testing.assert_close(other(images), resized(images))
    maps = dynamic.forward_intermediates(images, intermediates_only=True)
    assert maps[-1].shape == (2, DIM, 5, 9)
    for shape in ((3, 25, 40), (3, 24, 42), (3, 4, 40)):
        with pytest.raises((AssertionError, RuntimeError), match="dynamic_img_pad"):
            dynamic(torch.randn(1, *shape))
    found = small(patch_stride=4, features_only=True, out_indices=(1,))
    assert found.feature_info.reduction() == [4]


@pytest.mark.parametrize("size,padded", [((25, 39), (28, 40)), ((24, 40), (24, 40)), ((5, 9), (8, 12))])
def test_overlapping_patches_with_padding(size, padded):
    model = small(patch_stride=4, dynamic_img_size=True, dynamic_img_pad=True)
    images = torch.randn(2, 3, *size)
    grid = tuple((side - PATCH) // 4 + 1 for side in padded)
    whole = F.pad(images, (0, padded[1] - size[1], 0, padded[0] - size[0]))
    assert model.patch_embed.dynamic_feat_size(size) == grid == model.patch_embed.dynamic_feat_size(padded)
    with torch.no_grad():
        torch.testing.assert_close(model(images), model(whole))
    assert model.forward_intermediates(images, intermediates_only=True)[-1].shape[-2:] == grid


def test_stride_and_patch_size_change_later():
    model = small()
    before = model.patch_embed.proj
    model.set_input_size(patch_stride=4)
    assert model.patch_embed.grid_size == (7, 7) and model.pos_embed.shape[1] == 50
    assert torch.equal(model.patch_embed.proj.weight, before.weight)
    assert torch.equal(model.patch_embed.proj.bias, before.bias)
    model.set_input_size(img_size=64, patch_size=16)  # the stride stays
    assert model.patch_embed.patch_stride == (4, 4) and model.patch_embed.grid_size == (13, 13)
    assert model(torch.randn(1, 3, 64, 64)).isfinite().all()
    with pytest.raises(ValueError, match="patch_stride=.*patch_size"):
        model.set_input_size(patch_size=2)
    assert model.patch_embed.patch_size == (16, 16)
    model.set_input_size(patch_stride=16)
    assert model.patch_embed.grid_size == (4, 4)
    model.set_input_size(patch_size=8)  # patches side by side stay so
    assert model.patch_embed.grid_size == (8, 8) and type(model.patch_embed.proj) is type(before)


@pytest.mark.parametrize("stride", (0, -1, 9, (4, 9)))
def test_stride_that_makes_no_sense_is_named(stride):
    with pytest.raises(ValueError, match="patch_stride="):
        small(patch_stride=stride)
    with pytest.raises(ValueError, match="patch_size"):
        small(img_size=4, patch_stride=4)


def test_official_stride_8_weights_load(tmp_path):
    weights = official_weights(patches=49)
    check_same(load(weights, tmp_path / "official.pth", patch_stride=4), set_directly(small(patch_stride=4), weights))
    # Fine-tuning at a finer step starts from the weights of patches side by side.
    coarse = official_weights()
    assert checkpoint_filter_fn(coarse, small(patch_stride=4))["pos_embed"].shape == (1, 50, DIM)
