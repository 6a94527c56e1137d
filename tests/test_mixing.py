"""The operator between the two projections of a block: against the plain description, and as an operator."""

import itertools

import pytest
import torch
from plain_model import plain_mixer, plain_turn
from scan_cases import relative_rms
from vision_longhorn.kernels import mixing
from vision_longhorn.kernels.backends.torch import projections as torch_projections
from vision_longhorn.kernels.backends.torch.rope import Turned
from vision_longhorn.kernels.backends.torch.unit import unit
from vision_longhorn.kernels.dispatch import get_backend, has_numba
from vision_longhorn.kernels.rules import NAMES, get_rule

from vision_longhorn import kernels
from vision_longhorn.models.mixers import BidirectionalMixer
from vision_longhorn.models.mixers.state_space import WIRINGS

needs_triton = pytest.mark.skipif(not kernels.HAS_TRITON, reason="triton is not installed on this platform")
BACKENDS = ["torch", pytest.param("triton", marks=needs_triton)]
SCANS = [*BACKENDS, pytest.param("numba", marks=pytest.mark.skipif(not has_numba(), reason="numba is not installed"))]
UPDATES = [*(dict(rule=rule) for rule in NAMES), dict(rule="mamba", A_per_token=True)]
# The block's index lets the "alternate" wiring go backward, which no other one does.
LAYOUTS = [dict(wiring=wiring, beta=beta) for wiring, beta in itertools.product(WIRINGS, ("vector", "scalar"))]


def build(backend="auto", dim=6, **options):
    torch.manual_seed(0)
    mixer = BidirectionalMixer(dim, index=1, **{"d_state": 4, **options})
    mixer.scan_backend = backend
    with torch.no_grad():
        for value in mixer.parameters():  # no two of them alike
            value.add_(torch.randn_like(value), alpha=0.2)
    return mixer


def output_and_gradients(mixer, h, weight, rows=0):
    y = mixer(h, rows)
    return [y, *torch.autograd.grad((y.float() * weight).sum(), [h, *mixer.parameters()])]


def expected_of(mixer, h, weight, rows=0):
    plain = {name: value.detach().double().requires_grad_() for name, value in mixer.named_parameters()}
    h = h.detach().double().requires_grad_()
    y = plain_mixer(plain, h, mixer, rows)
    return [y, *torch.autograd.grad((y * weight).sum(), [h, *plain.values()])]


def errors_of(mixer, h, weight, rows):
    names = ["y", "h", *(name for name, _ in mixer.named_parameters())]
    found = zip(names, output_and_gradients(mixer, h, weight, rows), expected_of(mixer, h, weight, rows))
    return {name: relative_rms(value, right) for name, value, right in found}


def check(mixer, h, tolerance, rows=0):
    errors = errors_of(mixer, h, torch.randn(h.shape), rows)
    assert max(errors.values()) < tolerance, errors


def check_on_gpu(mixer, shape, dtype, tolerance, rows=0):
    """Sums that nearly cancel lose digits in bfloat16 on any backend, so an error may be three times torch's."""
    h, weight = torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape)
    mixer = mixer.to(dtype)
    mixer.scan_backend = "torch"
    lost = max(errors_of(mixer, h, weight, rows).values())
    mixer.scan_backend = "auto"
    errors = errors_of(mixer.cuda(), h.detach().cuda().requires_grad_(), weight.cuda(), rows)
    assert max(errors.values()) < max(tolerance, 3 * lost), (errors, lost)


@pytest.mark.parametrize("backend", SCANS)
@pytest.mark.parametrize(
    "update,layout",
    [
        (update, layout)
        for update in UPDATES
        for layout in LAYOUTS
        if (layout["beta"] == "vector" or get_rule(update["rule"]).step_per == "channel")
        # All layouts with one rule of each kind, three that differ in everything with the others.
        and (
            update["rule"] in ("diagonal", "exact")
            or (layout["wiring"] == "shared") == (layout["beta"] == "scalar")
            and layout["wiring"] != "forward"
        )
    ],
    ids=str,
)
def test_mixer_is_its_plain_description(backend, layout, update):
    # States are saved in one half of the cases, found again in the other.
    mixer = build(backend, save_states=layout["beta"] == "scalar", **layout, **update)
    check(mixer, torch.randn(2, 11, 6, requires_grad=True), 1e-5)


@pytest.mark.parametrize("backend", SCANS)
@pytest.mark.parametrize("wiring,rule", [("vim", "exact"), ("shared", "diagonal"), ("alternate", "mamba")])
def test_mixer_with_normalised_keys_is_its_plain_description(backend, wiring, rule):
    mixer = build(backend, wiring=wiring, rule=rule, qk_norm=True)
    check(mixer, torch.randn(2, 11, 6, requires_grad=True), 1e-5)


