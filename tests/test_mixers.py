"""Mixers beside the scans, and what all have in common as the parts of a block."""

from functools import partial

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn
from torch.nn.utils import parametrize
from vision_longhorn.kernels.rules import NAMES

from vision_longhorn.errors import UserError
from vision_longhorn.hub import model_card
from vision_longhorn.maps import token_maps
from vision_longhorn.models.mixers import MIXERS, BidirectionalMixer, create_mixer

CAUSAL = [
    ("attention", dict(causal=True)),
    *(("mamba" if rule == "mamba" else "longhorn", dict(rule=rule, wiring="forward")) for rule in NAMES),
]


def small_model(**options):
    torch.manual_seed(0)
    return timm.create_model("vlonghorn_test", img_size=32, depth=2, num_classes=3, **options)


@pytest.mark.parametrize("name,options", CAUSAL, ids=str)
def test_a_causal_mixer_sees_no_later_token(name, options):
    torch.manual_seed(0)
    mixer = create_mixer(name, 16, **options)
    h = torch.randn(2, 9, 16)
    changed = torch.cat([h[:, :5], torch.randn(2, 4, 16)], 1)
    before, after = mixer(h), mixer(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("rule", NAMES)
def test_blocks_of_the_alternate_wiring_scan_from_either_end(rule):
    """An odd block is an even one that is shown the tokens in reverse order, and an even one has wiring "forward"."""
    name, h = "mamba" if rule == "mamba" else "longhorn", torch.randn(2, 9, 16)
    forward, *blocks = (
        create_mixer(name, 16, rule=rule, wiring=wiring, index=i)
        for wiring, i in (("forward", 1), ("alternate", 0), ("alternate", 1), ("alternate", 2))
    )
    for mixer in blocks:
        mixer.load_state_dict(forward.state_dict())
    first, second, third = (mixer(h) for mixer in blocks)
    assert torch.equal(first, forward(h)) and torch.equal(third, first)
    torch.testing.assert_close(second, forward(h.flip(1)).flip(1))
    assert (first - second).abs().max() > 0.1 * first.abs().max()


@pytest.mark.parametrize("causal", (False, True))
def test_attention_is_its_formula(causal):
    torch.manual_seed(0)
    mixer = create_mixer("attention", 16, num_heads=2, causal=causal).double()
    h = torch.randn(2, 7, 16, dtype=torch.float64)
    q, k, v, z = mixer.in_proj(h).chunk(4, -1)
    width = q.shape[-1] // 2
    heads = []
    for i in range(2):
        part = slice(i * width, (i + 1) * width)
        scores = torch.einsum("bic,bjc->bij", q[..., part], k[..., part]) / width**0.5
        if causal:
            scores = scores.masked_fill(torch.arange(7)[None, :] > torch.arange(7)[:, None], -torch.inf)
        heads.append(scores.softmax(-1) @ v[..., part])
    expected = mixer.out_proj(torch.cat(heads, -1) * z * torch.sigmoid(z))
    torch.testing.assert_close(mixer(h), expected)


@pytest.mark.parametrize("size", ("test", "tiny", "small", "base"))
def test_attention_has_the_parameters_of_a_longhorn_block(size):
    def parameters(**options):
        with torch.device("meta"):
            return sum(
                value.numel()
                for value in timm.create_model(f"vlonghorn_{size}", depth=1, **options).blocks.parameters()
            )

    assert abs(parameters(mixer="attention") / parameters() - 1) < 0.05


@pytest.mark.parametrize(
    "options",
    [
        *(dict(mixer=name) for name in MIXERS),
        *(dict(rule=rule) for rule in NAMES),
        dict(mixer="mamba", A_per_token=True),
        dict(wiring="alternate"),
    ],
    ids=str,
)
def test_a_model_trains_with_every_mixer_and_rule(options):
    """Every parameter takes part, and names that must not decay are parameters."""
    model = small_model(**options)
    model(torch.randn(2, 3, 32, 32)).square().mean().backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in model.parameters())
    names = {parameter.rpartition(".mixer.")[2] for parameter, _ in model.named_parameters()}
    kept = {f"*.mixer.{parameter}" for parameter in names} & model.no_weight_decay()
    assert len(kept) == sum(
        getattr(model.blocks[0].mixer, parameter) is not None for parameter in model.blocks[0].mixer.NO_WEIGHT_DECAY
    )


