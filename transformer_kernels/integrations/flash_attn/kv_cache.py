"""`flash_attn_with_kvcache`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from ...common.argument_checks import check_int
from ...functional.decode import attention_decode
from ...functional.kv_cache import append_to_cache
from ...masks.mask import Mask
from ...problem.cache import check_no_gradient
from ...problem.checks import check_integers
from ...problem.pages import capacity
from .arguments import check_dimensions, is_local, score_options
from .rotary import Rotary


@overload
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: Literal[False] = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor: ...


@overload
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    *,
    return_softmax_lse: Literal[True],
    s_aux: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention to a key/value cache as `flash_attn.flash_attn_with_kvcache` does.

    New keys and values, if given, are first rotated and written into the cache, in-place, from
    position cache_seqlens on. For inference: no tensor may require grad in grad mode.

    Args:
        q: (batch, seqlen_q, heads, headdim) in float16, bfloat16, float32 or float64; any strides.
        k_cache: (batch_cache, capacity, heads_k, headdim); with `block_table` pages
            (blocks, page_size, heads_k, headdim) of any page_size.
        v_cache: (batch_cache, capacity, heads_k, headdim_v), or pages.
        k: (batch, seqlen_new, heads_k, headdim), new keys.
        v: (batch, seqlen_new, heads_k, headdim_v), new values.
        rotary_cos: (positions, rotary_dim / 2): rotates q and k; needs `k` and `rotary_sin`.
        rotary_sin: (positions, rotary_dim / 2).
        cache_seqlens: int, or (batch,) int32 or int64: positions in use before the call. Default,
            without `k`: the capacity.
        cache_batch_idx: (batch,) int32 or int64: the cache entry of each sequence. Default: its own
            index.
        cache_leftpad: (batch,) int32 or int64: the first position in use. Default: 0.
        block_table: (batch, max_blocks) int32 or int64: position j of sequence b is row
            j % page_size of page block_table[b, j // page_size].
        softmax_scale: factor of q k^T. Default: 1/sqrt(headdim).
        causal: the last query sees every position in use, the query before it one less, and so on.
            Otherwise each query sees all.
        window_size: (left, right): visible keys before and after the diagonal of `causal`; -1 is
            unbounded.
        softcap: bound of the scores, softcap * tanh(scale * q k^T / softcap); 0 is no bound.
        rotary_interleaved: elements 2n and 2n + 1 are rotated together; else n and
            n + rotary_dim / 2.
        alibi_slopes: (heads,) or (batch, heads), float32: a bias by distance from the diagonal.
        num_splits: any int; the kernels choose the number of splits.
        return_softmax_lse: also returns the log-sum-exp of the scores.
        s_aux: (heads,), attention sinks, as in flash_attn 3: one logit per head, added to the
            softmax denominator.

    Returns:
        (batch, seqlen_q, heads, headdim_v) in q's dtype; with `return_softmax_lse` also lse
        (batch, heads, seqlen_q) in float32 (float64 for float64 inputs), natural logarithm. A query
        without a visible key has 0, and lse -inf.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value; only one of two arguments that
            belong together is given; a tensor requires grad in grad mode.

    Source: flash_attn 2.8.4.
    """
    _check(q, k_cache, v_cache, k, v, s_aux, num_splits)
    options = score_options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    mask = options["mask"] or Mask()
    table = _table(block_table, cache_batch_idx, q)
    caches = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    lengths = _lengths(cache_seqlens, q, None if k is not None else capacity(caches[0], table))
    rotary = Rotary.of(rotary_cos, rotary_sin, rotary_interleaved, q)
    if k is not None and v is not None:
        if rotary is not None:
            k = rotary.apply(k, _positions(lengths, k.shape[1], follow=True))
            follow = causal or is_local(window_size)
            q = rotary.apply(q, _positions(lengths, q.shape[1], follow=follow))
        lengths = lengths + k.shape[1]
        append_to_cache(*caches, k.transpose(1, 2), v.transpose(1, 2), lengths, table)
    elif rotary is not None:
        raise ValueError("rotary_cos and rotary_sin need k and v, the tokens to be rotated")
    if cache_leftpad is not None:
        check_integers("cache_leftpad", cache_leftpad, ("batch",), q.shape[0], q)
        mask = mask & Mask.key_range(cache_leftpad, lengths)
    options["mask"] = mask
    q = q.transpose(1, 2)
    if not return_softmax_lse:
        o = attention_decode(q, *caches, lengths, table, sinks=s_aux, **options)
        return o.transpose(1, 2)
    o, lse = attention_decode(q, *caches, lengths, table, sinks=s_aux, **options, return_lse=True)
    return o.transpose(1, 2), lse


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    s_aux: Tensor | None,
    num_splits: int,
) -> None:
    """Raises for other numbers of dimensions, tensors that require grad, or k without v."""
    check_int("num_splits", num_splits)
    check_dimensions("q", q, "batch, seqlen_q, heads, headdim")
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dimensions(name, x, "batch_cache, capacity, heads_k, headdim")
    if (k is None) != (v is None):
        raise ValueError(f"k and v must be given together, got {'v' if k is None else 'k'} alone")
    for name, new in (("k", k), ("v", v)):
        if new is not None:
            check_dimensions(name, new, "batch, seqlen_new, heads_k, headdim")
    check_no_gradient(
        {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "s_aux": s_aux},
        "flash_attn_with_kvcache",
        "or use flash_attn_func",
    )


def _table(block_table: Tensor | None, cache_batch_idx: Tensor | None, q: Tensor) -> Tensor | None:
    """Returns the block table. An entry of the cache is a page, the only one of its sequence."""
    if cache_batch_idx is None:
        if block_table is not None:
            check_integers("block_table", block_table, ("batch", "blocks"), q.shape[0], q)
        return block_table
    if block_table is not None:
        raise ValueError("cache_batch_idx and block_table must not be given together")
    check_integers("cache_batch_idx", cache_batch_idx, ("batch",), q.shape[0], q)
    return cache_batch_idx[:, None]


def _lengths(cache_seqlens: int | Tensor | None, q: Tensor, capacity: int | None) -> Tensor:
    """Returns the positions in use before the call, (batch,); `capacity` is the default."""
    if isinstance(cache_seqlens, Tensor):
        check_integers("cache_seqlens", cache_seqlens, ("batch",), q.shape[0], q)
        return cache_seqlens
    length = capacity if cache_seqlens is None else cache_seqlens
    if length is None:
        raise ValueError("cache_seqlens must be given with k and v, got None")
    check_int("cache_seqlens", length, 0, (1 << 31) - 1, "an int, a tensor of integers or None")
    return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)


def _positions(lengths: Tensor, tokens: int, *, follow: bool) -> Tensor:
    """Returns the positions (batch, tokens) after those in use; the first one for all if they do
    not follow each other."""
    steps = torch.arange(tokens, device=lengths.device) if follow else lengths.new_zeros(tokens)
    return lengths[:, None].long() + steps
