"""`linear_attention_decode` beyond the table of cases: feature maps, no tokens and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import DTYPES
from tests.support.case import assert_case
from tests.support.linear import LINEAR_NAMES, LinearCase
from tests.support.tiers import each

decode: Any = tk.linear_attention_decode

B, H_kv, D, D_v = 2, 2, 7, 5
ZEROS = torch.zeros(2, 2, 7)


@pytest.mark.usefixtures("poisoned", "isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_instruction_sets(dtype: torch.dtype) -> None:
    assert_case(
        LinearCase(name="by-2", steps=(2,) * 20, H_q=4, D=7, D_v=5, decay="head"), dtype, "cpu"
    )


@pytest.mark.parametrize("backend", LINEAR_NAMES)
def test_a_callable_feature_map_runs_before_the_kernels(backend: str) -> None:
    q, k, v = (torch.randn(B, H_kv, 3, width) for width in (D, D, D_v))

    def widen(x: Tensor) -> Tensor:
        return torch.cat([x.exp(), (-x).exp()], dim=-1)

    states = [zeros(2 * D) for _ in range(2)]
    o = decode(q, k, v, states[0], feature_map=widen, backend=backend)
    expected = decode(widen(q), widen(k), v, states[1], feature_map="identity", backend=backend)
    assert torch.equal(o, expected)
    assert torch.equal(states[0].S, states[1].S)


def zeros(width: int = D) -> tk.LinearState:
    return tk.LinearState(torch.zeros(B, H_kv, width, D_v), torch.zeros(B, H_kv, width))


@pytest.mark.parametrize("backend", LINEAR_NAMES)
def test_no_tokens_and_no_batch(backend: str) -> None:
    state = zeros()
    q, k, v = (torch.randn(B, H_kv, 0, width) for width in (D, D, D_v))
    assert decode(q, k, v, state, backend=backend).shape == (B, H_kv, 0, D_v)
    assert not state.S.any()
    empty = tk.LinearState(state.S[:0], state.z[:0])
    q, k, v = (torch.randn(0, H_kv, 1, width) for width in (D, D, D_v))
    assert decode(q, k, v, empty, backend=backend).shape == (0, H_kv, 1, D_v)


@each(
    ("change", "message"),
    [
        ({"state": None}, "state must be a LinearState"),
        ({"state": (torch.zeros(2, 2, 5, 7).mT, ZEROS)}, "state.S must be contiguous"),
        ({"state": (torch.zeros(2, 2, 7, 5).double(), ZEROS)}, "must be float32"),
        ({"q": torch.zeros(2, 2, 1, 7).requires_grad_()}, "because linear_attention_decode has no"),
        ({"q": torch.zeros(2, 2, 2, 7)}, "as many queries as keys"),
        ({"eps": -1}, "eps must be greater than 0"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    state = tk.LinearState(torch.zeros(2, 2, 7, 5), torch.zeros(2, 2, 7))
    given: dict[str, Any] = {"q": torch.zeros(2, 2, 1, 7), "k": torch.zeros(2, 2, 1, 7)}
    given |= {"v": torch.zeros(2, 2, 1, 5), "state": state}
    with pytest.raises((TypeError, ValueError), match=message):
        decode(**(given | change))


def test_gradients_are_refused_in_grad_mode_only() -> None:
    q = torch.zeros(2, 2, 1, 7, requires_grad=True)
    state = tk.LinearState(torch.zeros(2, 2, 7, 5), torch.zeros(2, 2, 7))
    with torch.no_grad():
        o = decode(q, q, torch.ones(2, 2, 1, 5), state)
    assert not o.requires_grad
