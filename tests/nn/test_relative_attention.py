"""Relative attention against ordinary attention, by trigonometric identities."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from transformer_kernels import Mask
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.nn import (
    AttnImplementation,
    RelativeAttention,
    RelativeBlock,
    distance_sinusoids,
)

IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)
CAUSAL = Mask.causal(align="bottom_right")


def randn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def by_trigonometry(
    attention: RelativeAttention, x: Tensor, memory: Tensor, u: Tensor, v: Tensor
) -> Tensor:
    """Relative attention to sinusoidal encodings as ordinary attention of width D + d_model.

    With g = W_rᵀ (q_i + v) and the angle w p of a position p, the addition theorems give

        g · [sin w(i - j), cos w(i - j)] = [g_c sin wi - g_s cos wi, g_s sin wi + g_c cos wi]
                                           · [sin wj, cos wj]
    """
    width, L = x.shape[2], memory.shape[1]
    source = torch.cat([memory, x], dim=1)
    sines, cosines = distance_sinusoids(source.shape[1], width).chunk(2, dim=1)
    results = []
    for h in range(attention.heads):
        head = slice(h * attention.head_size, (h + 1) * attention.head_size)
        q, k, values = (
            layer(y)[..., head]
            for layer, y in (
                (attention.queries, x),
                (attention.keys, source),
                (attention.values, source),
            )
        )
        g_s, g_c = ((q + v[h]) @ attention.distance_keys.weight[head]).chunk(2, dim=-1)
        s, c = sines[L:], cosines[L:]
        wide_q = torch.cat([q + u[h], g_c * s - g_s * c, g_s * s + g_c * c], dim=-1)
        positions = torch.cat([sines, cosines], dim=1).expand(len(x), -1, -1)
        wide_k = torch.cat([k, positions], dim=-1)
        scores = wide_q @ wide_k.mT * attention.head_size**-0.5
        visible = CAUSAL.materialize(1, 1, x.shape[1], source.shape[1])[0, 0]
        results.append(scores.masked_fill(~visible, -torch.inf).softmax(dim=-1) @ values)
    y: Tensor = attention.out_proj(torch.cat(results, dim=-1))
    return y


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("M", "L"), [(7, 0), (7, 3), (7, 7), (7, 40), (1, 9)])
def test_attention_equals_ordinary_attention_by_trigonometry(
    M: int, L: int, implementation: AttnImplementation
) -> None:
    attention = RelativeAttention(12, 3, 41, attn_implementation=implementation).double()
    for n, parameter in enumerate(attention.parameters()):
        parameter.data = randn(*parameter.shape, seed=10 + n) / 12**0.5
    x, memory = randn(2, M, 12, seed=1), randn(2, L, 12, seed=2)
    u, v = randn(3, 41, seed=3), randn(3, 41, seed=4)
    inputs = [each.requires_grad_() for each in (x, memory, u, v)] + list(attention.parameters())
    encodings = distance_sinusoids(L + M, 12)
    o = attention(x, memory, encodings, u, v, mask=CAUSAL)
    expected = by_trigonometry(attention, x, memory, u, v)
    assert_same_function(o, expected)
    do = randn(*o.shape, seed=5)
    assert_same_function(
        torch.autograd.grad(o, inputs, do), torch.autograd.grad(expected, inputs, do)
    )


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
