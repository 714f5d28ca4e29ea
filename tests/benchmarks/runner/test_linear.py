"""The benchmark of linear attention, at a toy size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.runner import linear, over_causal


@pytest.mark.exhaustive
def test_every_variant_is_measured_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "LONGEST_CAUSAL", 200)
    rows = list(linear.measure(320, 2, torch.float32, seconds=0.05))
    names = ["causal", *linear.attends(320)]
    assert "cumulative sum in torch" in names
    assert [(row.direction, row.variant) for row in rows] == [
        (direction, name) for direction in ("fwd", "fwd+bwd") for name in names
    ]
    assert all(row.ms > 0 for row in rows)
    linear.draw(rows, tmp_path / "linear.svg")
    assert "chunks in torch" in (tmp_path / "linear.svg").read_text()


@pytest.mark.exhaustive
def test_share_of_the_product_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MATRIX", 64)
    assert linear.product_share(128, 2, "fwd+bwd", seconds=0.05) > 0


def test_a_wrong_result_stops_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "COMPARED", 128)
    linear.check(2, torch.float32)
    monkeypatch.setitem(linear.PEERS, "wrong", lambda: over_causal.causal)
    with pytest.raises(AssertionError, match="not close"):
        list(linear.measure(128, 2, torch.float32, seconds=0.05))
