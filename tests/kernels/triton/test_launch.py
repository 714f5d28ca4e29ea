"""The host side: copies before a launch, and the block mask and lists against the whole mask."""

from __future__ import annotations

import pytest
import torch

import transformer_kernels as tk
from transformer_kernels.backends.triton import launch
from transformer_kernels.backends.triton.config import Tile
from transformer_kernels.backends.triton.launch import MAX_ROW_STRIDE, as_rows
from transformer_kernels.problem.dense import dense_problem


def test_unit_stride_rows_are_not_copied() -> None:
    x = torch.zeros(2, 7, 3, 4)
    for view in (x, x.transpose(1, 2), x[:, :, :, 1:], x.expand(5, 2, 7, 3, 4)[0]):
        assert as_rows(view) is view
    assert as_rows(x.mT).is_contiguous()
    assert as_rows(x[..., ::2]).is_contiguous()


def test_rows_with_a_large_stride_are_copied(device: torch.device) -> None:
    """The row stride times the rows of a tile must fit in 32 bits."""
    memory = torch.randn(2 * MAX_ROW_STRIDE + 16, dtype=torch.float16, device=device)
    far = memory.as_strided((1, 1, 3, 16), (1, 1, MAX_ROW_STRIDE, 1))
    near = memory.as_strided((1, 1, 3, 16), (1, 1, MAX_ROW_STRIDE - 1, 1))
    assert as_rows(far).is_contiguous()
    assert as_rows(near) is near
    for x in (far, near):
        o = tk.attention(x, x, x, backend="triton")
        copy = x.contiguous()
        assert torch.equal(o, tk.attention(copy, copy, copy, backend="triton"))


M, N = 300, 210


def call_and_mask(device: torch.device) -> tuple[launch.Pass, torch.Tensor]:
    """Dense mask with hidden blocks and elements, intersected with a window."""
    visible = torch.ones(1, 1, M, N, dtype=torch.bool)
    visible[..., 64:192, :64] = False
    visible[..., 290, 130] = False
    mask = (tk.Mask.dense(visible) & tk.Mask.window(None, 40)).to(device)
    q, k = torch.zeros(1, 1, M, 8, device=device), torch.zeros(1, 1, N, 8, device=device)
    call = launch.prepare(dense_problem(q, k, k, mask=mask), q, k, k)
    return call, mask.materialize(1, 1, M, N)[0, 0].cpu()


def test_the_block_mask_marks_empty_partial_and_full_blocks(device: torch.device) -> None:
    """It depends on the dense mask only; the lists add the band."""
    call, _ = call_and_mask(device)
    assert call.problem.mask.dense is not None
    dense = call.problem.mask.dense[0, 0].cpu()
    expected = [
        [0 if not block.any() else 2 if block.all() else 1 for block in row.split(64, dim=1)]
        for row in dense.split(64)
    ]
    assert launch.fill_block_mask(call)[0, 0].tolist() == expected
    assert {0, 1, 2} == {entry for row in expected for entry in row}


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("tile", [Tile(128, 64, 4, 1), Tile(32, 128, 4, 1)], ids=str)
def test_lists_contain_the_visible_blocks(tile: Tile, by_keys: bool, device: torch.device) -> None:
    call, visible = call_and_mask(device)
    lists = launch.block_lists(call, launch.fill_block_mask(call), tile, by_keys=by_keys)
    assert lists.indices is not None
    assert lists.counts is not None
    sides = max(tile.block_m, 64), max(tile.block_n, 64)
    if by_keys:
        visible, sides = visible.mT, sides[::-1]
    for block, rows in enumerate(visible.split(sides[0])):
        blocks = list(enumerate(rows.split(sides[1], dim=1)))
        full = {n for n, one in blocks if one.all() and one.shape[1] == sides[1]}
        if by_keys and rows.shape[0] < sides[0]:
            full = set()  # positions beyond the last key are hidden
        partial = {n for n, one in blocks if one.any()} - full
        num_partial, num_full = lists.counts[0, 0, block].tolist()
        indices = lists.indices[0, 0, block].tolist()
        assert sorted(indices[:num_partial]) == sorted(partial)
        assert sorted(indices[len(indices) - num_full :]) == sorted(full)
