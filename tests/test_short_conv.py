"""The short convolution: both backends against the plain loop and autograd in float64, the Triton kernels interpreted
on the CPU and, marked `gpu`, at full size on a GPU."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from scan_cases import relative_rms
from vision_longhorn.kernels.dispatch import get_backend

from vision_longhorn import kernels

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
needs_triton = pytest.mark.skipif(not kernels.HAS_TRITON, reason="triton is not installed on this platform")
BACKENDS = ["torch", pytest.param("triton", marks=needs_triton)]
LENGTHS = (1, 2, 3, 5, 37, 197)


def plain(x, weight, bias, reversed=False):
    """The formula, token by token and tap by tap."""
    G, D, K = weight.shape
    B, L, _ = x.shape
    directions = []
    for g in range(G):
        tokens = []
        for t in range(L):
            pre = bias[g].expand(B, D)
            for i in range(K):
                at = t + (K - 1) - i if g == 1 or reversed else t - (K - 1) + i
                if 0 <= at < L:
                    pre = pre + weight[g, :, i] * x[:, at]
            tokens.append(F.silu(pre))
        directions.append(torch.stack(tokens, 1))
    return torch.stack(directions)


def shifted(x, weight, bias, reversed=False):
    """The same for all tokens at once, for real sizes."""
    L, K = x.shape[1], weight.shape[2]
    directions = []
    for g in range(len(weight)):
        ahead = g == 0 and not reversed
        taps = weight[g] if ahead else weight[g].flip(-1)
        padded = F.pad(x, [0, 0, K - 1, 0] if ahead else [0, 0, 0, K - 1])
        directions.append(F.silu(bias[g] + sum(padded[:, i : i + L] * taps[:, i] for i in range(K))))
    return torch.stack(directions)


def half(value, dtype, shift=0):
    """A copy of (B, L, D) as a part of wider rows, as a projection's output is cut; its rest is 7."""
    B, L, D = value.shape
    whole = torch.full((B, L, 2 * D + shift), 7.0, dtype=dtype, device=value.device)
    part = whole[..., shift : shift + D]
    part.copy_(value)
    return whole, part


