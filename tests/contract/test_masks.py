"""Masks: constructors against their definitions, pair by pair; slices; pictures."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from building.extension import ROOT
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.masks import block_patterns
from transformer_kernels.masks.constraints import Align

B, H = 2, 3
LARGEST, SMALLEST = (1 << 63) - 1, -(1 << 63)
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


@each(
    ("left", "right", "M", "N"),
    [
        (*sides, *sizes)
        for sides in (
            *((2, 1), (0, 0), (None, 1), (1, None), (None, None), (3, -2)),
            *((side, None) for side in (SMALLEST, -(1 << 62), 1 << 62, LARGEST)),
            (None, SMALLEST),
        )
        for sizes in SIZES
    ],
)
def test_window(left: int | None, right: int | None, M: int, N: int) -> None:
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


INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.uint16, torch.uint32)


@each("dtype", INTEGERS)
def test_padding(dtype: torch.dtype) -> None:
    lengths = [3, 0]
    mask = tk.Mask.padding(torch.tensor(lengths, dtype=dtype))
    assert_visible(mask, 4, 5, lambda b, h, i, j: j < lengths[b])


def test_key_range() -> None:
    start, end = [1, 3], [4, 3]
    mask = tk.Mask.key_range(torch.tensor(start, dtype=torch.int32), torch.tensor(end))
    assert_visible(mask, 4, 5, lambda b, h, i, j: start[b] <= j < end[b])


@each("dtype", INTEGERS)
def test_segments(dtype: torch.dtype) -> None:
    q_ids, k_ids = [[0, 0, 1, 7], [2, 1, 2, 1]], [[0, 1, 1, 0, 5], [1, 1, 2, 2, 0]]
    mask = tk.Mask.segments(torch.tensor(q_ids, dtype=dtype), torch.tensor(k_ids))
    assert_visible(mask, 4, 5, lambda b, h, i, j: q_ids[b][i] == k_ids[b][j])
    alone = tk.Mask.segments(torch.tensor(q_ids, dtype=dtype))
    assert_visible(alone, 4, 4, lambda b, h, i, j: q_ids[b][i] == q_ids[b][j])
    unequal = tk.Mask.segments(torch.tensor(q_ids), torch.tensor(k_ids), equal=False)
    assert_visible(unequal, 4, 5, lambda b, h, i, j: q_ids[b][i] != k_ids[b][j])


@each(
    ("left", "right", "dtype"),
    itertools.product((None, 2, 0, -1), (None, 1, 0, -1), (torch.int64, torch.int16)),
)
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


@each(
    ("sides", "inside", "dtype"),
    itertools.product(("both", "low", "high"), (True, False), (torch.int64, torch.int8)),
)
def test_intervals(sides: str, inside: bool, dtype: torch.dtype) -> None:
    low, high = [[0, 2, 5, -9], [4, 1, 1, 3]], [[4, 1, 5, 2], [2, 9, 0, 3], [0, 0, 7, 3]]
    k_pos = [[6, 1, 0, 3, 5], [1, 4, 2, 2, 0]]
    bounds = torch.tensor(low, dtype=dtype), torch.tensor(high, dtype=dtype)[None]
    mask = tk.Mask.intervals(
        bounds[0] if sides != "high" else None,
        bounds[1] if sides != "low" else None,
        torch.tensor(k_pos, dtype=dtype),
        inside=inside,
    )

    def is_visible(b: int, h: int, i: int, j: int) -> bool:
        at_least = sides == "high" or low[b][i] <= k_pos[b][j]
        at_most = sides == "low" or k_pos[b][j] <= high[h][i]
        return (at_least and at_most) == inside

    assert_visible(mask, 4, 5, is_visible)


@each(("size", "dtype"), itertools.product((1, 2, 9), (torch.int64, torch.int8)))
def test_selected(size: int, dtype: torch.dtype) -> None:
    """In any order, with repetitions; lists by entry, by head, and for all."""
    blocks = -(-5 // size)
    for shape in ((B, 4, 6), (1, 4, 1), (B, 4, 0), (1, H, 4, 3), (B, 1, 4, 2)):
        indices = torch.randint(-2, blocks, shape, dtype=dtype)
        lists = indices if len(shape) == 4 else indices[:, None]
        full = lists.expand(B, H, 4, shape[-1])

        def is_visible(b: int, h: int, i: int, j: int, full: Tensor = full) -> bool:
            return j // size in full[b, h, i].tolist()

        assert_visible(tk.Mask.selected(indices, size), 4, 5, is_visible)


def test_ascending_lists_are_not_copied() -> None:
    indices = torch.tensor([[[-1, -1, 0, 3]]], dtype=torch.int32)
    lists = [tk.Mask.selected(x).tensors()[0][1] for x in (indices, indices.flip(-1))]
    assert lists[0].data_ptr() == indices.data_ptr()
    assert torch.equal(*lists)
    repeated = tk.Mask.selected(torch.tensor([[[0, 0, 3]]]))
    assert repeated.tensors()[0][1].tolist() == [[[[-1, 0, 3]]]]


BLOCK_IDS = torch.tensor(
    [[-1, 0, 0, 0, -1, 1, 1, 2, 2, -1, -1], [0, 0, -1, -1, -1, 0, 0, 0, 3, 3, 3]]
)


def in_one_run(b: int, i: int, j: int) -> bool:
    """Tokens i and j and all between them have one id."""
    return len(set(BLOCK_IDS[b, min(i, j) : max(i, j) + 1].tolist())) == 1


@each("dtype", [torch.int64, torch.int16])
def test_blocks(dtype: torch.dtype) -> None:
    def is_visible(b: int, h: int, i: int, j: int) -> bool:
        return j <= i or (in_one_run(b, i, j) and bool(BLOCK_IDS[b, i] >= 0))

    mask = tk.Mask.blocks(BLOCK_IDS.to(dtype))
    assert_visible(mask, 11, 11, is_visible)
    last = mask.sliced(slice(-4, None), M=11, N=11)
    assert_visible(last, 4, 11, lambda b, h, i, j: is_visible(b, h, i + 7, j))


def test_shared_prefix() -> None:
    assert_visible(
        tk.Mask.shared_prefix(BLOCK_IDS), 11, 11,
        lambda b, h, i, j: j <= i and (in_one_run(b, i, j) or in_one_run(b, 0, j)),
    )  # fmt: skip


@each("length", [6, 1, 0])
def test_prefix_lm(length: int) -> None:
    mask = tk.Mask.prefix_lm(torch.tensor([4, 0]), length)
    assert_visible(mask, length, length, lambda b, h, i, j: j <= i or j < (4, 0)[b])


@each(("tokens", "window"), itertools.product((0, 1, 5, 20), (0, 1, 5, 20)))
def test_global_window(tokens: int, window: int) -> None:
    mask = tk.Mask.global_window(9, tokens, window)
    assert_visible(mask, 9, 9, lambda b, h, i, j: abs(i - j) <= window or i < tokens or j < tokens)


@each(("length", "block"), [(6, 2), (7, 3), (5, 1), (4, 9), (0, 2)])
def test_block_diffusion(length: int, block: int) -> None:
    def is_visible(b: int, h: int, i: int, j: int) -> bool:
        query, key = (i % length) // block, (j % length) // block
        if i >= length:
            return j >= length and key <= query
        return key == query if j < length else key < query

    mask = tk.Mask.block_diffusion(length, block)
    assert_visible(mask, 2 * length, 2 * length, is_visible)
    assert tk.Mask.block_diffusion(length, block, device="meta").device == torch.device("meta")


@each("shape", [(B, H, 4, 5), (B, 1, 4, 5), (1, H, 4, 1), (H, 1, 5), (4, 5), (5,), ()], ids=str)
def test_dense(shape: tuple[int, ...]) -> None:
    attn_mask = torch.rand(shape) < 0.5
    full = attn_mask.expand(B, H, 4, 5)
    assert_visible(tk.Mask.dense(attn_mask), 4, 5, lambda b, h, i, j: bool(full[b, h, i, j]))


@each("shape", [(1, 3, 2), (H, 3, 2), (3, 2)])
def test_block_sparse(shape: tuple[int, ...]) -> None:
    size, layout = 3, torch.rand(shape) < 0.5
    full = layout.expand(H, 3, 2)
    mask = tk.Mask.block_sparse(layout, size)
    assert_visible(mask, 7, 5, lambda b, h, i, j: bool(full[h, i // size, j // size]))


def test_and_intersects() -> None:
    dense = torch.rand(B, 1, 4, 5) < 0.5
    mask = tk.Mask.causal() & tk.Mask.padding(torch.tensor([2, 4])) & tk.Mask.dense(dense)
    assert_visible(
        mask, 4, 5, lambda b, h, i, j: j <= i and j < (2, 4)[b] and bool(dense[b, 0, i, j])
    )


def test_intersection_with_a_tensor_raises() -> None:
    with pytest.raises(TypeError):
        tk.Mask.causal() & torch.ones(2, 2, dtype=torch.bool)  # type: ignore[operator]


@each(("M", "N"), [(0, 4), (4, 0), (0, 0)])
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


SLICES = (
    (slice(None), slice(None)),
    (slice(4, 9), slice(2, 13)),
    (slice(-3, None), slice(None)),
    (slice(6, None), slice(-5, -1)),
    (slice(3, 3), slice(5, None)),
    (slice(0, 8), slice(9, 2)),
)


def integers(*shape: int, low: int = 0, high: int = 5, dtype: Any = torch.int64) -> Tensor:
    return torch.randint(low, high, shape, dtype=dtype)


EXTREME = torch.tensor([SMALLEST, LARGEST])
SLICED: dict[str, Callable[[int, int], tk.Mask]] = {
    "all": lambda M, N: tk.Mask(),
    "window": lambda M, N: tk.Mask.window(4, 2),
    "bottom right": lambda M, N: tk.Mask.window(3, -1, align="bottom_right"),
    "causal": lambda M, N: tk.Mask.causal(align="bottom_right"),
    "unbounded": lambda M, N: tk.Mask.window(1 << 62, -(1 << 62)),
    "padding": lambda M, N: tk.Mask.padding(integers(B, high=N, dtype=torch.uint8)),
    "key range": lambda M, N: tk.Mask.key_range(integers(B, high=N), integers(B, high=N)),
    "extreme range": lambda M, N: tk.Mask.key_range(EXTREME, EXTREME.flip(0)),
    "segments": lambda M, N: tk.Mask.segments(integers(B, M), integers(B, N)),
    "unequal": lambda M, N: tk.Mask.segments(integers(B, M), integers(B, N), equal=False),
    "positions": lambda M, N: tk.Mask.positions(integers(1, M), integers(B, N), 1, 2),
    "by head": lambda M, N: tk.Mask.positions(integers(B, 1, M), integers(1, H, N), None, 0),
    "intervals": lambda M, N: tk.Mask.intervals(integers(B, M), None, integers(1, N), inside=False),
    "dense": lambda M, N: tk.Mask.dense(torch.rand(B, 1, M, N) > 0.5),
    "dense rows": lambda M, N: tk.Mask.dense(torch.rand(H, M, 1) > 0.5),
    "dense columns": lambda M, N: tk.Mask.dense(torch.rand(N) > 0.5),
    "blocks": lambda M, N: tk.Mask.block_sparse(torch.rand(H, -(-M // 4), -(-N // 4)) > 0.5, 4),
    "selected": lambda M, N: tk.Mask.selected(integers(B, M, 6, low=-1, high=N)),
    "selected blocks": lambda M, N: tk.Mask.selected(
        integers(1, H, M, 2, low=-1, high=-(-N // 4)), 4
    ),
    "both": lambda M, N: tk.Mask.causal() & tk.Mask.segments(integers(B, M), integers(B, N)),
}


@each("kind", SLICED)
def test_slices_show_the_same_pairs(kind: str) -> None:
    for M, N in ((11, 17), (17, 11), (1, 13)):
        mask = SLICED[kind](M, N)
        whole = mask.materialize(B, H, M, N)
        for rows, columns in SLICES:
            expected = whole[:, :, rows, columns]
            sliced = mask.sliced(rows, columns, M=M, N=N)
            assert torch.equal(sliced.materialize(*expected.shape), expected), (M, N, rows, columns)


def test_sliced_blocks_stay_whole_from_aligned_tokens_on() -> None:
    mask = tk.Mask.block_sparse(torch.rand(3, 5) > 0.5, 4)
    sizes = {
        start: mask.sliced(slice(start, None), slice(8, None), M=11, N=17).constraints[0]
        for start in (4, 6)
    }
    assert [getattr(one, "block_size", None) for one in sizes.values()] == [4, 2]


def test_slices_of_the_last_queries_keep_a_bottom_right_mask() -> None:
    mask = tk.Mask.window(5, 0, align="bottom_right")
    assert mask.sliced(slice(-3, None), M=11, N=17).constraints == mask.constraints


def test_slices_are_masks_of_rows_of_attention() -> None:
    M, N, rows = 11, 17, slice(3, 9)
    q, k, v = (torch.randn(B, H, n, 8) for n in (M, N, N))
    mask = SLICED["segments"](M, N) & SLICED["blocks"](M, N) & SLICED["bottom right"](M, N)
    whole = tk.attention(q, k, v, mask=mask)
    part = mask.sliced(rows, M=M, N=N)
    got = tk.attention(q[:, :, rows], k, v, mask=part)
    assert_same_function(got, whole[:, :, rows])


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


PAGE = (ROOT / "docs" / "masks.md").read_text(encoding="utf-8")
IMPORTS, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EXAMPLES = re.findall(r"```python\n([^`]*)```\n\n```text\n([^`]*)```", PAGE)
NOT_KINDS = {"materialize", "check", "to", "device", "sliced", "tensors", "show", "plot"}


@pytest.mark.parametrize(("code", "picture"), EXAMPLES, ids=[code for code, _ in EXAMPLES])
def test_picture(code: str, picture: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(IMPORTS + code, {})
    assert capsys.readouterr().out == picture


def test_every_kind_has_a_picture() -> None:
    kinds = {f"Mask.{name}" for name in vars(tk.Mask) if name[0] != "_" and name not in NOT_KINDS}
    kinds -= {"Mask.constraints"}
    patterns = {
        name
        for name, one in inspect.getmembers(block_patterns, inspect.isfunction)
        if one.__module__ == block_patterns.__name__ and name[0] != "_"
    }
    code = "\n".join(code for code, _ in EXAMPLES)
    missing = [name for name in kinds | patterns if f"{name}(" not in code]
    assert missing == []
