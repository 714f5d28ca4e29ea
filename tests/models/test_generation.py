"""`generate` and `sample`: the cache, sampling and dropout."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from transformer_kernels.models import GeneratorConfig, TextGenerator
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
        generate(
            generator, b"hello", 30, temperature=temperature, generator=draws, cached=cached
        )
    )  # fmt: skip


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


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, -torch.inf]).double()
    draws = torch.Generator().manual_seed(0)
    share = sum(sample(logits, 0.5, draws) for _ in range(4000)) / 4000
    assert share == pytest.approx(torch.tensor(2.0).sigmoid().item(), abs=0.02)
    assert sample(logits, 0.0) == 1
    assert sample(logits, 1e-300, draws) == 1
