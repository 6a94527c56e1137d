"""The mixer that solves Longhorn's regression over all patches at once."""

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from vision_longhorn.kernels.backends.torch.rope import rotate

from vision_longhorn.models.mixers import create_mixer
from vision_longhorn.models.mixers.offline import inverse, regression

POOLED = dict(class_token="none", global_pool="avg")


def build(dim=12, **options):
    torch.manual_seed(0)
    mixer = create_mixer("offline", dim, **{"d_state": 4, "head_dim": 8, **options}).double()
    with torch.no_grad():
        for value in (mixer.beta_bias, mixer.ridge_log, mixer.D):
            value += torch.randn_like(value)
    return mixer


def plain(x, low, beta_bias, ridge_log, D, rows, rope, solve):
    """One head of one image after the other, by least squares: rows of the ridge stand below those of the tokens."""
    heads, N = len(beta_bias), (low.shape[-1] // len(beta_bias) - 1) // 2
    C, out = x.shape[-1] // heads, torch.zeros_like(x)
    for b in range(len(x)):
        for i in range(heads):
            k, q = (low[b, :, (j * heads + i) * N : (j * heads + i + 1) * N] for j in range(2))
            k, q = (v / (v.square().sum(-1, keepdim=True) + 1e-6).sqrt() for v in (k, q))
            if rope:
                both = torch.cat([k, q], -1)[None].clone()
                rotate(both, rows)
                k, q = both[0].chunk(2, -1)
            beta = torch.sigmoid(low[b, :, 2 * heads * N + i] + beta_bias[i])[:, None]
            v, w = x[b, :, i * C : (i + 1) * C], beta / beta.sum() * N
            if solve:
                left = torch.cat([w.sqrt() * k, ridge_log[i].exp().sqrt() * torch.eye(N).to(k)])
                S = torch.linalg.lstsq(left, torch.cat([w.sqrt() * v, v.new_zeros(N, C)])).solution
            else:
                S = (w * k).T @ v / (1 + ridge_log[i].exp())
            out[b, :, i * C : (i + 1) * C] = q @ S + D[i * C : (i + 1) * C] * v
    return out


def inputs(B=2, L=12, heads=3, C=8, N=4):
    torch.manual_seed(0)
    shapes = (B, L, heads * C), (B, L, heads * (2 * N + 1)), (heads,), (heads,), (heads * C,)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("rope", (False, True))
@pytest.mark.parametrize("solve", (False, True))
@pytest.mark.parametrize(
    "sizes", [dict(), dict(B=1, L=1, heads=1, C=1), dict(L=3, N=8), dict(L=40, C=3, N=12, heads=2)], ids=str
)
def test_the_regression_is_least_squares_of_each_head(sizes, solve, rope):
    """With few tokens the ridge alone decides along some keys."""
    given, rows = inputs(**sizes), 1 if sizes.get("L") in (1, 3) else 4
    found, expected = regression(*given, rows, rope, solve), plain(*given, rows, rope, solve)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    weight = torch.randn_like(found)
    for a, b in zip(*(torch.autograd.grad(y, given, weight) for y in (found, expected))):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("condition", (1.0, 1e2, 1e3))
def test_newtons_iteration_inverts_what_a_ridge_allows(condition):
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(3, 16, 16, dtype=torch.float64))[0]
    values = torch.logspace(0, 1, 16, condition, dtype=torch.float64)  # 1 to `condition`
    G = basis @ (values[:, None] * basis.mT)
    torch.testing.assert_close(inverse(G) @ G, torch.eye(16, dtype=torch.float64).expand(3, 16, 16), rtol=0, atol=1e-6)


def test_a_ridge_that_training_drove_to_nothing_still_gives_what_least_squares_gives():
    """All keys alike leave the ridge alone to decide along all others."""
    x, low, beta_bias, ridge_log, D = (value.detach() for value in inputs(N=32))
    low[:] = low[:, :1]
    found = regression(x, low, beta_bias, ridge_log - 50, D, 3, False, True)
    least = torch.full_like(ridge_log, 0.032).log()
    torch.testing.assert_close(found, plain(x, low, beta_bias, least, D, 3, False, True), rtol=1e-6, atol=1e-6)


