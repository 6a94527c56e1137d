"""The RMS norm of the residual stream: its gradients by both backends against float64, and where a block takes it."""

import pytest
import torch
from scan_cases import relative_rms
from test_short_conv import BACKENDS, TOLERANCE, needs_triton
from torch import nn
from torch.nn import functional as F
from vision_longhorn.kernels import residual_norm
from vision_longhorn.kernels.dispatch import get_backend

from vision_longhorn.models import norm
from vision_longhorn.models.backbone import Block
from vision_longhorn.models.grid_conv import GridConv

SHAPES = ((1, 1, 1, 0), (2, 6, 7, 0), (2, 6, 7, 3), (3, 35, 33, 5), (1, 130, 48, 13), (40, 3, 300, 1), (2, 2, 5000, 2))
EPS = 1e-3


def make(shape, dtype, device="cpu"):
    """The two gradients dh and dx, x, and the weight; each token of x has its own size."""
    B, L, D, _ = shape
    x = torch.randn(B, L, D) * (torch.rand(B, L, 1) * 3)
    tensors = torch.randn(B, L, D), torch.randn(B, L, D), x
    return (*(value.to(device, dtype) for value in tensors), torch.randn(D, device=device))


def turned(h, rows):
    return h.unflatten(1, (rows, -1)).transpose(1, 2).flatten(1, 2) if rows else h


def expected(dh, dx, x, weight, rows, eps=EPS):
    leaves = x, weight = [value.detach().double().requires_grad_() for value in (x, weight)]
    h = turned(F.rms_norm(x, weight.shape, weight, eps), rows)
    return torch.autograd.grad([h, 1 * x], leaves, [dh.double(), dx.double()])


def run(backward, dh, dx, x, weight, eps, rows):
    total, dweight = torch.full_like(x, torch.nan), torch.full_like(weight, torch.nan)
    backward(dh, dx, x, weight, total, dweight, eps, rows)
    return total, dweight


def near(found, wanted, dtype):
    assert found[0].dtype == dtype and found[0].shape == wanted[0].shape
    for value, other in zip(found, wanted, strict=True):
        at_most = TOLERANCE[value.dtype]  # no rounded number enters the weight's sums
        assert relative_rms(value, other) <= at_most or torch.allclose(value.double(), other, atol=at_most)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(backend, dtype, shape):
    given, rows = make(shape, dtype), shape[-1]
    near(run(get_backend(backend).residual_norm_backward, *given, EPS, rows), expected(*given, rows), dtype)


