"""Mask constructors against their definitions, pair by pair."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

import transformer_kernels as tk
from tests.support.tiers import each
from transformer_kernels.masks.constraints import Align

B, H = 2, 3
SIZES = [(5, 5), (4, 7), (7, 4), (1, 6), (6, 1)]
Visible = Callable[[int, int, int, int], bool]


def assert_visible(mask: tk.Mask, M: int, N: int, is_visible: Visible) -> None:
    """Asserts that `materialize` equals is_visible(b, h, i, j) for every pair."""
    full = mask.materialize(B, H, M, N)
    assert full.shape == (B, H, M, N)
    assert full.dtype == torch.bool
    for b, h, i, j in itertools.product(range(B), range(H), range(M), range(N)):
        assert bool(full[b, h, i, j]) == is_visible(b, h, i, j), (b, h, i, j)


@each(("M", "N"), SIZES)
def test_empty_mask_hides_nothing(M: int, N: int) -> None:
    assert_visible(tk.Mask(), M, N, lambda b, h, i, j: True)


@each(("M", "N"), SIZES)
def test_causal(M: int, N: int) -> None:
    assert_visible(tk.Mask.causal(), M, N, lambda b, h, i, j: j <= i)
    assert_visible(tk.Mask.causal(align="bottom_right"), M, N, lambda b, h, i, j: j <= i + N - M)


@pytest.mark.parametrize(("M", "N"), SIZES)
@pytest.mark.parametrize("bounds", [(2, 1), (0, 0), (None, 1), (1, None), (None, None), (3, -2)])
def test_window(M: int, N: int, bounds: tuple[int | None, int | None]) -> None:
    left, right = bounds
    offsets: dict[Align, int] = {"top_left": 0, "bottom_right": N - M}
    for align, d in offsets.items():

        def is_visible(b: int, h: int, i: int, j: int, d: int = d) -> bool:
            above = left is None or i + d - left <= j
            return above and (right is None or j <= i + d + right)

        assert_visible(tk.Mask.window(left, right, align=align), M, N, is_visible)


def test_top_left_is_torchs_is_causal() -> None:
    q, k, v = torch.randn(1, 1, 3, 2), torch.randn(1, 1, 5, 2), torch.eye(5)[None, None]
    weights = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(weights != 0, tk.Mask.causal().materialize(1, 1, 3, 5))


def test_padding() -> None:
    lengths = [3, 0]
    mask = tk.Mask.padding(torch.tensor(lengths))
    assert_visible(mask, 4, 5, lambda b, h, i, j: j < lengths[b])


def test_key_range() -> None:
    start, end = [1, 3], [4, 3]
    mask = tk.Mask.key_range(torch.tensor(start, dtype=torch.int32), torch.tensor(end))
    assert_visible(mask, 4, 5, lambda b, h, i, j: start[b] <= j < end[b])


def test_segments() -> None:
    q_ids, k_ids = [[0, 0, 1, 7], [2, 1, 2, 1]], [[0, 1, 1, 0, 5], [1, 1, 2, 2, 0]]
    mask = tk.Mask.segments(torch.tensor(q_ids), torch.tensor(k_ids))
    assert_visible(mask, 4, 5, lambda b, h, i, j: q_ids[b][i] == k_ids[b][j])
    alone = tk.Mask.segments(torch.tensor(q_ids))
    assert_visible(alone, 4, 4, lambda b, h, i, j: q_ids[b][i] == q_ids[b][j])
    unequal = tk.Mask.segments(torch.tensor(q_ids), torch.tensor(k_ids), equal=False)
    assert_visible(unequal, 4, 5, lambda b, h, i, j: q_ids[b][i] != k_ids[b][j])


@pytest.mark.parametrize("left", [None, 2, 0, -1])
@pytest.mark.parametrize("right", [None, 1, 0, -1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int16])
def test_positions(left: int | None, right: int | None, dtype: torch.dtype) -> None:
    q_pos, k_pos = [[3, 0, 1, 7], [2, 1, 2, 1]], [[6, 1, 0, 3, 5], [1, 4, 2, 2, 0]]
    low, high = (math.inf if side is None else side for side in (left, right))

    mask = tk.Mask.positions(
        torch.tensor(q_pos, dtype=dtype), torch.tensor(k_pos, dtype=dtype), left, right
    )
    assert_visible(mask, 4, 5, lambda b, h, i, j: -low <= k_pos[b][j] - q_pos[b][i] <= high)
    heads = [*q_pos, [0, 4, 2, 2]]
    by_head = tk.Mask.positions(torch.tensor(heads)[None], torch.tensor(k_pos[:1]), left, right)
    assert_visible(by_head, 4, 5, lambda b, h, i, j: -low <= k_pos[0][j] - heads[h][i] <= high)


def test_positions_are_causal_by_default() -> None:
    positions = torch.randperm(7)[None]
    mask = tk.Mask.positions(positions, positions)
    assert_visible(mask, 7, 7, lambda b, h, i, j: bool(positions[0, j] <= positions[0, i]))


@each("shape", [(B, H, 4, 5), (B, 1, 4, 5), (1, H, 4, 1), (H, 1, 5), (4, 5), (5,), ()], ids=str)
def test_dense(shape: tuple[int, ...]) -> None:
    attn_mask = torch.rand(shape) < 0.5
    full = attn_mask.expand(B, H, 4, 5)
    assert_visible(tk.Mask.dense(attn_mask), 4, 5, lambda b, h, i, j: bool(full[b, h, i, j]))


@pytest.mark.parametrize("heads", [1, H])
def test_block_sparse(heads: int) -> None:
    size, layout = 3, torch.rand(heads, 3, 2) < 0.5
    mask = tk.Mask.block_sparse(layout, size)
    assert_visible(mask, 7, 5, lambda b, h, i, j: bool(layout[h % heads, i // size, j // size]))


def test_block_sparse_without_heads() -> None:
    layout = torch.tensor([[True, False], [True, True]])
    mask = tk.Mask.block_sparse(layout, 2)
    assert_visible(mask, 4, 3, lambda b, h, i, j: bool(layout[i // 2, j // 2]))


def test_and_intersects() -> None:
    dense = torch.rand(B, 1, 4, 5) < 0.5
    mask = tk.Mask.causal() & tk.Mask.padding(torch.tensor([2, 4])) & tk.Mask.dense(dense)
    assert_visible(
        mask, 4, 5, lambda b, h, i, j: j <= i and j < (2, 4)[b] and bool(dense[b, 0, i, j])
    )


def test_intersection_with_a_tensor_raises() -> None:
    with pytest.raises(TypeError):
        tk.Mask.causal() & torch.ones(2, 2, dtype=torch.bool)  # type: ignore[operator]


@pytest.mark.parametrize(("M", "N"), [(0, 4), (4, 0), (0, 0)])
def test_empty_sizes(M: int, N: int) -> None:
    layout = torch.ones(1, -(-M // 2), -(-N // 2), dtype=torch.bool)
    mask = tk.Mask.causal() & tk.Mask.block_sparse(layout, 2)
    assert mask.materialize(B, H, M, N).shape == (B, H, M, N)


def test_a_mask_is_frozen_and_names_its_tensors() -> None:
    mask = tk.Mask.padding(torch.tensor([1])) & tk.Mask.causal()
    with pytest.raises(AttributeError):
        mask.constraints = ()  # type: ignore[misc]
    assert [name for name, _ in mask.tensors()] == ["KeyRange.end"]
    assert mask.device == torch.device("cpu")
    assert tk.Mask.causal().device is None


def test_to_moves_every_tensor() -> None:
    ids = torch.tensor([[0, 0, 1, 1]])
    mask = (
        tk.Mask.causal(align="bottom_right")
        & tk.Mask.key_range(torch.tensor([1]), torch.tensor([4]))
        & tk.Mask.segments(ids, ids + 1)
        & tk.Mask.dense(torch.ones(4, 4, dtype=torch.bool))
        & tk.Mask.block_sparse(torch.ones(2, 2, dtype=torch.bool), 2)
    )
    meta = mask.to("meta")
    assert {x.device.type for _, x in meta.tensors()} == {"meta"}
    assert [name for name, _ in meta.tensors()] == [name for name, _ in mask.tensors()]
    again = mask.to("cpu")
    assert torch.equal(again.materialize(1, 1, 4, 4), mask.materialize(1, 1, 4, 4))


def test_show() -> None:
    assert tk.Mask.causal().show(3) == "█··\n██·\n███"
    lengths = tk.Mask.padding(torch.tensor([1, 3]))
    assert lengths.show(1, 3) == "█··"
    assert lengths.show(1, 3, batch=1) == "███"
    assert tk.Mask.causal().show(0, 3) == "(no pairs: 0 queries, 3 keys)"


def test_show_shrinks_and_shades() -> None:
    rows = tk.Mask.causal().show(640).split("\n")
    assert len(rows) == 64
    assert all(len(row) == 64 for row in rows)
    assert rows[3][2:5] == "█▒·"
    one_pair = tk.Mask.dense(
        torch.zeros(640, 640, dtype=torch.bool).index_fill_(1, torch.tensor([9]), True)
    )
    assert one_pair.show(640)[0] == "░"


def test_plot() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is an extra")
    axes = tk.Mask.causal().plot(3, 4)
    assert np.asarray(axes.images[0].get_array()).shape == (3, 4)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key j", "query i")
    pyplot.close("all")
