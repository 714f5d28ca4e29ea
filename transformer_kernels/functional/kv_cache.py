"""Writing to the caches that `attention_decode` reads."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.problem.decode import check_cache

_NAMES = ("k", "k_cache", "v_cache")


def append_to_cache(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
) -> None:
    """Writes the keys and values of each sequence's last M tokens, in place.

    Args:
        k_cache: as `attention_decode` takes it.
        v_cache: likewise.
        k: (B, H_kv, M, D) in the caches' dtype.
        v: (B, H_kv, M, D_v).
        cache_seqlens: (B,) as for `attention_decode`, including these M tokens: token i goes to
            position cache_seqlens[b] - M + i. At least M.
        block_table: as `attention_decode` takes it.

    Raises:
        TypeError, ValueError: an argument is not as above. On a GPU, and in compiled code, the
            values of cache_seqlens and block_table are not looked at.
    """
    check_cache(k, k_cache, v_cache, cache_seqlens, block_table, _NAMES)
    if v.shape != (*k.shape[:3], v_cache.shape[3]) or k.shape[1] != k_cache.shape[1]:
        raise ValueError(
            "k and v must be (B, H_kv, M, D) and (B, H_kv, M, D_v) of the caches' heads and "
            f"widths, got k {tuple(k.shape)}, v {tuple(v.shape)}, k_cache {tuple(k_cache.shape)}, "
            f"v_cache {tuple(v_cache.shape)}"
        )
    if v.dtype != k.dtype:
        raise TypeError(f"k and v must share a dtype, got k {k.dtype}, v {v.dtype}")
    B, _, M, _ = k.shape
    if cache_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
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
