"""The benchmark of the Reformer, at a toy size."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks.runner import over_causal, reformer
from transformer_kernels.bench.cases import Attend
from transformer_kernels.bench.memory import memory_can_be_measured


@pytest.mark.exhaustive
def test_every_number_of_rounds_is_measured() -> None:
    rows = list(reformer.measure(300, 2, torch.float32, seconds=0.05))
    names = ["causal", *reformer.attends()]
    assert [(row.direction, row.variant) for row in rows] == [
        (direction, name) for direction in ("fwd", "fwd+bwd") for name in names
    ]
    assert all(row.ms > 0 for row in rows)


@pytest.mark.exhaustive
def test_memory_is_measured() -> None:
    size = reformer.peak_mib(2, length=256, width=16, reversible=True)
    assert (size is not None) == memory_can_be_measured()
    assert size is None or size > 0


@pytest.mark.parametrize("wrong", [over_causal.causal, partial(reformer.hashed, rounds=3)])
def test_a_wrong_result_stops_the_measurement(
    monkeypatch: pytest.MonkeyPatch, wrong: Attend
) -> None:
    right = reformer.attends()
    monkeypatch.setattr(reformer, "COMPARED", 256)
    reformer.check(2, torch.float32)
    last = list(right)[-1]
    monkeypatch.setattr(reformer, "attends", lambda: right | {last: wrong})
    with pytest.raises(AssertionError, match="not close"):
        list(reformer.measure(300, 2, torch.float32, seconds=0.05))
