"""How cases are measured: errors first, then memory, then times taken in turn."""

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
    """One of those whose times are taken in turn, and what its row says beside the time."""

    case: Case
    direction: Direction
    variant: str
    prepare: Prepare
    error: float
    threads: int | None = None
    """Where not those of the whole run"""
    most_rounds: int | None = None
    """Of the slow, which need not take part in every round"""

    @property
    def label(self) -> str:
        """Unique among those that are timed together."""
        threads = "" if self.threads is None else f", {self.threads} threads"
        return f"{self.case.name}, {self.variant}{threads}"

    def row(self, provenance: Provenance, suite: str, timing: Timing, peak: int | None) -> Row:
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
class Truth:
    """What outputs are judged by: float64, and the same maths by naive attention."""

    exact: Outputs
    naive: Outputs


@dataclass(frozen=True)
class CheckedCase:
    """A case whose variants have all been found right."""

    case: Case
    inputs: Inputs
    attends: dict[str, Attend]
    outputs: dict[str, Outputs]
    truth: Truth

    def contenders(
        self, direction: Direction, variants: Iterable[str] | None = None
    ) -> list[Contender]:
        """The variants, all unless named."""
        return [
            Contender(
                case=self.case,
                direction=direction,
                variant=name,
                prepare=prepare_work(self.attends[name], self.inputs, direction, self.case.learned),
                error=self.outputs[name].error(self.truth.exact, direction),
            )
            for name in (self.attends if variants is None else variants)
        ]


def check(case: Case, variants: list[Variant], truth: Truth | None = None) -> CheckedCase:
    """Runs every variant once; AssertionError where one errs by more than the tests allow.

    Naive attention is one of the variants, or the truth is given.
    """
    inputs = case.inputs()
    attends = {variant.name: variant.bind(case) for variant in variants}
    outputs = {name: run_once(attend, inputs, case.learned) for name, attend in attends.items()}
    if truth is None:
        truth = Truth(exact_outputs(case, inputs), outputs["naive"])
    for name, got in outputs.items():
        assert_right(name, case, got, truth)
    return CheckedCase(case, inputs, attends, outputs, truth)


def assert_right(variant: str, case: Case, got: Outputs, truth: Truth) -> None:
    """AssertionError where an output errs by more than the tests allow."""
    exact, naive = truth.exact.tensors(), truth.naive.tensors()
    for tensor, value in got.tensors().items():
        assert_within_rule(f"{variant}, {case.name}: {tensor}", value, exact[tensor], naive[tensor])


Repeat = Callable[[Callable[[], None], int], object]
"""Calls the first argument as often as the second says."""


def measured_rows(
    contenders: Sequence[Contender],
    *,
    provenance: Provenance,
    suite: str,
    budget: Budget,
    repeat: Repeat,
) -> list[Row]:
    """A row for each contender, all on one device; `repeat` drives the rounds, of which each runs
    them in turn."""
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
    """pytest-benchmark drives the rounds; one of its rounds is one call of every variant in turn.

    So its own statistics are those of whole rounds; the variants' are in the recorder's rows, and
    in `extra_info` of what --benchmark-json writes. `budget` replaces the recorder's.
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
