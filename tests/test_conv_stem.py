"""The stem of convolutions: layer norm and SiLU after a bias as an operator, both backends against float64, and where
the stem takes it."""

import pytest
import torch
from scan_cases import relative_rms
from test_short_conv import BACKENDS, TOLERANCE, needs_triton
from timm.layers import LayerNorm2d
from torch import nn
from torch.nn import functional as F
from vision_longhorn.kernels import bias_norm_silu
from vision_longhorn.kernels.dispatch import get_backend

from vision_longhorn.models import conv_stem
from vision_longhorn.models.conv_stem import ConvStem

SHAPES = ((1,), (3, 5, 7), (2, 1), (130, 33), (600, 48), (40, 300))
EPS = 1e-3
NAMES = "dx", "dbias", "dnorm_weight", "dnorm_bias"


def make(shape, dtype, device="cpu"):
    """x, dy, and the vectors bias, norm_weight and norm_bias; each row of x has its own mean and size."""
    x = torch.randn(shape) * torch.rand(*shape[:-1], 1) * 3 + torch.randn(*shape[:-1], 1)
    vectors = torch.randn(3, shape[-1])
    return (x.to(device, dtype), torch.randn(shape).to(device, dtype), *vectors.to(device))


def run(backend, x, dy, *vectors):
    backend = get_backend(backend)
    y = backend.norm_silu_forward(x, *vectors, EPS)
    grads = backend.norm_silu_backward(dy, x, *vectors, EPS)
    assert y.dtype == grads[0].dtype == x.dtype and y.shape == grads[0].shape == x.shape
    assert all(grad.shape == vector.shape for grad, vector in zip(grads[1:], vectors, strict=True))
    return {"y": y, **dict(zip(NAMES, grads))}


