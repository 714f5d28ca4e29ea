"""The `append_to_cache` function, which updates the caches that `attention_decode` reads."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.argument_checks import check_tensor, is_inference, values_are_readable
from ..common.storage import check_storage
from ..common.torch_private import is_batched
from ..problem.cache import check_cache
from ..problem.checks import DTYPES

_NAMES = ("k", "k_cache", "v_cache")


def append_to_cache(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
) -> None:
    """Writes the keys and values of the last M tokens of each sequence into the caches, in-place.

    Token i of sequence b is written to position cache_seqlens[b] - M + i.

    Args:
        k_cache: key cache (B, H_kv, N, D), or pages (pages, H_kv, page_size, D) with `block_table`.
        v_cache: value cache (B, H_kv, N, D_v), or pages (pages, H_kv, page_size, D_v).
        k: keys (B, H_kv, M, D) of the new tokens, with the caches' dtype and device.
        v: values (B, H_kv, M, D_v) of the new tokens, with the caches' dtype and device.
        cache_seqlens: (B,) int32 or int64: positions in use after the call, including the M new
            tokens; at least M and at most the capacity of the cache.
        block_table: (B, max_pages) int32 or int64: position j of sequence b is row j % page_size of
            page block_table[b, j // page_size].

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value. On a GPU, in compiled code
            and inside `vmap` the values of cache_seqlens and block_table are not checked.

    Source: docs/attention.md, section 6.
    """
    cache_seqlens, block_table = check_cache(
        k, k_cache, v_cache, cache_seqlens, block_table, _NAMES
    )
    check_tensor("v", v, DTYPES)
    check_storage((("v", v),))
    if v.shape != (*k.shape[:3], v_cache.shape[3]) or k.shape[1] != k_cache.shape[1]:
        raise ValueError(
            "k and v must be (B, H_kv, M, D) and (B, H_kv, M, D_v) with the caches' heads and "
            f"widths, got k {tuple(k.shape)}, v {tuple(v.shape)}, k_cache {tuple(k_cache.shape)}, "
            f"v_cache {tuple(v_cache.shape)}"
        )
    if v.dtype != k.dtype:
        raise TypeError(f"k and v must share a dtype, got k {k.dtype}, v {v.dtype}")
    B, _, M, _ = k.shape
    if v.device != k.device:
        raise ValueError(f"v is on {v.device}, k is on {k.device}")
    given = [k, v, cache_seqlens] if block_table is None else [k, v, cache_seqlens, block_table]
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_writable(name, cache)
        if any(map(is_batched, given)) and not is_batched(cache):
            raise ValueError(
                f"{name} must be batched inside vmap, like the other arguments, because it is "
                "written in-place"
            )
    if values_are_readable(cache_seqlens):
        for b, length in enumerate(cache_seqlens.tolist()):
            if length < M:
                raise ValueError(f"cache_seqlens must be at least M = {M}, got {length} at {b}")
    position = cache_seqlens[:, None].long() - M + torch.arange(M, device=cache_seqlens.device)
    if block_table is None:
        page, row = torch.arange(B, device=cache_seqlens.device)[:, None], position
    else:
        page = block_table.long().gather(1, position // k_cache.shape[2])
        row = position % k_cache.shape[2]
    k_cache[page, :, row] = k.transpose(1, 2)
    v_cache[page, :, row] = v.transpose(1, 2)


def _check_writable(name: str, cache: Tensor) -> None:
    """Raises ValueError for a cache that torch cannot write in-place."""
    if torch.is_grad_enabled() and cache.requires_grad and cache.is_leaf:
        raise ValueError(
            f"{name} must not require grad, because it is written in-place: call append_to_cache "
            "under torch.no_grad()"
        )
    if is_inference(cache) and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} was made in inference mode, and can be written only in inference mode"
        )
    if any(size > 1 and step == 0 for size, step in zip(cache.shape, cache.stride(), strict=True)):
        raise ValueError(
            f"{name} must have memory for each of its elements, got shape {tuple(cache.shape)} "
            f"with strides {cache.stride()}"
        )
