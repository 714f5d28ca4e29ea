"""The benchmark of sparse patterns, at a toy size."""

from __future__ import annotations

import pytest
import torch

from benchmarks.runner import over_causal, sparse_transformer


@pytest.mark.exhaustive
def test_every_pattern_is_measured() -> None:
    rows = list(sparse_transformer.measure(300, 2, torch.float32, seconds=0.05))
    names = ["causal", *sparse_transformer.PATTERNS]
    assert [(row.direction, row.variant) for row, _ in rows] == [
        (direction, name) for direction in ("fwd", "fwd+bwd") for name in names
    ]
    assert all(row.ms > 0 for row, _ in rows)
    assert all(share == 1 if row.variant == "causal" else share < 1 for row, share in rows)


def test_share_shown_is_that_of_the_causal_pairs() -> None:
    pattern = sparse_transformer.PATTERNS["local"]
    shown = sum(min(i + 1, 128) for i in range(300))
    assert sparse_transformer.shown_share(pattern, 2, 300) == shown / (300 * 301 / 2)


def test_a_wrong_result_stops_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"strided": over_causal.causal}
    monkeypatch.setattr(sparse_transformer, "attends", lambda: wrong)
    with pytest.raises(AssertionError, match="not close"):
        list(sparse_transformer.measure(300, 2, torch.float32, seconds=0.05))
