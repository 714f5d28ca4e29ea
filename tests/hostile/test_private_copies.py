"""Lengths, offsets and pages that another thread writes during a call are read once."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import DECODING
from tests.support.operators import operator_arguments
from transformer_kernels.backends.native import extension
from transformer_kernels.functional import decode, kv_cache, varlen
from transformer_kernels.problem import Layout
from transformer_kernels.problem.cache import resolve_cache_mask
from transformer_kernels.scores.options import PLAIN_SCORES

WRITTEN = -(1 << 20)
DTYPES = (torch.int32, torch.int64)


def write_after(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, *tensors: Tensor) -> None:
    """Writes to the tensors, as another thread may, when the module's function `name` has run."""
    function: Callable[..., Any] = getattr(module, name)

    def call(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        for x in tensors:
            x.fill_(WRITTEN)
        return result

    monkeypatch.setattr(module, name, call)


@pytest.mark.parametrize("dtype", DTYPES)
def test_varlen(dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(90, 2, 16, requires_grad=True) for _ in range(3))
    sinks = torch.randn(2)

    starts = [torch.tensor(x, dtype=dtype) for x in ([0, 30, 80], [0, 9, 90])]
    options: dict[str, Any] = {"sinks": sinks, "return_lse": True, "backend": backend}

    def step() -> tuple[Tensor, ...]:
        o, lse = tk.attention_varlen(q, k, v, *starts, **options)
        return o, lse, *torch.autograd.grad(o.sin().sum(), (q, k, v))

    expected = step()
    write_after(monkeypatch, varlen, "varlen_problem", *starts)
    found = step()
    assert starts[0][0] == WRITTEN
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def paged(dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, cache = torch.randn(2, 2, 1, 16), torch.randn(5, 2, 8, 16)
    lengths = torch.tensor([20, 9], dtype=dtype)
    return q, cache, -cache, lengths, torch.tensor([[3, 1, 4], [0, 2, 99]], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decoder", DECODING)
def test_decode(dtype: torch.dtype, decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = paged(dtype)
    options: dict[str, Any] = {"return_lse": True, "backend": decoder}
    expected = tk.attention_decode(*arguments, **options)
    write_after(monkeypatch, decode, "cache_problem", *arguments[3:])
    found = tk.attention_decode(*arguments, **options)
    assert arguments[4][0, 0] == WRITTEN
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_append_to_cache(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    new, cache, _, lengths, table = paged(dtype)
    caches = [cache.clone() for _ in range(4)]
    tk.append_to_cache(caches[0], caches[1], new, -new, lengths, table)
    write_after(monkeypatch, kv_cache, "check_cache", lengths, table)
    tk.append_to_cache(caches[2], caches[3], new, -new, lengths, table)
    assert table[0, 0] == WRITTEN
    assert not torch.equal(caches[0], cache)
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_direct_decode(dtype: torch.dtype) -> None:
    """The output of the first sequence overwrites the block table of the second one."""
    cache = torch.randn(9, 1, 16, 16)
    q, lengths = torch.randn(2, 1, 64, 16), torch.tensor([80, 70], dtype=dtype)
    pages = torch.tensor([[4, 1, 3, 0, 2], [8, 5, 7, 6, 2]], dtype=dtype)
    memory, o = torch.zeros(q.numel()), torch.empty_like(q)
    table = memory.view(dtype)[:10].view(2, 5)
    for block_table, out in ((pages, o), (table.copy_(pages), memory.view(q.shape))):
        layout = Layout(cache_seqlens=lengths, block_table=block_table)
        options = PLAIN_SCORES, resolve_cache_mask(None), layout
        given = (q, cache, cache, *options, None, True, out, None, True)
        assert extension.compiled.direct_forward(*given) is None
    assert torch.equal(memory.view(q.shape), o)


@contextmanager
def flipped(x: Tensor, other: Tensor) -> Iterator[None]:
    """Context in which a thread overwrites x, in turns with `other` and with its own values."""
    contents, done = [other, x.clone()], threading.Event()
    bytes_ = x.numel() * x.element_size()
    assert x.shape == other.shape
    assert x.dtype == other.dtype

    def write() -> None:
        while not done.is_set():
            for content in contents:
                ctypes.memmove(x.data_ptr(), content.data_ptr(), bytes_)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_varlen_operator() -> None:
    """Each call sees valid offsets, or raises; without a copy it reads rows that do not exist."""
    B = 2000
    q, k = torch.randn(1, 1, B, 8), torch.randn(1, 1, 1, 8)
    starts_k, starts_q = torch.zeros(B + 1).int(), torch.arange(B + 1).int()
    starts_k[1:] = 1
    arguments = operator_arguments(q, k, k, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)
    operator = torch.ops.transformer_kernels.attention_forward
    expected, _, _ = operator(**arguments)
    with flipped(starts_q, starts_q + (1 << 22)):
        for _ in range(50):
            try:
                o, _, _ = operator(**arguments)
            except RuntimeError as error:
                assert "cu_seqlens must start at 0" in str(error)  # noqa: PT017
            else:
                assert torch.equal(o, expected)


@pytest.mark.parametrize("by_operator", [True, False], ids=["operator", "direct"])
def test_decode_of_many_pages(by_operator: bool) -> None:
    B = 256
    q, cache = torch.randn(B, 1, 1, 8), torch.randn(64, 1, 16, 8)
    lengths, table = torch.full((B,), 128).int(), torch.zeros(B, 8).int()
    options = {"cache_seqlens": lengths, "block_table": table, "scale": 0.25, "diagonal_high": 0}
    arguments = operator_arguments(q, cache, cache, **options, bottom_right=True)
    operator = torch.ops.transformer_kernels.attention_forward

    def call() -> Tensor:
        if by_operator:
            o: Tensor = operator(**arguments)[0]
            return o
        return tk.attention_decode(q, cache, cache, lengths, table, scale=0.25)

    expected = call()
    with flipped(table, table + (1 << 22)):
        for _ in range(50):
            try:
                o = call()
            except (RuntimeError, ValueError) as error:
                assert "block_table must hold" in str(error)  # noqa: PT017
            else:
                assert torch.equal(o, expected)
