"""The models: sizes, wiring against a plain description, image sizes, initialisation, precision, timm's interface."""

import copy
import itertools
import math
import re
from itertools import product

import pytest
import timm
import torch
import torch.nn.functional as F
from plain_model import plain_model
from scan_cases import relative_rms
from timm.models import save_for_hf
from timm.optim import create_optimizer_v2
from torch import nn

from vision_longhorn import VisionLonghorn
from vision_longhorn.errors import UserError
from vision_longhorn.models.conv_stem import ConvStem, convolve_pixels
from vision_longhorn.models.create import create_model
from vision_longhorn.models.grid_conv import GridConv
from vision_longhorn.models.names import OLD_NAMES, SCAN_OPTIONS
from vision_longhorn.models.pos_embed import resample_pos_embed
from vision_longhorn.models.tokens import join_class

COUNTS = {
    "vim_tiny": 7_148_008,
    "vim_small": 25_796_584,
    "vim_base": 97_598_440,
    "vim_tiny_best": 5_788_840,
    "vim_small_best": 21_944_680,
    "vim_base_best": 85_360_360,
    "vim_tiny_cross": 7_147_624,
    "vim_small_cross": 25_795_816,
    "vim_base_cross": 97_596_904,
    "vim_tiny_stride8": 7_250_344,
    "vim_small_stride8": 26_001_256,
    "vlonghorn_tiny": 5_180_584,
    "vlonghorn_small": 19_843_432,
    "vlonghorn_base": 77_618_920,
    "vlonghorn_tiny_fast": 5_046_952,
    "vlonghorn_small_fast": 19_465_576,
    "vlonghorn_base_fast": 76_420_840,
    "vlonghorn_tiny_paper": 6_853_096,
    "vlonghorn_small_paper": 25_206_760,
    "vlonghorn_base_paper": 96_418_792,
    "vlonghorn_tiny_exact": 6_853_096,
    "vlonghorn_small_exact": 25_206_760,
    "vlonghorn_base_exact": 96_418_792,
    "vlonghorn_tiny_cross": 6_852_712,
    "vlonghorn_small_cross": 25_205_992,
    "vlonghorn_base_cross": 96_417_256,
    "vlonghorn_tiny_shared": 6_290_920,
    "vlonghorn_small_shared": 23_640_040,
    "vlonghorn_base_shared": 91_515_880,
}
NAMES = {*COUNTS, "vim_test", "vlonghorn_test"} - set(OLD_NAMES)


def small(name="vlonghorn_test", **options):
    """A model that runs in milliseconds: 16 patches, 2 blocks, 5 classes."""
    torch.manual_seed(0)
    sizes = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_classes=5)
    return timm.create_model(name, **{**sizes, **options})


def gradients(model, images, target=None):
    model.zero_grad()
    y = model(images)
    (F.cross_entropy(y, target) if target is not None else y.float().square().mean()).backward()
    return {name: value.grad.clone() for name, value in model.named_parameters()}


# Sizes


def parameters(name, **options):
    with torch.device("meta"):
        return sum(value.numel() for value in timm.create_model(name, **options).parameters())


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count(name):
    assert parameters(name) == COUNTS[name]


@pytest.mark.parametrize("size,count", [("tiny", 6_272_488), ("small", 23_603_176), ("base", 91_442_152)])
def test_parameter_count_of_one_direction_a_block(size, count):
    assert parameters(f"vlonghorn_{size}_paper", wiring="alternate") == count


def test_every_name_makes_a_model_of_its_own_kind():
    assert set(timm.list_models(module="vlonghorn")) == NAMES
    for name in (*NAMES, *OLD_NAMES):
        with torch.device("meta"):
            model = timm.create_model(name, num_classes=7)
        size = model.default_cfg["input_size"]
        mixer = model.blocks[-1].mixer
        diagonal = name.endswith(("_paper", "_shared", "_test"))
        assert mixer.rule == ("mamba" if name.startswith("vim") else "diagonal" if diagonal else "exact")
        assert mixer.wiring == {"shared": "shared", "fast": "alternate"}.get(name.split("_")[-1], "vim")
        assert size == ((3, 96, 96) if name.endswith("_test") else (3, 224, 224))
        best = not diagonal and re.fullmatch("vlonghorn_[a-z]+(_fast)?|vim_[a-z]+_best", name)
        assert len(model.blocks) == (4 if name.endswith("_test") else 12 if best else 24)
        assert (model.blocks[0].mlp is None) == (not best)
        assert isinstance(model.patch_embed.proj, ConvStem) == bool(best)
        assert mixer.gate == ("output" if not best else "skip" if name.startswith("vim") else "none")
        del model.blocks[2:]  # which are as the first two
        assert model(torch.empty(2, *size, device="meta")).shape == (2, 7)


