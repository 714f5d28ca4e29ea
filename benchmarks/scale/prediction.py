"""A performance model of context parallelism: time, messages and memory of one attention layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch

from benchmarks.scale.trace import (
    Compute,
    Event,
    RecordingPeers,
    Start,
    Wait,
    all_pairs,
    backward_events,
    forward_events,
)
from transformer_kernels.common.argument_checks import check_int, check_number
from transformer_kernels.distributed.head_shards import HeadShards
from transformer_kernels.distributed.rectangles import Undivided, undivided_call
from transformer_kernels.distributed.sequence import SequenceLayout, check_layout, check_length
from transformer_kernels.masks.mask import Mask
from transformer_kernels.problem.operations import backward_operations, forward_operations

FORWARD_FLOPS = forward_operations(1, D=1, D_v=1)
"""FLOPs of the forward pass for a visible pair and value of D: two products."""
BACKWARD_FLOPS = backward_operations(1, D=1, D_v=1)
"""The same of the backward pass: five products."""
SIMULATED = 64
"""Largest ring of which every rank is simulated."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One attention layer over a sequence that is divided over ring * heads ranks.

    Rank n of all is rank n // heads of the ring and rank n % heads of its group for heads.
    """

    S: int
    """tokens of the sequence: queries and keys"""
    H_q: int
    H_kv: int
    D: int
    ring: int = 1
    """ranks that exchange keys: `group` of `ring_attention`"""
    heads: int = 1
    """ranks that exchange heads: `heads_group`, or `group` of `all_to_all_attention`"""
    layout: SequenceLayout = "zigzag"
    causal: bool = True
    window: int | None = None
    """keys before its own token that a query sees, and without `causal` also after it"""
    dtype: torch.dtype = torch.bfloat16
    B: int = 1

    def __post_init__(self) -> None:
        for name in ("S", "H_q", "H_kv", "D", "ring", "heads", "B"):
            check_int(name, getattr(self, name), 1)
        if self.window is not None:
            check_int("window", self.window, 0)
        check_layout(self.layout)
        if self.H_q % self.H_kv:
            raise ValueError(f"H_q must be a multiple of H_kv = {self.H_kv}, got {self.H_q}")
        check_length("S", self.S, self.layout, self.ring, self.heads)
        HeadShards(RecordingPeers.at(0, self.heads), self.H_q, self.H_kv)

    @property
    def ranks(self) -> int:
        return self.ring * self.heads

    @property
    def mask(self) -> Mask | None:
        if self.window is not None:
            return Mask.window(self.window, 0 if self.causal else self.window)
        return Mask.causal() if self.causal else None

    def undivided(self) -> Undivided:
        """Returns the call of the ring: a share of the heads, all tokens of its `heads` ranks."""
        length = self.S // self.ring
        q = torch.empty(
            self.B, self.H_q // self.heads, length, self.D, dtype=self.dtype, device="meta"
        )
        k = q.new_empty(self.B, self.key_heads // self.heads, length, self.D)
        return undivided_call(q, k, k, self.ring, mask=self.mask)

    @property
    def key_heads(self) -> int:
        """Heads of keys that are exchanged: ranks that share a head get it each."""
        return max(self.H_kv, self.heads)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of a machine, for one rank."""

    ranks_per_node: int
    within: float
    """GB/s to ranks of the same node, in each direction"""
    between: float
    """GB/s to other nodes, in each direction"""
    latency: float
    """microseconds of a message"""
    forward: float
    """TFLOP/s of the forward kernel on visible pairs"""
    backward: float
    """TFLOP/s of the backward kernel on visible pairs"""
    passes: float
    """GB/s of elementwise operations, reads and writes"""
    launch: float
    """microseconds of a rectangle without pairs: launches, work of the host"""
    processors: int | None = None
    """processors that the ranks of a node share; None: each rank has its own"""
    overlap: bool = True
    """False if messages take the processors that compute, such as those of gloo"""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "overlap" or value is None:
                continue
            if one.name in ("ranks_per_node", "processors"):
                check_int(one.name, value, 1)
            elif check_number(one.name, value) < 0 or (
                value == 0 and one.name not in ("latency", "launch")
            ):
                raise ValueError(f"{one.name} must be positive, got {value}")

    def transfer(self, size: int, *, near: bool) -> float:
        """Returns the seconds of a message without its latency, to a rank of the node if `near`."""
        return size / ((self.within if near else self.between) * 1e9)

    def pass_over(self, size: float) -> float:
        """Returns the seconds of elementwise operations that read and write so many bytes."""
        return size / (self.passes * 1e9)


