"""Memory layout of a call: where the rows of each sequence are."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from torch import Tensor

LayoutKind = Literal["dense", "varlen", "cache"]


class Layout(NamedTuple):
    """Layout of q, k and v. Annotations give shapes and layouts: see `problem.fields`.

    - dense: q (B, H_q, M, D), k and v (B, H_kv, N, width).
    - varlen: packed sequences. q, k and v have one batch entry, which holds the rows of all
      sequences; sequence b has the rows cu_seqlens[b] to cu_seqlens[b + 1] - 1. With a block table
      k and v are pages as of a cache, and sequence b has cu_seqlens_k[b + 1] - cu_seqlens_k[b]
      keys.
    - cache: q (B, H_q, M, D), k and v (B, H_kv, capacity, width), or with a block table
      (pages, H_kv, page_size, width). Sequence b has cache_seqlens[b] keys.
    """

    cu_seqlens_q: Annotated[Tensor | None, "(S + 1)", "varlen"] = None
    """int32, contiguous."""
    cu_seqlens_k: Annotated[Tensor | None, "(S + 1)", "varlen"] = None
    max_seqlen_q: Annotated[int, "", "varlen"] = 0
    max_seqlen_k: Annotated[int, "", "varlen"] = 0
    cache_seqlens: Annotated[Tensor | None, "(B)", "cache"] = None
    """int32, contiguous: positions in use. The others may hold any values."""
    block_table: Annotated[Tensor | None, "(S, pages)", "varlen cache"] = None
    """int32: position j of b is in page block_table[b, j // page_size]. Entries after the last page
    in use may hold any values."""
    k_scale: Annotated[Tensor | None, "(entries, H_kv, positions)", "cache"] = None
    """float32, any strides, with entries and positions as in k: k and v are int8, and key j of head
    h is k_scale[b, h, j] k[b, h, j]. Positions not in use may hold any values."""
    v_scale: Annotated[Tensor | None, "(entries, H_kv, positions)", "cache"] = None

    @property
    def kind(self) -> LayoutKind:
        if self.cu_seqlens_q is not None:
            return "varlen"
        return "dense" if self.cache_seqlens is None else "cache"

    @property
    def has_packed_pages(self) -> bool:
        """True for packed queries of keys in pages."""
        return self.cu_seqlens_q is not None and self.block_table is not None


DENSE = Layout()
