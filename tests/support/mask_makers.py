"""Masks of the attention cases: functions that make the mask of a case."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transformer_kernels.masks.constraints import Align
from transformer_kernels.masks.mask import Mask

if TYPE_CHECKING:
    from tests.support.cases import Case

MaskMaker = Callable[["Case"], Mask]


def _lengths(case: Case) -> Tensor:
    """Key lengths (B,): almost N, 0, 1 and N."""
    return torch.tensor([case.N - 3, 0, 1, case.N][: case.B])


def padding(case: Case) -> Mask:
    return Mask.padding(_lengths(case))


def key_range(case: Case) -> Mask:
    start = torch.tensor([case.N // 3, 2, 1, 0][: case.B])
    return Mask.key_range(start, torch.tensor([case.N - 5, 1, 2, case.N][: case.B]))


def segments(case: Case) -> Mask:
    """Documents of 30, 31, 32, ... positions; the last queries and keys match no document."""
    lengths = torch.arange(30, 30 + 64)

    def ids(length: int) -> Tensor:
        return torch.repeat_interleave(torch.arange(64), lengths)[:length].expand(case.B, -1)

    q_ids, k_ids = ids(case.M).clone(), ids(case.N).clone()
    q_ids[:, -5:], k_ids[:, -7:] = -1, -2
    return Mask.segments(q_ids, k_ids)


def mixed_segments(case: Case) -> Mask:
    """Segment ids that are neither sorted nor contiguous."""
    q_ids = torch.arange(case.B * case.M).reshape(case.B, -1) * 7 % 5
    k_ids = torch.arange(case.B * case.N).reshape(case.B, -1) * 11 % 6
    return Mask.segments(q_ids, k_ids)


def unequal_segments(case: Case) -> Mask:
    """Every pair of different ids; the ids of query and key are equal around the diagonal."""
    q_ids, k_ids = (torch.arange(length).expand(case.B, -1) // 2 for length in (case.M, case.N))
    return Mask.segments(q_ids, k_ids, equal=False)


def positions(
    left: int | None = None, right: int | None = 0, dimensions: str = "b", step: int = 1
) -> MaskMaker:
    """A window by positions: those of keys are gathered by `step`, those of queries in reverse.

    Batch entries and heads, as far as `dimensions` names them, have different positions.
    """

    def make(case: Case) -> Mask:
        B, H = (case.B if "b" in dimensions else 1), (case.H_q if "h" in dimensions else 1)
        q_pos = torch.arange(case.M).flip(0) + 3 * torch.arange(B * H).view(B, H, 1)
        k_pos = torch.arange(case.N) * step % case.N + 8 * torch.arange(H).view(1, H, 1)
        return Mask.positions(q_pos.int(), k_pos, left, right)

    return make


def dense(dimensions: str) -> MaskMaker:
    """About two thirds visible; the third row and the fourth column are fully masked."""

    def make(case: Case) -> Mask:
        shape = shape_of(case, dimensions)
        visible = torch.rand(shape, generator=generator_of(case.name + "mask")) < 0.66
        if shape[-2] > 3:
            visible[..., 2, :] = False
        visible[..., 3:4] = False
        return Mask.dense(visible)

    return make


def transposed_dense(case: Case) -> Mask:
    visible = torch.rand(case.B, 1, case.N, case.M, generator=generator_of(case.name)) < 0.5
    return Mask.dense(visible.mT)


def blocks(size: int, heads: int = 1) -> MaskMaker:
    """Block layout with about half of the blocks visible and the last row of blocks hidden."""

    def make(case: Case) -> Mask:
        shape = (heads, -(-case.M // size), -(-case.N // size))
        layout = torch.rand(shape, generator=generator_of(case.name)) < 0.5
        layout[:, -1] = False
        return Mask.block_sparse(layout, size)

    return make


def window(left: int | None, right: int | None, align: Align = "top_left") -> MaskMaker:
    return lambda _: Mask.window(left, right, align=align)


causal, causal_bottom_right = window(None, 0), window(None, 0, "bottom_right")


def both(*makers: MaskMaker) -> MaskMaker:
    def make(case: Case) -> Mask:
        mask = Mask()
        for maker in makers:
            mask = mask & maker(case)
        return mask

    return make


def shape_of(case: Case, dimensions: str) -> tuple[int, ...]:
    """Sizes of a case by letter: those of "bhmn", and 1."""
    sizes = {"b": case.B, "h": case.H_q, "m": case.M, "n": case.N, "1": 1}
    return tuple(sizes[letter] for letter in dimensions)


def generator_of(name: str) -> torch.Generator:
    """A random generator whose seed is a function of a name."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))
