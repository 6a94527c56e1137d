"""Mixers beside the scans, and what all have in common as the parts of a block."""

import itertools
from fnmatch import fnmatch
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
    ("mamba2", dict(wiring="forward", head_dim=8)),
    *(("mamba" if rule == "mamba" else "longhorn", dict(rule=rule, wiring="forward")) for rule in NAMES),
]


def small_model(**options):
    torch.manual_seed(0)
    return timm.create_model("vlonghorn_test", img_size=32, depth=2, num_classes=3, **options)


def of_mixer(name):
    return dict(mixer=name, **(dict(class_token="none", global_pool="avg") if name == "conv" else {}))


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


def test_a_gated_convolution_is_the_longhorn_block_whose_scan_gives_nothing():
    torch.manual_seed(0)
    options = dict(expand=1, residual_layers=4)
    mixer, scan = create_mixer("conv", 16, **options), create_mixer("longhorn", 16, conv="grid", **options)
    with torch.no_grad():
        scan.x_proj.zero_()  # no queries
    for name in ("in_proj.weight", "out_proj.weight", "conv_weight", "conv_bias"):
        scan.get_parameter(name).data = mixer.get_parameter(name).data.view_as(scan.get_parameter(name))
    h = torch.randn(2, 12, 16)
    torch.testing.assert_close(mixer(h, 3), scan(h, 3))


def plain_mamba2(mixer, h, rows):
    """The mixer as its definition has it, token by token, in each direction for itself."""
    d_inner, N, heads, L = mixer.out_proj.in_features, mixer.d_state, mixer.num_heads, h.shape[1]
    z, xBC, step = torch.split(h @ mixer.in_proj.weight.T, [d_inner, d_inner + 2 * N, heads], -1)
    weight, convolved = mixer.conv_weight, []
    for t in range(L):
        total = mixer.conv_bias
        if not mixer.needs_grid:
            for back in range(min(t + 1, weight.shape[2])):
                total = total + weight[:, 0, -1 - back] * xBC[:, t - back]
        else:
            columns, side = L // rows, weight.shape[1]
            for i, j in itertools.product(range(side), repeat=2):
                row, column = t // columns + i - side // 2, t % columns + j - side // 2
                if 0 <= row < rows and 0 <= column < columns:
                    total = total + weight[:, i, j] * xBC[:, row * columns + column]
        convolved.append(total * torch.sigmoid(total))
    x, B, C = torch.split(torch.stack(convolved, 1), [d_inner, N, N], -1)
    x = x.unflatten(-1, (heads, -1))  # (B, L, heads, channels)
    dt = torch.log1p(torch.exp(step + mixer.dt_bias))
    decay = torch.exp(-torch.exp(mixer.A_log) * dt)

    def scan(order):
        state, out = h.new_zeros(h.shape[0], heads, x.shape[-1], N), {}
        for t in order:
            written = (dt[:, t, :, None] * x[:, t]).unsqueeze(-1) * B[:, t, None, None]
            state = decay[:, t, :, None, None] * state + written
            out[t] = (state * C[:, t, None, None]).sum(-1) + mixer.D[:, None] * x[:, t]
        return torch.stack([out[t] for t in range(L)], 1).flatten(2)

    y = scan(range(L))
    if mixer.wiring == "shared":
        y = (y + scan(reversed(range(L)))) / 2
    y = y * z * torch.sigmoid(z)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.weight
    return y @ mixer.out_proj.weight.T


