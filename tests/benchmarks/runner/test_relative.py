"""The benchmark of relative biases, at a toy size."""

from __future__ import annotations

import pytest
import torch

from benchmarks.runner import relative
from transformer_kernels import attention, relative_bias


@pytest.mark.exhaustive
def test_every_variant_is_measured() -> None:
    rows = list(relative.measure((1, 2, 40, 8), torch.float32, seconds=0.05))
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
    inputs, every = relative.variants(1, 2, 8, 8, torch.float32)
    every["relative"] = relative.Variant(lambda q, k, v: attention(q, k, v, relative=wrong), ())
    monkeypatch.setattr(relative, "variants", lambda *_: (inputs, every))
    with pytest.raises(AssertionError, match="not close"):
        list(relative.measure((1, 2, 8, 8), torch.float32, seconds=0.05))
