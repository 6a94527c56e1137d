"""Counted operations: what torch's counter and others are told, against counts by hand."""

import re
from pathlib import Path

import pytest
import timm
import torch
from scan_cases import RULES, call, make_inputs
from torch.utils.flop_counter import FlopCounterMode
from vision_longhorn.kernels import grid_conv
from vision_longhorn.kernels.flops import fvcore_handles
from vision_longhorn.kernels.rules import NAMES

import vision_longhorn  # noqa: F401  (registers the models)
from vision_longhorn.models.mixers import BidirectionalMixer
from vision_longhorn.models.names import DEFINITIONS

MODELS = Path(__file__).resolve().parent.parent / "docs" / "models.md"


def macs(run):
    """Multiply-adds of a call by torch's counter, which counts each as two operations."""
    with FlopCounterMode(display=False) as counter:
        run()
    assert counter.get_total_flops() % 2 == 0
    return counter.get_total_flops() // 2


def model_macs(name, size=224, **options):
    with torch.device("meta"), torch.no_grad():
        model = timm.create_model(name, **options)
        return macs(lambda: model(torch.empty(1, 3, size, size))), sum(p.numel() for p in model.parameters())


def test_a_model_by_hand():
    C, D, L, N, rank, taps = 192, 384, 197, 16, 12, 4
    projections = L * (C * 2 * D + D * C)  # in, out
    direction = L * D * (taps + (rank + 2 * N) + rank + 3 * N)  # convolution, x_proj, dt_proj, decay + write + read-out
    found, _ = model_macs("vlonghorn_tiny_paper")
    assert found == 196 * (3 * 16 * 16) * C + 24 * (projections + 2 * direction) + C * 1000
    assert round(found / 1e9, 2) == 1.47


@pytest.mark.parametrize(
    "options",
    [*(dict(rule=rule) for rule in NAMES), dict(rule="mamba", A_per_token=True), dict(wiring="shared"),
     dict(wiring="alternate"), dict(beta="scalar"), dict(conv="grid"), dict(gate="none")],
    ids=str,
)  # fmt: skip
def test_every_rule_and_wiring_forward_and_backward(options):
    B, L, C, N, rank = 2, 6, 8, 3, 1
    sets = 1 if "wiring" in options else 2
    directions = 1 if options.get("wiring") == "alternate" else 2
    logits = N if options.get("rule") == "gla" else 1 if "beta" in options else 2 * C
    of_token = 3 if "A_per_token" in options else 2
    taps = 3 * 3 if "conv" in options else 4 * sets
    inner = 2 * C * (rank + of_token * N) + logits * rank  # x_proj; dt_proj
    projections = 2 if options.get("gate") == "none" else 3  # to x, to z, and back
    forward = B * L * (projections * C * 2 * C + 2 * C * taps + sets * inner + directions * 3 * 2 * C * N)
    mixer, h = BidirectionalMixer(C, d_state=N, **options), torch.randn(B, L, C, requires_grad=True)
    assert macs(lambda: mixer(h, 2)) == forward
    assert macs(lambda: mixer(h, 2).sum().backward()) == 3 * forward  # each factor of a product gets a gradient
    mixer, h = mixer.to("meta"), torch.empty(B, L, C, requires_grad=True, device="meta")
    assert macs(lambda: mixer(h, 2).sum().backward()) == 3 * forward


def test_a_convolution_over_the_grid():
    x, weight, bias = torch.randn(2, 6, 5, requires_grad=True), torch.randn(5, 3, 3), torch.randn(5)
    assert macs(lambda: grid_conv(x, weight, bias, 2)) == 2 * 6 * 5 * 9
    assert macs(lambda: grid_conv(x, weight, bias, 2).sum().backward()) == 3 * 2 * 6 * 5 * 9


@pytest.mark.parametrize("rule", RULES)
def test_scans_alone(rule):
    for direction, scans in (("forward", 1), ("both", 2)):
        inputs = make_inputs(rule, 2, 5, 4, 3, direction=direction, stacked=False)
        inputs["x"].requires_grad_()
        forward = scans * 2 * 5 * 4 * 3 * 3
        assert macs(lambda: call(rule, inputs, direction=direction)) == forward
        assert macs(lambda: call(rule, inputs, direction=direction).sum().backward()) == 3 * forward


def test_a_compiled_model_counts_the_same():
    torch._dynamo.reset()
    model = timm.create_model("vlonghorn_test", depth=1, img_size=32)
    images = torch.randn(2, 3, 32, 32)
    eager = macs(lambda: model(images).sum().backward())
    model.compile(backend="aot_eager")
    assert macs(lambda: model(images).sum().backward()) == eager


@pytest.mark.parametrize(
    "options", [dict(rule="exact"), dict(mixer="mamba", A_per_token=True), dict(wiring="shared"), dict(gate="none")]
)
def test_counters_of_a_traced_graph_and_of_tensors_are_told_the_same(options):
    """fvcore hands on values of a graph, ptflops tensors."""
    model = timm.create_model("vlonghorn_test", depth=1, img_size=32, **options).eval()
    images = torch.randn(2, 3, 32, 32)
    handle = fvcore_handles()["vision_longhorn::mix"]
    with FlopCounterMode(display=False) as counter:
        model(images)
    right = counter.get_flop_counts()["Global"][torch.ops.vision_longhorn.mix] // 2
    graph, _ = torch.jit._get_trace_graph(model, images)
    (node,) = graph.findAllNodes("vision_longhorn::mix")
    assert handle(list(node.inputs()), list(node.outputs())) == right
    mixer = model.blocks[0].mixer
    xz = torch.empty(2, 5, mixer.in_proj.out_features)
    arguments = (xz, mixer.conv_weight, mixer.conv_bias, mixer.x_proj, mixer.dt_proj, mixer.dt_bias, mixer.A_log,
                 mixer.D, mixer.norm_weight, mixer.rule, 1e-5, False, "auto")  # fmt: skip
    assert handle(arguments, ()) == right


def test_the_table_of_names_has_what_the_models_have():
    lines = MODELS.read_text(encoding="utf-8").splitlines()
    rows = [line.strip("|").split("|") for line in lines if re.match(r"\| `v\w+_\*.* \| \d", line)]
    assert len(rows) == 6
    for name, *cells in rows:
        wiring = re.search(r'wiring="(\w+)"', name)
        options = dict(wiring=wiring[1]) if wiring else {}
        for size, parameters, gmacs in zip(("tiny", "small", "base"), cells[::2], cells[1::2], strict=True):
            if parameters.strip():
                arch = name.split("`")[1].replace("*", size)
                # Blocks are alike: one and two of them tell what all come to.
                one, two = (model_macs(arch, depth=depth, **options) for depth in (1, 2))
                macs, count = (a + (DEFINITIONS[arch]["depth"] - 1) * (b - a) for a, b in zip(one, two, strict=True))
                assert (parameters.strip(), gmacs.strip()) == (f"{count:,}", f"{macs / 1e9:.2f}"), (arch, options)
