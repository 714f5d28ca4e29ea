"""The benchmark of the functions of flash_attn, at toy sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.runner import flash_attn
from benchmarks.runner.drop_in import BAND, line
from transformer_kernels.integrations.flash_attn import flash_attn_with_kvcache


@pytest.mark.parametrize("dtype", BAND, ids=str)
def test_rows(dtype: torch.dtype) -> None:
    rows = [
        flash_attn.decoding((9, 3), (4, 2), dtype, 0.01),
        flash_attn.paged_prefill((32, 48), 20, (4, 2), dtype, 0.01),
        flash_attn.short_call(dtype, 0.01),
    ]
    assert [list(row.milliseconds) for row in rows] == [
        ["sdpa", "ours"],
        ["packed", "ours"],
        ["attention", "ours"],
    ]
    for row in rows:
        assert all(time > 0 for time in row.milliseconds.values())
        assert line("title", row).startswith(f"title, {row.what}: ")


def test_a_wrong_result_stops_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any, **options: Any) -> Tensor:
        o: Tensor = flash_attn_with_kvcache(*arguments, **options)
        return 1.1 * o

    monkeypatch.setattr(flash_attn, "flash_attn_with_kvcache", wrong)
    with pytest.raises(AssertionError, match=r"ours, torch.float32: .* off"):
        flash_attn.decoding((9, 3), (4, 2), torch.float32, 0.01)
