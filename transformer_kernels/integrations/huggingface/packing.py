"""Packed documents: their segment ids, from positions that start again or from their lengths."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from transformer_kernels.masks.mask import Mask

_seen = WeakTensorKeyDictionary()
"""position_ids -> (version, B, mask or None): the layers of a model ask about the same tensor."""


def mask_of_positions(position_ids: Tensor, B: int) -> Mask | None:
    """Returns the segments of packed documents; None if every row is one document.

    A document ends where the next position is not the following number, as in
    `transformers.masking_utils.find_packed_sequence_indices`.

    Args:
        position_ids: integers (B or 1, M).
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


def mask_of_lengths(cu_seqlens: Tensor, M: int) -> Mask:
    """Returns the segments of one row of M tokens.

    Args:
        cu_seqlens: int32 or int64 (documents + 1), ascending: the first token of each document, and
            the number of tokens.
        M: number of tokens.
    """
    tokens = torch.arange(M, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return Mask.segments(torch.searchsorted(cu_seqlens, tokens, right=True)[None])


def _checked(position_ids: Tensor, B: int) -> Mask | None:
    return _segments(position_ids, B) if are_packed(position_ids) else None


def _segments(position_ids: Tensor, B: int) -> Mask:
    return Mask.segments(document_ids(position_ids).expand(B, -1))


def are_packed(position_ids: Tensor) -> bool:
    """Returns True if a row of positions (B, M) has more than one document."""
    return bool((position_ids[:, 1:] - position_ids[:, :-1] != 1).any())


def document_ids(position_ids: Tensor) -> Tensor:
    """Returns the document of each token of positions (B, M), from 0 on."""
    first = torch.zeros_like(position_ids[:, :1])
    starts = position_ids[:, 1:] - position_ids[:, :-1] != 1
    return torch.cat([first, starts.to(first.dtype).cumsum(-1)], dim=-1)