def test_an_old_name_makes_the_model_that_its_arguments_make_and_stays_its_name(tmp_path):
    assert len(OLD_NAMES) == 12 and not set(OLD_NAMES) & set(timm.list_models())
    given = dict(depth=2, embed_dim=32, img_size=32, patch_size=8)
    images = torch.randn(2, 3, 32, 32)
    for old, (name, arguments) in OLD_NAMES.items():
        model = timm.create_model(old, **given).eval()
        plain = timm.create_model(name, **given, **arguments).eval()
        plain.load_state_dict(model.state_dict())
        assert torch.equal(model(images), plain(images))
        assert model.pretrained_cfg["architecture"] == old  # as folders made of it will have it
        assert timm.get_pretrained_cfg(old).input_size == (3, 224, 224)
    model = timm.create_model("vlonghorn_tiny_shared", **given).eval()
    save_for_hf(model, str(tmp_path), model_args=given, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert again.blocks[0].mixer.wiring == "shared" and torch.equal(again(images), model(images))


@pytest.mark.parametrize(
    "name",
    (
        "vlonghorn_tiny",
        "vlonghorn_small",
        "vlonghorn_base",
        "vlonghorn_tiny_fast",
        "vlonghorn_tiny_paper",
        "vlonghorn_small_paper",
        "vim_tiny",
        "vim_small",
        "vim_base",
        "vim_tiny_best",
        "vlonghorn_tiny_shared",
    ),
)
def test_training_step_at_224_reaches_every_channel_of_every_parameter(name):
    torch.manual_seed(0)
    model = timm.create_model(name, depth=4)
    for key, grad in gradients(model, torch.randn(1, 3, 224, 224), torch.tensor([3])).items():
        assert grad.isfinite().all(), key
        rows = grad.reshape(-1, grad.shape[-1]) if grad.ndim > 1 else grad.reshape(1, -1)
        assert rows.any(1).all(), f"{key}: {int((~rows.any(1)).sum())} of {len(rows)} rows get no gradient"


# The whole model against its plain description


def compare_with_plain_model(model, images):
    """Outputs and all gradients; every parameter is moved off its initial value, so that no two could be mixed up."""
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value), alpha=0.1)
    plain = {name: value.detach().double().requires_grad_() for name, value in model.named_parameters()}
    expected = plain_model(plain, images.double(), model)
    y = model(images)
    weight = torch.randn(expected.shape)
    assert y.shape == expected.shape and relative_rms(y, expected) < 1e-5
    grads = torch.autograd.grad((y * weight).sum(), list(model.parameters()))
    for name, grad, right in zip(plain, grads, torch.autograd.grad((expected * weight).sum(), list(plain.values()))):
        assert right.any() and relative_rms(grad, right) < 1e-4, name