@pytest.mark.parametrize(
    "options,rows",
    [(dict(), 0), (dict(wiring="forward", d_conv=3), 0), (dict(conv="grid"), 2), (dict(conv="grid", d_conv=5), 5)],
    ids=str,
)
def test_mamba2_is_two_scans_token_by_token(options, rows):
    torch.manual_seed(0)
    mixer = create_mixer("mamba2", 12, d_state=5, head_dim=8, **options).double()
    with torch.no_grad():
        for value in mixer.parameters():
            value.add_(torch.randn_like(value), alpha=0.3)
    h = torch.randn(2, 10, 12, dtype=torch.float64, requires_grad=True)
    given = (h, rows) if rows else (h,)
    found, expected = mixer(*given), plain_mamba2(mixer, h, rows)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    direction = torch.randn_like(found)
    values = [h, *mixer.parameters()]
    for grad, right in zip(*(torch.autograd.grad(y, values, direction) for y in (found, expected)), strict=True):
        assert right.abs().max() > 0
        torch.testing.assert_close(grad, right, rtol=1e-9, atol=1e-9)


def test_mamba2_keeps_its_digits_over_many_tokens_and_strong_decays():
    """Decays are differences of long sums: a head that forgets all at once beside one that forgets nothing."""
    torch.manual_seed(0)
    mixer, h = create_mixer("mamba2", 16, head_dim=16, d_state=8), torch.randn(1, 2000, 16)
    with torch.no_grad():
        mixer.dt_bias.copy_(torch.tensor([3.0, -9.0]))
        found = mixer(h)
        expected = mixer.double()(h.double())
    assert found.isfinite().all()
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "make",
    [
        lambda: timm.create_model("vlonghorn_tiny", depth=8, mixer="mamba2"),
        lambda: again(timm.create_model("vlonghorn_tiny", depth=8, mixer="mamba2")),
        lambda: again(
            timm.create_model("vlonghorn_tiny", depth=8, mixer="mamba2", device="meta").to_empty(device="cpu")
        ),
    ],
    ids=("made", "again", "without memory"),
)
def test_mamba2_starts_as_its_authors_have_it(make):
    torch.manual_seed(0)
    mixers = [block.mixer for block in make().blocks]
    dt = torch.cat([nn.functional.softplus(mixer.dt_bias) for mixer in mixers])
    A = torch.cat([mixer.A_log.exp() for mixer in mixers])
    assert dt.min() >= 0.999e-3 and dt.max() <= 1.001e-1 and 0.2 < (dt < 1e-2).float().mean() < 0.8
    assert A.min() >= 0.999 and A.max() <= 16.01 and 7 < A.mean() < 10
    for mixer in mixers:
        assert (mixer.D == 1).all() and (mixer.norm.weight == 1).all()
        for value, bound in (
            (mixer.in_proj.weight, 192**-0.5),
            (mixer.conv_weight, 1 / 3),
            (mixer.conv_bias, 1 / 3),
            (mixer.out_proj.weight, (384 * 8) ** -0.5),
        ):
            assert 0.98 * bound < value.abs().max() <= bound * (1 + 1e-6)


def again(model):
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(torch.nan)
    model.init_weights()
    return model


@pytest.mark.parametrize("size", ("test", "tiny", "small", "base"))
def test_attention_has_the_parameters_of_a_gated_longhorn_block(size):
    def parameters(**options):
        with torch.device("meta"):
            return sum(
                value.numel()
                for value in timm.create_model(f"vlonghorn_{size}", depth=1, **options).blocks.parameters()
            )

    assert abs(parameters(mixer="attention") / parameters(gate="output") - 1) < 0.05


