"""The bias classes of xFormers, by name, constructor and fields: which keys each query sees.

Classes of causal masks and windows differ in the diagonal: that of "top_left" begins at the first
query and the first key of each sequence, that of "bottom_right" ends at the last ones.

A device of None is CUDA if there is one, else the CPU, as in xFormers.

Source: xFormers 0.0.35, xformers/ops/fmha/attn_bias.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from ...common.argument_checks import INDICES, check_int, check_tensor, shown
from .base import AttentionBias, Device, PackedBias, SeqLenInfo, check_same_number

_Paged = TypeVar("_Paged", bound="PagedBlockDiagonalPaddedKeysMask")


class LowerTriangularMask(AttentionBias):
    """Causal mask, top-left aligned. `device` has no effect, as in xFormers."""

    align, is_causal = "top_left", True

    def __init__(self, device: Device = None) -> None: ...

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(bias)


@dataclass(init=False, eq=False)
class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Causal mask, top-left aligned, and a tensor (B, H, M, N) that is added to the scores."""

    _bias: Tensor

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal mask, bottom-right aligned."""

    is_causal = True

    def make_local_attention(
        self, window_size: int
    ) -> LowerTriangularFromBottomRightLocalAttentionMask:
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal window of `_window_size` keys, bottom-right aligned."""

    _window_size: int

    def __post_init__(self) -> None:
        check_int("window_size", self._window_size, 1)


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """Window of window_left keys, the diagonal's and window_right ones, bottom-right aligned."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        check_int("window_left", self.window_left, 0)
        check_int("window_right", self.window_right, 0)


@dataclass
class BlockDiagonalMask(PackedBias):
    """Sequences packed into one row, for queries and keys (1, total, ...), without padding.

    Examples:
        >>> attn_bias, x = BlockDiagonalMask.from_tensor_list([x0, x1])
        >>> o0, o1 = attn_bias.split(memory_efficient_attention(x, x, x, attn_bias))
    """

    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int] | None = None,
        *,
        device: Device = None,
    ) -> Self:
        """Makes the mask of these lengths; keys have those of queries by default."""
        q_info = k_info = SeqLenInfo.from_seqlens(q_seqlen, device=device, name="q_seqlen")
        if kv_seqlen is not None and kv_seqlen != q_seqlen:
            k_info = SeqLenInfo.from_seqlens(kv_seqlen, device=device, name="kv_seqlen")
        check_same_number(q_info, k_info)
        return cls(q_info, k_info)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[Self, Tensor]:
        """Returns the mask of tensors (b, length, ...), and them in one row (1, total, ...)."""
        mask = cls.from_seqlens(_lengths_of(tensors), device=tensors[0].device)
        mask._batch_sizes = [x.shape[0] for x in tensors]
        return mask, _in_one_row(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[Tensor],
        tensors_k: Sequence[Tensor],
        tensors_v: Sequence[Tensor] | None = None,
    ) -> tuple[Self, Tensor, Tensor, Tensor | None]:
        """As `from_tensor_list`, with keys of other lengths."""
        lengths = _lengths_of(tensors_q), _lengths_of(tensors_k)
        mask = cls.from_seqlens(*lengths, device=tensors_q[0].device)
        mask._batch_sizes = [x.shape[0] for x in tensors_q]
        v = None if tensors_v is None else _in_one_row(tensors_v)
        return mask, _in_one_row(tensors_q), _in_one_row(tensors_k), v

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Undoes `from_tensor_list`."""
        if self.q_seqinfo.seqstart_py != self.k_seqinfo.seqstart_py:
            raise ValueError("queries and keys differ in length: use split_queries or split_kv")
        return self.split_queries(tensor)

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(*self._fields())

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return BlockDiagonalCausalFromBottomRightMask(*self._fields())

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        return BlockDiagonalCausalLocalAttentionMask(*self._fields(), window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(*self._fields(), window_size)

    def _fields(self) -> tuple[SeqLenInfo, SeqLenInfo, Sequence[int] | None]:
        return self.q_seqinfo, self.k_seqinfo, self._batch_sizes


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Packed sequences, causal, top-left aligned."""

    align, is_causal = "top_left", True


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Packed sequences, causal, bottom-right aligned."""

    is_causal = True


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """Packed sequences, a causal window of `_window_size` keys, top-left aligned."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        check_int("window_size", self._window_size, 1)


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """Packed sequences, a causal window of `_window_size` keys, bottom-right aligned."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        check_int("window_size", self._window_size, 1)


@dataclass
class BlockDiagonalPaddedKeysMask(PackedBias):
    """Packed queries, and a cache: keys and values (1, B * kv_padding, ...), in use at the start of
    each part of kv_padding rows. The others may hold anything."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: Device = None,
    ) -> Self:
        """Makes the mask of these lengths; causal_diagonal has no effect, as in xFormers."""
        return cls(*_padded_infos(q_seqlen, kv_padding, kv_seqlen, device))

    def make_paged(self, block_tables: Tensor, page_size: int, paged_type: type[_Paged]) -> _Paged:
        """Returns the mask of the same lengths for keys in pages."""
        k_info = replace(self.k_seqinfo, padding=_capacity(block_tables, page_size))
        return paged_type(self.q_seqinfo, k_info, block_tables, page_size)

    def make_local_attention(
        self, window_left: int, window_right: int
    ) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        return BlockDiagonalLocalAttentionPaddedKeysMask(
            self.q_seqinfo, self.k_seqinfo, window_left, window_right
        )


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Packed queries and a cache, causal, bottom-right aligned."""

    is_causal = True
    causal_diagonal: Any = None


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Packed queries and a cache, a window as that of `LocalAttentionFromBottomRightMask`."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        check_int("window_left", self.window_left, 0)
        check_int("window_right", self.window_right, 0)

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
    ) -> Self:
        infos = _padded_infos(q_seqlen, kv_padding, kv_seqlen, None)
        return cls(*infos, window_left, window_right)


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Packed queries and a cache, a causal window of `_window_size` keys, bottom-right aligned."""

    _window_size: int

    def __post_init__(self) -> None:
        check_int("window_size", self._window_size, 1)

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_size: int
    ) -> Self:
        return cls(*_padded_infos(q_seqlen, kv_padding, kv_seqlen, None), window_size)


@dataclass
class PagedBlockDiagonalPaddedKeysMask(PackedBias):
    """Packed queries, and keys and values in pages of one row (1, pages * page_size, ...).

    Key j of sequence b is row j % page_size of page block_tables[b, j // page_size].
    """

    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo
    block_tables: Tensor
    page_size: int

    def __post_init__(self) -> None:
        capacity = _capacity(self.block_tables, self.page_size)
        B, longest = len(self.k_seqinfo.seqstart_py) - 1, self.k_seqinfo.max_seqlen
        if self.block_tables.shape[0] != B or capacity < longest:
            raise ValueError(
                f"block_tables must be ({B}, pages), with room for {longest} keys, "
                f"got {shown(self.block_tables)} of pages of {self.page_size}"
            )

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: Device = None,
    ) -> Self:
        """Makes the mask of these lengths, and block_tables (B, pages of a sequence) integers."""
        capacity = _capacity(block_tables, page_size)
        infos = _padded_infos(q_seqlen, capacity, kv_seqlen, device)
        return cls(*infos, block_tables, page_size)

    def _key_rows(self) -> tuple[list[Tensor], int, int]:
        tables, size = self.block_tables.cpu().long(), self.page_size
        lengths = [end - start for start, end in self.k_seqinfo.intervals()]
        rows = (tables[..., None] * size + torch.arange(size)).flatten(1)
        own = [row[:n] for row, n in zip(rows, lengths, strict=True)]
        return own, rows.numel(), (int(tables.max()) + 1) * size


@dataclass
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """Packed queries and pages, causal, bottom-right aligned."""

    is_causal = True


@dataclass
class PagedBlockDiagonalCausalLocalPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """Packed queries and pages, a causal window of `_window_size` keys, bottom-right aligned."""

    _window_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("window_size", self._window_size, 1)

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        window_size: int,
        *,
        device: Device = None,
    ) -> Self:
        capacity = _capacity(block_tables, page_size)
        infos = _padded_infos(q_seqlen, capacity, kv_seqlen, device)
        return cls(*infos, block_tables, page_size, window_size)


def _padded_infos(
    q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], device: Device
) -> tuple[SeqLenInfo, SeqLenInfo]:
    q_info = SeqLenInfo.from_seqlens(q_seqlen, device=device, name="q_seqlen")
    k_info = SeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device, name="kv_seqlen")
    check_same_number(q_info, k_info)
    return q_info, k_info


def _capacity(block_tables: Tensor, page_size: int) -> int:
    """Returns the most keys of a sequence."""
    check_tensor("block_tables", block_tables, INDICES)
    if block_tables.dim() != 2:
        raise ValueError(f"block_tables must be (B, pages), got {shown(block_tables)}")
    check_int("page_size", page_size, 1)
    return block_tables.shape[1] * page_size


def _lengths_of(tensors: Sequence[Tensor]) -> list[int]:
    return [x.shape[1] for x in tensors for _ in range(x.shape[0])]


def _in_one_row(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(1, -1, *x.shape[2:]) for x in tensors], dim=1)
