from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from transformer_kernels.demo.learning import train_side_by_side
from transformer_kernels.demo.settings import QUICK
from transformer_kernels.training import ByteWindows, CurveRow, corpus_from_bytes, train

TEXT = b"To be, or not to be, that is the question: " * 40
DATA = ByteWindows(corpus_from_bytes(TEXT, "a line"), 32)
CONFIG = replace(QUICK.training, steps=5)


def test_taking_turns_gives_the_losses_of_separate_runs() -> None:
    steps: list[Mapping[str, CurveRow]] = []
    learned = train_side_by_side(
        CONFIG, DATA, ("naive", "fused"), seconds=60.0, on_step=steps.append
    )
    for path in ("naive", "fused"):
        alone = train(replace(CONFIG, attention=path), DATA)
        assert learned[path].result.losses == alone.losses
        assert learned[path].result.score == alone.score
        assert [rows[path].step for rows in steps] == [1, 2, 3, 4, 5]


def test_it_ends_after_the_same_steps_for_all_when_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    monkeypatch.setattr("time.perf_counter", clock)

    def on_step(rows: Mapping[str, CurveRow]) -> None:
        nonlocal now
        now += 1.0

    learned = train_side_by_side(CONFIG, DATA, ("naive", "fused"), seconds=1.5, on_step=on_step)
    assert [len(run.result.rows) for run in learned.values()] == [2, 2]
