"""Linear attention under torch.compile, torch.export, opcheck, autocast and fake tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import transformer_kernels as tk
from tests.support.linear import LINEAR_NAMES, LINEAR_WAYS, linear_arguments, operators_of
from tests.support.operators import assert_own_memory
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.linear.attention import LINEAR_BACKENDS
from transformer_kernels.linear.backends import KernelBackend

attend: Any = tk.linear_attention
decode: Any = tk.linear_attention_decode
attend_varlen: Any = tk.linear_attention_varlen

WITH_OPERATORS = {b.name: b for b in LINEAR_BACKENDS if isinstance(b, KernelBackend)}
OPERATORS = [
    (backend, dtype)
    for backend, dtype in LINEAR_WAYS
    if backend in WITH_OPERATORS and dtype in (torch.float64, torch.bfloat16)
]
every_backend = pytest.mark.parametrize("backend", LINEAR_NAMES)


def qkv(N: int = 70, *, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, heads, N, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]


def state() -> tk.LinearState:
    return tk.LinearState(torch.randn(2, 2, 8, 8), torch.rand(2, 2, 8) + 1)


@pytest.mark.quick
@every_backend
def test_fullgraph(backend: str) -> None:
    """Forward and backward are one graph each, and equal the eager results."""
    x, start = [*qkv(), torch.full((2,), -0.1, requires_grad=True)], state()
    mask = tk.Mask.padding(torch.tensor([50, 70]))

    def call(*x: Tensor) -> tuple[Tensor, ...]:
        q, k, v, decay = x
        o, end = attend(
            q, k, v, log_decay=decay, mask=mask, initial_state=start, return_state=True,
            backend=backend,
        )  # fmt: skip
        return (o, *end)

    torch.compiler.reset()
    compiled: Any = torch.compile(call, fullgraph=True, backend="aot_eager")
    eager, fast = call(*x), compiled(*x)
    assert_same_function(fast, eager)
    cotangents = [torch.randn(y.shape) for y in eager]
    assert_same_function(
        torch.autograd.grad(fast, x, cotangents),
        torch.autograd.grad(eager, x, cotangents),
    )


def test_same_tensor_in_two_arguments() -> None:
    x = torch.randn(2, 2, 70, 8, requires_grad=True)
    torch.compiler.reset()
    o = torch.compile(tk.linear_attention, fullgraph=True, backend="aot_eager")(x, x, x)
    (got,) = torch.autograd.grad(o.sum(), x)
    (expected,) = torch.autograd.grad(attend(x, x, x).sum(), x)
    assert_same_function(got, expected)


def test_dynamic_lengths_compile_once() -> None:
    torch.compiler.reset()
    count = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal count
        count += 1
        return graph

    call = torch.compile(tk.linear_attention, fullgraph=True, dynamic=True, backend=counting)
    for N in (70, 131, 65):
        x = [t.detach() for t in qkv(N)]
        assert_same_function(call(*x), attend(*x))
    assert count == 1


def test_decoding_compiles_and_updates_the_state() -> None:
    torch.compiler.reset()
    call: Any = torch.compile(decode, fullgraph=True, backend="aot_eager")
    own, other = state(), state()
    for a, b in zip(own, other, strict=True):
        b.copy_(a)
    for _ in range(3):
        x = [t.detach() for t in qkv(1)]
        assert_same_function(call(*x, own), decode(*x, other))
    assert_same_function(own, other)


@pytest.mark.exhaustive
def test_inductor() -> None:
    x = qkv()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tk.linear_attention(q * 2, k, v).sin().sum()

    torch.compiler.reset()
    got = torch.autograd.grad(torch.compile(step, fullgraph=True)(*x), x)
    assert_same_function(got, torch.autograd.grad(step(*x), x))


class Layer(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tk.linear_attention(q, k, v)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    x = tuple(t.detach() for t in qkv())
    program = torch.export.export(Layer(), x, strict=strict)
    other = [t.detach() for t in qkv()]
    assert_same_function(program.module()(*other), attend(*other))
    names = [str(node.target) for node in program.graph.nodes]
    assert any("linear_forward" in name for name in names)


@pytest.mark.parametrize(("backend", "dtype"), OPERATORS)
def test_opcheck(backend: str, dtype: torch.dtype) -> None:
    forward, backward, steps = operators_of(WITH_OPERATORS[backend])
    q, k, v = (t.detach() for t in qkv(dtype=dtype))
    real = torch.float64 if dtype == torch.float64 else torch.float32
    S, z = (t.to(real) for t in state())
    decay = torch.full((2, 2, 70), -0.1, dtype=real)
    tests = ("test_schema", "test_faketensor")
    options = {"log_decay": decay, "S": S, "z": z, "key_end": torch.tensor([50, 70])}
    arguments = tuple(linear_arguments(q, k, v, **options).values())
    torch.library.opcheck(forward, arguments, test_utils=tests)
    o, normalizer, *end = forward(*arguments)
    saved = (torch.randn_like(o), *end, o, normalizer, *arguments)
    for wanted in (True, False):
        torch.library.opcheck(backward, (*saved, wanted), test_utils=tests)
    numbers = {"feature_map": 2, "causal": False, "normalize": False}
    plain = tuple(linear_arguments(q, k, v, **numbers).values())
    torch.library.opcheck(forward, plain, test_utils=tests)
    o, normalizer, *end = forward(*plain)
    gradients = backward(o, None, None, o, normalizer, *plain, False)
    assert_own_memory((o, normalizer, *end, *gradients))
    packed = [x[0].transpose(0, 1)[None].transpose(1, 2) for x in (q, k, v)]
    cu_seqlens = torch.tensor([0, 30, 65], dtype=torch.int32)
    varlen = tuple(linear_arguments(*packed, cu_seqlens=cu_seqlens).values())
    torch.library.opcheck(forward, varlen, test_utils=tests)
    token = (q[:, :, :1], k[:, :, :1], v[:, :, :1], None, S, z, 0, True, 1e-6)
    torch.library.opcheck(steps, token, test_utils=tests)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, backend: str) -> None:
    x = qkv()
    with torch.autocast("cpu", dtype=dtype):
        o, end = attend(
            *x, return_state=True, feature_map=lambda x: x.float().exp(), backend=backend
        )
    assert o.dtype == dtype
    assert end.S.dtype == torch.float32
    q, k, v = (t.to(dtype) for t in x)
    mapped = (t.float().exp().to(dtype) for t in (q, k))
    expected = attend(*mapped, v, feature_map="identity", backend=backend)
    torch.testing.assert_close(o, expected)
    o.float().sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in x)


@every_backend
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, backend: str) -> None:
    x = qkv()
    o = checkpoint(lambda *x: attend(*x, backend=backend), *x, use_reentrant=reentrant)
    o.sin().sum().backward()
    got = tuple(t.grad for t in x)
    expected = torch.autograd.grad(attend(*x, backend=backend).sin().sum(), x)
    assert_same_function(got, expected)


def test_fake_mode() -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 2, 70, 8, requires_grad=True) for _ in range(3))
        o, end = attend(q, k, v, return_state=True)
        assert o.shape == (2, 2, 70, 8)
        assert end.S.shape == (2, 2, 8, 8)
        packed = [x[0].transpose(0, 1) for x in (q, k, v)]
        o = attend_varlen(*packed, torch.zeros(3, dtype=torch.int32))
        assert o.shape == (70, 2, 8)