@pytest.mark.parametrize(
    "class_token,pool",
    [
        ("middle", "token"),
        ("first", "token"),
        ("last", "token"),
        ("middle", "avg"),
        ("middle", "max"),
        ("middle", ""),
        ("none", "avg"),
    ],
)
@pytest.mark.parametrize(
    "mixer,wiring,beta",
    list(itertools.product(("diagonal", "exact", "mamba"), ("vim", "shared"), ("vector", "scalar"))),
)
def test_model_is_its_plain_description(mixer, wiring, beta, class_token, pool):
    update = dict(mixer="mamba") if mixer == "mamba" else dict(rule=mixer)
    model = small(
        depth=1 + (pool == "token"),
        embed_dim=16,
        d_state=3,
        wiring=wiring,
        beta=beta,
        class_token=class_token,
        global_pool=pool,
        **update,
    )
    compare_with_plain_model(model, torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize(
    "options",
    [dict(), dict(rule="exact", beta="scalar", class_token="last"), dict(mixer="mamba", class_token="none"),
     dict(gate="none")],
    ids=str,
)  # fmt: skip
def test_model_of_one_direction_a_block_is_its_plain_description(options):
    options = dict(embed_dim=16, d_state=3, depth=3, wiring="alternate", global_pool="avg") | options
    model = small(**options)
    assert [block.mixer.reversed for block in model.blocks] == [False, True, False]
    compare_with_plain_model(model, torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("class_token", ("middle", "first", "last", "none"))
@pytest.mark.parametrize("wiring,turned", [("vim", [False, True] * 2), ("alternate", [False, False, True, True])])
def test_model_that_reads_rows_and_columns_is_its_plain_description(class_token, wiring, turned):
    options = dict(scan_order="rows_columns", img_size=(16, 40), global_pool="avg", depth=4, embed_dim=16, d_state=3)
    model = small(**options, wiring=wiring, class_token=class_token)
    assert [block.reads_columns for block in model.blocks] == turned
    compare_with_plain_model(model, torch.randn(2, 3, 16, 40))


GRID = dict(conv="grid", rope=True, class_token="none", global_pool="avg")


@pytest.mark.parametrize(
    "options",
    [
        dict(wiring="vim"),
        dict(wiring="shared", rule="exact"),
        dict(wiring="alternate"),
        dict(rule="exact", gate="none"),
        dict(rule="exact", gate="value"),
    ],
    ids=str,
)
@pytest.mark.parametrize("scan_order", ("rows", "rows_columns"))
def test_model_with_one_convolution_over_the_grid_is_its_plain_description(options, scan_order):
    sizes = dict(img_size=(16, 40), depth=4, embed_dim=16, d_state=4)
    compare_with_plain_model(small(**sizes, scan_order=scan_order, **options, **GRID), torch.randn(2, 3, 16, 40))


def test_a_convolution_over_the_grid_is_that_of_the_image_at_hand():
    options = dict(scan_order="rows_columns", depth=2, **GRID)
    model = small(**options, dynamic_img_size=True)
    other = small(**options, img_size=(16, 40))
    other.load_state_dict({**model.state_dict(), "pos_embed": other.pos_embed})
    images = torch.randn(2, 3, 16, 40)
    with torch.no_grad():
        other.pos_embed.copy_(resample_pos_embed(model.pos_embed, "none", (4, 4), (2, 5)))
        expected = other(images)
        assert torch.equal(model(images), expected)
        features, (patches,) = model.forward_intermediates(images, indices=1, norm=True, output_fmt="NLC")
        assert torch.equal(features, model.forward_features(images)) and torch.equal(patches, features)
        with pytest.raises((AssertionError, ValueError), match="give rows=N"):
            other.blocks(torch.randn(1, 10, other.embed_dim))
        traced = torch.jit.trace(other, images[:1])
        torch.testing.assert_close(traced(images), expected)
        other.set_input_size((40, 16))
        assert other(images.transpose(2, 3)).isfinite().all()
    found = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        found.append(gradients(model, images))
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())


def test_a_convolution_over_the_grid_changes_the_number_of_parameters_by_its_own():
    inner, depth = 2 * 192, 24
    causal = {key: value for key, value in GRID.items() if key not in ("conv", "rope")}
    for wiring, lost in (("vim", 2 * inner * 5), ("alternate", inner * 5)):
        name = "vlonghorn_tiny_paper"
        fewer = parameters(name, wiring=wiring, **causal) - parameters(name, wiring=wiring, **GRID)
        assert fewer == depth * (lost - inner * 10)


TRUNK = dict(class_token="none", global_pool="avg", scan_order="rows_columns")
MLPS = dict(expand=1, mlp_ratio=4)
BEST = dict(stem="conv", conv="grid", rope=True, gate="none", **MLPS, **TRUNK)
UNIT = dict(rule="exact", qk_norm=True, beta_min=1e-3, beta_max=0.9)


@pytest.mark.parametrize(
    "name, plain, own",
    [
        ("vlonghorn_tiny", "vlonghorn_tiny_paper", {**UNIT, **BEST}),
        ("vlonghorn_tiny_fast", "vlonghorn_tiny_paper", {**UNIT, **BEST, "wiring": "alternate"}),
        ("vim_tiny_best", "vim_tiny", {**BEST, "gate": "skip", "mlp_conv": 3}),
    ],
)
def test_a_name_stands_for_what_the_documents_say(name, plain, own):
    given = dict(depth=2, embed_dim=32, img_size=32, patch_size=8)
    torch.manual_seed(0)
    named = timm.create_model(name, **given)
    torch.manual_seed(0)
    plain = timm.create_model(plain, **given, **own)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(named(images), plain(images))  # from the same start, too
    without_grid = dict(conv="causal", rope=False, mlp_conv=0)
    token = timm.create_model(name, **given, class_token="middle", global_pool="token", **without_grid)
    assert token.cls_token is not None and token.blocks[-1].reads_columns == named.blocks[-1].reads_columns


@pytest.mark.parametrize(
    "given, same",
    [
        (dict(rule="diagonal"), dict(rule="diagonal")),
        (dict(rule="gla"), dict(rule="gla")),
        (dict(rule="exact"), UNIT),
        (dict(mixer="mamba"), dict(mixer="mamba")),
        (dict(mixer="mamba2", d_state=8), dict(mixer="mamba2", d_state=8, conv="grid")),
        (dict(mixer="attention", num_heads=2), dict(mixer="attention", num_heads=2)),
        (dict(mixer="conv", d_conv=5), dict(mixer="conv", d_conv=5)),
        (dict(qk_norm=False), {**UNIT, "qk_norm": False}),
    ],
    ids=str,
)
def test_what_a_name_says_of_its_mixer_is_not_for_another_mixer_or_rule(given, same):
    sizes = dict(depth=2, embed_dim=32, img_size=32, patch_size=8)
    models = []
    trunk = BEST
    if same.get("mixer") in ("attention", "mamba2", "conv"):
        trunk = {key: value for key, value in BEST.items() if key not in SCAN_OPTIONS}
    for name, arguments in ("vlonghorn_tiny", given), ("vlonghorn_tiny_paper", {**trunk, **same}):
        torch.manual_seed(0)
        models.append(timm.create_model(name, **sizes, **arguments))
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(*(model(images) for model in models))


@pytest.mark.parametrize("class_token", ["middle", "none"])
def test_rows_and_columns_can_be_traced(class_token):
    model = small(scan_order="rows_columns", class_token=class_token, global_pool="avg").eval()
    traced = torch.jit.trace(model, torch.randn(1, 3, 32, 32))
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(traced(images), model(images))


def test_rows_and_columns_are_those_of_the_image_at_hand():
    options = dict(scan_order="rows_columns", depth=2)
    model = small(**options, dynamic_img_size=True)
    other = small(**options, img_size=(16, 40))
    other.load_state_dict({**model.state_dict(), "pos_embed": other.pos_embed})
    images = torch.randn(2, 3, 16, 40)
    model.set_grad_checkpointing()
    with torch.no_grad():
        resampled = resample_pos_embed(model.pos_embed, "middle", (4, 4), (2, 5))
        other.pos_embed.copy_(resampled)
        assert torch.equal(model(images), other(images))
        # The same weights in the other order are another model; nothing else differs.
        plain = small(depth=2, img_size=(16, 40))
        plain.load_state_dict(other.state_dict())
        assert not torch.equal(plain(images), other(images))
        with pytest.raises((AssertionError, ValueError), match="give rows=N"):
            other.blocks(torch.randn(1, 11, other.embed_dim))
        features, (patches,) = other.forward_intermediates(images, indices=1, norm=True, output_fmt="NLC")
        assert torch.equal(features, other.forward_features(images))
        assert torch.equal(patches, torch.cat([features[:, :5], features[:, 6:]], 1))


@pytest.mark.parametrize("class_token", ("middle", "first", "last", "none"))
@pytest.mark.parametrize("size", (1, 3, 5))
def test_grid_conv_adds_what_the_neighbours_in_the_grid_weigh(class_token, size):
    conv, rows, columns, dim, reach = GridConv(3, size, class_token), 4, 2, 3, size // 2
    nn.init.normal_(conv.bias)
    grid = torch.randn(2, rows, columns, dim)
    expected = grid + conv.bias
    for row, column, y, x in product(range(rows), range(columns), range(rows), range(columns)):
        if abs(y - row) <= reach and abs(x - column) <= reach:
            expected[:, row, column] += grid[:, y, x] * conv.weight[:, 0, y - row + reach, x - column + reach]
    token = None if class_token == "none" else torch.randn(2, 1, dim)
    found = conv(join_class(token, grid.flatten(1, 2), class_token), rows)
    assert torch.allclose(found, join_class(token, expected.detach().flatten(1, 2), class_token), atol=1e-5)


def test_model_with_a_grid_conv_sees_the_grid_of_the_image_at_hand():
    options = dict(grid_conv=3, scan_order="rows_columns", depth=2)
    model = small(**options, dynamic_img_size=True)
    other = small(**options, img_size=(16, 40))
    other.load_state_dict({**model.state_dict(), "pos_embed": other.pos_embed})
    with torch.no_grad():
        other.pos_embed.copy_(resample_pos_embed(model.pos_embed, "middle", (4, 4), (2, 5)))
        images = torch.randn(2, 3, 16, 40)
        assert torch.equal(model(images), other(images))
        # Without the convolution's part it is the model without it.
        plain = small(**{**options, "grid_conv": 0}, img_size=(16, 40))
        plain.load_state_dict({k: value for k, value in other.state_dict().items() if "grid_conv" not in k})
        for block in other.blocks:
            block.grid_conv.weight.zero_()
        assert torch.allclose(plain(images), other(images), atol=1e-6)


@pytest.mark.parametrize(
    "options,shape",
    [
        (dict(img_size=(24, 40)), (3, 24, 40)),  # an odd number of patches
        (dict(img_size=(24, 40), patch_size=(8, 4)), (3, 24, 40)),
        (dict(img_size=8, class_token="none", global_pool="avg"), (3, 8, 8)),  # one token
        (dict(in_chans=1), (1, 32, 32)),
        (dict(d_state=5, d_conv=3, expand=3, dt_rank=4), (3, 32, 32)),
        (dict(d_conv=1, d_state=1), (3, 32, 32)),
        (dict(mlp_ratio=2.5, expand=1), (3, 32, 32)),
        (dict(GRID, img_size=(40, 24), mlp_ratio=2.5, mlp_conv=3, scan_order="rows_columns"), (3, 40, 24)),
        (dict(stem="conv", img_size=(38, 27), patch_size=12, in_chans=2), (2, 38, 27)),  # borders that fill no patch
        (dict(GRID, stem="conv", img_size=(10, 12), patch_size=4), (3, 10, 12)),
    ],
)
@pytest.mark.parametrize("wiring", ("vim", "shared"))
def test_other_shapes_follow_the_plain_description(options, shape, wiring):
    compare_with_plain_model(small(embed_dim=16, wiring=wiring, **options), torch.randn(2, *shape))


# Where the class token stands, and other image sizes


@pytest.mark.parametrize("size,index", [(224, 98), ((48, 80), 7)])
def test_class_token_stands_before_the_middle_patch(size, index):
    torch.manual_seed(0)
    model = timm.create_model("vlonghorn_tiny_paper", img_size=size, depth=1)
    height, width = model.patch_embed.img_size
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model.pos_embed.zero_()
        model.patch_embed.proj.weight.zero_()
        model(torch.randn(1, 3, height, width))
        model.pos_embed.normal_()
        model(torch.randn(1, 3, height, width))
    assert seen[0][0].any(1).nonzero().tolist() == [[index]]
    assert torch.equal(seen[0][0, index], model.cls_token[0, 0])
    # The position embedding is added after the token was put in its place.
    torch.testing.assert_close(seen[1][0, index], model.cls_token[0, 0] + model.pos_embed[0, index])


RESIZES = [(32, 64), (32, (24, 40)), ((16, 64), 32), ((24, 40), (40, 24)), (64, 24)]


@pytest.mark.parametrize("class_token", ("middle", "first", "last", "none"))
@pytest.mark.parametrize("old,new", RESIZES)
def test_position_embedding_is_resampled_around_the_class_token(old, new, class_token):
    model = small(img_size=old, class_token=class_token, global_pool="avg")
    old_grid, before = model.patch_embed.grid_size, model.pos_embed.detach().clone()
    model.set_input_size(new)
    grid, after = model.patch_embed.grid_size, model.pos_embed.detach()

    def split(value, grid):
        count = grid[0] * grid[1]
        index = {"first": 0, "middle": count // 2, "last": count, "none": None}[class_token]
        keep = [i for i in range(value.shape[1]) if i != index]
        return None if index is None else value[0, index], value[0, keep].view(*grid, -1).permute(2, 0, 1)

    (old_class, old_patches), (new_class, new_patches) = split(before, old_grid), split(after, grid)
    assert class_token == "none" or torch.equal(old_class, new_class)
    expected = F.interpolate(old_patches[None], size=grid, mode="bicubic", antialias=True)[0]
    torch.testing.assert_close(new_patches, expected)
    assert isinstance(model.pos_embed, torch.nn.Parameter) and model.pos_embed.requires_grad
    height, width = model.patch_embed.img_size
    assert model(torch.randn(1, 3, height, width)).isfinite().all()


@pytest.mark.parametrize("old,new", RESIZES)
def test_three_ways_to_another_image_size_agree(old, new, tmp_path):
    """Images of any size, a resized model, and a checkpoint of one size loaded into a model of another."""
    resized, dynamic = small(img_size=old).eval(), small(img_size=old, dynamic_img_size=True).eval()
    torch.save(resized.state_dict(), tmp_path / "weights.pth")
    resized.set_input_size(new)
    images = torch.randn(2, 3, *resized.patch_embed.img_size)
    expected = resized(images)
    torch.testing.assert_close(dynamic(images), expected)
    if isinstance(old, int):  # a file does not say what grid its weights had: they are taken as square
        loaded = small(
            img_size=new,
            pretrained=True,
            pretrained_cfg_overlay=dict(file=str(tmp_path / "weights.pth"), num_classes=5),
        ).eval()
        torch.testing.assert_close(loaded(images), expected)


def test_another_patch_size_resamples_the_projection():
    model = small().eval()
    flat = torch.ones(1, 3, 32, 32)
    before = model.patch_embed(flat)
    model.set_input_size(img_size=64, patch_size=16)
    assert model.patch_embed.proj.weight.shape[-2:] == (16, 16) and model.pos_embed.shape[1] == 17
    # What a projection says of a flat image does not depend on the size of the patches.
    torch.testing.assert_close(model.patch_embed(torch.ones(1, 3, 64, 64)), before, rtol=1e-3, atol=1e-3)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)


def test_an_image_smaller_than_a_patch_is_refused_and_changes_nothing():
    model = small().eval()
    for sizes in dict(img_size=2), dict(img_size=(32, 2)), dict(patch_size=64):
        with pytest.raises(ValueError, match="holds no patch of patch_size"):
            model.set_input_size(**sizes)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5)


