"""Resolved masks equal their specification, after merging constraints of one kind; their pairs."""

from __future__ import annotations

import functools
import itertools
import operator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import transformer_kernels as tk
from tests.support.cases import CASES
from transformer_kernels.masks.constraints import Align
from transformer_kernels.masks.resolved import (
    ResolvedMask,
    bounded_aligns,
    resolve,
    resolve_windows,
)
from transformer_kernels.problem import Layout, Problem, Shape, operations
from transformer_kernels.problem.operations import visible_pairs

B, H, M, N = 2, 2, 7, 9
IDS = torch.arange(B * (M + N)).reshape(B, -1)
LIMITS = torch.iinfo(torch.int64)
EXTREMES = torch.tensor([LIMITS.max, LIMITS.min, 0, LIMITS.max - 1, 1])[IDS * 7 % 5]

MASKS = {
    "causal": tk.Mask.causal(),
    "bottom-right": tk.Mask.window(4, 1, align="bottom_right"),
    "crossed": tk.Mask.window(-3, 1),
    "padding": tk.Mask.padding(torch.tensor([8, 5], dtype=torch.int32)),
    "key-range": tk.Mask.key_range(torch.tensor([1, 4]), torch.tensor([6, 4])),
    "segments": tk.Mask.segments(IDS[:, :M] * 5 % 3, IDS[:, M:] * 5 % 3 - 1),
    "more-segments": tk.Mask.segments(-(IDS[:, :M] * 7 % 2), -(IDS[:, M:] * 3 % 2)),
    "unequal-segments": tk.Mask.segments(IDS[:, :M] % 3, IDS[:, M:] % 3, equal=False),
    "extreme-segments": tk.Mask.segments(EXTREMES[:, :M], EXTREMES[:, -N:], equal=False),
    "positions": tk.Mask.positions(IDS[:, :M] % 5, IDS[:1, M:] % 7, 1, 1),
    "head-positions": tk.Mask.positions(IDS[:, None, :M].int() % 5, IDS[:, M:] % 7, None, -1),
    "unbounded-positions": tk.Mask.positions(IDS[:, :M], IDS[:, M:], None, None),
    "crossed-positions": tk.Mask.positions(IDS[:, :M], IDS[:, M:], -2, 1),
    "far-positions": tk.Mask.positions(EXTREMES[:, :M], EXTREMES[:, -N:], 1 << 62, -3),
    "intervals": tk.Mask.intervals(IDS[:, :M] % 5, IDS[:1, :M] * 3 % 7, IDS[:, M:] % 7),
    "far-intervals": tk.Mask.intervals(
        EXTREMES[:, :M], EXTREMES[:, None, 1 : M + 1], EXTREMES[:, -N:], inside=False
    ),
    "far-segments": tk.Mask.segments(IDS[:, :M] % 2 << 62, IDS[:, M:] % 2 << 62),
    "dense": tk.Mask.dense(IDS[:, None, :M, None] % 4 != 0),
    "more-dense": tk.Mask.dense((torch.arange(H * N).reshape(1, H, 1, N) * 5 % 7) < 5),
    "selected": tk.Mask.selected(IDS[:, :M, None] * torch.arange(1, 7) % (N + 3) - 3),
    "head-selected": tk.Mask.selected(IDS[:, None, :M, None] * torch.arange(1, 3) % 4 - 1, 3),
    "blocks-2": tk.Mask.block_sparse((torch.arange(20).reshape(4, 5) * 3 % 5) < 3, 2),
    "blocks-3": tk.Mask.block_sparse((torch.arange(18).reshape(2, 3, 3) * 5 % 7) < 5, 3),
    "blocks-4": tk.Mask.block_sparse(torch.tensor([[[True, False, True], [True, True, False]]]), 4),
}


def pairs_of(mask: tk.Mask) -> torch.Tensor:
    found = resolve(mask, B, H, M, N).visible(M, N, torch.device("cpu"))
    return torch.ones(B, H, M, N, dtype=torch.bool) if found is None else found.expand(B, H, M, N)


@pytest.mark.parametrize("count", [1, 2, 3, len(MASKS) - 1])
def test_resolved_masks_equal_their_specification(count: int) -> None:
    for names in itertools.combinations(MASKS, count):
        mask = functools.reduce(operator.and_, (MASKS[name] for name in names))
        assert torch.equal(pairs_of(mask), mask.materialize(B, H, M, N)), names


def test_resolve_does_not_synchronise() -> None:
    """Fake tensors have no values, like tensors that a device has not computed yet."""
    for a, b in itertools.combinations(MASKS.values(), 2):
        with FakeTensorMode(allow_non_fake_inputs=True):
            resolve(a & b, B, H, M, N)


def test_an_empty_mask_resolves_to_no_constraint() -> None:
    x = resolve(tk.Mask(), B, H, M, N)
    assert {x.key_end, x.key_start, x.q_low, x.k_position, x.dense, x.blocks} == {None}
    assert pairs_of(tk.Mask()).all()


