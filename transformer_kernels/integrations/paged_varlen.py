"""Packed queries of keys and values in pages, as the interfaces of flash-attn have them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..common.argument_checks import values_are_readable
from ..functional.decode import attention_decode
from ..functional.varlen import attention_varlen
from ..masks.mask import Mask
from ..problem.pages import capacity, check_block_table
from ..problem.varlen import check_cu_seqlens, longest

_ROWS = 16
"""On a GPU, the most queries of a sequence, and rows of padding on average: more would take longer
than a copy of the keys."""


def attend_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_table: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    mask: Mask | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Returns (o, lse) of `attention_varlen`.

    `attention_decode` runs if all sequences have max_seqlen_q queries, or on a GPU after padding to
    that number, if it is small. Else `attention_varlen` runs, which reads pages in place on a CPU,
    and copies those in use on a GPU and for a gradient.

    Args:
        q: (total_q, H_q, D).
        k_pages: (pages, page_size, H_kv, D).
        v_pages: (pages, page_size, H_kv, D_v).
        cu_seqlens_q: (B + 1,).
        cu_seqlens_k: (B + 1,), cumulative numbers of keys in use.
        block_table: (B, max_pages).
        max_seqlen_q: upper bound of the query lengths.
        max_seqlen_k: upper bound of the key lengths.
        dropout_p: dropout probability.
        mask: windows with align="bottom_right".
        options: `bias`, `scale`, `softcap`, `sinks` and `backend`.
    """
    pages = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
    starts = check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device)
    M, B = longest("q", starts, q.shape[0], max_seqlen_q), starts.shape[0] - 1
    ends = check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q.device)
    check_block_table(block_table, B, q, pages[0])
    longest("k", ends, B * capacity(pages[0], block_table), max_seqlen_k)
    is_even = _have_length(starts, q.shape[0], M)
    is_short = q.device.type != "cpu" and M <= _ROWS and q.shape[0] >= B * (M - _ROWS)
    needs_grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k_pages, v_pages, options.get("sinks"))
    )
    if B * M > 0 and (is_even or is_short) and not needs_grad and dropout_p == 0.0:
        padded = q.view(B, M, *q.shape[1:]) if is_even else _padded(q, starts, M)
        o, lse = attention_decode(
            padded.transpose(1, 2), *pages, ends.diff(), block_table,
            mask=Mask() if mask is None else mask, **options, return_lse=True,
        )  # fmt: skip
        o, lse = o.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).contiguous().flatten(1)
        return (o, lse) if is_even else _packed(o, lse, starts, M, q.shape[0])
    result: tuple[Tensor, Tensor] = attention_varlen(
        q, *pages, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        block_table=block_table, dropout_p=dropout_p, mask=mask, **options, return_lse=True,
    )  # fmt: skip
    return result


def _padded(q: Tensor, starts: Tensor, M: int) -> Tensor:
    """Returns (B, M, H_q, D): the queries of each sequence last, zeros before them."""
    row = starts[1:, None] - M + torch.arange(M, device=q.device)
    padding = row < starts[:-1, None]
    padded = q.index_select(0, row.flatten().clamp(0, q.shape[0] - 1))
    padded.masked_fill_(padding.view(-1, 1, 1), 0.0)
    return padded.view(-1, M, *q.shape[1:])


def _packed(o: Tensor, lse: Tensor, starts: Tensor, M: int, total_q: int) -> tuple[Tensor, Tensor]:
    """Takes the rows of the queries out of o (B M, H_q, D_v) and lse (H_q, B M)."""
    starts, row = starts.long(), torch.arange(total_q, device=o.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    trailing = sequence == starts.shape[0] - 1  # rows after the last sequence
    sequence = sequence.masked_fill(trailing, 0)
    place = (sequence + 1) * M - (starts[sequence + 1] - row)
    place = place.clamp(0, o.shape[0] - 1)  # on a GPU, lengths may exceed M
    o = o.index_select(0, place).masked_fill_(trailing[:, None, None], 0.0)
    return o, lse.index_select(1, place).masked_fill_(trailing, -math.inf)


def _have_length(starts: Tensor, total_q: int, M: int) -> bool:
    """True if it is known that every sequence has M queries, and no row is left over."""
    if not values_are_readable(starts):
        return False
    even = torch.arange(starts.shape[0]) * M
    return int(even[-1]) == total_q and torch.equal(even, starts.long())
