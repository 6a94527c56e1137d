"""The scan operators inside torch's machinery on a CPU: opcheck, compile, export, FX, TorchScript, autograd; and on
machines without triton or without a GPU."""

import io
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest
import timm
import torch
from scan_cases import RULES, call, make_inputs
from torch import nn
from torch.autograd import forward_ad

import vision_longhorn
from vision_longhorn import kernels
from vision_longhorn.models.mixers import BidirectionalMixer, create_mixer

DIRECTIONS = (("forward", "none"), ("backward", "none"), ("both", "none"), ("both", "mean"))
# All directions with one rule, and one with each of the others, which are the same operator with other inputs.
in_every_direction = pytest.mark.parametrize(
    "rule,direction,combine",
    [(rule, *given) for i, rule in enumerate(RULES) for j, given in enumerate(DIRECTIONS) if i == 0 or i % 4 == j],
)
FIELDS = ("x", "step", "k", "q", "A", "z", "D", "bias", "initial_state")
MODELS = {
    "longhorn": dict(),
    "exact": dict(rule="exact", beta="scalar", wiring="alternate"),
    "mamba": dict(mixer="mamba", wiring="shared"),
    "grid": dict(conv="grid", rope=True, class_token="none", global_pool="avg"),
}
ALL_MODELS = {  # with those of no operator of ours
    **MODELS,
    "mamba2": dict(mixer="mamba2", conv="grid", class_token="none", global_pool="avg"),
    "stem": dict(mixer="attention", stem="conv"),
}
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++"))
    or not Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
    reason="inductor needs a C++ compiler and Python's headers",
)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def operator_arguments(rule, direction, combine, *, final=True, save=True, qk_norm=False, **options):
    """Positional arguments of `torch.ops.vision_longhorn.scan`; two chunks, so that saved states matter."""
    inputs = make_inputs(rule, 2, 9, 3, 4, direction=direction, **options)
    if not options.get("state", True):
        del inputs["D"], inputs["bias"]
    name = "mamba" if rule.startswith("mamba") else rule
    return (
        *(inputs.get(field) for field in FIELDS),
        name,
        direction,
        combine,
        True,
        rule == "mamba_per_token",
        final,
        save,
        "auto",
        "auto",
        *([True] if qk_norm else []),  # programs of older versions leave it out
    )


def with_gradients(arguments):
    return tuple(
        value.detach().clone().requires_grad_() if isinstance(value, torch.Tensor) else value for value in arguments
    )


@in_every_direction
def test_opcheck(rule, direction, combine):
    full = operator_arguments(rule, direction, combine, stacked=combine == "none")
    torch.library.opcheck(torch.ops.vision_longhorn.scan.default, with_gradients(full))
    bare = operator_arguments(rule, direction, combine, gate=False, state=False, final=False, save=False)
    torch.library.opcheck(torch.ops.vision_longhorn.scan.default, with_gradients(bare))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "backend",
    (
        "torch",
        pytest.param(
            "triton",
            marks=pytest.mark.skipif(not kernels.HAS_TRITON, reason="triton is not installed on this platform"),
        ),
    ),
)
def test_gradients_of_one_token_do_not_share_memory(rule, backend):
    """Where a sum has nothing to add and a cast nothing to do, what comes back could be views of one tensor."""
    inputs = {
        name: None if value is None else value.requires_grad_() for name, value in make_inputs(rule, 1, 1, 5, 4).items()
    }
    leaves = [value for value in inputs.values() if value is not None]
    grads = torch.autograd.grad(call(rule, inputs, backend=backend).sum(), leaves)
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == len(grads)