def make(B, L, D, K, G, dtype, *, device="cpu", seed=0):
    """x, weight and dy of values that `dtype` holds, and bias; float64."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    return (
        draw(B, L, D).to(dtype).double(),
        draw(G, D, K).double() * K**-0.5,
        draw(G, D).double() * 0.5,
        draw(G, B, L, D).to(dtype).double(),
    )


def run(backend, x, weight, bias, dy, dtype, *, weights=torch.float32, shift=0, reversed=False):
    """y and the gradients, with views for x and dx, and what the views must leave alone."""
    B, L, D = x.shape
    _, x = half(x, dtype, shift)
    whole, dx = half(torch.full_like(x, float("nan")), dtype, shift)
    weight, bias = weight.to(weights), bias.to(weights)
    backend = get_backend(backend)
    y = backend.conv_forward(x, weight, bias, reversed)
    dweight, dbias = backend.conv_backward(dy.to(dtype), x, weight, bias, dx, reversed)
    assert y.is_contiguous() and y.dtype == dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert dweight.dtype == dbias.dtype == wide and dweight.is_contiguous() and dbias.is_contiguous()
    assert bool((whole[..., :shift] == 7).all() and (whole[..., shift + D :] == 7).all()), "dx wrote beside its view"
    return {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}


def compare(got, x, weight, bias, dy, dtype, reversed=False):
    leaves = [value.requires_grad_() for value in (x, weight, bias)]
    y = plain(*leaves, reversed)
    expected = dict(zip(("y", "dx", "dweight", "dbias"), (y.detach(), *torch.autograd.grad(y, leaves, dy))))
    for name, value in got.items():
        assert value.shape == expected[name].shape, (name, value.shape)
    found = {name: relative_rms(value, expected[name]) for name, value in got.items()}
    assert max(found.values()) <= TOLERANCE[dtype], (tuple(x.shape), tuple(weight.shape), dtype, found)


def check(backend, B, L, D, K, G, dtype, **options):
    inputs = make(B, L, D, K, G, dtype)
    compare(run(backend, *inputs, dtype, **options), *inputs, dtype, options.get("reversed", False))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("D", (1, 33, 64, 70))
def test_values_and_gradients(backend, dtype, D):
    """Every D with every K and G, and with lengths that go round."""
    for (K, G), L in zip(itertools.product((1, 2, 4, 5), (1, 2)), itertools.cycle((5, 2, 9, 1, 3))):
        check(backend, 2 if L < 4 else 1, L, D, K, G, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_second_direction_alone(backend):
    for L, K, D, dtype in ((5, 1, 33, torch.float32), (9, 4, 64, torch.bfloat16), (3, 5, 6, torch.float32)):
        check(backend, 2, L, D, K, 1, dtype, reversed=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("L,K", [(L, K) for L in LENGTHS for K in (1, 4, 8) if L < 197 or K == 4])
def test_lengths_and_widths(backend, L, K):
    check(backend, 2 if L < 4 else 1, L, 5, K, 2, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_unaligned_views_and_weights_of_low_precision(backend, dtype):
    inputs = make(2, 9, 64, 4, 2, dtype)
    inputs = (inputs[0], inputs[1].bfloat16().double(), inputs[2].bfloat16().double(), inputs[3])
    compare(run(backend, *inputs, dtype, weights=torch.bfloat16, shift=3), *inputs, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_and_saturated_activations(backend):
    x, weight, bias, dy = make(2, 11, 64, 4, 2, torch.float16)
    check(backend, 1, 37, 64, 4, 2, torch.float16)
    inputs = x, weight, bias.sign() * 300, dy  # exp(300) is beyond float32
    got = run(backend, *inputs, torch.float32)
    assert all(bool(value.isfinite().all()) for value in got.values())
    compare(got, *inputs, torch.float32)


def test_float64():
    check("torch", 2, 9, 6, 4, 2, torch.float64, weights=torch.float64)
    if kernels.HAS_TRITON:
        with pytest.raises(ValueError, match="backend='torch'"):
            check("triton", 2, 9, 6, 4, 2, torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("B", (0, 2))
def test_strides_in_any_order(backend, B):
    """x and dx whose sequences lie inside one another, (L, B, D) in memory."""
    x, weight, bias, dy = make(B, 7, 16, 4, 2, torch.float32)
    turned = x.float().transpose(0, 1).contiguous().transpose(0, 1)
    dx = torch.empty_like(turned)
    assert B == 0 or not dx.is_contiguous()
    backend = get_backend(backend)
    y = backend.conv_forward(turned, weight.float(), bias.float())
    dweight, dbias = backend.conv_backward(dy.float(), turned, weight.float(), bias.float(), dx)
    compare({"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}, x, weight, bias, dy, torch.float32)


@needs_triton
@pytest.mark.parametrize(
    "K,G,multiprocessors,segments,reversed",
    ((4, 1, 1, 3, False), (4, 1, 1, 3, True), (4, 2, 1, 3, False), (8, 2, 1, 3, False), (4, 2, 0, 1, False)),
)
def test_segments(K, G, multiprocessors, segments, reversed, monkeypatch):
    """Many segments and one give the same y and gradients."""
    from vision_longhorn.kernels.backends.triton import conv as triton_conv

    monkeypatch.setattr(triton_conv, "multiprocessors", lambda device: multiprocessors)
    assert triton_conv._cut(70, 2, torch.device("cpu"), 4)[0] == segments
    check("triton", 2, 70, 6, K, G, torch.float32, reversed=reversed)


@needs_triton
def test_segments_fill_the_gpu_and_are_not_short(monkeypatch):
    from vision_longhorn.kernels.backends.triton import conv as triton_conv

    monkeypatch.setattr(triton_conv, "multiprocessors", lambda device: 132)
    for L, programs, part in itertools.product(
        (1, 31, 32, 33, 65, 197, 200, 6085, 16384), (1, 12, 48, 1536, 3072, 10**6), (4, 8)
    ):
        segments, span = triton_conv._cut(L, programs, torch.device("cpu"), part)
        assert span % part == 0 and span >= 32 and (segments - 1) * span < L <= segments * span
        assert programs * (segments - 1) <= 48 * 132


def gpu_check(B, L, D, K, G, dtype, **options):
    """On a GPU; the reference in float64 goes over a few sequences at a time, as a whole batch takes too much."""
    x, weight, bias, dy = make(B, L, D, K, G, dtype, device="cuda")
    x, dy = x.to(dtype), dy.to(dtype)
    got = run("triton", x, weight, bias, dy, dtype, **options)
    dweight, dbias = torch.zeros_like(weight), torch.zeros_like(bias)
    for part in torch.arange(B).split(16):
        leaves = [
            value.requires_grad_() for value in (x[part].double(), weight.detach().clone(), bias.detach().clone())
        ]
        y = shifted(*leaves, options.get("reversed", False))
        dx, *more = torch.autograd.grad(y, leaves, dy[:, part].double())
        found = relative_rms(got["y"][:, part], y), relative_rms(got["dx"][part], dx)
        assert max(found) <= TOLERANCE[dtype], (B, L, D, K, G, dtype, part, found)
        dweight += more[0]
        dbias += more[1]
    found = relative_rms(got["dweight"], dweight), relative_rms(got["dbias"], dbias)
    assert max(found) <= min(TOLERANCE[dtype], 1e-4), (B, L, D, K, G, dtype, found)


@pytest.mark.gpu
@pytest.mark.parametrize("B,L,D", ((256, 197, 768), (2, 6085, 384)))
@pytest.mark.parametrize("G,reversed", ((1, False), (1, True), (2, False)))
def test_gpu_real_sizes(B, L, D, G, reversed):
    gpu_check(B, L, D, 4, G, torch.bfloat16, reversed=reversed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("D", (1, 33, 64, 70, 192))
def test_gpu_awkward_sizes(dtype, D):
    for L, (K, G) in itertools.product(LENGTHS, ((1, 2), (2, 1), (4, 2), (5, 1), (8, 2))):
        gpu_check(3, L, D, K, G, dtype, shift=3 if L == 5 else 0, reversed=G == 1 and L % 2 == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("B,L,D", ((256, 197, 768), (2, 6085, 384)))
def test_gpu_same_bits(B, L, D):
    inputs = make(B, L, D, 4, 2, torch.bfloat16, device="cuda")
    first = run("triton", *inputs, torch.bfloat16)
    for _ in range(10):
        again = run("triton", *inputs, torch.bfloat16)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
def test_gpu_another_batch_or_length_compiles_nothing():
    from vision_longhorn.kernels.backends.triton import conv as triton_conv

    counts = set()
    for B, L in ((16, 197), (1, 65), (1, 1), (33, 50)):
        gpu_check(B, L, 128, 4, 2, torch.bfloat16)
        counts.add(
            tuple(
                len(kernel.jitted.device_caches[torch.cuda.current_device()][0])
                for kernel in (triton_conv._conv_forward_kernel, triton_conv._conv_backward_kernel)
            )
        )
    assert len(counts) == 1, counts
