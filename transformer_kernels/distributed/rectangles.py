"""The undivided call as a problem, and its rectangles: some rows against some columns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Unpack

from torch import Tensor

from ..masks.constraints import (
    UNBOUNDED,
    Align,
    Constraint,
    Dense,
    Intervals,
    Positions,
    Segments,
    blocks_part,
)
from ..masks.mask import Mask
from ..masks.resolved import ALL_VISIBLE, ResolvedMask, resolve
from ..masks.selected import Selected
from ..problem import Problem, shape_of
from ..problem.checks import check_mask_tensors, check_tensors
from ..scores import philox
from ..scores.alibi import Alibi
from ..scores.options import DIFFERENTIABLE, ScoreArguments, check_scores
from .sequence import Piece


@dataclass(frozen=True, eq=False)
class Undivided:
    """A call over a whole sequence, of which this process has a shard.

    `problem` has the shard's sizes. Its numbers and its tables by distance are those of M x N. Its
    tensors by token have the shard's tokens: segments and positions those of the queries and of the
    keys, dense masks and biases the shard's rows and all columns. The origin of the diagonals is
    top-left.
    """

    problem: Problem
    M: int
    N: int
    _seen: dict[tuple[Piece, Piece], bool] = field(default_factory=dict)
    """Results of `sees`."""

    def from_head(self, head: int) -> Undivided:
        """Returns the call of heads from `head` on: their dropout bits are those of all heads."""
        scores = self.problem.scores
        if not scores.dropout_p or head == 0:
            return self
        scores = scores._replace(dropout_head=head)
        return replace(self, problem=replace(self.problem, scores=scores))

    def sees(self, rows: Piece, columns: Piece) -> bool:
        """False if the diagonals, the blocks or key ranges on the CPU hide the rectangle.

        All ranks get the same answer.
        """
        at = rows, columns
        if at not in self._seen:
            self._seen[at] = self._sees(rows, columns)
        return self._seen[at]

    def columns_seen(self, rows: Piece, columns: Piece) -> Piece:
        """Returns the columns between the diagonals of some row."""
        mask = self.problem.mask
        return _between(
            columns, rows.start + mask.diagonal_low, rows.end + mask.diagonal_high, self._unit
        )

    def rows_seen(self, rows: Piece, columns: Piece) -> Piece:
        """Returns the rows that have some column between the diagonals."""
        mask = self.problem.mask
        first, end = columns.start - mask.diagonal_high, columns.end - mask.diagonal_low
        return _between(rows, first, end, self._unit)

    @property
    def _unit(self) -> int:
        """Parts of pieces start at multiples of it, or at those of the piece."""
        block = philox.BLOCK if self.problem.scores.dropout_p else 1
        return math.lcm(self.problem.mask.block_size or 1, block)

    def _sees(self, rows: Piece, columns: Piece) -> bool:
        mask = self.problem.mask
        shift = rows.start - columns.start
        low, high = _shifted(mask.diagonal_low, shift), _shifted(mask.diagonal_high, shift)
        if low > high or low > columns.length - 1 or high < 1 - rows.length:
            return False
        if mask.key_end is not None and mask.key_end.is_cpu:
            end = mask.key_end.clamp(max=columns.end)
            start = end.new_zeros(()) if mask.key_start is None else mask.key_start
            if not (end > start.clamp(min=columns.start)).any():
                return False
        if mask.blocks is not None and mask.blocks.is_cpu:
            return bool(_blocks_of(mask, rows, columns)[0].any())
        return True

    def rectangle(self, rows: Piece, columns: Piece, k_position: Tensor | None) -> Problem:
        """Returns the problem of some rows against some columns.

        Args:
            rows: a piece of this rank's queries.
            columns: a piece of any rank's keys.
            k_position: segments and positions of the keys that the columns are a piece of.
        """
        mask, scores = self.problem.mask, self.problem.scores
        shape = self.problem.shape._replace(M=rows.length, N=columns.length)
        if mask is not ALL_VISIBLE:
            mask = _mask_of(mask, rows, columns, k_position)
        if scores.alibi_slopes is not None:
            offset = scores.alibi_offset + rows.start - columns.start
            scores = scores._replace(alibi_offset=offset)
        if scores.dropout_p:
            scores = scores._replace(
                dropout_row=scores.dropout_row + rows.start,
                dropout_column=scores.dropout_column + columns.start,
            )
        for name in DIFFERENTIABLE:
            x = getattr(scores, name)
            if x is not None:
                scores = scores._replace(**{name: x[self.index(name, rows, columns)]})
        return replace(self.problem, shape=shape, mask=mask, scores=scores)

    def index(self, name: str, rows: Piece, columns: Piece) -> tuple[slice, ...]:
        """Returns the part of a differentiable option that a rectangle reads."""
        if name == "bias":
            assert self.problem.scores.bias is not None
            return _rows_and_columns(self.problem.scores.bias, rows, columns)
        # Entry e of the table is i - j + N - 1.
        first = rows.start - columns.start + self.N - columns.length
        return slice(None), slice(first, first + rows.length + columns.length - 1)


def undivided_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: int,
    *,
    mask: Mask | None,
    **arguments: Unpack[ScoreArguments],
) -> Undivided:
    """Validates a call whose sequence is divided over `ranks` processes.

    Raises as `attention` does; sizes in the messages are M and N of the sequence for windows, key
    ranges, blocks and columns, and those of the shard for tensors by token.
    """
    check_tensors(q, k, v)
    shape = shape_of(q, k, v)
    M, N = shape.M * ranks, shape.N * ranks
    bias = arguments.get("bias")
    align: Align = bias.align if isinstance(bias, Alibi) else "top_left"
    resolved = _resolve(mask, q, shape.M, M, shape.N, N, align)
    bottom_right = resolved.bottom_right
    scores = check_scores(q, M, N, bottom_right=bottom_right, **arguments)
    if bottom_right:
        resolved = resolved._replace(
            diagonal_low=_shifted(resolved.diagonal_low, N - M),
            diagonal_high=_shifted(resolved.diagonal_high, N - M),
            bottom_right=False,
        )
        scores = scores._replace(alibi_offset=scores.alibi_offset + N - M)
    return Undivided(Problem(shape, resolved, scores), M, N)


def _resolve(
    mask: Mask | None, q: Tensor, rows: int, M: int, columns: int, N: int, align: Align
) -> ResolvedMask:
    """Resolves constraints by token against the shard, dense ones against its rows."""
    if mask is None:
        return ResolvedMask(bottom_right=align == "bottom_right")
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a Mask or None, got {type(mask).__name__}")
    check_mask_tensors(mask, q.device)
    by_token: list[Constraint] = []
    by_row: list[Constraint] = []
    others: list[Constraint] = []
    for one in mask.constraints:
        match one:
            case Segments() | Positions() | Intervals():
                by_token.append(one)
            case Dense() | Selected():
                by_row.append(one)
            case _:
                others.append(one)
    B, H = q.shape[:2]
    tokens = resolve(Mask(tuple(by_token)), B, H, rows, columns)
    own = resolve(Mask(tuple(by_row)), B, H, rows, N)
    resolved = resolve(Mask(tuple(others)), B, H, M, N, align)
    return resolved._replace(
        q_low=tokens.q_low, q_high=tokens.q_high, k_position=tokens.k_position,
        dense=own.dense, selected=own.selected, selected_size=own.selected_size,
    )  # fmt: skip


def _mask_of(
    mask: ResolvedMask, rows: Piece, columns: Piece, k_position: Tensor | None
) -> ResolvedMask:
    shift = rows.start - columns.start
    low, high = _shifted(mask.diagonal_low, shift), _shifted(mask.diagonal_high, shift)
    if low <= high:  # a diagonal outside of the rectangle hides nothing
        low = -UNBOUNDED if low <= 1 - rows.length else low
        high = UNBOUNDED if high >= columns.length - 1 else high
    part = ResolvedMask(low, high)
    if mask.key_end is not None:
        part = part._replace(key_end=mask.key_end - columns.start)
    if mask.key_start is not None:
        part = part._replace(key_start=mask.key_start - columns.start)
    if mask.q_low is not None and mask.q_high is not None and k_position is not None:
        part = part._replace(
            q_low=mask.q_low[..., rows.local],
            q_high=mask.q_high[..., rows.local],
            k_position=k_position[..., columns.local],
        )
    if mask.dense is not None:
        part = part._replace(dense=mask.dense[_rows_and_columns(mask.dense, rows, columns)])
    if mask.blocks is not None:
        blocks, size = _blocks_of(mask, rows, columns)
        part = part._replace(blocks=blocks, block_size=size)
    if mask.selected is not None:
        lists = Selected(mask.selected[:, :, rows.local], mask.selected_size)
        all_rows, spans = range(rows.length), range(columns.start, columns.end)
        lists = lists.part(all_rows, spans, rows.length, columns.end)
        part = part._replace(selected=lists.indices, selected_size=lists.block_size)
    return part


def _blocks_of(mask: ResolvedMask, rows: Piece, columns: Piece) -> tuple[Tensor, int]:
    """Returns the blocks of a rectangle, and their size, which divides its first row and column."""
    assert mask.blocks is not None
    spans = (range(piece.start, piece.end) for piece in (rows, columns))
    return blocks_part(mask.blocks, mask.block_size, *spans)


def _between(piece: Piece, first: int, end: int, unit: int) -> Piece:
    """Returns the tokens of a piece from `first`, or some before it, to before `end`."""
    first = max(piece.start, first // unit * unit)
    return piece.part(first, max(first, min(piece.end, end)))


def _rows_and_columns(x: Tensor, rows: Piece, columns: Piece) -> tuple[slice, ...]:
    """Index of a rectangle in (1|B, 1|H, 1|rows of the shard, 1|N)."""
    every = slice(None)
    row = every if x.shape[2] == 1 else rows.local
    column = every if x.shape[3] == 1 else slice(columns.start, columns.end)
    return every, every, row, column


def _shifted(diagonal: int, shift: int) -> int:
    """Moves a diagonal, unless it is unbounded."""
    return diagonal if abs(diagonal) == UNBOUNDED else diagonal + shift
