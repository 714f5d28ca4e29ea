from __future__ import annotations

import pytest

from transformer_kernels.bench import Case
from transformer_kernels.demo import speed


def case(length: int) -> Case:
    return Case(name="causal", M=length, N=length)


def test_case_predicted_to_exceed_the_time_limit_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    estimator = speed.TimeEstimator(100.0)
    assert estimator.too_slow_reason(case(1024)) is None
    with estimator.observe(case(1024)):
        now += 19.0
    assert estimator.too_slow_reason(case(2048)) is None
    now += 6.0
    assert estimator.too_slow_reason(case(2048)) == "it would take about 76 s more"
