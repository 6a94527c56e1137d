"""Random inputs for the scans, and the comparison of an implementation with the float64 reference."""

import math

import torch
from vision_longhorn.kernels.rules import NAMES, get_rule

from vision_longhorn import kernels

DECAYS = tuple(name for name in NAMES if get_rule(name).kind == "decay")  # whose time can be cut into segments
# Every rule, and those with an A once more with each token's own.
RULES = (*NAMES, *(f"{name}_per_token" for name in NAMES if get_rule(name).takes_A))
KEYS = ("zero", "unit", "mixed", "large")


def make_inputs(rule, B, L, D, N, *, direction="forward", stacked=True, scalar_step=False, keys="unit",
                dtype=torch.float32, seed=0, device="cpu", gate=True, state=True):  # fmt: skip
    """Fresh inputs; low-precision dtypes apply to what a network computes per token, weights stay float32 as in the
    models. `keys`: "zero", "unit" (norms near 1), "mixed" (1e-3 to 1e3, log-uniform, some zero), "large" (1e3)."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    law = get_rule(rule.removesuffix("_per_token"))
    both = direction == "both"
    lead = (2,) if both and stacked else ()
    k = draw(*lead, B, L, N, dtype=torch.float64)
    if not law.takes_A:
        k = k / N**0.5
        if keys == "mixed":
            size = 10 ** (6 * torch.rand(*lead, B, L, 1, generator=generator, dtype=torch.float64) - 3)
            k = k * size * (torch.rand(*lead, B, L, 1, generator=generator) > 0.1)
        k = k * {"zero": 0.0, "unit": 1.0, "mixed": 1.0, "large": 1e3}[keys]
    logits = N if law.step_per == "state" else 1 if scalar_step else D
    inputs = dict(
        x=draw(*lead, B, L, D),
        step=draw(*lead, B, L, logits) * 2,
        k=k.to(dtype),
        q=draw(*lead, B, L, N),
        D=draw(*lead, D, dtype=wide),
        bias=draw(*lead, logits, dtype=wide),
    )
    if gate:
        inputs["z"] = draw(B, L, D)
    if state:
        inputs["initial_state"] = draw(*((2,) if both else ()), B, D, N, dtype=wide)
    if law.takes_A:
        per_token = rule.endswith("_per_token")
        shape = (B, L, N) if per_token else (D, N)
        inputs["A"] = -(draw(*lead, *shape, dtype=wide).abs() + 0.1).to(dtype if per_token else wide)
    return {name: value.to(device) for name, value in inputs.items()}


def call(rule, inputs, **options):
    """The public function for `rule` on `inputs`."""
    rest = {name: inputs.get(name) for name in ("z", "D", "initial_state")}
    if rule.startswith("mamba"):
        return kernels.selective_scan(
            inputs["x"],
            inputs["step"],
            inputs["A"],
            inputs["k"],
            inputs["q"],
            dt_bias=inputs.get("bias"),
            A_per_token=rule == "mamba_per_token",
            **rest,
            **options,
        )
    if rule in ("diagonal", "exact"):
        return kernels.longhorn_scan(
            inputs["x"],
            inputs["step"],
            inputs["k"],
            inputs["q"],
            beta_bias=inputs.get("bias"),
            rule=rule,
            **rest,
            **options,
        )
    return kernels.recurrent_scan(
        inputs["x"], inputs["step"], inputs["k"], inputs["q"], bias=inputs.get("bias"), rule=rule, **rest, **options
    )


def outputs_and_gradients(rule, inputs, *, seed=1, **options):
    """y, the final state and the gradient of every input, for random output gradients that depend on `seed` only."""
    leaves = {name: value.detach().requires_grad_() for name, value in inputs.items()}
    y, state = call(rule, leaves, return_final_state=True, **options)
    generator = torch.Generator().manual_seed(seed)
    # Rounded to what bf16 holds, so that the gradient that reaches the scan is the same at every precision.
    weights = [torch.randn(out.shape, generator=generator).bfloat16().to(out.device) for out in (y, state)]
    loss = sum((out.double() * weight.double()).sum() for out, weight in zip((y, state), weights))
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"y": y.detach(), "state": state.detach(), **{f"d{name}": grad for name, grad in zip(leaves, grads)}}


def relative_rms(value, reference):
    """||value - reference|| / ||reference||; where the reference is all zero, the size of value; NaN never passes."""
    value, reference = value.double(), reference.double()
    norm = reference.norm()
    error = ((value - reference).norm() / (norm if norm > 0 else 1.0)).item()
    return math.inf if math.isnan(error) else error  # NaN is lost in a max()


def reference(rule, inputs, **options):
    """What `outputs_and_gradients` gives in float64, by the plain loop."""
    exact = {name: value.double() for name, value in inputs.items()}
    return outputs_and_gradients(rule, exact, backend="reference", **options)


def errors(rule, inputs, backend, **options):
    """Relative RMS error of each output and gradient of `backend` against the reference in float64."""
    expected = reference(rule, inputs, **options)
    got = outputs_and_gradients(rule, inputs, backend=backend, **options)
    for name, value in got.items():
        assert value.shape == expected[name].shape, (name, value.shape, expected[name].shape)
    return {name: relative_rms(value, expected[name]) for name, value in got.items()}
