"""Sparse Transformer, Reformer and Linear Transformer: what is special in each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.zoo import IMPLEMENTATIONS, REFORMER, SPARSE, entry_of, gradients, tokens
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models import REFORMER_SIZES, SIZES, SPARSE_TRANSFORMER_SIZES, Reformer
from transformer_kernels.models.generation import State, generate
from transformer_kernels.nn import AttnImplementation, KVCache, LocalBlock, ReformerBlock

LINEAR_MODELS = pytest.mark.parametrize(
    "name", ["linear-learned", "linear-columns", "linear-decay"]
)


def test_sizes_of_the_text_generator_match_their_sources() -> None:
    seed, nano = SIZES["seed"], SIZES["nanogpt-cpu"]
    assert (seed.layers, seed.width, seed.heads, seed.context) == (12, 256, 8, 256)
    assert (seed.norm, seed.form, seed.activation) == ("post", "wide", "relu")
    assert (nano.layers, nano.width, nano.heads, nano.context) == (4, 128, 4, 64)
    assert SIZES["demo"].context >= 512


# Sparse Transformer


def test_a_summary_carries_the_first_token_to_later_groups() -> None:
    """With stride 4 and 1 summary, position 0 reaches group 2 through position 3 only."""
    for layers, reaches in ((1, False), (2, True)):
        transformer = entry_of("sparse-fixed").build(layers=layers, subblocks=1)
        text = tokens(12)
        changed = text.clone()
        changed[:, 0] = text[:, 0] % 16 + 1
        same = torch.isclose(transformer(text)[:, 8:], transformer(changed)[:, 8:]).all()
        assert same.item() != reaches


@pytest.mark.parametrize("name", ["gpt2", "sparse-fixed"])
def test_a_text_beyond_the_capacity_of_the_cache_raises_value_error(name: str) -> None:
    model = entry_of(name).build()
    with pytest.raises(ValueError, match="count must be at most 12"):
        model(tokens(13), cache=model.new_cache(3))


def test_pattern_of_the_paper() -> None:
    """Section 7.1: stride 128, c = 32."""
    pattern = SPARSE_TRANSFORMER_SIZES["enwik8"].sparse_pattern()
    assert (pattern.kind, pattern.combination) == ("fixed", "merged")
    assert (pattern.stride, pattern.summaries) == (128, 32)


@each(
    ("options", "message"),
    [
        ({"subblocks": 3}, "must be a multiple of subblocks = 3, got 4"),
        ({"combination": "split", "heads": 1, "subblocks": 1}, "split needs at least 2 heads"),
    ],
)
def test_unsuitable_patterns_raise_value_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPARSE, **options)


# Reformer


def test_reversible_layers_have_the_gradients_of_plain_ones() -> None:
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


def test_generated_text_reads_the_whole_context_for_each_token() -> None:
    reformer, text = entry_of("reformer").build(), [1, 2, 3]
    written = list(generate(reformer, text, 20, temperature=0.0))
    reformer.eval()
    for token in written:
        logits = reformer(torch.tensor([text[-REFORMER.context :]]))
        assert token == int(logits[0, -1].argmax())
        text.append(token)


def test_every_hash_every_th_layer_hashes_and_the_others_see_two_chunks() -> None:
    blocks = entry_of("reformer").build(hash_every=3, layers=6).blocks
    assert [type(block) for block in blocks] == [LocalBlock, LocalBlock, ReformerBlock] * 2
    assert blocks[0].window == 8


def test_sizes_of_the_reformer_are_those_of_the_paper() -> None:
    """Section 5: 12 layers, d_model 1024, d_ff 4096, 8 heads, texts of 65,536 bytes."""
    config = REFORMER_SIZES["enwik8"]
    assert (config.layers, config.width, config.heads) == (12, 1024, 8)
    assert (config.context, config.hash_every, config.dropout) == (65_536, 1, 0.1)
    with torch.device("meta"):
        reformer = Reformer(config)
    hidden = reformer.get_parameter("blocks.0.feed_forward.up_proj.weight")
    assert hidden.shape == (4096, 1024)
    assert reformer.positions.rows.shape == (256, 1024)


def test_a_cache_of_a_reformer_raises_value_error() -> None:
    cache = KVCache(layers=2, batch=3, heads=2, capacity=12, head_size=8)
    with pytest.raises(ValueError, match="cache must be None, a Reformer has none, got KVCache"):
        entry_of("reformer").build()(tokens(5), cache=cache)


# Linear Transformer


@LINEAR_MODELS
def test_size_of_the_state_is_constant_and_a_call_leaves_it_as_it_is(name: str) -> None:
    transformer = entry_of(name).build()
    state, length = transformer.new_state(3), 0
    for count in (1, 40, 7):
        before = [part.clone() for part in state]
        logits, after = transformer(tokens(count), state)
        assert all(map(torch.equal, state, before))
        assert torch.equal(transformer(tokens(count), state)[0], logits)
        state, length = after, length + count
        shapes = [tuple(part.shape) for part in state]
        assert shapes == [(3,), (3, 2, 8, 8), (3, 2, 8), (3, 2, 8, 8), (3, 2, 8)]
        assert all(part.untyped_storage().nbytes() == 8 * part.numel() for part in state)
        assert state[0].tolist() == [length] * 3


@LINEAR_MODELS
def test_texts_of_different_lengths_continue_in_one_batch(name: str) -> None:
    transformer, text = entry_of(name).build(), tokens(20, batch=2)
    states = [
        transformer(text[b : b + 1, :n], transformer.new_state(1))[1] for b, n in ((0, 9), (1, 2))
    ]
    joined = tuple(torch.cat(parts) for parts in zip(*states, strict=True))
    logits, _ = transformer(torch.stack([text[0, 9:14], text[1, 2:7]]), joined)
    whole = transformer(text)
    assert_same_function(logits, torch.stack([whole[0, 9:14], whole[1, 2:7]]))


def test_each_token_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer, lengths = entry_of("linear-learned").build(), []
    plain = transformer.forward

    def forward(tokens: Tensor, state: State) -> Any:
        lengths.append(tokens.shape[1])
        return plain(tokens, state)

    monkeypatch.setattr(transformer, "forward", forward)
    list(generate(transformer, [1] * 15, 30, temperature=0.0))
    assert lengths == [12, 3] + [1] * 29


@pytest.mark.parametrize("columns", [None, 4])
def test_learned_positions_repeat_after_the_context(columns: int | None) -> None:
    """Only the embedding of the position tells tokens of one layer apart."""
    transformer = entry_of("linear-learned").build(layers=1, columns=columns)
    inputs: list[Tensor] = []
    transformer.blocks[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    transformer(torch.full((1, 40), 3))
    (x,) = inputs
    torch.testing.assert_close(x[0, 12:24], x[0, :12], rtol=0, atol=0)
    assert len(torch.unique(x[0], dim=0)) == 12


@pytest.mark.parametrize(("columns", "rows"), [(4, 3), (None, 1)])
def test_sizes_of_the_layers_follow_the_config(columns: int | None, rows: int) -> None:
    for name in ("linear-learned", "reformer"):
        model = entry_of(name).build(context=10, columns=columns, hidden=20)
        assert model.positions.rows.shape == (rows, 16)
        assert model.positions.columns.shape == (columns or 10, 16)
        hidden = model.get_parameter("blocks.0.feed_forward.up_proj.weight")
        assert hidden.shape == (20, 16)


def test_a_decay_makes_positions_relative() -> None:
    """The same tokens after others that are forgotten: slopes of 1/16 and 1/256 need some."""
    transformer = entry_of("linear-decay").build()
    assert transformer.positions is None
    text, others = tokens(5), torch.zeros(3, 8000, dtype=torch.int64)
    once = transformer(torch.cat([others, text], dim=1))[:, -5:]
    twice = transformer(torch.cat([others, text, others, text], dim=1))[:, -5:]
    assert_same_function(once, twice)
    near = transformer(torch.cat([text, text], dim=1))[:, -5:]
    assert not torch.isclose(once, near).all(dim=-1).any()


def test_state_is_float32_for_narrower_weights_and_follows_the_model() -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        state = entry_of("linear-learned").build().to(dtype).new_state(3)
        assert [part.dtype for part in state] == [torch.int64, *[expected] * 4]


def test_sdpa_and_other_states_raise_value_error() -> None:
    with pytest.raises(ValueError, match="must be one of 'eager', 'fused', got 'sdpa'"):
        entry_of("linear-learned").build("sdpa")
    transformer = entry_of("linear-learned").build()
    state = transformer.new_state(3)
    for other in (transformer.new_state(1), state[:-1], (), (state[0][:1], *state[1:])):
        with pytest.raises(ValueError, match=r"state must have the shapes \[\(3,\), \(3, 2, 8, 8"):
            transformer(tokens(3), other)