def expected(x, dy, *vectors):
    leaves = [value.double().requires_grad_() for value in (x, *vectors)]
    x, bias, *norm = leaves
    y = F.silu(F.layer_norm(x + bias, x.shape[-1:], *norm, EPS))
    return {"y": y.detach(), **dict(zip(NAMES, torch.autograd.grad(y, leaves, dy.double())))}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(backend, dtype, shape):
    given = make(shape, dtype)
    wanted = expected(*given)
    for name, value in run(backend, *given).items():
        near = TOLERANCE[dtype if name in ("y", "dx") else torch.float32]  # no rounded number enters sums
        assert relative_rms(value, wanted[name]) <= near or torch.allclose(value.double(), wanted[name], atol=near), (
            name
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mean_far_from_zero_costs_no_digits(backend):
    """As the difference of two large sums, the variance would."""
    x = 100 + torch.randn(9, 48)
    given = x, torch.randn(9, 48), torch.zeros(48), torch.ones(48), torch.zeros(48)
    wanted = expected(*given)
    for name, value in run(backend, *given).items():
        assert relative_rms(value, wanted[name]) <= 3e-5, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_works_without_an_eps(backend):
    """Rows that fill up a tile have a variance of zero."""
    x, dy, bias, *norm = make((5, 8), torch.float32)
    backend, vectors = get_backend(backend), (torch.zeros_like(bias), *norm)
    near = [value for value in backend.norm_silu_backward(dy, x, *vectors, 1e-12)]
    for value, other in zip(backend.norm_silu_backward(dy, x, *vectors, 0.0), near, strict=True):
        torch.testing.assert_close(value, other)


@needs_triton
@pytest.mark.parametrize("parts", (1, 4, 5, 300, 513))
def test_sums_over_many_parts(parts):
    from vision_longhorn.kernels.backends.triton.finish import sum_sequences

    values = torch.randn(2, parts, 37), torch.randn(2, parts, 37)
    for value, total in zip(values, sum_sequences(*values), strict=True):
        torch.testing.assert_close(total, value.sum(1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_stays_in_its_row(backend):
    x, dy, *vectors = make((3, 5), torch.float32)
    x[0, 2], x[2, 1] = torch.nan, torch.inf
    found = run(backend, x, dy, *vectors)
    for name in ("y", "dx"):
        assert found[name][::2].isnan().all() and found[name][1].isfinite().all()
    assert all(found[name].isnan().all() for name in NAMES[1:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_do(backend):
    for shape in ((0, 3), (3, 0)):
        x = torch.empty(shape)
        found = run(backend, x, x, *torch.ones(3, shape[-1]))
        assert not any(found[name].any() for name in NAMES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_operator_takes_any_strides(backend):
    x, dy, *vectors = make((6, 5, 8), torch.float32)
    turned = x.transpose(0, 1).requires_grad_()
    every = [vector.repeat_interleave(2)[::2].requires_grad_() for vector in vectors]
    y = bias_norm_silu(turned, *every, EPS, backend)
    found = torch.autograd.grad(y, [turned, *every], dy.transpose(0, 1))
    wanted = expected(x, dy, *vectors)
    torch.testing.assert_close(y.double(), wanted["y"].transpose(0, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0].double(), wanted["dx"].transpose(0, 1), rtol=1e-4, atol=1e-5)
    for name, value in zip(NAMES[1:], found[1:], strict=True):
        torch.testing.assert_close(value.double(), wanted[name], rtol=1e-4, atol=1e-5)


def test_opcheck():
    x, _, *vectors = make((4, 5, 6), torch.float32)
    arguments = *(value.requires_grad_() for value in (x, *vectors)), EPS, "auto"
    torch.library.opcheck(torch.ops.vision_longhorn.bias_norm_silu.default, arguments)


@pytest.mark.parametrize("place, name", list(enumerate(("bias", "norm_weight", "norm_bias"))))
def test_a_vector_of_another_width_or_type_is_refused(place, name):
    x, vectors = torch.randn(2, 3), [torch.ones(3) for _ in range(3)]
    for other, told in (
        (torch.ones(4), rf"x \(2, 3\) and {name} \(4,\)"),
        (torch.ones(3, dtype=torch.int64), f"{name} is torch.int64"),
        (torch.ones(3, device="meta"), f"{name} is on meta and x on cpu"),
    ):
        with pytest.raises(ValueError, match=told):
            bias_norm_silu(x, *vectors[:place], other, *vectors[place + 1 :], EPS)


# The stem


@pytest.fixture
def taken(notes_kernels):
    return notes_kernels(conv_stem)


def make_stem(patch=4):
    torch.manual_seed(0)
    return ConvStem(3, 24, (patch, patch), EPS), torch.randn(2, 3, 3 * patch, 2 * patch + 1)


def by_layers(stem, x):
    """What the stem's layers give one by one."""
    side = stem.side
    x = x[..., : x.shape[-1] // side * side]
    return nn.Sequential.forward(stem, x)


@pytest.mark.parametrize("patch", (4, 8, 16))
def test_the_kernel_gives_the_layers_results(taken, patch):
    stem, x = make_stem(patch)
    layers = by_layers(stem, x)
    wanted = torch.autograd.grad(layers.square().sum(), [*stem.parameters()])
    y = stem(x)
    assert taken == [True]
    torch.testing.assert_close(y, layers, rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(y.square().sum(), [*stem.parameters()])
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_it_compiles_with_all_its_checks(monkeypatch, taken, backend):
    monkeypatch.setattr(conv_stem, "takes_kernels", lambda x: True)  # the compiler sees where x is
    stem, x = make_stem()
    found = torch.compile(stem, backend=backend, fullgraph=True)(x)
    assert taken == [True]
    torch.testing.assert_close(found, by_layers(stem, x), rtol=1e-4, atol=1e-5)


def without_bias(stem):
    del stem[0].bias
    stem[0].bias = None


def doubled(stem):
    forward = stem[2].forward
    stem[2].forward = lambda x: 2 * forward(x)


CHANGES = {
    "a hook after": lambda stem: stem[0].register_forward_hook(lambda module, args, out: 2 * out),
    "a hook before": lambda stem: stem[5].register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "another activation": lambda stem: stem.__setitem__(2, nn.ReLU()),
    "another norm": lambda stem: stem.__setitem__(4, nn.BatchNorm2d(12)),
    "no bias": lambda stem: setattr(stem[3], "bias", None),
    "a bias that is no parameter": without_bias,
    "a norm without weights": lambda stem: stem.__setitem__(1, LayerNorm2d(6, affine=False)),
    "another forward": doubled,
    "a hook of gradients": lambda stem: stem[3].register_full_backward_hook(lambda module, *grads: None),
    "a layer less": lambda stem: stem.pop(5),
    "a weight in two parts": lambda stem: nn.utils.parametrizations.weight_norm(stem[3]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_somebody_changed_is_not_passed_over(taken, change):
    stem, x = make_stem()
    before = stem(x)
    CHANGES[change](stem)
    if "weight in" in change:
        stem[3].parametrizations.weight.original0.data *= 2
    after = stem(x)
    assert taken == [True, False]
    if change not in ("a hook of gradients", "a norm without weights"):
        assert not torch.allclose(before, after, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after, by_layers(stem, x))


def test_layers_that_follow_are_called(taken):
    stem, x = make_stem()
    stem.append(nn.BatchNorm2d(24))
    stem.append(nn.GELU())
    torch.testing.assert_close(stem(x), by_layers(stem, x), rtol=1e-4, atol=1e-5)
    for _ in range(3):
        stem.pop(6)
    torch.testing.assert_close(stem(x), by_layers(stem, x), rtol=1e-4, atol=1e-5)
    assert taken == [True, True]


def test_where_the_layers_are_called(taken):
    stem, x = make_stem()
    stem.double()(x.double())
    stem, x = make_stem()
    program = torch.export.export(stem, (x,), strict=False)
    assert torch.ops.vision_longhorn.bias_norm_silu.default not in [node.target for node in program.graph.nodes]
    torch.jit.trace(stem, x, check_trace=False)
    assert taken and not any(taken)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", (*SHAPES, (100_001, 48), (50_176, 96), (999, 3072)))
def test_gpu_values_gradients_and_bits(dtype, shape):
    given = make(shape, dtype, "cuda")
    wanted, found = expected(*given), run("triton", *given)
    for name, value in found.items():
        near = TOLERANCE[dtype] if name in ("y", "dx") else 1e-5
        assert relative_rms(value, wanted[name]) <= near or torch.allclose(value.double(), wanted[name], atol=near), (
            name
        )
    for _ in range(20):
        again = run("triton", *given)
        assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.gpu
@pytest.mark.parametrize("dim, patch, side", ((192, 4, 64), (384, 16, 224)))
def test_gpu_a_stem_takes_the_kernel_eager_and_compiled(dim, patch, side):
    torch.manual_seed(0)
    stem, x = ConvStem(3, dim, (patch, patch), 1e-5, device="cuda"), torch.randn(8, 3, side, side, device="cuda")
    wanted = by_layers(stem.double(), x.double())
    grads = torch.autograd.grad(wanted.square().mean(), [*stem.parameters()])
    stem.float()
    for call in (stem, torch.compile(stem, fullgraph=True)):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            with torch.autocast("cuda", torch.bfloat16):
                y = call(x)
            found = torch.autograd.grad(y.float().square().mean(), [*stem.parameters()])
        assert {"_norm_silu_kernel", "_norm_silu_backward_kernel"} <= {event.name for event in profile.events()}
        assert y.is_contiguous(memory_format=torch.channels_last) and relative_rms(y, wanted) < 1e-2
        assert all(relative_rms(one, other) < 3e-2 for one, other in zip(found, grads, strict=True))
