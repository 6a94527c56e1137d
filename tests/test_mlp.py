"""The MLP of a block: GELU after a bias as an operator, both backends against float64, and where the MLP takes it."""

import pytest
import torch
from scan_cases import relative_rms
from test_short_conv import BACKENDS, TOLERANCE
from timm.layers import Mlp
from torch import nn
from torch.nn import functional as F
from vision_longhorn.kernels import bias_gelu
from vision_longhorn.kernels.dispatch import get_backend

from vision_longhorn.models import mlp
from vision_longhorn.models.mlp import GeluMlp

SHAPES = ((1,), (3, 5, 7), (2, 1), (130, 33), (70, 300), (600, 130))


def make(shape, dtype, device="cpu"):
    """x, bias and dy, over all that GELU does."""
    x, bias, dy = torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)
    return (3 * x).to(device, dtype), bias.to(device), dy.to(device, dtype)


def run(backend, x, bias, dy):
    backend = get_backend(backend)
    y = backend.gelu_forward(x, bias)
    dx, dbias = backend.gelu_backward(dy, x, bias)
    assert y.dtype == dx.dtype == x.dtype and y.shape == dx.shape == x.shape and dbias.shape == bias.shape
    return {"y": y, "dx": dx, "dbias": dbias}


def expected(x, bias, dy):
    leaves = [value.double().requires_grad_() for value in (x, bias)]
    y = F.gelu(sum(leaves))
    return {"y": y.detach(), **dict(zip(("dx", "dbias"), torch.autograd.grad(y, leaves, dy.double())))}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(backend, dtype, shape):
    given = make(shape, dtype)
    wanted = expected(*given)
    for name, value in run(backend, *given).items():
        near = TOLERANCE[dtype]
        torch.testing.assert_close(value.double(), wanted[name], rtol=near, atol=near)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_number_is_far_off(backend):
    """In float32, from a grid over all that GELU does and far beyond it."""
    x = torch.cat([torch.linspace(-8, 8, 20_001), torch.logspace(-30, 30, 121), -torch.logspace(-30, 30, 121)])[:, None]
    bias, dy = torch.zeros(1), torch.ones_like(x)
    wanted = expected(x, bias, dy)
    for name, value in run(backend, x, bias, dy).items():
        if name != "dbias":
            torch.testing.assert_close(
                value.double(), wanted[name], rtol=3e-7, atol=1.3e-6 if backend == "torch" else 3e-7
            )


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_is_not_lost(backend):
    x = torch.tensor([[torch.nan], [torch.inf], [1.0]])
    y = get_backend(backend).gelu_forward(x, torch.zeros(1))[:, 0]
    assert y[0].isnan() and not y[1].isfinite()
    dx, dbias = get_backend(backend).gelu_backward(torch.ones_like(x), x, torch.zeros(1))
    assert dx[0].isnan() and dx[2].isfinite() and dbias.isnan()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_do(backend):
    for shape in ((0, 3), (3, 0)):
        x = torch.empty(shape)
        found = run(backend, x, torch.zeros(shape[-1]), x)
        assert not found["dbias"].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_operator_takes_any_strides(backend):
    x, bias, dy = make((6, 5, 8), torch.float32)
    turned, every = x.transpose(0, 1).requires_grad_(), bias.repeat_interleave(2)[::2].requires_grad_()
    y = bias_gelu(turned, every, backend)
    y.backward(dy.transpose(0, 1))
    wanted = expected(x, bias, dy)
    torch.testing.assert_close(y.double(), wanted["y"].transpose(0, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(turned.grad.double(), wanted["dx"].transpose(0, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(every.grad.double(), wanted["dbias"], rtol=1e-5, atol=1e-5)


def test_opcheck():
    x, bias, _ = make((4, 5, 6), torch.float32)
    arguments = x.requires_grad_(), bias.requires_grad_(), "auto"
    torch.library.opcheck(torch.ops.vision_longhorn.bias_gelu.default, arguments)


def test_a_bias_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"x \(2, 3\) and bias \(4,\)"):
        bias_gelu(torch.randn(2, 3), torch.randn(4))


@pytest.mark.parametrize("dtype", (torch.int64, torch.complex64, torch.bool))
def test_only_floats_are_taken(dtype):
    with pytest.raises(ValueError, match=f"x is {dtype}; use bfloat16, float16"):
        bias_gelu(torch.ones(2, 3, dtype=dtype), torch.zeros(3))
    with pytest.raises(ValueError, match=f"bias is {dtype}"):
        bias_gelu(torch.ones(2, 3), torch.zeros(3, dtype=dtype))
    with pytest.raises(ValueError, match="bias is on meta and x on cpu"):
        bias_gelu(torch.ones(2, 3), torch.zeros(3, device="meta"))


# The MLP


@pytest.fixture
def taken(notes_kernels):
    return notes_kernels(mlp)


def scaled(module):
    """A class of its own, as LoRA's and quantised layers have."""

    class Scaled(type(module)):
        def forward(self, x):
            return 2 * super().forward(x)

    module.__class__ = Scaled


def doubled(module):
    """A `forward` of its own, as accelerate's hooks give it."""
    forward = module.forward
    module.forward = lambda x: 2 * forward(x)


CHANGES = {
    "another forward": lambda one: doubled(one.fc1),
    "another forward of GELU": lambda one: doubled(one.act),
    "a hook before": lambda one: one.fc1.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "a hook after": lambda one: one.fc1.register_forward_hook(lambda module, args, out: 2 * out),
    "a hook of GELU": lambda one: one.act.register_forward_hook(lambda module, args, out: 2 * out),
    "a layer of another class": lambda one: scaled(one.fc1),
    "another activation": lambda one: setattr(one, "act", nn.ReLU()),
    "another GELU": lambda one: setattr(one, "act", nn.GELU("tanh")),
    "no bias": lambda one: setattr(one.fc1, "bias", None),
    "a weight in two parts": lambda one: nn.utils.parametrizations.weight_norm(one.fc1),
}


def test_the_kernel_gives_the_layers_results(taken):
    one, x = GeluMlp(6, 24), torch.randn(3, 5, 6)
    layers = one.fc2(F.gelu(one.fc1(x)))
    wanted = torch.autograd.grad(layers.square().sum(), [*one.parameters()])
    y = one(x)
    assert taken == [True]
    torch.testing.assert_close(y, layers)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), [*one.parameters()]), wanted)


