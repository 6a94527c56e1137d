"""The convolution over the grid of patches inside the mixer: both backends against the plain loop and autograd in
float64, the Triton kernels interpreted on the CPU and, marked `gpu`, at full size on a GPU."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from plain_model import plain_grid_conv
from scan_cases import relative_rms
from test_short_conv import BACKENDS, half, needs_triton
from test_short_conv import TOLERANCE as ONE_ROUNDING
from vision_longhorn.kernels import grid_conv
from vision_longhorn.kernels.dispatch import get_backend

# Two walks may follow each other, and the interpreter cuts bfloat16's digits off instead of rounding.
TOLERANCE = ONE_ROUNDING | {torch.bfloat16: 2e-2}


def make(B, rows, columns, D, K, dtype, *, device="cpu", seed=0):
    """x, weight and dy of values that `dtype` holds, and bias; float64."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    x, dy = (draw(*lead, B, rows * columns, D).to(dtype).double() for lead in ((), (1,)))
    return x, draw(1, D, K, K).double() / K, draw(1, D).double() * 0.5, dy


def run(backend, x, weight, bias, dy, rows, dtype, *, weights=torch.float32, shift=0):
    """y and the gradients, with views for x and dx, and what the views must leave alone."""
    D = x.shape[-1]
    _, x = half(x, dtype, shift)
    whole, dx = half(torch.full_like(x, float("nan")), dtype, shift)
    weight, bias = weight.to(weights), bias.to(weights)
    backend = get_backend(backend)
    y = backend.grid_conv_forward(x, weight, bias, rows)
    dweight, dbias = backend.grid_conv_backward(dy.to(dtype), x, weight, bias, dx, rows)
    assert y.is_contiguous() and y.dtype == dtype
    assert dweight.dtype == dbias.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert bool((whole[..., :shift] == 7).all() and (whole[..., shift + D :] == 7).all()), "dx wrote beside its view"
    place = torch.full_like(y, float("nan"))
    assert torch.equal(backend.grid_conv_forward(x, weight, bias, rows, place), y) and torch.equal(place, y)
    return {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}


def compare(got, x, weight, bias, dy, rows, dtype):
    leaves = [value.requires_grad_() for value in (x, weight, bias)]
    y = plain_grid_conv({"conv_weight": weight, "conv_bias": bias}, x, rows)[None]
    expected = dict(zip(("y", "dx", "dweight", "dbias"), (y.detach(), *torch.autograd.grad(y, leaves, dy))))
    for name, value in got.items():
        assert value.shape == expected[name].shape, (name, value.shape)
    found = {name: relative_rms(value, expected[name]) for name, value in got.items()}
    assert max(found.values()) <= TOLERANCE[dtype], (tuple(x.shape), tuple(weight.shape), rows, dtype, found)


def check(backend, B, rows, columns, D, K, dtype, **options):
    inputs = make(B, rows, columns, D, K, dtype)
    compare(run(backend, *inputs, rows, dtype, **options), *inputs, rows, dtype)


