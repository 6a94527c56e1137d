"""Models in other runtimes: `torch.compile` at any image size, exported programs, AOTInductor, ONNX."""

import copy
import functools
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import timm
import torch
from scan_cases import RULES, call, make_inputs, relative_rms
from torch import nn

import vision_longhorn
from vision_longhorn import export
from vision_longhorn.errors import UserError
from vision_longhorn.export import export_program, largest_error, load_onnx, main, to_onnx, to_package
from vision_longhorn.models import conv_stem, mlp

GRID = dict(conv="grid", rope=True, class_token="none", global_pool="avg")
# Between them every mixer, wiring, kind of step size, pooling, order of the patches and place of the class token.
VARIANTS = {
    "diagonal": dict(model_name="vlonghorn_test"),
    "exact alternate": dict(
        model_name="vlonghorn_test",
        rule="exact",
        wiring="alternate",
        global_pool="avg",
        class_token="first",
        scan_order="rows_columns",
        grid_conv=3,
    ),
    "exact shared": dict(
        model_name="vlonghorn_test",
        rule="exact",
        wiring="shared",
        global_pool="max",
        class_token="last",
        beta="scalar",
        qk_norm=True,
        beta_min=1e-3,
        beta_max=0.1,
    ),
    "mamba": dict(model_name="vim_test", global_pool=""),
    "grid": dict(model_name="vlonghorn_test", mlp_ratio=2, mlp_conv=3, gate="skip", **GRID),
    "exact grid alternate": dict(
        model_name="vlonghorn_test",
        rule="exact",
        conv="grid",
        rope=True,
        d_conv=5,
        gate="skip",
        wiring="alternate",
        class_token="none",
        global_pool="max",
        scan_order="rows_columns",
    ),
    "exact grid without a gate": dict(model_name="vlonghorn_test", rule="exact", qk_norm=True, gate="none", **GRID),
    "values": dict(model_name="vlonghorn_test", rule="exact", qk_norm=True, gate="value", **GRID),
    "mamba with values": dict(model_name="vim_test", wiring="alternate", gate="value"),
    "mamba without a gate": dict(model_name="vim_test", wiring="alternate", gate="none"),
    "mamba2 grid": dict(
        model_name="vlonghorn_test", mixer="mamba2", conv="grid", class_token="none", global_pool="avg"
    ),
}
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++"))
    or not Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
    reason="AOTInductor needs a C++ compiler and Python's headers",
)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


@pytest.fixture(scope="module", autouse=True)
def torch_lists_its_operators_once():
    """At each export torch lists all operators that it can write anew, and adds ours. The list takes a third of it."""
    registry = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    full = functools.cache(registry.from_torchlib)

    def listed(*args, **kwargs):
        own = copy.copy(full(*args, **kwargs))
        own.functions = {name: [*functions] for name, functions in own.functions.items()}
        return own

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "from_torchlib", staticmethod(listed))
        yield


def build(variant=VARIANTS["diagonal"], **options):
    """A small model whose states matter to its outputs: weights of the usual size leave them nearly linear."""
    torch.manual_seed(0)
    model = timm.create_model(
        **{**dict(num_classes=5, img_size=32, patch_size=8, depth=2, embed_dim=32), **variant, **options}
    ).eval()
    with torch.no_grad():
        for parameter in (model.model if hasattr(model, "model") else model).parameters():
            parameter.mul_(1.5).add_(torch.randn_like(parameter) * 0.1)
    return model


# torch.compile


@pytest.mark.parametrize(
    "variant,training",
    [
        (dict(model_name="vlonghorn_test", rule="exact", patch_stride=4), True),
        (
            dict(model_name="vim_test", wiring="shared", dynamic_img_pad=True, class_token="none", global_pool="max"),
            False,
        ),
        (dict(model_name="vlonghorn_test", stem="conv", **GRID), True),
    ],
    ids=("overlapping patches", "padded", "grid"),
)
def test_compiled_model_takes_new_sizes_without_compiling_again(variant, training):
    model = build(variant, dynamic_img_size=True, depth=1).train(training)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def outcome(function, images):
        model.zero_grad()
        with torch.set_grad_enabled(training):
            y = function(images)
        if not training:
            return [y]
        y.square().mean().backward()
        return [y, *(value.grad for value in model.parameters())]

    def compare(batch, height, width):
        images = torch.randn(batch, 3, height, width)
        for eager, other in zip(outcome(model, images), outcome(compiled, images), strict=True):
            torch.testing.assert_close(other, eager, rtol=1e-4, atol=1e-5 * eager.abs().max().item())

    for size in ((2, 40, 24), (3, 24, 56)):  # by now batch, height and width have been seen to change
        compare(*size)
    with torch.compiler.set_stance("fail_on_recompile"):
        for size in ((5, 48, 64), (2, 72, 40), (4, 32, 32)):  # the last one what the model is built for
            compare(*size)


