"""Packed documents: their segment ids, from positions that start again or from their lengths."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from transformer_kernels import torch_private
from transformer_kernels.masks.mask import Mask

_seen = WeakTensorKeyDictionary()
"""position_ids -> (version, B, mask or None): the layers of a model ask about the same tensor."""


def mask_of_positions(position_ids: Tensor, B: int) -> Mask | None:
    """Returns the segments of packed documents; None if every row is one document.

    Args:
        position_ids: integers (B or 1, M); see `document_ids`.
        B: batch size.
    """
    if torch.compiler.is_compiling():
        return _segments(position_ids, B)
    if position_ids.is_inference():  # has no version
        return _checked(position_ids, B)
    entry = _seen.get(position_ids)
    if entry is None or entry[:2] != (position_ids._version, B):
        entry = (position_ids._version, B, _checked(position_ids, B))
        _seen[position_ids] = entry
    mask: Mask | None = entry[2]
    return mask


def _checked(position_ids: Tensor, B: int) -> Mask | None:
    return _segments(position_ids, B) if are_packed(position_ids) else None


def _segments(position_ids: Tensor, B: int) -> Mask:
    return Mask.segments(document_ids(position_ids).expand(B, -1))


def are_packed(position_ids: Tensor) -> bool:
    """Returns True if a row of positions (B, M) has more than one document."""
    before, after = position_ids[:, :-1], position_ids[:, 1:]
    return bool((after < before).any()) and bool(document_ids(position_ids).any())


def document_ids(position_ids: Tensor) -> Tensor:
    """Returns the document of each token of positions (B, M), from 0 on.

    A document starts where positions go back to the smallest of their row. Positions that jump, or
    that several tokens have, as those of an image may, are of one document.
    """
    start = position_ids.amin(-1, keepdim=True)
    starts = position_ids[:, 1:] == start
    has_several = (starts & (position_ids[:, :-1] > start)).any(-1, keepdim=True)
    first = torch.zeros_like(start)
    return torch.cat([first, (starts & has_several).to(first.dtype).cumsum(-1)], dim=-1)


def mask_of_lengths(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, B: int, M: int, N: int, *, is_causal: bool
) -> Mask:
    """Returns the segments of documents that are packed into B rows.

    Args:
        cu_seqlens_q: int32 or int64 (documents + 1), ascending, from 0 to B M: the first query of
            each document, in rows one after the other, and the number of queries. Each row starts a
            document.
        cu_seqlens_k: the same for the keys, from 0 to B N. Default: `cu_seqlens_q`, if M = N.
        B: batch size.
        M: number of queries.
        N: number of keys.
        is_causal: True for a causal mask, which aligns queries and keys: a document must have as
            many queries as keys.

    Raises:
        ValueError: a document crosses rows; `cu_seqlens_k` is missing, or must not differ.
    """
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
        if M != N:
            raise ValueError(
                f"cu_seq_lens_q needs cu_seq_lens_k for {M} queries and {N} keys, got None"
            )
    elif is_causal and cu_seqlens_k is not cu_seqlens_q:
        same = M == N and cu_seqlens_q.shape == cu_seqlens_k.shape
        equal = (cu_seqlens_q == cu_seqlens_k).all() if same else cu_seqlens_q.new_zeros(())
        _require(equal, "cu_seq_lens_k must equal cu_seq_lens_q in a causal module")
    ids = _rows("cu_seq_lens_q", cu_seqlens_q, B, M)
    if cu_seqlens_k is cu_seqlens_q:
        return Mask.segments(ids)
    return Mask.segments(ids, _rows("cu_seq_lens_k", cu_seqlens_k, B, N))


def _rows(name: str, cu_seqlens: Tensor, B: int, length: int) -> Tensor:
    """Returns the document of each token of B rows."""
    tokens = torch.arange(B * length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    if B > 1:
        is_start = torch.isin(tokens[::length], cu_seqlens).all() & (cu_seqlens[-1] == B * length)
        message = f"{name} must have a boundary at each of the {B} rows of {length} tokens"
        _require(is_start, message)
    return torch.searchsorted(cu_seqlens, tokens, right=True).view(B, length)


def _require(condition: Tensor, message: str) -> None:
    """Raises ValueError if a bool tensor is False; later in compiled code and on a GPU."""
    if torch.compiler.is_compiling() or not condition.is_cpu:
        torch_private.assert_later(condition, message)
    elif not condition:
        raise ValueError(message)