@pytest.mark.parametrize("n, channels", [(1, 3), (1, 1), (1, 13), (2, 2), (3, 3), (4, 3), (8, 1)])
def test_the_first_convolution_of_a_stem_as_a_gpu_computes_it(n, channels):
    conv = torch.nn.Conv2d(channels, 6, 2 * n + 1, n, padding=n, dtype=torch.float64)
    images = torch.randn(2, channels, 5 * n, 8 * n, dtype=torch.float64, requires_grad=True)
    wanted, found = conv(images), convolve_pixels(images, conv.weight, conv.bias)
    torch.testing.assert_close(found, wanted)
    grad = torch.randn_like(wanted)
    leaves = [images, *conv.parameters()]
    for one, other in zip(*(torch.autograd.grad(y, leaves, grad) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other)


def test_a_stem_of_convolutions_takes_other_images_and_refuses_other_patches():
    for patch in 4, 8, 16:
        options = dict(stem="conv", img_size=32, patch_size=patch)
        resized, any_size = (
            small(**options).eval(),
            small(**options, dynamic_img_size=True, dynamic_img_pad=True).eval(),
        )
        resized.set_input_size((48, 3 * patch))
        images = torch.randn(2, 3, 48, 3 * patch)
        expected = resized(images)
        torch.testing.assert_close(any_size(images), expected)
        torch.testing.assert_close(any_size(images[..., :-1]), any_size(F.pad(images[..., :-1], (0, 1))))
        (maps,) = small(**options, features_only=True, out_indices=(1,))(torch.randn(1, 3, 32, 32))
        assert maps.shape == (1, 32, 32 // patch, 32 // patch)
        for sizes in dict(patch_size=12), dict(patch_stride=2):
            with pytest.raises(ValueError, match=rf"with stem='conv', whose patches are \({patch}, {patch}\)"):
                resized.set_input_size(**sizes)
        assert torch.equal(resized(images), expected)


def test_what_does_not_fill_a_patch_is_cropped_or_padded():
    images = torch.randn(2, 3, 30, 44)
    cropped = small(img_size=(30, 44)).eval()
    assert cropped.patch_embed.grid_size == (3, 5)
    torch.testing.assert_close(cropped(images), small(img_size=(24, 40)).eval()(images[..., :24, :40]))
    options = dict(img_size=32, dynamic_img_size=True)
    padded = small(dynamic_img_pad=True, **options).eval()
    torch.testing.assert_close(padded(images), small(**options).eval()(F.pad(images, (0, 4, 0, 2))))
    maps = padded.forward_intermediates(images, intermediates_only=True)
    assert maps[-1].shape == (2, 32, 4, 6)
    with pytest.raises(ValueError, match=r"img_size=\(30, 44\) is not filled .* give dynamic_img_size=True"):
        small(dynamic_img_pad=True, img_size=(30, 44))


def test_wrong_image_size_is_one_line_with_the_remedy():
    with pytest.raises((AssertionError, ValueError)) as error:
        small()(torch.randn(1, 3, 48, 40))
    words = str(error.value)
    assert "48 x 40" in words and "32 x 32" in words and "\n" not in words
    assert "img_size" in words and "set_input_size" in words and "dynamic_img_size" in words


@pytest.mark.parametrize("shape,words", [((1, 1, 32, 32), "1 channels and the model takes 3"), ((3, 32, 32), "3 axes")])
def test_wrong_images_are_told_what_is_right(shape, words):
    with pytest.raises((AssertionError, ValueError), match=words):
        small()(torch.randn(shape))


@pytest.mark.parametrize(
    "options,words",
    [
        (dict(mixer="mambo"), "mixer='mambo'"),
        (dict(rule="exakt"), "rule='exakt'"),
        (dict(wiring="vin"), "wiring='vin'"),
        (dict(beta="matrix"), "beta='matrix'"),
        (dict(class_token="center"), "class_token='center'"),
        (dict(scan_order="columns"), "scan_order='columns'"),
        (dict(grid_conv=2), "grid_conv=2"),
        (dict(grid_conv=True), "grid_conv=True"),
        (dict(mlp_ratio=-1), "mlp_ratio=-1"),
        (dict(mlp_ratio=0.001), "mlp_ratio=0.001"),
        (dict(GRID, mlp_ratio=2, mlp_conv=2), "mlp_conv=2"),
        (dict(GRID, mlp_conv=3), "as mlp_ratio"),
        (dict(mlp_ratio=2, mlp_conv=3), "class_token='none'"),
        (dict(global_pool="mean"), "global_pool='mean'"),
        (dict(class_token="none"), "global_pool='avg'"),
        (dict(mixer="mamba", rule="exact"), "rule='exact'"),
        (dict(img_size=4), "patch_size=(8, 8)"),
        (dict(beta_min=0.1), "beta_max=None"),
        (dict(beta_min=0.1, beta_max=0.01), "beta_max=0.01"),
        (dict(beta_min=0.0, beta_max=1.0), "beta_min=0.0"),
        (dict(mixer="mamba", beta_min=0.1, beta_max=0.2), "rule='mamba'"),
        (dict(rule="gla", beta_min=0.1, beta_max=0.2), "rule='gla'"),
        (dict(conv="patches"), "conv='patches'"),
        (dict(GRID, d_conv=4), "d_conv=4 with conv='grid'"),
        (dict(GRID, wiring="forward"), "use conv='causal'"),
        (dict(conv="grid"), "class_token='none'"),
        (dict(rope=True), "class_token='none'"),
        (dict(rope=True, class_token="none", global_pool="avg", d_state=6), "multiple of 4"),
        (dict(stem="convs"), "stem='convs'"),
        (dict(stem="conv", patch_size=(8, 4)), "patch_size=(8, 4)"),
        (dict(stem="conv", patch_size=2), "patch_size=(2, 2)"),
        (dict(stem="conv", patch_stride=4), "patch_stride=(4, 4)"),
        (dict(stem="conv", embed_dim=30), "embed_dim=30"),
    ],
)
def test_options_that_are_wrong_are_named(options, words):
    with pytest.raises(ValueError) as error:
        small(**options)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["vlonghorn_test", "vit_tiny_patch16_224"])
@pytest.mark.parametrize(
    "argument, value, right",
    [
        *((size, value, "a whole number (1 or more), or two") for size in ("img_size", "patch_size")
          for value in (0, -1, "32", 3.0, True, [8], [8, 8, 8], [8, "8"], [], {"a": 1}, 10**400)),
        *((size, value, "a whole number (1 or more)")
          for size in ("depth", "embed_dim") for value in (0, "2", 1.5, True)),
        *(("drop_rate", value, "a number (0 or more, below 1)") for value in (1, "a", -0.1, math.nan)),
        ("num_classes", -1, "a whole number (0 or more)"),
        ("dynamic_img_size", "x", "true or false"),
        ("qk_norm", "yes", "true or false"),
        ("rope", "no", "true or false"),
        ("mlp_ratio", -1, "a number"),
    ],
)  # fmt: skip
def test_values_that_no_model_takes_are_said_with_what_is_right(name, argument, value, right):
    with pytest.raises(UserError) as caught:
        create_model(name, **{argument: value})
    message = str(caught.value)
    assert f"{argument} is {value!r}: give {right}" in message and "\n" not in message


@pytest.mark.parametrize(
    "options",
    [dict(d_state=0), dict(d_conv=0), dict(expand=0), dict(dt_rank="all"), dict(head_dim="all", mixer="mamba2")],
)
def test_options_of_a_mixer_that_are_wrong_are_one_line(options):
    with pytest.raises(UserError, match=f"{next(iter(options))} is .*: give "):
        create_model("vlonghorn_test", depth=1, img_size=8, patch_size=4, **options)
    create_model(
        "vlonghorn_test", depth=1, img_size=[8, 8], patch_size=(4, 4), dt_rank=None, save_states=1, mlp_ratio=0
    )


def test_whatever_a_model_makes_of_an_argument_is_one_line():
    with pytest.raises(UserError, match="^model vlonghorn_test cannot be made with pretrained_cfg=3: "):
        create_model("vlonghorn_test", pretrained_cfg=3)  # an AttributeError of timm's


# Initialisation and weight decay


def check_uniform(value, bound):
    assert value.abs().max() <= bound * (1 + 1e-6) and value.abs().max() > 0.99 * bound
    assert abs(value.std() / (bound / math.sqrt(3)) - 1) < 0.03 and abs(value.mean()) < 0.05 * bound


def check_stem(stem):
    for layer in stem:
        if isinstance(layer, nn.Conv2d):
            bound = layer.weight[0].numel() ** -0.5
            check_uniform(layer.weight, bound)
            assert 0 < layer.bias.abs().max() <= bound
        elif isinstance(layer, nn.LayerNorm):
            assert (layer.weight == 1).all() and not layer.bias.any()


def check_initialisation(model):
    depth, dim = len(model.blocks), model.embed_dim
    for value in (model.pos_embed, model.cls_token, model.head.weight):
        if value is None:
            continue
        assert abs(value.std() / 0.02 - 1) < (0.15 if value.numel() < 1000 else 0.03)
        assert value.abs().max() < 0.02 * 6
    stem = model.patch_embed.proj
    if isinstance(stem, ConvStem):
        check_stem(stem)
    else:
        assert abs(stem.weight.std() * math.sqrt(stem.weight[0].numel()) - 1) < 0.02
        assert not stem.bias.any()
    assert not model.head.bias.any()
    assert torch.equal(model.norm.weight, torch.ones(dim))
    for block in model.blocks:
        mixer = block.mixer
        assert torch.equal(block.norm.weight, torch.ones(dim))
        check_uniform(mixer.in_proj.weight, dim**-0.5)
        check_uniform(mixer.x_proj, mixer.d_inner**-0.5)
        check_uniform(mixer.dt_proj, mixer.dt_rank**-0.5)
        check_uniform(mixer.conv_weight, 1 / 3 if mixer.needs_grid else 0.5)
        assert 0 < mixer.conv_bias.abs().max() <= (1 / 3 if mixer.needs_grid else 0.5)
        check_uniform(mixer.out_proj.weight, (mixer.d_inner * depth * (1 if block.mlp is None else 2)) ** -0.5)
        assert torch.equal(mixer.D, torch.ones_like(mixer.D))
        if block.mlp is not None:
            assert torch.equal(block.mlp_norm.weight, torch.ones(dim))
            for layer in block.mlp.fc1, block.mlp.fc2:
                check_uniform(layer.weight, layer.in_features**-0.5)
            if hasattr(block.mlp, "conv_weight"):
                check_uniform(block.mlp.conv_weight, 1 / 3)
        if mixer.rule == "mamba":
            dt = F.softplus(mixer.dt_bias)
            assert dt.min() >= 0.999e-3 and dt.max() <= 1.001e-1
            # Log-uniform: half of them below the geometric middle.
            assert abs((dt < 1e-2).float().mean() - 0.5) < 0.1
            torch.testing.assert_close(mixer.A_log.exp(), torch.arange(1.0, 17).expand_as(mixer.A_log))
        elif mixer.beta_range:
            beta = torch.sigmoid(mixer.dt_bias)
            low, high = mixer.beta_range
            assert beta.min() >= 0.999 * low and beta.max() <= 1.001 * high
            assert abs((beta < math.sqrt(low * high)).float().mean() - 0.5) < 0.1
            assert len(beta.unique()) > 0.9 * beta.numel()
        else:
            assert not mixer.dt_bias.any()  # beta = sigmoid(0) = 1/2
    stacked = model.blocks[0].mixer.x_proj
    assert len(stacked) == 1 or not torch.equal(stacked[0], stacked[1])


@pytest.mark.parametrize("name", ("vlonghorn_tiny_paper", "vim_tiny", "vlonghorn_tiny_shared"))
def test_initialisation(name):
    torch.manual_seed(0)
    check_initialisation(timm.create_model(name, depth=6))
    check_initialisation(timm.create_model(name, depth=6, **GRID))


@pytest.mark.parametrize(
    "again",
    [
        lambda model: model,
        lambda model: model.init_weights(),
        lambda model: [block.mixer.reset_parameters() for block in model.blocks],
        lambda model: model.reset_classifier(1000),
        lambda model: copy.deepcopy(model),
    ],
    ids=("made", "init_weights", "reset_parameters", "reset_classifier", "copy"),
)
@pytest.mark.parametrize("options", [UNIT, GRID, dict(stem="conv")], ids=("memories that differ", "grid", "stem"))
def test_a_model_starts_the_same_however_it_is_made(options, again):
    torch.manual_seed(0)
    model = timm.create_model("vlonghorn_tiny_paper", depth=2, **options)
    found = again(model)
    check_initialisation(found if isinstance(found, torch.nn.Module) else model)


@pytest.mark.parametrize(
    "name,options",
    [("vlonghorn_tiny_shared", {}), ("vim_tiny", GRID), ("vlonghorn_tiny", {}), ("vim_tiny_best", {})],
    ids=str,
)
def test_model_made_without_memory_is_initialised_later(name, options):
    with torch.device("meta"):
        model = timm.create_model(name, depth=2, **options)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(float("nan"))
    torch.manual_seed(0)
    model.init_weights()
    check_initialisation(model)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(mixer="mamba"),
        dict(wiring="shared"),
        dict(beta="scalar"),
        dict(GRID, mlp_ratio=2, mlp_conv=3, stem="conv"),
        dict(mixer="mamba", wiring="shared"),
    ],
)
def test_only_matrices_are_decayed(options):
    model = small(**options)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.1)
    names = {value: name for name, value in model.named_parameters()}
    groups = {
        decay: {
            names[value]
            for group in optimizer.param_groups
            if group["weight_decay"] == decay
            for value in group["params"]
        }
        for decay in (0.0, 0.1)
    }
    matrices = (
        "in_proj.weight",
        "out_proj.weight",
        "conv_weight",
        "x_proj",
        "dt_proj",
        "fc1.weight",
        "fc2.weight",
        "patch_embed.proj.weight",
        *(f"patch_embed.proj.{i}.weight" for i in (0, 3, 6)),
        "head.weight",
    )
    assert groups[0.1] == {name for name in names.values() if name.endswith(matrices)}
    assert groups[0.0] == set(names.values()) - groups[0.1]