# torch.export and AOTInductor


@pytest.mark.parametrize(
    "to_file,options",
    [
        (True, dict(dynamic_img_pad=True, patch_stride=4)),
        (True, dict(dynamic_img_pad=True, patch_stride=4, scan_order="rows_columns", **GRID)),
        (True, dict(mixer="mamba2", stem="conv")),
        (False, dict(mixer="mamba2", conv="grid", class_token="none", global_pool="avg")),
    ],
    ids=("token", "grid", "mamba2", "mamba2 grid"),
)
def test_exported_program_and_onnx_file_take_any_image_size(to_file, options, tmp_path, monkeypatch):
    model = build(dynamic_img_size=True, depth=1, **options)
    program = export_program(model)
    runs = [program.module()]
    if to_file:
        monkeypatch.setattr(export, "export_program", lambda *_: program)  # what it would make again
        to_onnx(model, tmp_path / "model.onnx")
        file = load_onnx(tmp_path / "model.onnx")
        runs.append(lambda images: file(images)[0])
    sizes = [(1, 24, 56), (3, 32, 32), (2, 80, 48)] + ([(2, 29, 43)] if "dynamic_img_pad" in options else [])
    for batch, height, width in sizes:
        images = torch.randn(batch, 3, height, width)
        with torch.no_grad():
            expected = model(images)
            assert all((run(images) - expected).abs().max() < 1e-5 * expected.abs().max() for run in runs)


LOAD = """
import sys, torch
load = torch._inductor.aoti_load_package
cases = torch.load(sys.argv[2])
try:
    load(sys.argv[1])(cases[0][0])
except RuntimeError as error:
    assert "vision_longhorn::mix" in str(error), error
else:
    raise AssertionError("ran without its operators")
import vision_longhorn
run = load(sys.argv[1])
for images, expected in cases:
    torch.testing.assert_close(run(images), expected, rtol=1e-4, atol=1e-5)
"""


@needs_compiler
def test_package_runs_in_another_process_that_imports_us(tmp_path):
    model, file = build(wiring="alternate"), tmp_path / "model.pt2"  # calls the operator with and without an option
    # Or else a compiler tries which vector instructions there are, which takes ten seconds.
    with importlib.import_module("torch._inductor.config").patch({"cpp.simdlen": 1}):
        to_package(model, file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt2", "model.pt2.sha256"]
    cases = [torch.randn(batch, 3, 32, 32) for batch in (1, 5)]
    with torch.no_grad():
        torch.save([(images, model(images)) for images in cases], tmp_path / "cases.pt")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(file), str(tmp_path / "cases.pt")],
        cwd=Path(vision_longhorn.__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


LINEAR = """
import sys, torch
layer, x = torch.nn.Linear(8, 8).cuda(), torch.randn(4, 8, device="cuda")
file = torch._inductor.aoti_compile_and_package(torch.export.export(layer, (x,)), package_path=sys.argv[1])
torch.testing.assert_close(torch._inductor.aoti_load_package(file)(x), layer(x), rtol=1e-3, atol=1e-3)
"""


@pytest.fixture(scope="module")
def packages_load(tmp_path_factory):
    """Skips where torch itself fails on the package of one linear layer: the crash would end all tests."""
    file = tmp_path_factory.mktemp("linear") / "linear.pt2"
    done = subprocess.run([sys.executable, "-c", LINEAR, str(file)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(
            f"torch {torch.__version__} and the C++ compiler {os.environ.get('CXX', 'g++')} fail (exit code "
            f"{done.returncode}) on the AOTInductor package of one linear layer; CXX=... names another"
        )


@pytest.mark.gpu
@pytest.mark.usefixtures("packages_load")
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)], ids=("float32", "bfloat16"))
@pytest.mark.parametrize("name", ["diagonal", "exact shared", "mamba"])
def test_package_on_a_gpu_agrees_with_the_model(name, dtype, bound, tmp_path):
    model = build(VARIANTS[name]).to("cuda", dtype)
    to_package(model, tmp_path / "model.pt2")
    run = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))
    assert largest_error(model, run, batches=(1, 2, 9)) < bound


# ONNX


