"""Visible pairs of a problem, against its materialized mask."""

from __future__ import annotations

import pytest
import torch

from tests.support.cases import CASES
from transformer_kernels.masks.constraints import Align
from transformer_kernels.masks.mask import Mask
from transformer_kernels.masks.resolved import ResolvedMask, resolve, resolve_windows
from transformer_kernels.problem import Layout, Problem, Shape, operations
from transformer_kernels.problem.operations import visible_pairs

ALIGNS: tuple[Align, ...] = ("top_left", "bottom_right")
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
        mask = case.make_mask() or Mask()
        expected = int(mask.materialize(*sizes).sum())
        assert visible_pairs(problem(*sizes, resolve(mask, *sizes))) == expected, case


@pytest.mark.parametrize("align", ALIGNS)
def test_pairs_of_sequences_are_added(align: Align) -> None:
    mask = Mask.window(40, 2, align=align)
    expected = sum(int(mask.materialize(1, 3, M, N).sum()) for M, N in LENGTHS)
    q_ends, k_ends = torch.tensor([(0, 0), *LENGTHS]).cumsum(0).int().T
    layout = Layout(q_ends, k_ends, max_seqlen_q=67, max_seqlen_k=131)
    packed = problem(len(LENGTHS), 3, 67, 131, resolve_windows(mask, align), layout)
    assert visible_pairs(packed) == expected


def test_pairs_of_a_cache_are_those_in_use() -> None:
    lengths = torch.tensor([9, 0, 31], dtype=torch.int32)
    ranges = Mask.key_range(torch.tensor([2, 0, -1]), torch.tensor([7, 5, 40]))
    mask = Mask.window(6, 0, align="bottom_right")
    expected = int(mask.materialize(1, 2, 4, 9)[..., 2:7].sum())
    expected += int(mask.materialize(1, 2, 4, 31).sum())
    resolved = resolve_windows(mask & ranges, "bottom_right")
    assert visible_pairs(problem(3, 2, 4, 40, resolved, Layout(cache_seqlens=lengths))) == expected


def test_tensors_without_values_hide_nothing() -> None:
    ids = torch.zeros(2, 7, device="meta", dtype=torch.int64)
    mask = Mask.causal() & Mask.segments(ids) & Mask.padding(ids[:, 0])
    assert visible_pairs(problem(2, 3, 7, 7, resolve(mask, 2, 3, 7, 7))) == 2 * 3 * 28
    ends = torch.empty(4, device="meta", dtype=torch.int32)
    packed = Layout(ends, ends, max_seqlen_q=5, max_seqlen_k=7)
    assert visible_pairs(problem(3, 2, 5, 7, ResolvedMask(), packed)) == 3 * 2 * 5 * 7
    cache = Layout(cache_seqlens=ends[:3])
    assert visible_pairs(problem(3, 2, 5, 7, ResolvedMask(), cache)) == 3 * 2 * 5 * 7
