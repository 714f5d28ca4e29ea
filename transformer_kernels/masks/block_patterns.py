"""Block patterns of the Sparse Transformer for `Mask.block_sparse`.

Each pattern is causal at block granularity. Intersect the mask with `Mask.causal()` for causality
inside the diagonal blocks.
Source: Child et al. 2019, arXiv:1904.10509, section 4.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.argument_checks import check_int


def local(rows: int, columns: int, width: int) -> Tensor:
    """Local pattern: each block row sees its own block and the `width - 1` blocks before it.

    Returns bool (1, rows, columns).
    """
    _check(rows=rows, columns=columns, width=width)
    distance = _block_distance(rows, columns)
    return ((distance >= 0) & (distance < width))[None]


def strided(rows: int, columns: int, stride: int) -> Tensor:
    """Strided pattern: the last `stride` blocks, and every `stride`-th block before them.

    Returns bool (1, rows, columns).
    """
    _check(rows=rows, columns=columns, stride=stride)
    distance = _block_distance(rows, columns)
    return ((distance >= 0) & ((distance < stride) | (distance % stride == 0)))[None]


def fixed(rows: int, columns: int, stride: int, summaries: int = 1) -> Tensor:
    """Fixed pattern: blocks are grouped by `stride`.

    A block row sees its own group and the last `summaries` blocks of every earlier group.
    Returns bool (1, rows, columns).
    """
    _check(rows=rows, columns=columns, stride=stride, summaries=summaries)
    if summaries > stride:
        raise ValueError(f"summaries must be at most stride = {stride}, got {summaries}")
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    same_group = row // stride == column // stride
    summary = column % stride >= stride - summaries
    return ((column <= row) & (same_group | summary))[None]


def _block_distance(rows: int, columns: int) -> Tensor:
    """Row index minus column index, (rows, columns)."""
    return torch.arange(rows)[:, None] - torch.arange(columns)[None, :]


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        check_int(name, size, 1, (1 << 31) - 1)
