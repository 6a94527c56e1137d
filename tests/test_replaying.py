"""Operators that repeat what they did: the same bits as when they decide anew, and a decision wherever one is due."""

import importlib
import pkgutil
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import timm
import torch
from test_mixing import build, needs_triton, output_and_gradients
from vision_longhorn.kernels import bias_gelu, bias_norm_silu, grid_conv, replaying
from vision_longhorn.kernels.dispatch import get_backend

import vision_longhorn  # noqa: F401
from vision_longhorn import kernels

MIXERS = [
    dict(rule="exact", conv="grid", qk_norm=True, rope=True, gate="none"),
    dict(rule="exact", conv="grid", qk_norm=True, rope=True, gate="none", save_states=True, wiring="alternate"),
    dict(rule="mamba", A_per_token=True, save_states=True, gate="skip"),
    dict(rule="diagonal", wiring="shared"),
    dict(rule="gla", gate="value"),
    dict(rule="mamba", conv="grid", qk_norm=True, dtype=torch.bfloat16),
    dict(rule="exact", conv="grid", qk_norm=True, rope=True, gate="none", dim=32, dtype=torch.bfloat16),
]


@pytest.fixture
def replays(monkeypatch):
    """Operators repeat what they did on a CPU, too, where Triton interprets the kernels."""
    replaying.forget()
    monkeypatch.setattr(replaying, "DEVICES", ("cpu",))
    yield
    replaying.forget()


def recordings():
    return [known for known in replaying._known.values() if isinstance(known, replaying.Recording)]


@needs_triton
@pytest.mark.parametrize("options", MIXERS, ids=str)
def test_a_mixer_repeats_itself_with_the_bits_of_a_decision(options, replays, monkeypatch):
    dtype = options.get("dtype", torch.float32)
    mixer = build("triton", **{name: value for name, value in options.items() if name != "dtype"}).to(dtype)
    rows = 2 if mixer.needs_grid else 0
    shape = 1, 6, options.get("dim", 6)
    for _ in range(3):  # decided, recorded, repeated
        given = torch.randn(shape, dtype=dtype, requires_grad=True), torch.randn(shape, dtype=dtype)
        found = output_and_gradients(mixer, *given, rows)
    assert len(recordings()) == 2  # of the forward and the backward pass
    monkeypatch.setattr(replaying, "DEVICES", ())
    assert all(map(torch.equal, found, output_and_gradients(mixer, *given, rows)))


@needs_triton
@pytest.mark.parametrize("operator", ["bias_gelu", "bias_norm_silu", "grid_conv"])
def test_an_operator_alone_repeats_itself(operator, replays):
    def call(x, seed):
        torch.manual_seed(seed)
        if operator == "bias_gelu":
            return bias_gelu(x, torch.randn(5, requires_grad=True), backend="triton")
        if operator == "bias_norm_silu":
            return bias_norm_silu(x, *torch.randn(3, 5, requires_grad=True), 1e-3, backend="triton")
        weight, bias = torch.randn(5, 3, 3, requires_grad=True), torch.randn(5, requires_grad=True)
        return grid_conv(x, weight, bias, rows=3, backend="triton")

    for seed in range(3):
        x = torch.randn(2, 6, 5, requires_grad=True)
        (found,) = torch.autograd.grad(call(x, seed).square().sum(), x)
    assert recordings()
    replaying.forget()
    assert torch.equal(torch.autograd.grad(call(x, seed).square().sum(), x)[0], found)


def activated(x):
    """Launch a kernel on x, since what launches none is not recorded."""
    return get_backend("triton").gelu_forward(x.contiguous(), x.new_zeros(x.shape[-1]))


def counted(act):
    calls = []

    def run(*values):
        calls.append(values)
        return act(*values)

    return replaying.repeating(run), calls


