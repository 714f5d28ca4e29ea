"""The plan of a ring call: which keys go to which rank, and when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..problem import Problem
from .peers import Peers
from .rectangles import Undivided
from .sequence import Piece, SequenceLayout, pieces_of


class Keys(NamedTuple):
    """Keys and values of some pieces of the sequence, with their segments and positions."""

    pieces: tuple[Piece, ...]
    k: Tensor
    v: Tensor
    k_position: Tensor | None

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.k, self.v, self.k_position) if x is not None]


class Step(NamedTuple):
    """Ranks that a rank exchanges keys with: those of `source` arrive, its own go to `to`."""

    source: int
    to: int


@dataclass(frozen=True, eq=False)
class Plan:
    """Plan of one call.

    Step d: each rank sends keys to the rank d after it, those that a query of the receiver sees.
    Both derive them from the diagonals, the layout and the key ranges. Steps are taken in the order
    0, 1, -1, 2, -2, ...: those that a window needs come first.
    """

    call: Undivided
    peers: Peers
    layout: SequenceLayout

    def queries(self, rank: int) -> tuple[Piece, ...]:
        return pieces_of(self.layout, self.call.M, rank, self.peers.size)

    def sent(self, source: int, to: int) -> tuple[Piece, ...]:
        """Returns the keys of rank `source` that queries of rank `to` see: of each of its pieces
        those between the diagonals, from the first to the last."""
        call, sent = self.call, []
        for columns in pieces_of(self.layout, call.N, source, self.peers.size):
            parts = [
                call.columns_seen(rows, columns)
                for rows in self.queries(to)
                if call.sees(rows, columns)
            ]
            if parts:
                first, end = min(part.start for part in parts), max(part.end for part in parts)
                sent.append(columns.part(first, end))
        return tuple(sent)

    def steps(self) -> list[Step]:
        """Returns the steps of this rank, first the one with its own keys."""
        rank, size = self.peers.rank, self.peers.size
        distances = [(n + 1) // 2 * (1 if n % 2 else -1) for n in range(size)]
        return [Step((rank - d) % size, (rank + d) % size) for d in distances]

    def keys(self, k: Tensor, v: Tensor) -> Iterator[tuple[Step, Keys]]:
        """Yields the keys of each step. Those of the next one arrive while the caller computes."""
        steps = self.steps()
        keys = self._own(k, v, self.peers.rank)
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            if following is None:
                yield step, keys
                return
            arriving = self._allocated(k, v, following.source)
            exchange = self.peers.exchange(
                to=following.to,
                sent=self._own(k, v, following.to).tensors(),
                source=following.source,
                received=arriving.tensors(),
            )
            yield step, keys
            exchange.wait()
            keys = arriving

    def rectangles(self, keys: Keys) -> Iterator[tuple[Piece, Piece, Problem]]:
        """Yields (rows, columns, problem) of the visible rectangles of this rank's queries."""
        for rows in self.queries(self.peers.rank):
            for columns in keys.pieces:
                if self.call.sees(rows, columns):
                    part = self.call.rows_seen(rows, columns)
                    yield part, columns, self.call.rectangle(part, columns, keys.k_position)

    def _own(self, k: Tensor, v: Tensor, to: int) -> Keys:
        pieces = self.sent(self.peers.rank, to)
        k_position = self.call.problem.mask.k_position
        return Keys(
            packed(pieces),
            select(k, pieces, 2),
            select(v, pieces, 2),
            None if k_position is None else select(k_position, pieces, 3),
        )

    def _allocated(self, k: Tensor, v: Tensor, source: int) -> Keys:
        pieces = packed(self.sent(source, self.peers.rank))
        length = sum(piece.length for piece in pieces)
        k_position = self.call.problem.mask.k_position
        if k_position is not None:
            k_position = k_position.new_empty(*k_position.shape[:-1], length)
        k, v = (x.new_empty(*x.shape[:2], length, x.shape[3]) for x in (k, v))
        return Keys(pieces, k, v, k_position)


def packed(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Returns the pieces with their offsets in a tensor that has no others."""
    offset, moved = 0, []
    for piece in pieces:
        moved.append(piece._replace(offset=offset))
        offset += piece.length
    return tuple(moved)


def select(x: Tensor, pieces: tuple[Piece, ...], dim: int) -> Tensor:
    """Returns the tokens of the pieces, contiguous."""
    if not pieces:
        return x.narrow(dim, 0, 0)
    parts = [x.narrow(dim, piece.offset, piece.length) for piece in pieces]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)