GRIDS = ((1, 1), (1, 7), (7, 1), (2, 2), (3, 5), (6, 4))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("D", (1, 33, 64, 72))
def test_values_and_gradients(backend, dtype, D):
    """Every D with every K, and with grids that go round."""
    grids = itertools.cycle(GRIDS[D % 5 :] + GRIDS[: D % 5])
    for K, (rows, columns) in zip((1, 3, 5, 3), grids):
        check(backend, 2 if K < 5 else 1, rows, columns, D, K, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows,columns", GRIDS)
def test_grids(backend, rows, columns):
    for K in (3, 7) if rows == 3 else (3,):
        check(backend, 2, rows, columns, 5, K, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_unaligned_views_and_weights_of_low_precision(backend, dtype):
    x, weight, bias, dy = make(2, 3, 5, 64, 3, dtype)
    inputs = x, weight.bfloat16().double(), bias.bfloat16().double(), dy, 3
    compare(run(backend, *inputs, dtype, weights=torch.bfloat16, shift=3), *inputs, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_and_saturated_activations(backend):
    check(backend, 1, 6, 6, 64, 3, torch.float16)
    x, weight, bias, dy = make(2, 3, 4, 64, 3, torch.float32)
    inputs = x, weight, bias.sign() * 300, dy, 3  # exp(300) is beyond float32
    got = run(backend, *inputs, torch.float32)
    assert all(bool(value.isfinite().all()) for value in got.values())
    compare(got, *inputs, torch.float32)


def test_float64():
    check("torch", 2, 3, 5, 6, 3, torch.float64, weights=torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("B", (0, 2))
def test_strides_in_any_order(backend, B):
    """x and dx whose sequences lie inside one another, (L, B, D) in memory."""
    x, weight, bias, dy = make(B, 2, 4, 16, 3, torch.float32)
    turned = x.float().transpose(0, 1).contiguous().transpose(0, 1)
    dx = torch.empty_like(turned)
    assert B == 0 or not dx.is_contiguous()
    backend = get_backend(backend)
    y = backend.grid_conv_forward(turned, weight.float(), bias.float(), 2)
    dweight, dbias = backend.grid_conv_backward(dy.float(), turned, weight.float(), bias.float(), dx, 2)
    assert B or not dweight.any() and not dbias.any()
    if B:
        compare({"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}, x, weight, bias, dy, 2, torch.float32)


@needs_triton
@pytest.mark.parametrize("B,columns,programs,segments", ((1, 17, 6, 2), (4, 5, 3, 1)))
@pytest.mark.parametrize("rows,K", ((1, 3), (9, 3), (5, 5)))
def test_segments_and_programs_of_several_bands(B, columns, programs, segments, rows, K, monkeypatch):
    """Few bands, whose columns are cut, and more bands than programs; the last band is not whole."""
    from vision_longhorn.kernels.backends.triton import grid_conv as triton_grid_conv

    monkeypatch.setattr(triton_grid_conv, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(triton_grid_conv, "_PROGRAMS", dict.fromkeys(triton_grid_conv._ROWS, programs))
    x, weight = torch.empty(B, rows * columns, 5), torch.empty(1, 5, K, K)
    for walk in [walk for walk, sizes in triton_grid_conv._ROWS.items() if K in sizes]:
        _, args = triton_grid_conv._prepare(walk, x, weight, rows, x)
        assert args["segments"] == segments and (args["programs"] < args["items"]) == (B > 1), walk
    check("triton", B, rows, columns, 5, K, torch.float32)


def convolved(x, weight, bias, rows):
    """What the plain loop gives, for real sizes."""
    grid = x.unflatten(1, (rows, -1)).permute(0, 3, 1, 2)
    grid = F.conv2d(grid, weight[0, :, None], bias[0], padding=weight.shape[-1] // 2, groups=weight.shape[1])
    return F.silu(grid.permute(0, 2, 3, 1).flatten(1, 2))[None]


def gpu_check(B, rows, columns, D, K, dtype, **options):
    """On a GPU; the reference in float64 goes over a few sequences at a time, as a whole batch takes too much."""
    x, weight, bias, dy = make(B, rows, columns, D, K, dtype, device="cuda")
    x, dy = x.to(dtype), dy.to(dtype)
    got = run("triton", x, weight, bias, dy, rows, dtype, **options)
    dweight, dbias = torch.zeros_like(weight), torch.zeros_like(bias)
    for part in torch.arange(B).split(16):
        leaves = [value.requires_grad_() for value in (x[part].double(), weight.clone(), bias.clone())]
        y = convolved(*leaves, rows)
        dx, *more = torch.autograd.grad(y, leaves, dy[:, part].double())
        found = relative_rms(got["y"][:, part], y), relative_rms(got["dx"][part], dx)
        assert max(found) <= ONE_ROUNDING[dtype], (B, rows, columns, D, K, dtype, part, found)
        dweight += more[0]
        dbias += more[1]
    found = relative_rms(got["dweight"], dweight), relative_rms(got["dbias"], dbias)
    limit = min(ONE_ROUNDING[dtype], 1e-3)  # no rounded number enters these sums
    assert max(found) <= limit, (B, rows, columns, D, K, dtype, found)


@pytest.mark.gpu
@pytest.mark.parametrize("B,rows,columns,D", ((256, 14, 14, 768), (2, 78, 78, 384), (16, 28, 28, 384)))
def test_gpu_real_sizes(B, rows, columns, D):
    gpu_check(B, rows, columns, D, 3, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("D", (1, 33, 64, 72, 192))
def test_gpu_awkward_sizes(dtype, D):
    for (rows, columns), K in itertools.product((*GRIDS, (14, 14), (9, 40)), (1, 3, 5, 7)):
        gpu_check(3, rows, columns, D, K, dtype, shift=3 if rows == 3 else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("B,rows,D", ((256, 14, 768), (2, 78, 384)))
def test_gpu_same_bits(B, rows, D):
    inputs = make(B, rows, rows, D, 3, torch.bfloat16, device="cuda")
    first = run("triton", *inputs, rows, torch.bfloat16)
    for _ in range(20):
        again = run("triton", *inputs, rows, torch.bfloat16)
        assert all(torch.equal(first[name], again[name]) for name in first)


# The operator


def operands(dtype=torch.float32, device="cpu"):
    torch.manual_seed(1)
    x, weight, bias = torch.randn(2, 12, 10), torch.randn(10, 3, 3), torch.randn(10)
    return [value.to(device, dtype).requires_grad_() for value in (x, weight, bias)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_operator_is_the_convolution(backend):
    x, weight, bias = operands()
    dy = torch.randn(2, 12, 10)
    y = grid_conv(x[..., ::2], weight[::2], bias[::2], 3, backend)
    got = torch.autograd.grad(y, (x, weight, bias), dy[..., ::2])
    plain = F.silu(
        F.conv2d(x.view(2, 3, 4, 10).permute(0, 3, 1, 2)[:, ::2], weight[::2, None], bias[::2], padding=1, groups=5)
    )
    plain = plain.permute(0, 2, 3, 1).flatten(1, 2)
    expected = torch.autograd.grad(plain, (x, weight, bias), dy[..., ::2])
    for found, right in zip((y, *got), (plain, *expected), strict=True):
        assert relative_rms(found, right.double()) <= ONE_ROUNDING[torch.float32]


def test_operator_keeps_torchs_rules():
    torch.library.opcheck(torch.ops.vision_longhorn.grid_conv.default, (*operands(), 4, "auto"))


@pytest.mark.parametrize(
    "shapes,rows,words",
    [
        (((2, 12, 10), (10, 3, 2), (10,)), 3, "odd K"),
        (((2, 12, 10), (9, 3, 3), (10,)), 3, "(9, 3, 3)"),
        (((12, 10), (10, 3, 3), (10,)), 3, "x (12, 10)"),
        (((2, 12, 10), (10, 3, 3), (10,)), 5, "rows=5 with 12 tokens"),
        (((2, 12, 10), (10, 3, 3), (10,)), 0, "rows=0"),
        (((), (10, 3, 3), (10,)), 3, "x ()"),
        (((2, 12, 10), (), (10,)), 3, "weight ()"),
        (((2, 0, 10), (10, 3, 3), (10,)), 3, "0 tokens and 10 channels"),
        (((2, 12, 0), (0, 3, 3), (0,)), 3, "12 tokens and 0 channels"),
    ],
)
def test_operator_names_what_is_wrong(shapes, rows, words):
    with pytest.raises(ValueError) as error:
        grid_conv(*map(torch.empty, shapes), rows)
    assert words in str(error.value)


def test_operator_takes_only_floats():
    x, weight, bias = operands()
    with pytest.raises(ValueError, match="x is torch.int64; use bfloat16"):
        grid_conv(x.long(), weight, bias, 4)
