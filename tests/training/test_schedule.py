"""Tests of the learning rate schedules."""

from __future__ import annotations

from itertools import pairwise

import pytest
from transformer_kernels.training.schedule import Decay

from tests.support.tiers import each
from transformer_kernels.training import Schedule


@pytest.mark.parametrize("decay", ["cosine", "inverse_sqrt"])
def test_step_zero_has_a_nonzero_rate(decay: Decay) -> None:
    schedule = Schedule(decay=decay, peak=1.0, warmup=10)
    assert schedule.learning_rate(0, 100) == pytest.approx(0.1)


def test_inverse_sqrt_is_the_papers_schedule() -> None:
    width, warmup = 512, 4000
    schedule = Schedule(
        decay="inverse_sqrt", peak=(width * warmup) ** -0.5, warmup=warmup, final_share=0.0
    )
    for step in (0, 1, 3998, 3999, 4000, 50_000, 99_999):
        count = step + 1
        paper = width**-0.5 * min(count**-0.5, count * warmup**-1.5)
        assert schedule.learning_rate(step, 100_000) == pytest.approx(paper, rel=1e-12)


def test_cosine_rises_to_the_peak_and_falls_to_the_final_share() -> None:
    schedule = Schedule(peak=2.0, warmup=10, final_share=0.1)
    rates = [schedule.learning_rate(step, 110) for step in range(110)]
    assert rates[:10] == pytest.approx([0.2 * count for count in range(1, 11)])
    assert rates[59] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rates[-1] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in pairwise(rates[9:]))


def test_warm_up_longer_than_the_run_is_a_linear_ramp() -> None:
    assert Schedule(peak=1.0, warmup=100).learning_rate(9, 10) == pytest.approx(0.1)


def test_without_warm_up_the_first_rate_is_close_to_the_peak() -> None:
    assert Schedule(peak=1.0, warmup=0).learning_rate(0, 1000) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("step", [-1, 10])
def test_step_outside_the_run_is_named(step: int) -> None:
    with pytest.raises(ValueError, match=f"step must be between 0 and 9, got {step}"):
        Schedule().learning_rate(step, 10)


@each(
    ("options", "message"),
    [
        ({"peak": 0.0}, "peak must be above 0 and finite, got 0.0"),
        ({"peak": float("nan")}, "peak must be above 0 and finite, got nan"),
        ({"final_share": 1.5}, "final_share must be between 0 and 1, got 1.5"),
        ({"warmup": -1}, "warmup must be at least 0, got -1"),
        ({"warmup": 0, "decay": "inverse_sqrt"}, "warmup must be at least 1, got 0"),
        ({"decay": "linear"}, "decay must be one of 'cosine', 'inverse_sqrt', got 'linear'"),
    ],
)
def test_invalid_option_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(**options)  # type: ignore[arg-type]
