"""The benchmark of jagged tensors and block masks, at toy sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.runner import drop_in
from transformer_kernels.functional.varlen import attention_varlen
from transformer_kernels.integrations import torch_jagged


@pytest.mark.parametrize("dtype", drop_in.BAND, ids=str)
def test_jagged(dtype: torch.dtype) -> None:
    rows = list(drop_in.jagged(17, 2, dtype, seconds=0.01))
    assert [row.what for row in rows] == ["forward", "forward + backward"]
    for row in rows:
        assert list(row.milliseconds) == ["jagged", "padded", "ours"]
        assert all(time > 0 for time in row.milliseconds.values())


@pytest.mark.exhaustive  # inductor compiles FlexAttention
def test_block_mask() -> None:
    row = drop_in.block_mask(320, 2, torch.float32, seconds=0.01)
    assert list(row.milliseconds) == ["flex", "ours"]
    assert drop_in.line("title", row).startswith("title, forward: ")


def test_a_wrong_result_stops_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any, **options: Any) -> Tensor:
        o: Tensor = attention_varlen(*arguments, **options)
        return 1.1 * o

    monkeypatch.setattr(torch_jagged, "attention_varlen", wrong)
    with pytest.raises(AssertionError, match=r"ours, torch.float32: .* off"):
        list(drop_in.jagged(17, 2, torch.float32, seconds=0.01))
