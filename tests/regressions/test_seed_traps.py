"""Errors in the attention code of the seed documents, which these kernels must not repeat."""

from __future__ import annotations

import pytest
import torch

import transformer_kernels as tk
from tests.support.oracle import plain_attention
from transformer_kernels.bench.tolerance import assert_same_function, assert_within_rule

CAUSAL = tk.Mask.causal()


def test_a_softmax_over_the_wrong_dimension_leaks_the_future(backend: str) -> None:
    """Earlier outputs must not change when a later token does."""
    x = torch.randn(2, 2, 9, 8)
    changed = x.clone()
    changed[:, :, 5:] = torch.randn(2, 2, 4, 8)
    before = tk.attention(x, x, x, mask=CAUSAL, backend=backend)
    after = tk.attention(changed, changed, changed, mask=CAUSAL, backend=backend)
    assert torch.equal(before[:, :, :5], after[:, :, :5])
    assert not torch.isclose(before[:, :, 5:], after[:, :, 5:]).all(-1).any()

    s = (x @ x.mT).masked_fill(~CAUSAL.materialize(1, 1, 9, 9), float("-inf"))
    s_changed = (changed @ changed.mT).masked_fill(s.isneginf(), float("-inf"))
    theirs, theirs_changed = s.softmax(dim=-2) @ x, s_changed.softmax(dim=-2) @ changed
    assert not torch.allclose(theirs[:, :, :5], theirs_changed[:, :, :5])


def test_weights_of_a_query_sum_to_one(backend: str) -> None:
    x = torch.randn(1, 1, 9, 9)
    weights = tk.attention(x, x, torch.eye(9)[None, None], mask=CAUSAL, backend=backend)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(1, 1, 9))
    assert torch.equal(weights != 0, CAUSAL.materialize(1, 1, 9, 9))


def test_scores_are_scaled_by_the_width_not_the_length(backend: str) -> None:
    x = torch.randn(1, 1, 9, 4)
    expected = (x @ x.mT / 2.0).softmax(dim=-1) @ x
    assert_same_function(tk.attention(x, x, x, backend=backend), expected)


def test_zero_times_infinity(backend: str) -> None:
    """(1 - mask) * inf is NaN where the mask is 1. The operator never multiplies by infinity."""
    mask = torch.ones(5, 5)
    assert ((1 - mask) * float("inf")).isnan().all()
    x = torch.randn(1, 1, 5, 4, requires_grad=True)
    for attn_mask in (mask.bool(), mask.tril().bool()):
        o = tk.attention(x, x, x, mask=tk.Mask.dense(attn_mask), backend=backend)
        (dx,) = torch.autograd.grad(o.sum(), x)
        assert o.isfinite().all()
        assert dx.isfinite().all()


def test_a_mask_longer_than_the_sequence_is_refused(backend: str) -> None:
    x = torch.randn(1, 1, 5, 4)
    longer = tk.Mask.dense(torch.ones(8, 8).tril().bool())
    with pytest.raises(ValueError, match=r"\(1, 1, 5, 5\), got \(1, 1, 8, 8\)"):
        tk.attention(x, x, x, mask=longer, backend=backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_fully_masked_row(dtype: torch.dtype, backend: str) -> None:
    """-1e9 gives uniform weights and -inf gives NaN. The operator gives 0, and lse = -inf."""
    x = torch.randn(1, 1, 5, 4, dtype=dtype, requires_grad=True)
    hidden = torch.full((5, 5), float("-inf"))
    assert hidden.softmax(-1).isnan().all()
    assert torch.equal((hidden.nan_to_num(neginf=-1e9)).softmax(-1), torch.full((5, 5), 0.2))
    mask = tk.Mask.dense(torch.ones(5, 5).tril(-1).bool())
    q = x.detach().clone().requires_grad_()
    o, lse = tk.attention(q, x, x, mask=mask, return_lse=True, backend=backend)
    assert not o[:, :, 0].any()
    assert lse[0, 0].isneginf().tolist() == [True, False, False, False, False]
    dq, dx = torch.autograd.grad(o.sum(), (q, x))
    assert not dq[:, :, 0].any()
    assert dx.isfinite().all()


def test_minus_1e9_overflows_in_half_precision(backend: str) -> None:
    assert torch.tensor(-1e9).half().isneginf()
    x = torch.randn(1, 1, 70, 4, dtype=torch.float16)
    mask = tk.Mask.causal() & tk.Mask.padding(torch.tensor([66]))
    o = tk.attention(x, x, x, mask=mask, backend=backend)
    exact = tk.attention(x.double(), x.double(), x.double(), mask=mask, backend="reference")
    plain, _ = plain_attention(x, x, x, visible=mask.materialize(1, 1, 70, 70))
    assert_within_rule("o", o, exact, plain)


def test_scores_beyond_half_precision(backend: str) -> None:
    """q kᵀ overflows float16 before scaling. The operator scales in float32: scaling the scores and
    scaling q and k by 1 / D^(1/4) agree with the exact result."""
    width = 256
    x = (torch.randn(1, 1, 9, width) * 30).half()
    assert (x @ x.mT).isinf().any()
    root = width**0.25
    one_way = tk.attention(x, x, x, backend=backend)
    other_way = tk.attention(x / root, x / root, x, scale=1.0, backend=backend)
    exact = tk.attention(x.double(), x.double(), x.double(), backend="reference")
    for o in (one_way, other_way):
        assert_within_rule("o", o, exact, exact.half())