H100_NODES = Machine(
    ranks_per_node=8,
    within=450.0,
    between=50.0,
    latency=10.0,
    forward=600.0,
    backward=450.0,
    passes=3350.0,
    launch=20.0,
)
"""Nodes of eight H100 SXM. Public figures, of NVIDIA's data sheets of H100 and DGX H100: NVLink
900 GB/s in both directions together, 3.35 TB/s of memory, a 400 Gb/s adapter for each GPU. Assumed:
10 us a message, 20 us a rectangle, and the kernels' rates (bfloat16, D = 128). Real links give less
than their data sheets say."""

H200_NODES = replace(H100_NODES, passes=4800.0)
"""The same with H200: 4.8 TB/s of memory, of NVIDIA's data sheet of H200."""

MACHINES = {"h100": H100_NODES, "h200": H200_NODES}


@dataclass(frozen=True)
class Timeline:
    """Outcome of one rank."""

    seconds: float = 0.0
    busy: float = 0.0
    """seconds in which the rank has a processor"""
    sent_within: int = 0
    sent_between: int = 0
    pairs: int = 0
    buffers: int = 0
    """largest number of bytes of keys in use and of messages under way"""

    def __add__(self, other: Timeline) -> Timeline:
        return Timeline(
            self.seconds + other.seconds,
            self.busy + other.busy,
            self.sent_within + other.sent_within,
            self.sent_between + other.sent_between,
            self.pairs + other.pairs,
            max(self.buffers, other.buffers),
        )


def replay(
    events: Iterable[Event], machine: Machine, pairs_per_second: float, in_node: frozenset[int]
) -> Timeline:
    """Returns the time of the events on one rank, none of whose peers is late.

    Exchanges take the link one after another, each as long as its slower direction. `in_node` has
    the ranks of the ring on the same node.
    """
    now = busy = link = 0.0
    done: dict[int, float] = {}
    under_way: dict[int, int] = {}
    line = Timeline()
    for event in events:
        match event:
            case Start(number, to, sent, source, received):
                seconds = max(
                    machine.transfer(sent, near=to in in_node),
                    machine.transfer(received, near=source in in_node),
                )
                seconds += machine.latency * 1e-6 if sent or received else 0.0
                packed = machine.pass_over(2 * sent)
                now, busy = now + packed, busy + packed
                if not machine.overlap:
                    now, busy = now + seconds, busy + seconds
                    seconds = 0.0
                link = max(now, link) + seconds
                done[number], under_way[number] = link, sent + received
                near, far = (sent, 0) if to in in_node else (0, sent)
                line += Timeline(sent_within=near, sent_between=far)
            case Wait(number):
                now = max(now, done[number])
                del under_way[number]
            case Compute(rectangles, pairs, passes, held):
                seconds = rectangles * machine.launch * 1e-6 + pairs / pairs_per_second
                seconds += machine.pass_over(passes)
                now, busy = now + seconds, busy + seconds
                line += Timeline(pairs=pairs, buffers=held + sum(under_way.values()))
    return replace(line, seconds=now, busy=busy)


class Pass(NamedTuple):
    """Costs of a forward pass, or of a forward and a backward pass."""

    seconds: float
    efficiency: float
    """time of the computation alone, divided equally over all ranks, / time"""
    sent_within: int
    """bytes that the busiest rank sends to ranks of its node"""
    sent_between: int
    """bytes that it sends to other nodes: the busiest rank is that which sends most of these, and
    if several do, the one of them that sends most within its node"""
    memory: int
    """bytes of a rank: inputs, results, float32 sums, messages under way"""


@dataclass(frozen=True)
class Prediction:
    """Costs of a call on a machine."""

    forward: Pass
    both: Pass
    """forward and backward pass"""
    imbalance: float
    """visible pairs of the rank with most, / their mean over the ranks"""


