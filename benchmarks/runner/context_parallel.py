"""Context parallelism on gloo processes: measured times against those of the performance model.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.runner.context_parallel

Each process computes with one thread. The rates of the model are measured in the same rounds:
kernels on calls of a shard's size, by as many processes at once as there are processors; exchanges
of a shard's keys between two processes. The baseline is one process with as many threads as there
are processes, while the others wait.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.scale.model import count, shown
from benchmarks.scale.prediction import BACKWARD_FLOPS, FORWARD_FLOPS, Call, Machine, Pass, predict
from transformer_kernels import attention
from transformer_kernels.backends.base import Outputs
from transformer_kernels.bench.provenance import device_slug
from transformer_kernels.bench.tolerance import rounding_band
from transformer_kernels.distributed import (
    SequenceLayout,
    all_to_all_attention,
    partial,
    ring_attention,
    shard_sequence,
)
from transformer_kernels.distributed.peers import Peers
from transformer_kernels.training.distributed import end_process_group

H, D = 8, 64
PROCESSORS = len(os.sched_getaffinity(0))
Seconds = tuple[float, float]
"""Seconds of a forward pass, and of a forward and a backward pass."""


@dataclass(frozen=True)
class Case:
    """A call, measured in every round."""

    name: str
    call: Call
    seconds: list[Seconds] = field(default_factory=list)
    baseline: list[Seconds] = field(default_factory=list)


@dataclass(frozen=True)
class Inputs:
    """q, k, v and do of the sequence, and of this rank."""

    undivided: list[Tensor]
    shards: dict[SequenceLayout, list[Tensor]]

    @staticmethod
    def of(S: int) -> Inputs:
        generator = torch.Generator().manual_seed(0)
        undivided = [torch.randn(1, H, S, D, generator=generator) for _ in range(4)]
        layouts: tuple[SequenceLayout, ...] = ("zigzag", "contiguous")
        shards = {
            layout: [shard_sequence(x, dim=2, layout=layout).contiguous() for x in undivided]
            for layout in layouts
        }
        for tensors in (undivided, *shards.values()):
            for x in tensors[:3]:
                x.requires_grad_()
        return Inputs(undivided, shards)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints the tables, on every process of torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq", type=count, nargs="+", default=[8 << 10, 16 << 10])
    parser.add_argument("--window", type=count, default=1 << 10)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    dist.init_process_group("gloo")
    peers = Peers.of(None)
    torch.set_num_threads(1)
    inputs = {S: Inputs.of(S) for S in args.seq}
    cases = [case for S in args.seq for case in cases_of(S, args.window, peers.size)]
    for case in cases[: len(cases) // len(args.seq)]:
        check(case, inputs[case.call.S])
    machines: dict[int, list[Machine]] = {S: [] for S in args.seq}
    for n in range(args.rounds + 1):  # the first one warms up
        for S in args.seq:
            machine = calibrate(inputs[S], peers)
            if n:
                machines[S].append(machine)
        for case in cases:
            here = inputs[case.call.S]
            seconds, baseline = divided(case, here), undivided(case, here, peers)
            if n:
                case.seconds.append(seconds)
                case.baseline.append(baseline)
    if peers.rank == 0:
        report(cases, {S: median_machine(rows) for S, rows in machines.items()}, peers.size)
    end_process_group()


def cases_of(S: int, window: int, size: int) -> list[Case]:
    def call(ring: int, layout: SequenceLayout, window: int | None = None) -> Call:
        return Call(
            S=S, H_q=H, H_kv=H, D=D, ring=ring, heads=size // ring, layout=layout, window=window,
            dtype=torch.float32,
        )  # fmt: skip

    return [
        Case("ring, zigzag", call(size, "zigzag")),
        Case("ring, contiguous", call(size, "contiguous")),
        Case(f"ring, contiguous, window {shown(window)}", call(size, "contiguous", window)),
        Case("all-to-all", call(1, "contiguous")),
    ]


def run_divided(case: Case, inputs: Inputs) -> tuple[Tensor, Callable[[], tuple[Tensor, ...]]]:
    """Runs the forward pass; returns o, and the backward pass."""
    call = case.call
    q, k, v, do = inputs.shards[call.layout]
    operator = ring_attention if call.ring > 1 else all_to_all_attention
    o = operator(q, k, v, mask=call.mask, layout=call.layout)
    return o, lambda: torch.autograd.grad(o, (q, k, v), do)


def divided(case: Case, inputs: Inputs) -> Seconds:
    """Times a call on all processes, to the end of the last one."""
    dist.barrier()
    start = time.perf_counter()
    _, backward = run_divided(case, inputs)
    dist.barrier()
    middle = time.perf_counter()
    backward()
    dist.barrier()
    return middle - start, time.perf_counter() - start


def undivided(case: Case, inputs: Inputs, peers: Peers) -> Seconds:
    """Times the same call on the first process, with as many threads as there are processes."""
    q, k, v, do = inputs.undivided
    start = middle = time.perf_counter()
    if peers.rank == 0:
        torch.set_num_threads(peers.size)
        o = attention(q, k, v, mask=case.call.mask)
        middle = time.perf_counter()
        torch.autograd.grad(o, (q, k, v), do)
        torch.set_num_threads(1)
    end = time.perf_counter()
    dist.barrier()
    return middle - start, end - start


def check(case: Case, inputs: Inputs) -> None:
    """Raises AssertionError unless o and the gradients are those of the undivided call.

    Both are float32 results: each may differ from the exact one by the band of
    `bench.tolerance.rounding_band`, here taken twice for each.
    """
    o, backward = run_divided(case, inputs)
    q, k, v, do = inputs.undivided
    whole, lse = attention(q, k, v, mask=case.call.mask, return_lse=True)
    expected = (whole, *torch.autograd.grad(whole, (q, k, v), do))
    largest = float(lse.detach().abs().max())
    for name, got, x in zip(("o", "dq", "dk", "dv"), (o, *backward()), expected, strict=True):
        shard = shard_sequence(x.detach(), dim=2, layout=case.call.layout)
        error = float((got.detach() - shard).abs().max())
        bound = 4 * rounding_band(x.detach(), x.dtype, lse=largest)
        if error > bound:
            raise AssertionError(
                f"{case.name}: {name} differs by {error:.3g}, more than {bound:.3g}"
            )


def calibrate(inputs: Inputs, peers: Peers) -> Machine:
    """Measures the rates of the model, on calls and messages of a shard's size."""
    q, k, v, do = inputs.shards["contiguous"]
    length = q.shape[2]
    flops = length * length * D * H * 1e-12
    computes = peers.rank < PROCESSORS
    forward = backward = passes = launch = 1.0
    dist.barrier()
    if computes:
        forward = seconds(lambda: attention(q, k, v))
    dist.barrier()
    if computes:
        o = attention(q, k, v)
        backward = seconds(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))
    dist.barrier()
    if computes:
        rows = q.detach()
        total = partial.Total(torch.zeros_like(rows), torch.zeros(2, *rows.shape[:3]))
        part = Outputs(rows, torch.zeros(2, *rows.shape[:3]), None)
        passes = seconds(lambda: partial.add(total, slice(0, length), part))
        token = rows[:, :, :1].contiguous()
        launch = seconds(lambda: attention(token, token, token))
    dist.barrier()
    link = exchanged(k.detach(), peers)
    latency = exchanged(k.detach()[:, :1, :1, :1], peers)
    return Machine(
        ranks_per_node=peers.size,
        within=k.numel() * 4 / link * 1e-9,
        between=k.numel() * 4 / link * 1e-9,
        latency=latency * 1e6,
        forward=FORWARD_FLOPS * flops / forward,
        backward=BACKWARD_FLOPS * flops / backward,
        passes=12 * q.numel() / passes * 1e-9,
        launch=launch * 1e6,
        processors=PROCESSORS,
        overlap=False,
    )