@pytest.mark.parametrize("name", MIXERS)
def test_initialising_again_changes_every_matrix(name):
    model = small_model(mixer=name)
    constant = model.blocks[0].mixer.NO_WEIGHT_DECAY  # those of no matrices, most of which start at one value
    matrices = [key for key, value in model.named_parameters() if ".mixer." in key and value.ndim > 1]
    before = {key: model.get_parameter(key).clone() for key in matrices if key.split(".")[-1] not in constant}
    model.init_weights()
    assert before and not any(
        torch.equal(before[key], value) for key, value in model.named_parameters() if key in before
    )


@pytest.mark.parametrize(
    "options,words",
    [
        (dict(mixer="atention"), "mixer='atention' is not known"),
        (
            dict(mixer="attention", rule="exact"),
            "'rule'; beside the model's own, mixer='attention' takes num_heads, causal",
        ),
        (dict(mixer="attention", wiring="alternate"), "'wiring'; beside the model's own, mixer='attention' takes"),
        (dict(mixer="attention", num_heads=0), "num_heads=0"),
        (dict(deepth=3), "unexpected keyword argument 'deepth', the nearest known one is 'depth'; beside"),
        (dict(d_stat=3), "'d_stat', the nearest known one is 'd_state'"),
        (dict(heads=3), "unexpected keyword argument 'heads'; beside"),
        (dict(mixer="mamba", rule="exact"), "rule='exact' belongs to Longhorn"),
        (dict(rule="gla", beta="scalar"), "beta='scalar' with rule='gla'"),
        (dict(A_per_token=True), "A_per_token=True with rule='diagonal'"),
    ],
)
def test_options_that_a_mixer_has_not_are_named(options, words):
    with pytest.raises((TypeError, ValueError)) as error:
        small_model(**options)
    assert words in str(error.value) and "\n" not in str(error.value)


class Own(nn.Module):
    """A mixer with nothing beside `forward`."""

    def __init__(self, dim, taps=3):
        super().__init__()
        self.taps, self.conv = taps, nn.Conv1d(dim, dim, taps, padding="same", groups=dim)

    def forward(self, x):
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


def test_a_mixer_of_ones_own(tmp_path, monkeypatch):
    model = small_model(mixer=Own, taps=5, scan_order="rows_columns", grid_conv=3)
    assert [block.mixer.taps for block in model.blocks] == [5, 5]
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert model.blocks[1].mixer.conv.weight.grad.abs().sum() > 0
    create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.1)
    before = model.blocks[0].mixer.conv.weight.clone()
    model.init_weights()
    assert not torch.equal(model.blocks[0].mixer.conv.weight, before)
    assert model_card(model, "local-dir:x")["details"]["Mixer"] == "Own, 2 blocks"
    with pytest.raises(UserError, match=r"\(Own\) keeps no state"):
        token_maps(model, torch.randn(1, 3, 32, 32))
    monkeypatch.setitem(MIXERS, "own", Own)  # what configurations can name
    named = small_model(mixer="own", taps=5, scan_order="rows_columns", grid_conv=3)
    named.load_state_dict(model.state_dict())


