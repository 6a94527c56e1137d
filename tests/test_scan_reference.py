"""The reference scans against the mathematics: definition, minimisation, finite differences, one step at a time."""

import pytest
import torch
import torch.nn.functional as F
from scan_cases import RULES, call, get_rule, make_inputs, outputs_and_gradients
from vision_longhorn.kernels import longhorn_step, selective_step
from vision_longhorn.kernels.rules.base import read_out


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("direction", ("forward", "backward", "both"))
def test_reference_passes_gradcheck(rule, direction):
    inputs = make_inputs(rule, 1, 4, 2, 3, direction=direction, dtype=torch.float64)
    names = list(inputs)

    def scan(*values):
        return call(rule, dict(zip(names, values)), direction=direction, return_final_state=True, backend="reference")

    assert torch.autograd.gradcheck(scan, tuple(value.requires_grad_() for value in inputs.values()))


@pytest.mark.parametrize("rule", RULES)
def test_torch_path_passes_gradcheck(rule):
    # More tokens than a chunk, so that the adjoint crosses a chunk's border.
    inputs = make_inputs(rule, 1, 18, 1, 2, direction="both", dtype=torch.float64)
    names = list(inputs)

    def scan(*values):
        return call(
            rule, dict(zip(names, values)), direction="both", combine="mean", return_final_state=True, backend="torch"
        )

    assert torch.autograd.gradcheck(scan, tuple(value.requires_grad_() for value in inputs.values()))


def test_a_step_of_longhorn_refuses_a_rule_that_is_not_there():
    with pytest.raises(ValueError, match="rule='exakt'"):
        longhorn_step(torch.zeros(1, 2, 3), *(torch.zeros(1, n) for n in (2, 2, 3, 3)), rule="exakt")


def test_exact_step_minimises_the_online_objective():
    torch.manual_seed(0)
    B, D, N = 2, 3, 5
    state, x, logit = (torch.randn(*shape, dtype=torch.float64) for shape in ((B, D, N), (B, D), (B, D)))
    k, q = (torch.randn(B, N, dtype=torch.float64) for _ in range(2))
    beta = torch.sigmoid(logit)

    found = state.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [found], max_iter=500, tolerance_grad=1e-14, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def objective():
        optimizer.zero_grad()
        error = torch.einsum("bdn,bn->bd", found, k) - x
        loss = (found - state).square().sum() + (beta * error.square()).sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    _, exact = longhorn_step(state, x, logit, k, q, rule="exact")
    assert (exact - found).abs().max() < 1e-7
    _, diagonal = longhorn_step(state, x, logit, k, q)
    assert (diagonal - found).abs().max() > 1e-2  # the approximation is one: the test tells the rules apart


def test_diagonal_rule_is_its_formula():
    inputs = make_inputs("diagonal", 2, 6, 3, 4, dtype=torch.float64)
    y, final = call("diagonal", inputs, return_final_state=True, backend="reference")
    state = inputs["initial_state"].clone()
    for t in range(6):
        for b in range(2):
            key, query = inputs["k"][b, t], inputs["q"][b, t]
            for d in range(3):
                beta = 1 / (1 + torch.exp(-(inputs["step"][b, t, d] + inputs["bias"][d])))
                eps = beta / (1 + beta * (key * key).sum())
                for n in range(4):
                    state[b, d, n] = (1 - eps * key[n] ** 2) * state[b, d, n] + eps * inputs["x"][b, t, d] * key[n]
                z = inputs["z"][b, t, d]
                out = ((state[b, d] * query).sum() + inputs["D"][d] * inputs["x"][b, t, d]) * z / (1 + torch.exp(-z))
                torch.testing.assert_close(y[b, t, d], out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(final, state, rtol=1e-12, atol=1e-12)


def test_selective_scan_is_its_formula():
    inputs = make_inputs("mamba", 2, 6, 3, 4, dtype=torch.float64, gate=False)
    y = call("mamba", inputs, backend="reference")
    dt = F.softplus(inputs["step"] + inputs["bias"])
    state = inputs["initial_state"]
    for t in range(6):
        state = torch.exp(torch.einsum("bd,dn->bdn", dt[:, t], inputs["A"])) * state + torch.einsum(
            "bd,bd,bn->bdn", dt[:, t], inputs["x"][:, t], inputs["k"][:, t]
        )
        out = torch.einsum("bdn,bn->bd", state, inputs["q"][:, t]) + inputs["D"] * inputs["x"][:, t]
        torch.testing.assert_close(y[:, t], out, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ("reference", "torch"))
@pytest.mark.parametrize("rule", RULES)
def test_steps_reproduce_the_scan(rule, backend):
    inputs = make_inputs(rule, 2, 20, 3, 4)
    y, final = call(rule, inputs, return_final_state=True, backend=backend)
    state = inputs["initial_state"]
    for t in range(20):
        token = [inputs[name][:, t] for name in ("x", "step", "k", "q", "z")]
        if rule not in ("diagonal", "exact", "mamba", "mamba_per_token"):
            x, logit, k, q, z = token
            state = get_rule(rule).update(state, x, logit + inputs["bias"], k, None, softplus=True)
            out = read_out(state, x, q, z, inputs["D"])
        elif rule.startswith("mamba"):
            x, dt, B, C, z = token
            A = inputs["A"][:, t].unsqueeze(1) if rule == "mamba_per_token" else inputs["A"]
            out, state = selective_step(state, x, dt, A, B, C, z, inputs["D"], inputs["bias"])
        else:
            out, state = longhorn_step(state, *token, inputs["D"], inputs["bias"], rule=rule)
        torch.testing.assert_close(out, y[:, t], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-5, atol=1e-5)


def test_exact_and_diagonal_rule_agree_for_one_state():
    inputs = make_inputs("exact", 2, 9, 3, 1, dtype=torch.float64)
    exact = outputs_and_gradients("exact", inputs, backend="reference")
    diagonal = outputs_and_gradients("diagonal", inputs, backend="reference")
    for name in exact:
        torch.testing.assert_close(exact[name], diagonal[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_backward_direction_is_the_forward_one_on_reversed_tokens(rule):
    inputs = make_inputs(rule, 2, 7, 3, 4)
    tokens = ("x", "step", "k", "q", "z") + (("A",) if rule == "mamba_per_token" else ())
    flipped = {name: value.flip(1) if name in tokens else value for name, value in inputs.items()}
    y, state = call(rule, inputs, direction="backward", return_final_state=True, backend="reference")
    mirrored, mirrored_state = call(rule, flipped, return_final_state=True, backend="reference")
    assert torch.equal(y, mirrored.flip(1)) and torch.equal(state, mirrored_state)
