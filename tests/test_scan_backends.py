"""The torch path and the Triton kernels against the float64 reference, on a CPU (the kernels in Triton's interpreter)
and, marked `gpu`, at full size on a GPU."""

import pytest
import torch
from scan_cases import (
    DECAYS,
    KEYS,
    NAMES,
    RULES,
    call,
    errors,
    get_rule,
    make_inputs,
    outputs_and_gradients,
    reference,
    relative_rms,
)
from vision_longhorn.kernels import Scan, ops
from vision_longhorn.kernels.dispatch import get_backend, has_numba

from vision_longhorn import kernels

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
needs_triton = pytest.mark.skipif(not kernels.HAS_TRITON, reason="triton is not installed on this platform")
needs_numba = pytest.mark.skipif(not has_numba(), reason="numba is not installed")
NEEDS = {"torch": (), "triton": needs_triton, "numba": needs_numba}
BACKENDS = [pytest.param(name, marks=marks) for name, marks in NEEDS.items()]


def check(rule, backend, *sizes, dtype=torch.float32, device="cpu", **options):
    scan_options = {
        name: options.pop(name) for name in ("direction", "combine", "save_states", "regime") if name in options
    }
    inputs = make_inputs(
        rule, *sizes, dtype=dtype, device=device, direction=scan_options.get("direction", "forward"), **options
    )
    found = errors(rule, inputs, backend, **scan_options)
    worst = {name: error for name, error in found.items() if not error <= TOLERANCE[dtype]}
    assert not worst, f"{rule} {backend} {sizes} {dtype} {options} {scan_options}: relative RMS error {worst}"


def cases(values, short, rules=RULES):
    """(backend, rule, value): in the interpreter, where a case takes seconds, all values for one rule of each kind of
    transition, and those in `short` for the others, which share all but their step with these."""
    return [
        pytest.param(backend, rule, value, id=f"{rule}-{value}-{backend}", marks=NEEDS[backend])
        for rule in rules
        for value in values
        for backend in NEEDS
        if backend != "triton" or rule in ("diagonal", "exact") or value in short
    ]


DIRECTIONS = [
    ("forward", "none", True),
    ("backward", "none", True),
    ("both", "none", False),
    ("both", "sum", True),
    ("both", "mean", False),
]


@pytest.mark.parametrize("backend,rule,directions", cases(DIRECTIONS, DIRECTIONS[1:4:2]))
def test_directions_and_combinations(backend, rule, directions):
    direction, combine, stacked = directions
    check(rule, backend, 2, 11, 5, 4, direction=direction, combine=combine, stacked=stacked)


SIZES = [(1, 33, 16), (2, 3, 64), (35, 7, 8), (35, 1, 1)]


@pytest.mark.parametrize("backend,rule,sizes", cases(SIZES, SIZES[1:3]))
def test_awkward_sizes(backend, rule, sizes):
    check(rule, backend, 1, *sizes, direction="both", combine="mean")


@pytest.mark.parametrize(
    "backend,rule,L,D,N",
    [
        *(("torch", rule, 197, 33, 16) for rule in RULES),
        *(("torch", rule, *sizes) for rule in ("diagonal", "exact") for sizes in [(1000, 5, 1), (520, 3, 64)]),
        *(pytest.param("numba", rule, 197, 133, 16, marks=needs_numba) for rule in ("diagonal", "exact", "mamba")),
    ],
)
def test_long_sequences_on_a_cpu(backend, rule, L, D, N):
    check(rule, backend, 1, L, D, N, direction="both", combine="mean")


KEY_SIZES = [(keys, N) for keys in KEYS if keys != "unit" for N in (1, 8)]


@pytest.mark.parametrize(
    "backend,rule,keys",
    cases(KEY_SIZES, [("mixed", 8), ("large", 1)], [name for name in NAMES if not get_rule(name).takes_A]),
)
def test_key_sizes(backend, rule, keys):
    keys, N = keys
    check(rule, backend, 1, 21, 5, N, keys=keys)


