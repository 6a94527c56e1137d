"""Whole models on a GPU: against the CPU, compiled against eager, and twice with the same bits."""

import pytest
import timm
import torch

import vision_longhorn  # noqa: F401

pytestmark = pytest.mark.gpu
VARIANTS = [dict(model_name="vlonghorn_test"), dict(model_name="vlonghorn_test", rule="exact"),
            dict(model_name="vlonghorn_test", wiring="shared"), dict(model_name="vlonghorn_test", beta="scalar"),
            dict(model_name="vim_test"), dict(model_name="vim_test", wiring="shared")]


def build(variant):
    torch.manual_seed(0)
    return timm.create_model(**variant, num_classes=10, img_size=64, patch_size=8)


def logits_and_gradients(model, images, autocast=False, compiled=False):
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        logits = (torch.compile(model, fullgraph=True) if compiled else model)(images)
    logits.float().square().mean().backward()
    return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def difference(a, b):
    return ((a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm()).item()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gpu_agrees_with_cpu(variant):
    images = torch.randn(3, 3, 64, 64)
    model = build(variant)
    on_cpu = logits_and_gradients(model, images)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # matrix products leave TF32 off by themselves
        on_gpu = logits_and_gradients(model.cuda(), images.cuda())
    assert max(difference(a, b) for a, b in zip(on_gpu, on_cpu)) < 1e-4


@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[2], VARIANTS[4]], ids=str)
def test_compiled_in_one_graph_agrees_with_eager(variant):
    images = torch.randn(4, 3, 64, 64, device="cuda")
    model = build(variant).cuda()
    exact = logits_and_gradients(model, images)
    eager, compiled = (logits_and_gradients(model, images, autocast=True, compiled=compiled)
                       for compiled in (False, True))
    # Both round to bf16, at different places; what counts is that compiling costs no digits.
    eager, compiled = (max(difference(a, b) for a, b in zip(found, exact)) for found in (eager, compiled))
    assert 0 < compiled < 2 * eager < 0.2


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_same_images_give_the_same_bits(variant):
    images = torch.randn(16, 3, 64, 64, device="cuda")
    model = build(variant).cuda()
    first, second = (logits_and_gradients(model, images, autocast=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
