"""`enable` on a CUDA device: torch's attention is replaced there too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import transformer_kernels as tk

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _off_before_and_after() -> Iterator[None]:
    tk.disable()
    yield
    tk.disable()


def ours_in(call: Callable[[], object]) -> int:
    """Returns how often an operator of any of our backends ran during `call()`."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return sum(event.name.startswith("transformer_kernels::") for event in profiler.events())


def assert_close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}], ids=str)
def test_training(options: dict[str, Any], dtype: torch.dtype) -> None:
    def one() -> Tensor:
        return torch.randn(2, 4, 193, 64, device="cuda", dtype=dtype, requires_grad=True)

    qkv, cotangent = (one(), one(), one()), torch.randn(2, 4, 193, 64, device="cuda", dtype=dtype)

    def step() -> tuple[Tensor, ...]:
        o = functional.scaled_dot_product_attention(*qkv, **options)
        return (o, *torch.autograd.grad(o, qkv, cotangent))

    expected = step()
    assert ours_in(step) == 0
    with tk.enabled():
        assert ours_in(step) >= 2
        assert_close(step(), expected)
        with sdpa_kernel(SDPBackend.MATH):
            assert ours_in(step) == 0


def test_jagged_tensors() -> None:
    rows = [torch.randn(n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in (3, 190, 1)]
    x = torch.nested.as_nested_tensor(rows, layout=torch.jagged).requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        q = x.transpose(1, 2)
        o = functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)
        (dx,) = torch.autograd.grad(o.values().float().square().sum(), x)
        return o.values(), dx.values()

    expected = step()
    with tk.enabled():
        assert ours_in(step) >= 2
        assert_close(step(), expected)


@torch.no_grad()
@pytest.mark.parametrize("nested", [False, True])
def test_torchs_modules(nested: bool) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval().cuda().half()
    rows = [torch.randn(n, 64, device="cuda", dtype=torch.float16) for n in (130, 1, 77)]
    x = torch.nested.as_nested_tensor(rows) if nested else rows[0][None]
    expected = layer(x)
    with tk.enabled():
        assert ours_in(lambda: layer(x)) >= 1
        got = layer(x)
    assert_close(list(got.unbind()), list(expected.unbind()))


def test_compiled() -> None:
    q, k, v = (torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    compiled = torch.compile(functional.scaled_dot_product_attention, fullgraph=True)
    expected = compiled(q, k, v)
    with tk.enabled():
        assert ours_in(lambda: compiled(q, k, v)) >= 1
        assert_close(compiled(q, k, v), expected)
