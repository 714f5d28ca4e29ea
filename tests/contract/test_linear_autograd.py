"""Gradients of linear attention: every order, both modes, transforms, and parts of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.autograd.functional import hvp

import transformer_kernels as tk
from tests.support.linear import LINEAR_FLOAT64, LINEAR_NAMES, widest
from transformer_kernels.bench.tolerance import assert_same_function

every_backend = pytest.mark.parametrize("backend", LINEAR_NAMES)
with_float64 = pytest.mark.parametrize("backend", LINEAR_FLOAT64)
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "all": {"causal": False},
    "not-normalized": {"normalize": False, "feature_map": "identity"},
    "relu": {"feature_map": "relu", "eps": 0.5},
    "padding": {"mask": tk.Mask.padding(torch.tensor([4]))},
}


def tensors(N: int = 5, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, log_decay, S and z."""
    q, k, v = (torch.randn(1, heads, N, 3, dtype=dtype) for heads in (2, 1, 1))
    decay = -torch.rand(1, 1, N, dtype=dtype)
    S = torch.randn(1, 1, 3, 3, dtype=dtype)
    z = torch.rand(1, 1, 3, dtype=dtype) + 1
    return [x.requires_grad_() for x in (q, k, v, decay, S, z)]


def call(backend: str, options: dict[str, Any]) -> Callable[..., Any]:
    def run(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, S: Tensor, z: Tensor) -> Any:
        o, state = tk.linear_attention(
            q, k, v, log_decay=decay if options.get("causal", True) else None,
            initial_state=tk.LinearState(S, z), return_state=True, backend=backend, **options,
        )  # fmt: skip
        return (o, *state)

    return run


def inputs(options: dict[str, Any]) -> list[Tensor]:
    x = tensors()
    x[3].requires_grad_(options.get("causal", True))
    return x


@with_float64
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradcheck(options: dict[str, Any], backend: str) -> None:
    assert gradcheck(call(backend, options), inputs(options), check_forward_ad=True)


@pytest.mark.quick
@with_float64
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradgradcheck(options: dict[str, Any], backend: str) -> None:
    assert gradgradcheck(call(backend, options), inputs(options))


@with_float64
def test_gradcheck_over_chunks(backend: str) -> None:
    assert gradcheck(call(backend, {}), tensors(67), fast_mode=True)


@pytest.mark.quick
@every_backend
def test_same_tensor_as_query_key_and_value(backend: str) -> None:
    x = torch.randn(1, 2, 70, 4, dtype=widest(backend), requires_grad=True)
    separate = [x.detach().clone().requires_grad_() for _ in range(3)]
    (together,) = torch.autograd.grad(
        tk.linear_attention(x, x, x, backend=backend).sin().sum(), x, create_graph=True
    )
    apart = torch.autograd.grad(
        tk.linear_attention(*separate, backend=backend).sin().sum(), separate
    )
    assert_same_function(together, sum(apart))
    (second,) = torch.autograd.grad(together.sum(), x)
    assert second.isfinite().all()


@every_backend
@pytest.mark.parametrize(
    ("output", "leaves"),
    [*((output, range(6)) for output in range(3)), *((0, [leaf]) for leaf in range(6))],
)
def test_gradient_of_one_output_or_input(output: int, leaves: Sequence[int], backend: str) -> None:
    """The cotangents of other outputs are None, which counts as zero."""
    x = tensors(70, widest(backend))
    x = [t.detach().requires_grad_(n in leaves) for n, t in enumerate(x)]
    got, expected = (
        torch.autograd.grad(
            call(name, {})(*x)[output].cos().sum(), [x[n] for n in leaves],
            allow_unused=True, materialize_grads=True,
        )
        for name in (backend, "reference")
    )  # fmt: skip
    assert_same_function(got, expected)


def test_a_decay_without_gradient_stores_no_states() -> None:
    """Only the gradient of the decay needs the state of every chunk."""
    from transformer_kernels import _C

    def poisoned(needs_grad: bool) -> int:
        q = torch.randn(1, 4, 2048, 32, requires_grad=True)
        decay = torch.full((4,), -0.1, requires_grad=needs_grad)
        o = tk.linear_attention(q, q, q, log_decay=decay, backend="cpu")
        before = _C.poisoned_bytes()
        o.backward(torch.ones_like(o))
        return _C.poisoned_bytes() - before

    _C.want_poison(True)
    try:
        states = 4 * 2048 // 64 * 32 * 32 * 4
        assert poisoned(True) - poisoned(False) >= states
    finally:
        _C.want_poison(False)


@every_backend
def test_forward_mode(backend: str) -> None:
    x = [t.detach() for t in tensors(dtype=widest(backend))]
    tangents = [torch.randn_like(t) for t in x]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, s) for t, s in zip(x, tangents, strict=True)]
        got = forward_ad.unpack_dual(call(backend, {})(*duals)[0]).tangent
    small = 1e-6
    pairs = [(t.double(), s.double()) for t, s in zip(x, tangents, strict=True)]
    ahead, behind = (
        call("reference", {})(*(t + sign * small * s for t, s in pairs))[0] for sign in (1, -1)
    )
    expected = ((ahead - behind) / (2 * small)).to(got.dtype)
    atol = 1e-7 if got.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=atol)


@every_backend
def test_hessian_vector_product(backend: str) -> None:
    q, k, v = (torch.randn(1, 1, 5, 3, dtype=widest(backend)) for _ in range(3))
    vectors = tuple(torch.randn_like(q) for _ in range(3))

    def loss_of(name: str) -> Callable[..., Tensor]:
        return lambda q, k, v: tk.linear_attention(q, k, v, backend=name).pow(3).sum()

    _, got = hvp(loss_of(backend), (q, k, v), vectors)
    _, expected = hvp(loss_of("reference"), (q, k, v), vectors)
    assert_same_function(got, expected)


@every_backend
def test_torch_func(backend: str) -> None:
    q, k, v = (torch.randn(3, 1, 2, 5, 4) for _ in range(3))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tk.linear_attention(q, k, v, backend=backend)

    mapped = torch.func.vmap(attend)(q, k, v)
    looped = torch.stack([attend(*one) for one in zip(q, k, v, strict=True)])
    assert_same_function(mapped, looped)
    grad = torch.func.grad(lambda x: attend(x, k[0], v[0]).sin().sum())(q[0])
    x = q[0].clone().requires_grad_()
    attend(x, k[0], v[0]).sin().sum().backward()
    assert_same_function(grad, x.grad)


@every_backend
def test_inference_tensors_can_be_trained_with(backend: str) -> None:
    with torch.inference_mode():
        k = torch.randn(1, 2, 70, 4)
    q = torch.randn(1, 2, 70, 4, requires_grad=True)
    tk.linear_attention(q, k, k, backend=backend).sum().backward()
    assert q.grad is not None


@every_backend
def test_overwritten_inputs_raise_or_have_no_effect(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 70, 4, requires_grad=True) for _ in range(3))
    twice = k * 2
    o = tk.linear_attention(q, twice, v, backend=backend)
    with torch.no_grad():
        twice.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
