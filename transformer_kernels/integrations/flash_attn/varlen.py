"""`flash_attn_varlen_func` and its packed forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from torch import Tensor

from ...functional.varlen import attention_varlen
from ..paged_varlen import attend_pages
from .arguments import (
    as_int,
    check_backward,
    check_dimensions,
    check_packed,
    score_options,
    warn_of_probabilities,
)


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *,
    return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Computes `flash_attn_varlen_func` of queries, keys and values in one tensor.

    Args:
        qkv: (total, 3, heads, headdim).
        cu_seqlens: (batch + 1,) int32 or int64, cumulative lengths.
        max_seqlen: upper bound of the lengths.
        dropout_p: as in `flash_attn_func`, like the other arguments.
        softmax_scale: see there.
        causal: see there.
        window_size: see there.
        softcap: see there.
        alibi_slopes: see there.
        deterministic: see there.
        return_attn_probs: see there.

    Returns:
        (total, heads, headdim) in qkv's dtype; with `return_attn_probs` as in
        `flash_attn_varlen_func`.

    Raises:
        TypeError, ValueError: as in `flash_attn_varlen_func`.

    Source: flash_attn 2.8.4.
    """
    check_dimensions("qkv", qkv, "total, 3, heads, headdim")
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sequence[int] | Tensor = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sequence[int] | Tensor = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *,
    return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Computes `flash_attn_varlen_func` of keys and values in one tensor.

    Args:
        q: (total_q, heads, headdim).
        kv: (total_k, 2, heads_k, headdim).
        cu_seqlens_q: as in `flash_attn_varlen_func`, like the other arguments.
        cu_seqlens_k: see there.
        max_seqlen_q: see there.
        max_seqlen_k: see there.
        dropout_p: see there.
        softmax_scale: see there.
        causal: see there.
        window_size: see there.
        softcap: see there.
        alibi_slopes: see there.
        deterministic: see there.
        return_attn_probs: see there.

    Returns:
        (total_q, heads, headdim) in q's dtype; with `return_attn_probs` as in
        `flash_attn_varlen_func`.

    Raises:
        TypeError, ValueError: as in `flash_attn_varlen_func`.

    Source: flash_attn 2.8.4.
    """
    check_dimensions("kv", kv, "total, 2, heads_k, headdim")
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs=return_attn_probs,
    )  # fmt: skip


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sequence[int] | Tensor = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, block_table: Tensor | None = None, *,
    s_aux: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sequence[int] | Tensor = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *,
    return_attn_probs: Literal[True], block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sequence[int] | Tensor = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *, return_attn_probs: bool,
    block_table: Tensor | None = None, s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]: ...  # fmt: skip
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Computes attention of packed sequences as `flash_attn.flash_attn_varlen_func` does.

    Args:
        q: (total_q, heads, headdim) in float16, bfloat16, float32 or float64; any strides.
        k: (total_k, heads_k, headdim); with `block_table` pages
            (blocks, page_size, heads_k, headdim) of any page_size.
        v: (total_k, heads_k, headdim_v), or pages (blocks, page_size, heads_k, headdim_v).
        cu_seqlens_q: (batch + 1,) int32 or int64: 0, then the end of each sequence in q.
        cu_seqlens_k: (batch + 1,) likewise for k and v; with `block_table` the cumulative numbers
            of keys in use.
        max_seqlen_q: upper bound of the query lengths.
        max_seqlen_k: upper bound of the key lengths.
        dropout_p: as in `flash_attn_func`, like the other arguments, by each sequence's lengths.
        softmax_scale: see there.
        causal: see there.
        window_size: see there.
        softcap: see there.
        alibi_slopes: see there.
        deterministic: see there.
        return_attn_probs: see there.
        block_table: (batch, max_blocks) int32 or int64: key j of sequence b is row j % page_size of
            page block_table[b, j // page_size]. Without gradients and dropout, pages are read in
            place if the sequences have about equally many queries, on a GPU up to 16; otherwise
            those in use are copied.
        s_aux: (heads,), attention sinks, as in flash_attn 3: one logit per head, added to the
            softmax denominator; differentiable.

    Returns:
        o (total_q, heads, headdim_v) in q's dtype, differentiable in q, k and v; with
        `return_attn_probs` (o, lse, None), and lse (heads, total_q), otherwise as in
        `flash_attn_func`. A query without a visible key has o = 0, and lse = -inf.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value.

    Source: flash_attn 2.8.4; Dao 2023, arXiv:2307.08691.
    """
    options = score_options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    check_packed(q, k, v, block_table)
    check_backward(deterministic, q, k, v)
    given: dict[str, Any] = {
        "max_seqlen_q": as_int(max_seqlen_q), "max_seqlen_k": as_int(max_seqlen_k),
        "dropout_p": dropout_p, "sinks": s_aux, **options,
    }  # fmt: skip
    packed = q, k, v, cu_seqlens_q, cu_seqlens_k
    o: Tensor
    if block_table is not None:
        o, lse = attend_pages(*packed, block_table, **given)
        if not return_attn_probs:
            return o
    elif not return_attn_probs:
        o = attention_varlen(*packed, **given, return_lse=False)
        return o
    else:
        o, lse = attention_varlen(*packed, **given, return_lse=True)
    warn_of_probabilities("return_attn_probs")
    return o, lse, None
