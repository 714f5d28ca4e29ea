"""Masks of blocks: FlexAttention's block masks, and the patterns of the Sparse Transformer."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)

import transformer_kernels as tk
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.masks.block_patterns import fixed, local, strided
from transformer_kernels.masks.constraints import BlockSparse, Dense

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
DOCUMENTS = torch.tensor([[0] * 100 + [1] * 170 + [2] * 30, [0] * 1 + [1] * 290 + [2] * 9])


def in_documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (DOCUMENTS[b, i] == DOCUMENTS[b, j]) & (j <= i)


def checkered(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i // 64 + j // 64 + b) % 2 == 0


MASK_MODS: dict[str, MaskMod] = {
    "causal": lambda b, h, i, j: j <= i,
    "documents": in_documents,
    "heads": lambda b, h, i, j: (i - j).abs() < (h + 1) * 20,
    "none": lambda b, h, i, j: i < 0,
    "checkered": checkered,
}


@pytest.mark.parametrize("block_size", [128, 32, (64, 32)], ids=str)
@pytest.mark.parametrize("sizes", [(300, 300), (65, 300), (256, 128), (1, 1)], ids=str)
@pytest.mark.parametrize("extents", [(2, 3), (2, None), (None, 3)], ids=str)
@pytest.mark.parametrize("mask_mod", MASK_MODS)
def test_visible_pairs(
    mask_mod: str,
    extents: tuple[int | None, int | None],
    sizes: tuple[int, int],
    block_size: int | tuple[int, int],
) -> None:
    arguments = (MASK_MODS[mask_mod], *extents, *sizes, "cpu")
    mask = tk.Mask.from_block_mask(create_block_mask(*arguments, BLOCK_SIZE=block_size))
    B, H = (n or 1 for n in extents)
    assert torch.equal(mask.materialize(B, H, *sizes), create_mask(*arguments))


def test_mask_mod_decides_partial_tiles_only() -> None:
    """Full tiles are visible whatever mask_mod says, as in FlexAttention."""
    count, full = torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[1, 7], [0, 7]]]])
    index = torch.tensor([[[[0, 7], [1, 7]]]], dtype=torch.int32)  # 7 is past the count
    block_mask = BlockMask.from_kv_blocks(
        count, index, count, full.int(), BLOCK_SIZE=16, mask_mod=lambda b, h, i, j: j <= i
    )
    expected = torch.ones(32, 32).bool()
    expected[:16, :16], expected[16:, 16:] = (torch.ones(16, 16).tril().bool() for _ in range(2))
    got = tk.Mask.from_block_mask(block_mask).materialize(1, 1, 32, 32)
    assert torch.equal(got[0, 0], expected)


def test_block_sparse_if_every_tile_is_full() -> None:
    mask = tk.Mask.from_block_mask(create_block_mask(checkered, None, 3, 256, 256, "cpu", 64))
    assert [type(one) for one in mask.constraints] == [BlockSparse]
    causal = create_block_mask(MASK_MODS["causal"], None, None, 256, 256, "cpu", 64)
    assert [type(one) for one in tk.Mask.from_block_mask(causal).constraints] == [Dense]


@pytest.mark.parametrize("name", ["causal", "documents", "heads"])
def test_attention_is_flex_attention(name: str) -> None:
    q, k, v = (torch.randn(2, 3, 300, 16, dtype=torch.float64) for _ in range(3))
    block_mask = create_block_mask(MASK_MODS[name], 2, 3, 300, 300, "cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        expected = flex_attention(q, k, v, block_mask=block_mask)
    o = tk.attention(q, k, v, mask=tk.Mask.from_block_mask(block_mask))
    assert_same_function(o, expected)


def test_training() -> None:
    """FlexAttention has no backward pass on CPUs."""
    q, k, v = (torch.randn(2, 3, 300, 16, requires_grad=True) for _ in range(3))
    sizes = (2, None, 300, 300, "cpu")
    gradients = [
        torch.autograd.grad(tk.attention(q, k, v, mask=mask).sin().sum(), (q, k, v))
        for mask in (
            tk.Mask.from_block_mask(create_block_mask(in_documents, *sizes)),
            tk.Mask.dense(create_mask(in_documents, *sizes)),
        )
    ]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_slices_of_a_block_mask() -> None:
    """torch removes mask_mod from a slice; the error is torch's."""
    block_mask = create_block_mask(MASK_MODS["causal"], None, None, 256, 256, "cpu")
    with pytest.raises(RuntimeError, match="sliced"):
        tk.Mask.from_block_mask(block_mask[:, :, :1])


def assert_pattern(
    layout: Tensor, rows: int, columns: int, is_visible: Callable[[int, int], bool]
) -> None:
    assert layout.shape == (1, rows, columns)
    assert layout.dtype == torch.bool
    for i in range(rows):
        for j in range(columns):
            assert bool(layout[0, i, j]) == (j <= i and is_visible(i, j)), (i, j)


PATTERN_SIZES = [(9, 9), (5, 8), (8, 5)]


@each(
    ("rows", "columns", "width"),
    [(*sizes, width) for sizes in PATTERN_SIZES for width in (1, 3, 20)],
)
def test_local(rows: int, columns: int, width: int) -> None:
    assert_pattern(local(rows, columns, width), rows, columns, lambda i, j: i - j < width)


@each(("rows", "columns", "stride"), [(*sizes, n) for sizes in PATTERN_SIZES for n in (1, 2, 3)])
def test_strided(rows: int, columns: int, stride: int) -> None:
    layout = strided(rows, columns, stride)
    assert_pattern(layout, rows, columns, lambda i, j: i - j < stride or (i - j) % stride == 0)


@each(
    ("rows", "columns", "stride", "summaries"),
    [(*sizes, *n) for sizes in PATTERN_SIZES for n in ((1, 1), (3, 1), (4, 2), (3, 3))],
)
def test_fixed(rows: int, columns: int, stride: int, summaries: int) -> None:
    def is_visible(i: int, j: int) -> bool:
        return i // stride == j // stride or j % stride >= stride - summaries

    assert_pattern(fixed(rows, columns, stride, summaries), rows, columns, is_visible)


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
