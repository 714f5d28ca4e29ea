"""Sorted chunks: what each place holds, the way back, weights of rounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.nn.lsh_attention import SortedChunks

B, H, ROUNDS, M = 2, 3, 2, 4

every_length = pytest.mark.parametrize("T", [1, 8, 11])


def chunks_of(T: int) -> tuple[SortedChunks, Tensor]:
    """Chunks of random orders, and the orders (B, H, ROUNDS, T)."""
    order = torch.rand(B, H, ROUNDS, T, generator=torch.Generator().manual_seed(2)).argsort(dim=-1)
    return SortedChunks(order, M), order


def tokens(T: int, D: int = 3) -> Tensor:
    return torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@every_length
def test_chunks_hold_the_tokens_in_order_behind_those_of_the_chunk_before(T: int) -> None:
    chunks, order = chunks_of(T)
    x = tokens(T)
    n = -(-T // M)
    sorted_x, pairs = chunks.sort(x), chunks.sort_pairs(x)
    q_pos, k_pos = chunks.positions()
    assert sorted_x.shape == (B * H, ROUNDS * n, M, 3)
    for b in range(B):
        for h in range(H):
            places = [(r, rank) for r in range(ROUNDS) for rank in range(n * M)]
            for place, (r, rank) in enumerate(places):
                where = (b * H + h, place // M, place % M)
                t = int(order[b, h, r, rank]) if rank < T else None
                expected = torch.zeros(3).double() if t is None else x[b, h, t]
                assert torch.equal(sorted_x[where], expected)
                assert q_pos[where] == (0 if t is None else t)
                for c, i in ((where[1], M + where[2]), ((where[1] + 1) % (ROUNDS * n), where[2])):
                    assert torch.equal(pairs[where[0], c, i], expected)
                    assert k_pos[where[0], c, i] == (T if t is None else t)


@every_length
def test_gradients_are_the_transposed_maps(T: int) -> None:
    chunks, _ = chunks_of(T)
    x = tokens(T).requires_grad_()
    for f in (chunks.sort, chunks.sort_pairs):
        y = f(x)
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert_same_function((dx * x).sum(), (dy * y).sum())
    copies = chunks.sort(tokens(T)).requires_grad_()
    total = chunks.sum_rounds(copies)
    torch.testing.assert_close(total, ROUNDS * tokens(T))
    (gradient,) = torch.autograd.grad(total, copies, tokens(T))
    assert torch.equal(gradient, chunks.sort(tokens(T)))


@every_length
def test_weights_of_the_rounds_of_a_token_add_up_to_one(T: int) -> None:
    chunks, _ = chunks_of(T)
    logits = chunks.sort(tokens(T, 1))[..., 0].clone()
    logits[0] = float("-inf")
    logits = logits.requires_grad_()
    weights, none = chunks.softmax_over_rounds(logits)
    ones = torch.ones(B, H, T, 1, dtype=torch.float64)
    torch.testing.assert_close(chunks.sum_rounds(weights[..., None]), ones)
    torch.testing.assert_close(weights[chunks.sort(ones)[..., 0] == 1].unique(), ones[0, 0, 0] / 2)
    expected = torch.zeros(B, H, T, dtype=torch.bool)
    expected[0, 0] = True
    assert torch.equal(none, expected)
    (gradient,) = torch.autograd.grad(weights.square().sum(), logits)
    assert gradient.isfinite().all()


def test_weights_are_the_softmax_of_the_logits_of_the_copies() -> None:
    chunks, order = chunks_of(8)
    logits = torch.randn(B * H, ROUNDS * 2, M, dtype=torch.float64)
    weights, none = chunks.softmax_over_rounds(logits)
    assert not none.any()
    by_round = [x.view(B, H, ROUNDS, 8) for x in (logits, weights)]
    by_token = [torch.zeros_like(x).scatter(3, order, x) for x in by_round]
    assert_same_function(by_token[1], by_token[0].softmax(dim=2))
