"""The benchmark of relative positions, at toy sizes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.runner import relative
from transformer_kernels import attention, relative_bias

SHAPE = relative.Shape(1, 2, 24, 40, 8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["table", "keys"])
def test_every_variant_is_measured(kind: relative.Kind) -> None:
    rows = list(relative.measure(SHAPE, torch.float32, kind, seconds=0.05))
    assert [(row.direction, row.variant) for row in rows] == [
        ("fwd", "none"),
        ("fwd", "relative"),
        ("fwd", "dense bias"),
        ("fwd", "FlexAttention"),
        ("fwd+bwd", "none"),
        ("fwd+bwd", "relative"),
        ("fwd+bwd", "dense bias"),
    ]
    assert all(row.ms > 0 for row in rows)


def test_a_wrong_result_stops_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = relative_bias(torch.ones(2, 3), lowest=5)
    inputs, every = relative.variants(SHAPE, torch.float32, "table")
    every["relative"] = relative.Variant(lambda q, k, v: attention(q, k, v, relative=wrong))
    monkeypatch.setattr(relative, "variants", lambda *_: (inputs, every))
    with pytest.raises(AssertionError, match="not close"):
        list(relative.measure(SHAPE, torch.float32, "table", seconds=0.05))
