"""The `linear_attention_varlen` operator: linear attention over packed sequences."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from torch import Tensor

from ..common.argument_checks import check_bool
from ..common.overrides import is_overridden, overridden
from ..dispatch.division import check_undivided
from ..linear.attention import LINEAR_BACKENDS
from ..linear.checks import PACKED, check_options, map_features, varlen_problem
from ..linear.run import run
from ..linear.types import FeatureMap, LinearState, Results
from .signatures import LinearVarlenOptions


@overload
def linear_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[LinearVarlenOptions],
) -> Tensor: ...


@overload
def linear_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    return_state: Literal[True],
    **options: Unpack[LinearVarlenOptions],
) -> tuple[Tensor, LinearState]: ...


@overload
def linear_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    return_state: bool,
    **options: Unpack[LinearVarlenOptions],
) -> Tensor | tuple[Tensor, LinearState]: ...


def linear_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    feature_map: FeatureMap = "elu",
    causal: bool = True,
    eps: float = 1e-6,
    normalize: bool = True,
    log_decay: Tensor | None = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, LinearState]:
    """Computes linear attention for each of B sequences packed into one tensor without padding.

    Sequence b has the rows cu_seqlens[b] to cu_seqlens[b + 1] - 1 of q, k and v; a length may be 0.
    Its result is that of `linear_attention` on this sequence alone, with its own state.

    Args:
        q: queries (total, H_q, D) in float16, bfloat16, float32 or float64; any strides.
        k: keys (total, H_kv, D) with q's dtype and device; any strides.
        v: values (total, H_kv, D_v) with q's dtype and device; any strides.
        cu_seqlens: cumulative lengths (B + 1,), int32 or int64 on q's device: 0, then the end of
            each sequence. Rows after the last sequence are trailing padding: o = 0, gradients 0.
        feature_map: as for `linear_attention`.
        causal: as for `linear_attention`.
        eps: as for `linear_attention`.
        normalize: as for `linear_attention`.
        log_decay: as for `linear_attention`, with one number for each key head (H_kv,), or for each
            token (total, H_kv).
        initial_state: the state of each sequence before its first token. Default: zeros.
        return_state: also returns the state of each sequence after its last token.
        backend: "auto", "cpu", "cuda", "triton" or "reference". A named backend never falls back to
            another one.

    Returns:
        o (total, H_q, D_v) in q's dtype; with `return_state`, the pair (o, state).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value, or the named backend does not
            support the call. The values of cu_seqlens are checked here on the CPU in eager mode.
        RuntimeError: in compiled code on the CPU, the values of cu_seqlens are out of range.

    Source: docs/linear.md.
    """
    if is_overridden(q, k, v, cu_seqlens, log_decay):
        return overridden(
            linear_attention_varlen, q, k, v, cu_seqlens, feature_map=feature_map, causal=causal,
            eps=eps, normalize=normalize, log_decay=log_decay, initial_state=initial_state,
            return_state=return_state, backend=backend,
        )  # fmt: skip
    check_undivided("linear_attention_varlen")
    check_bool("return_state", return_state)
    options = check_options(feature_map, causal=causal, normalize=normalize, eps=eps)
    q, k, v = map_features(feature_map, q, k, v, PACKED)
    problem = varlen_problem(
        q, k, v, cu_seqlens, options, log_decay=log_decay, initial_state=initial_state
    )
    results: Results = run(problem, backend, LINEAR_BACKENDS)
    o = results.o.squeeze(0).transpose(0, 1)
    return (o, LinearState(results.S, results.z)) if return_state else o
