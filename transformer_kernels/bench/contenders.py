"""Contenders: checked variants of a case, and their measurement.

A case is checked first; then peak memory is measured, then time, interleaved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .accuracy import Outputs, exact_outputs, run_once
from .cases import Attend, Case, Direction, Inputs
from .memory import peak_extra_bytes
from .provenance import Provenance
from .rows import Row, make_row
from .timer import Budget, Interleaver, Timing, clock_for
from .tolerance import assert_within_rule
from .variants import VARIANTS, Variant
from .workload import Prepare, prepare_work


@dataclass(frozen=True)
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
        self,
        direction: Direction,
        variants: Iterable[str] | None = None,
        *,
        naive_rounds: int | None = None,
    ) -> list[Contender]:
        """Returns one contender for each of the variants; all by default. `naive_rounds` limits the
        rounds of naive attention."""
        return [
            Contender(
                self.case,
                direction,
                name,
                prepare_work(self.attends[name], self.inputs, direction, self.case.learned),
                self.outputs[name].error(self.expected.exact, direction),
                most_rounds=naive_rounds if name == "naive" else None,
            )
            for name in (self.attends if variants is None else variants)
        ]


def check(case: Case, variants: list[Variant], expected: Expected | None = None) -> CheckedCase:
    """Runs every variant once and checks its outputs.

    Args:
        case: the case.
        variants: variants to run.
        expected: outputs to compare with, computed here by default.

    Raises:
        AssertionError: an error exceeds the tolerance rule.
    """
    inputs = case.inputs()
    attends = {variant.name: variant.attend_for(case) for variant in variants}
    outputs = {name: run_once(attend, inputs, case.learned) for name, attend in attends.items()}
    if expected is None:
        naive = outputs.get("naive") or run_once(
            VARIANTS["naive"].attend_for(case), inputs, case.learned
        )
        expected = Expected(exact_outputs(case, inputs), naive)
    for name, got in outputs.items():
        assert_correct(name, case, got, expected)
    return CheckedCase(case, inputs, attends, outputs, expected)


def assert_correct(variant: str, case: Case, got: Outputs, expected: Expected) -> None:
    """Raises AssertionError if an output exceeds the tolerance rule."""
    exact, naive = expected.exact.tensors(), expected.naive.tensors()
    for tensor, value in got.tensors().items():
        assert_within_rule(f"{variant}, {case.name}: {tensor}", value, exact[tensor], naive[tensor])


@dataclass(frozen=True)
class Measured:
    """A row and the times behind it."""

    row: Row
    laps: tuple[float, ...]
    """time of each round in milliseconds; contenders that share a case share their rounds"""


def measure_contenders(
    contenders: Sequence[Contender], *, provenance: Provenance, suite: str, budget: Budget
) -> list[Measured]:
    """Measures peak memory and time of the contenders, which share one device. Each round runs
    every contender once. Returns one item per contender."""
    by_label = {contender.label: contender for contender in contenders}
    (device,) = {c.case.device for c in contenders}
    peaks = {label: peak_extra_bytes(c.prepare, device) for label, c in by_label.items()}
    timer = Interleaver(
        {label: c.prepare for label, c in by_label.items()},
        {label: c.most_rounds for label, c in by_label.items() if c.most_rounds is not None},
        clock_for(device),
    )
    timings, laps = timer.run(budget), timer.laps()
    return [
        Measured(c.row(provenance, suite, timings[label], peaks[label]), laps[label])
        for label, c in by_label.items()
    ]
