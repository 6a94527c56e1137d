"""Keys and queries turned by their place in the grid: both backends against the plain loop in float64, the kernel
interpreted on the CPU and, marked `gpu`, on a GPU."""

import pytest
import torch
from plain_model import plain_turn
from scan_cases import relative_rms
from test_short_conv import BACKENDS, TOLERANCE, needs_triton
from vision_longhorn.kernels.backends.torch.rope import Turned
from vision_longhorn.kernels.backends.torch.unit import unit
from vision_longhorn.kernels.dispatch import get_backend


def check(backend, rows, columns, N, dtype, *, device="cpu", before=3, after=2):
    torch.manual_seed(0)
    low = torch.randn(2, 3, rows * columns, before + 2 * N + after, device=device).to(dtype)
    kq = low[..., before : before + 2 * N]  # a view, as the mixing gives it
    old = low.clone()
    right = torch.cat([plain_turn(v.double().cpu(), rows) for v in kq.chunk(2, -1)], -1)
    get_backend(backend).rotate(kq, rows)
    assert relative_rms(kq.cpu(), right) <= TOLERANCE[dtype]
    get_backend(backend).rotate(kq, rows, back=True)
    assert relative_rms(kq, old[..., before : before + 2 * N].double()) <= 2 * TOLERANCE[dtype]
    assert torch.equal(low[..., :before], old[..., :before]) and torch.equal(low[..., -after:], old[..., -after:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows,columns,N", [(1, 1, 4), (1, 7, 8), (5, 1, 12), (3, 4, 16), (2, 3, 64)])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_turned_keys_and_queries_are_those_of_the_plain_loop(backend, rows, columns, N, dtype):
    check(backend, rows, columns, N, dtype)


def test_float64_keeps_its_digits():
    check("torch", 3, 5, 16, torch.float64)


def check_gradients(backend, rows, columns, N, dtype, sequences, *, device="cpu"):
    """Compare the gradients of keys and queries that were turned and then scaled to unit length with float64. There are
    fewer sequences of queries than of keys, and all tensors are views."""
    torch.manual_seed(0)
    (k, q), (dk, dq) = [
        [torch.randn(2, B, rows * columns, N + 5, device=device).to(dtype)[..., 3:-2] for B in (sequences, 2)]
        for _ in range(2)
    ]
    right, turned = [], Turned(rows * columns, rows, 0, N)
    for v, dv in ((k, dk), (q, dq)):
        v = v.double().cpu().requires_grad_()
        (gradient,) = torch.autograd.grad(unit(v), v, dv.double().cpu())
        right += torch.autograd.grad(plain_turn(v, rows), v, gradient)  # to turn is linear: any v would do here
    get_backend(backend).unit_backward(k, q, dk, dq, turned)
    for found, expected in zip((dk, dq), right):
        assert relative_rms(found.cpu(), expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows,columns,N", [(1, 1, 4), (5, 7, 8), (7, 5, 12), (3, 4, 16), (2, 3, 64)])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_gradients_of_turned_keys_and_queries_of_unit_length(backend, rows, columns, N, dtype):
    check_gradients(backend, rows, columns, N, dtype, 9)


def check_parts(N, rows, dtype, blocks, device="cpu", sequences=9, columns=7):
    """Gradients of unit vectors that are given in parts, beside those of their sum in float64. One vector is zero."""
    torch.manual_seed(0)
    shape = 2, sequences, max(1, rows) * columns
    low, out = (torch.randn(*shape, width, device=device).to(dtype) for width in (5 + 4 * N, 3 + 2 * N))
    low[:, :, 2] = 0
    (k, q), (dk, dq) = low[..., 5 : 5 + 2 * N].chunk(2, -1), out[..., 3:].chunk(2, -1)
    parts, before = torch.randn(blocks, *shape, 2 * N, device=device), out[..., :3].clone()
    turned = Turned(shape[2], rows, 0, N) if rows else None
    get_backend("triton").unit_backward(k, q, dk, dq, turned, parts)
    found = [dk.clone(), dq.clone()]
    get_backend("triton").unit_backward(k, q, dk, dq, turned, parts)
    assert torch.equal(out[..., :3], before) and all(map(torch.equal, found, (dk, dq)))
    for v, dv, found in zip((k, q), parts.double().sum(0).cpu().chunk(2, -1), (dk, dq)):
        v = v.double().cpu().requires_grad_()
        (right,) = torch.autograd.grad(unit(v), v, dv)
        if rows:
            (right,) = torch.autograd.grad(plain_turn(v, rows), v, right)
        there = torch.arange(shape[2]) != 2
        for tokens in (there, ~there):  # those of a zero vector are a thousand times as large
            assert relative_rms(found.cpu()[:, :, tokens], right[:, :, tokens]) <= TOLERANCE[dtype]


@needs_triton
@pytest.mark.parametrize("N,rows", [(16, 3), (4, 5), (20, 0), (20, 1), (3, 0)])
@pytest.mark.parametrize("dtype,blocks", [(torch.float32, 1), (torch.bfloat16, 3)])
def test_gradients_of_unit_length_in_parts(N, rows, dtype, blocks):
    check_parts(N, rows, dtype, blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("N,rows,dtype", [(16, 14, torch.bfloat16), (20, 0, torch.float32)])
def test_gradients_of_unit_length_in_parts_on_a_gpu(N, rows, dtype):
    check_parts(N, rows, dtype, 3, "cuda", 200)


@pytest.mark.gpu
@pytest.mark.parametrize("rows,columns,N,dtype", [(14, 14, 16, torch.bfloat16), (21, 17, 20, torch.float32)])
def test_gradients_of_turned_keys_and_queries_on_a_gpu(rows, columns, N, dtype):
    check_gradients("triton", rows, columns, N, dtype, 33, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("rows,columns,N,dtype", [(14, 14, 16, torch.bfloat16), (78, 77, 20, torch.float32)])
def test_turned_keys_and_queries_on_a_gpu(rows, columns, N, dtype):
    check("triton", rows, columns, N, dtype, device="cuda")


def test_products_depend_on_the_distance_of_patches_alone():
    kq = torch.randn(16, dtype=torch.float64).expand(1, 36, 16).contiguous()  # the same key and query everywhere
    get_backend("torch").rotate(kq, 6)
    k, q = kq[0].reshape(6, 6, 16).chunk(2, -1)
    found = torch.stack([(k[r, c] * q[r + 1, c + 2]).sum() for r in range(5) for c in range(4)])
    assert torch.allclose(found, found[:1]) and not torch.allclose(found[:1], (k[0, 0] * q[2, 1]).sum())
