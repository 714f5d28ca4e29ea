"""Derivatives of every order and mode, against finite differences and against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import transformer_kernels as tk
from tests.support.backends import WITH_FLOAT64
from tests.support.oracle import plain_attention
from transformer_kernels.bench.tolerance import assert_same_function

B, H_q, H_kv, M, N, D, D_v = 1, 2, 1, 3, 4, 3, 2
Options = dict[str, Any]

OPTIONS: dict[str, Options] = {
    "plain": {},
    "causal": {"mask": tk.Mask.causal()},
    "empty-rows": {"mask": tk.Mask.window(-2, None) & tk.Mask.padding(torch.tensor([3]))},
    "softcap": {"softcap": 0.8, "scale": -0.9},
    "dropout": {"dropout_p": 0.4, "seed": 7},
    "alibi": {"bias": tk.alibi(torch.tensor([0.5, 0.25], dtype=torch.float64))},
    "relative": {"relative": tk.relative_bias(torch.ones(2, 3).double().cumsum(1), lowest=-1)},
    "keys": {
        "relative": tk.relative_keys(
            torch.ones(2, 3, D).double().cumsum(1) / 4, table=torch.ones(2, 3).double(), lowest=-1
        )
    },
}


def qkv(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(B, H_q, M, D, dtype=dtype, requires_grad=True)
    k = torch.randn(B, H_kv, N, D, dtype=dtype, requires_grad=True)
    v = torch.randn(B, H_kv, N, D_v, dtype=dtype, requires_grad=True)
    return q, k, v


def attend(backend: str, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a function (q, k, v) -> (o, lse with 0 in place of -inf)."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = tk.attention(q, k, v, **options, return_lse=True, backend=backend)
        return o, torch.where(lse.isneginf(), 0.0, lse)

    return call


@pytest.fixture(params=WITH_FLOAT64)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.quick
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradcheck(options: Options, backend: str) -> None:
    assert gradcheck(attend(backend, **options), qkv(), check_forward_ad=True)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradgradcheck(options: Options, backend: str) -> None:
    assert gradgradcheck(attend(backend, **options), qkv(), check_fwd_over_rev=True, fast_mode=True)


DIFFERENTIABLE: dict[str, tuple[list[tuple[int, ...]], Callable[..., Options]]] = {
    **{
        f"bias-{shape}": ([shape, (H_q,)], lambda bias, sinks: {"bias": bias, "sinks": sinks})
        for shape in ((B, H_q, M, N), (1, H_q, 1, N), (M, N))
    },
    # With clamped distances at both ends, and softcap, whose derivative the table has not.
    **{
        f"table-{shape}": (
            [shape],
            lambda table: {
                "relative": tk.relative_bias(table, lowest=-1, align="bottom_right"),
                "softcap": 0.9,
            },
        )
        for shape in ((1, 3), (H_q, 3))
    },
    "slopes": ([(H_q,)], lambda slopes: {"bias": tk.alibi(slopes)}),
    # lse = -inf without the sink
    "sinks-of-empty-rows": ([(H_q,)], lambda x: {"sinks": x, "mask": tk.Mask.window(-2, None)}),
}
"""Shapes of differentiable options, and the options made from them."""


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_differentiable_options(name: str, backend: str) -> None:
    shapes, options = DIFFERENTIABLE[name]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def call(q: Tensor, k: Tensor, v: Tensor, *leaves: Tensor) -> tuple[Tensor, Tensor]:
        return tk.attention(q, k, v, **options(*leaves), return_lse=True, backend=backend)

    assert gradcheck(call, (*qkv(), *leaves), check_forward_ad=True)
    assert gradgradcheck(call, (*qkv(), *leaves), check_fwd_over_rev=True, fast_mode=True)


def test_third_order(backend: str) -> None:
    def gradient(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        o, lse = tk.attention(q, k, v, return_lse=True, backend=backend)
        return torch.autograd.grad(o.sin().sum() + lse.sum(), (q, k, v), create_graph=True)

    q, k, v = (torch.randn(1, 1, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert gradgradcheck(gradient, (q, k, v))


def test_second_order_without_keys(backend: str) -> None:
    q, k, v = qkv()
    q, k, v = q, k[:, :, :0], v[:, :, :0]
    o = tk.attention(q, k, v, backend=backend)
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    (ddq,) = torch.autograd.grad(dq.sum() + q.sum(), q)
    assert torch.equal(ddq, torch.ones_like(q))


def test_forward_mode_without_keys(backend: str) -> None:
    q, k, v = qkv()
    sinks = torch.randn(H_q, dtype=torch.float64, requires_grad=True)

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return tk.attention(q, k, v, sinks=sinks, return_lse=True, backend=backend)

    assert gradcheck(call, (q, k[:, :, :0], v[:, :, :0], sinks), check_forward_ad=True)


@pytest.mark.parametrize("selected", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_gradient_of_some_inputs(selected: tuple[int, ...], backend: str) -> None:
    tensors = qkv()
    for i, x in enumerate(tensors):
        x.requires_grad_(i in selected)
    some = [tensors[i] for i in selected]
    cotangent = torch.randn(B, H_q, M, D_v, dtype=torch.float64)
    got = torch.autograd.grad(tk.attention(*tensors, backend=backend), some, cotangent)
    exact = torch.autograd.grad(plain_attention(*tensors)[0], some, cotangent)
    assert_same_function(got, exact)


@pytest.mark.parametrize("output", [0, 1], ids=["o", "lse"])
def test_gradient_of_one_output(output: int, backend: str) -> None:
    tensors = qkv()
    ours = tk.attention(*tensors, return_lse=True, backend=backend)[output]
    plain = plain_attention(*tensors)[output]
    cotangent = torch.randn_like(plain)
    got = torch.autograd.grad(ours, tensors, cotangent, allow_unused=True)
    exact = torch.autograd.grad(plain, tensors, cotangent, allow_unused=True)
    zeros = [torch.zeros_like(x) for x in tensors]
    for one, other, zero in zip(got, exact, zeros, strict=True):
        assert_same_function(zero if one is None else one, zero if other is None else other)


def test_gradient_of_bias_alone(backend: str) -> None:
    q, k, v = (x.detach() for x in qkv())
    bias = torch.randn(1, H_q, 1, N, dtype=torch.float64, requires_grad=True)
    got = torch.autograd.grad(tk.attention(q, k, v, bias=bias, backend=backend).sum(), bias)
    exact = torch.autograd.grad(plain_attention(q, k, v, bias=bias)[0].sum(), bias)
    assert_same_function(got, exact)


def test_same_tensor_as_query_key_and_value(backend: str) -> None:
    x = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return tk.attention(x, x, x, backend=backend)

    assert gradcheck(call, (x,), check_forward_ad=True)
    assert gradgradcheck(call, (x,))


def test_same_tensor_as_all_inputs_to_third_order(backend: str) -> None:
    """One tensor as query, key, value and cotangent: each use has its own gradient, and
    create_graph=True changes no gradient."""
    x = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)

    def gradient(x: Tensor) -> Tensor:
        o = tk.attention(x, x, x, backend=backend)
        (dx,) = torch.autograd.grad(o, x, x, create_graph=True)
        return dx

    assert gradcheck(gradient, (x,))
    assert gradgradcheck(gradient, (x,))
    (without,) = torch.autograd.grad(gradient(x).sin().sum(), x)
    (with_graph,) = torch.autograd.grad(gradient(x).sin().sum(), x, create_graph=True)
    assert_same_function(with_graph, without)


def test_overwritten_inputs_raise_or_have_no_effect(backend: str) -> None:
    q, k, v = qkv()
    exact = torch.autograd.grad(plain_attention(q, k, v)[0].sum(), (q, k, v))
    k_used = k * 1.0
    loss = tk.attention(q, k_used, v, backend=backend).sum()
    with torch.no_grad():
        k_used.zero_()
    try:
        got = torch.autograd.grad(loss, (q, k, v))
    except RuntimeError:  # autograd detects the in-place change
        return
    assert_same_function(got, exact)


def test_backward_twice(backend: str) -> None:
    tensors = qkv()
    loss = tk.attention(*tensors, backend=backend).square().sum()
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    second = torch.autograd.grad(loss, tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad(mode: Callable[[], Any], backend: str) -> None:
    tensors = qkv()
    with mode():
        o = tk.attention(*tensors, backend=backend)
    assert not o.requires_grad
    assert_same_function(o.clone(), plain_attention(*tensors)[0].detach())


def test_forward_mode_over_slopes(backend: str) -> None:
    """A tangent of the slopes alone propagates, although no kernel differentiates them."""
    q, k, v = (x.detach() for x in qkv())
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(slopes, torch.ones_like(slopes))
        o = tk.attention(q, k, v, bias=tk.alibi(dual), backend=backend)
        tangent = forward_ad.unpack_dual(o).tangent
    step = 1e-6
    plus, minus = (
        tk.attention(q, k, v, bias=tk.alibi(slopes + sign * step)) for sign in (1.0, -1.0)
    )
    torch.testing.assert_close(tangent, (plus - minus) / (2 * step), rtol=1e-6, atol=1e-8)