@pytest.fixture
def onnx():
    return importlib.import_module("onnx")  # not at the top: the tests on a GPU do without it


CONVERTED = []


@pytest.fixture
def converted_once(monkeypatch):
    """For tests of what comes after: torch.onnx.export gives what it made of the first model that it was given."""
    real = torch.onnx.export

    def convert(*args, **kwargs):
        CONVERTED[:] = CONVERTED or [real(*args, **kwargs)]
        return CONVERTED[0]

    monkeypatch.setattr(torch.onnx, "export", convert)


def nodes_of(graph):
    """All nodes of an ONNX graph and of the graphs inside them."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes_of(attribute.g)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "diagonal"])  # of which are the next ones
def test_onnx_file_is_standard_and_gives_the_models_outputs(name, onnx, tmp_path):
    variant = VARIANTS[name]
    depth = 2 if variant.get("wiring") == "alternate" else 1  # else one block is as another
    model, file = build(variant, depth=depth), tmp_path / "model.onnx"
    model.set_grad_checkpointing(name == "mamba")  # which means nothing here
    before = copy.deepcopy(model.state_dict())
    to_onnx(model, file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.sha256"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    onnx.checker.check_model(file, full_check=True)
    proto = onnx.load(file)
    nodes = list(nodes_of(proto.graph))
    assert {node.domain for node in nodes} == {""} and {opset.domain for opset in proto.opset_import} == {""}
    assert not proto.functions
    scans = [node for node in nodes if node.op_type == "Scan"]
    in_block = 0 if variant.get("mixer") == "mamba2" else 1 if variant.get("wiring") == "alternate" else 2
    assert len(scans) == depth * in_block
    assert [axis.dim_param for axis in proto.graph.input[0].type.tensor_type.shape.dim] == ["batch", "", "", ""]

    run = load_onnx(file)
    for batch in (1, 2, 5):
        images = torch.randn(batch, 3, 32, 32)
        with torch.no_grad():
            expected = model(images)
        (found,) = run(images)
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    # The comparison above would be worth nothing if the directions or the order of the tokens were lost on the model.
    with torch.no_grad():
        assert (model(images.flip(3)) - expected).abs().max() > 0.01 * expected.abs().max()


def test_onnx_file_of_features_in_bfloat16_has_an_output_for_each_block_and_computes_in_float32(onnx, tmp_path):
    model = build(features_only=True, out_indices=(0, 1)).bfloat16()
    to_onnx(model, tmp_path / "model.onnx")
    assert model.model.pos_embed.dtype == torch.bfloat16
    names = [value.name for value in onnx.load(tmp_path / "model.onnx").graph.output]
    assert names == ["output_0", "output_1"]
    assert largest_error(copy.deepcopy(model).float(), load_onnx(tmp_path / "model.onnx")) < 1e-5


class Scans(nn.Module):
    """The public scans on the inputs of `make_inputs`, with one rule of each kind in every direction."""

    def __init__(self, rule, names):
        super().__init__()
        self.rule, self.names = rule, names

    def forward(self, *values):
        inputs = dict(zip(self.names, values))
        whole = self.rule in ("diagonal", "exact")  # the others differ from these in their recurrence alone
        y, state = call(self.rule, inputs, direction="both", return_final_state=True, qk_norm=whole)
        if not whole:
            return y, state
        mean = call(self.rule, inputs, direction="both", combine="mean")
        own = {
            name: value[1] if name == "initial_state" or value.shape[0] == 2 and name != "z" else value
            for name, value in inputs.items()
        }
        bare = {name: value for name, value in own.items() if name not in ("z", "D", "bias", "initial_state")}
        backward, last = call(self.rule, own, direction="backward", return_final_state=True)
        return y, state, mean, backward, last, call(self.rule, bare, direction="forward")


@pytest.mark.filterwarnings("ignore:.*The axis name")  # is one for several inputs, as it is meant to be
@pytest.mark.parametrize("rule", RULES)
def test_scans_of_ones_own_module_become_onnx_scans(rule, onnx, tmp_path):
    from onnxruntime import InferenceSession

    from vision_longhorn.onnx_ops import OPSET, TRANSLATIONS

    def inputs_of(batch, tokens):
        return make_inputs(rule, batch, tokens, 6, 4, direction="both", seed=batch)

    inputs = inputs_of(3, 9)
    dynamic = []
    for name, value in inputs.items():
        axis = value.ndim - 3  # of the batch
        dynamic.append({})
        if name not in ("D", "bias") and (name != "A" or rule == "mamba_per_token"):
            dynamic[-1] = {axis: "batch"} if name == "initial_state" else {axis: "batch", axis + 1: "tokens"}
    module = Scans(rule, list(inputs)).eval()
    file = str(tmp_path / "scans.onnx")
    torch.onnx.export(
        module,
        tuple(inputs.values()),
        dynamo=True,
        custom_translation_table=TRANSLATIONS,
        opset_version=OPSET,
        verbose=False,
        input_names=list(inputs),
        dynamic_shapes=(tuple(dynamic),),
    ).save(file)
    onnx.checker.check_model(file, full_check=True)
    session = InferenceSession(file, providers=["CPUExecutionProvider"])
    for sizes in ((3, 9), (4, 30)):
        inputs = inputs_of(*sizes)
        wide = module(*(value.double() for value in inputs.values()))
        found = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        for value, expected in zip(found, wide, strict=True):
            assert value.shape == expected.shape and relative_rms(torch.from_numpy(value), expected) < 1e-6


# What cannot be exported, and the command


LAYERS = {
    "MLP": (mlp, lambda: mlp.GeluMlp(8, 24), "bias_gelu"),
    "stem": (conv_stem, lambda: conv_stem.ConvStem(3, 24, (4, 4), 1e-3), "bias_norm_silu"),
}


@pytest.mark.parametrize("layers", LAYERS)
def test_an_operator_in_a_strict_export_becomes_standard_onnx(layers, onnx, tmp_path, monkeypatch):
    """On a GPU such a program has the operator."""
    from vision_longhorn.onnx_ops import OPSET, TRANSLATIONS

    module, model, operator = LAYERS[layers]
    monkeypatch.setattr(module, "_takes_kernel", lambda *_: True)
    model, x, file = model().eval(), torch.randn(3, 3, 8, 8), str(tmp_path / "layers.onnx")
    program = torch.export.export(model, (x,), strict=True)
    assert getattr(torch.ops.vision_longhorn, operator).default in [node.target for node in program.graph.nodes]
    options = dict(custom_translation_table=TRANSLATIONS, opset_version=OPSET, verbose=False)
    torch.onnx.export(program, dynamo=True, **options).save(file)
    assert {node.domain for node in nodes_of(onnx.load(file).graph)} == {""}
    torch.testing.assert_close(load_onnx(file)(x)[0], model(x).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("converted_once")
def test_refusals_name_the_remedy_and_leave_no_file(onnx, tmp_path, monkeypatch):
    model, file = build(), tmp_path / "model.onnx"
    file.write_text("what was there before")
    with pytest.raises(UserError, match=r"model\.eval\(\)"):
        to_onnx(copy.deepcopy(model).train(), file)
    with pytest.raises(UserError, match="Linear holds no VisionLonghorn"):
        to_onnx(nn.Linear(3, 3), file)
    with pytest.raises(UserError, match=r"\.pt2"):
        to_package(model, tmp_path / "model.so")

    def refuse(*_, **__):
        raise onnx.checker.ValidationError("not this one")

    with monkeypatch.context() as patched:
        patched.setattr(onnx.checker, "check_model", refuse)
        with pytest.raises(onnx.checker.ValidationError):
            to_onnx(model, file)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match=r"package onnx.*pip install 'vision-longhorn\[onnx\]'"):
        to_onnx(model, file)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert file.read_text() == "what was there before"


@pytest.fixture
def run(tmp_path):
    """A checkpoint as the trainer leaves it, and its model."""
    kwargs = dict(img_size=32, patch_size=8, depth=1, embed_dim=32)
    torch.manual_seed(0)
    model = timm.create_model("vlonghorn_test", num_classes=5, **kwargs)
    values = dict(model_kwargs=kwargs, data="nowhere", epochs=1, opt="adamw", seed=0)
    torch.save(
        dict(arch="vlonghorn_test", num_classes=5, state_dict=model.state_dict(), config=values, epoch=0, history=[]),
        tmp_path / "best.pt",
    )
    return tmp_path, model.eval()


def test_command_exports_a_run_and_says_how_far_it_is_off(run, onnx, capsys):
    folder, model = run
    main([str(folder), str(folder / "model.onnx"), "--img-size", "40", "24", "--batch", "2"])
    words = capsys.readouterr().out
    assert "model.onnx" in words and float(words.split(" by ")[1].split()[0]) < 1e-5
    axes = onnx.load(folder / "model.onnx").graph.input[0].type.tensor_type.shape.dim
    assert [axis.dim_value for axis in axes] == [2, 3, 40, 24]
    model.set_input_size(img_size=(40, 24))
    images = torch.randn(2, 3, 40, 24)
    with torch.no_grad():
        torch.testing.assert_close(load_onnx(folder / "model.onnx")(images)[0], model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("words,any_size", [([], False), (["--img-size", "any"], True)])
def test_command_exports_a_run_as_it_is_or_for_all_sizes(words, any_size, run, monkeypatch):
    (folder, model), given = run, []

    def write(model, path, batch):
        given.append((model, batch))
        Path(path).touch()
        return 0.0

    monkeypatch.setattr(export, "to_onnx", write)  # what it does with such models is tested above
    main([str(folder), str(folder / "model.onnx"), *words])
    ((found, batch),) = given
    images = torch.randn(2, 3, 32, 32)
    assert found.dynamic_img_size == any_size and batch is None and not found.training
    assert torch.equal(found(images), model(images))


def test_command_makes_a_folder_of_a_run(run):
    folder, model = run
    main([str(folder), str(folder / "made"), "--license", "mit"])
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        loaded = timm.create_model(f"local-dir:{folder / 'made'}", pretrained=True).eval()
        assert torch.equal(loaded(images), model(images))


@pytest.mark.parametrize(
    "words,message",
    [
        ([".", "model.bin"], r"model\.bin.*\.onnx or \.pt2"),
        ([".", "model.onnx", "--model-kwargs", "depth=3"], "model_kwargs it was trained with"),
        ([".", "model.onnx", "--img-size", "32", "32", "3"], r"--img-size is \[32, 32, 3\]"),
        ([".", "model.onnx", "--img-size", "4"], "--img-size 4 is not accepted: .*patch"),
        ([".", "model.onnx", "--batch", "0"], "--batch: '0'"),
        ([".", "model.pt2", "--device", "abacus"], "--device abacus is not accepted"),
        ([".", "made", "--batch", "2"], "made is to hold the run as it is: leave out .*--batch"),
        (["vlonghorn_test", "made"], "no checkpoint at vlonghorn_test"),
        (["none/best.pt", "model.onnx"], "no checkpoint at none/best.pt"),
        (["vim_test", "model.pt2", "--model-kwargs", "patch_size=0"], "patch_size is 0: give a whole number"),
        (["vim_test", "model.pt2", "--model-kwargs", "pretrained=true"], "pretrained: .* give --pretrained"),
        ([".", "model.onnx", "--pretrained"], "--pretrained is for a name of timm"),
        ([".", "model.onnx", "--license", "mit"], "--license is for a folder"),
        ([".", "model.onnx", "--device", "cpu"], "--device is for a .pt2"),
        ([".", "model.onnx", "--model-kwargs", "num_classes=5"], "model_kwargs has num_classes"),
        ([".", "model.onnx", "--img", "32"], "nearest known one is --img-size"),
    ],
)
def test_what_the_command_cannot_use_is_named(words, message, run, monkeypatch):
    monkeypatch.chdir(run[0])
    with pytest.raises(UserError, match=message):
        main(words)
    assert [path.name for path in Path().iterdir()] == ["best.pt"]


@pytest.mark.usefixtures("converted_once")
@pytest.mark.parametrize("error", (0.5, float("nan")))
def test_an_export_with_other_outputs_is_not_kept(error, run, monkeypatch):
    monkeypatch.chdir(run[0])
    monkeypatch.setattr(export, "largest_error", lambda *_, **__: error)
    with pytest.raises(UserError, match="model.onnx was not written"):
        main([".", "model.onnx"])
    assert [path.name for path in Path().iterdir()] == ["best.pt"]


def test_a_compiler_that_is_not_there_is_named(run, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("torch._inductor.cpp_builder.cpp_compiler_search", _no_compiler)
    with pytest.raises(UserError, match="no-such-compiler, which does not work here"):
        to_package(build(depth=1), run[0] / "model.pt2")
    assert [path.name for path in run[0].iterdir()] == ["best.pt"]


def _no_compiler(*_):
    from torch._inductor.exc import InvalidCxxCompiler

    raise InvalidCxxCompiler


@pytest.mark.parametrize("command", ("export", "hub", "maps", "curves"))
def test_a_command_reads_its_command_line_before_what_takes_long_to_import(command):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", f"vision_longhorn.{command}", "--help"],
        cwd=Path(vision_longhorn.__file__).parents[1],
        capture_output=True,
        text=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "usage:" in done.stdout and "vision_longhorn.errors" in imported
    assert not imported & {"torch", "timm", "matplotlib", "tensorboard"}
