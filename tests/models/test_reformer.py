"""Reformer: agreement, causality, hashes, rounds, generation, recomputation, sizes, errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models import REFORMER_SIZES, Reformer, ReformerConfig
from transformer_kernels.models.generation import generate
from transformer_kernels.nn import (
    AttnImplementation,
    KVCache,
    LocalBlock,
    LSHAttention,
    ReformerBlock,
    hash_buckets,
    lsh_attention,
    recompute_blocks,
    sorted_by_bucket,
)

TINY = ReformerConfig(
    layers=2, heads=2, width=16, vocabulary=17, context=12, columns=4, chunk=4, rounds=2
)
MIXED = replace(TINY, layers=4, hash_every=2)
IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def model(config: ReformerConfig = TINY, implementation: AttnImplementation = "fused") -> Reformer:
    torch.manual_seed(0)
    reformer = Reformer(config, attn_implementation=implementation).double()
    for parameter in reformer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return reformer


def tokens(length: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(TINY.vocabulary, (batch, length), generator=generator)


def logits_and_gradients(reformer: Reformer, text: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """With the same hashes and dropout at every call."""
    torch.manual_seed(3)
    logits = reformer(text)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), text.flatten())
    return logits, torch.autograd.grad(loss, list(reformer.parameters()))


@pytest.mark.parametrize("config", [TINY, MIXED, replace(TINY, scale=1.0)], ids=str)
@pytest.mark.parametrize("length", [1, 12, 30])
def test_implementations_agree_in_logits_and_gradients(config: ReformerConfig, length: int) -> None:
    results = [
        logits_and_gradients(model(config, implementation), tokens(length))
        for implementation in IMPLEMENTATIONS
    ]
    assert results[0][0].shape == (2, length, 17)
    assert_same_function(results[1], results[0])
    assert_same_function(results[2], results[0])


def test_reversible_layers_have_the_gradients_of_plain_ones() -> None:
    reformer = model(replace(MIXED, dropout=0.3))
    found = logits_and_gradients(reformer, tokens(14))
    reformer.blocks.reversible = False
    assert_same_function(found, logits_and_gradients(reformer, tokens(14)))


@every_implementation
def test_later_tokens_do_not_change_earlier_logits(implementation: AttnImplementation) -> None:
    """In one chunk, where a hash hides nothing. Beyond it later tokens move the borders."""
    reformer = model(replace(MIXED, chunk=16), implementation)
    text = tokens(15)
    changed = text.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % TINY.vocabulary
    before, after = reformer(text), reformer(changed)
    assert_same_function(before[:, :7], after[:, :7])
    assert not torch.isclose(before[:, 7:], after[:, 7:]).all(dim=-1).any()


@every_implementation
def test_with_a_given_order_later_tokens_do_not_change_earlier_results(
    implementation: AttnImplementation,
) -> None:
    torch.manual_seed(0)
    layer = LSHAttention(16, 2, chunk=4, attn_implementation=implementation).double()
    x = torch.randn(2, 15, 16, dtype=torch.float64)
    before, order = layer(x, rounds=2)
    changed = x.clone()
    changed[:, 7:] += 1.0
    after, _ = layer(changed, order, rounds=2)
    assert_same_function(before[:, :7], after[:, :7])
    assert not torch.isclose(before[:, 7:], after[:, 7:]).all(dim=-1).any()


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


def test_hashes_are_random_in_training_and_fixed_in_evaluation() -> None:
    reformer, text = model(), tokens(60)
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
    reformer, text = model(replace(TINY, layers=1)), tokens(60)
    reformer.eval()
    full = model(replace(TINY, layers=1, chunk=64)).eval()(text)
    distance = {}
    for rounds in (1, 4, 16):
        reformer.config = replace(reformer.config, rounds=rounds)
        distance[rounds] = (reformer(text) - full).norm().item()
    assert distance[16] < distance[4] < distance[1]


def test_generated_text_reads_the_whole_context_for_each_token() -> None:
    reformer = model()
    written = list(generate(reformer, [1, 2, 3], 20, temperature=0.0))
    reformer.eval()
    text = [1, 2, 3]
    for token in written:
        logits = reformer(torch.tensor([text[-TINY.context :]]))
        assert token == int(logits[0, -1].argmax())
        text.append(token)


def test_every_hash_every_th_layer_hashes_and_the_others_see_two_chunks() -> None:
    blocks = model(replace(MIXED, hash_every=3, layers=6)).blocks
    assert [type(block) for block in blocks] == [LocalBlock, LocalBlock, ReformerBlock] * 2
    assert isinstance(blocks[0], LocalBlock)
    assert blocks[0].window == 8


def test_a_local_block_sees_its_window() -> None:
    block = LocalBlock(16, 2, window=8).double()
    x = torch.randn(1, 20, 16, dtype=torch.float64)
    changed = x.clone()
    changed[:, 3] = -x[:, 3]  # a normalisation would remove a shift
    differs = (block.f(x)[0] != block.f(changed)[0]).any(dim=-1)[0]
    assert differs.nonzero().flatten().tolist() == list(range(3, 11))


def test_the_switch_of_recomputation_changes_nothing() -> None:
    """Reversible layers recompute in any case."""
    reformer = model(replace(MIXED, dropout=0.3))
    plain = logits_and_gradients(reformer, tokens(14))
    recompute_blocks(reformer)
    torch.testing.assert_close(logits_and_gradients(reformer, tokens(14)), plain, rtol=0, atol=0)


def test_dropout_applies_to_the_embedding_and_to_each_branch_in_training_only() -> None:
    reformer = model(replace(MIXED, dropout=0.5))
    shares: list[float] = []
    for module in reformer.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(
                lambda _, args, y: shares.append((y == 0).double().mean().item())
            )
    reformer(tokens(100))
    assert shares == pytest.approx([0.5] * (1 + 2 * MIXED.layers), abs=0.1)
    shares.clear()
    reformer.eval()(tokens(100))
    assert shares == [0.0] * (1 + 2 * MIXED.layers)


def test_sizes_are_those_of_the_paper() -> None:
    """Section 5: 12 layers, d_model 1024, d_ff 4096, 8 heads, texts of 65,536 bytes."""
    config = REFORMER_SIZES["enwik8"]
    assert (config.layers, config.width, config.heads) == (12, 1024, 8)
    assert (config.context, config.hash_every, config.dropout) == (65_536, 1, 0.1)
    with torch.device("meta"):
        reformer = Reformer(config)
    hidden = reformer.get_parameter("blocks.0.feed_forward.up_proj.weight")
    assert hidden.shape == (4096, 1024)
    assert reformer.positions.rows.shape == (256, 1024)


@each(
    ("options", "message"),
    [
        ({"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ({"chunk": 0}, "chunk must be a whole number of at least 1, got 0"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1, got 0"),
        ({"hash_every": 0}, "hash_every must be a whole number of at least 1, got 0"),
        ({"columns": 0}, "columns must be a whole number of at least 1, got 0"),
        ({"hidden": 0}, "hidden must be a whole number of at least 1, got 0"),
        ({"heads": 3}, "width must be a multiple of heads in the narrow form, got 16 and 3"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
    ],
)
def test_invalid_options_raise_value_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **options)


def test_a_cache_raises_value_error() -> None:
    cache = KVCache(layers=2, batch=2, heads=2, capacity=12, head_size=8)
    with pytest.raises(ValueError, match="cache must be None, a Reformer has none, got KVCache"):
        model()(tokens(5), cache=cache)


def test_invalid_options_of_layers_raise_value_error() -> None:
    with pytest.raises(ValueError, match=r"buckets must be even numbers of at least 2, got \(3,\)"):
        LSHAttention(16, 2, chunk=4, buckets=(3,))
    with pytest.raises(ValueError, match="window must be a whole number of at least 1, got 0"):
        LocalBlock(16, 2, window=0)
