"""Linear Transformer: agreement, causality, the state, generation, positions, weights, errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models import LinearTransformer, LinearTransformerConfig
from transformer_kernels.models.generation import State, generate, sample
from transformer_kernels.nn import LinearImplementation, recompute_blocks

TINY = LinearTransformerConfig(layers=2, heads=2, width=16, vocabulary=17, context=12)
CONFIGS = {
    "learned": TINY,
    "columns": replace(TINY, columns=4, hidden=20),
    "decay": replace(TINY, positions="decay"),
}
IMPLEMENTATIONS: tuple[LinearImplementation, ...] = get_args(LinearImplementation)

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))


def model(
    config: LinearTransformerConfig = TINY, implementation: LinearImplementation = "fused"
) -> LinearTransformer:
    torch.manual_seed(0)
    transformer = LinearTransformer(config, attn_implementation=implementation).double()
    for parameter in transformer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return transformer


def tokens(length: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(TINY.vocabulary, (batch, length), generator=generator)


def logits_and_gradients(
    transformer: LinearTransformer, text: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """With the same dropout at every call."""
    torch.manual_seed(3)
    logits = transformer(text)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), text.flatten())
    return logits, torch.autograd.grad(loss, list(transformer.parameters()))


def by_parts(transformer: LinearTransformer, text: Tensor, length: int) -> tuple[Tensor, State]:
    """Logits of a text that is read in parts, and the state after it."""
    state, results = transformer.new_state(len(text)), []
    for part in text.split(length, dim=1):
        logits, state = transformer(part, state)
        results.append(logits)
    return torch.cat(results, dim=1), state


@every_config
@pytest.mark.parametrize("length", [1, 12, 150])
def test_implementations_agree_in_logits_and_gradients(
    config: LinearTransformerConfig, length: int
) -> None:
    eager, fused = (
        logits_and_gradients(model(config, implementation), tokens(length))
        for implementation in IMPLEMENTATIONS
    )
    assert eager[0].shape == (2, length, 17)
    assert_same_function(fused, eager)


@every_config
@every_implementation
def test_later_tokens_do_not_change_earlier_logits(
    config: LinearTransformerConfig, implementation: LinearImplementation
) -> None:
    transformer, text = model(config, implementation), tokens(150)
    before = transformer(text)
    for t in (7, 64, 130):
        changed = text.clone()
        changed[:, t:] = (changed[:, t:] + 1) % TINY.vocabulary
        after = transformer(changed)
        assert_same_function(before[:, :t], after[:, :t])
        assert not torch.isclose(before[:, t:], after[:, t:]).all(dim=-1).any()


@every_config
@every_implementation
@pytest.mark.parametrize("length", [1, 5, 100])
def test_parts_of_a_text_have_the_logits_of_the_whole(
    config: LinearTransformerConfig, implementation: LinearImplementation, length: int
) -> None:
    transformer = model(config, implementation)
    logits, _ = by_parts(transformer, tokens(101), length)
    assert_same_function(logits, transformer(tokens(101)))


@every_config
def test_size_of_the_state_is_constant(config: LinearTransformerConfig) -> None:
    transformer = model(config)
    shapes = [(2,), (2, 2, 8, 8), (2, 2, 8), (2, 2, 8, 8), (2, 2, 8)]
    assert [part.shape for part in transformer.new_state(2)] == shapes
    for length in (1, 40):
        _, state = by_parts(transformer, tokens(length), 7)
        assert [part.shape for part in state] == shapes
        assert all(part.untyped_storage().nbytes() == 8 * part.numel() for part in state)
        assert state[0].tolist() == [length, length]


def test_a_call_leaves_the_given_state_as_it_is() -> None:
    transformer = model()
    _, state = by_parts(transformer, tokens(5), 5)
    before = [part.clone() for part in state]
    first, _ = transformer(tokens(3), state)
    again, _ = transformer(tokens(3), state)
    assert all(map(torch.equal, state, before))
    assert torch.equal(first, again)


@every_config
def test_texts_of_different_lengths_continue_in_one_batch(config: LinearTransformerConfig) -> None:
    transformer, text = model(config), tokens(20)
    _, state = by_parts(transformer, text[:1, :9], 9)
    _, other = by_parts(transformer, text[1:, :2], 2)
    joined = tuple(torch.cat(parts) for parts in zip(state, other, strict=True))
    logits, _ = transformer(torch.stack([text[0, 9:14], text[1, 2:7]]), joined)
    whole = transformer(text)
    expected = torch.stack([whole[0, 9:14], whole[1, 2:7]])
    assert_same_function(logits, expected)


@every_config
@every_implementation
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tokens_by_the_state_equal_those_of_the_whole_text(
    config: LinearTransformerConfig, implementation: LinearImplementation, dtype: torch.dtype
) -> None:
    """A prompt longer than the context, then 40 tokens."""
    transformer = model(config, implementation).to(dtype)
    text, draws = tokens(15)[0].tolist(), torch.Generator().manual_seed(2)
    found = list(generate(transformer, text, 40, temperature=1.0, generator=draws))
    draws.manual_seed(2)
    with torch.no_grad():
        for token in found:
            logits = transformer(torch.tensor([text]))[0, -1].double()
            assert token == sample(logits, 1.0, draws)
            text.append(token)
    assert len(set(found)) > 5


def test_each_token_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer, lengths = model(), []
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
    transformer = model(replace(TINY, layers=1, columns=columns))
    text = torch.full((1, 40), 3)
    inputs: list[Tensor] = []
    transformer.blocks[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    transformer(text)
    (x,) = inputs
    torch.testing.assert_close(x[0, 12:24], x[0, :12], rtol=0, atol=0)
    assert len(torch.unique(x[0], dim=0)) == 12


def test_sizes_of_the_layers_follow_the_config() -> None:
    transformer = model(replace(TINY, context=10, columns=4, hidden=20))
    shapes = {name: tuple(x.shape) for name, x in transformer.named_parameters()}
    assert shapes["positions.rows"] == (3, 16)
    assert shapes["positions.columns"] == (4, 16)
    assert shapes["blocks.0.feed_forward.up_proj.weight"] == (20, 16)
    one_row = {name: tuple(x.shape) for name, x in model().named_parameters()}
    assert one_row["positions.rows"] == (1, 16)
    assert one_row["positions.columns"] == (12, 16)
    assert one_row["blocks.0.feed_forward.up_proj.weight"] == (64, 16)


def test_a_decay_makes_positions_relative() -> None:
    """The same tokens after others that are forgotten: slopes of 1/16 and 1/256 need some."""
    transformer = model(CONFIGS["decay"])
    assert transformer.positions is None
    text, others = tokens(5), torch.zeros(2, 8000, dtype=torch.int64)
    once = transformer(torch.cat([others, text], dim=1))[:, -5:]
    twice = transformer(torch.cat([others, text, others, text], dim=1))[:, -5:]
    assert_same_function(once, twice)
    near = transformer(torch.cat([text, text], dim=1))[:, -5:]
    assert not torch.isclose(once, near).all(dim=-1).any()


def test_recomputation_runs_each_block_twice_and_changes_nothing() -> None:
    transformer, runs = model(replace(TINY, dropout=0.3)), []
    plain = logits_and_gradients(transformer, tokens(14))
    recompute_blocks(transformer)
    for n, block in enumerate(transformer.blocks):
        block.register_forward_pre_hook(lambda _, args, n=n: runs.append(n))
    torch.testing.assert_close(logits_and_gradients(transformer, tokens(14)), plain, rtol=0, atol=0)
    assert runs == [0, 1, 1, 0]


def test_dropout_applies_to_the_embedding_and_to_each_branch_in_training_only() -> None:
    transformer = model(replace(TINY, dropout=0.5))
    shares: list[float] = []
    for module in transformer.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(
                lambda _, args, y: shares.append((y == 0).double().mean().item())
            )
    transformer(tokens(100))
    assert shares == pytest.approx([0.5] * (1 + 2 * TINY.layers), abs=0.1)
    shares.clear()
    transformer.eval()(tokens(100))
    assert shares == [0.0] * (1 + 2 * TINY.layers)


def test_initial_queries_and_keys_have_unit_variance_and_other_weights_are_those_of_gpt2() -> None:
    torch.manual_seed(0)
    transformer = LinearTransformer(replace(TINY, width=128))
    deviations = {
        name.removeprefix("blocks.1."): parameter.std().item()
        for name, parameter in transformer.named_parameters()
        if parameter.dim() == 2
    }
    for name, deviation in {
        "attention.queries.weight": 128**-0.5,
        "attention.keys.weight": 128**-0.5,
        "attention.values.weight": 0.02,
        "attention.out_proj.weight": 0.01,
        "feed_forward.up_proj.weight": 0.02,
        "feed_forward.down_proj.weight": 0.01,
        "embedding.weight": 0.02,
        "logits.weight": 0.02,
    }.items():
        assert deviations[name] == pytest.approx(deviation, rel=0.05), name


def test_state_is_float32_for_narrower_weights_and_follows_the_model() -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        state = model().to(dtype).new_state(3)
        assert [part.dtype for part in state] == [torch.int64, *[expected] * 4]


@each(
    ("options", "message"),
    [
        ({"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ({"context": 0}, "context must be a whole number of at least 1, got 0"),
        ({"vocabulary": 0}, "vocabulary must be a whole number of at least 1, got 0"),
        ({"columns": 0}, "columns must be a whole number of at least 1, got 0"),
        ({"hidden": 0}, "hidden must be a whole number of at least 1, got 0"),
        ({"heads": 3}, "width must be a multiple of heads in the narrow form, got 16 and 3"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"positions": "none"}, "positions must be one of 'learned', 'decay', got 'none'"),
    ],
)
def test_invalid_options_raise_value_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **options)


def test_sdpa_raises_value_error() -> None:
    with pytest.raises(ValueError, match="must be one of 'eager', 'fused', got 'sdpa'"):
        LinearTransformer(TINY, attn_implementation="sdpa")


def test_other_states_raise_value_error() -> None:
    transformer = model()
    state = transformer.new_state(2)
    for other in (transformer.new_state(1), state[:-1], (), (state[0][:1], *state[1:])):
        with pytest.raises(ValueError, match=r"state must have the shapes \[\(2,\), \(2, 2, 8, 8"):
            transformer(tokens(3), other)
