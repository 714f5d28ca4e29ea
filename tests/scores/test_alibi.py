"""ALiBi: the slopes of the paper, the dense form of the bias, and its computation in kernels."""

from __future__ import annotations

import pytest
import torch

import transformer_kernels as tk
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.masks.constraints import Align


def test_slopes_of_the_paper() -> None:
    eight = [2.0**-h for h in range(1, 9)]
    assert tk.alibi_slopes(8).tolist() == eight
    assert tk.alibi_slopes(1).tolist() == [2.0**-8]
    # The code of Press et al. for 12 heads: the slopes for 8, then every other one for 16.
    extra = [2.0 ** (-0.5 * h) for h in (1, 3, 5, 7)]
    torch.testing.assert_close(tk.alibi_slopes(12), torch.tensor(eight + extra))


@pytest.mark.parametrize(("M", "N"), [(3, 3), (2, 5), (5, 2)])
def test_dense_form(M: int, N: int) -> None:
    slopes = torch.tensor([0.5, 0.125])
    offsets: dict[Align, int] = {"top_left": 0, "bottom_right": N - M}
    for align, d in offsets.items():
        bias = tk.alibi(slopes, align=align).dense(M, N)
        for h, i, j in ((h, i, j) for h in range(2) for i in range(M) for j in range(N)):
            assert bias[0, h, i, j] == -slopes[h] * abs(i + d - j)


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_equals_its_dense_form(align: Align, backend: str) -> None:
    q, k, v = torch.randn(2, 4, 67, 8), torch.randn(2, 4, 131, 8), torch.randn(2, 4, 131, 8)
    bias = tk.alibi(tk.alibi_slopes(4), align=align)
    inside = tk.attention(q, k, v, bias=bias, backend=backend)
    outside = tk.attention(q, k, v, bias=bias.dense(67, 131), backend=backend)
    assert_same_function(inside, outside)


def test_causal_alibi_equals_the_formula_of_the_paper() -> None:
    """slope * (j - i) and slope * j differ by a constant per row, which the softmax cancels."""
    q, k, v = (torch.randn(1, 2, 9, 4) for _ in range(3))
    slopes = tk.alibi_slopes(2)
    papers = slopes[None, :, None, None] * torch.arange(9.0)
    causal = tk.Mask.causal()
    assert_same_function(
        tk.attention(q, k, v, bias=tk.alibi(slopes), mask=causal),
        tk.attention(q, k, v, bias=papers, mask=causal),
    )


def test_half_precision_slopes(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.bfloat16) for _ in range(3))
    half = tk.attention(
        q, k, v, bias=tk.alibi(torch.tensor([0.5, 0.25]).bfloat16()), backend=backend
    )
    full = tk.attention(q, k, v, bias=tk.alibi(torch.tensor([0.5, 0.25])), backend=backend)
    assert torch.equal(half, full)


def test_gradient_of_slopes() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    bias = tk.alibi(slopes)
    (inside,) = torch.autograd.grad(tk.attention(q, k, v, bias=bias).square().sum(), slopes)
    dense = bias.dense(5, 5)
    (outside,) = torch.autograd.grad(tk.attention(q, k, v, bias=dense).square().sum(), slopes)
    assert_same_function(inside, outside)
    assert inside.abs().min() > 0
