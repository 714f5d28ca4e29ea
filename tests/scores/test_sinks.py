"""Attention sinks joined to a result: accuracy where the sink's weight is very small or large."""

from __future__ import annotations

import torch

from tests.support.tiers import each
from transformer_kernels.scores.sinks import join_sinks


@each("sink", [-60.0, -12.0, 0.0, 12.0, 60.0])
def test_gradients_are_accurate_for_sinks_of_any_weight(sink: float) -> None:
    """1 - sigmoid(x) would lose all digits of a sink's small weight."""
    o, do = torch.rand(1, 2, 5, 8), torch.rand(1, 2, 5, 8)
    lse, sinks = torch.randn(1, 2, 5), torch.full((2,), sink)

    def gradients(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in (o, lse, sinks)]
        joined, _ = join_sinks(*leaves)
        return torch.autograd.grad(joined, leaves, do.to(dtype))

    for got, exact in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=2e-5, atol=0.0)