def test_layer_decay_follows_depth():
    model = small(depth=3)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1.0, weight_decay=0.1, layer_decay=0.5)
    names = {value: name for name, value in model.named_parameters()}
    scale = {names[value]: group["lr_scale"] for group in optimizer.param_groups for value in group["params"]}
    assert set(scale) == set(names.values())
    parts = [("cls_token", "pos_embed", "patch_embed"), "blocks.0.", "blocks.1.", "blocks.2.", "head"]
    found = [{scale[name] for name in scale if name.startswith(part)} for part in parts]
    assert found == [{0.0625}, {0.125}, {0.25}, {0.5}, {1.0}]


# Precision

MAMBA2 = dict(mixer="mamba2", head_dim=8)  # of many heads, as the gradient of a single one's number may nearly cancel


@pytest.mark.parametrize(
    "options", [dict(), dict(mixer="mamba"), dict(wiring="shared"), dict(rule="exact"), GRID, MAMBA2]
)
@pytest.mark.parametrize("fp32", (True, False))
def test_bf16_autocast_stays_near_fp32_and_keeps_its_residual(options, fp32):
    model, images, target = small(residual_in_fp32=fp32, **options), torch.randn(4, 3, 32, 32), torch.arange(4)
    residuals = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, out: residuals.append(out.dtype))
    expected, right = model(images), gradients(model, images, target)
    residuals.clear()
    with torch.autocast("cpu", torch.bfloat16):
        y, grads = model(images), gradients(model, images, target)
    assert set(residuals) == {torch.float32 if fp32 else torch.bfloat16}
    assert relative_rms(y, expected) < 2e-2
    for name, grad in grads.items():
        assert grad.isfinite().all() and grad.dtype == torch.float32
        assert relative_rms(grad, right[name]) < 0.1, name


