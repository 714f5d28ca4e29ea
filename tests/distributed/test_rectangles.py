"""Rectangles of an undivided call, their sums, and the division of a sequence, in one process."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor

from tests.distributed.divided import shard_mask
from tests.support.cases import CASES, Case
from tests.support.finite_masks import H_Q, SCALE, B, M, N, by_formula, draw
from tests.support.tiers import each
from transformer_kernels.backends import CpuBackend
from transformer_kernels.bench.tolerance import assert_within_rule
from transformer_kernels.dispatch import partial
from transformer_kernels.distributed.rectangles import undivided_call
from transformer_kernels.distributed.sequence import SequenceLayout, in_order, in_shards, pieces_of
from transformer_kernels.masks.mask import Mask
from transformer_kernels.problem import Saved
from transformer_kernels.problem.dense import dense_problem

LAYOUTS: tuple[SequenceLayout, ...] = ("zigzag", "contiguous")


def shard(x: Tensor, dim: int, layout: SequenceLayout, rank: int, size: int) -> Tensor:
    """The tokens of a rank, without a process group."""
    pieces = pieces_of(layout, x.shape[dim], rank, size)
    return torch.cat([x.narrow(dim, piece.start, piece.length) for piece in pieces], dim)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shards_are_a_partition(layout: SequenceLayout, size: int) -> None:
    sequence = torch.arange(60)
    shards = torch.cat([shard(sequence, 0, layout, rank, size) for rank in range(size)])
    assert torch.equal(shards.sort().values, sequence)
    assert torch.equal(in_shards(sequence, 0, layout, size), shards)
    assert torch.equal(in_order(shards, 0, layout, size), sequence)


def test_zigzag_gives_all_ranks_the_same_causal_work() -> None:
    for size in (2, 3, 8):
        work = [
            sum(i + 1 for i in shard(torch.arange(16 * size), 0, "zigzag", rank, size).tolist())
            for rank in range(size)
        ]
        assert max(work) == min(work)


def test_pieces_of_zigzag_are_chunks_from_both_ends() -> None:
    assert pieces_of("zigzag", 24, 0, 3) == ((0, 0, 4), (20, 4, 4))
    assert pieces_of("zigzag", 24, 1, 3) == ((4, 0, 4), (16, 4, 4))
    assert pieces_of("zigzag", 24, 2, 3) == ((8, 0, 8),)
    assert pieces_of("contiguous", 24, 2, 3) == ((16, 0, 8),)


MASKS = [case for case in CASES if case.mask is not None and case.M and case.N and case.B]


@each("case", MASKS, ids=str)
def test_masks_of_rectangles_are_parts_of_the_mask(case: Case) -> None:
    """And a rectangle that is not seen has no visible pair."""
    size = 2
    for layout in LAYOUTS:
        M, N = (-(-length // 4) * 4 for length in (case.M, case.N))
        whole = Case(**{**vars(case), "M": M, "N": N})
        visible = whole.visible()
        assert visible is not None
        q = torch.zeros(case.B, case.H_q, M // size, 2)
        k = torch.zeros(case.B, case.H_kv, N // size, 2)
        cut = functools.partial(shard, layout=layout, size=size)
        for rank, source in itertools.product(range(size), repeat=2):
            cuts = (functools.partial(cut, rank=r) for r in (rank, source))
            masks = [shard_mask(whole.make_mask(), one) for one in cuts]
            call = undivided_call(q, k, k, size, mask=masks[0])
            k_position = undivided_call(q, k, k, size, mask=masks[1]).problem.mask.k_position
            for rows in pieces_of(layout, M, rank, size):
                for columns in pieces_of(layout, N, source, size):
                    wanted = visible[:, :, rows.start : rows.end, columns.start : columns.end]
                    assert call.sees(rows, columns) or not wanted.any()
                    if call.sees(rows, columns):
                        i, j = call.rows_seen(rows, columns), call.columns_seen(rows, columns)
                        within = (
                            slice(i.start - rows.start, i.end - rows.start),
                            slice(j.start - columns.start, j.end - columns.start),
                        )
                        outside = wanted.clone()
                        outside[:, :, *within] = False
                        assert not outside.any()
                    part = call.rectangle(rows, columns, k_position).mask
                    got = part.visible(rows.length, columns.length, q.device)
                    got = torch.ones(()).bool() if got is None else got
                    assert torch.equal(got.expand_as(wanted), wanted)


@pytest.mark.parametrize(
    ("left", "right", "seen"),
    [
        (None, 0, [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]),
        (1, 0, [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]),
        (0, 0, [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]),
        (-5, 8, [[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]),
    ],
)
def test_windows_show_few_rectangles(left: int | None, right: int, seen: list[list[int]]) -> None:
    q = torch.zeros(1, 1, 4, 2)
    call = undivided_call(q, q, q, 4, mask=Mask.window(left, right))
    pieces = [pieces_of("contiguous", 16, rank, 4)[0] for rank in range(4)]
    assert [[int(call.sees(rows, columns)) for columns in pieces] for rows in pieces] == seen


BACKEND = CpuBackend()


@pytest.mark.parametrize("value", [0.0, -1e6, -1e9])
def test_rows_that_a_finite_bias_hides(value: float) -> None:
    """Ranks with different numbers of keys, and with no key for the last rows."""
    bias = torch.zeros(1, 1, M, N)
    bias[:, :, 3:9] = value
    visible = torch.ones(M, N, dtype=torch.bool)
    visible[30:, 7:] = False
    call = draw({"bias": bias, "mask": Mask.dense(visible)}, torch.float32)
    q, k, v, do, dlse, _ = call
    shares = (slice(0, 7), slice(7, 60), slice(60, N))
    problems = [
        dense_problem(
            q, k[:, :, at], v[:, :, at],
            mask=Mask.dense(visible[:, at]), bias=bias[..., at], scale=SCALE,
        )
        for at in shares
    ]  # fmt: skip
    total = partial.no_keys(dense_problem(q, k, v).shape)
    assert total.row_stats.shape == (2, B, H_Q, M)
    masks: list[Tensor | None] = []
    for problem, at in zip(problems, shares, strict=True):
        part = partial.forward(BACKEND, problem, q, k[:, :, at], v[:, :, at])
        masks.append(part.block_mask)
        partial.add(total, slice(0, M), part)
    got = {"o": total.o, "lse": total.row_stats[0], "dq": torch.zeros_like(q)}
    of_keys: dict[str, list[Tensor]] = {"k": [], "v": []}
    for problem, at, block_mask in zip(problems, shares, masks, strict=True):
        saved = Saved(q, k[:, :, at], v[:, :, at], *total, block_mask)
        gradients = partial.backward(BACKEND, problem, saved, do, dlse, ())
        got["dq"] += gradients["q"]
        for name, parts in of_keys.items():
            parts.append(gradients[name])
    got |= {f"d{name}": torch.cat(parts, dim=2) for name, parts in of_keys.items()}
    exact, plain = by_formula(call, torch.float64), by_formula(call, torch.float32)
    for name, x in got.items():
        assert_within_rule(name, x, exact[name], plain[name])