@pytest.mark.parametrize("backend", SCANS)
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(save_states=True),  # keeps x once, and the step sizes of both directions
        dict(save_states=True, beta="scalar", d_conv=5),
        dict(rule="exact", qk_norm=True),
        dict(rule="mamba", A_per_token=True, d_conv=1),
        dict(rule="mamba", save_states=True, wiring="alternate"),
        dict(rule="gla", wiring="shared"),
        dict(rule="exact", qk_norm=True, rope=True),
        dict(rule="exact", rope=True, save_states=True, wiring="alternate"),
        dict(rule="mamba", A_per_token=True, rope=True, conv="causal", gate="skip"),
        dict(rule="exact", qk_norm=True, rope=True, gate="skip"),
        dict(rule="mamba", wiring="alternate", conv="causal", rope=True, save_states=True, gate="skip"),
        dict(rule="exact", qk_norm=True, rope=True, gate="none"),
        dict(rule="exact", rope=True, wiring="alternate", conv="causal", save_states=True, gate="none"),
        dict(rule="diagonal", save_states=True, gate="none"),
        dict(rule="exact", qk_norm=True, rope=True, gate="value"),
        dict(rule="exact", rope=True, wiring="alternate", save_states=True, gate="value"),
        dict(rule="mamba", save_states=True, gate="value"),
        dict(rule="diagonal", rope=True, wiring="shared", conv="causal"),
    ],
    ids=str,
)
def test_mixer_over_the_grid_is_its_plain_description(backend, options):
    check(build(backend, **{"conv": "grid", **options}), torch.randn(2, 12, 6, requires_grad=True), 1e-5, rows=3)


@pytest.mark.parametrize("backend", SCANS)
@pytest.mark.parametrize(
    "wiring,rule", [("vim", "exact"), ("vim", "mamba"), ("forward", "delta"), ("alternate", "gla")]
)
def test_mixer_without_a_gate_is_its_plain_description(backend, wiring, rule):
    mixer = build(backend, wiring=wiring, rule=rule, gate="none", save_states=rule == "mamba")
    assert mixer.in_proj.weight.shape == (12, 6)  # gives no z
    check(mixer, torch.randn(2, 11, 6, requires_grad=True), 1e-5)


@pytest.mark.parametrize("backend", SCANS)
def test_rates_beyond_float32_forget_everything_with_finite_gradients(backend):
    mixer = build(backend, rule="mamba", A_per_token=True)
    with torch.no_grad():
        mixer.x_proj[:, -mixer.d_state :] *= 1000  # some of A_log + linear(x) above 88, where exp is infinite
    check(mixer, torch.randn(2, 9, 6, requires_grad=True), 1e-3)