@pytest.mark.parametrize(
    "options",
    [
        *map(of_mixer, MIXERS),
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
    mixer = model.blocks[0].mixer
    spared = {name for name in getattr(mixer, "NO_WEIGHT_DECAY", ()) if getattr(mixer, name) is not None}
    for place, wrapped in ("mixer", mixer), ("mixer.0", nn.Sequential(mixer)):
        model.blocks[0].mixer = wrapped
        of_block = [name for name, _ in model.named_parameters() if name.startswith("blocks.0.")]
        kept = {name for name in of_block if any(fnmatch(name, pattern) for pattern in model.no_weight_decay())}
        assert kept == {f"blocks.0.{place}.{name}" for name in spared}


@pytest.mark.parametrize("name", MIXERS)
def test_initialising_again_changes_every_matrix(name):
    model = small_model(**of_mixer(name))
    # These are no matrices, and most of them start at one value.
    constant = getattr(model.blocks[0].mixer, "NO_WEIGHT_DECAY", ())
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
        (dict(mixer="conv", d_conv=4, class_token="none", global_pool="avg"), "d_conv=4: give an odd number"),
        (dict(d_conv=0), "d_conv=0: give a number of tokens"),
        (dict(mixer="mamba2", d_conv=0), "d_conv=0: give a number of tokens"),
        (dict(conv="grid", d_conv=3.0), "d_conv=3.0 with conv='grid': give an odd number"),
        (dict(dt_rank=0), "dt_rank=0: give 1 or more"),
        (dict(d_state=0), "d_state=0: give 1 or more"),
        (dict(expand=0), "int(expand * dim)=0: give 1 or more"),
        (dict(mixer="mamba2", head_dim=48), "head_dim=48 does not divide the inner width of 128"),
        (dict(mixer="mamba2", head_dim=0), "head_dim=0 does not divide"),
        (dict(mixer="mamba2", wiring="vim"), "wiring='vim' is not known"),
        (dict(mixer="mamba2", conv="grid", wiring="forward"), "conv='grid' with wiring='forward'"),
        (dict(mixer="mamba2", conv="grid", d_conv=4), "d_conv=4 with conv='grid'"),
        (dict(mixer="mamba2", rope=True), "'rope'; beside the model's own, mixer='mamba2' takes d_state, d_conv"),
        (dict(deepth=3), "unexpected keyword argument 'deepth', the nearest known one is 'depth'; beside"),
        (dict(d_stat=3), "'d_stat', the nearest known one is 'd_state'"),
        (dict(heads=3), "unexpected keyword argument 'heads'; beside"),
        (dict(mixer="mamba", rule="exact"), "rule='exact' belongs to Longhorn"),
        (dict(rule="gla", beta="scalar"), "beta='scalar' with rule='gla'"),
        (dict(gate="skp"), "gate='skp' is not known; choose one of 'output', 'skip', 'none', 'value'"),
        (dict(gate="skip", wiring="shared"), "gate='skip' with wiring='shared'"),
        (dict(gate="none", wiring="shared"), "gate='none' with wiring='shared'"),
        (dict(gate="value", wiring="shared"), "gate='value' with wiring='shared'"),
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


def test_a_card_calls_only_longhorns_rules_longhorn():
    words = {rule: small_model(rule=rule).blocks[0].mixer.describe() for rule in ("diagonal", "exact", "gla", "delta")}
    assert [word for word in words if words[word].startswith("longhorn, ")] == ["diagonal", "exact"]
    assert words["gla"].startswith("gla, state size")


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
    with pytest.raises(ValueError, match="class_token='middle' with a block over the grid"):
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


def test_maps_of_mamba2_are_its_decays_and_step_sizes():
    model, images = small_model(mixer="mamba2", head_dim=32), torch.randn(2, 3, 32, 32)
    seen = []
    model.blocks[1].mixer.in_proj.register_forward_hook(lambda _, inputs, out: seen.append(out))
    maps, mixer = token_maps(model, images), model.blocks[1].mixer
    dt = nn.functional.softplus(seen[0][..., -4:] + mixer.dt_bias)  # (B, L, heads)
    forgetting = 1 - torch.exp(-mixer.A_log.exp() * dt)
    for found, of_class, right in (
        (maps.forgetting, maps.class_forgetting, forgetting.mean(-1)),
        (maps.write, maps.class_write, dt.mean(-1)),
    ):
        torch.testing.assert_close(of_class[1], right[:, 2:3].expand(-1, 2))
        torch.testing.assert_close(found[1].flatten(2), right[:, [0, 1, 3, 4]].unsqueeze(1).expand(-1, 2, -1))


def test_attention_has_no_maps():
    with pytest.raises(UserError, match="attention, 1 heads.*no state"):
        token_maps(small_model(mixer="attention"), torch.randn(1, 3, 32, 32))
