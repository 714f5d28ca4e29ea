"""`scaled_dot_product_attention` of jagged nested tensors under `enable`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import transformer_kernels as tk
from tests.support.operators import BACKWARD, FORWARD, operators_run_by
from tests.support.torch_releases import not_in_2_11
from transformer_kernels.bench.tolerance import assert_same_function

LENGTHS_Q, LENGTHS_K = (3, 67, 1), (5, 70, 4)


def jagged(lengths: tuple[int, ...], H: int = 4, D: int = 12, **options: Any) -> Tensor:
    """(B, lengths, H, D), as a linear layer gives it."""
    rows = [torch.randn(n, H, D, **options) for n in lengths]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = functional.scaled_dot_product_attention(q, k, v, **options)
    return o.transpose(1, 2)


def by_sequence(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
    outputs = []
    for rows in zip(q.unbind(), k.unbind(), v.unbind(), strict=True):
        q_, k_, v_ = (x.transpose(0, 1) for x in rows)
        o = functional.scaled_dot_product_attention(q_, k_, v_, **options)
        outputs.append(o.transpose(0, 1))
    return outputs


@pytest.fixture(params=["same", "keys-of-another-length"])
def qkv(request: pytest.FixtureRequest) -> list[Tensor]:
    q = jagged(LENGTHS_Q)
    if request.param == "same":
        return [x.requires_grad_() for x in (q, torch.randn_like(q), torch.randn_like(q))]
    k = jagged(LENGTHS_K)
    return [x.requires_grad_() for x in (q, k, torch.randn_like(k))]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}], ids=str)
def test_training(qkv: list[Tensor], options: dict[str, Any]) -> None:
    expected = by_sequence(*qkv, **options)
    cotangents = [torch.randn_like(o) for o in expected]
    wanted = torch.autograd.grad(expected, qkv, cotangents)

    def step() -> tuple[Tensor, tuple[Tensor, ...]]:
        o = attend(*qkv, **options)
        return o, torch.autograd.grad(o.values(), qkv, torch.cat(cotangents))

    with tk.enabled():
        ran = operators_run_by(step)
        o, grads = step()
    assert (ran[FORWARD], ran[BACKWARD]) == (1, 1)
    assert o.layout is torch.jagged
    assert_same_function(list(o.unbind()), expected)
    for got, want in zip(grads, wanted, strict=True):
        assert_same_function(got.values(), want.values())


def test_the_result_has_the_lengths_of_the_queries(qkv: list[Tensor]) -> None:
    """Torch adds and concatenates jagged tensors only if they share their offsets."""
    with tk.enabled():
        o = attend(*qkv)
    assert o.shape == qkv[0].shape
    torch.testing.assert_close((o + qkv[0]).values(), o.values() + qkv[0].values())


def test_grouped_heads() -> None:
    q = jagged(LENGTHS_Q)
    k = q[..., :2, :]
    with tk.enabled():
        got = attend(q, k, k, enable_gqa=True)
        with pytest.raises(RuntimeError):
            attend(q, k, k)
    assert_same_function(list(got.unbind()), by_sequence(q, k, k, enable_gqa=True))


def test_dropout_is_that_of_attention_varlen(qkv: list[Tensor]) -> None:
    q, k, v = qkv
    with tk.enabled():
        torch.manual_seed(3)
        o = attend(q, k, v, dropout_p=0.3)
    torch.manual_seed(3)
    offsets = (x.offsets() for x in (q, k))  # type: ignore[attr-defined]
    expected = tk.attention_varlen(q.values(), k.values(), v.values(), *offsets, dropout_p=0.3)
    assert torch.equal(o.values(), expected)


def test_autocast(qkv: list[Tensor]) -> None:
    with tk.enabled(), torch.autocast("cpu", torch.bfloat16):
        assert attend(*qkv).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
@not_in_2_11
def test_compiled_training(compiler: str) -> None:
    q = jagged(LENGTHS_Q).requires_grad_()
    compiled = torch.compile(attend, backend=compiler, fullgraph=True)
    with tk.enabled():
        expected, o = attend(q, q, q, is_causal=True), compiled(q, q, q, is_causal=True)
        cotangent = torch.randn_like(o.values())
        (wanted,) = torch.autograd.grad(expected.values(), q, cotangent)
        (got,) = torch.autograd.grad(o.values(), q, cotangent)
    assert_same_function(o.values(), expected.values())
    assert_same_function(got.values(), wanted.values())


@torch.no_grad()
def test_torch_attends_where_these_kernels_do_not() -> None:
    q = jagged(LENGTHS_Q)
    gaps = torch.nested.nested_tensor_from_jagged(
        torch.randn(9, 4, 12), torch.tensor([0, 4, 9]), torch.tensor([2, 5])
    )
    expected = attend(q, q, q)
    with tk.enabled():
        with sdpa_kernel(SDPBackend.MATH):
            ran = operators_run_by(lambda: attend(q, q, q))
        assert FORWARD not in ran
        with pytest.raises(RuntimeError):
            attend(gaps, gaps, gaps)
        with pytest.warns(UserWarning, match="falling back to torch's own attention: scale must"):
            attend(q, q, q, scale=float("inf"))
        with pytest.raises(ValueError, match="to be nested tensors"):
            functional.scaled_dot_product_attention(q.transpose(1, 2), q.values(), q.values())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert FORWARD in operators_run_by(lambda: attend(q, q, q))
    assert FORWARD not in operators_run_by(lambda: attend(q, q, q))
    torch.testing.assert_close(attend(q, q, q).values(), expected.values())
