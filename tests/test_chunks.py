"""The exact rule in chunks on tensor cores against the float64 reference: on a CPU, where the interpreter's PTX is
emulated, and, marked `gpu`, on a GPU."""

import os

import pytest
import torch
from plain_model import plain_mixer
from scan_cases import call, make_inputs, relative_rms
from vision_longhorn.kernels import mixing, ops
from vision_longhorn.kernels.dispatch import get_backend

from vision_longhorn import kernels
from vision_longhorn.models.mixers import BidirectionalMixer

pytestmark = pytest.mark.skipif(not kernels.HAS_TRITON, reason="triton is not installed on this platform")
if kernels.HAS_TRITON:
    import ptx_emulator
    import triton
    import triton.language as tl
    from vision_longhorn.kernels.backends.triton import chunks, finish, fragments

    TRITON = get_backend("triton")

    @triton.jit
    def probe_kernel(out_ptr, index_ptr):
        r = tl.arange(0, 64)
        tl.store(out_ptr + r, fragments.probe(tl.load(index_ptr + r)))


needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is needed"
)


@pytest.fixture
def emulated(monkeypatch):
    ptx_emulator.install()
    monkeypatch.setattr(chunks, "takes_ptx", lambda *_: True)


@pytest.fixture(
    params=[pytest.param("cpu", marks=needs_interpreter), pytest.param("cuda", marks=pytest.mark.gpu)], ids=str
)
def device(request):
    if request.param == "cpu":
        request.getfixturevalue("emulated")
    elif torch.version.hip is not None or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("an NVIDIA GPU of compute capability 8.0 is needed")
    return request.param


def inputs_of(*sizes, absent="", **options):
    inputs = make_inputs("exact", *sizes, dtype=torch.bfloat16, **options)
    return {name: value for name, value in inputs.items() if name not in absent.split()}