@pytest.mark.parametrize("backend", SCANS)
@pytest.mark.parametrize(
    "options,shape",
    [(dict(d_conv=1), (1, 1, 6)), (dict(d_conv=2, expand=3), (3, 2, 6)), (dict(dt_rank=5), (1, 19, 6))],
    ids=str,
)
def test_mixer_at_awkward_sizes(backend, options, shape):
    for layout in (dict(wiring="vim"), dict(wiring="shared"), dict(gate="none")):
        check(build(backend, **layout, **options), torch.randn(shape, requires_grad=True), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("S,R,n,D,steps", [(2, 12, 32, 40, 40), (1, 5, 6, 7, 1), (2, 8, 8, 600, 4)])
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_padding_puts_zeros_after_the_rank_and_takes_them_out(backend, S, R, n, D, steps, dtype):
    backend, width = get_backend(backend), -(-R // 8) * 8
    x_proj, dt_proj = torch.randn(S, R + n, D), torch.randn(S, steps, R)
    wide_x, wide_dt = backend.pad(x_proj, dt_proj, width, dtype)
    gap = torch.zeros(S, width - R, D)
    assert torch.equal(wide_x, torch.cat([x_proj[:, :R], gap, x_proj[:, R:]], 1).to(dtype))
    assert torch.equal(wide_dt, torch.nn.functional.pad(dt_proj, [0, width - R]).to(dtype))
    # Gradients of what was put in count for nothing, whatever they are.
    wide_x[:, R:width] = wide_dt[..., R:] = float("nan")
    back = backend.unpad(wide_x, wide_dt, x_proj, dt_proj)
    assert all(torch.equal(found, value.to(dtype).float()) for found, value in zip(back, (x_proj, dt_proj)))


@needs_triton
@pytest.mark.parametrize("R,x_parts,dt_parts", [(12, 3, 1), (12, 2, 40), (8, 33, 5)])
def test_parts_of_gradients_are_summed_where_zeros_are_taken_out(R, x_parts, dt_parts):
    backend, S, n, D = get_backend("triton"), 2, 6, 40
    width = -(-R // 8) * 8
    wide_x, wide_dt = torch.randn(S, x_parts, width + n, D), torch.randn(S, dt_parts, D, width)
    found = backend.unpad(wide_x, wide_dt, torch.empty(S, R + n, D), torch.empty(S, D, R))
    right = get_backend("torch").unpad(wide_x.sum(1), wide_dt.sum(1), torch.empty(S, R + n, D), torch.empty(S, D, R))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, right))
    found = backend.unpad(wide_x.sum(1), wide_dt, torch.empty(S, width + n, D), torch.empty(S, D, width))
    assert all(torch.allclose(a, b.sum(1), atol=1e-5) for a, b in zip(found, (wide_x, wide_dt)))


def has_projection_kernels(backend, device):
    return backend == "triton" and (device == "cpu" or torch.cuda.get_device_capability()[0] == 9)


def check_x_proj(backend, S, T, D, M, dtype, device, shared=False, turned=None):
    """Against float64, and the same bits again, where the gradient of x is added and where it is written.
    `shared`: the sets have one x, whose gradient is the first dx. `turned`: keys and queries turn in the forward
    pass."""
    torch.manual_seed(0)
    x, dx = (torch.randn(n, T, D, device=device).to(dtype) for n in (1 if shared else S, S))
    dlow = torch.randn(S, T, M, device=device).to(dtype)
    x_proj = (torch.randn(S, M, D, device=device) / D**0.5).to(dtype)
    backend, found = get_backend(backend), []
    for _ in range(2):
        place, written = dx.clone(), torch.full_like(x, float("nan"))
        low = backend.x_proj_forward(x, x_proj, turned)
        grad = backend.x_proj_backward(dlow, x, x_proj, place)
        same = backend.x_proj_backward(dlow, x, x_proj, written, False)
        assert torch.equal(grad, same)
        found.append((low, grad.sum(1) if grad.ndim == 4 else grad, place[: len(x)], written))
    assert all(map(torch.equal, *found))
    # The kernel, where it is for these, leaves its sums in float32 and in parts.
    if has_projection_kernels(backend.name, device) and dtype != torch.float32 and D % 64 == 0 and M <= 64:
        assert grad.dtype == torch.float32 and grad.ndim == 4
    x, dx, dlow, x_proj = (value.double().cpu() for value in (x, dx, dlow, x_proj))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]
    right_low, new = x @ x_proj.mT, dlow @ x_proj
    new, dx = (value.sum(0, keepdim=True) if shared else value for value in (new, dx))
    if turned:
        k, q = turned.first, turned.first + turned.N
        for columns in (slice(k, q), slice(q, q + turned.N)):
            sequences = right_low[..., columns].unflatten(1, (-1, turned.L))
            right_low[..., columns] = plain_turn(sequences, turned.rows).flatten(1, 2)
    for value, right in zip(found[0], (right_low, dlow.mT @ x, dx + new, new)):
        assert value.shape == right.shape
        assert relative_rms(value.cpu(), right) < (tolerance if value.dtype == dtype else 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "S,T,D,M",
    [(2, 200, 128, 48), (1, 9, 256, 23), (2, 5, 384, 64), (1, 9, 128, 72), (1, 33, 100, 44), (2, 0, 128, 8)],
)  # on a CPU the first has two parts of several tiles
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_projection_to_what_the_scan_wants_and_its_gradients(backend, S, T, D, M, dtype):
    check_x_proj(backend, S, T, D, M, dtype, "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "T,D,M", [(200, 128, 48), (200, 192, 48), (9, 256, 23), (9, 128, 72), (33, 100, 44), (0, 128, 8)]
)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_projection_of_an_x_that_both_sets_share_and_its_gradients(backend, T, D, M, dtype):
    check_x_proj(backend, 2, T, D, M, dtype, "cpu", shared=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "S,B,L,D,M,turned",
    [
        (2, 3, 69, 128, 56, Turned(69, 3, 24, 16)),
        (1, 2, 35, 192, 41, Turned(35, 5, 8, 16)),
        (2, 5, 4, 128, 16, Turned(4, 4, 8, 4)),
        (2, 1, 1, 128, 64, Turned(1, 1, 16, 16)),  # as with A behind them
        (2, 2, 6, 128, 32, Turned(6, 2, 8, 12)),  # no power of 2
        (1, 2, 9, 128, 72, Turned(9, 3, 8, 32)),
        (2, 2, 6, 100, 56, Turned(6, 2, 24, 16)),
    ],
)
@pytest.mark.parametrize("dtype,shared", [(torch.bfloat16, True), (torch.float16, False)])
def test_the_projection_to_keys_and_queries_that_turn(backend, S, B, L, D, M, turned, dtype, shared):
    check_x_proj(backend, S, B * L, D, M, dtype, "cpu", shared, turned)


def check_appended_units(backend, S, B, L, D, M, N, dtype, device, rows=0, shared=False):
    """Keys and queries of unit length behind those of the same product alone, beside float64, some of them zero."""
    torch.manual_seed(0)
    backend, turned = get_backend(backend), Turned(L, rows, M - 2 * N, N) if rows else None
    x = torch.randn(1 if shared else S, B * L, D, device=device).to(dtype)
    x[:, ::5] = 0
    x_proj = (torch.randn(S, M, D, device=device) / D**0.5).to(dtype)
    assert backend.appends_units(x, D, M, turned)
    low, plain = backend.x_proj_forward(x, x_proj, turned, N), backend.x_proj_forward(x, x_proj, turned)
    assert torch.equal(low[..., :M], plain) and low.shape[-1] == M + 2 * N
    right = (x.double() @ x_proj.double().mT)[..., M - 2 * N :]
    right = right.unflatten(-1, (2, N)).transpose(-2, -3)  # (.., 2, BL, N)
    if turned:
        right = plain_turn(right.unflatten(-2, (B, L)).cpu(), rows).flatten(-3, -2)
    found = low[..., M:].unflatten(-1, (2, N)).transpose(-2, -3)
    assert relative_rms(found.cpu(), unit(right).cpu()) < {torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]
    assert found[..., ::5, :].eq(0).all()


