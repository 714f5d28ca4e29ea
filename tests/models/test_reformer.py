"""Reformer: reversible stacks, whose gradients are those of plain autograd, layers and model."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.zoo import IMPLEMENTATIONS, entry_of, gradients, randn, saved_sizes, tokens
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.nn import (
    AttnImplementation,
    KVCache,
    LocalBlock,
    LSHAttention,
    ReformerBlock,
    ReversibleStack,
    hash_buckets,
    lsh_attention,
    sorted_by_bucket,
)

WIDTH = 12


def options() -> dict[str, Any]:
    """Options of the blocks: the same hashes at every call."""
    return {"rounds": 2, "generator": torch.Generator().manual_seed(6)}


def reformer_blocks(layers: int = 3, dropout: float = 0.0) -> ReversibleStack:
    torch.manual_seed(0)
    stack = ReversibleStack(
        ReformerBlock(WIDTH, 2, chunk=4, dropout=dropout) for _ in range(layers)
    )
    for parameter in stack.parameters():
        nn.init.normal_(parameter, std=0.3)
    return stack


def streams(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x1, x2 = (randn(2, 11, WIDTH, seed=seed).to(dtype).requires_grad_() for seed in (1, 2))
    return x1, x2


def loss_of(stack: ReversibleStack, *x: Tensor) -> Tensor:
    """A loss in which both streams count, with the same dropout at every call."""
    torch.manual_seed(5)
    y1, y2 = stack(*x, **options())
    loss: Tensor = (y1 * y1.detach().cos()).sum() + (y2 * y2.detach().sin()).sum()
    return loss


def stack_gradients(stack: ReversibleStack, *x: Tensor) -> list[Tensor]:
    wanted = [one for one in (*x, *stack.parameters()) if one.requires_grad]
    return list(torch.autograd.grad(loss_of(stack, *x), wanted))


def plain(stack: ReversibleStack) -> ReversibleStack:
    """The same weights under plain autograd."""
    other = copy.deepcopy(stack)
    other.reversible = False
    return other


def test_results_and_gradients_equal_those_of_plain_autograd() -> None:
    stack, x = reformer_blocks(dropout=0.4).double(), streams()
    torch.manual_seed(5)
    found = stack(*x, **options())
    torch.manual_seed(5)
    wanted = plain(stack)(*x, **options())
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert_same_function(stack_gradients(stack, *x), stack_gradients(plain(stack), *x))
    with torch.no_grad():
        torch.manual_seed(5)
        y = stack(*x, **options())
    torch.testing.assert_close(y, found, rtol=0, atol=0)
    assert y[0].grad_fn is None


def test_backward_adds_to_grad_and_reaches_hooks() -> None:
    stack, x = reformer_blocks().double(), streams()
    expected = stack_gradients(plain(stack), *x)
    seen: list[Tensor] = []
    first = next(stack.parameters())
    first.register_hook(seen.append)
    for _ in range(2):
        loss_of(stack, *x).backward()
    found = [one.grad for one in (*x, *stack.parameters())]
    assert_same_function(found, [2 * one for one in expected])
    assert len(seen) == 2
    assert_same_function(seen[0], expected[2])


def test_frozen_parameters_and_inputs_get_no_gradient() -> None:
    stack, (x1, x2) = reformer_blocks().double(), streams()
    for parameter in stack[1].parameters():
        parameter.requires_grad_(False)
    x2 = x2.detach()
    assert_same_function(stack_gradients(stack, x1, x2), stack_gradients(plain(stack), x1, x2))
    loss_of(stack, x1, x2).backward()
    assert all(p.grad is None for p in stack[1].parameters())
    assert all(p.grad is not None for p in stack[0].parameters())


def test_shared_weights_get_the_sum_of_their_gradients() -> None:
    block, x = reformer_blocks(1).double()[0], streams()
    shared = ReversibleStack([block, block, block])
    assert_same_function(stack_gradients(shared, *x), stack_gradients(plain(shared), *x))


def test_inside_activation_checkpointing() -> None:
    stack, x = reformer_blocks(dropout=0.4).double(), streams()
    torch.manual_seed(5)
    y1, y2 = checkpoint(lambda *x: stack(*x, **options()), *x, use_reentrant=False)
    loss = (y1 * y1.detach().cos()).sum() + (y2 * y2.detach().sin()).sum()
    found = torch.autograd.grad(loss, [*x, *stack.parameters()])
    assert_same_function(list(found), stack_gradients(plain(stack), *x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_residuals_are_float32_and_gradients_those_of_plain_autograd(
    dtype: torch.dtype,
) -> None:
    """The backward pass runs outside the autocast context, as usual."""
    stack, x = reformer_blocks(dropout=0.4), streams(torch.float32)
    results = []
    for one in (stack, plain(stack)):
        wanted = [*x, *one.parameters()]
        with torch.autocast("cpu", dtype):
            loss = loss_of(one, *x)
        results.append((loss, *torch.autograd.grad(loss, wanted)))
    y1, y2 = stack(*x, **options())
    assert y1.dtype == y2.dtype == torch.float32
    assert torch.equal(results[0][0], results[1][0])
    for found, wanted in zip(*results, strict=True):
        error = (found - wanted).norm() / wanted.norm()
        assert error < 0.02, error


def test_weights_used_outside_the_stack_keep_their_gradient_under_autocast() -> None:
    stack, x = reformer_blocks(1), streams(torch.float32)
    shared = stack.get_parameter("0.feed_forward.up_proj.weight")
    with torch.autocast("cpu", torch.bfloat16):
        stack(*x, **options())
        outside = nn.functional.linear(x[0].detach(), shared)
    (gradient,) = torch.autograd.grad(outside.float().sum(), [shared])
    expected = x[0].detach().sum(dim=(0, 1)).expand_as(gradient)
    assert_same_function(gradient, expected, dtype=torch.bfloat16)


def test_backward_leaves_the_random_generator_as_it_was() -> None:
    stack, x = reformer_blocks(dropout=0.4).double(), streams()
    loss = loss_of(stack, *x)
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


@each("layers", [1, 6])
def test_only_the_last_outputs_and_the_orders_are_saved(layers: int) -> None:
    stack, x = reformer_blocks(layers).double(), streams()
    results: list[Tensor] = []
    sizes = saved_sizes(lambda: results.extend(stack(*x, **options())))
    assert sizes == [2 * 11 * WIDTH] * 2
    node: Any = results[0].grad_fn
    assert len(node.records) == layers
    assert all(record.choices[0].dtype == torch.int32 for record in node.records)


def test_second_derivatives_are_refused() -> None:
    stack, x = reformer_blocks().double(), streams()
    (first,) = torch.autograd.grad(loss_of(stack, *x).square(), x[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# Layers


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [None, 3.0])
def test_layer_is_attention_by_hashing_of_its_projections(
    causal: bool, scale: float | None
) -> None:
    torch.manual_seed(0)
    layer = LSHAttention(16, 2, chunk=4, causal=causal, buckets=(2, 4), scale=scale).double()
    x = torch.randn(2, 14, 16, dtype=torch.float64)
    y, order = layer(x, rounds=2, generator=torch.Generator().manual_seed(1))
    q, v = (f(x).unflatten(2, (2, 8)).transpose(1, 2) for f in (layer.queries, layer.values))
    generator = torch.Generator().manual_seed(1)
    buckets = hash_buckets(q, rounds=2, buckets=(2, 4), generator=generator)
    assert torch.equal(order, sorted_by_bucket(buckets))
    o = lsh_attention(q, v, order, chunk=4, causal=causal, scale=scale)
    assert_same_function(y, layer.out_proj(o.transpose(1, 2).flatten(2)))


def test_layer_ignores_padding() -> None:
    torch.manual_seed(0)
    layer = LSHAttention(16, 2, chunk=4, causal=False).double()
    x, lengths = torch.randn(2, 14, 16, dtype=torch.float64), torch.tensor([14, 6])
    y, order = layer(x, rounds=2, generator=torch.Generator().manual_seed(1), key_lengths=lengths)
    assert (order[1, :, :, 6:] >= 6).all(), "padding is sorted to the end"
    changed = x.clone()
    changed[1, 6:] = 7.0
    other, again = layer(
        changed, rounds=2, generator=torch.Generator().manual_seed(1), key_lengths=lengths
    )
    assert torch.equal(order[1, :, :, :6], again[1, :, :, :6])
    assert_same_function(y[0], other[0])
    assert_same_function(y[1, :6], other[1, :6])


def test_a_local_block_sees_its_window() -> None:
    block = LocalBlock(16, 2, window=8).double()
    x = torch.randn(1, 20, 16, dtype=torch.float64)
    changed = x.clone()
    changed[:, 3] = -x[:, 3]  # a normalisation would remove a shift
    differs = (block.f(x)[0] != block.f(changed)[0]).any(dim=-1)[0]
    assert differs.nonzero().flatten().tolist() == list(range(3, 11))


def test_invalid_options_of_layers_raise_value_error() -> None:
    with pytest.raises(ValueError, match=r"buckets must be even numbers of at least 2, got \(3,\)"):
        LSHAttention(16, 2, chunk=4, buckets=(3,))
    with pytest.raises(ValueError, match="window must be a whole number of at least 1, got 0"):
        LocalBlock(16, 2, window=0)


# Model


def test_reversible_model_has_the_gradients_of_a_plain_one() -> None:
    reformer, results = entry_of("reformer-mixed").build(dropout=0.3), []
    for reversible in (True, False):
        reformer.blocks.reversible = reversible
        torch.manual_seed(3)
        y = reformer(tokens(14))
        results.append((y, gradients(reformer, y)))
    assert_same_function(results[0], results[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_in_one_chunk_later_tokens_do_not_change_earlier_logits(
    implementation: AttnImplementation,
) -> None:
    """A hash hides nothing in one chunk. Beyond it later tokens move the borders."""
    reformer = entry_of("reformer-mixed").build(implementation, chunk=16)
    text = tokens(15)
    changed = text.clone()
    changed[:, 7:] = text[:, 7:] % 16 + 1
    before, after = reformer(text), reformer(changed)
    assert_same_function(before[:, :7], after[:, :7])
    assert not torch.isclose(before[:, 7:], after[:, 7:]).all(dim=-1).any()


def test_hashes_are_random_in_training_and_fixed_in_evaluation() -> None:
    reformer, text = entry_of("reformer").build(), tokens(60)
    torch.manual_seed(3)
    first = reformer(text)
    assert not torch.allclose(reformer(text), first)
    torch.manual_seed(3)
    assert torch.equal(reformer(text), first)
    reformer.eval()
    state = torch.get_rng_state()
    assert torch.equal(reformer(text), reformer(text))
    assert torch.equal(torch.get_rng_state(), state)


def test_rounds_of_the_config_apply_to_the_next_call_and_come_closer_to_full_attention() -> None:
    reformer, text = entry_of("reformer").build(layers=1).eval(), tokens(60)
    full = entry_of("reformer").build(layers=1, chunk=64).eval()(text)
    distance = {}
    for rounds in (1, 4, 16):
        reformer.config = replace(reformer.config, rounds=rounds)
        distance[rounds] = (reformer(text) - full).norm().item()
    assert distance[16] < distance[4] < distance[1]


def test_every_hash_every_th_layer_hashes_and_the_others_see_two_chunks() -> None:
    blocks = entry_of("reformer").build(hash_every=3, layers=6).blocks
    assert [type(block) for block in blocks] == [LocalBlock, LocalBlock, ReformerBlock] * 2
    assert blocks[0].window == 8


def test_a_cache_of_a_reformer_raises_value_error() -> None:
    cache = KVCache(layers=2, batch=3, heads=2, capacity=12, head_size=8)
    with pytest.raises(ValueError, match="cache must be None, a Reformer has none, got KVCache"):
        entry_of("reformer").build()(tokens(5), cache=cache)
