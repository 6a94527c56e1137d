"""Mixers beside the scans, and what all have in common as the parts of a block."""

import pytest
import timm
import torch
from vision_longhorn.kernels.rules import NAMES

from vision_longhorn.errors import UserError
from vision_longhorn.maps import token_maps
from vision_longhorn.models.mixers import MIXERS, create_mixer

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
    before = {key: value.clone() for key, value in model.named_parameters() if "_proj" in key}
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


def test_attention_has_no_maps():
    with pytest.raises(UserError, match="attention, 1 heads.*no state"):
        token_maps(small_model(mixer="attention"), torch.randn(1, 3, 32, 32))
