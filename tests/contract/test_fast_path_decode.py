"""Decode fast path: bit-identical to the operator, and declined for calls that need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_kernels as tk
from tests.contract.test_fast_path import (
    DTYPES,
    RecordingMode,
    Subclass,
    record_launches,
)
from transformer_kernels.bench.tolerance import assert_same_function

B, H, M, D, PAGE = 2, 4, 3, 16, 16
LENGTHS = torch.tensor([70, 5])
TABLE = torch.tensor([[6, 0, 2, 3, 5], [1, -1, -1, 99, -7]])
Arguments = tuple[Any, ...]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    return record_launches(monkeypatch)


def paged(dtype: torch.dtype = torch.float32) -> Arguments:
    q = torch.randn(B, H, M, D, dtype=dtype)
    k, v = (torch.randn(7, 2, PAGE, D, dtype=dtype) for _ in range(2))
    return q, k, v, LENGTHS, TABLE


def contiguous(dtype: torch.dtype = torch.float32) -> Arguments:
    q = torch.randn(B, M, H, D, dtype=dtype).transpose(1, 2)
    k, v = (torch.randn(B, 80, 2, D, dtype=dtype).transpose(1, 2) for _ in range(2))
    return q, k, v, LENGTHS


@pytest.mark.parametrize(
    "mask",
    [
        None,
        tk.Mask(),
        tk.Mask.causal(align="bottom_right"),
        tk.Mask.window(20, 1, align="bottom_right"),
        tk.Mask.window(20, align="bottom_right") & tk.Mask.window(9, 2, align="bottom_right"),
        tk.Mask.key_range(torch.tensor([33, 2]), torch.tensor([70, 1])),
        tk.Mask.padding(torch.tensor([40, 3]).int()) & tk.Mask.window(20, 0, align="bottom_right"),
    ],
    ids=["none", "everything", "causal", "window", "two-windows", "key-range", "padded-window"],
)
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [paged, contiguous])
@pytest.mark.usefixtures("poisoned")
def test_bit_identical_to_the_operator(
    make: Callable[[torch.dtype], Arguments],
    dtype: torch.dtype,
    scale: float | None,
    mask: tk.Mask | None,
    calls: list[bool],
) -> None:
    arguments = make(dtype)
    o = tk.attention_decode(*arguments, mask=mask, scale=scale)
    assert calls == [True]
    with RecordingMode():
        expected = tk.attention_decode(*arguments, mask=mask, scale=scale)
    assert calls == [True]
    assert o.stride() == expected.stride()
    assert torch.equal(o, expected)
    explained = tk.explain(*arguments, mask=mask, scale=scale, operator=tk.attention_decode)
    assert explained.general_path == ""


def declined() -> dict[str, tuple[Arguments, dict[str, Any]]]:
    """Valid calls that the fast path does not support."""
    q, k, v, cache_seqlens, table = paged()
    return {
        "subclass": ((q.as_subclass(Subclass), k, v, cache_seqlens, table), {}),
        "lazy-negation": ((torch._neg_view(q), k, v, cache_seqlens, table), {}),
        "no-queries": ((q[:, :, :0], k, v, cache_seqlens, table), {}),
        "narrow-values": ((q, k, v[..., :3], cache_seqlens, table), {}),
        "top-left": ((q, k, v, cache_seqlens, table), {"mask": tk.Mask.window()}),
        "lse": ((q, k, v, cache_seqlens, table), {"return_lse": True}),
        "softcap": ((q, k, v, cache_seqlens, table), {"softcap": 3.0}),
        "sinks": ((q, k, v, cache_seqlens, table), {"sinks": torch.zeros(H)}),
        "alibi": (
            (q, k, v, cache_seqlens, table),
            {"bias": tk.alibi(torch.ones(H), align="bottom_right")},
        ),
    }


@pytest.mark.parametrize("name", declined())
def test_other_valid_calls_use_the_general_path(name: str, calls: list[bool]) -> None:
    arguments, options = declined()[name]
    have = tk.attention_decode(*arguments, **options)
    assert True not in calls
    explained = tk.explain(*arguments, **options, operator=tk.attention_decode)
    assert explained.general_path != ""
    want = tk.attention_decode(*arguments, **options, backend="reference")
    for x, y in zip([*have], [*want], strict=True):
        assert_same_function(x.as_subclass(Tensor), y.as_subclass(Tensor))


WRONG: dict[str, dict[int, Tensor]] = {
    "long": {3: torch.tensor([81, 5])},
    "negative": {3: torch.tensor([-1, 5])},
    "huge": {3: torch.tensor([(1 << 32) + 5, 5])},
    "count": {3: torch.tensor([5])},
    "page": {4: TABLE.clamp(min=7)},
    "page-negative": {4: TABLE - 1},
    "page-huge": {4: TABLE + (1 << 32)},
    "table-count": {4: TABLE[:1]},
    "widths": {0: torch.randn(B, H, M, D + 1)},
    "dtype": {1: torch.randn(7, 2, PAGE, D).double()},
    "page-sizes": {1: torch.randn(7, 2, PAGE, D), 2: torch.randn(7, 2, PAGE + 1, D)},
    "float-cache_seqlens": {3: LENGTHS.float()},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_invalid_calls_are_declined_and_raise(wrong: dict[int, Tensor], calls: list[bool]) -> None:
    arguments = [wrong.get(n, x) for n, x in enumerate(paged())]
    with pytest.raises((TypeError, ValueError)):
        tk.attention_decode(*arguments)
    assert calls == [False]


def test_invalid_key_ranges_are_declined_and_raise(calls: list[bool]) -> None:
    mask = tk.Mask.padding(torch.tensor([5, 9, 9]))
    for one in (mask, tk.Mask.padding(LENGTHS) & mask):
        with pytest.raises(ValueError, match="the mask's end"):
            tk.attention_decode(*paged(), mask=one)
    assert calls == [False]  # the intersection raises earlier


def test_tensors_that_require_grad_raise_in_grad_mode(calls: list[bool]) -> None:
    q, k, v, cache_seqlens, table = paged()
    with pytest.raises(ValueError, match="q must not require grad"):
        tk.attention_decode(nn.Parameter(q), k, v, cache_seqlens, table)
    assert calls == []
    with torch.no_grad():
        tk.attention_decode(nn.Parameter(q), k, v, cache_seqlens, table)
    assert calls == [True]