def test_autocast_does_not_reach_into_a_scan():
    inputs = make_inputs("exact", 2, 9, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = call("exact", inputs)
    assert torch.equal(y, call("exact", inputs))


OPTIONS = dict(scalar_step=True, stacked=False), dict(dtype=torch.bfloat16), dict(dtype=torch.float64, qk_norm=True)


@pytest.mark.parametrize(
    "rule,options",
    [(rule, given) for i, rule in enumerate(RULES) for j, given in enumerate(OPTIONS) if i == 0 or i % 3 == j],
    ids=str,
)
def test_opcheck_of_other_shapes_and_dtypes(rule, options):
    """Inputs without gradients too: that is what runs under inference."""
    arguments = operator_arguments(rule, "both", "sum", save=False, **options)
    torch.library.opcheck(torch.ops.vision_longhorn.scan.default, arguments)
    torch.library.opcheck(
        torch.ops.vision_longhorn.scan.default,
        with_gradients(arguments),
        test_utils=("test_faketensor", "test_aot_dispatch_dynamic"),
    )


@in_every_direction
def test_opcheck_of_the_backward_operator(rule, direction, combine):
    """All that it may be given, and with each of its options one that is left out."""
    for options, absent in (
        (dict(stacked=False, dtype=torch.bfloat16), "dfinal"),
        (dict(gate=False, state=False, scalar_step=True), "dy"),
    ):
        arguments = operator_arguments(rule, direction, combine, **options)
        y, final, saved = torch.ops.vision_longhorn.scan(*arguments)
        dy, dfinal = torch.randn_like(y), torch.randn_like(final)
        part = (dy, None, saved.new_empty(0)) if absent == "dfinal" else (None, dfinal, saved)
        for given in ((dy, dfinal, saved), part):
            torch.library.opcheck(
                torch.ops.vision_longhorn.scan_backward.default, (*given, *arguments[:14], "auto", "auto")
            )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("used", (0, 1), ids=("y", "state"))
def test_gradients_when_only_one_output_is_used(rule, used):
    inputs = make_inputs(rule, 2, 10, 3, 4, direction="both")

    def gradients(backend):
        leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
        out = call(rule, leaves, direction="both", return_final_state=True, backend=backend)[used]
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        return dict(zip(leaves, torch.autograd.grad((out * weight).sum(), list(leaves.values()), allow_unused=True)))

    expected = gradients("reference")
    for name, grad in gradients("torch").items():
        right = torch.zeros_like(inputs[name]) if expected[name] is None else expected[name]
        torch.testing.assert_close(grad, right, rtol=1e-4, atol=1e-4, msg=lambda words: f"d{name}: {words}")


def test_second_derivatives_are_refused_rather_than_wrong():
    inputs = make_inputs("diagonal", 1, 5, 3, 4)
    x = inputs["x"].requires_grad_()
    (gradient,) = torch.autograd.grad(call("diagonal", inputs).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="scan_backward"):
        gradient.square().sum().backward()


def test_forward_mode_is_refused_rather_than_wrong():
    inputs = make_inputs("diagonal", 1, 5, 3, 4)
    v = torch.ones_like(inputs["x"])
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: call("diagonal", {**inputs, "x": x}), (inputs["x"],), (v,))
    mixer = BidirectionalMixer(8, d_state=4).requires_grad_(False)
    h = torch.randn(1, 6, 8)
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        mixer(forward_ad.make_dual(h, torch.ones_like(h)))
    assert mixer(h).isfinite().all()


def test_what_one_call_is_made_under_is_not_left_to_the_next():
    inputs = make_inputs("diagonal", 1, 40, 30, 4)
    expected = call("diagonal", inputs)
    results = []

    def calls():  # in a thread without memory of other calls
        with torch.inference_mode():
            results.append(call("diagonal", inputs).clone())
        x = inputs["x"].clone().requires_grad_()
        call("diagonal", {**inputs, "x": x}).sum().backward()
        results.append(call("diagonal", inputs))

    def calls_in_other_types():
        torch.set_default_dtype(torch.float64)
        try:
            results.append(call("diagonal", inputs))
        finally:
            torch.set_default_dtype(torch.float32)
        results.append(call("diagonal", inputs))

    for task in (calls, calls_in_other_types):
        thread = threading.Thread(target=task)
        thread.start()
        thread.join()
    assert len(results) == 4 and all(torch.equal(found, expected) for found in results)


