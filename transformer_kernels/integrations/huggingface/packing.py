"""Packed documents: their segment ids, from positions that start again or from their lengths."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...common import torch_private
from ...masks.mask import Mask


def mask_of_positions(position_ids: Tensor, tokens: Tensor | None, B: int) -> Mask | None:
    """Returns the segments of packed documents; None if every row is one document.

    Args:
        position_ids: integers (B or 1, M); see `document_ids`.
        tokens: padding mask, bool (B, M).
        B: batch size.
    """
    ids = document_ids(position_ids, tokens)
    if not torch.compiler.is_compiling() and not ids.any():
        return None
    return Mask.segments(ids.expand(B, -1))


def document_ids(position_ids: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Returns the document of each token, from 0 on; (B or 1, M).

    A document starts where positions go back to the smallest of their row. Positions that jump, or
    that several tokens have, as those of an image may, are of one document.

    Args:
        position_ids: integers (B or 1, M).
        tokens: padding mask, bool (B, M); True = a token. The positions of others do not count.
    """
    if tokens is not None:
        largest = position_ids.amax(-1, keepdim=True)
        position_ids = torch.where(tokens, position_ids, largest)
    start = position_ids.amin(-1, keepdim=True)
    starts = position_ids == start
    if tokens is not None:
        position_ids = torch.where(tokens, position_ids, start)
    # A row goes back if a later token is at the start: else its first tokens share a position.
    starts = starts[:, 1:]
    goes_back = starts & (position_ids.cummax(-1).values[:, :-1] > start)
    starts = starts & goes_back.any(-1, keepdim=True)
    return functional.pad(starts.to(position_ids.dtype).cumsum(-1), (1, 0))


def boundaries(ids: Tensor) -> Tensor:
    """Returns where documents start in the rows one after the other, and the number of tokens.

    Each row starts a document.

    Args:
        ids: the document of each token, integers (B, M).

    Returns:
        int32 (documents + 1).
    """
    starts = functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
    index = starts.flatten().nonzero().flatten().to(torch.int32)
    return functional.pad(index, (0, 1), value=ids.numel())


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="linear layers look for packed documents in position_ids: pass cu_seq_lens_q instead"
)
def boundaries_of_positions(position_ids: Tensor, tokens: Tensor | None, B: int) -> Tensor | None:
    """Returns `boundaries` by positions; None if every row is one document.

    Args:
        position_ids: integers (B or 1, M); see `document_ids`.
        tokens: padding mask, bool (B, M).
        B: batch size.
    """
    ids = document_ids(position_ids, tokens)
    return boundaries(ids.expand(B, -1)) if ids.any() else None


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
    check_rows(name, cu_seqlens, B, length)
    tokens = torch.arange(B * length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, tokens, right=True).view(B, length)


def check_rows(name: str, cu_seqlens: Tensor, B: int, length: int) -> None:
    """Raises ValueError unless each of B rows starts a document."""
    if B > 1:
        rows = torch.arange(B, device=cu_seqlens.device, dtype=cu_seqlens.dtype) * length
        is_start = torch.isin(rows, cu_seqlens).all() & (cu_seqlens[-1] == B * length)
        message = f"{name} must have a boundary at each of the {B} rows of {length} tokens"
        _require(is_start, message)


def _require(condition: Tensor, message: str) -> None:
    """Raises ValueError if a bool tensor is False; later in compiled code and on a GPU."""
    if torch.compiler.is_compiling() or not condition.is_cpu:
        torch_private.assert_later(condition, message)
    elif not condition:
        raise ValueError(message)