def test_merged_block_size_is_the_greatest_common_divisor() -> None:
    ones = torch.ones(1, 1, 1, dtype=torch.bool)
    mask = tk.Mask.block_sparse(ones, 48) & tk.Mask.block_sparse(ones, 32)
    resolved = resolve(mask, 1, 1, 32, 32)
    assert resolved.block_size == 16
    assert resolved.blocks is not None
    assert resolved.blocks.shape == (1, 2, 2)


def test_crossed_diagonals_leave_an_empty_interval() -> None:
    """The union of all rows is empty too, so that no key is live."""
    for mask in (tk.Mask.window(-3, 1), tk.Mask.window(-3, None) & tk.Mask.causal()):
        low, high = resolve(mask, B, H, M, N)[:2]
        assert low > N
        assert M - 1 + high < 0
    assert resolve(tk.Mask.window(-2, 2), B, H, M, N)[:2] == (2, 2)


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_windows_of_one_align_serve_all_sizes(align: Align) -> None:
    """Diagonals are relative to the origin, which is a field of the resolved mask."""
    mask = (
        tk.Mask.window(4, 1, align=align) & tk.Mask.window(2, None, align=align) & tk.Mask.window()
    )
    resolved = resolve_windows(mask, align)
    assert (resolved.diagonal_low, resolved.diagonal_high) == (-2, 1)
    for sizes in ((3, 9), (9, 3), (1, 1), (5, 5)):
        visible = resolved.visible(*sizes, torch.device("cpu"))
        assert visible is not None
        assert torch.equal(visible, mask.materialize(1, 1, *sizes))
    alone = resolve(tk.Mask.window(4, 1, align=align), B, H, M, N)
    assert alone[:3] == (-4, 1, align == "bottom_right")


def test_windows_of_both_aligns_are_relative_to_the_top_left() -> None:
    mask = tk.Mask.window(4, 1, align="bottom_right") & tk.Mask.causal()
    assert resolve(mask, B, H, M, N)[:3] == (N - M - 4, 0, False)
    assert bounded_aligns(mask) == {"top_left", "bottom_right"}
    assert bounded_aligns(tk.Mask.window() & tk.Mask.causal()) == {"top_left"}


LENGTHS = ((67, 31), (0, 3), (5, 131), (3, 0), (64, 64))


def problem(
    B: int, H: int, M: int, N: int, mask: ResolvedMask, layout: Layout | None = None
) -> Problem:
    shape = Shape(B, H, H, M, N, 8, 8, torch.float32, torch.device("cpu"))
    return Problem(shape, mask, layout=layout or Layout())


@pytest.mark.parametrize("rows", [3, 64, 1024])
def test_pairs_are_those_of_the_mask(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "_ROWS", rows)
    for case in CASES:
        sizes = case.B, case.H_q, case.M, case.N
        mask = case.make_mask() or tk.Mask()
        expected = int(mask.materialize(*sizes).sum())
        assert visible_pairs(problem(*sizes, resolve(mask, *sizes))) == expected, case


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_pairs_of_sequences_are_added(align: Align) -> None:
    mask = tk.Mask.window(40, 2, align=align)
    expected = sum(int(mask.materialize(1, 3, M, N).sum()) for M, N in LENGTHS)
    q_ends, k_ends = torch.tensor([(0, 0), *LENGTHS]).cumsum(0).int().T
    layout = Layout(q_ends, k_ends, max_seqlen_q=67, max_seqlen_k=131)
    packed = problem(len(LENGTHS), 3, 67, 131, resolve_windows(mask, align), layout)
    assert visible_pairs(packed) == expected


def test_pairs_of_a_cache_are_those_in_use() -> None:
    lengths = torch.tensor([9, 0, 31], dtype=torch.int32)
    ranges = tk.Mask.key_range(torch.tensor([2, 0, -1]), torch.tensor([7, 5, 40]))
    mask = tk.Mask.window(6, 0, align="bottom_right")
    expected = int(mask.materialize(1, 2, 4, 9)[..., 2:7].sum())
    expected += int(mask.materialize(1, 2, 4, 31).sum())
    resolved = resolve_windows(mask & ranges, "bottom_right")
    assert visible_pairs(problem(3, 2, 4, 40, resolved, Layout(cache_seqlens=lengths))) == expected


def test_tensors_without_values_hide_nothing() -> None:
    ids = torch.zeros(2, 7, device="meta", dtype=torch.int64)
    mask = tk.Mask.causal() & tk.Mask.segments(ids) & tk.Mask.padding(ids[:, 0])
    assert visible_pairs(problem(2, 3, 7, 7, resolve(mask, 2, 3, 7, 7))) == 2 * 3 * 28
    ends = torch.empty(4, device="meta", dtype=torch.int32)
    packed = Layout(ends, ends, max_seqlen_q=5, max_seqlen_k=7)
    assert visible_pairs(problem(3, 2, 5, 7, ResolvedMask(), packed)) == 3 * 2 * 5 * 7
    cache = Layout(cache_seqlens=ends[:3])
    assert visible_pairs(problem(3, 2, 5, 7, ResolvedMask(), cache)) == 3 * 2 * 5 * 7
