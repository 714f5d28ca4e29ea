from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from transformer_kernels.demo.learning import Limits, train_side_by_side
from transformer_kernels.demo.settings import QUICK
from transformer_kernels.training import CurveRow, Tokens, corpus_from_bytes, train
from transformer_kernels.training.data import TokenWindows

TEXT = b"To be, or not to be, that is the question: " * 40
DATA = TokenWindows(corpus_from_bytes(TEXT, "a line"), Tokens(), 32)
CONFIG = replace(QUICK.training, steps=5)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, a list of one number; it passes by a millisecond whenever it is asked for."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr("time.perf_counter", clock)
    return now


def test_taking_turns_gives_the_losses_of_separate_runs() -> None:
    steps: list[Mapping[str, CurveRow]] = []
    limits = Limits(side_by_side=5, turns_seconds=60.0, seconds=60.0)
    learned = train_side_by_side(
        CONFIG, DATA, ("eager", "fused"), limits=limits, on_step=steps.append
    )
    for path in ("eager", "fused"):
        alone = train(replace(CONFIG, attn_implementation=path), DATA)
        assert learned[path].result.losses == alone.losses
        assert learned[path].result.score == alone.score
        assert [rows[path].step for rows in steps] == [1, 2, 3, 4, 5]


def test_the_last_run_goes_on_alone() -> None:
    steps: list[Mapping[str, CurveRow]] = []
    limits = Limits(side_by_side=2, turns_seconds=60.0, seconds=60.0)
    learned = train_side_by_side(
        CONFIG, DATA, ("eager", "fused"), limits=limits, on_step=steps.append
    )
    assert [set(rows) for rows in steps] == [{"eager", "fused"}] * 2 + [{"fused"}] * 3
    assert len(learned["eager"].result.rows) == 2
    alone = train(replace(CONFIG, attn_implementation="fused"), DATA)
    assert learned["fused"].result.losses == alone.losses


@pytest.mark.parametrize(("turns_seconds", "total", "naive", "fused"),
                         [(1.5, 60.0, 2, 5), (60.0, 2.5, 3, 3), (1.5, 3.5, 2, 4)])  # fmt: skip
def test_time_limits_end_the_turns_and_the_training(
    turns_seconds: float, total: float, naive: int, fused: int, seconds: list[float]
) -> None:
    """Steps take a second each; those in turns are the same for all runs."""

    def on_step(rows: Mapping[str, CurveRow]) -> None:
        seconds[0] += 1.0

    limits = Limits(side_by_side=5, turns_seconds=turns_seconds, seconds=total)
    learned = train_side_by_side(CONFIG, DATA, ("eager", "fused"), limits=limits, on_step=on_step)
    assert len(learned["eager"].result.rows) == naive
    assert len(learned["fused"].result.rows) == fused