@needs_triton
def test_a_program_takes_many_tiles(monkeypatch):
    from vision_longhorn.kernels.backends.triton import residual_norm as module

    monkeypatch.setattr(module, "multiprocessors", lambda device: 1)
    shape = 3, 95, 33, 5  # 285 rows in tiles of 32, by 4 programs
    given = make(shape, torch.float32)
    near(run(module.backward, *given, EPS, 5), expected(*given, 5), torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_tensor_may_have_its_own_dtype(backend):
    dh, dx, x, weight = make((2, 6, 8, 0), torch.float32)
    given = dh.bfloat16(), dx.half(), x, weight.bfloat16()
    near(run(get_backend(backend).residual_norm_backward, *given, EPS, 0), expected(*given, 0), torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_works_without_an_eps(backend):
    """Rows that fill up a tile have a mean square of zero."""
    given = make((1, 5, 8, 0), torch.float32)
    near(run(get_backend(backend).residual_norm_backward, *given, 0.0, 0), expected(*given, 0, eps=0.0), torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_stays_in_its_token(backend):
    dh, dx, x, weight = make((1, 3, 5, 0), torch.float32)
    x[0, 0, 2], dx[0, 2, 1] = torch.nan, torch.inf
    found, of_weight = run(get_backend(backend).residual_norm_backward, dh, dx, x, weight, EPS, 0)
    assert found[0, 0].isnan().all() and found[0, 1].isfinite().all() and found[0, 2].isfinite().sum() == 4
    assert of_weight.isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_do(backend):
    for shape in ((0, 2, 3), (2, 0, 3), (2, 3, 0)):
        x = torch.empty(shape)
        dx, dweight = run(get_backend(backend).residual_norm_backward, x, x, x, torch.ones(shape[-1]), EPS, 0)
        assert dx.shape == shape and dweight.shape == shape[-1:] and not dweight.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", (0, 2))
def test_the_function_gives_x_and_its_norm(backend, rows):
    dh, dx, x, weight = make((3, 6, 8, rows), torch.float32)
    x = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()  # any strides
    weight = weight.repeat_interleave(2)[::2].requires_grad_()
    kept, h = residual_norm(x, weight, EPS, rows, backend=backend)
    assert torch.equal(kept, x)
    torch.testing.assert_close(h, turned(F.rms_norm(x, weight.shape, weight, EPS), rows))
    strided = [value.repeat_interleave(2, -1)[..., ::2] for value in (dh, dx)]
    near(torch.autograd.grad([h, kept], [x, weight], strided), expected(dh, dx, x, weight, rows), torch.float32)
    _, h = residual_norm(x, weight, EPS, rows, backend=backend)
    alone = torch.autograd.grad(h, [x, weight], dh)  # nobody goes on with x
    near(alone, expected(dh, 0 * dx, x, weight, rows), torch.float32)


@pytest.mark.parametrize("rows", (0, 2))
def test_the_gradient_has_gradients(rows):
    dh, dx, x, weight = (value.double() for value in make((2, 6, 4, rows), torch.float32))
    leaves = [value.requires_grad_() for value in (x, weight)]

    def call(x, weight):
        return residual_norm(x, weight, EPS, rows)

    assert torch.autograd.gradgradcheck(call, leaves, [dh.requires_grad_(), dx.requires_grad_()])
    many = torch.randn(3, *dh.shape, dtype=torch.float64)
    batched = torch.autograd.grad(call(*leaves)[1], leaves, many, is_grads_batched=True)
    for i, one in enumerate(many):
        alone = torch.autograd.grad(call(*leaves)[1], leaves, one)
        torch.testing.assert_close([value[i] for value in batched], [*alone])


def test_a_penalty_on_a_blocks_gradient_is_refused_and_not_wrong(taken):
    block, x = make_block()
    x.requires_grad_()
    (of_x,) = torch.autograd.grad(block(x, 2).square().sum(), x, create_graph=True)
    assert taken == [True, True]
    with pytest.raises(RuntimeError, match="mix_backward"):
        of_x.square().sum().backward()


def test_opcheck():
    given = make((2, 6, 8, 0), torch.float32)
    arguments = *given, torch.empty(2, 6, 8), torch.empty(8), EPS, 2, "auto"
    torch.library.opcheck(torch.ops.vision_longhorn.residual_norm_backward.default, arguments)


def test_bad_input_is_refused():
    x, weight = torch.randn(2, 6, 3), torch.ones(3)
    for given, told in (
        ((x, torch.ones(4)), r"x \(2, 6, 3\) and weight \(4,\)"),
        ((x[0], weight), r"x \(6, 3\) and weight \(3,\)"),
        ((x, weight, EPS, 4), "rows=4 with 6 tokens"),
        ((x, weight, EPS, -2), "rows=-2 with 6 tokens"),
        ((x, weight.long()), "weight is torch.int64"),
        ((x, weight.to("meta")), "weight is on meta and x on cpu"),
    ):
        with pytest.raises(ValueError, match=told):
            residual_norm(*given[:2], *(given[2:] or (EPS,)))
    for option, told in ((dict(dtype=torch.int32), "dtype=torch.int32"), (dict(backend="cuda"), "backend")):
        with pytest.raises(ValueError, match=told):
            residual_norm(x, weight, EPS, **option)


# In a block


@pytest.fixture
def taken(notes_kernels):
    return notes_kernels(norm)


def make_block(**options):
    torch.manual_seed(0)
    given = dict(class_token="none", mlp_ratio=2, reads_columns=True, gate="none", d_state=4, eps=EPS) | options
    return Block(12, **given), torch.randn(2, 6, 12)


def gradients(call, block, x, autocast=False):
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = call(x, 2)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *block.parameters()])]


@pytest.mark.parametrize("residual", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("autocast", (False, True))
def test_a_block_gives_the_same_with_it(taken, monkeypatch, residual, autocast):
    block, x = make_block()
    x = x.to(residual)
    found = gradients(block, block, x, autocast)
    assert taken == [True, True]
    monkeypatch.setattr(norm, "_takes_kernel", lambda *_: False)
    for value, wanted in zip(found, gradients(block, block, x, autocast), strict=True):
        assert value.dtype == wanted.dtype
        if autocast or residual == torch.bfloat16:
            assert relative_rms(value, wanted) < 1e-2
        else:
            torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)