@pytest.mark.parametrize("backend,rule,dtype", cases((torch.bfloat16, torch.float16), [torch.bfloat16]))
def test_low_precision(backend, rule, dtype):
    check(rule, backend, 1, 11, 17, 8, dtype=dtype, direction="both", combine="mean")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if get_rule(rule.removesuffix("_per_token")).step_per == "channel"]
)
def test_scalar_step_size(backend, rule):
    check(rule, backend, 1, 11, 5, 4, scalar_step=True, direction="both", combine="sum")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", NAMES)
def test_optional_inputs_may_be_absent(backend, rule):
    inputs = make_inputs(rule, 2, 10, 5, 4, gate=False, state=False)
    del inputs["D"], inputs["bias"]
    found = errors(rule, inputs, backend)
    assert max(found.values()) <= 1e-5, found


UNIT_CASES = [
    ("forward", "none", True, 16, "unit", torch.float32),
    ("both", "mean", False, 5, "mixed", torch.float32),  # one set for both directions, lengths from 0 to 1e3
    ("both", "none", True, 1, "large", torch.float32),
    ("backward", "none", True, 40, "unit", torch.bfloat16),
]


@pytest.mark.parametrize(
    "backend,rule,case", cases(UNIT_CASES, UNIT_CASES[1:2], ("diagonal", "exact", "delta", "mamba_per_token"))
)
def test_keys_and_queries_of_unit_length(backend, rule, case):
    direction, combine, stacked, N, keys, dtype = case
    inputs = make_inputs(rule, 2, 11, 5, N, direction=direction, stacked=stacked, keys=keys, dtype=dtype)
    found = errors(rule, inputs, backend, direction=direction, combine=combine, qk_norm=True)
    assert max(found.values()) <= TOLERANCE[dtype], found
    # The formula, by itself: the same scan over keys and queries that were divided before.
    units = {name: inputs[name] / (inputs[name].square().sum(-1, keepdim=True) + 1e-6).sqrt() for name in ("k", "q")}
    same = call(rule, {**inputs, **units}, backend=backend, direction=direction, combine=combine)
    assert (
        relative_rms(call(rule, inputs, backend=backend, direction=direction, combine=combine, qk_norm=True), same)
        < 1e-2
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_a_zero_key_of_unit_length_writes_nothing_and_gradients_stay_finite(backend, dtype):
    inputs = make_inputs("exact", 1, 9, 4, 8, dtype=dtype)
    inputs["k"][:, 2], inputs["q"][:, 3], inputs["k"][:, 4] = 0, 0, inputs["k"][:, 4] * 1e-6
    found = outputs_and_gradients("exact", inputs, backend=backend, qk_norm=True)
    assert all(value.isfinite().all() for value in found.values())
    first = {name: value[:, :3] if name in ("x", "step", "k", "q", "z") else value for name, value in inputs.items()}
    _, before = call("exact", {**first, **{n: first[n][:, :2] for n in ("x", "step", "k", "q", "z")}},
                     backend=backend, qk_norm=True, return_final_state=True)  # fmt: skip
    _, after = call("exact", first, backend=backend, qk_norm=True, return_final_state=True)
    assert torch.equal(before, after)


@pytest.mark.parametrize("rule", ("diagonal", "exact", "mamba"))
def test_steps_with_keys_of_unit_length_are_the_scan(rule):
    inputs = make_inputs(rule, 2, 5, 3, 4, dtype=torch.float64)
    expected, last = call(rule, inputs, backend="reference", qk_norm=True, return_final_state=True)
    step, state = (kernels.selective_step if rule == "mamba" else kernels.longhorn_step), inputs["initial_state"]
    options = dict(D=inputs["D"]) | (
        dict(A=inputs["A"], dt_bias=inputs["bias"]) if rule == "mamba" else dict(beta_bias=inputs["bias"], rule=rule)
    )
    letters = ("dt", "B", "C") if rule == "mamba" else ("beta", "k", "q")
    for t in range(5):
        token = dict(zip(letters, (inputs[name][:, t] for name in ("step", "k", "q"))))
        y, state = step(state, inputs["x"][:, t], **token, z=inputs["z"][:, t], **options, qk_norm=True)
        assert relative_rms(y, expected[:, t]) < 1e-12
    assert relative_rms(state, last) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_mamba_without_softplus(backend):
    inputs = make_inputs("mamba", 2, 10, 5, 4)
    inputs["step"] = inputs["step"].abs()
    inputs["bias"] = inputs["bias"].abs()
    found = errors("mamba", inputs, backend, dt_softplus=False)
    assert max(found.values()) <= 1e-5, found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_states_found_again_in_backward_give_the_same_gradients(backend, rule):
    inputs = make_inputs(rule, 1, 11, 5, 4, direction="both")
    kept, found = (
        outputs_and_gradients(rule, inputs, direction="both", backend=backend, save_states=save)
        for save in (True, False)
    )
    for name in kept:
        assert torch.equal(kept[name], found[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", NAMES)
@pytest.mark.parametrize("L,N", [(11, 5), (8, 1)])
def test_what_is_kept_has_the_shape_that_compilers_are_told(backend, rule, L, N):
    inputs = make_inputs(rule, 2, L, 3, N, direction="both")
    A = inputs.get("A")
    scan = Scan(*(inputs[name] for name in ("x", "step", "k", "q")), A, None, None, inputs["bias"], None, rule, "both")
    backend = get_backend(backend)
    assert ops.forward(scan, True, backend)[2].shape == backend.saved_shape(scan)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_same_input_gives_the_same_bits(backend, rule):
    inputs = make_inputs(rule, 1, 10, 40, 4, direction="both", dtype=torch.bfloat16)
    first, second = (
        outputs_and_gradients(rule, inputs, direction="both", combine="mean", backend=backend) for _ in range(2)
    )
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_views_of_a_projection_give_what_their_copies_give(backend, rule):
    """x and z as halves of one projection, k and q as slices of another, channels not contiguous for one of them."""
    inputs = make_inputs(rule, 2, 10, 6, 4)
    views = dict(inputs)
    views["x"], views["z"] = torch.cat([inputs["x"], inputs["z"]], -1).chunk(2, -1)
    views["k"], views["q"] = torch.cat([inputs["k"], inputs["q"]], -1).split(4, -1)
    views["step"] = inputs["step"].transpose(1, 2).contiguous().transpose(1, 2)
    assert not any(views[name].is_contiguous() for name in ("x", "z", "k", "q", "step"))
    copied, viewed = (outputs_and_gradients(rule, case, backend=backend) for case in (inputs, views))
    for name in copied:
        assert torch.equal(copied[name], viewed[name]), name


def extreme_inputs(rule, device="cpu"):
    """Logits of +-100, keys up to 1e4, zeros: what has made other implementations overflow."""
    inputs = make_inputs(rule, 1, 24, 4, 8, device=device)
    inputs["step"][:, 0:6] = 100.0
    inputs["step"][:, 6:12] = -100.0
    inputs["x"][:, 12:18] = 0.0
    inputs["k"][:, 12:15] = 0.0
    inputs["z"][:, 18:20] = 100.0
    inputs["z"][:, 20:22] = -100.0
    if "A" not in inputs:
        inputs["k"][:, 3:9] *= 1e4
    return inputs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_extreme_values_stay_finite_and_right(backend, rule):
    found = errors(rule, extreme_inputs(rule), backend)
    assert max(found.values()) <= 1e-5, found


@needs_triton
@pytest.mark.parametrize(
    "rule,direction",
    [
        ("diagonal", "both"),  # each of them alone with one of the others
        *((rule, "backward") for rule in DECAYS if rule != "diagonal"),
        ("mamba_per_token", "forward"),
    ],
)
def test_segments_of_time_side_by_side(rule, direction):
    """67 tokens in three segments, the last one short, with an initial state and a gradient of the final one."""
    check(rule, "triton", 1, 67, 3, 2, direction=direction, regime="parallel")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("elements", (1, 2000))
def test_torch_path_in_many_pieces(rule, elements, monkeypatch):
    """Chunk by chunk, and a few chunks at a time."""
    from vision_longhorn.kernels.backends.torch import scan as torch_scan

    monkeypatch.setattr(torch_scan, "SPAN_ELEMENTS", elements)
    check(rule, "torch", 3, 29, 5, 4, direction="both", combine="mean")


@needs_triton
@pytest.mark.parametrize("rule", sorted(set(NAMES) - set(DECAYS)))
def test_beyond_the_first_saved_state_of_a_rule_that_is_undone(rule):
    check(rule, "triton", 1, 71, 3, 2)


@needs_triton
@pytest.mark.parametrize("kernel,rule", [("forward", "diagonal"), ("backward", "diagonal"), ("backward", "exact")])
def test_every_choice_of_launch_is_right(kernel, rule, monkeypatch):
    from vision_longhorn.kernels.backends.triton import scan as triton_scan
    from vision_longhorn.kernels.backends.triton import tuning

    for choice in tuning.TABLE[kernel, rule]:
        monkeypatch.setattr(
            triton_scan,
            "choose",
            lambda which, scan, _: choice if which == kernel else tuning.first_choice(which, scan),
        )
        check(rule, "triton", 1, 11, 40, 4)


@pytest.mark.parametrize("backend,rule,size", cases((0.0, 1e-41), [1e-41]))
def test_zeros_and_denormals(backend, rule, size):
    inputs = {
        name: value if name == "A" else value.sign() * size for name, value in make_inputs(rule, 1, 9, 3, 4).items()
    }
    expected = reference(rule, inputs)
    got = outputs_and_gradients(rule, inputs, backend=backend)
    for name, value in got.items():
        # What is smaller than float32's smallest normal number may have any of its values, or zero.
        assert (value - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max() + 1e-37, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_an_empty_batch_passes_through(backend, rule):
    inputs = make_inputs(rule, 0, 5, 3, 4)
    result = outputs_and_gradients(rule, inputs, backend=backend)
    assert result["y"].shape == (0, 5, 3) and result["dD"].shape == (3,) and not result["dD"].any()


@pytest.mark.parametrize(
    "change,words",
    [
        (dict(x=torch.zeros(2, 3)), "x has shape (2, 3)"),
        (dict(k=torch.zeros(2, 7, 4)), "k has shape (2, 7, 4)"),
        (dict(step=torch.zeros(2, 18, 2)), "beta has shape (2, 18, 2)"),
        (dict(D=torch.zeros(4)), "D has shape (4,)"),
        (dict(initial_state=torch.zeros(2, 4, 5)), "initial_state has shape (2, 4, 5)"),
        (dict(q=torch.zeros(2, 18, 4, dtype=torch.int64)), "q is torch.int64"),
        (dict(x=torch.zeros(2, 0, 5)), "at least 1"),
    ],
)
def test_wrong_tensors_are_named(change, words):
    inputs = {**make_inputs("diagonal", 2, 18, 5, 4), **change}
    for backend in ("torch", "reference"):
        with pytest.raises(ValueError) as error:
            call("diagonal", inputs, backend=backend)
        assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options,words",
    [
        (dict(rule="exakt"), "rule='exakt'"),
        (dict(direction="sideways"), "direction='sideways'"),
        (dict(backend="cuda"), "backend='cuda'"),
        (dict(combine="mean"), "combine='mean'"),
        (dict(regime="fast"), "regime='fast'"),
        (dict(regime="parallel", rule="exact"), "rule='exact'"),
        (dict(regime="parallel", backend="torch"), "torch path"),
    ],
)
def test_wrong_options_are_named(options, words):
    inputs = make_inputs("diagonal", 2, 18, 5, 4)
    with pytest.raises(ValueError, match=words):
        kernels.longhorn_scan(inputs["x"], inputs["step"], inputs["k"], inputs["q"], **options)


@needs_triton
def test_the_plan_follows_the_sizes_and_can_be_forced():
    """Few long sequences are cut along time where the rule allows it, many short ones are not."""

    def segments(rule, B, L, **options):
        sizes = {name: value.shape for name, value in make_inputs(rule, 1, 1, 64, 16, gate=False, state=False).items()}
        inputs = {
            name: torch.empty(B, L, shape[-1]) if name in ("x", "step", "k", "q") else torch.empty(shape)
            for name, shape in sizes.items()
        }
        scan = kernels.Scan(*(inputs.get(name) for name in kernels.Scan._fields[:9]), rule, **options)
        plan = kernels.scan_plan(scan, backend="triton")
        return plan["forward"].segments, plan["backward"].segments

    for rule in DECAYS:
        assert min(segments(rule, 1, 4096)) > 1
        assert segments(rule, 1, 4096, regime="sequential") == segments(rule, 1024, 196) == (1, 1)
        assert min(segments(rule, 1024, 196, regime="parallel")) > 1
    for rule in set(NAMES) - set(DECAYS):
        assert segments(rule, 1, 4096) == (1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "B,L,D,rules",
    [
        (128, 197, 768, NAMES),
        (128, 197, 384, NAMES),
        (8, 6085, 384, NAMES),
        (8, 6085, 768, DECAYS),
        (1, 16384, 768, DECAYS),
    ],
)
def test_gpu_errors_at_the_sizes_of_the_benchmark(B, L, D, rules):
    """The first and the last sequence of the whole batch, as it is planned and launched for the whole, against float64
    (by the torch path, which the tests above hold against the loop)."""
    for rule in rules:
        inputs = make_inputs(rule, B, L, D, 16, direction="both", dtype=torch.bfloat16, device="cuda", state=False)
        options = dict(direction="both", combine="mean")
        leaves = {name: value.requires_grad_() for name, value in inputs.items()}
        y = call(rule, leaves, backend="triton", **options)
        dy = torch.randn(y.shape, device="cuda").bfloat16()
        grads = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy)))
        for at in {0, B - 1}:
            one = {
                name: (value if name in ("D", "bias", "A") else value[..., at : at + 1, :, :])
                .detach()
                .double()
                .requires_grad_()
                for name, value in inputs.items()
            }
            right = call(rule, one, backend="torch", **options)
            expected = dict(zip(one, torch.autograd.grad(right, list(one.values()), dy[at : at + 1].double())))
            found = {"y": relative_rms(y[at : at + 1], right)}
            for name in ("x", "step", "k", "q", "z"):
                found[name] = relative_rms(grads[name][..., at : at + 1, :, :], expected[name])
            assert max(found.values()) <= 1e-2, (rule, found)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", DECAYS)