def compiled_once(function, backend):
    """`function` compiled; a second compilation, for another batch size, is an error."""
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    return torch._dynamo.config.patch(error_on_recompile=True)(compiled)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stacked", (True, False))
def test_compiled_scan_equals_eager_for_every_batch_and_length(rule, stacked):
    def scan(leaves):
        y, state = call(rule, leaves, direction="both", combine="mean", return_final_state=True)
        return 2 * y, state

    compiled = compiled_once(scan, "aot_eager")
    for batch, length in ((2, 10), (3, 9), (5, 20)):
        found = []
        for function in (scan, compiled):
            inputs = make_inputs(rule, batch, length, 3, 4, direction="both", stacked=stacked, seed=batch)
            for name, value in inputs.items():
                value.requires_grad_()
                axis = value.ndim - 3  # of the batch
                if name not in ("D", "bias") and (name != "A" or rule == "mamba_per_token"):
                    torch._dynamo.mark_dynamic(value, axis)
                    if name != "initial_state":
                        torch._dynamo.mark_dynamic(value, axis + 1)
            y, state = function(inputs)
            (y.square().sum() + state.square().sum()).backward()
            found.append((y, state, *(value.grad for value in inputs.values())))
        for eager, other in zip(*found):
            assert torch.equal(eager, other)


def compare_compiled_training(model, backend, batches, shape):
    compiled = compiled_once(model, backend)
    for batch in batches:
        images = torch.randn(batch, *shape)
        torch._dynamo.mark_dynamic(images, 0)
        found = []
        for function in (model, compiled):
            model.zero_grad()
            y = function(images)
            y.square().mean().backward()
            found.append({"y": y, **{name: value.grad for name, value in model.named_parameters()}})
        for name, eager in found[0].items():
            torch.testing.assert_close(
                found[1][name],
                eager,
                rtol=1e-4,
                atol=1e-5 * eager.abs().max().item(),
                msg=lambda words: f"{name}: {words}",
            )


# The other two are in test_export.py, where height and width change as well.
@pytest.mark.parametrize("kind", ("exact", "mamba"))
def test_compiled_model_trains_like_the_eager_one_for_every_batch_size(kind):
    torch.manual_seed(0)
    model = timm.create_model("vlonghorn_test", depth=1, img_size=32, num_classes=5, **MODELS[kind])
    compare_compiled_training(model, "aot_eager", (2, 3, 5), (3, 32, 32))


@needs_compiler
def test_mixer_compiled_by_inductor_trains_like_the_eager_one():
    torch.manual_seed(0)
    compare_compiled_training(BidirectionalMixer(16), "inductor", (3, 2), (9, 16))


class _BothScans(nn.Module):
    def __init__(self):
        super().__init__()
        self.A = nn.Parameter(-torch.rand(6, 4) - 0.1)
        self.D = nn.Parameter(torch.randn(6))

    def forward(self, x, step, k, q, z):
        y = kernels.longhorn_scan(x, step, k, q, z, self.D, rule="exact", direction="both", combine="mean")
        y, state = kernels.selective_scan(y, step, self.A, k, q, D=self.D, return_final_state=True)
        return y, state


def test_export_keeps_both_scans_and_their_values():
    torch.manual_seed(0)
    module = _BothScans()

    def draw(batch):
        return tuple(torch.randn(batch, 9, size) for size in (6, 6, 4, 4, 6))

    batch = torch.export.Dim("batch")
    program = torch.export.export(module, draw(2), dynamic_shapes=({0: batch},) * 5)
    calls = [node for node in program.graph.nodes if node.target is torch.ops.vision_longhorn.scan.default]
    assert len(calls) == 2
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for size in (2, 5):
        inputs = draw(size)
        for exported in (program, torch.export.load(file) if size == 5 else program):
            for value, expected in zip(exported.module()(*inputs), module(*inputs)):
                torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ("exact", "mamba"))
