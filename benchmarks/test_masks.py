"""Suite `masks`: time over the visible fraction of a mask."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.cases.attention import case_id, mask_cases
from benchmarks.runner.measure import measure
from benchmarks.runner.record import Recorder
from transformer_kernels.bench import Direction
from transformer_kernels.bench.contenders import CheckedCase


@pytest.mark.parametrize("checked", mask_cases(), ids=case_id, indirect=True)
@pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
def test_masks(
    benchmark: BenchmarkFixture, recorder: Recorder, checked: CheckedCase, direction: Direction
) -> None:
    measure(benchmark, recorder, suite="masks", contenders=checked.contenders(direction))