def test_it_compiles_with_all_its_checks(monkeypatch, taken):
    monkeypatch.setattr(norm, "takes_kernels", lambda x: True)  # the compiler sees where x is
    block, x = make_block()
    wanted = gradients(block, block, x)
    found = gradients(torch.compile(block, backend="aot_eager", fullgraph=True), block, x)
    assert taken == [True] * 4
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class Doubled(nn.RMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


CHANGES = {
    "a hook after": lambda block: block.norm.register_forward_hook(lambda module, args, out: 2 * out),
    "another norm": lambda block: setattr(block, "norm", Doubled(12)),
    "another forward": lambda block: setattr(block.norm, "forward", lambda x: 2 * x),
    "a layer norm": lambda block: setattr(block, "norm", nn.LayerNorm(12)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_somebody_changed_is_not_passed_over(taken, change):
    block, x = make_block()
    before = block(x, 2)
    CHANGES[change](block)
    after = block(x, 2)
    assert taken == [True, True, False, True]
    assert not torch.allclose(before, after, rtol=1e-3, atol=1e-3)


def test_where_the_norm_is_called_by_itself(taken):
    block, x = make_block()
    with torch.no_grad():
        block(x, 2)
    block.double()(x.double(), 2)
    block, x = make_block(reads_columns=False)
    torch.export.export(block, (x,), strict=False)
    torch.jit.trace(block, x, check_trace=False)
    assert not any(taken) and len(taken) > 6


class Other(nn.Linear):
    pass


READERS = {
    "linear layers": (lambda block: None, torch.bfloat16),
    "a hook": (lambda block: block.mixer.register_forward_pre_hook(lambda module, args: None), torch.float32),
    "another class": (lambda block: setattr(block.mixer, "in_proj", Other(12, 48, bias=False)), torch.float32),
    "a convolution": (lambda block: setattr(block, "grid_conv", GridConv(12, 3, "none")), torch.float32),
}


@pytest.mark.parametrize("reader", READERS)
def test_only_linear_layers_get_what_autocast_would_give_them(taken, monkeypatch, reader):
    change, dtype = READERS[reader]
    block, x = make_block(gate="output")
    change(block)
    seen, residual_norm = [], norm.kernels.residual_norm

    def note(*given):
        seen.append(residual_norm(*given))
        return seen[-1]

    monkeypatch.setattr(norm.kernels, "residual_norm", note)
    with torch.autocast("cpu", torch.bfloat16):
        block(x, 2)
    assert taken == [True, True] and [h.dtype for _, h in seen] == [dtype, torch.bfloat16]


def test_patches_around_a_class_token_are_turned_after_the_norm(taken, monkeypatch):
    block, x = make_block(class_token="middle")
    x = torch.randn(2, 7, 12)
    found = gradients(block, block, x)
    assert taken == [True, True]
    monkeypatch.setattr(norm, "_takes_kernel", lambda *_: False)
    torch.testing.assert_close(found, gradients(block, block, x), rtol=1e-4, atol=1e-5)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", (*SHAPES, (256, 256, 192, 16), (128, 196, 384, 14), (3, 333, 3072, 0)))
def test_gpu_gradients_and_bits(dtype, shape):
    given, rows = make(shape, dtype, "cuda"), shape[-1]
    backward = get_backend("triton").residual_norm_backward
    found = run(backward, *given, EPS, rows)
    near(found, expected(*given, rows), dtype)
    for _ in range(20):
        again = run(backward, *given, EPS, rows)
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.gpu
def test_gpu_a_block_takes_the_kernel_eager_and_compiled():
    torch.manual_seed(0)
    block = Block(192, class_token="none", mlp_ratio=4, reads_columns=True, gate="none").cuda()
    x = torch.randn(8, 64, 192, device="cuda")
    leaves = [*block.parameters()]
    wanted = torch.autograd.grad(block.double()(x.double(), 8).square().mean(), leaves)
    block.float()
    for call in (block, torch.compile(block, fullgraph=True)):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            with torch.autocast("cuda", torch.bfloat16):
                y = call(x, 8)
            found = torch.autograd.grad(y.float().square().mean(), leaves)
        names = [event.name for event in profile.events()]
        assert names.count("_residual_norm_backward_kernel") == 2
        assert all(relative_rms(one, other) < 3e-2 for one, other in zip(found, wanted, strict=True))
