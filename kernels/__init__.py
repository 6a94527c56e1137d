"""Scans of state-space models for vision, in either or both directions. `rules` says what they compute, `contract` what
they are given; `reference` is a plain loop over tokens; `backends` has vectorised torch, compiled loops (Numba) for
CPUs, and Triton kernels for GPUs. `docs/scan.md` has the mathematics.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from . import flops, reference  # noqa: F401  (flops registers the operators and what they cost)
from .activating import bias_gelu, bias_norm_silu
from .checks import check
from .contract import Scan
from .convolving import grid_conv
from .ops import scan_plan
from .reference import longhorn_step, selective_step
from .residual import residual_norm
from .rules.base import HAS_TRITON

__all__ = ["HAS_TRITON", "Scan", "bias_gelu", "bias_norm_silu", "grid_conv", "longhorn_scan", "longhorn_step",
           "recurrent_scan", "residual_norm", "scan_plan", "selective_scan", "selective_step"]  # fmt: skip


def longhorn_scan(
    x: Tensor,
    beta: Tensor,
    k: Tensor,
    q: Tensor,
    z: Optional[Tensor] = None,
    D: Optional[Tensor] = None,
    beta_bias: Optional[Tensor] = None,
    initial_state: Optional[Tensor] = None,
    *,
    rule: str = "diagonal",
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run Longhorn's recurrence over a sequence (arXiv 2407.14207, section 3; `longhorn_step` runs one token).

    With eps = b / (1 + b ||k||^2), b = sigmoid(beta + beta_bias), for each channel d

        diagonal: S_t[d] = (1 - eps_t[d] k_t^2) S_{t-1}[d] + eps_t[d] x_t[d] k_t
        exact:    S_t[d] = S_{t-1}[d] + eps_t[d] (x_t[d] - S_{t-1}[d] . k_t) k_t
        y_t[d]  = (S_t[d] . q_t + D[d] x_t[d]) * silu(z_t[d])

    Args:
        x: (B, L, D) values, L >= 1.
        beta: (B, L, D), or (B, L, 1) for one step size for all channels; logits, before the sigmoid.
        k: (B, L, N) keys, with norms up to 1e18.
        q: (B, L, N) queries.
        z: (B, L, D) gate, or None.
        D: (D,) skip weight, or None.
        beta_bias: (D,), or (1,) with a scalar beta; added to `beta`.
        initial_state: (B, D, N), with `direction="both"` (2, B, D, N); zeros if None.
        rule: "diagonal" or "exact".
        options: direction, combine, return_final_state, save_states, backend, regime, qk_norm, see `recurrent_scan`.

    Returns:
        The same as `recurrent_scan`, which also lists the errors.
    """
    return recurrent_scan(x, beta, k, q, z, D, beta_bias, initial_state, rule=rule, **options)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    z: Optional[Tensor] = None,
    D: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    initial_state: Optional[Tensor] = None,
    *,
    dt_softplus: bool = True,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run Mamba's selective scan (arXiv 2312.00752, Algorithm 2), channels last; `selective_step` runs one token.

        S_t = exp(dt_t A) S_{t-1} + (dt_t x_t) B_t^T,     y_t = (S_t C_t + D x_t) * silu(z_t)

    Args:
        dt: (B, L, D) or (B, L, 1) step sizes, before the softplus if `dt_softplus`.
        A: (D, N); negative, so that exp(dt A) decays. With `A_per_token` (B, L, N), the same for all channels (the
            input-dependent A that arXiv 2407.14207 compares with).
        B: (B, L, N) input weights, in the place of Longhorn's keys.
        C: (B, L, N) read-out weights, in the place of the queries.
        dt_bias: (D,) or (1,), added to `dt` in float32, before the softplus.
        dt_softplus: whether the step size is softplus(dt + dt_bias).
        x, z, D, initial_state: as in `longhorn_scan`.
        options: A_per_token, direction, combine, return_final_state, save_states, backend, regime, qk_norm (of B and
            C), see `recurrent_scan`.

    Returns:
        The same as `recurrent_scan`, which also lists the errors.
    """
    return recurrent_scan(x, dt, B, C, z, D, dt_bias, initial_state, rule="mamba", A=A, softplus=dt_softplus, **options)


def recurrent_scan(
    x: Tensor,
    step: Tensor,
    k: Tensor,
    q: Tensor,
    z: Optional[Tensor] = None,
    D: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    initial_state: Optional[Tensor] = None,
    *,
    rule: str,
    A: Optional[Tensor] = None,
    softplus: bool = True,
    A_per_token: bool = False,
    direction: str = "forward",
    combine: str = "none",
    return_final_state: bool = False,
    save_states: Optional[bool] = None,
    backend: str = "auto",
    regime: str = "auto",
    qk_norm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the scan of any rule in `rules.NAMES`. Each rule's file has its formula.

    Inputs may be of any float dtypes; sums and states are in float32 (float64). With `direction="both"` every tensor
    may have a leading axis of 2, one entry for each direction; without it both directions read the same values.

    Args:
        x, k, q, z, D, initial_state: as in `longhorn_scan`.
        step: logits of the rule's step size or decay: (B, L, D) or (B, L, 1), or (B, L, N) where the rule has one for
            each state.
        bias: (C,) with C the last axis of `step`; added to `step` in float32 (float64).
        rule: the rule's name.
        A: as in `selective_scan`, for rules that take it (Mamba's).
        softplus: for Mamba's rule, whether the step size is softplus(step + bias).
        A_per_token: whether A depends on the token.
        direction: "forward" from the first token to the last, "backward" from the last to the first, or "both".
        combine: with "both", whether y holds the two directions side by side ("none"), their "sum" or their "mean".
        return_final_state: also return the state after the last token scanned.
        save_states: keep the states that the backward pass starts from, instead of computing them again. They take
            D N / 2 bytes a token and direction (with Triton, the exact rule takes D (4 + N / 16), or D (2 + N / 64) in
            chunks; with Numba, nothing). By default they are kept if an input requires a gradient.
        backend: "auto" (triton on a GPU, numba on a CPU, torch elsewhere and for float64), "torch", "triton", "numba",
            or "reference", the plain loop.
        regime: how Triton goes through time: "sequential"; "parallel", in segments side by side, for few long sequences
            (rules that decay); "chunked", in chunks of 8 tokens on tensor cores ("exact" only: tokens in bfloat16, N 8,
            16 or 32, an NVIDIA GPU of compute capability 8.0 or more); "auto" chooses, `scan_plan` says which.
        qk_norm: divide each k and q by its length first, k / sqrt(||k||^2 + 1e-6). A zero key still writes nothing.

    Returns:
        y of shape (B, L, D), or (2, B, L, D) for both directions uncombined, in the dtype of x; with
        `return_final_state` also the state, shaped like `initial_state`, in float32 (float64).

    Raises:
        ValueError: a shape, dtype, device or option is not as above.
        RuntimeError: a backend was forced that cannot run on this device.
    """
    tensors = (x, step, k, q, A, z, D, bias, initial_state)
    options = (rule, direction, combine, softplus, A_per_token)
    if backend == "reference":
        scan = Scan(*tensors, *options, regime, qk_norm=qk_norm)
        check(scan)
        y, final_state = reference.scan(scan)
    else:
        if save_states is None:
            save_states = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        y, final_state, _ = torch.ops.vision_longhorn.scan(
            *tensors, *options, return_final_state, save_states, backend, regime, qk_norm
        )
    return (y, final_state) if return_final_state else y
