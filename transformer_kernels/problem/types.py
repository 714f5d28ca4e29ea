"""One attention call, validated: what dispatch decides on and what a backend is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels.masks.resolved import UNBOUNDED


class TensorArgs(NamedTuple):
    """The optional tensors of a call, in the order in which operators take them."""

    bias: Tensor | None = None
    """q's dtype or float32; each dimension 1 or that of (B, H_q, M, N)"""
    alibi_slopes: Tensor | None = None
    """(H_q,) float32, or float64 for float64 inputs"""
    seed: Tensor | None = None
    """() int64; present exactly where dropout_p > 0"""
    key_start: Tensor | None = None
    key_end: Tensor | None = None
    q_segments: Tensor | None = None
    k_segments: Tensor | None = None
    dense: Tensor | None = None
    layout: Tensor | None = None
    """The last six: see `bound_mask.ResolvedMask`."""
    cu_seqlens_q: Tensor | None = None
    """(B + 1,) int32, contiguous: sequence b has rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1. With
    it q, k, v and what belongs to them have one batch entry, which holds the rows of all."""
    cu_seqlens_k: Tensor | None = None
    """The same for k and v; present exactly where cu_seqlens_q is."""


class KVCache(NamedTuple):
    """Keys and values that a model has kept, with room for more, and what tells where they are."""

    k: Tensor
    """(B, H_kv, N, D), or in pages: (pages, H_kv, page_size, D)"""
    v: Tensor
    """the same, D_v wide"""
    cache_seqlens: Tensor
    """(B,) int32, contiguous: the positions that are in use; the others may hold anything"""
    block_table: Tensor | None = None
    """(B, most pages) int32: position j of b is in page block_table[b, j // page_size]. Entries
    behind the last one in use may be anything."""
    alibi_slopes: Tensor | None = None
    """As in `TensorArgs`"""


@dataclass(frozen=True)
class AttentionProblem:
    """Sizes and numbers of one call. Symbols as in docs/attention.md.

    Of packed sequences B is their number, M and N are the lengths of the longest, and every index
    counts within a sequence. Of a cache N is the most keys that it holds of a sequence.
    """

    B: int
    H_q: int
    H_kv: int
    M: int
    N: int
    D: int
    D_v: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    softcap: float = 0.0
    """0 = none"""
    dropout_p: float = 0.0
    diagonal_low: int = -UNBOUNDED
    diagonal_high: int = UNBOUNDED
    block_size: int = 0
    alibi_offset: int = 0
    """d in -slope * |i + d - j|"""
    alibi_slopes_need_grad: bool = False
    bottom_right: bool = False
    """Of packed sequences and caches: diagonals and alibi_offset are to be moved by each sequence's
    own N - M."""
    is_cached: bool = False
    """Keys and values are a `KVCache`, of whose N positions each sequence uses its first ones."""
    page_size: int = 0
    """Positions in a page of the cache; 0 where it has no pages"""

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """The dtype of softmax statistics and of sums: float32, float64 for float64."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class SavedForBackward(NamedTuple):
    """What a fused forward pass leaves for its backward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    block_mask: Tensor | None
