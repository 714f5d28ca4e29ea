"""The `linear_attention` operator: attention whose cost is linear in the length."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from torch import Tensor

from ..common.argument_checks import check_bool
from ..common.overrides import is_overridden, overridden
from ..dispatch.division import check_undivided
from ..linear.attention import LINEAR_BACKENDS
from ..linear.checks import check_options, dense_problem, map_features
from ..linear.run import run
from ..linear.types import FeatureMap, LinearState, Results
from ..masks.mask import Mask
from .signatures import LinearOptions


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[LinearOptions],
) -> Tensor: ...


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_state: Literal[True],
    **options: Unpack[LinearOptions],
) -> tuple[Tensor, LinearState]: ...


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: bool, **options: Unpack[LinearOptions]
) -> Tensor | tuple[Tensor, LinearState]: ...


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMap = "elu",
    causal: bool = True,
    mask: Mask | None = None,
    eps: float = 1e-6,
    normalize: bool = True,
    log_decay: Tensor | None = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, LinearState]:
    """Computes linear attention: weights phi(q_i) . phi(k_j) instead of a softmax.

    o_i = sum_j w_ij v_j / (sum_j w_ij + eps), where w_ij = phi(q_i) . phi(k_j) and j runs up to i
    if `causal`. Time is linear in the number of tokens; memory beyond the tensors does not grow
    with it, except for the gradient of log_decay. The results are differentiable in every
    floating-point tensor argument, to any order.

    Args:
        q: queries (B, H_q, M, D) in float16, bfloat16, float32 or float64; any strides.
        k: keys (B, H_kv, N, D) with q's dtype and device; any strides. H_q is a multiple of H_kv.
            `causal` requires M = N.
        v: values (B, H_kv, N, D_v) with q's dtype and device; any strides.
        feature_map: phi. "elu" is elu(x) + 1, "relu" and "identity" are as named. A callable is
            applied to q and k before the kernels; it may change the last dimension.
        causal: query i sees the keys up to i, else every key.
        mask: `Mask.padding` or `Mask.key_range`. Keys and values outside the range may hold NaN;
            they neither enter the state nor decay it.
        eps: added to the denominator; greater than 0.
        normalize: False omits the denominator, as RetNet and lightning attention do.
        log_decay: natural logarithm of the factor by which a token multiplies the state before its
            own key enters: w_ij is multiplied by exp of the sum of log_decay over j + 1 to i. One
            number for each key head (H_kv,), or for each token (B, H_kv, N), in float32 (float64
            for float64 inputs) or q's dtype. Numbers below -200 (float64: -800), such as -inf,
            clear the state and have no gradient. Requires `causal`.
        initial_state: the state left by earlier tokens, a `LinearState`. Default: zeros.
        return_state: also returns the state after the last token.
        backend: "auto", "cpu", "cuda", "triton" or "reference". A named backend never falls back to
            another one.

    Returns:
        o (B, H_q, M, D_v) in q's dtype; with `return_state`, the pair (o, state). The state is
        S (B, H_kv, D, D_v) and z (B, H_kv, D) in float32 (float64 for float64 inputs).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value, or the named backend does not
            support the call.

    Source: docs/linear.md; Katharopoulos et al. 2020, arXiv:2006.16236.
    """
    if is_overridden(q, k, v, log_decay):
        return overridden(
            linear_attention, q, k, v, feature_map=feature_map, causal=causal, mask=mask, eps=eps,
            normalize=normalize, log_decay=log_decay, initial_state=initial_state,
            return_state=return_state, backend=backend,
        )  # fmt: skip
    check_undivided("linear_attention")
    check_bool("return_state", return_state)
    options = check_options(feature_map, causal=causal, normalize=normalize, eps=eps)
    q, k, v = map_features(feature_map, q, k, v)
    problem = dense_problem(
        q, k, v, options, mask=mask, log_decay=log_decay, initial_state=initial_state
    )
    results: Results = run(problem, backend, LINEAR_BACKENDS)
    state = LinearState(results.S, results.z)
    return (results.o, state) if return_state else results.o
