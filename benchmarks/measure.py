"""How one case is measured: errors first, then memory, then times taken in turn."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.record import Recorder
from transformer_kernels.bench import (
    Case,
    Direction,
    Inputs,
    Interleaver,
    Outputs,
    Variant,
    exact_outputs,
    make_row,
    peak_extra_bytes,
    prepare_work,
    run_once,
)
from transformer_kernels.bench.variants import Attend
from transformer_kernels.testing.tolerance import assert_within_rule

DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd", "fwd+bwd")


@dataclass(frozen=True)
class CheckedCase:
    """A case whose variants have all been found right."""

    case: Case
    inputs: Inputs
    attends: dict[str, Attend]
    outputs: dict[str, Outputs]
    exact: Outputs


def check(case: Case, variants: list[Variant]) -> CheckedCase:
    """Runs every variant once; AssertionError where one errs by more than the tests allow."""
    inputs = case.inputs()
    exact = exact_outputs(case, inputs)
    attends = {variant.name: variant.bind(case) for variant in variants}
    outputs = {name: run_once(attend, inputs) for name, attend in attends.items()}
    for name, got in outputs.items():
        for tensor in Outputs._fields:
            assert_within_rule(
                f"{name}, {case.name}: {tensor}",
                getattr(got, tensor),
                getattr(exact, tensor),
                getattr(outputs["naive"], tensor),
            )
    return CheckedCase(case, inputs, attends, outputs, exact)


def measure(
    benchmark: BenchmarkFixture,
    recorder: Recorder,
    *,
    suite: str,
    checked: CheckedCase,
    direction: Direction,
) -> None:
    """pytest-benchmark drives the rounds; one of its rounds is one call of every variant in turn.

    So its own statistics are those of whole rounds; the variants' are in the recorder's rows, and
    in `extra_info` of what --benchmark-json writes.
    """
    case = checked.case
    work = {
        name: prepare_work(attend, checked.inputs, direction)
        for name, attend in checked.attends.items()
    }
    peaks = {name: peak_extra_bytes(prepare) for name, prepare in work.items()}
    timer = Interleaver(work)
    rounds = recorder.budget.rounds(timer.warm_up())
    benchmark.group = suite
    benchmark.pedantic(timer.round, rounds=rounds)  # type: ignore[no-untyped-call]
    rows = [
        make_row(
            recorder.provenance,
            suite=suite,
            case=case,
            direction=direction,
            variant=name,
            timing=timing,
            peak_bytes=peaks[name],
            error=checked.outputs[name].error(checked.exact, direction),
        )
        for name, timing in timer.timings().items()
    ]
    benchmark.extra_info.update({f"{row.variant}_median_ms": row.median_ms for row in rows})
    recorder.add(rows)
