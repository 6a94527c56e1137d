"""Whole models on a GPU: against the CPU, compiled against eager, and twice with the same bits."""

import pytest
import timm
import torch
from scan_cases import relative_rms

import vision_longhorn  # noqa: F401

pytestmark = pytest.mark.gpu
VARIANTS = [
    dict(model_name="vlonghorn_test"),
    dict(model_name="vlonghorn_test", rule="exact"),
    dict(model_name="vlonghorn_test", wiring="shared"),
    dict(model_name="vlonghorn_test", beta="scalar"),
    dict(model_name="vim_test"),
    dict(model_name="vim_test", wiring="shared"),
    dict(model_name="vlonghorn_test", rule="exact", conv="grid", class_token="none", global_pool="avg"),
    dict(model_name="vlonghorn_tiny", embed_dim=64, depth=2),
    dict(model_name="vim_tiny_best", embed_dim=64, depth=2),
]


def build(variant):
    torch.manual_seed(0)
    return timm.create_model(**variant, num_classes=10, img_size=64, patch_size=8)


def logits_and_gradients(model, images, autocast=False, compiled=False):
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        logits = (torch.compile(model, fullgraph=True) if compiled else model)(images)
    logits.float().square().mean().backward()
    return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-4), (torch.float64, 1e-11)])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gpu_agrees_with_cpu(variant, dtype, bound):
    images = torch.randn(3, 3, 64, 64, dtype=dtype)
    model = build(variant).to(dtype)
    on_cpu = logits_and_gradients(model, images)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # matrix products leave TF32 off by themselves
        on_gpu = logits_and_gradients(model.cuda(), images.cuda())
    assert max(relative_rms(a.cpu(), b.cpu()) for a, b in zip(on_gpu, on_cpu)) < bound


@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[2], VARIANTS[4], *VARIANTS[6:]], ids=str)
def test_compiled_in_one_graph_agrees_with_eager(variant):
    images = torch.randn(4, 3, 64, 64, device="cuda")
    model = build(variant).cuda()
    exact = logits_and_gradients(model, images)
    eager, compiled = (
        logits_and_gradients(model, images, autocast=True, compiled=compiled) for compiled in (False, True)
    )
    # Both round to bf16, at different places; what counts is that compiling costs no digits.
    eager, compiled = (max(relative_rms(a.cpu(), b.cpu()) for a, b in zip(found, exact)) for found in (eager, compiled))
    assert 0 < compiled < 2 * eager < 0.2


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_same_images_give_the_same_bits(variant):
    images = torch.randn(16, 3, 64, 64, device="cuda")
    model = build(variant).cuda()
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):  # of a stem's convolutions; the scans always are
        first, second = (logits_and_gradients(model, images, autocast=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[1], VARIANTS[2], VARIANTS[4], *VARIANTS[6:]], ids=str)
def test_a_captured_training_step_replays_with_the_same_bits(variant, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # of a stem's convolutions
    model = build(variant).cuda()
    static = torch.randn(4, 3, 64, 64, device="cuda")

    def step():
        model.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            logits = model(static)
        logits.float().square().mean().backward()
        return logits

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    for seed in range(3):
        static.copy_(torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        replayed = [logits.clone(), *(parameter.grad.clone() for parameter in model.parameters())]
        eager = [step().detach(), *(parameter.grad for parameter in model.parameters())]
        assert all(torch.equal(a, b) for a, b in zip(replayed, eager))


@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[4], VARIANTS[7]], ids=str)
@pytest.mark.parametrize("training", (False, True))
def test_compiled_into_graphs_gives_what_eager_gives(variant, training):
    model = build(variant).cuda().train(training)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for _ in range(4):  # from the third on it replays
            images = torch.randn(4, 3, 64, 64, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            if not training:
                with torch.no_grad():
                    assert relative_rms(compiled(images).clone(), model(images)) < 1e-5
                continue
            model.zero_grad(set_to_none=True)
            logits = compiled(images)
            logits.square().mean().backward()
            found = [logits.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
            assert (
                max(relative_rms(a.cpu(), b.cpu()) for a, b in zip(found, logits_and_gradients(model, images))) < 1e-4
            )
    # Where it takes no graph it runs all the same, so the numbers alone would not show it.
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
