"""The `attention_decode` operator: attention of a few queries to a long key/value cache."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from torch import Tensor

from ..common.argument_checks import check_bool
from ..common.overrides import is_overridden, overridden
from ..dispatch import fast_path
from ..dispatch.division import check_undivided
from ..dispatch.run import run
from ..masks.mask import Mask
from ..problem.cache import cache_problem, check_no_gradient
from ..problem.checks import scaled_queries
from ..problem.int8_cache import check_scale_values
from ..problem.layout import Layout
from ..scores.alibi import Alibi
from ..scores.relative import Relative
from .signatures import DecodeOptions


@overload
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[DecodeOptions],
) -> Tensor: ...


@overload
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[DecodeOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    *,
    return_lse: bool,
    **options: Unpack[DecodeOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    *,
    mask: Mask | None = None,
    bias: Alibi | None = None,
    relative: Relative | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention of the last M tokens of each sequence to its key/value cache.

    Sequence b has cache_seqlens[b] keys, including those of its last M tokens. Query i is the token
    at position cache_seqlens[b] - M + i; by default it sees the keys up to its own position. The
    caches are read in place, split over keys; positions from cache_seqlens[b] on are not read.
    `append_to_cache` writes new keys and values.

    All sequences have M new tokens; `attention_varlen` with a block table takes different numbers.

    For inference: only the backend "reference" is differentiable. Autocast casts no argument.

    With `k_scale` and `v_scale` the caches are int8, as `quantize_cache` makes them: key j of head
    h is k_scale[b, h, j] * k_cache[b, h, j]. The backends "cpu", "triton" and "reference" support
    them; with relative keys only "reference".

    Args:
        q: queries (B, H_q, M, D) in float16, bfloat16, float32 or float64; any strides. Any M is
            supported; the kernels are optimised for small M.
        k_cache: keys (B, H_kv, N, D) with q's dtype (or int8) and device; any strides. N is the
            capacity of the cache; H_q is a multiple of H_kv (grouped-query and multi-query
            attention). With `block_table`: pages (pages, H_kv, page_size, D) of any page_size; a
            page_size that is a multiple of 16 is read in place; by Triton, every page_size.
        v_cache: values (B, H_kv, N, D_v); with `block_table`, pages (pages, H_kv, page_size, D_v).
        cache_seqlens: (B,) int32 or int64 on q's device: positions in use, including the M new
            tokens. If cache_seqlens[b] < M, the queries at negative positions see no key.
        block_table: (B, max_pages) int32 or int64 on q's device: position j of sequence b is row
            j % page_size of page block_table[b, j // page_size]. Entries after the last page in use
            are ignored.
        mask: windows with align="bottom_right", and key ranges: `Mask.key_range(start, end)` hides
            left padding, which may hold NaN. Default: the causal mask. `Mask()` makes all
            cache_seqlens[b] keys visible to every query.
        bias: `alibi(slopes, align="bottom_right")`, added after scale and softcap.
        relative: `relative_bias` with align="bottom_right", as in `attention`, or `relative_keys`,
            which the backends "cpu", "triton" and "reference" support here.
        scale: factor of q k^T, a number or a tensor with one element. Default: 1/sqrt(D).
        softcap: bound of the scores: softcap * tanh(scale * q k^T / softcap). Default: no bound.
        sinks: attention sinks (H_q,): one logit per head, added to the softmax denominator.
        k_scale: float32 scales of an int8 k_cache, (B, H_kv, N); with `block_table`
            (pages, H_kv, page_size); any strides. Positions that no query sees may hold any values.
        v_scale: likewise of an int8 v_cache. Differentiable in q alone, with backend="reference".
        return_lse: also returns the log-sum-exp of the scores.
        backend: "auto", "cpu", "cuda", "triton" or "reference". A named backend never falls back to
            another one.

    Returns:
        o (B, H_q, M, D_v) in q's dtype; with `return_lse`, the pair (o, lse). lse (B, H_q, M) is
        the natural-log log-sum-exp in float32 (float64 for float64 inputs), including the sinks. A
        row without a visible key has o = 0 and lse = -inf (with sinks, lse = the sink).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value, a tensor requires grad in grad
            mode (unless backend="reference"), or the named backend does not support the call. The
            values of cache_seqlens, block_table and the scales are checked on the CPU only, so that
            the host never waits for a GPU.
        RuntimeError: in compiled code on the CPU, the values of cache_seqlens or block_table are
            out of range, or a scale in use is negative or not finite.

    Source: docs/attention.md, section 6.
    """
    is_plain = bias is None and relative is None and softcap is None and sinks is None
    plain_o = fast_path.plain_attention(
        q, k_cache, v_cache, mask=mask, scale=scale, is_plain=is_plain, return_lse=return_lse,
        backend=backend,
        layout=Layout(  # keywords cost 0.1 us
            None, None, 0, 0, cache_seqlens, block_table, k_scale, v_scale
        ),
    )  # fmt: skip
    if type(plain_o) is Tensor:
        return plain_o
    options: dict[str, Any] = {
        "mask": mask, "bias": bias, "relative": relative, "scale": scale, "softcap": softcap,
        "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip
    cache = q, k_cache, v_cache, cache_seqlens
    if is_overridden(*cache, block_table, bias, relative, scale, sinks, k_scale, v_scale):
        others = {"block_table": block_table, "return_lse": return_lse, "backend": backend}
        return overridden(attention_decode, *cache, **others, **options)
    check_undivided("attention_decode")
    check_bool("return_lse", return_lse)
    if type(backend) is not str or backend != "reference":
        check_no_gradient(
            {"q": q, "k_cache": k_cache, "v_cache": v_cache}
            | {"bias": bias, "relative": relative, "scale": scale, "sinks": sinks}
        )
    q, options["scale"] = scaled_queries(q, scale)
    problem = cache_problem(q, k_cache, v_cache, cache_seqlens, block_table, **options)
    try:
        o, lse = run(problem, q, k_cache, v_cache, sinks=sinks, backend=backend)
    except RuntimeError:
        check_scale_values(problem)  # kernels find bad scales, but do not say where
        raise
    return (o, lse) if return_lse else o
