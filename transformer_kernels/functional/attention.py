"""The `attention` operator: validates the call, chooses a backend and runs it."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from torch import Tensor

from ..common.argument_checks import check_bool
from ..common.overrides import is_overridden, overridden
from ..dispatch import division, fast_path
from ..dispatch.autocast import cast_bias, cast_for_autocast
from ..dispatch.run import run
from ..masks.mask import Mask
from ..problem.checks import scaled_queries
from ..problem.dense import dense_problem
from ..scores.alibi import Alibi
from ..scores.relative import Relative
from .signatures import AttentionOptions


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | Alibi | None = None,
    relative: Relative | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes masked scaled dot-product attention: softmax(scale * q k^T + bias) v.

    Fused backends never store the M x N scores, in the forward or the backward pass. The outputs
    are differentiable in every floating-point tensor argument, to any order.

    Args:
        q: queries (B, H_q, M, D) in float16, bfloat16, float32 or float64; any strides.
        k: keys (B, H_kv, N, D) with q's dtype and device; any strides. H_q is a multiple of H_kv
            (grouped-query and multi-query attention).
        v: values (B, H_kv, N, D_v) with q's dtype and device; any strides.
        mask: visible (query, key) pairs; None makes every pair visible.
        bias: additive bias, applied after scale and softcap. Either a tensor in q's dtype or
            float32, broadcastable to (B, H_q, M, N), or `alibi(slopes)`.
        relative: `relative_bias(table, lowest=...)`, a bias by distance, added like `bias`; or
            `relative_keys(keys, lowest=...)`, keys by distance, added to k in the scores.
        scale: factor of q k^T. Default: 1/sqrt(D). A tensor with one element, in q's dtype or
            float32, is multiplied into q, with a rounding in q's dtype; it has a gradient.
        softcap: bound of the scores: softcap * tanh(scale * q k^T / softcap). Default: no bound.
        dropout_p: dropout probability of the attention weights, from 0 to 1.
        seed: dropout seed, an int or an int64 scalar tensor. Default: drawn from torch's generator.
            The dropout mask depends only on (seed, b, h, i, j), not on the backend.
        sinks: attention sinks (H_q,): one logit per head, added to the softmax denominator.
        return_lse: also returns the log-sum-exp of the scores.
        backend: "auto", "cpu", "cuda", "triton" or "reference". A named backend never falls back to
            another one.

    Returns:
        o (B, H_q, M, D_v) in q's dtype; with `return_lse`, the pair (o, lse). lse (B, H_q, M) is
        the natural-log log-sum-exp in float32 (float64 for float64 inputs), including the sinks. A
        row without a visible key has o = 0 and lse = -inf (with sinks, lse = the sink).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value, or the named backend does not
            support the call.

    Source: docs/attention.md; Dao et al. 2022, arXiv:2205.14135.
    """
    is_plain = (
        bias is None and relative is None and softcap is None and seed is None and sinks is None
    )
    plain_o = fast_path.plain_attention(
        q, k, v, mask=mask, scale=scale, dropout_p=dropout_p, is_plain=is_plain,
        return_lse=return_lse, backend=backend,
    )  # fmt: skip
    if type(plain_o) is Tensor:
        return plain_o
    options: dict[str, Any] = {
        "mask": mask, "bias": bias, "relative": relative, "scale": scale, "softcap": softcap,
        "dropout_p": dropout_p, "seed": seed, "sinks": sinks, "backend": backend,
    }  # fmt: skip
    if is_overridden(q, k, v, bias, relative, scale, seed, sinks):
        return overridden(attention, q, k, v, return_lse=return_lse, **options)
    check_bool("return_lse", return_lse)
    q, options["scale"] = scaled_queries(q, scale)
    attend = _attend if division.current is None else division.current.attend
    o, lse = attend(q, k, v, **options)
    return (o, lse) if return_lse else o


def _attend(
    q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None, backend: str, **options: Any
) -> tuple[Tensor, Tensor]:
    q, k, v = cast_for_autocast(q, k, v)
    options["bias"] = cast_bias(options["bias"], q)
    problem = dense_problem(q, k, v, sinks=sinks, **options)
    return run(problem, q, k, v, sinks=sinks, backend=backend)
