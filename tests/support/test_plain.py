"""`plain_attention` against explicit loops over rows and keys, in float64."""

from __future__ import annotations

import math

import pytest
import torch

import transformer_kernels as tk
from tests.support.plain import plain_attention

M, N, D, D_v = 3, 4, 2, 3


def test_plain_attention_equals_explicit_loops() -> None:
    q, k, v = (torch.randn(1, 1, n, d, dtype=torch.float64) for n, d in ((M, D), (N, D), (N, D_v)))
    bias = torch.randn(M, N, dtype=torch.float64)
    visible, keep_mask = torch.rand(1, 1, M, N) < 0.7, torch.rand(1, 1, M, N) < 0.5
    visible[..., 1, :], visible[..., 0, 0] = False, True
    sinks = torch.tensor([0.4], dtype=torch.float64)
    for sink in (None, 0.4):
        o, lse = plain_attention(
            q, k, v,
            visible=visible, bias=bias, scale=0.7, softcap=1.3, keep_mask=keep_mask, dropout_p=0.5,
            sinks=None if sink is None else sinks,
        )  # fmt: skip
        for i in range(M):
            s = [
                1.3 * math.tanh(0.7 * float(q[0, 0, i] @ k[0, 0, j]) / 1.3) + float(bias[i, j])
                for j in range(N)
            ]
            visible_keys = [j for j in range(N) if visible[0, 0, i, j]]
            total = sum(math.exp(s[j]) for j in visible_keys) + (
                0.0 if sink is None else math.exp(sink)
            )
            assert float(lse[0, 0, i]) == pytest.approx(math.log(total) if total else -math.inf)
            row = torch.zeros(D_v, dtype=torch.float64)
            for j in visible_keys:
                row += math.exp(s[j]) / total * v[0, 0, j] * (2.0 if keep_mask[0, 0, i, j] else 0.0)
            torch.testing.assert_close(o[0, 0, i], row)


def test_results_have_the_dtype_of_the_inputs() -> None:
    x = torch.randn(1, 4, 5, 8, dtype=torch.bfloat16)
    o, lse = plain_attention(x, x[:, :2], x[:, :2], bias=tk.alibi(torch.ones(4)))
    assert o.dtype == lse.dtype == torch.bfloat16
    assert torch.equal(
        o[:, 1],
        plain_attention(x[:, 1:2], x[:, :1], x[:, :1], bias=tk.alibi(torch.ones(1)))[0][:, 0],
    )


def test_dropout_needs_a_keep_mask() -> None:
    x = torch.randn(1, 1, 2, 2)
    with pytest.raises(ValueError, match="keep_mask: dropout_p"):
        plain_attention(x, x, x, dropout_p=0.5)
