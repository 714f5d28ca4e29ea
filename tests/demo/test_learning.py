from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from transformer_kernels.demo.learning import Limits, train_interleaved
from transformer_kernels.demo.settings import QUICK
from transformer_kernels.training import CurveRow, Tokens, corpus_from_bytes, train
from transformer_kernels.training.data import TokenWindows

TEXT = b"To be, or not to be, that is the question: " * 40
DATA = TokenWindows(corpus_from_bytes(TEXT, "a line"), Tokens(), 32)
CONFIG = replace(QUICK.training, steps=5)


@pytest.fixture(autouse=True)
def _without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring takes a second in a large process."""
    monkeypatch.setattr("transformer_kernels.demo.learning.peak_extra_bytes", lambda *_: None)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Fake clock: a list of one number, which advances by a millisecond per call."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr("time.perf_counter", clock)
    return now


def test_interleaved_runs_have_the_losses_of_separate_runs() -> None:
    steps: list[Mapping[str, CurveRow]] = []
    limits = Limits(interleaved_steps=5, interleaved_seconds=60.0, total_seconds=60.0)
    runs = train_interleaved(CONFIG, DATA, ("eager", "fused"), limits=limits, on_step=steps.append)
    for name in ("eager", "fused"):
        alone = train(replace(CONFIG, attn_implementation=name), DATA)
        assert runs[name].result.losses == alone.losses
        assert runs[name].result.score == alone.score
        assert [rows[name].step for rows in steps] == [1, 2, 3, 4, 5]


def test_only_the_last_run_continues_after_the_interleaved_steps() -> None:
    steps: list[Mapping[str, CurveRow]] = []
    limits = Limits(interleaved_steps=2, interleaved_seconds=60.0, total_seconds=60.0)
    runs = train_interleaved(CONFIG, DATA, ("eager", "fused"), limits=limits, on_step=steps.append)
    assert [set(rows) for rows in steps] == [{"eager", "fused"}] * 2 + [{"fused"}] * 3
    assert len(runs["eager"].result.rows) == 2
    alone = train(replace(CONFIG, attn_implementation="fused"), DATA)
    assert runs["fused"].result.losses == alone.losses


@pytest.mark.parametrize(
    ("interleaved_seconds", "total", "eager", "fused"),
    [(1.5, 60.0, 2, 5), (60.0, 2.5, 3, 3), (1.5, 3.5, 2, 4)],
)
def test_time_limits_end_the_interleaving_and_the_training(
    interleaved_seconds: float, total: float, eager: int, fused: int, seconds: list[float]
) -> None:
    """Each round of steps takes one second."""

    def on_step(rows: Mapping[str, CurveRow]) -> None:
        seconds[0] += 1.0

    limits = Limits(
        interleaved_steps=5, interleaved_seconds=interleaved_seconds, total_seconds=total
    )
    runs = train_interleaved(CONFIG, DATA, ("eager", "fused"), limits=limits, on_step=on_step)
    assert len(runs["eager"].result.rows) == eager
    assert len(runs["fused"].result.rows) == fused