def test_it_compiles_and_takes_many_weights_at_once(monkeypatch):
    monkeypatch.setattr(mlp, "_takes_kernel", lambda *_: True)
    one, x = GeluMlp(6, 24), torch.randn(3, 5, 6)
    y = one(x)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(one, backend="aot_eager", fullgraph=True)(x), y)
        many = torch.vmap(lambda weights: torch.func.functional_call(one, weights, x))
        found = many({name: torch.stack([value, 2 * value]) for name, value in one.state_dict().items()})
    torch.testing.assert_close(found[0], y)


@pytest.mark.parametrize("change", CHANGES)
def test_what_somebody_changed_is_not_passed_over(taken, change):
    one, x = GeluMlp(6, 24), torch.randn(3, 5, 6)
    before = one(x)
    CHANGES[change](one)
    if "weight" in change:
        one.fc1.parametrizations.weight.original0.data *= 2
    after = one(x)
    assert taken == [True, False]
    assert not torch.allclose(before, after, rtol=1e-4, atol=1e-5)
    h = one.fc1(x)
    torch.testing.assert_close(after, one.fc2(one.act(h)))


def test_a_hook_of_all_modules_is_not_passed_over(taken):
    one, x, seen = GeluMlp(6, 24), torch.randn(3, 5, 6), []
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
    one(x)
    hook.remove()
    one(x)
    assert taken == [False, True] and one.fc1 in seen and one.act in seen


def test_it_compiles_with_all_its_checks(monkeypatch, taken):
    monkeypatch.setattr(mlp, "takes_kernels", lambda x: True)  # the compiler sees where x is
    one, x = GeluMlp(6, 24), torch.randn(3, 5, 6)
    compiled = torch.compile(one, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), one.fc2(F.gelu(one.fc1(x))))
    assert taken == [True]


def test_what_follows_is_called(taken):
    one, x = GeluMlp(6, 24), torch.randn(3, 5, 6)
    one.norm = nn.LayerNorm(24)
    y = one(x)
    assert taken == [True]
    torch.testing.assert_close(y, one.fc2(one.norm(F.gelu(one.fc1(x)))))
    one.drop1.p = one.drop2.p = 1
    assert not one(x).any()


def test_where_the_layers_are_called(taken):
    one = GeluMlp(4, 8).double()
    one(torch.randn(2, 4).double())
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        one = GeluMlp(4, 8)
        getattr(one.fc1, register)(lambda module, *grads: None)
        one(torch.randn(2, 4))
    one = GeluMlp(4, 8)
    torch.jit.trace(one, torch.randn(2, 4), check_trace=False)
    assert not any(taken)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("convert", (torch.jit.script, torch.fx.symbolic_trace, lambda one: one))
def test_on_a_cpu_it_is_timms(convert):
    one, x = GeluMlp(4, 8), torch.randn(2, 4)
    torch.testing.assert_close(convert(one)(x), Mlp.forward(one, x))
    assert not mlp._takes_kernel(one.fc1, one.act, x)


def test_exported_programs_have_torchs_own(taken):
    program = torch.export.export(GeluMlp(4, 8), (torch.randn(2, 4),), strict=False)
    targets = [node.target for node in program.graph.nodes]
    assert torch.ops.aten.gelu.default in targets and torch.ops.vision_longhorn.bias_gelu.default not in targets


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", (*SHAPES, (50_176, 1536), (65_537, 768), (999, 3072)))
def test_gpu_values_gradients_and_bits(dtype, shape):
    given = make(shape, dtype, "cuda")
    wanted, found = expected(*given), run("triton", *given)
    for name, value in found.items():
        limit = TOLERANCE[dtype] if name != "dbias" else 1e-5  # no rounded number enters its sums
        assert relative_rms(value, wanted[name]) <= limit, (name, shape)
    for _ in range(20):
        again = run("triton", *given)
        assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.gpu
def test_gpu_a_model_takes_the_kernel_eager_and_compiled():
    torch.manual_seed(0)
    one, x = GeluMlp(192, 768, device="cuda"), torch.randn(64, 256, 192, device="cuda")
    layers = one.fc2(F.gelu(one.fc1(x)))
    wanted = torch.autograd.grad(layers.square().mean(), [*one.parameters()])
    for call in (one, torch.compile(one, fullgraph=True)):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            y = call(x)
            found = torch.autograd.grad(y.square().mean(), [*one.parameters()])
        assert {"_gelu_kernel", "_gelu_backward_kernel"} <= {event.name for event in profile.events()}
        torch.testing.assert_close(y, layers, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(call(x), layers, rtol=1e-3, atol=1e-3)