def test_gpu_segments_give_the_same_bits_20_times(rule):
    inputs = make_inputs(rule, 1, 4099, 384, 16, direction="both", dtype=torch.bfloat16, device="cuda")
    options = dict(direction="both", combine="mean", backend="triton")
    first = outputs_and_gradients(rule, inputs, **options)
    for _ in range(20):
        again = outputs_and_gradients(rule, inputs, **options)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
def test_gpu_first_use_compiles_nothing_for_another_batch_or_length():
    from vision_longhorn.kernels.backends.triton import scan_backward, scan_forward

    def compiled():
        return [
            len(cache)
            for kernel in (scan_forward._forward_kernel, scan_backward._backward_kernel)
            for cache in (kernel.jitted.device_caches[torch.cuda.current_device()][0],)
        ]

    counts = set()
    for B, L in ((128, 197), (96, 65), (131, 50)):
        inputs = make_inputs("diagonal", B, L, 384, 16, direction="both", dtype=torch.bfloat16, device="cuda")
        outputs_and_gradients("diagonal", inputs, direction="both", backend="triton", regime="sequential")
        counts.add(tuple(compiled()))
    assert len(counts) == 1, counts


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("N", (1, 8, 16, 64))
def test_gpu_errors_at_all_promised_sizes(rule, N, record_property):
    """Every L, N and dtype that the project promises; the sequences of a batch differ in the size of their keys and are
    judged one by one, so that none hides behind another. With --junitxml the worst error of each dtype is recorded."""
    worst = {torch.float32: (0.0,), torch.bfloat16: (0.0,)}
    for L in (1, 2, 63, 197, 1000):
        # Values that bf16 holds, so that one reference serves both dtypes.
        inputs = make_inputs(rule, len(KEYS), L, 33, N, direction="both", dtype=torch.bfloat16, seed=L + N)
        if rule in ("diagonal", "exact"):
            for i, keys in enumerate(KEYS):
                inputs["k"][:, i] = make_inputs(
                    rule, 1, L, 33, N, direction="both", dtype=torch.bfloat16, keys=keys, seed=L + N
                )["k"][:, 0]
        expected = reference(rule, inputs, direction="both", combine="mean")
        for dtype in worst:
            cast = {
                name: value.to("cuda", torch.float32 if name in ("D", "bias", "initial_state") else dtype)
                for name, value in inputs.items()
            }
            if rule == "mamba":
                cast["A"] = inputs["A"].cuda()
            got = outputs_and_gradients(rule, cast, direction="both", combine="mean", backend="triton")
            for name, value in got.items():
                assert value.shape == expected[name].shape
                per_sequence = name in ("y", "dz") or value.ndim == 4
                pairs = zip(value.unbind(-3), expected[name].unbind(-3)) if per_sequence else [(value, expected[name])]
                for i, (part, right) in enumerate(pairs):
                    error = relative_rms(part.cpu(), right)
                    where = f"{name} at L={L} N={N}" + (f", keys {KEYS[i]}" if per_sequence else "")
                    assert error <= TOLERANCE[dtype], f"{rule} {dtype}: relative RMS error {error:.1e}, {where}"
                    worst[dtype] = max(worst[dtype], (error, where))
    for dtype, (error, where) in worst.items():
        record_property(str(dtype).removeprefix("torch."), f"{error:.1e}, {where}")


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("B,L,D,N", [(4, 197, 384, 16), (1, 4097, 96, 16), (3, 65, 769, 32)])
def test_gpu_model_sizes(rule, B, L, D, N):
    check(rule, "triton", B, L, D, N, dtype=torch.bfloat16, device="cuda", direction="both", combine="mean")


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_gpu_same_input_gives_the_same_bits_20_times(rule):
    inputs = make_inputs(rule, 16, 197, 384, 16, direction="both", dtype=torch.bfloat16, device="cuda")
    first = outputs_and_gradients(rule, inputs, direction="both", combine="mean", backend="triton")
    for _ in range(20):
        again = outputs_and_gradients(rule, inputs, direction="both", combine="mean", backend="triton")
        for name in first:
            assert torch.equal(first[name], again[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_gpu_extreme_values(rule):
    found = errors(rule, extreme_inputs(rule, "cuda"), "triton")
    assert max(found.values()) <= 1e-5, found


@pytest.mark.gpu
def test_gpu_offsets_beyond_32_bits():
    """The last sequence of a batch whose x has more than 2^31 elements is scanned as it is alone."""
    L, D, N = 4096, 2048, 16
    B = 2**31 // (L * D) + 1
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    x, step, k, q = draw(B, L, D), draw(B, L, D), draw(B, L, N), draw(B, L, N)
    y = kernels.longhorn_scan(x, step, k, q, backend="triton")
    alone = kernels.longhorn_scan(x[-1:].clone(), step[-1:].clone(), k[-1:].clone(), q[-1:].clone(), backend="triton")
    assert relative_rms(y[-1:], alone) < 1e-2  # planned and launched in another way
    few = [value[-1:, :64].float() for value in (x, step, k, q)]
    assert relative_rms(y[-1:, :64], kernels.longhorn_scan(*few, backend="reference")) < 1e-2