def seconds(function: Callable[[], object]) -> float:
    """Returns the median of three times."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def exchanged(x: Tensor, peers: Peers) -> float:
    """Times an exchange between the first two processes, both directions at once."""
    sent, received = x.contiguous(), torch.empty_like(x)
    other = 1 - peers.rank

    def exchange() -> None:
        peers.exchange(to=other, sent=[sent], source=other, received=[received]).wait()

    dist.barrier()
    one = seconds(exchange) if peers.rank < 2 else 1.0
    dist.barrier()
    return one


def median_machine(rows: Sequence[Machine]) -> Machine:
    names = ("within", "between", "latency", "forward", "backward", "passes", "launch")
    middle = {name: statistics.median(getattr(row, name) for row in rows) for name in names}
    return Machine(
        **middle, ranks_per_node=rows[0].ranks_per_node, processors=PROCESSORS, overlap=False
    )


def report(cases: Sequence[Case], machines: dict[int, Machine], size: int) -> None:
    print(
        f"{device_slug()}, {PROCESSORS} processors, {size} gloo processes of one thread, "
        f"H = {H}, D = {D}, float32, causal; medians of {len(cases[0].seconds)} rounds\n"
    )
    for S, machine in machines.items():
        print(
            f"rates at {shown(S)}: kernels {machine.forward * 1e3:.1f} and "
            f"{machine.backward * 1e3:.1f} GFLOP/s, link {machine.within:.2f} GB/s, latency "
            f"{machine.latency:.0f} us, passes {machine.passes:.1f} GB/s, launch "
            f"{machine.launch:.0f} us"
        )
    print(
        "\n| tokens | case | pass | measured ms | predicted ms | ratio | MB sent | "
        "one process ms | speed-up |\n|---|---|---|---:|---:|---:|---:|---:|---:|"
    )
    for case in cases:
        prediction = predict(case.call, machines[case.call.S])
        directions: tuple[tuple[str, Pass], ...] = (
            ("forward", prediction.forward),
            ("both", prediction.both),
        )
        for n, (name, one) in enumerate(directions):
            measured = statistics.median(row[n] for row in case.seconds)
            baseline = statistics.median(row[n] for row in case.baseline)
            pairs = zip(case.baseline, case.seconds, strict=True)
            speed = statistics.median(whole[n] / ours[n] for whole, ours in pairs)
            print(
                f"| {shown(case.call.S)} | {case.name} | {name} | {measured * 1e3:.0f} | "
                f"{one.seconds * 1e3:.0f} | {measured / one.seconds:.2f} | "
                f"{(one.sent_within + one.sent_between) / 1e6:.1f} | {baseline * 1e3:.0f} | "
                f"{speed:.2f} |"
            )


if __name__ == "__main__":
    main()
