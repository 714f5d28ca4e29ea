"""Decode fast path: bit-identical to the operator, and declined for calls that need it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_kernels as tk
from transformer_kernels.backends.native import direct
from transformer_kernels.bench.tolerance import assert_same_function

B, H, M, D, PAGE = 2, 4, 3, 16, 16
LENGTHS = torch.tensor([70, 5])
TABLE = torch.tensor([[6, 0, 2, 3, 5], [1, -1, -1, 99, -7]])
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Arguments = tuple[Any, ...]


class DispatchMode(TorchDispatchMode):
    """Dispatch mode that changes nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


class PassThroughMode(TorchFunctionMode):
    """Function mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


class Subclass(Tensor):
    """A subclass that changes nothing."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Records the results of the direct calls; True = the kernels ran."""
    answers: list[bool] = []
    function = direct.launch_forward

    def call(*arguments: Any) -> str | None:
        reason = function(*arguments)
        answers.append(reason is None)
        return reason

    monkeypatch.setattr(direct, "launch_forward", call)
    return answers


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
    with DispatchMode():
        expected = tk.attention_decode(*arguments, mask=mask, scale=scale)
    assert calls == [True]
    assert o.stride() == expected.stride()
    assert torch.equal(o, expected)
    explained = tk.explain(*arguments, mask=mask, scale=scale, operator=tk.attention_decode)
    assert explained.general_path == ""


INTERCEPTED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch-mode": DispatchMode,
    "function-mode": PassThroughMode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "forward-mode": forward_ad.dual_level,
    "profiler": lambda: profile(activities=[ProfilerActivity.CPU]),
}


@pytest.mark.parametrize("context", INTERCEPTED.values(), ids=INTERCEPTED)
def test_interceptable_calls_use_the_operator(
    context: Callable[[], AbstractContextManager[Any]], calls: list[bool]
) -> None:
    arguments = paged()
    with context():
        tk.attention_decode(*arguments)
    assert calls == []


def test_declines_where_direct_calls_are_unavailable(
    monkeypatch: pytest.MonkeyPatch, calls: list[bool]
) -> None:
    monkeypatch.setattr(direct, "AVAILABLE", False)
    tk.attention_decode(*paged())
    assert calls == []


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


def test_invalid_key_ranges_are_declined_and_raise(calls: list[bool]) -> None:
    mask = tk.Mask.padding(torch.tensor([5, 9, 9]))
    with pytest.raises(ValueError, match="the mask's end"):
        tk.attention_decode(*paged(), mask=mask)
    assert calls == [False]
    both = tk.Mask.padding(LENGTHS) & mask
    with pytest.raises(ValueError, match="the mask's end"):
        tk.attention_decode(*paged(), mask=both)


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_invalid_calls_are_declined_and_raise(wrong: dict[int, Tensor], calls: list[bool]) -> None:
    arguments = [wrong.get(n, x) for n, x in enumerate(paged())]
    with pytest.raises((TypeError, ValueError)):
        tk.attention_decode(*arguments)
    assert calls == [False]


def test_tensors_that_require_grad_raise_in_grad_mode(calls: list[bool]) -> None:
    q, k, v, cache_seqlens, table = paged()
    with pytest.raises(ValueError, match="q must not require grad"):
        tk.attention_decode(nn.Parameter(q), k, v, cache_seqlens, table)
    assert calls == []
    with torch.no_grad():
        tk.attention_decode(nn.Parameter(q), k, v, cache_seqlens, table)
    assert calls == [True]