def test_exported_model_gives_the_same_for_every_batch_size(kind):
    torch.manual_seed(0)
    model = timm.create_model("vlonghorn_test", depth=1, img_size=32, num_classes=5, **MODELS[kind]).eval()
    batch = torch.export.Dim("batch", max=1024)  # torch 2.7 wants a bound where tensors are sliced
    program = torch.export.export(model, (torch.randn(2, 3, 32, 32),), dynamic_shapes=({0: batch},))
    images = torch.randn(5, 3, 32, 32)
    torch.testing.assert_close(program.module()(images), model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_mixer_traces_with_fx(kind):
    torch.manual_seed(0)
    options = {key: value for key, value in MODELS[kind].items() if key not in ("class_token", "global_pool")}
    mixer = create_mixer(**{"mixer": "longhorn", "dim": 16} | options).eval()
    traced = torch.fx.symbolic_trace(mixer)
    assert any(
        node.target in (torch.ops.vision_longhorn.mix, torch.ops.vision_longhorn.mix.default)
        for node in traced.graph.nodes
    )
    for rows, shape in ((3, (2, 9, 16)), (5, (3, 5, 16))):
        tokens = torch.randn(*shape)
        assert torch.equal(traced(tokens, rows), mixer(tokens, rows))


@pytest.mark.parametrize("kind", ALL_MODELS)
def test_model_traces_with_fx(kind):
    torch.manual_seed(0)
    model = timm.create_model("vlonghorn_test", depth=2, img_size=32, num_classes=5, **ALL_MODELS[kind]).eval()
    images = torch.randn(3, 3, 32, 32)
    assert torch.equal(torch.fx.symbolic_trace(model)(images), model(images))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ALL_MODELS)
def test_scripted_model_survives_its_file(kind, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("vlonghorn_test", depth=2, img_size=32, num_classes=5, **ALL_MODELS[kind]).eval()
    torch.jit.script(model).save(str(tmp_path / "model.pt"))
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(torch.jit.load(str(tmp_path / "model.pt"))(images), model(images))


WITHOUT_TRITON = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import timm, torch, vision_longhorn
for name in ("vlonghorn_test", "vim_test"):
    model = timm.create_model(name, depth=1, img_size=32, num_classes=5)
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    print(name, all(value.grad.isfinite().all() and value.grad.any() for value in model.parameters()))
import bench_scan, profile_model
print("imported", "triton" in sys.modules)
x = torch.randn(1, 3, 4)
try:
    vision_longhorn.kernels.longhorn_scan(x, x, x, x, backend="triton")
except RuntimeError as error:
    print(f"refused: {error}")
"""


def test_trains_where_triton_cannot_be_imported():
    root = Path(vision_longhorn.__file__).parent.parent
    paths = [str(root), str(root / "benchmarks"), os.environ.get("PYTHONPATH")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert done.returncode == 0, done.stderr
    *lines, refusal = done.stdout.splitlines()
    assert lines == ["vlonghorn_test True", "vim_test True", "imported False"]
    assert refusal.startswith("refused: backend='triton'")
    assert "not installed" in refusal and "backend='auto'" in refusal


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="triton is not installed on this platform")
def test_triton_forced_on_cpu_tensors_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    x = torch.randn(1, 3, 4)
    with pytest.raises(RuntimeError, match="^backend='triton'.* cpu.* GPU.*TRITON_INTERPRET=1"):
        kernels.longhorn_scan(x, x, x, x, backend="triton")


def test_a_model_takes_its_scans_from_the_backend_that_it_was_given():
    """`scan_backend` reaches the operator: an unknown one is refused, by name."""
    model = timm.create_model("vlonghorn_test", depth=1, img_size=32)
    model.blocks[0].mixer.scan_backend = "cuda"
    with pytest.raises(ValueError, match="backend='cuda'"):
        model(torch.randn(1, 3, 32, 32))


def test_no_states_are_kept_where_no_gradient_is_wanted():
    """What inference must not pay for: the states of every chunk."""
    kept = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function is torch.ops.vision_longhorn.scan.default:
                kept.append(out[2].numel())
            return out

    inputs = make_inputs("diagonal", 2, 20, 3, 4)
    with Watch():
        call("diagonal", inputs)
        call("diagonal", {name: value.requires_grad_() for name, value in inputs.items()})
        with torch.no_grad():
            call("diagonal", inputs)
    assert kept == [0, 3 * 2 * 4 * 3, 0]


@pytest.mark.parametrize("rule", RULES)
def test_an_expanded_gradient_gives_what_its_copy_gives(rule):
    """`y.sum()` hands the operator a gradient of strides 0."""
    inputs = make_inputs(rule, 2, 10, 3, 4, direction="both")
    found = []
    for weight in (torch.ones(()).expand(2, 10, 3), torch.ones(2, 10, 3)):
        leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
        y = call(rule, leaves, direction="both", combine="sum")
        found.append(torch.autograd.grad(y, list(leaves.values()), weight))
    assert all(torch.equal(*pair) for pair in zip(*found))
    assert any(grad.any() for grad in found[0])
