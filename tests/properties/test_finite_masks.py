"""Rows hidden by a large negative bias, such as the masks of many models: the weights that the
backward pass recomputes are those of the forward pass. docs/attention.md, section 8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import BACKENDS_AND_DTYPES, COMPILED_AND_DTYPES, NAMES
from tests.support.finite_masks import (
    CASES,
    SCALE,
    assert_exact,
    by_formula,
    draw,
    make_call,
    with_shared_product,
)
from tests.support.tiers import crossed
from transformer_kernels.bench.tolerance import assert_same_function, assert_within_rule

FUSED = tuple(name for name in NAMES if name != "reference")
WAYS = tuple(way for way in BACKENDS_AND_DTYPES if way[0] in FUSED)


@pytest.mark.parametrize(("case", "backend", "dtype"), crossed(CASES, WAYS))
def test_gradients(case: str, backend: str, dtype: torch.dtype) -> None:
    assert_exact(make_call(case, dtype), backend)


@pytest.mark.parametrize(("backend", "dtype"), COMPILED_AND_DTYPES)
def test_few_queries(backend: str, dtype: torch.dtype) -> None:
    """Decoding kernels compute the forward pass."""
    assert_exact(with_shared_product(draw({}, dtype, 3, 1030)), backend)


@pytest.mark.parametrize("backend", FUSED)
def test_packed_sequences_with_far_keys(backend: str) -> None:
    """ALiBi makes all scores large if a window hides the nearest 1100 keys."""
    slopes = torch.tensor([1.0, 0.5])
    options: dict[str, Any] = {
        "bias": tk.alibi(slopes, align="bottom_right"),
        "mask": tk.Mask.window(None, -1100, align="bottom_right"),
    }
    calls = [draw(options, torch.float32, M, N) for M, N in ((5, 1203), (3, 1150))]

    def packed(name: str) -> Tensor:
        return torch.cat([getattr(call, name) for call in calls], dim=2)[0].transpose(0, 1)

    q, k, v, do = (
        packed(name).clone().requires_grad_(name != "do") for name in ("q", "k", "v", "do")
    )
    o = tk.attention_varlen(
        q, k, v, torch.tensor([0, 5, 8]), torch.tensor([0, 1203, 2353]),
        **options, scale=SCALE, backend=backend,
    )  # fmt: skip
    got = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), do), strict=True))
    calls = [call._replace(dlse=torch.zeros_like(call.dlse)) for call in calls]
    exact, plain = (
        [by_formula(call, dtype) for call in calls] for dtype in (torch.float64, torch.float32)
    )
    for name, gradient in got.items():
        whole = (torch.cat([one[name] for one in each], dim=2)[0] for each in (exact, plain))
        assert_within_rule(name, gradient.transpose(0, 1), *whole)


@pytest.mark.parametrize("backend", NAMES)
def test_derivatives_of_lse(backend: str) -> None:
    """First and second order, and forward mode. In float32 the hidden scores are all equal."""
    N, D = 67, 4
    q, k = torch.randn(1, 1, 1, D, requires_grad=True), torch.randn(1, 1, N, D, requires_grad=True)
    bias = torch.full((1, N), -1e9)
    share = 1 / (N * D**0.5)

    def lse(k: Tensor) -> Tensor:
        return tk.attention(q, k, k, bias=bias, return_lse=True, backend=backend)[1].sum()

    (dk,) = torch.autograd.grad(lse(k), k, create_graph=True)
    assert_same_function(dk.detach(), (share * q.detach()).expand_as(k).contiguous())
    (dq,) = torch.autograd.grad(dk.sum(), q)
    assert_same_function(dq, torch.full_like(q, share * N))
    tangent = torch.func.jvp(lse, (k.detach(),), (torch.ones_like(k),))[1]
    assert_same_function(tangent.detach(), share * N * q.detach().sum())
