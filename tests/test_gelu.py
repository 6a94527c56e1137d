"""GELU as the compiler computes it."""

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from vision_longhorn.models.gelu import GELU, CompiledGELU


@pytest.mark.parametrize("dtype, near", [(torch.float32, 3e-7), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_it_and_its_gradient_agree_with_float64(dtype, near):
    x = torch.cat([torch.randn(1001, 13), 4 * torch.randn(1001, 13)]).to(dtype)
    dy = torch.randn(x.shape).to(dtype)
    found, wanted = [], []
    for function, values, grad, into in ((CompiledGELU.apply, x, dy, found), (F.gelu, x.double(), dy.double(), wanted)):
        values = values.clone().requires_grad_()
        y = function(values)
        y.backward(grad)
        into += [y, values.grad]
    for ours, true in zip(found, wanted, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), true, rtol=near, atol=3e-7)


def test_it_takes_infinities_and_nan():
    inf = torch.inf
    x = torch.tensor([0.0, -0.0, inf, -inf, torch.nan, 3e38, -3e38, 1e-38], requires_grad=True)
    y = CompiledGELU.apply(x)
    torch.testing.assert_close(
        y, torch.tensor([0, 0, inf, 0, torch.nan, 3e38, 0, 5e-39]), atol=2e-7, rtol=1e-6, equal_nan=True
    )
    y[:2].sum().backward()
    assert x.grad[:2].tolist() == pytest.approx([0.5, 0.5])


class Compiled(nn.Module):
    def forward(self, x):
        return CompiledGELU.apply(x)


def test_compiled_it_needs_no_error_function_and_keeps_only_what_it_read():
    """A long chain of float32 numbers tempts the compiler to keep one of them, twice as large."""
    graphs = []

    def take(graph, _inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=take, bw_compiler=take, partition_fn=min_cut_rematerialization_partition)
    model = nn.Sequential(nn.Linear(64, 256), Compiled(), nn.Linear(256, 64), Compiled(), nn.Linear(64, 8))
    x, kept = torch.randn(32, 64), []

    def keep(value):
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value), torch.autocast("cpu", torch.bfloat16):
        y = torch.compile(model, backend=backend)(x)
    y.float().sum().backward()
    code = "".join(graph.code for graph in graphs)
    assert "exp2" in code and "erf" not in code and "gelu" not in code
    wide = [value.dtype for value in kept if value.shape[0] == 32 and value.shape[-1] == 256]
    assert wide == [torch.bfloat16] * 2  # its input, and its output, which the linear layer read


def test_two_compile_with_dynamic_shapes():
    model, x = nn.Sequential(Compiled(), Compiled()), torch.randn(3, 5, requires_grad=True)
    torch.compile(model, backend="aot_eager", dynamic=True)(x).sum().backward()
    found, x.grad = x.grad, None
    model(x).sum().backward()
    torch.testing.assert_close(found, x.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, takes", [(torch.bfloat16, True), (torch.float64, False)])
def test_on_a_gpu_the_compiler_takes_it(dtype, takes):
    graphs = []

    def take(graph, _inputs):
        graphs.append(graph.code)
        return make_boxed_func(graph)

    torch.compile(GELU(), backend=aot_autograd(fw_compiler=take))(torch.randn(9, device="cuda", dtype=dtype))
    assert ("exp2" in graphs[0]) == takes


def test_a_program_exported_as_ours_are_has_torchs_own():
    program = torch.export.export(nn.Sequential(nn.Linear(4, 4), GELU()), (torch.randn(2, 4),), strict=False)
    assert torch.ops.aten.gelu.default in [node.target for node in program.graph.nodes]