APPENDED = [
    (2, 3, 69, 128, 40, 16, 3),  # tokens of no whole number of tiles
    (2, 2, 35, 192, 16, 4, 5),
    (1, 2, 35, 64, 24, 8, 0),
    (2, 1, 9, 64, 64, 20, 0),
    (1, 1, 1, 128, 10, 1, 0),
    (2, 2, 6, 64, 31, 3, 0),
]


@needs_triton
@pytest.mark.parametrize("S,B,L,D,M,N,rows", APPENDED)
@pytest.mark.parametrize("dtype,shared", [(torch.bfloat16, True), (torch.float16, False)])
def test_the_projection_to_keys_and_queries_of_unit_length(S, B, L, D, M, N, rows, dtype, shared):
    check_appended_units("triton", S, B, L, D, M, N, dtype, "cpu", rows, shared)


def test_units_are_appended_only_where_a_kernel_makes_the_product():
    half, turned = torch.ones(1, dtype=torch.bfloat16), Turned(6, 2, 8, 12)
    assert not get_backend("torch").appends_units(half, 128, 48, None)
    if kernels.HAS_TRITON:
        appends = get_backend("triton").appends_units
        assert appends(half, 128, 48, None) and appends(half, 128, 40, Turned(6, 2, 8, 16))
        assert not (appends(half.float(), 128, 48, None) or appends(half, 96, 48, None) or appends(half, 128, 65, None))
        assert not appends(half, 128, 32, turned)  # 12 is no power of 2
        none = get_backend("triton").x_proj_forward(half.expand(1, 0, 64), half.expand(2, 40, 64), None, 16)
        assert none.shape == (2, 0, 72)