def test_fp16_keeps_its_residual_in_float32_whatever_is_asked_for():
    """A sum of many blocks may leave the range of float16."""
    model, residuals = small(residual_in_fp32=False), []
    model.blocks[0].register_forward_hook(lambda _, inputs, out: residuals.append(out.dtype))
    with torch.autocast("cpu", torch.float16):
        model(torch.randn(1, 3, 32, 32))
    assert residuals == [torch.float32]


@pytest.mark.parametrize("options", [dict(), dict(mixer="mamba"), dict(wiring="shared"), MAMBA2])
@pytest.mark.parametrize("fp32", (True, False))
def test_model_in_bf16(options, fp32):
    model, images = small(residual_in_fp32=fp32, **options), torch.randn(4, 3, 32, 32)
    expected, right = model(images), gradients(model, images)
    model.bfloat16()
    residuals = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, out: residuals.append(out.dtype))
    y, grads = model(images.bfloat16()), gradients(model, images.bfloat16())
    assert y.dtype == torch.bfloat16 and relative_rms(y, expected) < 4e-2
    assert set(residuals) == {torch.float32 if fp32 else torch.bfloat16}
    for name, grad in grads.items():
        assert grad.dtype == torch.bfloat16 and relative_rms(grad, right[name]) < 0.15, name


