"""Relative attention: agreement of the implementations, and options."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from transformer_kernels import Mask
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.nn import (
    AttnImplementation,
    RelativeAttention,
    RelativeBlock,
    distance_sinusoids,
)


@pytest.mark.parametrize(("M", "L"), [(7, 0), (7, 3), (7, 7), (7, 40), (1, 9)])
def test_implementations_agree_for_any_memory_and_head_size(M: int, L: int) -> None:
    """test_transformer_xl.py compares them with recorded results."""
    results = []
    for implementation in get_args(AttnImplementation):
        torch.manual_seed(0)
        attention = RelativeAttention(12, 3, 41, attn_implementation=implementation).double()
        inputs = [
            torch.randn(shape, dtype=torch.float64, requires_grad=True)
            for shape in ((2, M, 12), (2, L, 12), (3, 41), (3, 41))
        ]
        x, memory, u, v = inputs
        mask = Mask.causal(align="bottom_right")
        o = attention(x, memory, distance_sinusoids(L + M, 12), u, v, mask=mask)
        do = torch.randn(o.shape, dtype=torch.float64)
        of = [*inputs, *attention.parameters()]
        results.append((o, torch.autograd.grad(o, of, do)))
    assert_same_function(results[1], results[0])
    assert_same_function(results[2], results[0])


def test_invalid_options_raise() -> None:
    for sizes, name in (((0, 2, 3), "width"), ((8, 0, 3), "heads"), ((8, 2, 0), "head_size")):
        with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got 0"):
            RelativeAttention(*sizes)
    with pytest.raises(ValueError, match=r"dropout must be at least 0 and below 1, got 1\.5"):
        RelativeBlock(8, 2, 4, dropout=1.5)
    with pytest.raises(ValueError, match="norm must be one of 'post', 'pre', got 'none'"):
        RelativeBlock(8, 2, 4, norm="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attn_implementation must be one of"):
        RelativeBlock(8, 2, 4, attn_implementation="flash")  # type: ignore[arg-type]