@needs_triton
def test_views_copies_and_sums_in_place_are_repeated(replays):
    def act(x, y, scale):
        left, right = x.chunk(2, -1)
        total = torch.empty_like(left).copy_(left.flip(0))
        total.add_(right.contiguous() @ y, alpha=scale)
        return activated(total), total[1:, ::2], x.new_zeros(0), right.to(torch.float64)

    repeat, calls = counted(act)
    for _ in range(4):
        x, y = torch.randn(3, 8), torch.randn(4, 4)
        for value, right in zip(repeat(x, y, 2), act(x, y, 2)):
            assert torch.equal(value, right) and value.stride() == right.stride() and value.dtype == right.dtype
    assert len(calls) == 2


@needs_triton
@pytest.mark.parametrize(
    "change",
    [
        lambda x, n: (x.bfloat16(), n),
        lambda x, n: (x[1:], n),
        lambda x, n: (x.t().contiguous().t(), n),
        lambda x, n: (torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape), n),  # another alignment
        lambda x, n: (x, n + 1),
    ],
)
def test_other_arguments_are_decided_anew(change, replays):
    repeat, calls = counted(lambda x, n: activated(x) * n)
    x = torch.randn(4, 4)
    for _ in range(3):
        repeat(x, 2)
    assert len(calls) == 2
    other = change(x, 2)
    assert torch.equal(repeat(*other), activated(other[0]) * other[1]) and len(calls) == 3


def test_a_compiled_kernel_gets_the_addresses_of_each_call(replays):
    class Compiled:
        def __getitem__(self, grid):
            return lambda *arguments, stream=None: launched.append((grid, arguments))

    class Jitted:
        arg_names = ("x_ptr", "row_ptr", "absent_ptr", "made_ptr", "scratch_ptr", "part_ptr", "n")

        def __getitem__(self, grid):
            return lambda *arguments, **options: Compiled()

    def act(x, made):
        made, first, second = made.clone(), torch.empty(200), torch.empty(9, dtype=torch.float16)
        launch = partial(replaying.launch, Jitted(), (3,), x, x[1], x[:0], made, num_warps=4)
        launch(second, first[2:], n=5)
        del first
        launch(second, torch.empty(3), n=6)
        return (made,)

    launched = []
    repeat, _ = counted(act)
    for _ in range(4):
        x = torch.randn(2, 3)
        (made,) = repeat(x, x.new_ones(4))
    assert len(launched) == 4
    scratch = launched[-1][1][5]  # where one tensor makes room for the next
    pointers = x.data_ptr(), x.data_ptr() + 12, 0, made.data_ptr(), scratch + 1024
    assert launched[-2:] == [((3, 1, 1), (*pointers, scratch + 8, 5)), ((3, 1, 1), (*pointers, scratch, 6))]


def depends_on_values(x):
    return activated(x) + 1 if x.sum() > 0 else activated(x) - 1


def gives_no_tuple(x):
    return [activated(x)]


def takes_many_steps(x):
    for _ in range(replaying.LONGEST + 1):
        x = x + 1
    return activated(x)


def launches_nothing(x):
    return x + 1


@needs_triton
@pytest.mark.parametrize("act", [depends_on_values, gives_no_tuple, takes_many_steps, launches_nothing])
def test_what_no_list_holds_is_decided_every_time(act, replays):
    repeat, calls = counted(act)
    for sign in (1, -1, 1, -1):
        x = torch.full((2, 2), 0.5 * sign)
        found, right = repeat(x), act(x)
        assert all(torch.equal(a, b) for a, b in zip(found, right))
    assert len(calls) == 4 and not recordings()


@needs_triton
@pytest.mark.parametrize("which", ["a tensor from elsewhere", "arguments that share memory"])
def test_tensors_of_unknown_origin_are_not_repeated(which, replays):
    elsewhere, both = torch.zeros(2), torch.arange(3.0)
    repeat, calls = counted(lambda x, y: activated(x) + y + elsewhere)
    for number in range(4):
        elsewhere = torch.full((2,), float(number))
        x, y = (both[:2], both[1:]) if which == "arguments that share memory" else (torch.ones(2), torch.ones(2))
        if which == "arguments that share memory":
            elsewhere = 0
        assert torch.equal(repeat(x, y), activated(x) + y + elsewhere)
    assert len(calls) == 4


