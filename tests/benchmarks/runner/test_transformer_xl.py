"""The benchmark of Transformer-XL's training step, at a toy size."""

from __future__ import annotations

import pytest

from benchmarks.runner import transformer_xl
from transformer_kernels.models import TransformerXLConfig

CONFIG = TransformerXLConfig(layers=2, heads=2, width=16, context=6, memory=5, dropout=0.0)


def test_every_variant_is_measured() -> None:
    rows = transformer_xl.measure(CONFIG, batch=2, seconds=0.01)
    assert [row.variant for row in rows] == list(transformer_xl.VARIANTS)
    assert all(row.memory == 5 and row.ms > 0 for row in rows)


def test_a_wrong_result_stops_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    right = transformer_xl.with_dense_bias
    monkeypatch.setattr(
        transformer_xl, "with_dense_bias", lambda q, k, v, **options: right(q, k, 2 * v, **options)
    )
    with pytest.raises(AssertionError, match="not close"):
        transformer_xl.measure(CONFIG, batch=2, seconds=0.01)
