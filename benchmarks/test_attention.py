"""Suite `attention`: time and peak memory over the sequence length."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.cases.attention import attention_cases, case_id
from benchmarks.runner.measure import DIRECTIONS, measure
from benchmarks.runner.record import Recorder
from transformer_kernels.bench import Direction
from transformer_kernels.bench.contenders import CheckedCase


@pytest.mark.parametrize("checked", attention_cases(), ids=case_id, indirect=True)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_attention(
    benchmark: BenchmarkFixture, recorder: Recorder, checked: CheckedCase, direction: Direction
) -> None:
    measure(benchmark, recorder, suite="attention", contenders=checked.contenders(direction))