def test_a_mixer_of_ones_own_over_the_grid_is_told_the_rows_it_sees():
    class OverGrid(nn.Identity):
        needs_grid = True

        def forward(self, x, rows):
            seen.append((rows, x.shape[1] // rows))
            return x

    seen, images = [], torch.randn(2, 3, 32, 64)
    options = dict(mixer=lambda dim: OverGrid(), patch_size=8, scan_order="rows_columns")
    model = timm.create_model(
        "vlonghorn_test", img_size=(32, 64), depth=2, class_token="none", global_pool="avg", **options
    )
    model.forward_features(images)
    model.set_grad_checkpointing()
    model.forward_intermediates(images, intermediates_only=True)
    assert seen == [(4, 8), (8, 4)] * 2
    with pytest.raises(ValueError, match="class_token='middle' with a mixer over the grid"):
        small_model(**options)


def test_what_makes_a_mixer_gets_what_it_takes():
    """A partial of ours, a function of the width, one that takes everything; on the device and in the dtype asked."""
    seen = []

    def everything(dim, **given):
        seen.append(given)
        return nn.Identity()

    exact = small_model(mixer=partial(BidirectionalMixer, rule="exact"), wiring="alternate")
    assert [(block.mixer.rule, block.mixer.reversed) for block in exact.blocks] == [("exact", False), ("exact", True)]
    small_model(mixer=everything, anything=1)
    assert [given["index"] for given in seen] == [0, 1]
    assert seen[0].items() >= dict(residual_layers=2, eps=1e-5, device=None, dtype=None, anything=1).items()
    model = small_model(mixer=lambda dim: nn.Linear(dim, dim), dtype=torch.float64, device="meta")
    weight = model.blocks[0].mixer.weight
    assert weight.dtype == torch.float64 and weight.device.type == "meta"


@pytest.mark.parametrize(
    "options,words",
    [
        (
            dict(mixer=Own, tap=3),
            "'tap', the nearest known one is 'taps'; beside the model's own, mixer=Own takes taps",
        ),
        (dict(mixer=lambda dim: nn.Identity(), taps=3), "takes none"),
        (dict(mixer=3), "mixer=3 is not known"),
    ],
)
def test_what_is_no_mixer_is_named(options, words):
    with pytest.raises((TypeError, ValueError)) as error:
        small_model(**options)
    assert words in str(error.value)


def test_parameters_that_nothing_initialises_are_an_error():
    class Scale(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(dim))

        def forward(self, x):
            return x * self.scale

    with pytest.raises(TypeError, match=r"Scale has parameters but no reset_parameters"):
        small_model(mixer=Scale).init_weights()


class Low(nn.Module):
    """An adapter of low rank for each direction, which a parameter of the mixer gets as peft does it."""

    def __init__(self, value, rank=2):
        super().__init__()
        self.down = nn.Parameter(torch.randn(len(value), rank, value.shape[2]))
        self.up = nn.Parameter(torch.randn(len(value), value.shape[1], rank) * 0.1)

    def forward(self, value):
        return value + self.up @ self.down


class Wrapper(nn.Module):
    """What peft puts in the place of a module whose parameters it adapts."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, *given):
        return self.base_layer(*given)


def test_adapters_of_low_rank_reach_every_matrix():
    model, images = small_model().eval(), torch.randn(2, 3, 32, 32)
    plain = model(images)
    for block in model.blocks:
        for name in ("x_proj", "dt_proj"):
            parametrize.register_parametrization(block.mixer, name, Low(getattr(block.mixer, name)))
        block.mixer = Wrapper(block.mixer)
    adapted = model(images)
    assert not torch.allclose(adapted, plain)
    adapted.square().sum().backward()
    adapters = [value for name, value in model.named_parameters() if name.endswith((".up", ".down"))]
    assert len(adapters) == 8 and all(value.grad.abs().sum() > 0 for value in adapters)
    create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.1)


def test_the_mixer_stands_alone():
    """It takes any number of tokens, without a model, in a stack of somebody else's."""
    stack = nn.Sequential(nn.RMSNorm(24), BidirectionalMixer(24), nn.Linear(24, 5))
    assert [stack(torch.randn(2, length, 24)).shape for length in (1, 7)] == [(2, 1, 5), (2, 7, 5)]


def test_attention_has_no_maps():
    with pytest.raises(UserError, match="attention, 1 heads.*no state"):
        token_maps(small_model(mixer="attention"), torch.randn(1, 3, 32, 32))