def predict(call: Call, machine: Machine) -> Prediction:
    """Returns the costs of a call: those of the slowest, the busiest and the fullest rank.

    Up to 64 ranks of a ring are simulated, of a larger one the first, the middle and the last.
    """
    undivided = call.undivided()
    pairs = all_pairs(undivided)
    # Of a rank, which computes with its share of the heads.
    elements = call.D * call.B * call.H_q / call.heads
    forward_rate = machine.forward * 1e12 / (FORWARD_FLOPS * elements)
    backward_rate = machine.backward * 1e12 / (BACKWARD_FLOPS * elements)
    exchanges = [_exchange_heads(call, machine, lse) for lse in (True, False)]
    forward, both = [], []
    for rank in _simulated(call.ring):
        in_node = _ring_ranks_in_node(call, machine, rank)
        one, two = (
            exchange + replay(_events(undivided, pairs, rank, call, events), machine, rate, in_node)
            for exchange, events, rate in (
                (exchanges[0], forward_events, forward_rate),
                (exchanges[1], backward_events, backward_rate),
            )
        )
        forward.append(one)
        both.append(one + two)
    computing = min(call.ranks, _processors(call, machine))
    ideal = pairs / forward_rate * call.heads / computing
    ideal_both = ideal + pairs / backward_rate * call.heads / computing
    most = max(line.pairs for line in forward)
    return Prediction(
        _pass(forward, ideal, _memory(call, forward), call, machine),
        _pass(both, ideal_both, _memory(call, both, backward=True), call, machine),
        most * call.ring / pairs,
    )


def _simulated(size: int) -> list[int]:
    return list(range(size)) if size <= SIMULATED else [0, size // 2, size - 1]


def _ring_ranks_in_node(call: Call, machine: Machine, rank: int) -> frozenset[int]:
    """Ranks of the ring on the node of a rank, of those with the first share of the heads."""
    node = rank * call.heads // machine.ranks_per_node
    first = -(-node * machine.ranks_per_node // call.heads)
    end = -(-(node + 1) * machine.ranks_per_node // call.heads)
    return frozenset(range(first, min(end, call.ring)))


def _events(
    undivided: Undivided,
    pairs: int,
    rank: int,
    call: Call,
    events_of_ring: Callable[[Undivided, int, int, SequenceLayout], list[Event]],
) -> list[Event]:
    if call.ring == 1:  # the operator calls `attention`
        return [Compute(1, pairs, 0, 0)]
    return events_of_ring(undivided, rank, call.ring, call.layout)


def _exchange_heads(call: Call, machine: Machine, lse: bool) -> Timeline:
    """Exchanges of heads for sequence: of q, k, v and o, or of their gradients; not overlapped."""
    peers = call.heads - 1
    if not peers:
        return Timeline()
    near = min(call.heads, machine.ranks_per_node) - 1
    values = 2 * (call.H_q + call.key_heads) * call.D * call.dtype.itemsize + 4 * call.H_q * lse
    to_a_peer = values * call.B * (call.S // call.ranks) // call.heads
    within, between = near * to_a_peer, (peers - near) * to_a_peer
    seconds = max(machine.transfer(within, near=True), machine.transfer(between, near=False))
    seconds += (4 + lse) * peers * machine.latency * 1e-6
    # A copy before, and one after: each reads and writes all values.
    seconds += machine.pass_over(4 * call.heads * to_a_peer)
    return Timeline(seconds, seconds, within, between)


def _pass(lines: list[Timeline], ideal: float, memory: int, call: Call, machine: Machine) -> Pass:
    """Costs of the slowest and of the busiest rank. On shared processors, time is also at least
    that in which these do the work of all ranks."""
    seconds = max(line.seconds for line in lines)
    work = sum(line.busy for line in lines) / len(lines) * call.ranks
    seconds = max(seconds, work / _processors(call, machine))
    busiest = max(lines, key=lambda line: (line.sent_between, line.sent_within))
    return Pass(seconds, ideal / seconds, busiest.sent_within, busiest.sent_between, memory)


def _processors(call: Call, machine: Machine) -> int:
    nodes = -(-call.ranks // machine.ranks_per_node)
    return call.ranks if machine.processors is None else nodes * machine.processors


def _memory(call: Call, lines: list[Timeline], *, backward: bool = False) -> int:
    """Bytes of tensors that are in use at the same time, of the fullest rank."""
    tokens, e = call.B * call.S // call.ranks, call.dtype.itemsize
    queries, keys = tokens * call.H_q * call.D, tokens * call.H_kv * call.D
    moved = tokens * call.key_heads * call.D
    rows = tokens * call.H_q * 4  # lse
    total = e * (2 * queries + 2 * keys) + rows  # q, o, k, v, lse
    if backward:
        total += e * (2 * queries + 2 * keys)  # do, dq, dk, dv
    if call.heads > 1:  # the same, for the rank's heads
        total += (1 + backward) * e * (2 * queries + 2 * moved) + rows
    if call.ring > 1:
        total += max(line.buffers for line in lines)
        if backward:  # float32 sums, and the results of one rectangle
            total += (4 + e) * (queries + 2 * moved)
        else:
            total += (4 + e) * queries + 2 * rows
    return total
