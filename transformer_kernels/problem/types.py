"""Data types of a validated call, which dispatch and the backends share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels.masks.constraints import UNBOUNDED


class TensorArgs(NamedTuple):
    """Optional tensor arguments of a call, in the order of the operator schemas."""

    bias: Tensor | None = None
    """q's dtype or float32, 4-D, broadcastable to (B, H_q, M, N)."""
    alibi_slopes: Tensor | None = None
    """(H_q,) float32; float64 for float64 inputs."""
    seed: Tensor | None = None
    """Scalar int64; present if and only if dropout_p > 0."""
    key_start: Tensor | None = None
    key_end: Tensor | None = None
    q_segments: Tensor | None = None
    k_segments: Tensor | None = None
    dense: Tensor | None = None
    layout: Tensor | None = None
    """key_start to layout are the tensors of `masks.resolved.ResolvedMask`."""
    cu_seqlens_q: Tensor | None = None
    """(B + 1,) int32, contiguous: sequence b has rows cu_seqlens[b] to cu_seqlens[b + 1] - 1. q, k,
    v and their outputs then have one batch entry, which holds the rows of all sequences."""
    cu_seqlens_k: Tensor | None = None
    """The same for k and v; present if and only if cu_seqlens_q is."""


class KVCache(NamedTuple):
    """Key/value cache of a decode call: keys, values, lengths and the optional block table."""

    k: Tensor
    """(B, H_kv, N, D); paged: (pages, H_kv, page_size, D)."""
    v: Tensor
    """(B, H_kv, N, D_v); paged: (pages, H_kv, page_size, D_v)."""
    cache_seqlens: Tensor
    """(B,) int32, contiguous: positions in use. The others may hold any values."""
    block_table: Tensor | None = None
    """(B, max_pages) int32: position j of b is in page block_table[b, j // page_size]. Entries
    after the last page in use may hold any values."""
    alibi_slopes: Tensor | None = None
    """(H_q,) float32; float64 for float64 inputs."""


@dataclass(frozen=True)
class AttentionProblem:
    """Sizes and scalar arguments of one call. Symbols as in docs/attention.md.

    Packed sequences: B is their number, M and N are upper bounds of their lengths, and indices
    count within a sequence. Caches: N is the capacity per sequence.
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
    """0: no softcap."""
    dropout_p: float = 0.0
    diagonal_low: int = -UNBOUNDED
    diagonal_high: int = UNBOUNDED
    block_size: int = 0
    alibi_offset: int = 0
    """d in -slope * |i + d - j|."""
    alibi_slopes_need_grad: bool = False
    bottom_right: bool = False
    """Packed sequences and caches: each sequence adds its own N - M to the diagonals and to
    alibi_offset."""
    is_cached: bool = False
    """True if keys and values are a `KVCache`; each sequence uses its first positions."""
    page_size: int = 0
    """Positions per page of the cache; 0 if it is not paged."""

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """Dtype of softmax statistics and sums: float32, or float64 for float64 inputs."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class SavedForBackward(NamedTuple):
    """Tensors that a fused forward pass saves for its backward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    block_mask: Tensor | None
