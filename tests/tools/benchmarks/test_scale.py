"""The performance model: pairs, messages, times and memory of context parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.scale.model import count, main, shown
from benchmarks.scale.prediction import H100_NODES, Call, Machine, Prediction, predict
from benchmarks.scale.trace import (
    Compute,
    RecordingPeers,
    Start,
    all_pairs,
    backward_events,
    forward_events,
    visible_pairs,
)
from tests.support.tiers import each
from transformer_kernels import Mask
from transformer_kernels.distributed.plan import Plan
from transformer_kernels.distributed.sequence import SequenceLayout, pieces_of

LAYOUTS: tuple[SequenceLayout, ...] = ("zigzag", "contiguous")
MASKS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {},
    "window": {"window": 5},
    "own": {"window": 0},
    "two-sided": {"window": 4, "causal": False},
}


def of(S: int, ring: int, **options: Any) -> Call:
    defaults = {"H_q": 4, "H_kv": 2, "D": 16}
    return Call(S=S, ring=ring, **(defaults | options))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("ring", "chunk"), [(1, 7), (2, 3), (3, 5), (5, 1)])
def test_pairs_are_those_of_the_mask(
    name: str, layout: SequenceLayout, ring: int, chunk: int
) -> None:
    S = 2 * ring * chunk
    call = of(S, ring, layout=layout, **MASKS[name])
    undivided = call.undivided()
    mask = (call.mask or Mask()).materialize(1, 1, S, S)[0, 0]
    assert all_pairs(undivided) == mask.sum()
    for rank in range(ring):
        for rows in pieces_of(layout, S, rank, ring):
            for source in range(ring):
                for columns in pieces_of(layout, S, source, ring):
                    part = mask[rows.start :, columns.start :][: rows.length, : columns.length]
                    assert visible_pairs(undivided, rows, columns) == part.sum()
                    assert undivided.sees(rows, columns) == bool(part.any())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("events_of", [forward_events, backward_events])
def test_ranks_compute_every_pair_once(name: str, layout: SequenceLayout, events_of: Any) -> None:
    undivided = of(30, 3, layout=layout, **MASKS[name]).undivided()
    pairs = sum(
        event.pairs
        for rank in range(3)
        for event in events_of(undivided, rank, 3, layout)
        if isinstance(event, Compute)
    )
    assert pairs == all_pairs(undivided)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_bytes_are_those_that_the_plan_sends(name: str, layout: SequenceLayout) -> None:
    call = of(40, 4, layout=layout, **MASKS[name])
    a_token = 2 * call.H_kv * call.D * call.dtype.itemsize
    undivided = call.undivided()
    sent, of_gradients = [], []
    for rank in range(4):
        plan = Plan(undivided, RecordingPeers.at(rank, 4), layout)
        others = [other for other in range(4) if other != rank]
        sent.append(a_token * sum(p.length for to in others for p in plan.sent(rank, to)))
        of_gradients.append(a_token * sum(p.length for s in others for p in plan.sent(s, rank)))
    # The backward pass sends keys again, and gradients of all keys received.
    both = max(2 * keys + back for keys, back in zip(sent, of_gradients, strict=True))
    together = predict(call, replace(H100_NODES, ranks_per_node=4))
    assert (together.forward.sent_within, together.both.sent_within) == (max(sent), both)
    alone = predict(call, replace(H100_NODES, ranks_per_node=1))
    assert (alone.forward.sent_between, alone.both.sent_between) == (max(sent), both)


def test_two_ranks_of_a_causal_zigzag_ring() -> None:
    """Chunks 0, 3 and 1, 2 of 10 tokens. Rank 1 needs chunk 0 of rank 0; chunk 3 of rank 0 needs
    both of rank 1."""
    call = of(40, 2)
    a_token = 2 * 2 * 16 * 2  # k and v, heads, D, bytes
    undivided = call.undivided()
    sent, returned = (
        [
            [one for one in events_of(undivided, rank, 2, "zigzag") if type(one) is Start]
            for rank in range(2)
        ]
        for events_of in (forward_events, backward_events)
    )
    assert [[one.sent for one in of_rank] for of_rank in sent] == [[10 * a_token], [20 * a_token]]
    keys, gradients = (10 * a_token, 20 * a_token), (20 * a_token, 10 * a_token)
    sizes = [[(one.sent, one.received) for one in of_rank] for of_rank in returned]
    assert sizes == [[keys, gradients], [keys[::-1], gradients[::-1]]]


def test_a_window_skips_steps() -> None:
    """Windows reach 8 tokens of the previous shard: each rank but the last sends them to one."""
    call = of(80, 8, layout="contiguous", window=8)
    a_token = 2 * 2 * 16 * 2
    undivided = call.undivided()
    for rank in range(8):
        events = forward_events(undivided, rank, 8, "contiguous")
        sent = [event.sent for event in events if type(event) is Start]
        assert sent == [8 * a_token if rank < 7 else 0, *[0] * 6]
    machine = replace(H100_NODES, launch=0.0)
    one_step = predict(replace(call, window=10), machine).forward.seconds
    two_steps = predict(replace(call, window=11), machine).forward.seconds
    assert two_steps > one_step + 9e-6  # the latency of a message


@pytest.mark.parametrize("ring", [2, 3, 8, 100])
def test_imbalance_under_a_causal_mask(ring: int) -> None:
    call = of(2 * ring * 64, ring)
    assert predict(call, H100_NODES).imbalance == pytest.approx(1.0, abs=1e-9)
    # The last shard of n sees n - 1 others and half of itself, of n^2 / 2 in all.
    contiguous = predict(replace(call, layout="contiguous"), H100_NODES)
    assert contiguous.imbalance == pytest.approx((2 * ring - 1) / ring, rel=1e-2)


def test_one_rank_has_no_communication_and_the_time_of_its_computation() -> None:
    """4 S^2 D FLOPs a head forward, 10 backward, half of them under a causal mask."""
    machine = replace(H100_NODES, launch=0.0)
    prediction = predict(of(1 << 14, 1), machine)
    for one in (prediction.forward, prediction.both):
        assert one.sent_within == one.sent_between == 0
        assert one.efficiency == pytest.approx(1.0)
    assert prediction.imbalance == 1.0
    full = predict(of(1 << 14, 1, causal=False), machine)
    forward, backward = (flops * (1 << 28) * 16 * 4 for flops in (4, 10))
    assert full.forward.seconds == pytest.approx(forward / 600e12)
    assert full.both.seconds == pytest.approx(forward / 600e12 + backward / 450e12)


@pytest.mark.parametrize(("ring", "heads"), [(8, 1), (1, 4), (4, 2), (2, 4)])
@pytest.mark.parametrize("name", ["within", "between", "forward", "backward", "passes"])
def test_a_faster_machine_is_never_slower(ring: int, heads: int, name: str) -> None:
    call = of(1 << 12, ring, heads=heads)
    slow = replace(H100_NODES, ranks_per_node=3)
    last: Prediction | None = None
    for factor in (0.01, 0.1, 1.0, 10.0):
        machine = replace(slow, **{name: getattr(slow, name) * factor})
        prediction = predict(call, machine)
        if last is not None:
            assert prediction.forward.seconds <= last.forward.seconds
            assert prediction.both.seconds <= last.both.seconds
        last = prediction


def test_messages_are_within_and_between_nodes() -> None:
    call = of(1 << 10, 8, causal=False)
    alone = predict(call, replace(H100_NODES, ranks_per_node=1)).forward
    together = predict(call, H100_NODES).forward
    halves = predict(call, replace(H100_NODES, ranks_per_node=4)).forward
    assert (alone.sent_within, together.sent_between) == (0, 0)
    assert alone.sent_between == together.sent_within
    assert halves.sent_within * 4 == halves.sent_between * 3


def test_heads_are_exchanged_within_a_node() -> None:
    """Each rank keeps 1/4 of q, k, v, o and lse, and sends the rest; key heads are repeated."""
    tokens, e = 1 << 8, 2
    prediction = predict(of(4 * tokens, 1, heads=4), H100_NODES)
    values = tokens * 16 * (4 + 4 + 4 + 4)
    assert prediction.forward.sent_within == (values * e + 4 * 4 * tokens) * 3 // 4
    assert prediction.both.sent_within == (2 * values * e + 4 * 4 * tokens) * 3 // 4
    assert prediction.forward.sent_between == 0


def test_messages_that_do_not_overlap_take_longer() -> None:
    call = of(1 << 12, 4)
    overlapped, not_overlapped = (
        predict(call, replace(H100_NODES, overlap=overlap)).both.seconds
        for overlap in (True, False)
    )
    assert overlapped < not_overlapped


def test_shared_processors_divide_the_rate() -> None:
    machine = replace(H100_NODES, ranks_per_node=4, launch=0.0, latency=0.0, passes=1e9, within=1e9)
    call = of(1 << 12, 4)
    own, shared = (
        predict(call, replace(machine, processors=processors)) for processors in (None, 2)
    )
    assert shared.both.seconds == pytest.approx(2 * own.both.seconds, rel=1e-3)
    assert shared.both.efficiency == pytest.approx(own.both.efficiency, rel=1e-3)


def test_memory_does_not_grow_with_ranks_at_a_constant_shard() -> None:
    small, large = (predict(of(ring << 10, ring), H100_NODES) for ring in (8, 32))
    assert small.forward.memory == large.forward.memory
    assert small.both.memory == large.both.memory > small.forward.memory


@each(
    ("options", "message"),
    [
        ({"S": 0}, "S must be at least 1, got 0"),
        ({"S": 30}, "S must be a multiple of 4 for 2 ranks"),
        ({"H_kv": 3}, "H_q must be a multiple of H_kv = 3, got 4"),
        ({"heads": 3, "S": 48}, "H_q must be a multiple of it"),
        ({"layout": "striped"}, "layout must be 'zigzag' or 'contiguous'"),
        ({"window": -1}, "window must be at least 0"),
    ],
)
def test_invalid_calls(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of(**({"S": 32, "ring": 2} | options))


@each("name", ["within", "forward", "latency", "ranks_per_node", "processors"])
def test_invalid_machines(name: str) -> None:
    invalid: dict[str, Any] = {name: -1}
    with pytest.raises(ValueError, match=f"{name} must be"):
        replace(H100_NODES, **invalid)
    assert isinstance(replace(H100_NODES, latency=0.0), Machine)


def test_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "--seq 4k 8k --ranks 2 16 --heads 8 --grids 4 8 --layouts zigzag contiguous --window 1k"
    )
    assert main(arguments.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "causal window of 1024" in lines[0]
    table = [line for line in lines if line.strip().startswith(("4k", "8k"))]
    # 2 ranks: ring (both layouts), all-to-all; 16: also 4 x 4 and 2 x 8.
    assert len(table) == 2 * (3 + 2 + 2 * 2 + 1)
    assert sum("not possible: too few heads" in line for line in table) == 2
    assert max(map(len, lines)) <= 120


def test_command_names_invalid_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ("--seq 8k --ranks 3", "must be a multiple of 6"),
        ("--seq 8X --ranks 2", "such as 8192, 128k or 1M"),
        ("--seq 8k --ranks 2 --within 0", "within must be positive"),
    ):
        with pytest.raises(SystemExit):
            main(arguments.split())
        assert message in capsys.readouterr().err


@each(("text", "value"), [("1000", 1000), ("128k", 131072), ("10M", 10 << 20)])
def test_counts_have_suffixes(text: str, value: int) -> None:
    assert count(text) == value
    assert shown(value) == text


@pytest.mark.exhaustive
def test_a_thousand_ranks_have_no_data() -> None:
    call = Call(S=10 << 20, H_q=32, H_kv=8, D=128, ring=1024)
    assert call.undivided().problem.shape.device == torch.device("meta")
    assert 0.5 < predict(call, H100_NODES).both.efficiency < 1.0
