"""Measurement of a case: first the error, then peak memory, then interleaved times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.runner.record import Recorder
from transformer_kernels.bench import (
    Budget,
    Case,
    Direction,
    Inputs,
    Interleaver,
    Outputs,
    Provenance,
    Row,
    Timing,
    Variant,
    clock_for,
    exact_outputs,
    make_row,
    peak_extra_bytes,
    prepare_work,
    run_once,
)
from transformer_kernels.bench.cases import Attend
from transformer_kernels.bench.tolerance import assert_within_rule
from transformer_kernels.bench.workload import Prepare

DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd", "fwd+bwd")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A workload to time together with others, and the remaining columns of its row."""

    case: Case
    direction: Direction
    variant: str
    prepare: Prepare
    error: float
    threads: int | None = None
    """number of threads; None: that of the run"""
    most_rounds: int | None = None
    """limit on the rounds of a slow workload; None: all rounds"""

    @property
    def label(self) -> str:
        """Name that is unique among the workloads timed together."""
        threads = "" if self.threads is None else f", {self.threads} threads"
        return f"{self.case.name}, {self.variant}{threads}"

    def row(self, provenance: Provenance, suite: str, timing: Timing, peak: int | None) -> Row:
        """Returns the CSV row; `peak` is in bytes."""
        return make_row(
            replace(provenance, threads=self.threads or provenance.threads),
            suite=suite,
            case=self.case,
            direction=self.direction,
            variant=self.variant,
            timing=timing,
            peak_bytes=peak,
            error=self.error,
        )


@dataclass(frozen=True)
class Expected:
    """Outputs in float64, and those of naive attention in the case's dtype."""

    exact: Outputs
    naive: Outputs


@dataclass(frozen=True)
class CheckedCase:
    """A case whose variants have all passed the tolerance rule."""

    case: Case
    inputs: Inputs
    attends: dict[str, Attend]
    outputs: dict[str, Outputs]
    expected: Expected

    def contenders(
        self, direction: Direction, variants: Iterable[str] | None = None
    ) -> list[Contender]:
        """Returns one contender for each of the variants; all by default."""
        return [
            Contender(
                case=self.case,
                direction=direction,
                variant=name,
                prepare=prepare_work(self.attends[name], self.inputs, direction, self.case.learned),
                error=self.outputs[name].error(self.expected.exact, direction),
            )
            for name in (self.attends if variants is None else variants)
        ]


def check(case: Case, variants: list[Variant], expected: Expected | None = None) -> CheckedCase:
    """Runs every variant once and checks its outputs.

    Args:
        case: the case.
        variants: variants to run; they include "naive" unless `expected` is given.
        expected: outputs to compare with, computed here by default.

    Raises:
        AssertionError: an error exceeds the tolerance rule.
    """
    inputs = case.inputs()
    attends = {variant.name: variant.attend_for(case) for variant in variants}
    outputs = {name: run_once(attend, inputs, case.learned) for name, attend in attends.items()}
    if expected is None:
        expected = Expected(exact_outputs(case, inputs), outputs["naive"])
    for name, got in outputs.items():
        assert_correct(name, case, got, expected)
    return CheckedCase(case, inputs, attends, outputs, expected)


def assert_correct(variant: str, case: Case, got: Outputs, expected: Expected) -> None:
    """Raises AssertionError if an output exceeds the tolerance rule."""
    exact, naive = expected.exact.tensors(), expected.naive.tensors()
    for tensor, value in got.tensors().items():
        assert_within_rule(f"{variant}, {case.name}: {tensor}", value, exact[tensor], naive[tensor])


Repeat = Callable[[Callable[[], None], int], object]
"""Calls the first argument as many times as the second specifies."""


def measured_rows(
    contenders: Sequence[Contender],
    *,
    provenance: Provenance,
    suite: str,
    budget: Budget,
    repeat: Repeat,
) -> list[Row]:
    """Measures peak memory and time of the contenders, which share one device.

    `repeat` runs the rounds; each round runs every contender once. Returns one row per contender.
    """
    by_label = {contender.label: contender for contender in contenders}
    (device,) = {c.case.device for c in contenders}
    peaks = {label: peak_extra_bytes(c.prepare, device) for label, c in by_label.items()}
    timer = Interleaver(
        {label: c.prepare for label, c in by_label.items()},
        {label: c.most_rounds for label, c in by_label.items() if c.most_rounds is not None},
        clock_for(device),
    )
    repeat(timer.round, budget.rounds(timer.warm_up()))
    timings = timer.timings()
    return [c.row(provenance, suite, timings[label], peaks[label]) for label, c in by_label.items()]


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
    --benchmark-json. `budget` replaces the recorder's budget.
    """
    rows = measured_rows(
        contenders,
        provenance=recorder.provenance.on(contenders[0].case.device),
        suite=suite,
        budget=budget or recorder.budget,
        repeat=lambda round_, rounds: benchmark.pedantic(  # type: ignore[no-untyped-call]
            round_, rounds=rounds
        ),
    )
    benchmark.group = suite
    medians = {c.label: row.median_ms for c, row in zip(contenders, rows, strict=True)}
    benchmark.extra_info.update({f"{label}_median_ms": ms for label, ms in medians.items()})
    recorder.add(rows)