# timm's interface and training


@pytest.mark.parametrize("options", [dict(), dict(wiring="alternate"), dict(mixer="mamba2")])
def test_checkpointing_gives_the_same_gradients_and_recomputes(options):
    model, images = small(depth=3, drop_path_rate=0.5, **options).train(), torch.randn(4, 3, 32, 32)
    calls = []
    model.blocks[1].mixer.in_proj.register_forward_hook(lambda *_: calls.append(1))
    found = []
    for enable, runs in ((False, 1), (True, 2)):
        model.set_grad_checkpointing(enable)
        calls.clear()
        torch.manual_seed(1)
        found.append(gradients(model, images))
        assert len(calls) == runs
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]), name


@pytest.mark.parametrize("options", [dict(), dict(wiring="shared"), dict(mixer="mamba")])
def test_training_and_evaluation_mode_compute_the_same(options):
    """They differ in what they keep for the backward pass."""
    model, images = small(**options), torch.randn(2, 3, 32, 32)
    found = [(model.train(mode)(images), gradients(model, images)) for mode in (True, False)]
    assert torch.equal(found[0][0], found[1][0])
    for name, grad in found[0][1].items():
        assert torch.equal(grad, found[1][1][name]), name


def test_drop_path_grows_with_depth_and_rests_in_evaluation():
    model = small(depth=3, drop_path_rate=0.4, drop_rate=0.3, pos_drop_rate=0.3)
    assert [getattr(block.drop_path, "drop_prob", 0.0) for block in model.blocks] == pytest.approx([0, 0.2, 0.4])
    images = torch.randn(6, 3, 32, 32)
    assert not torch.equal(model.train()(images), model(images))
    model.eval()
    y = model(images)
    assert torch.equal(y, model(images))
    for i in range(6):  # what a sample gives does not depend on its batch
        torch.testing.assert_close(model(images[i : i + 1]), y[i : i + 1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(y, small(depth=3).eval()(images))


@pytest.mark.parametrize("class_token", ("middle", "none"))
def test_forward_intermediates(class_token):
    model = small(img_size=(24, 40), depth=3, class_token=class_token, global_pool="avg").eval()
    images = torch.randn(2, 3, 24, 40)
    final, maps = model.forward_intermediates(images, indices=[0, 2], norm=True)
    assert [tuple(part.shape) for part in maps] == [(2, 32, 3, 5)] * 2
    features = model.forward_features(images)
    assert torch.equal(final, features)
    index = 7 if class_token == "middle" else None
    patches = features[:, [i for i in range(features.shape[1]) if i != index]]
    assert torch.equal(maps[-1].flatten(2).transpose(1, 2), patches)
    assert not torch.equal(maps[0], maps[1])

    tokens = model.forward_intermediates(
        images, indices=1, norm=True, output_fmt="NLC", intermediates_only=True, return_prefix_tokens=True
    )[0]
    if index is not None:
        tokens, prefix = tokens
        assert torch.equal(prefix, features[:, index : index + 1])
    assert torch.equal(tokens, patches)
    # Without the final norm and stopped early: the stream itself, as it leaves the first block.
    (stream,) = model.forward_intermediates(images, indices=[0], stop_early=True, intermediates_only=True)
    wanted = model.norm(stream.movedim(1, -1)).movedim(-1, 1)
    torch.testing.assert_close(wanted, maps[0])


def test_features_only_gives_maps():
    model = small(depth=3, features_only=True, out_indices=(0, 2)).eval()
    assert model.feature_info.channels() == [32, 32] and model.feature_info.reduction() == [8, 8]
    images = torch.randn(2, 3, 32, 32)
    expected = small(depth=3).eval().forward_intermediates(images, [0, 2], intermediates_only=True)
    for found, right in zip(model(images), expected, strict=True):
        assert found.shape == (2, 32, 4, 4)
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("name", ["vlonghorn_test", "vim_test"])
def test_optimisers_decay_of_a_models_maps_what_they_decay_of_the_model(name):
    """And their layers' rates fall from the last block to the stem."""

    def decayed(model, **options):
        names = {parameter: name.removeprefix("model.") for name, parameter in model.named_parameters()}
        groups = create_optimizer_v2(model, "adamw", weight_decay=0.1, **options).param_groups
        return {
            names[one]: group.get("lr_scale") for group in groups if group["weight_decay"] for one in group["params"]
        }

    maps, whole = small(name, features_only=True, out_indices=(0, 1)), small(name)
    assert decayed(maps).keys() == {key for key in decayed(whole) if not key.startswith("head")}
    scales = decayed(maps, layer_decay=0.5)
    ratio = {scales[key] / scales[key.replace("blocks.1", "blocks.0")] for key in scales if "blocks.1" in key}
    assert ratio == {2} and scales["patch_embed.proj.weight"] < min(scales[key] for key in scales if "blocks" in key)


def test_reset_classifier_and_pruning():
    model, images = small().eval(), torch.randn(2, 3, 32, 32)
    features = model.forward_features(images)
    model.reset_classifier(7)
    assert model.num_classes == 7 and model(images).shape == (2, 7) and model.get_classifier() is model.head
    model.reset_classifier(0, "avg")
    patches = features[:, [i for i in range(17) if i != 8]]
    torch.testing.assert_close(model(images), patches.mean(1))
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), patches.mean(1))
    model.bfloat16().reset_classifier(3, "token")
    assert model(images.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="global_pool='mean'"):
        model.reset_classifier(3, "mean")

    model = small(depth=3, wiring="alternate").eval()
    expected = model.forward_intermediates(images, [1], intermediates_only=True)[0]
    assert model.prune_intermediate_layers([1], prune_norm=True) == [1] and len(model.blocks) == 2
    tokens = model(images)  # no norm, no head, no pooling: the stream
    torch.testing.assert_close(tokens[:, [i for i in range(17) if i != 8]], expected.flatten(2).transpose(1, 2))


@pytest.mark.parametrize(
    "options", [dict(), dict(mixer="mamba"), dict(wiring="shared"), dict(wiring="alternate"), GRID, MAMBA2]
)
def test_weights_survive_their_file(options, tmp_path):
    model, images = small(**options).eval(), torch.randn(2, 3, 32, 32)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    torch.manual_seed(99)
    fresh = timm.create_model(
        "vlonghorn_test",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_classes=5,
        checkpoint_path=str(tmp_path / "weights.pth"),
        **options,
    ).eval()
    assert isinstance(fresh, VisionLonghorn) and type(fresh.blocks[0].mixer) is type(model.blocks[0].mixer)
    assert torch.equal(fresh(images), model(images))