def test_memory_that_was_given_out_again_belongs_to_its_last_owner():
    memory = torch.zeros(8)
    recorder = replaying.Recorder([torch.zeros(1)])
    recorder.add(memory[:4])  # as if it had been freed
    owner = recorder.add(memory)
    assert recorder.parts(memory[2:]) == replaying.Part(owner, 8, torch.float32, (6,), (1,))


def test_a_list_frees_what_no_later_step_needs():
    alive = []
    steps = [
        replaying.Step(lambda _: lambda slots: slots.__setitem__(1, "large"), (), fills=1),
        replaying.Step(lambda _: lambda slots: alive.append(slots[1]), [replaying.Part(1)]),
        replaying.Step(lambda _: lambda slots: alive.append(slots[1]), ()),
    ]
    replaying.Recording(steps, [torch.zeros(1)], [None, None], ())(torch.zeros(1))
    assert alive == ["large", None]


def test_memory_is_shared_by_those_alone_that_do_not_live_together():
    draw = random.Random(0)
    for _ in range(200):
        firsts = [draw.randrange(12) for _ in range(draw.randrange(9))]
        blocks = {
            slot: replaying.Block(first, first + draw.randrange(4), draw.randrange(1, 6))
            for slot, first in enumerate(firsts)
        }
        places, size = replaying.arranged(blocks)
        for moment in range(16):
            alive = [slot for slot, block in blocks.items() if block.first <= moment <= block.last]
            used = [places[slot] + byte for slot in alive for byte in range(blocks[slot].size)]
            assert len(set(used)) == len(used) and max(used, default=0) < max(size, 1)
    Block = replaying.Block
    assert replaying.arranged({5: Block(0, 2, 512), 6: Block(3, 4, 512), 9: Block(4, 4, 512)})[1] == 1024


@needs_triton
def test_an_operator_inside_another_is_noted_by_it(replays):
    inner, _ = counted(lambda x: activated(x) + 1)
    outer, calls = counted(lambda x: inner(x) * 2)
    for _ in range(2):
        inner(torch.randn(2, 3))
    for _ in range(4):
        x = torch.randn(2, 3)
        assert torch.equal(outer(x), (activated(x) + 1) * 2)
    assert len(calls) == 2


def test_threads_share_the_few_that_are_known(replays, monkeypatch):
    monkeypatch.setattr(replaying, "MOST", 3)
    repeat, _ = counted(launches_nothing)

    def work(_):
        for size in (1, 2, 3, 4, 5) * 50:
            assert repeat(torch.ones(size)).tolist() == [2.0] * size and len(replaying._known) <= 3
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@needs_triton
def test_no_launch_goes_unnoticed():
    modules = pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")
    values = [value for module in modules for value in vars(importlib.import_module(module.name)).items()]
    launched = [kernel for name, kernel in values if name.endswith("_kernel") and hasattr(kernel, "arg_names")]
    assert len(launched) > 20 and all(hasattr(kernel, "jitted") for kernel in launched)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["vlonghorn_test", "vlonghorn_tiny", "vlonghorn_tiny_fast", "vim_test", "vim_tiny_best"]
)
@pytest.mark.parametrize("save_states", [False, True])
def test_training_on_a_gpu_has_the_same_bits_and_memory(name, save_states, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # of a stem's convolutions

    def train(repeats):
        replaying.forget()
        monkeypatch.setattr(replaying, "DEVICES", ("cuda",) if repeats else ())
        torch.manual_seed(0)
        model = timm.create_model(name, img_size=64, num_classes=10, save_states=save_states).cuda()
        optimizer, losses, peaks = torch.optim.SGD(model.parameters(), lr=0.05), [], []
        for _ in range(5):
            images = torch.randn(4, 3, 64, 64, device="cuda")
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(images).logsumexp(1).mean()
            loss.backward()
            peaks.append(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *model.parameters()], peaks[-1]

    (decided, memory), (repeated, less) = train(False), train(True)
    # A recording holds the memory of all that its call needs to the end of the call.
    assert len(recordings()) >= 2 and less <= memory * 1.01 + 2**16
    assert all(torch.equal(a, b) for a, b in zip(decided, repeated))
