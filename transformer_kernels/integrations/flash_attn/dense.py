"""`flash_attn_func` and its packed forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from ...functional.attention import attention
from .arguments import check_backward, check_dimensions, score_options, warn_of_probabilities


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *,
    return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Computes `flash_attn_func` of queries, keys and values in one tensor.

    Args:
        qkv: (batch, seqlen, 3, heads, headdim).
        dropout_p: as in `flash_attn_func`, like the other arguments.
        softmax_scale: see there.
        causal: see there.
        window_size: see there.
        softcap: see there.
        alibi_slopes: see there.
        deterministic: see there.
        return_attn_probs: see there.

    Returns:
        (batch, seqlen, heads, headdim) in qkv's dtype; with `return_attn_probs` as in
        `flash_attn_func`.

    Raises:
        TypeError, ValueError: as in `flash_attn_func`.

    Source: flash_attn 2.8.4.
    """
    check_dimensions("qkv", qkv, "batch, seqlen, 3, heads, headdim")
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sequence[int] | Tensor = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sequence[int] | Tensor = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *,
    return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Computes `flash_attn_func` of keys and values in one tensor.

    Args:
        q: (batch, seqlen_q, heads, headdim).
        kv: (batch, seqlen_k, 2, heads_k, headdim).
        dropout_p: as in `flash_attn_func`, like the other arguments.
        softmax_scale: see there.
        causal: see there.
        window_size: see there.
        softcap: see there.
        alibi_slopes: see there.
        deterministic: see there.
        return_attn_probs: see there.

    Returns:
        (batch, seqlen_q, heads, headdim) in q's dtype; with `return_attn_probs` as in
        `flash_attn_func`.

    Raises:
        TypeError, ValueError: as in `flash_attn_func`.

    Source: flash_attn 2.8.4.
    """
    check_dimensions("kv", kv, "batch, seqlen, 2, heads_k, headdim")
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sequence[int] | Tensor = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, s_aux: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sequence[int] | Tensor = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *,
    return_attn_probs: Literal[True], s_aux: Tensor | None = None,
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sequence[int] | Tensor = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *, return_attn_probs: bool,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]: ...  # fmt: skip
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Computes attention as `flash_attn.flash_attn_func` does; differentiable in q, k and v.

    Args:
        q: (batch, seqlen_q, heads, headdim) in float16, bfloat16, float32 or float64; any strides.
        k: (batch, seqlen_k, heads_k, headdim); heads is a multiple of heads_k.
        v: (batch, seqlen_k, heads_k, headdim_v).
        dropout_p: dropout probability of the attention weights; 0 in evaluation.
        softmax_scale: factor of q k^T. Default: 1/sqrt(headdim).
        causal: key j is visible to query i if j <= i + seqlen_k - seqlen_q.
        window_size: (left, right): visible keys before and after the diagonal of `causal`; -1 is
            unbounded.
        softcap: bound of the scores, softcap * tanh(scale * q k^T / softcap); 0 is no bound.
        alibi_slopes: (heads,) or (batch, heads), float32: the bias
            -slope |i + seqlen_k - seqlen_q - j|.
        deterministic: gradients are bit-identical in every run. They always are on a CPU; a GPU
            needs `torch.use_deterministic_algorithms(True)` too.
        return_attn_probs: also returns the log-sum-exp of the scores, and None in place of the
            probabilities, which do not exist: the first call warns of it.
        s_aux: (heads,), attention sinks, as in flash_attn 3: one logit per head, added to the
            softmax denominator; differentiable.

    Returns:
        o (batch, seqlen_q, heads, headdim_v) in q's dtype; with `return_attn_probs`
        (o, lse, None). lse (batch, heads, seqlen_q) is the natural-log log-sum-exp in float32
        (float64 for float64 inputs), including the sinks; it is differentiable, unlike that of
        flash_attn. A query without a visible key has o = 0, and lse = -inf.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value.

    Source: flash_attn 2.8.4; Dao 2023, arXiv:2307.08691.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dimensions(name, x, "batch, seqlen, heads, headdim")
    check_backward(deterministic, q, k, v)
    options = score_options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if not return_attn_probs:
        return attention(q, k, v, dropout_p=dropout_p, sinks=s_aux, **options).transpose(1, 2)
    warn_of_probabilities("return_attn_probs")
    o, lse = attention(q, k, v, dropout_p=dropout_p, sinks=s_aux, **options, return_lse=True)
    return o.transpose(1, 2), lse, None
