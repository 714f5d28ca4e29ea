"""Paged keys and values: checks of block tables, and copies of the pages in use."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..common.argument_checks import values_are_readable
from .checks import check_integers, private_copy
from .layout import Layout
from .types import Problem

PAGE_DIMENSIONS = ("pages", "heads", "page_size", "width")


def capacity(k_cache: Tensor, block_table: Tensor | None) -> int:
    """Returns the largest number of positions that the cache holds per sequence."""
    rows = k_cache.shape[2]
    return rows if block_table is None else rows * block_table.shape[1]


def check_block_table(
    block_table: Tensor, B: int, q: Tensor, k_cache: Tensor, names: tuple[str, str] = ("q", "k")
) -> None:
    """Raises unless the block table is (B, pages) on q's device, and pages have rows.

    `names` are those of q and k_cache in error messages. Values are not checked.
    """
    check_integers("block_table", block_table, ("B", "pages"), B, q, names[0])
    if k_cache.shape[2] == 0:
        raise ValueError(
            f"page_size of {names[1]} must be at least 1, got shape {tuple(k_cache.shape)}"
        )


def check_pages_in_use(k_cache: Tensor, lengths: Tensor, block_table: Tensor, name: str) -> None:
    """Raises ValueError unless the pages of all positions in use exist. Reads values.

    Args:
        k_cache: pages (pages, H_kv, page_size, D).
        lengths: (B,), at most the capacity.
        block_table: (B, max_pages).
        name: that of k_cache in error messages.
    """
    pages, page_size = k_cache.shape[0], k_cache.shape[2]
    first = torch.arange(block_table.shape[1]) * page_size
    wrong = (first < lengths[:, None]) & ((block_table < 0) | (block_table >= pages))
    if bool(wrong.any()):
        b, n = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_table must hold pages 0 to {pages - 1} of {name} for all positions in use, "
            f"got {int(block_table[b, n])} at ({b}, {n}), and sequence {b} has "
            f"{int(lengths[b])} positions"
        )


def by_position(layout: Layout, N: int, x: Tensor) -> Tensor:
    """Returns a cache as (B, H_kv, N, width). Unused entries of the block table read page 0."""
    table, cache_seqlens = layout.block_table, layout.cache_seqlens
    if table is None or cache_seqlens is None:
        return x
    pages, heads, page_size, width = x.shape
    B = table.shape[0]
    if pages == 0:
        return x.new_zeros(B, heads, N, width)
    first = torch.arange(table.shape[1], device=x.device) * page_size
    used = first < cache_seqlens[:, None]
    gathered = x[torch.where(used, table, 0).long()]
    return gathered.transpose(1, 2).reshape(B, heads, N, width)


def checked_table(k_pages: Tensor, starts: Tensor, block_table: Tensor) -> Tensor:
    """Returns the int32 block table of packed sequences; on the CPU a copy with checked values.

    Args:
        k_pages: (pages, H_kv, page_size, D).
        starts: cu_seqlens_k, (S + 1,).
        block_table: (S, max_pages).

    Raises ValueError if a sequence has more keys than pages for them, or a page does not exist.
    """
    table = private_copy(block_table)
    if values_are_readable(starts) and values_are_readable(table):
        lengths, most = starts.diff(), capacity(k_pages, table)
        if bool((lengths > most).any()):
            raise ValueError(
                f"block_table must have pages for {int(lengths.max())} keys, the longest length in "
                f"cu_seqlens_k, got {table.shape[1]} pages of {k_pages.shape[2]} keys"
            )
        check_pages_in_use(k_pages, lengths, table, "k")
    return table.to(torch.int32)


def count_keys(layout: Layout, k_pages: Tensor) -> int:
    """Returns the number of keys of packed sequences in pages, with trailing padding where the
    values of cu_seqlens_k are not read: on a GPU, and in compiled code."""
    assert layout.cu_seqlens_k is not None
    assert layout.block_table is not None
    if values_are_readable(layout.cu_seqlens_k):
        return int(layout.cu_seqlens_k[-1])
    longest = min(layout.max_seqlen_k, capacity(k_pages, layout.block_table))
    return layout.block_table.shape[0] * longest


def without_pages(
    problem: Problem, k_pages: Tensor, v_pages: Tensor
) -> tuple[Problem, Tensor, Tensor]:
    """Copies the keys and values of packed sequences out of their pages, for other kernels than
    the forward kernels of the CPU and of Triton. Differentiable.

    Returns the problem of packed keys, k (1, H_kv, total_k, D) and v (1, H_kv, total_k, D_v).
    """
    starts, table = problem.layout.cu_seqlens_k, problem.layout.block_table
    assert starts is not None
    assert table is not None
    places = _places(starts, table, count_keys(problem.layout, k_pages), k_pages)
    k, v = (_read(x, *places).transpose(0, 1).unsqueeze(0) for x in (k_pages, v_pages))
    return replace(problem, layout=problem.layout._replace(block_table=None)), k, v


def _places(starts: Tensor, table: Tensor, keys: int, k_pages: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the page of each key and the row in it; those of padding are 0.

    Pages that do not exist, in block tables whose values are not checked, are replaced by others.
    """
    pages, _, page_size, _ = k_pages.shape
    starts, key = starts.long(), torch.arange(keys, device=starts.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), key, right=True)
    used = sequence < starts.shape[0] - 1
    sequence = torch.where(used, sequence, 0)
    position = torch.where(used, key - starts[sequence], 0)
    page = torch.where(used, table[sequence, position // page_size].long(), 0)
    return page.clamp(0, pages - 1), position % page_size


def _read(x: Tensor, page: Tensor, row: Tensor) -> Tensor:
    """Copies rows out of their pages: (keys, heads, width)."""
    if page.shape[0] == 0 or x.shape[0] == 0:
        return x.new_zeros(page.shape[0], x.shape[1], x.shape[3])
    by_row = x.transpose(1, 2)  # (pages, page_size, heads, width)
    if by_row.is_contiguous():  # whole rows: a third of the time, or less
        return by_row.flatten(0, 1).index_select(0, page * x.shape[2] + row)
    return by_row[page, row]
