"""Measurement of the contenders of a case under pytest-benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.runner.record import Recorder
from transformer_kernels.bench import Budget, Direction, Row
from transformer_kernels.bench.contenders import (
    Contender,
    Repeat,
    call_repeatedly,
    measure_contenders,
)

DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd", "fwd+bwd")


def measure(
    benchmark: BenchmarkFixture,
    recorder: Recorder,
    *,
    suite: str,
    contenders: Sequence[Contender],
    budget: Budget | None = None,
) -> None:
    """Measures the contenders under pytest-benchmark and adds their rows to the recorder.

    One round of pytest-benchmark calls every variant once, so its own statistics describe whole
    rounds. The statistics of the variants are in the recorder's rows and in `extra_info` of
    --benchmark-json. `budget` replaces the recorder's budget. pytest-benchmark accepts one
    measurement per test: its statistics are those of the first, even if the recorder repeats it.
    """
    device = contenders[0].case.device
    repeats: Iterator[Repeat] = chain(
        [lambda round_, rounds: benchmark.pedantic(round_, rounds=rounds)],  # type: ignore[no-untyped-call]
        repeat(call_repeatedly),
    )

    def measure_once() -> list[Row]:
        measured = measure_contenders(
            contenders,
            provenance=recorder.provenance.on(device),
            suite=suite,
            budget=budget or recorder.budget,
            repeat=next(repeats),
        )
        return [one.row for one in measured]

    rows = recorder.add_steady(_label(suite, contenders), measure_once, device)
    benchmark.group = suite
    if rows:
        medians = {c.label: row.median_ms for c, row in zip(contenders, rows, strict=True)}
        benchmark.extra_info.update({f"{label}_median_ms": ms for label, ms in medians.items()})


def _label(suite: str, contenders: Sequence[Contender]) -> str:
    first = contenders[0]
    case = first.case
    return f"{suite}: {case.name}, {case.dtype_name}, {case.M} x {case.N}, {first.direction}"
