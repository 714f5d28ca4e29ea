from __future__ import annotations

import pytest

from transformer_kernels.bench import Case
from transformer_kernels.demo import speed


def case(length: int) -> Case:
    return Case(name="causal", M=length, N=length)


@pytest.mark.parametrize(
    ("available", "fits"), [(5 * 2**30, False), (6 * 2**30, True), (None, True)]
)
def test_a_length_that_does_not_fit_into_memory_is_left_out(
    available: int | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "available_bytes", lambda: available)
    reason = speed.why_too_large(case(6144))
    assert (reason is None) == fits
    if reason is not None:
        assert "naive attention needs 5.6 GiB" in reason


def test_a_length_is_left_out_when_it_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    pace = speed.Pace(100.0)
    assert pace.why_too_slow(case(1024)) is None
    with pace.timed(case(1024)):
        now += 19.0
    assert pace.why_too_slow(case(2048)) is None
    now += 6.0
    assert pace.why_too_slow(case(2048)) == "which would take some 76 s more"
