"""`linear_attention_varlen` beyond the table of cases: segments, offsets and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.linear import LINEAR_NAMES, widest
from tests.support.threads import threads
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function

attend: Any = tk.linear_attention

attend_varlen: Any = tk.linear_attention_varlen

LENGTHS = (70, 0, 1, 64, 131)
TOTAL, H_q, H_kv, D, D_v = 270, 4, 2, 8, 5  # four rows of trailing padding


def packed() -> dict[str, Tensor]:
    shapes = {"q": (TOTAL, H_q, D), "k": (TOTAL, H_kv, D), "v": (TOTAL, H_kv, D_v)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("backend", LINEAR_NAMES)
def test_few_long_sequences_are_cut_into_segments(backend: str, count: int) -> None:
    dtype = widest(backend)
    x = [torch.randn(2300, 1, 4, dtype=dtype, requires_grad=True) for _ in range(3)]
    cu_seqlens = torch.tensor([0, 1200, 2300])
    decay = torch.tensor([-0.01], dtype=dtype, requires_grad=True)
    with threads(count):
        results = []
        for name in (backend, "reference"):
            o = attend_varlen(*x, cu_seqlens, log_decay=decay, backend=name)
            results.append((o, *torch.autograd.grad(o.sin().sum(), [*x, decay])))
    assert_same_function(results[0], results[1])


@pytest.mark.parametrize("backend", LINEAR_NAMES)
def test_without_sequences(backend: str) -> None:
    x = packed()
    o, state = attend_varlen(**x, cu_seqlens=torch.tensor([0]), return_state=True, backend=backend)
    assert not o.any()
    assert state.S.shape == (0, H_kv, D, D_v)


@each(
    ("cu_seqlens", "message"),
    [
        ([1, 5], "cu_seqlens must start at 0, got 1"),
        ([0, 9, 5], "cu_seqlens must not decrease, got 9, then 5 at 2"),
        ([0, 271], "cu_seqlens must end within the 270 rows of q, got 271"),
        ([[0, 1]], r"cu_seqlens must be \(B \+ 1,\)"),
        ([0.0, 1.0], "cu_seqlens must be int32 or int64"),
    ],
)
def test_errors(cu_seqlens: Any, message: str) -> None:
    x = packed()
    with pytest.raises((TypeError, ValueError), match=message):
        attend_varlen(**x, cu_seqlens=torch.tensor(cu_seqlens))
