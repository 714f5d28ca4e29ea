"""The work and the messages of one rank of a ring, recorded without running them.

The plan and the sums of gradients run on tensors without data (device "meta"), with peers that
write messages down. What is sent, what is seen and what overlaps is thus that of the operators.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from transformer_kernels.distributed.gradients import GradientSums
from transformer_kernels.distributed.peers import Exchange, Peers
from transformer_kernels.distributed.plan import Plan
from transformer_kernels.distributed.rectangles import Undivided
from transformer_kernels.distributed.sequence import Piece, SequenceLayout
from transformer_kernels.problem.operations import window_pairs


class Start(NamedTuple):
    """An exchange begins. Sizes in bytes."""

    number: int
    to: int
    sent: int
    source: int
    received: int


class Wait(NamedTuple):
    """The rank waits for an exchange."""

    number: int


class Compute(NamedTuple):
    """The rank computes with the keys of a step."""

    rectangles: int
    pairs: int
    """visible pairs of a head and batch entry"""
    passes: int
    """bytes that elementwise operations read and write, to sum the results of rectangles"""
    held: int
    """bytes of the step's keys, and of their gradients"""


Event = Start | Wait | Compute


@dataclass(frozen=True)
class RecordingPeers(Peers):
    """Peers without processes: messages become events."""

    events: list[Event] = field(default_factory=list)

    @staticmethod
    def at(rank: int, size: int) -> RecordingPeers:
        return RecordingPeers(cast(Any, None), rank, size)  # no process group is read

    def exchange(
        self, *, to: int, sent: Iterable[Tensor], source: int, received: Iterable[Tensor]
    ) -> Exchange:
        number = len(self.events)
        self.events.append(Start(number, to, _bytes(*sent), source, _bytes(*received)))
        return _Recorded(self, to, source, [], [], self.events, number)


@dataclass(frozen=True)
class _Recorded(Exchange):
    events: list[Event]
    number: int

    def wait(self) -> None:
        self.events.append(Wait(self.number))


def shards_of(call: Undivided) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k, v of a rank, without data."""
    shape = call.problem.shape
    sizes = ((shape.H_q, shape.M), (shape.H_kv, shape.N), (shape.H_kv, shape.N))
    q, k, v = (
        torch.empty(shape.B, heads, length, shape.D, dtype=shape.dtype, device="meta")
        for heads, length in sizes
    )
    return q, k, v


def forward_events(call: Undivided, rank: int, size: int, layout: SequenceLayout) -> list[Event]:
    """Returns what `ring.RingAttention.forward` does on a rank."""
    peers = RecordingPeers.at(rank, size)
    plan = Plan(call, peers, layout)
    q, k, v = shards_of(call)
    o_width = q.shape[0] * q.shape[1] * q.shape[3]
    # `partial.add`: o is read and written, the part is read, after it is converted.
    a_value = 12 if q.dtype == torch.float32 else 16 + q.element_size()
    for _, keys in plan.keys(k, v):
        shapes = [(rows, columns) for rows, columns, _ in plan.rectangles(keys)]
        passes = sum(rows.length for rows, _ in shapes) * o_width * a_value
        held = _bytes(keys.k, keys.v)
        peers.events.append(Compute(len(shapes), _pairs(call, shapes), passes, held))
    return peers.events


def backward_events(call: Undivided, rank: int, size: int, layout: SequenceLayout) -> list[Event]:
    """Returns what `ring.RingAttention.backward` does on a rank."""
    peers = RecordingPeers.at(rank, size)
    plan = Plan(call, peers, layout)
    q, k, v = shards_of(call)
    q_width, k_width = (x.shape[0] * x.shape[1] * x.shape[3] for x in (q, k))
    e = q.element_size()
    for keys, of_keys in GradientSums(plan, q, k, v, ()).keys(k, v):
        shapes = [(rows, columns) for rows, columns, _ in plan.rectangles(keys)]
        passes = sum(
            (rows.length * q_width + 2 * columns.length * k_width) * (8 + e)
            for rows, columns in shapes
        )
        # Sums of the keys' gradients: zeroed, converted, added by the rank of the keys.
        passes += (keys.k.numel() + keys.v.numel()) * (4 + (4 + e) + (8 + e))
        held = _bytes(keys.k, keys.v, *of_keys)
        peers.events.append(Compute(len(shapes), _pairs(call, shapes), passes, held))
    return peers.events


def visible_pairs(call: Undivided, rows: Piece, columns: Piece) -> int:
    """Returns the visible pairs of a rectangle of a call whose mask is a window."""
    mask = call.rectangle(rows, columns, None).mask
    return window_pairs(mask.diagonal_low, mask.diagonal_high, rows.length, columns.length)


def all_pairs(call: Undivided) -> int:
    """Returns the visible pairs of the undivided call."""
    return visible_pairs(call, Piece(0, 0, call.M), Piece(0, 0, call.N))


def _pairs(call: Undivided, shapes: list[tuple[Piece, Piece]]) -> int:
    return sum(visible_pairs(call, rows, columns) for rows, columns in shapes)


def _bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