def test_without_rope_the_order_of_patches_does_not_matter_to_the_regression():
    given, order = inputs(), torch.randperm(12)
    y = regression(*given, 3, False, True)
    again = regression(given[0][:, order], given[1][:, order], *given[2:], 3, False, True)
    torch.testing.assert_close(y[:, order], again)
    turned = regression(*given, 3, True, True)
    again = regression(given[0][:, order], given[1][:, order], *given[2:], 3, True, True)
    assert (turned[:, order] - again).abs().max() > 0.1


def test_a_patch_is_read_by_all_others():
    mixer, h = build(), torch.randn(1, 12, 12, dtype=torch.float64)
    changed = h.clone()
    changed[:, 5] += 1
    difference = (mixer(h, 3) - mixer(changed, 3)).abs().amax(-1)[0]
    assert difference.min() > 1e-6


@pytest.mark.parametrize("solve", (False, True))
def test_patches_that_come_twice_say_nothing_new(solve):
    """So that images of any size have the same ridge."""
    given = inputs()
    twice = [value.repeat(1, 2, 1) for value in given[:2]]
    y, again = (regression(*values, *given[2:], 3, False, solve) for values in (given[:2], twice))
    torch.testing.assert_close(again, y.repeat(1, 2, 1))


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_in_narrower_dtypes(dtype, tolerance):
    mixer, h = build(dim=32, d_state=16, head_dim=32), torch.randn(2, 48, 32, dtype=torch.float64)
    expected = mixer(h, 6)
    found = mixer.to(dtype)(h.to(dtype), 6)
    assert found.dtype == dtype
    assert ((found - expected).norm() / expected.norm()).item() < tolerance


def test_under_autocast_the_inverse_keeps_its_digits():
    mixer, h = build(dim=32, d_state=16, head_dim=32).float(), torch.randn(2, 48, 32)
    with torch.no_grad():
        mixer.ridge_log.fill_(-6)  # eigenvalues from 0.002 on
    expected = mixer(h, 6)
    with torch.autocast("cpu", torch.bfloat16):
        found = mixer(h, 6)
    assert ((found - expected).norm() / expected.norm()).item() < 0.1


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(head_dim=48), "head_dim=48 does not divide the inner width of 128"),
        (dict(head_dim=0), "head_dim=0 does not divide"),
        (dict(d_conv=4), "d_conv=4: give an odd number"),
        (dict(d_state=6), "rope=True with d_state=6: give a multiple of 4"),
    ],
    ids=str,
)
def test_an_option_that_is_not_possible_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model("vlonghorn_test", mixer="offline", **POOLED, **options)


def test_muon_leaves_what_gives_keys_and_queries_to_adamw():
    mixer = build()
    optimizer = create_optimizer_v2(mixer, "muon", lr=1e-3, weight_decay=0.0)
    before = mixer.x_proj.detach().clone()
    mixer(torch.randn(1, 12, 12, dtype=torch.float64), 3).square().sum().backward()
    optimizer.step()
    moved = (mixer.x_proj - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-3), rtol=0.02, atol=0)  # AdamW's first step


def test_it_needs_the_grid_of_patches():
    with pytest.raises(ValueError, match="class_token"):
        timm.create_model("vlonghorn_test", mixer="offline")


@pytest.mark.parametrize("options", [dict(), dict(solve=False)], ids=str)
def test_a_model_of_it_learns_and_compiles(options):
    torch.manual_seed(0)
    model = timm.create_model(
        "vlonghorn_test", mixer="offline", img_size=32, depth=2, num_classes=3, **POOLED, **options
    )
    images, labels = torch.randn(6, 3, 32, 32), torch.tensor([0, 1, 2] * 2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images), model(images))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
