"""Suite `models`: the attention of well-known models on a CPU."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.cases.models import call_id, model_calls
from benchmarks.runner.ceilings import ceilings
from benchmarks.runner.checks import SLOW_SCORES
from benchmarks.runner.record import Recorder
from transformer_kernels.bench import Row, Variant
from transformer_kernels.bench.comparison.calls import Call
from transformer_kernels.bench.comparison.run import measure_call


@pytest.mark.parametrize("call", model_calls(), ids=call_id)
def test_models(
    benchmark: BenchmarkFixture, recorder: Recorder, variants: list[Variant], call: Call
) -> None:
    def measure_once() -> list[Row]:
        result = measure_call(
            call,
            variants,
            recorder.budget,
            recorder.provenance,
            suite="models",
            besides=ceilings,
            naive_scores=SLOW_SCORES,
        )
        assert not result.broken, result.broken
        return [one.row for one in result.measured]

    benchmark.pedantic(  # type: ignore[no-untyped-call]
        recorder.add_steady, args=(f"models: {call.name}, {call}", measure_once)
    )
