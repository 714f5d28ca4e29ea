"""The benchmark of relative positions, at toy sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.runner import relative
from transformer_kernels import attention, relative_bias

SHAPE = relative.Shape(1, 2, 24, 40, 8)


@pytest.fixture(autouse=True)
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, FlexAttention reads uninitialized memory on some CPUs, and compiling takes 10 s."""
    monkeypatch.setattr(relative, "_compiled_flex", lambda: flex_attention)


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


def test_flex_attention_is_left_out_if_it_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        o = flex_attention(q, k, v, **options)
        assert isinstance(o, Tensor)
        return o + 0.5 * (torch.arange(q.shape[2]) == 3)[:, None]

    monkeypatch.setattr(relative, "_compiled_flex", lambda: wrong)
    rows = list(relative.measure(SHAPE, torch.float32, "table", seconds=0.05))
    assert {row.variant for row in rows} == {"none", "relative", "dense bias"}
    assert capsys.readouterr().err == "FlexAttention is left out: its result is off by 0.5\n"


def test_a_wrong_result_stops_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = relative_bias(torch.ones(2, 3), lowest=5)
    inputs, every = relative.variants(SHAPE, torch.float32, "table")
    every["relative"] = relative.Variant(lambda q, k, v: attention(q, k, v, relative=wrong))
    monkeypatch.setattr(relative, "variants", lambda *_: (inputs, every))
    with pytest.raises(AssertionError, match="not close"):
        list(relative.measure(SHAPE, torch.float32, "table", seconds=0.05))