def check_dt_proj(backend, S, T, D, R, M, dtype, device):
    """Against float64, and the same bits again. The rows of low rank are the first columns of wider ones, of which the
    rest stays."""
    torch.manual_seed(0)
    dstep = torch.randn(S, T, D, device=device).to(dtype)
    low, before = (torch.randn(S, T, M, device=device).to(dtype) for _ in range(2))
    dt_proj = (torch.randn(S, D, R, device=device) / R**0.5).to(dtype)
    found = []
    for _ in range(2):
        dlow = before.clone()
        grad = get_backend(backend).dt_proj_backward(dstep, low, dt_proj, dlow)
        assert torch.equal(dlow[..., R:], before[..., R:])
        found.append((torch.bmm(low[..., :R], dt_proj.mT), grad.sum(1) if grad.ndim == 4 else grad, dlow[..., :R]))
    assert all(map(torch.equal, *found))
    # The kernel, where it is for these, leaves its sums in float32 and in parts.
    if has_projection_kernels(backend, device) and dtype != torch.float32 and D % 64 == 0 and T and R <= 64:
        assert grad.dtype == torch.float32 and grad.ndim == 4
    dstep, low, dt_proj = (value.double() for value in (dstep, low[..., :R], dt_proj))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]
    for value, right in zip(found[0], (low @ dt_proj.mT, dstep.mT @ low, dstep @ dt_proj)):
        assert value.shape == right.shape
        assert relative_rms(value, right) < (tolerance if value.dtype == dtype else 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "S,T,D,R,M",
    [(2, 200, 256, 16, 48), (1, 37, 128, 24, 40), (2, 5, 384, 8, 24), (2, 9, 768, 24, 56), (1, 9, 512, 16, 48),
     (2, 70, 192, 12, 44), (1, 33, 100, 8, 20), (2, 0, 128, 8, 24),
     (2, 9, 1, 8, 24), (1, 9, 128, 7, 20), (1, 9, 128, 64, 96), (1, 9, 128, 66, 96)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_projection_of_the_step_sizes_and_its_gradients(backend, S, T, D, R, M, dtype):
    check_dt_proj(backend, S, T, D, R, M, dtype, "cpu")


@pytest.mark.parametrize("backend", SCANS)
@pytest.mark.parametrize(
    "dim,wiring,options",
    [
        (16, "shared", {}),
        (64, "vim", {}),  # 128 channels inside: a whole block, for the projections' kernels
        (64, "alternate", {}),
        (64, "shared", dict(rule="mamba", A_per_token=True)),
        (64, "vim", dict(conv="grid", rope=True, qk_norm=True)),
        (64, "vim", dict(conv="grid", rope=True, qk_norm=True, rule="exact", gate="none")),
        (64, "vim", dict(conv="grid", rope=True, qk_norm=True, rule="exact", gate="value")),
    ],
    ids=str,
)
def test_mixer_in_bfloat16(backend, wiring, dim, options, monkeypatch):
    """All of it in bfloat16, the parameters too: nothing but the rounding of inputs, results and what lies between,
    which the interpreter cuts off instead."""
    mixer = build(backend, wiring=wiring, dim=dim, **options).to(torch.bfloat16)
    tolerance = 3e-2
    if backend == "triton":
        tolerance = 4e-2
        for part in ("x_proj_forward", "x_proj_backward", "dt_proj_backward") if dim == 64 else ():
            monkeypatch.setattr(torch_projections, part, None)  # what is left to torch
    B = 1 if dim == 64 else 2  # the interpreter takes a second for each wide image
    x = torch.randn(B, 12, dim, dtype=torch.bfloat16, requires_grad=True)
    check(mixer, x, tolerance, 3 * mixer.needs_grid)


UNIT_MIXERS = [
    dict(rule="exact", conv="grid", rope=True, gate="none", d_state=16),
    dict(rule="exact", conv="grid", rope=True, wiring="alternate", d_state=4, dt_rank=8),
    dict(rule="exact", d_state=12, save_states=True),
    dict(rule="diagonal", rope=True, wiring="shared", d_state=16, dt_rank=8, conv="grid"),
    dict(rule="delta", wiring="forward", d_state=6, d_conv=1),  # changes keys itself
    dict(rule="mamba", conv="grid", rope=True, d_state=4, gate="skip"),
]
STORED_APART = [
    dict(rule="exact", conv="grid", rope=True, d_state=12),  # no power of two
    dict(rule="mamba", A_per_token=True, wiring="forward"),
    dict(rule="exact", dt_rank=48, wiring="forward", d_state=12),  # a wide product
]


@needs_triton
@pytest.mark.parametrize("options", UNIT_MIXERS + STORED_APART, ids=str)
def test_a_mixer_stores_unit_keys_with_the_projection_where_it_can(options, monkeypatch):
    apart = options in STORED_APART
    if not apart:
        monkeypatch.setattr(type(get_backend("triton")), "unit_forward", None)
    mixer = build("triton", dim=32, qk_norm=True, **options).to(torch.bfloat16)
    check(mixer, torch.randn(1, 20, 32, dtype=torch.bfloat16, requires_grad=True), 4e-2, 5 * mixer.needs_grid)


@needs_triton
@pytest.mark.parametrize("d_state", (4, 16))
def test_a_mixer_with_a_zero_key_in_bfloat16(d_state):
    mixer = build("triton", dim=32, qk_norm=True, rule="exact", d_conv=1, d_state=d_state).to(torch.bfloat16)
    with torch.no_grad():
        mixer.conv_bias.zero_()
    h = torch.randn(2, 9, 32, dtype=torch.bfloat16)
    h[:, 3] = 0
    check(mixer, h.requires_grad_(), 4e-2)


@needs_triton
@pytest.mark.parametrize("options", UNIT_MIXERS + STORED_APART, ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_compilers_are_told_the_shapes_with_unit_keys(options, dtype):
    for backend in ("triton", "torch"):
        inputs = [*operator_inputs(options, dict(qk_norm=True, dim=32), True, dtype)]
        inputs[12] = backend
        found, told = torch.ops.vision_longhorn.mix(*inputs), mixing._mix_shapes(*inputs)
        assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in told]
        wider = backend == "triton" and dtype == torch.bfloat16 and options not in STORED_APART
        width = -(-inputs[4].shape[2] // 8) * 8 + inputs[3].shape[1] - inputs[4].shape[2]
        assert found[1].shape[-1] == width + 2 * wider * options.get("d_state", 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_projections_in_float16(backend):
    check_x_proj(backend, 2, 200, 128, 48, torch.float16, "cpu")
    check_dt_proj(backend, 1, 37, 128, 24, 40, torch.float16, "cpu")


def operator_inputs(update, layout, save_states, dtype=torch.float32):
    mixer = build(**update, **layout).to(dtype)
    grid = mixer.needs_grid
    xz = torch.randn(2, 6, mixer.in_proj.out_features, dtype=dtype, requires_grad=True)
    return (xz, mixer.conv_weight, mixer.conv_bias, mixer.x_proj, mixer.dt_proj, mixer.dt_bias, mixer.A_log, mixer.D,
            mixer.norm_weight, mixer.rule, mixer.eps, save_states, "auto",
            *([mixer.reversed, mixer.qk_norm, 2, mixer.rope, mixer.gate] if grid else
              [mixer.reversed, True] if mixer.qk_norm else [True] * mixer.reversed))  # fmt: skip


@pytest.mark.parametrize(
    "update,layout,save_states",
    [
        (UPDATES[0], LAYOUTS[0], True),
        (UPDATES[1], LAYOUTS[3], False),
        (UPDATES[2], LAYOUTS[2], False),
        (UPDATES[0], LAYOUTS[6], True),
        (UPDATES[0], dict(conv="grid", rope=True), True),
        (UPDATES[2], dict(conv="grid", rope=True, gate="skip"), False),
        (UPDATES[1], dict(conv="grid", rope=True, gate="none"), True),
        (UPDATES[0], dict(conv="grid", rope=True, gate="value"), True),
        (UPDATES[1], dict(conv="grid", wiring="shared"), False),
    ],
    ids=str,
)
def test_operator_keeps_torchs_rules(update, layout, save_states):
    torch.library.opcheck(torch.ops.vision_longhorn.mix.default, operator_inputs(update, layout, save_states))


@needs_triton
def test_operator_with_unit_keys_keeps_torchs_rules():
    inputs = [*operator_inputs(UNIT_MIXERS[0], dict(qk_norm=True, dim=32), False, torch.bfloat16)]
    inputs[12] = "triton"
    torch.library.opcheck(torch.ops.vision_longhorn.mix.default, inputs)


def test_autocast_does_not_reach_inside():
    """Outside, xz was made in bfloat16 or was not; inside, its dtype is what counts."""
    inputs = operator_inputs(UPDATES[0], LAYOUTS[0], False)
    plain = torch.ops.vision_longhorn.mix(*inputs)
    grads = torch.autograd.grad(plain[0].sum(), inputs[:6], retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        again = torch.ops.vision_longhorn.mix(*inputs)
        grads_again = torch.autograd.grad(again[0].sum(), inputs[:6])
    assert all(torch.equal(a, b) for a, b in zip((*plain, *grads), (*again, *grads_again)))


@pytest.mark.parametrize(
    "wiring,conv,gate",
    [
        ("vim", "causal", "output"),
        ("shared", "causal", "output"),
        *(("vim", "grid", gate) for gate in ("output", "none", "value")),
    ],
)
def test_only_inputs_and_low_rank_steps_are_kept_for_the_backward_pass(wiring, conv, gate):
    kept, sets = {}, {"vim": 2, "shared": 1}[wiring]
    for save_states in (False, True):
        mixer = build(dim=64, save_states=save_states, wiring=wiring, conv=conv, gate=gate)
        h = torch.randn(2, 40, 64, requires_grad=True)
        parameters = {value.data_ptr() for value in mixer.parameters()}
        sizes = []

        def pack(value):
            if value.data_ptr() not in parameters and value.untyped_storage().data_ptr() not in parameters:
                sizes.append(value.numel())
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            mixer(h, 5)
        kept[save_states] = sum(sizes)
    tokens, d_inner, width, N = 2 * 40, 128, 8, 4
    # h for in_proj, xz (without a gate x) and the low-rank values for the mixing, y for out_proj; what the norms are
    # given.
    outputs = 2 * d_inner if wiring == "shared" else 0
    given = d_inner if gate == "none" else 2 * d_inner
    assert kept[False] == tokens * (64 + given + sets * (width + 2 * N) + outputs + d_inner)
    convs = 1 if conv == "grid" else sets
    convolved = 0 if wiring == "shared" else (convs + sets) * d_inner  # and the step sizes
    assert kept[True] == kept[False] + 2 * (tokens // 8) * N * d_inner + tokens * convolved


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index,name", list(enumerate(mixing.TENSORS)))
def test_wrong_shapes_are_named(backend, index, name):
    layout = LAYOUTS[2] if name == "norm_weight" else LAYOUTS[0]
    inputs = [*operator_inputs(UPDATES[2], layout, False)[:-1], backend]
    inputs[index] = torch.ones(*inputs[index].shape[:-1], inputs[index].shape[-1] + 1)
    named = {"A_log": "A", "dt_proj": "C", "D": "conv_weight"}.get(name, name)  # what no longer agrees
    if name == "conv_weight":
        inputs[index] = torch.ones(2, 3, 4)  # its last axis may be of any length
    with pytest.raises(ValueError, match=rf"({named}) has "):
        torch.ops.vision_longhorn.mix(*inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_of_any_strides(backend):
    """What lies otherwise in memory is taken as what it is, and gradients come back contiguous."""
    inputs = [*operator_inputs(UPDATES[0], LAYOUTS[0], False)[:-1], backend]
    expected = torch.ops.vision_longhorn.mix(*inputs)[0]
    grads = torch.autograd.grad(expected.sum(), inputs[:2])
    for axes in ((0, 1), (1, 2)):
        others = [
            value.detach().transpose(*axes).contiguous().transpose(*axes).requires_grad_() for value in inputs[:2]
        ]
        y = torch.ops.vision_longhorn.mix(*others, *inputs[2:])[0]
        torch.testing.assert_close(y, expected)
        for grad, right in zip(torch.autograd.grad(y.sum(), others), grads):
            torch.testing.assert_close(grad, right)
            assert grad.is_contiguous()


def test_a_gate_that_is_not_possible_is_named():
    def mix(layout, gate, columns):
        inputs = operator_inputs(UPDATES[0], layout, False)
        return torch.ops.vision_longhorn.mix(inputs[0][..., :columns], *inputs[1:13], gate=gate)

    mix(dict(), "none", 12)
    with pytest.raises(ValueError, match=r"xz has shape \(2, 6, 24\); .* it must be \(2, 6, 12\)"):
        mix(dict(), "none", 24)
    with pytest.raises(ValueError, match=r"xz has shape \(2, 6, 12\); .* it must be \(2, 6, 24\)"):
        mix(dict(), "skip", 12)
    with pytest.raises(ValueError, match="gate='no' is not known; choose one of 'output', 'skip', 'none', 'value'"):
        mix(dict(), "no", 24)
    for gate, columns in (("skip", 24), ("none", 12), ("value", 24)):
        with pytest.raises(ValueError, match=f"gate='{gate}' with norms of the scans' outputs"):
            mix(dict(wiring="shared"), gate, columns)


def test_a_grid_that_does_not_fit_is_named():
    inputs = operator_inputs(UPDATES[0], dict(conv="grid", rope=True), False)
    for rows in (4, 0, -2):
        with pytest.raises(ValueError, match=rf"rows={rows} with 6 tokens, .* the grid's rows, which divides"):
            torch.ops.vision_longhorn.mix(*inputs[:-3], rows, True)
    even = (inputs[0], torch.ones(1, 12, 2, 2), *inputs[2:])
    with pytest.raises(ValueError, match=r"conv_weight has shape \(1, 12, 2, 2\); .* must be \(1, 12, 3, 3\)"):
        torch.ops.vision_longhorn.mix(*even)
    causal = operator_inputs(UPDATES[0], LAYOUTS[0], False)
    with pytest.raises(ValueError, match=r"rows=2 with 6 tokens, conv_weight \(2, 12, 4\) and rope=False"):
        torch.ops.vision_longhorn.mix(*causal, False, False, 2)


def check_skip(backend, n, B, L, D, dtype, device):
    """Against float64, and the same bits again; z and its gradient are columns of a wider tensor."""
    torch.manual_seed(0)
    y, dy, xz = (torch.randn(B, L, width, device=device).to(dtype) for width in (D, D, 2 * D))
    x, dx = (torch.randn(n, B, L, D, device=device).to(dtype) for _ in range(2))
    weight, z = torch.randn(n, D, device=device), xz[..., D:]
    wide = [v.double().requires_grad_() for v in (x, z, weight)]
    right = y.double() + (wide[2][:, None, None] * wide[0]).sum(0) * wide[1] * wide[1].sigmoid()
    expected = [right, *torch.autograd.grad(right, wide, dy.double())]
    expected[1] = expected[1] + dx.double()
    found = []
    for _ in range(2):
        total, dx_total, dxz = y.clone(), dx.clone(), torch.empty_like(xz)
        get_backend(backend).skip_forward(total, x, z, weight)
        dweight = get_backend(backend).skip_backward(dy, x, z, weight, dx_total, dxz[..., D:])
        found.append([total, dx_total, dxz[..., D:], dweight])
    assert all(map(torch.equal, *found)) and dweight.dtype == torch.float32
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}
    for value, right in zip(found[0], expected):
        assert value.shape == right.shape
        assert relative_rms(value, right) < tolerance[value.dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n,B,L,D", [(1, 2, 7, 40), (2, 3, 5, 33), (1, 1, 1, 1), (2, 1, 17, 192)])
def test_gated_skip(backend, n, B, L, D):
    check_skip(backend, n, B, L, D, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("n,B,L,D", [(1, 256, 256, 192), (2, 3, 5, 33), (1, 2, 197, 768), (2, 7, 64, 384)])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_gpu_gated_skip(n, B, L, D, dtype):
    check_skip("triton", n, B, L, D, dtype, "cuda")


def check_values(backend, n, B, L, D, dtype, device):
    """Against float64, and the same bits again; z and its gradient are columns of a wider tensor."""
    torch.manual_seed(0)
    xz, dv = torch.randn(B, L, 2 * D, device=device).to(dtype), torch.randn(n, B, L, D, device=device).to(dtype)
    z = xz[..., D:]
    wide = z.double().requires_grad_()
    right = wide * wide.sigmoid()
    expected = [right, *torch.autograd.grad(right, wide, dv.double().sum(0))]
    found = []
    for _ in range(2):
        dxz = torch.empty_like(xz)
        v = get_backend(backend).values_forward(z)
        get_backend(backend).values_backward(dv, z, dxz[..., D:])
        assert v.is_contiguous()
        found.append([v, dxz[..., D:]])
    assert all(map(torch.equal, *found))
    for value, right in zip(found[0], expected):
        assert value.dtype == dtype and value.shape == right.shape
        assert relative_rms(value, right) < {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n,B,L,D", [(1, 2, 7, 40), (2, 3, 5, 33), (1, 1, 1, 1), (2, 1, 17, 192)])
def test_values(backend, n, B, L, D):
    check_values(backend, n, B, L, D, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("n,B,L,D", [(1, 256, 256, 192), (2, 3, 5, 33), (1, 2, 197, 768), (2, 7, 64, 384)])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_gpu_values(n, B, L, D, dtype):
    check_values("triton", n, B, L, D, dtype, "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gate", ("skip", "value"))
def test_a_mixer_over_the_grid_gives_the_same_bits_again(backend, gate):
    mixer, h = build(backend, conv="grid", rope=True, gate=gate), torch.randn(2, 12, 6, requires_grad=True)
    weight = torch.randn_like(h)
    first = output_and_gradients(mixer, h, weight, 3)
    for _ in range(20 if backend == "torch" else 2):
        assert all(torch.equal(a, b) for a, b in zip(first, output_and_gradients(mixer, h, weight, 3)))


@pytest.mark.parametrize("layout", LAYOUTS[:3:2], ids=str)
def test_two_directions_cannot_be_reversed(layout):
    with pytest.raises(ValueError, match="reversed=True is for one direction alone"):
        torch.ops.vision_longhorn.mix(*operator_inputs(UPDATES[0], layout, False), True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "T,D,M",
    [
        (50432, 768, 56),
        (48680, 384, 48),
        (25088, 192, 48),
        (197, 1536, 64),
        (1, 128, 20),
        (1001, 100, 44),
        (300, 128, 23),
    ],
)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_gpu_projection_to_what_the_scan_wants(T, D, M, dtype):
    check_x_proj("triton", 2, T, D, M, dtype, "cuda")
    check_x_proj("triton", 2, T, D, M, dtype, "cuda", shared=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,shared", [(torch.bfloat16, True), (torch.float16, False)])
@pytest.mark.parametrize(
    "B,D,M,turned",
    [
        (64, 768, 56, Turned(196, 14, 24, 16)),
        (8, 384, 48, Turned(780, 78, 16, 16)),
        (5, 1536, 64, Turned(35, 7, 48, 8)),
        (40, 192, 48, Turned(196, 14, 16, 16)),
        (3, 128, 41, Turned(10, 2, 8, 4)),
        (3, 128, 32, Turned(12, 4, 8, 12)),
    ],
)
def test_gpu_projection_to_keys_and_queries_that_turn(B, D, M, turned, dtype, shared):
    check_x_proj("triton", 2, B * turned.L, D, M, dtype, "cuda", shared, turned)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,shared", [(torch.bfloat16, True), (torch.float16, False)])
@pytest.mark.parametrize("S,B,L,D,M,N,rows", [*APPENDED, (2, 256, 256, 192, 48, 16, 16), (2, 64, 196, 384, 56, 16, 14)])
def test_gpu_projection_to_keys_and_queries_of_unit_length(S, B, L, D, M, N, rows, dtype, shared):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a Hopper GPU is needed")
    check_appended_units("triton", S, B, L, D, M, N, dtype, "cuda", rows, shared)


@pytest.mark.gpu
@pytest.mark.parametrize("options", UNIT_MIXERS + STORED_APART, ids=str)
def test_gpu_mixer_with_unit_keys_is_its_plain_description(options):
    for dim, shape in ((32, (2, 35, 32)), (96, (3, 70, 96))):
        check_on_gpu(build(dim=dim, qk_norm=True, **options), shape, torch.bfloat16, 3e-2, rows=5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "T,D,R,M",
    [
        (50432, 768, 24, 56),
        (48680, 384, 16, 48),
        (25088, 192, 16, 48),
        (197, 1536, 48, 80),
        (1, 128, 8, 20),
        (1001, 100, 24, 44),
        (300, 256, 8, 41),
        (300, 384, 64, 96),
    ],
)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_gpu_projection_of_the_step_sizes(T, D, R, M, dtype):
    check_dt_proj("triton", 2, T, D, R, M, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS[::2], ids=str)
@pytest.mark.parametrize("update", UPDATES, ids=str)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_gpu_mixer_is_its_plain_description(layout, update, dtype, tolerance):
    for dim, shape in ((96, (3, 65, 96)), (33, (2, 50, 33)), (64, (2, 150, 64))):
        check_on_gpu(build(dim=dim, **layout, **update), shape, dtype, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "layout",
    (
        dict(),
        dict(gate="skip"),
        dict(gate="none"),
        dict(gate="value"),
        dict(wiring="shared"),
        dict(wiring="alternate"),
        dict(wiring="alternate", gate="none"),
        dict(wiring="alternate", gate="value"),
    ),
    ids=str,
)
@pytest.mark.parametrize("update", UPDATES, ids=str)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_gpu_mixer_over_the_grid_is_its_plain_description(layout, update, dtype, tolerance):
    for dim, shape in ((96, (3, 70, 96)), (33, (2, 50, 33)), (64, (2, 150, 64))):
        mixer = build(dim=dim, conv="grid", rope=True, **layout, **update)
        check_on_gpu(mixer, shape, dtype, tolerance, rows=10)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(
    "layout", [*LAYOUTS[::2], *(dict(conv="grid", rope=True, gate=gate) for gate in ("skip", "none", "value"))], ids=str
)
def test_gpu_mixing_gives_the_same_bits_again(layout, dtype):
    mixer = build(dim=192, **layout).cuda().to(dtype)
    h = torch.randn(16, 196, 192, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn_like(h)
    first = output_and_gradients(mixer, h, weight, 14)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, output_and_gradients(mixer, h, weight, 14)))
