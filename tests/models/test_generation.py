"""`generate` and `sample`: the cache, the state, sampling and dropout."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from transformer_kernels.models import (
    GeneratorConfig,
    Memories,
    TextGenerator,
    TransformerXL,
    TransformerXLConfig,
)
from transformer_kernels.models.generation import generate, sample
from transformer_kernels.nn import AttnImplementation, KVCache

IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)
CONFIG = GeneratorConfig(layers=2, width=16, heads=2, context=12)


def model(attn_implementation: AttnImplementation = "fused") -> TextGenerator:
    torch.manual_seed(0)
    return TextGenerator(CONFIG, attn_implementation=attn_implementation).double()


def generated(generator: TextGenerator, *, cached: bool, temperature: float = 1.0) -> list[int]:
    """30 bytes that continue a prompt of 5; the text exceeds the context of 12 after 8 of them."""
    draws = torch.Generator().manual_seed(2)
    return list(
        generate(generator, b"hello", 30, temperature=temperature, generator=draws, cached=cached)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_cache_does_not_change_the_tokens(
    implementation: AttnImplementation, temperature: float
) -> None:
    generator = model(implementation)
    tokens = generated(generator, cached=True, temperature=temperature)
    assert tokens == generated(generator, cached=False, temperature=temperature)
    assert tokens == generated(model("eager"), cached=False, temperature=temperature)


def test_with_a_cache_each_step_reads_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the context is full, positions shift, and each step reads the whole window."""
    generator, lengths = model(), []
    plain = generator.forward

    def forward(tokens: Tensor, *, cache: KVCache | None = None) -> Tensor:
        lengths.append(tokens.shape[1])
        return plain(tokens, cache=cache)

    monkeypatch.setattr(generator, "forward", forward)
    generated(generator, cached=True)
    assert lengths == [5] + [1] * 7 + [12] * 22


def test_dropout_is_off_and_the_training_mode_is_restored() -> None:
    torch.manual_seed(0)
    generator = TextGenerator(GeneratorConfig(layers=1, width=16, heads=2, context=12, dropout=0.5))
    assert generator.training
    assert generated(generator, cached=True) == generated(generator, cached=True)
    assert generator.training


def transformer_xl(memory: int, attn_implementation: AttnImplementation = "fused") -> TransformerXL:
    config = TransformerXLConfig(layers=2, width=16, heads=2, context=4, memory=memory, dropout=0.5)
    model = TransformerXL(config, attn_implementation=attn_implementation).double()
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=draws))
    return model


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_by_a_sufficient_state_equal_those_of_the_whole_text(
    implementation: AttnImplementation,
) -> None:
    """A prompt of 11 tokens in segments of 4, then one token a step."""
    model, text = transformer_xl(31, implementation), list(b"hello there")
    draws = torch.Generator().manual_seed(2)
    tokens = list(generate(model, text, 20, temperature=2.0, generator=draws))
    assert model.training
    model.eval()
    draws.manual_seed(2)
    for token in tokens:
        logits, _ = model(torch.tensor([text]))
        assert token == sample(logits[0, -1].detach(), 2.0, draws)
        text.append(token)


def test_state_advances_by_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of 3 is shorter than a segment: the prompt, then every token, is read once."""
    model, calls, expected = transformer_xl(3), [], []
    state, again = model.new_state(1), torch.Generator().manual_seed(2)
    plain = model.forward

    def forward(tokens: Tensor, memories: Memories) -> tuple[Tensor, Memories]:
        nonlocal state
        calls.append(tokens[0].tolist())
        torch.testing.assert_close(memories, state, rtol=0, atol=0)
        logits, state = plain(tokens, memories)
        if len(calls) > 1:
            expected.append(sample(logits[0, -1], 2.0, again))
        return logits, state

    monkeypatch.setattr(model, "forward", forward)
    draws = torch.Generator().manual_seed(2)
    tokens = list(generate(model, b"hello", 6, temperature=2.0, generator=draws))
    assert calls == [list(b"hell"), [ord("o")], *([token] for token in tokens[:-1])]
    assert tokens == expected


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, -torch.inf]).double()
    draws = torch.Generator().manual_seed(0)
    share = sum(sample(logits, 0.5, draws) for _ in range(4000)) / 4000
    assert share == pytest.approx(torch.tensor(2.0).sigmoid().item(), abs=0.02)
    assert sample(logits, 0.0) == 1
    assert sample(logits, 1e-300, draws) == 1
