"""Sums of a ring's gradients, and their way to the ranks that have the keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .peers import Exchange
from .plan import Keys, Plan, Step
from .sequence import Piece


class KeyGradients(NamedTuple):
    """Gradients of keys and values."""

    k: Tensor
    v: Tensor


class _Arriving(NamedTuple):
    """Gradients of this rank's keys that another rank has computed."""

    exchange: Exchange
    pieces: tuple[Piece, ...]
    gradients: KeyGradients


class GradientSums:
    """Sums in the dtype of softmax statistics. Each is taken in the order of the plan's steps, so
    that it has the same bits in every run."""

    def __init__(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, wanted: Sequence[str]) -> None:
        self.plan = plan
        self.dtype = plan.call.problem.shape.accumulate_dtype
        scores = plan.call.problem.scores
        self.q = torch.zeros_like(q, dtype=self.dtype)
        self.own = self._zeros(k, v)
        self.options = {
            name: torch.zeros_like(getattr(scores, name), dtype=self.dtype) for name in wanted
        }

    def add(
        self,
        rows: Piece,
        columns: Piece,
        gradients: Mapping[str, Tensor],
        of_keys: KeyGradients,
    ) -> None:
        """Adds the gradients of a rectangle."""
        self.q[:, :, rows.local] += gradients["q"]
        of_keys.k[:, :, columns.local] += gradients["k"]
        of_keys.v[:, :, columns.local] += gradients["v"]
        for name, total in self.options.items():
            total[self.plan.call.index(name, rows, columns)] += gradients[name]

    def keys(self, k: Tensor, v: Tensor) -> Iterator[tuple[Keys, KeyGradients]]:
        """Yields the keys of each step, with zeros for their gradients. Once the caller has added
        these, they go to the rank of the keys while it computes the next ones."""
        arriving: _Arriving | None = None
        for step, keys in self.plan.keys(k, v):
            of_keys = self._zeros(keys.k, keys.v)
            yield keys, of_keys
            self._receive(arriving)
            arriving = None
            if step.source == self.plan.peers.rank:
                self._add_own(self.plan.sent(step.source, step.to), of_keys)
            else:
                arriving = self._send(step, of_keys, k, v)
        self._receive(arriving)

    def _zeros(self, k: Tensor, v: Tensor) -> KeyGradients:
        return KeyGradients(*(torch.zeros_like(x, dtype=self.dtype) for x in (k, v)))

    def _send(self, step: Step, of_keys: KeyGradients, k: Tensor, v: Tensor) -> _Arriving:
        """Starts to send gradients, in the dtype of the keys, to the rank of the keys."""
        pieces = self.plan.sent(self.plan.peers.rank, step.to)
        length = sum(piece.length for piece in pieces)
        received = KeyGradients(*(x.new_empty(*x.shape[:2], length, x.shape[3]) for x in (k, v)))
        exchange = self.plan.peers.exchange(
            to=step.source,
            sent=[x.to(k.dtype) for x in of_keys],
            source=step.to,
            received=received,
        )
        return _Arriving(exchange, pieces, received)

    def _receive(self, arriving: _Arriving | None) -> None:
        if arriving is not None:
            arriving.exchange.wait()
            self._add_own(arriving.pieces, arriving.gradients)

    def _add_own(self, pieces: tuple[Piece, ...], gradients: KeyGradients) -> None:
        offset = 0
        for piece in pieces:
            part = slice(offset, offset + piece.length)
            for total, x in zip(self.own, gradients, strict=True):
                total[:, :, piece.local] += x[:, :, part]
            offset += piece.length
