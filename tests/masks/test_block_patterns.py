"""Block patterns of the Sparse Transformer against their definitions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.masks.block_patterns import fixed, local, strided


def assert_pattern(
    layout: Tensor, rows: int, columns: int, is_visible: Callable[[int, int], bool]
) -> None:
    assert layout.shape == (1, rows, columns)
    assert layout.dtype == torch.bool
    for i in range(rows):
        for j in range(columns):
            assert bool(layout[0, i, j]) == (j <= i and is_visible(i, j)), (i, j)


@pytest.mark.parametrize(("rows", "columns"), [(9, 9), (5, 8), (8, 5)])
@pytest.mark.parametrize("width", [1, 3, 20])
def test_local(rows: int, columns: int, width: int) -> None:
    assert_pattern(local(rows, columns, width), rows, columns, lambda i, j: i - j < width)


@pytest.mark.parametrize(("rows", "columns"), [(9, 9), (5, 8), (8, 5)])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_strided(rows: int, columns: int, stride: int) -> None:
    assert_pattern(
        strided(rows, columns, stride),
        rows,
        columns,
        lambda i, j: i - j < stride or (i - j) % stride == 0,
    )


@pytest.mark.parametrize(("rows", "columns"), [(9, 9), (5, 8), (8, 5)])
@pytest.mark.parametrize(("stride", "summaries"), [(1, 1), (3, 1), (4, 2), (3, 3)])
def test_fixed(rows: int, columns: int, stride: int, summaries: int) -> None:
    assert_pattern(
        fixed(rows, columns, stride, summaries),
        rows,
        columns,
        lambda i, j: i // stride == j // stride or j % stride >= stride - summaries,
    )


def test_patterns_have_about_n_sqrt_n_pairs() -> None:
    """64 blocks with stride 8: between n sqrt(n) / 2 and 2 n sqrt(n) of the n^2 pairs."""
    for layout in (strided(64, 64, 8), fixed(64, 64, 8)):
        assert 64 * 8 / 2 < layout.sum() < 2 * 64 * 8


def test_pattern_in_attention(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
    mask = tk.Mask.block_sparse(strided(7, 7, 2), 16) & tk.Mask.causal()
    dense = tk.Mask.dense(mask.materialize(1, 1, 100, 100))
    assert_same_function(
        tk.attention(q, k, v, mask=mask, backend=backend),
        tk.attention(q, k, v, mask=dense, backend="reference"),
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: local(0, 1, 1), "rows must be at least 1, got 0"),
        (lambda: local(1, 1, -1), "width must be at least 1, got -1"),
        (lambda: strided(1, 2, 0), "stride must be at least 1, got 0"),
        (lambda: fixed(4, 4, 2, 3), "summaries must be at most stride = 2, got 3"),
    ],
)
def test_bad_sizes(make: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
