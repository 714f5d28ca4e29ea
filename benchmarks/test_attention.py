"""The suite `attention`: time and memory against the sequence length."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.measure import DIRECTIONS, CheckedCase, measure
from benchmarks.record import Recorder
from benchmarks.suites import attention_cases, case_id
from transformer_kernels.bench import Direction


@pytest.mark.parametrize("checked", attention_cases(), ids=case_id, indirect=True)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_attention(
    benchmark: BenchmarkFixture, recorder: Recorder, checked: CheckedCase, direction: Direction
) -> None:
    measure(benchmark, recorder, suite="attention", contenders=checked.contenders(direction))
