"""The gated delta rule: of whole sequences, of packed sequences, and of the next tokens."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from torch import Tensor

from ..common.argument_checks import check_bool
from ..common.overrides import is_overridden, overridden
from ..dispatch.division import check_undivided
from ..linear.delta.backends import DELTA_BACKENDS
from ..linear.delta.checks import dense_problem, step_problem, varlen_problem
from ..linear.delta.types import Results
from ..linear.run import run, run_steps
from .signatures import DeltaOptions


@overload
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[DeltaOptions],
) -> Tensor: ...


@overload
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    *,
    return_state: Literal[True],
    **options: Unpack[DeltaOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    *,
    return_state: bool,
    **options: Unpack[DeltaOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = False,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes the gated delta rule: a state that corrects the value it holds for a key.

    For each token t and value head, the state S (D, D_v) decays, S = diag(exp(log_decay_t)) S. It
    takes in the difference of the value from the one it holds, S = S + k_t (beta_t (v_t - S^T
    k_t))^T. It answers the query, o_t = scale S^T q_t. Time is linear in the number of tokens. The
    results are differentiable in every floating-point tensor argument, to any order.

    Args:
        q: queries (B, H_k, T, D) in float16, bfloat16, float32 or float64; any strides.
        k: keys (B, H_k, T, D) with q's dtype and device; any strides. beta_t |k_t|^2 above 2 lets
            the state grow without bound.
        v: values (B, H_v, T, D_v) with q's dtype and device; any strides. H_v is a multiple of
            H_k: value head h uses head h // (H_v / H_k) of q and k.
        log_decay: natural logarithm, at most 0, of the factor by which a token multiplies the
            state: (B, H_v, T), or (B, H_v, T, D) with a factor for each row of the state, in
            float32 (float64 for float64 inputs) or q's dtype. None: no decay. Numbers below -200
            (float64: -800), such as -inf, clear the state and have no gradient. Positive numbers
            are refused on the CPU in eager mode and undefined elsewhere.
        beta: learning rate of each token (B, H_v, T), in the dtypes of log_decay.
        scale: factor of the outputs. Default: 1 / sqrt(D).
        l2norm: first divides q and k by sqrt(sum of squares + 1e-6).
        initial_state: state left by earlier tokens, (B, H_v, D, D_v) in float32 (float64 for
            float64 inputs). Default: zeros.
        return_state: also returns the state after the last token.
        backend: "auto", "cpu", "triton" or "reference". A named backend never falls back to
            another one.

    Returns:
        o (B, H_v, T, D_v) in q's dtype; with `return_state`, the pair (o, state).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value, or the named backend does not
            support the call.

    Source: docs/delta.md; Yang et al. 2024, arXiv:2412.06464.
    """
    if is_overridden(q, k, v, log_decay, beta, initial_state):
        return overridden(
            gated_delta_rule, q, k, v, log_decay, beta, scale=scale, l2norm=l2norm,
            initial_state=initial_state, return_state=return_state, backend=backend,
        )  # fmt: skip
    check_undivided("gated_delta_rule")
    check_bool("return_state", return_state)
    problem = dense_problem(
        q, k, v, log_decay, beta, scale=scale, l2norm=l2norm, initial_state=initial_state
    )
    results: Results = run(problem, backend, DELTA_BACKENDS)
    return (results.o, results.S) if return_state else results.o


@overload
def gated_delta_rule_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[DeltaOptions],
) -> Tensor: ...


@overload
def gated_delta_rule_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    return_state: Literal[True],
    **options: Unpack[DeltaOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def gated_delta_rule_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    return_state: bool,
    **options: Unpack[DeltaOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def gated_delta_rule_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = False,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes the gated delta rule for each of B sequences packed into one tensor without padding.

    Sequence b has the rows cu_seqlens[b] to cu_seqlens[b + 1] - 1; a length may be 0. Its result is
    that of `gated_delta_rule` on this sequence alone, with its own state.

    Args:
        q: queries (total, H_k, D) in float16, bfloat16, float32 or float64; any strides.
        k: keys (total, H_k, D) with q's dtype and device; any strides.
        v: values (total, H_v, D_v) with q's dtype and device; any strides.
        log_decay: as for `gated_delta_rule`, (total, H_v) or (total, H_v, D), or None.
        beta: as for `gated_delta_rule`, (total, H_v).
        cu_seqlens: cumulative lengths (B + 1,), int32 or int64 on q's device: 0, then the end of
            each sequence. Rows after the last sequence are trailing padding: o = 0, gradients 0.
        scale: as for `gated_delta_rule`.
        l2norm: as for `gated_delta_rule`.
        initial_state: the state of each sequence before its first token. Default: zeros.
        return_state: also returns the state of each sequence after its last token.
        backend: "auto", "cpu", "triton" or "reference". A named backend never falls back to
            another one.

    Returns:
        o (total, H_v, D_v) in q's dtype; with `return_state`, the pair (o, state).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value, or the named backend does not
            support the call. The values of cu_seqlens are checked here on the CPU in eager mode.
        RuntimeError: in compiled code on the CPU, the values of cu_seqlens are out of range.

    Source: docs/delta.md.
    """
    if is_overridden(q, k, v, log_decay, beta, cu_seqlens, initial_state):
        return overridden(
            gated_delta_rule_varlen, q, k, v, log_decay, beta, cu_seqlens, scale=scale,
            l2norm=l2norm, initial_state=initial_state, return_state=return_state, backend=backend,
        )  # fmt: skip
    check_undivided("gated_delta_rule_varlen")
    check_bool("return_state", return_state)
    problem = varlen_problem(
        q, k, v, log_decay, beta, cu_seqlens,
        scale=scale, l2norm=l2norm, initial_state=initial_state,
    )  # fmt: skip
    results: Results = run(problem, backend, DELTA_BACKENDS)
    o = results.o.squeeze(0).transpose(0, 1)
    return (o, results.S) if return_state else o


def gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Computes the gated delta rule of the next M tokens of each sequence and updates the state.

    The result equals that of `gated_delta_rule` with `initial_state=state`; the final state
    overwrites `state`. Time and memory do not depend on the number of earlier tokens. For
    inference: no argument may require grad in grad mode.

    Args:
        q: queries (B, H_k, M, D) in float16, bfloat16, float32 or float64; any strides.
        k: keys (B, H_k, M, D) with q's dtype and device; any strides.
        v: values (B, H_v, M, D_v) with q's dtype and device; any strides.
        log_decay: as for `gated_delta_rule`: (B, H_v, M) or (B, H_v, M, D), or None.
        beta: as for `gated_delta_rule`: (B, H_v, M).
        state: (B, H_v, D, D_v), contiguous, in float32 (float64 for float64 inputs). Zeros before
            the first token.
        scale: as for `gated_delta_rule`.
        l2norm: as for `gated_delta_rule`.
        backend: "auto", "cpu", "triton" or "reference". A named backend never falls back to
            another one.

    Returns:
        o (B, H_v, M, D_v) in q's dtype.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value, a tensor requires grad in grad
            mode, or the named backend does not support the call.

    Source: docs/delta.md.
    """
    if is_overridden(q, k, v, log_decay, beta, state):
        return overridden(
            gated_delta_rule_step, q, k, v, log_decay, beta, state,
            scale=scale, l2norm=l2norm, backend=backend,
        )  # fmt: skip
    check_undivided("gated_delta_rule_step")
    problem = step_problem(q, k, v, log_decay, beta, state, scale=scale, l2norm=l2norm)
    return run_steps(problem, backend, DELTA_BACKENDS)