def outputs_and_gradients(leaves, view=dict, final_only=False, dy_offset=0, **options):
    """y, the final state and a gradient for each leaf; `view` turns leaves into the inputs of the scan. The gradient of
    y is a view from `dy_offset` on."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in leaves.items()}
    outs = call("exact", view(leaves), return_final_state=True, **options)
    generator = torch.Generator().manual_seed(1)
    weights = []
    for out, offset in zip(outs, (dy_offset, 0)):
        weight = torch.randn(*out.shape[:-1], out.shape[-1] + offset, generator=generator).bfloat16()
        weights.append(weight.to(out.device, out.dtype)[..., offset:])
    first = 1 if final_only else 0
    grads = torch.autograd.grad(outs[first:], list(leaves.values()), weights[first:], materialize_grads=True)
    return {"y": outs[0].detach(), "state": outs[1].detach(), **{f"d{n}": grad for n, grad in zip(leaves, grads)}}


def check(leaves, device, tolerance=5e-3, save_states=None, **options):
    """Each output and gradient by its relative RMS error. Of few numbers that scatters; what is smaller than 1e-30 may
    be zero."""
    expected = outputs_and_gradients({n: v.double() for n, v in leaves.items()}, backend="reference", **options)
    leaves = {name: value.to(device) for name, value in leaves.items()}
    found = outputs_and_gradients(leaves, backend="triton", regime="chunked", save_states=save_states, **options)
    wrong = {}
    for name, right in expected.items():
        value = found[name].to(right)
        assert value.shape == right.shape, (name, value.shape, right.shape)
        # The few sums over all tokens may cancel; they are as exact as what is summed.
        size = max(right.norm(), expected["dstep"].norm()) if name == "dbias" and "dstep" in expected else right.norm()
        error = (value - right).norm()
        if not error <= tolerance * (1 + 2 / right.numel() ** 0.5) * size + 1e-30:  # NaN is wrong too
            wrong[name] = f"{error:.1e} of {size:.1e}"
    assert not wrong, wrong
    return found


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "B,L,D,N,direction,combine,stacked,absent",
    [
        (2, 1, 34, 8, "both", "none", True, ""),
        (1, 7, 64, 16, "backward", "none", True, "z"),
        (1, 8, 16, 32, "both", "sum", False, "z initial_state"),
        (3, 9, 2, 16, "both", "mean", True, "D"),
        (1, 17, 34, 32, "forward", "none", True, "bias"),
        (1, 33, 64, 16, "both", "mean", False, "D bias initial_state"),
    ],
)
def test_sizes_directions_and_absent_inputs(device, B, L, D, N, direction, combine, stacked, absent):
    inputs = inputs_of(B, L, D, N, absent=absent, direction=direction, stacked=stacked)
    check(inputs, device, direction=direction, combine=combine)


def gpu_is_full(monkeypatch, full):
    """Whether the kernels are launched as where there is enough to do, or too little; None: as in between, where two
    directions have 32 channels."""
    monkeypatch.setattr(chunks, "multiprocessors", lambda *_: {True: 0, False: 10**6, None: 1}[full])


@pytest.mark.parametrize("L,full", [(1, True), (7, False), (8, True), (9, False), (16, True), (23, False), (33, True)])
def test_wherever_two_directions_meet(device, L, full, monkeypatch):
    gpu_is_full(monkeypatch, full)
    check(inputs_of(1, L, 32, 8, direction="both"), device, direction="both", combine="sum")


@pytest.mark.parametrize(
    "pairs,warps,D,N,scalar,both",
    [
        (1, 1, 38, 16, False, True),
        (1, 2, 34, 32, True, False),
        (1, 4, 64, 8, True, True),
        (2, 1, 64, 16, True, False),
        (2, 2, 64, 32, False, False),
        (2, 4, 128, 8, False, True),
        (4, 1, 64, 16, False, False),
    ],
)
def test_channels_dealt_out_in_any_way(device, pairs, warps, D, N, scalar, both, monkeypatch):
    """Programs of one warp and several, of as many channels as there are and of more; one logit for all channels."""
    monkeypatch.setattr(chunks, "choose", lambda *_: chunks.Shape(pairs, warps))
    options = dict(direction="both", combine="mean") if both else {}
    check(inputs_of(1, 11, D, N, scalar_step=scalar, direction=options.get("direction", "forward")), device, **options)


@pytest.mark.parametrize("offset", (0, 1, 2))
def test_views_of_projections(device, offset):
    """x, z, k and q as slices of two projections, the gradient of y as one of its own: rows that begin at a multiple of
    8 bytes, at odd numbers (which are copied), and at words of two."""
    B, L, D, N = 2, 9, 64 if offset == 0 else 34, 16
    sizes = dict(xz=2 * D + offset, rank=2 * N + offset)
    inputs = inputs_of(B, L, D, N, direction="both", stacked=False)
    leaves = {name: value for name, value in inputs.items() if name not in "xzkq"}
    leaves |= {name: inputs_of(B, L, size, 1)["x"] for name, size in sizes.items()}
    leaves["rank"] = leaves["rank"] * 0.25

    def view(leaves):
        inputs = {name: value for name, value in leaves.items() if name not in sizes}
        for left, right, whole, size in (("x", "z", "xz", D), ("k", "q", "rank", N)):
            inputs[left], inputs[right] = leaves[whole][..., offset:].split(size, -1)
        if offset == 1:
            inputs["step"] = inputs["step"].transpose(1, 2).contiguous().transpose(1, 2)  # its channels lie apart
        return inputs

    assert not any(view(leaves)[name].is_contiguous() for name in "xzkq")
    check(leaves, device, view=view, dy_offset=offset, direction="both", combine="mean")


@pytest.mark.parametrize("offset,full", [(0, True), (0, False), (1, True)])
def test_the_gradient_of_z_in_a_place_that_is_given(device, offset, full, monkeypatch):
    """As the fused mixer has it: the half of the gradient of a projection, whose other half stays as it is."""
    gpu_is_full(monkeypatch, full)
    inputs = {name: value.to(device) for name, value in inputs_of(2, 9, 32, 8, direction="both").items()}
    scan = scan_of(inputs, direction="both", combine="mean", regime="chunked")
    y, _, saved = ops.forward(scan, True, TRITON)
    dy = inputs_of(*y.shape, 8, seed=1)["x"].to(device)
    expected = ops.backward(scan, dy, None, saved, TRITON)["z"]
    place = torch.full((*y.shape[:2], 2 * 32 + offset), 7.0, dtype=torch.bfloat16, device=device)
    dz = place[..., offset : offset + 32]
    assert "z" not in ops.backward(scan, dy, None, saved, TRITON, dz)
    assert relative_rms(dz, expected) <= 5e-3
    assert place[..., :offset].eq(7).all() and place[..., offset + 32 :].eq(7).all()


@pytest.mark.parametrize(
    "B,L,D,N,R,direction,combine,stacked,full",
    [
        (1, 9, 64, 16, 16, "both", "mean", True, True),
        (2, 11, 32, 8, 24, "both", "mean", True, None),
        (1, 18, 34, 8, 8, "both", "none", False, False),
        (1, 9, 32, 16, 16, "both", "mean", True, False),
        (1, 17, 48, 16, 24, "backward", "none", False, True),
        (1, 7, 64, 16, 24, "forward", "none", False, True),
    ],
)
def test_logits_made_from_their_low_rank(device, B, L, D, N, R, direction, combine, stacked, full, monkeypatch):
    """As the fused mixer has them: rows of low rank, keys and queries are slices of one tensor. Beside float64, and
    with the bits of states that are found again."""
    gpu_is_full(monkeypatch, full)
    inputs = inputs_of(B, L, D, N, direction=direction, stacked=stacked, absent="initial_state")
    sets = (2,) if stacked and direction == "both" else ()
    generator = torch.Generator().manual_seed(2)
    low = torch.randn(*sets, B, L, R + 2 * N, generator=generator)
    low[..., R : R + N] *= N**-0.5
    low, proj = low.bfloat16(), (torch.randn(*sets, D, R, generator=generator) * (2 / R**0.5)).bfloat16()
    exact = {name: value.double() for name, value in inputs.items()}
    step, exact["k"], exact["q"] = low.double().split([R, N, N], -1)
    exact["step"] = step @ proj.double().mT.unsqueeze(-3)
    leaves = {name: value.clone().requires_grad_() for name, value in exact.items()}
    y = call("exact", leaves, backend="reference", direction=direction, combine=combine)
    dy = torch.randn(y.shape, generator=generator).bfloat16()
    expected = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy.double())), y=y.detach())

    low, dy = low.to(device), dy.to(device)
    step, k, q = low.split([R, N, N], -1)
    inputs = {name: value.to(device) for name, value in inputs.items()} | dict(step=step, k=k, q=q)
    scan = scan_of(inputs, direction=direction, combine=combine, step_proj=proj.to(device))
    kernels.check(scan)
    assert TRITON.takes_projection(scan) and not get_backend("torch").takes_projection(scan)
    found = []
    for save_states in (True, False):
        y, _, saved = ops.forward(scan, save_states, TRITON)
        found.append(ops.backward(scan, dy, None, saved, TRITON) | {"y": y})
    assert equal(*found)
    for name, right in expected.items():
        value = found[0][name].cpu()
        assert value.shape == right.shape, name
        size = expected["step"].norm() if name == "bias" else right.norm()
        assert (value - right).norm() <= 5e-3 * (1 + 2 / right.numel() ** 0.5) * size, name


@pytest.mark.parametrize(
    "layout",
    [dict(), dict(gate="none"), dict(wiring="shared"), dict(wiring="alternate"), dict(wiring="alternate", gate="none")],
    ids=str,
)
@pytest.mark.parametrize("dt_rank,stored", [(5, False), (30, True)])
def test_a_mixer_stores_no_logits_where_the_kernels_can_make_them(device, layout, dt_rank, stored, monkeypatch):
    found = []
    make = mixing.Mix.scan

    def scan(self, x, step, low, step_proj=None):
        if step_proj is None:
            found.append(step)
        return make(self, x, step, low, step_proj)

    monkeypatch.setattr(mixing.Mix, "scan", scan)
    torch.manual_seed(0)
    mixer = BidirectionalMixer(16, d_state=8, rule="exact", dt_rank=dt_rank, index=1, **layout).to(device).bfloat16()
    mixer.scan_backend = "triton"
    h = torch.randn(2, 11, 16).bfloat16()
    weight = torch.randn(h.shape)
    plain = {name: value.detach().cpu().double().requires_grad_() for name, value in mixer.named_parameters()}
    exact = h.double().requires_grad_()
    expected = plain_mixer(plain, exact, mixer)
    expected = [expected, *torch.autograd.grad((expected * weight).sum(), [exact, *plain.values()])]
    h = h.to(device).requires_grad_()
    y = mixer(h)
    grads = torch.autograd.grad((y.float() * weight.to(device)).sum(), [h, *mixer.parameters()])
    assert bool(found) == stored
    for name, value, right in zip(["y", "h", *plain], [y, *grads], expected):
        assert relative_rms(value.cpu(), right) < 3e-2, name
    # Of no image there is no gradient.
    grads = torch.autograd.grad(mixer(h[:0]).sum(), list(mixer.parameters()))
    assert all(value.eq(0).all() for value in grads)


@pytest.mark.parametrize(
    "options,sums",
    [
        (dict(conv="grid", rope=True, gate="none", d_state=16), 0),
        (dict(d_state=8, save_states=True), 0),
        (dict(wiring="alternate", conv="grid", rope=True, d_state=32, dt_rank=8), None),  # too wide for its kernel
        (dict(wiring="shared", d_state=16), 1),  # the directions share keys, whose gradients are summed
    ],
    ids=str,
)
def test_a_mixer_with_keys_of_unit_length(device, options, sums, monkeypatch):
    """Its keys get unit length with the projection, and the parts of their gradients are summed where these go back
    through that: neither has a launch of its own."""
    found, sum_rows = [], finish.sum_rows
    monkeypatch.setattr(finish, "sum_rows", lambda *given: found.append(given) or sum_rows(*given))
    hopper = device == "cpu" or torch.cuda.get_device_capability()[0] == 9
    if sums is not None and hopper:
        monkeypatch.setattr(type(TRITON), "unit_forward", None)
    torch.manual_seed(0)
    mixer = BidirectionalMixer(32, rule="exact", index=1, qk_norm=True, **options).to(device).bfloat16()
    mixer.scan_backend = "triton"
    rows, h = 3 * mixer.needs_grid, torch.randn(2, 12, 32).bfloat16()
    weight = torch.randn(h.shape)
    plain = {name: value.detach().cpu().double().requires_grad_() for name, value in mixer.named_parameters()}
    exact = h.double().requires_grad_()
    expected = plain_mixer(plain, exact, mixer, rows)
    expected = [expected, *torch.autograd.grad((expected * weight).sum(), [exact, *plain.values()])]
    h = h.to(device).requires_grad_()
    y = mixer(h, rows)
    grads = torch.autograd.grad((y.float() * weight.to(device)).sum(), [h, *mixer.parameters()])
    assert len(found) == (sums or 0)
    for name, value, right in zip(["y", "h", *plain], [y, *grads], expected):
        assert relative_rms(value.cpu(), right) < 3e-2, name


def test_logits_at_low_rank_are_refused_where_nothing_takes_them(device):
    inputs = inputs_of(1, 9, 32, 8, absent="initial_state")
    inputs = {name: value.to(device) for name, value in inputs.items()}
    inputs["step"], proj = inputs["step"][..., :8].contiguous(), inputs["step"].new_zeros(32, 8)
    for backend, options in (("torch", {}), ("triton", dict(rule="diagonal"))):
        scan = scan_of(inputs, step_proj=proj)._replace(**options)
        with pytest.raises(ValueError, match="give them whole"):
            ops.forward(scan, False, get_backend(backend))


def test_a_loss_of_the_final_state_alone(device):
    check(inputs_of(1, 11, 32, 8, direction="both"), device, final_only=True, direction="both")


def keys_of_any_size(inputs):
    inputs["k"] *= (
        10 ** torch.linspace(-3, 3, 24)[torch.randperm(24, generator=torch.Generator().manual_seed(0))][:, None]
    )
    inputs["k"][:, ::5] = 0


def all_at_once(inputs):
    inputs["step"][:, 0:6] = 100.0
    inputs["step"][:, 6:12] = -100.0
    inputs["x"][:, 12:18] = 0.0
    inputs["k"][:, 12:15] = 0.0
    inputs["z"][:, 18:20] = 100.0
    inputs["z"][:, 20:22] = -100.0
    inputs["k"][:, 3:9] *= 1e3


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda inputs: inputs["k"].zero_(), id="zero-keys"),
        pytest.param(lambda inputs: inputs["k"].mul_(1e-3), id="small-keys"),
        pytest.param(lambda inputs: inputs["k"].mul_(1e3), id="large-keys"),
        pytest.param(lambda inputs: inputs["step"].fill_(100.0), id="logits-100"),
        pytest.param(lambda inputs: inputs["step"].fill_(-100.0), id="logits-minus-100"),
        keys_of_any_size,
        all_at_once,
    ],
)
def test_extremes(device, change):
    inputs = inputs_of(1, 24, 64, 16)
    change(inputs)
    check(inputs, device, tolerance=1e-2)


def test_beyond_a_kept_state_and_the_same_bits_if_found_again(device):
    """More chunks than lie between two states that are kept, so that the backward pass takes up one in the middle."""
    tokens = chunks.CHUNK * chunks.ANCHOR + 14
    inputs = inputs_of(1, tokens, 16, 8)
    kept = check(inputs, device, save_states=True, direction="backward")
    inputs = {name: value.to(device) for name, value in inputs.items()}
    options = dict(direction="backward", backend="triton", regime="chunked")
    assert equal(kept, outputs_and_gradients(inputs, save_states=False, **options))


@pytest.mark.parametrize("full", (True, False, None))
def test_the_same_bits_again_and_without_what_is_kept(device, full, monkeypatch):
    gpu_is_full(monkeypatch, full)
    inputs = {n: v.to(device) for n, v in inputs_of(1, 9, 32, 16, direction="both").items()}
    options = dict(direction="both", combine="mean", backend="triton", regime="chunked")
    first = outputs_and_gradients(inputs, save_states=True, **options)
    for save_states in (True, False):
        assert equal(first, outputs_and_gradients(inputs, save_states=save_states, **options)), save_states


def scan_of(inputs, rule="exact", **options):
    return kernels.Scan(*(inputs.get(name) for name in kernels.Scan._fields[:9]), rule, **options)


def regimes(scan):
    return {plan.regime for plan in kernels.scan_plan(scan, backend="triton").values()}


def test_auto_takes_chunks_where_it_can_and_says_so(device):
    inputs = {n: v.to(device) for n, v in inputs_of(1, 9, 34, 8).items()}
    assert regimes(scan_of(inputs)) == regimes(scan_of(inputs, regime="chunked")) == {"chunked"}
    assert regimes(scan_of(inputs, regime="sequential")) == {"sequential"}
    found = {
        regime: outputs_and_gradients(inputs, backend="triton", regime=regime)
        for regime in ("auto", "chunked", "sequential")
    }
    assert equal(found["auto"], found["chunked"]) and not equal(found["auto"], found["sequential"])


@pytest.mark.parametrize(
    "D,N,dtypes,says",
    [
        (6, 4, {}, "d_state is 4"),
        (5, 8, {}, "x has 5 channels"),
        (6, 8, dict(x=torch.float32), "x is torch.float32"),
        (6, 8, dict(step=torch.float16), "beta is torch.float16"),
        (6, 8, dict(q=torch.float32), "q is torch.float32"),
        (6, 8, dict(z=torch.float32), "z is torch.float32"),
    ],
)
def test_what_has_no_chunks_walks_and_is_named_if_forced(device, D, N, dtypes, says):
    inputs = {name: value.to(device, dtypes.get(name)) for name, value in inputs_of(1, 9, D, N).items()}
    with pytest.raises(ValueError, match=f"regime='chunked': {says}"):
        call("exact", inputs, backend="triton", regime="chunked")
    assert regimes(scan_of(inputs)) == {"sequential"}
    walked, auto = (call("exact", inputs, backend="triton", regime=regime) for regime in ("sequential", "auto"))
    assert torch.equal(walked, auto)


@pytest.mark.parametrize(
    "rule,backend,says",
    [
        ("diagonal", "triton", "rule='diagonal'"),
        ("exact", "torch", "torch path"),
        pytest.param("exact", "triton", "cpu is no NVIDIA GPU", marks=needs_interpreter),
    ],
)
def test_where_there_are_no_chunks_forcing_them_is_an_error(rule, backend, says):
    with pytest.raises(ValueError, match=f"regime='chunked'.*{says}"):
        call(rule, inputs_of(1, 9, 6, 8), backend=backend, regime="chunked")


def test_offsets_beyond_32_bits_are_not_taken_in_chunks(emulated):
    inputs = {name: value.to("meta") for name, value in inputs_of(1, 9, 16, 8).items()}
    assert chunks.obstacle(scan_of(inputs)) is None
    sequence = [torch.empty(1, 2**27, size, dtype=torch.bfloat16, device="meta") for size in (16, 16, 8, 8)]
    assert "2**31" in chunks.obstacle(scan_of(dict(zip(("x", "step", "k", "q"), sequence))))
    far = torch.empty_strided((1, 9, 16), (0, 2**28, 1), dtype=torch.bfloat16, device="meta")
    assert chunks._placed(far, 4).is_contiguous() and chunks._placed(inputs["x"], 4) is inputs["x"]


@needs_interpreter
def test_a_probe_is_not_a_number_in_each_lane_that_is_another(emulated):
    index, out = torch.arange(64), torch.ones(64)
    probe_kernel[(1,)](out, index.int())
    assert (out == 0).all()
    index[[0, 1, 40]] = index[[1, 0, 41]]
    probe_kernel[(1,)](out, index.int())
    assert out.isnan().nonzero().flatten().tolist() == [0, 1, 40] and out.nansum() == 0


@needs_interpreter
@pytest.mark.parametrize("two_a_lane", (True, False), ids=("two-a-lane", "reversed"))
def test_another_layout_gives_no_number(emulated, monkeypatch, two_a_lane):
    """If Triton gave element r to another lane than r % 32, no output or gradient may look like a right one."""
    real = ptx_emulator.special

    def lanes(name, size):
        if name != "%laneid":
            return real(name, size)
        return (
            torch.arange(size)
            .div(2 if two_a_lane else 1)
            .mul(1 if two_a_lane else -1)
            .remainder(32)
            .numpy()
            .astype("uint32")
        )

    monkeypatch.setattr(ptx_emulator, "special", lanes)
    found = outputs_and_gradients(inputs_of(1, 9, 32, 8), backend="triton", regime="chunked")
    assert [name for name, value in found.items() if not value.isnan().all()] == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    "B,L,D,N,options",
    [
        (8, 197, 768, 16, {}),
        (8, 197, 384, 16, {}),
        (2, 1000, 100, 16, {}),
        (1, 6085, 64, 16, {}),
        (3, 65, 770, 32, {}),
        (8, 197, 384, 8, dict(scalar_step=True)),
    ],
)
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_gpu_sizes_of_models(device, B, L, D, N, options):
    inputs = inputs_of(B, L, D, N, direction="both", device=device, **options)
    check(inputs, device, direction="both", combine="mean")


@pytest.mark.gpu
@pytest.mark.parametrize("B,L,D", [(8, 197, 768), (2, 1000, 100)])
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_gpu_same_bits_20_times_kept_or_found_again(device, B, L, D):
    inputs = inputs_of(B, L, D, 16, direction="both", device=device)
    options = dict(direction="both", combine="mean", backend="triton", regime="chunked")
    first = outputs_and_gradients(inputs, **options)
    for time in range(20):
        again = outputs_and_gradients(inputs, save_states=time % 2 == 0, **options)
        assert equal(first, again), time
