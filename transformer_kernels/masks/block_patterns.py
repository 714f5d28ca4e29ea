"""Layouts for `Mask.block_sparse`: the patterns of the Sparse Transformer, in whole blocks.

Each is causal by blocks: intersect with `Mask.causal()` for the triangle inside the diagonal ones.
Source: Child et al. 2019, arXiv:1904.10509, section 4.2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def local(rows: int, columns: int, width: int) -> Tensor:
    """Each block row sees its own block and the `width - 1` before it; bool (1, rows, columns)."""
    _check(rows=rows, columns=columns, width=width)
    behind = _behind(rows, columns)
    return ((behind >= 0) & (behind < width))[None]


def strided(rows: int, columns: int, stride: int) -> Tensor:
    """The last `stride` blocks, and every `stride`-th block before; bool (1, rows, columns)."""
    _check(rows=rows, columns=columns, stride=stride)
    behind = _behind(rows, columns)
    return ((behind >= 0) & ((behind < stride) | (behind % stride == 0)))[None]


def fixed(rows: int, columns: int, stride: int, summaries: int = 1) -> Tensor:
    """Own group of `stride` blocks, and the last `summaries` of every group; (1, rows, cols)."""
    _check(rows=rows, columns=columns, stride=stride, summaries=summaries)
    if summaries > stride:
        raise ValueError(f"summaries must be at most stride = {stride}, got {summaries}")
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    same_group = row // stride == column // stride
    summary = column % stride >= stride - summaries
    return ((column <= row) & (same_group | summary))[None]


def _behind(rows: int, columns: int) -> Tensor:
    return torch.arange(rows)[:, None] - torch.arange(columns)[None, :]


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a positive int, got {size!r}")
