"""Functions that write the caches of `attention_decode`: `append_to_cache`, `quantize_cache`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..common.argument_checks import check_tensor, is_inference, values_are_readable
from ..common.storage import check_storage
from ..common.torch_private import is_batched
from ..problem.cache import check_cache
from ..problem.checks import DTYPES, check_alike
from ..problem.int8_cache import quantized

_NAMES = ("k", "k_cache", "v_cache")
_DIMENSIONS = ("B", "H_kv", "N", "width")


class QuantizedCache(NamedTuple):
    """A key/value cache in int8, in the order of the arguments of `attention_decode`."""

    k: Tensor
    """(B, H_kv, N, D) int8, or pages."""
    v: Tensor
    """(B, H_kv, N, D_v) int8, or pages."""
    k_scale: Tensor
    """(B, H_kv, N) float32: key j of head h is about k_scale[b, h, j] * k[b, h, j]."""
    v_scale: Tensor
    """(B, H_kv, N) float32, likewise."""


def quantize_cache(k: Tensor, v: Tensor) -> QuantizedCache:
    """Rounds keys and values to int8, with a scale for each token and head.

    The scale is the largest magnitude of the row divided by 127 (at least 2^-126; 0 for a row of
    zeros), and elements are rounded to the nearest multiple of it, ties to even.

    Args:
        k: keys (B, H_kv, N, D) in float16, bfloat16, float32 or float64, or pages
            (pages, H_kv, page_size, D); any strides.
        v: values (B, H_kv, N, D_v), or pages (pages, H_kv, page_size, D_v), like k.

    Returns:
        `QuantizedCache` (k, v, k_scale, v_scale), for `attention_decode`.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: k or v has the wrong shape or device, or a value that is not finite. On a GPU
            and in compiled code values are not checked.

    Source: docs/attention.md, section 6.
    """
    check_alike((("k", k), ("v", v)), (_DIMENSIONS, _DIMENSIONS))
    if k.shape[:3] != v.shape[:3] or 0 in (k.shape[3], v.shape[3]):
        raise ValueError(
            "k and v must be (B, H_kv, N, D) and (B, H_kv, N, D_v), with widths of at least 1, "
            f"got k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    (k, k_scale), (v, v_scale) = quantized("k", k.detach()), quantized("v", v.detach())
    return QuantizedCache(k, v, k_scale, v_scale)


def append_to_cache(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes the keys and values of the last M tokens of each sequence into the caches, in-place.

    Token i of sequence b is written to position cache_seqlens[b] - M + i. With `k_scale` and
    `v_scale` the caches are int8, and the tokens are quantised as by `quantize_cache`.

    Args:
        k_cache: key cache (B, H_kv, N, D), or pages (pages, H_kv, page_size, D) with `block_table`.
        v_cache: value cache (B, H_kv, N, D_v), or pages (pages, H_kv, page_size, D_v).
        k: keys (B, H_kv, M, D) of the new tokens, with the caches' dtype and device.
        v: values (B, H_kv, M, D_v) of the new tokens, with the caches' dtype and device.
        cache_seqlens: (B,) int32 or int64: positions in use after the call, including the M new
            tokens; at least M and at most the capacity of the cache.
        block_table: (B, max_pages) int32 or int64: position j of sequence b is row j % page_size of
            page block_table[b, j // page_size]. No two new tokens may have one place.
        k_scale: float32 scales of an int8 k_cache, (B, H_kv, N) or (pages, H_kv, page_size), which
            are written too.
        v_scale: those of an int8 v_cache.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value, such as NaN that is to be
            quantised. On a GPU, in compiled code and inside `vmap` values are not checked.

    Source: docs/attention.md, section 6.
    """
    cache_seqlens, block_table = check_cache(
        k, k_cache, v_cache, cache_seqlens, block_table, _NAMES, (k_scale, v_scale)
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
    caches = {"k_cache": k_cache, "v_cache": v_cache, "k_scale": k_scale, "v_scale": v_scale}
    for name, cache in caches.items():
        if cache is None:
            continue
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
        _check_distinct(page, row, k_cache.shape[2])
    if k_scale is not None and v_scale is not None:
        (k, new_k_scale), (v, new_v_scale) = quantized("k", k), quantized("v", v)
        k_scale[page, :, row] = new_k_scale.transpose(1, 2)
        v_scale[page, :, row] = new_v_scale.transpose(1, 2)
    k_cache[page, :, row] = k.transpose(1, 2)
    v_cache[page, :, row] = v.transpose(1, 2)


def _check_distinct(page: Tensor, row: Tensor, page_size: int) -> None:
    """Raises ValueError if two new tokens, at the rows (B, M) of pages, have one place."""
    if not values_are_readable(page) or page.numel() < 2:
        return
    place = (page * page_size + row).flatten().sort().values
    twice = place[1:][place[1:] == place[:-1]]
    if len(twice):
        n, r = divmod(int(twice[0]), page_size)
        raise ValueError(
            f"block_table must give new tokens different places, got row {r} of page {n} twice"
        )


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
