"""The `linear_attention_decode` operator: linear attention of the next tokens, by recurrence."""

from __future__ import annotations

from torch import Tensor

from ..common.overrides import is_overridden, overridden
from ..dispatch.division import check_undivided
from ..linear.attention import STEP_BACKENDS
from ..linear.checks import check_options, decode_problem, map_features
from ..linear.run import run_steps
from ..linear.types import FeatureMap, LinearState


def linear_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    *,
    feature_map: FeatureMap = "elu",
    eps: float = 1e-6,
    normalize: bool = True,
    log_decay: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Computes linear attention of the next M tokens of each sequence and updates the state.

    The result equals that of `linear_attention` with `initial_state=state`; the final state
    overwrites `state`. Time and memory do not depend on the number of earlier tokens. For
    inference: no argument may require grad in grad mode.

    Args:
        q: queries (B, H_q, M, D) in float16, bfloat16, float32 or float64; any strides. Up to 32
            tokens are computed by the recurrence, more in chunks.
        k: keys (B, H_kv, M, D) with q's dtype and device; any strides. H_q is a multiple of H_kv.
        v: values (B, H_kv, M, D_v) with q's dtype and device; any strides.
        state: `LinearState` of S (B, H_kv, D, D_v) and z (B, H_kv, D), contiguous, in float32
            (float64 for float64 inputs). Zeros before the first token.
        feature_map: as for `linear_attention`.
        eps: as for `linear_attention`.
        normalize: as for `linear_attention`.
        log_decay: as for `linear_attention`: (H_kv,) or (B, H_kv, M).
        backend: "auto", "cpu", "cuda", "triton" or "reference". A named backend never falls back to
            another one.

    Returns:
        o (B, H_q, M, D_v) in q's dtype.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value, a tensor requires grad in grad
            mode, or the named backend does not support the call.

    Source: docs/linear.md.
    """
    if is_overridden(q, k, v, log_decay):
        return overridden(
            linear_attention_decode, q, k, v, state, feature_map=feature_map, eps=eps,
            normalize=normalize, log_decay=log_decay, backend=backend,
        )  # fmt: skip
    check_undivided("linear_attention_decode")
    options = check_options(feature_map, causal=True, normalize=normalize, eps=eps)
    q, k, v = map_features(feature_map, q, k, v)
    problem = decode_problem(q, k, v, state, options, log_decay=log_decay)
    return run_steps(problem, backend, STEP_BACKENDS)
