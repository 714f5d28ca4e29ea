"""`attention_decode`: few queries against a long cache of keys and values, split over its keys."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from transformer_kernels.dispatch import fast_path
from transformer_kernels.dispatch.autocast import without_autocast
from transformer_kernels.dispatch.autograd import decode
from transformer_kernels.dispatch.choose import choose
from transformer_kernels.masks.mask import Mask
from transformer_kernels.problem.decode import build_decode_problem, check_no_gradient
from transformer_kernels.scores.alibi import Alibi
from transformer_kernels.scores.sinks import join_sinks


@overload
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    *,
    mask: Mask | None = None,
    bias: Alibi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...


@overload
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    *,
    mask: Mask | None = None,
    bias: Alibi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    *,
    mask: Mask | None = None,
    bias: Alibi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each sequence's last M tokens to its cached keys and values.

    Sequence b has cache_seqlens[b] keys, including those of its last M tokens: query i is the token
    at position cache_seqlens[b] - M + i and sees the keys up to its own. Positions from
    cache_seqlens[b] on are not read. `append_to_cache` writes new keys and values. For inference:
    the caches are read in place, and only the backend "reference" is differentiable.

    Args:
        q: queries (B, H_q, M, D) of the last M tokens; float16, bfloat16, float32 or float64, any
            strides. Any M works, few are fast.
        k_cache: keys (B, H_kv, N, D), same dtype and device, any strides; H_q is a multiple of
            H_kv (GQA, MQA), N the positions that there is room for. With a block table pages of
            keys (pages, H_kv, page_size, D), of any size; multiples of 16 are read in place.
        v_cache: values (B, H_kv, N, D_v), or pages (pages, H_kv, page_size, D_v).
        cache_seqlens: (B,) int32 or int64 on q's device: the number of positions in use, including
            the new tokens. Queries at negative positions (cache_seqlens[b] < M) see no key.
        block_table: (B, most pages) int32 or int64: position j of sequence b is row j % page_size
            of page block_table[b, j // page_size]. Entries behind the last page in use may be
            anything.
        mask: windows with align="bottom_right", instead of the causal mask that None stands for:
            `Mask.window(left, 0, align="bottom_right")` is causal too; `Mask()` shows every query
            all cache_seqlens[b] keys. With M = 1 it and None are the same.
        bias: `alibi(slopes, align="bottom_right")`.
        scale: multiplies q k^T; 1/sqrt(D) unless given.
        softcap: scores become softcap * tanh(score / softcap), before the bias.
        sinks: (H_q,) a logit a head that joins the softmax's denominator.
        return_lse: also return log sum exp of the scores (natural log), float32 (float64 for
            float64) (B, H_q, M); -inf in rows with no visible key. With sinks it includes them.
        backend: "auto", or the name of one backend, which then runs or raises.

    Returns:
        o (B, H_q, M, D_v) in q's dtype, or (o, lse). Rows with no visible key are 0.

    Raises:
        TypeError, ValueError: an argument is not as above, something requires grad in grad mode
            (unless backend="reference"), or the named backend does not support the call. On a GPU
            the values of cache_seqlens and block_table are not checked, so that the host never
            waits for the device; in compiled code the kernels check them.

    Autocast casts nothing here: caches are large, and q has their dtype.

    Source: docs/attention.md, section 6.
    """
    if (
        bias is None
        and softcap is None
        and sinks is None
        and not return_lse
        and backend in ("auto", "cpu")
    ):
        plain_o = fast_path.decode(q, k_cache, v_cache, cache_seqlens, block_table, mask, scale)
        if plain_o is not None:
            return plain_o
    if backend != "reference":
        check_no_gradient(
            {"q": q, "k_cache": k_cache, "v_cache": v_cache, "bias": bias, "sinks": sinks}
        )
    problem, cache = build_decode_problem(
        q, k_cache, v_cache, cache_seqlens, block_table, mask, bias, scale, softcap, sinks
    )
    chosen = choose(problem, backend)
    with without_autocast(q.device.type):
        o, lse = decode(chosen, q, cache, problem)
    if sinks is not None:
        o, lse = join_sinks(o, lse, sinks)
    return (o, lse) if return_lse else o
