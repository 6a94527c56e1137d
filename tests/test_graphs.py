"""Training with CUDA graphs ends in the same bits as without."""

import json
import os
import socket
from types import SimpleNamespace

import pytest
import timm
import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from test_resume import PROCESSES, server  # noqa: F401  (the latter is a fixture)
from torch import nn

import vision_longhorn  # noqa: F401
from vision_longhorn.devices import make_accelerator
from vision_longhorn.errors import UserError
from vision_longhorn.train import main
from vision_longhorn.training.config import Config
from vision_longhorn.training.graphs import capture, gradients_are_apart
from vision_longhorn.training.setup import start_processes, wrap
from vision_longhorn.training.step import TrainStep

RUN = ["--model-kwargs", "depth=2", "embed_dim=32", "img_size=8", "patch_size=4", "--workers", "0", "--repeats", "1",
       "--batch-size", "128", "--epochs", "2", "--warmup-epochs", "0", "--lr-base-batch", "none"]  # fmt: skip


def weights_after_updates(name, options, passes, graphs, compiled=False):
    """A model's weights and buffers after three updates, and its scores for other images in eval mode."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, drop_path_rate=0.2, **options).cuda().train()
    accelerator = make_accelerator("cuda", "bf16")
    batches = torch.randn(3 * passes, 4, 3, *model.default_cfg["input_size"][1:], device="cuda")
    if graphs:
        capture(accelerator, model, torch.zeros_like(batches[0]), passes, compiled)
    elif compiled:
        forward = torch.compile(model.forward)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for i, images in enumerate(batches, 1):
        torch.manual_seed(i)  # of drop path
        with accelerator.autocast():
            scores = (forward if compiled and not graphs else model)(images)
        scores.float().square().mean().backward()
        if i % passes == 0:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        looked = model.eval()(batches[0][:3])  # of another shape than was captured
    return {**model.state_dict(), "looked": looked}


@pytest.mark.gpu
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    "name,options",
    [
        ("vlonghorn_test", {}),
        ("vlonghorn_test", {"rule": "exact", "save_states": True, "grid_conv": 3}),
        ("vim_test", {"wiring": "shared"}),
        ("test_resnet", {}),  # which has buffers
    ],
)
def test_same_bits_as_without_graphs(name, options, passes):
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        plain, captured = (weights_after_updates(name, options, passes, graphs) for graphs in (False, True))
    for key, value in plain.items():
        assert torch.equal(value, captured[key]), key


@pytest.mark.gpu
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", ["vlonghorn_test", "vim_test", "test_vit"])
def test_a_compiled_model_gives_its_bits_in_graphs_too(name, passes):
    # Compilation chooses among kernels by their time, and others sum in another order; deterministic, it does not.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain, captured = (weights_after_updates(name, {}, passes, graphs, compiled=True) for graphs in (False, True))
    finally:
        torch.use_deterministic_algorithms(False)
    for key, value in plain.items():
        assert torch.equal(value, captured[key]), key


@pytest.mark.gpu
def test_a_run_with_graphs_is_the_run_without(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, more in ("plain", []), ("graphs", ["--cuda-graphs"]):
        main(["--data", "digits", "--model", "vlonghorn_test", *RUN, "--run-dir", str(tmp_path / name), *more])
    plain, graphs = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("plain", "graphs"))
    assert [entry["train_loss"] for entry in plain] == [entry["train_loss"] for entry in graphs]
    assert plain[-1]["val"] == graphs[-1]["val"] and plain[-1]["val_ema"] == graphs[-1]["val_ema"]


def refuse_what_waits_for_the_gpu(rank):
    class Waits(nn.Linear):
        def forward(self, images):
            return super().forward(images) * images.mean().item()

    with pytest.raises(UserError, match="cuda_graphs: this model cannot be captured .*: leave it out"):
        capture(make_accelerator("cuda", "bf16"), Waits(4, 4).cuda(), torch.randn(2, 4, device="cuda"), 1)


@pytest.mark.gpu
def test_a_model_that_waits_for_the_gpu_is_refused():
    # In a process of its own: after a capture that failed, torch's generator of the GPU is of no use.
    torch.multiprocessing.spawn(refuse_what_waits_for_the_gpu, nprocs=1)


def gradients_of_an_update(rank, port, compress):
    """In each of two processes: an update of two passes, with and without a wrapper that averages gradients."""
    place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update({key: str(value) for key, value in place.items()}, ACCELERATE_USE_CPU="true")
    torch.set_num_threads(1)
    hook = DDPCommunicationHookType.BF16 if compress else DDPCommunicationHookType.NO
    ddp = DistributedDataParallelKwargs(comm_hook=hook)
    accelerator = make_accelerator("cpu", "fp32", grad_accum=2, kwargs_handlers=[ddp])
    found = []
    for prepare in accelerator.prepare, lambda model: model:
        torch.manual_seed(0)
        model = timm.create_model("vlonghorn_test", depth=1, img_size=32, num_classes=3)
        torch.manual_seed(1 + rank)
        batches = [(torch.randn(2, 3, 32, 32), torch.randint(3, (2,))) for _ in range(2)]
        optimizer = torch.optim.SGD(model.parameters())
        loss = nn.functional.cross_entropy
        step = TrainStep(accelerator, model, prepare(model), loss, optimizer, compress=compress)
        _, norm = step.gradients(batches)
        found.append({name: one.grad for name, one in model.named_parameters()} | {"norm": norm})
    wrapped, plain = found
    for name, value in wrapped.items():
        assert value.any() and torch.equal(value, plain[name]), name
    accelerator.wait_for_everyone()
    os._exit(0)  # in torch 2.7, leaving gloo's group can hang


@pytest.mark.parametrize("compress", [False, True])
def test_gradients_of_two_processes_are_averaged_without_a_wrapper_too(compress):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [PROCESSES.Process(target=gradients_of_an_update, args=(rank, port, compress)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]


@pytest.mark.parametrize(
    "model, more, wrapper",
    [
        (nn.Linear(4, 4), {}, False),
        (nn.Linear(4, 4), {"compress_gradients": True}, False),
        (nn.Linear(4, 4), {"cuda_graphs": False}, True),
        (nn.BatchNorm1d(4), {}, True),  # its buffers are the first process's
    ],
)
def test_only_what_graphs_give_at_once_needs_no_wrapper(monkeypatch, model, more, wrapper):
    accelerator = SimpleNamespace(
        device=SimpleNamespace(type="cuda"),
        num_processes=1,
        prepare=lambda model: "wrapped",
        prepare_model=lambda model, **_: "plain",
    )
    for name in "capture", "broadcast":
        monkeypatch.setattr(f"vision_longhorn.training.setup.{name}", lambda *_, **__: None)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    found = wrap(Config(**{"cuda_graphs": True, **more}), model, None, (4,), accelerator)
    assert found == ("wrapped" if wrapper else "plain")


@pytest.mark.parametrize("other", ["compile", "fsdp"])
def test_without_a_gpu_or_with_fsdp_there_are_no_graphs(other, capsys):
    class Compiled(nn.Linear):
        compiled = False

        def compile(self):
            self.compiled = True

    model = Compiled(4, 4)
    wrap(Config(cuda_graphs=True, **{other: True}), model, None, (4,), make_accelerator("cpu", "fp32"))
    assert ("Note: fsdp runs without cuda_graphs" in capsys.readouterr().out) == (other == "fsdp")
    assert model.compiled == (other == "compile")


def test_compiling_on_a_cpu_needs_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match="no-such-compiler is not there: install it, or add --compile false"):
        start_processes(Config(compile=True, device="cpu"), tmp_path)
    start_processes(Config(device="cpu"), tmp_path)
    monkeypatch.setenv("CXX", "env no-such-compiler")  # a command before its name, such as ccache
    start_processes(Config(compile=True, device="cpu"), tmp_path)


def test_a_captured_model_is_compiled_for_training_alone(monkeypatch):
    """An evaluation has batches of other sizes, and would wait for the compiler at each."""

    def graphed(model, inputs, **_):
        forward = model.forward
        model.forward = lambda images: torch.full((), 7.0) if forward(images) is compiled else None

    compiled = torch.ones(2, 4)
    monkeypatch.setattr(torch, "compile", lambda function: lambda images: compiled)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graphed)
    monkeypatch.setattr("vision_longhorn.training.graphs.gradients_are_apart", lambda *_: True)
    model = nn.Linear(4, 4)
    capture(make_accelerator("cpu", "fp32"), model, torch.randn(2, 4), 1, compiled=True)
    assert model.train()(torch.zeros(2, 4)) == 7
    assert torch.equal(model.eval()(torch.zeros(3, 4)), model.bias.expand(3, 4))


def test_a_model_that_does_not_compile_is_not_blamed_on_graphs_alone(monkeypatch):
    def fails(images):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda function: fails)
    with pytest.raises(UserError, match="compile, cuda_graphs: .* \\(no compiler\\): leave one of them out"):
        capture(make_accelerator("cpu", "fp32"), nn.Linear(4, 4), torch.randn(2, 4), 1, compiled=True)


def test_gradients_that_share_memory_are_found():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

        def forward(self, images):
            return images + self.a + self.b

    assert not gradients_are_apart(Twice(), torch.randn(4))
    assert gradients_are_apart(nn.Linear(4, 4), torch.randn(2, 4))
    model = timm.create_model("vlonghorn_test", depth=2, num_classes=10)
    assert gradients_are_apart(model, torch.randn(2, 3, 96, 96))


def test_memory_that_does_not_suffice_is_no_fault_of_the_model(monkeypatch):
    def fails(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", fails)
    with pytest.raises(torch.OutOfMemoryError):
        capture(make_accelerator("cpu", "fp32"), nn.Linear(4, 4), torch.randn(2, 4), 1)
