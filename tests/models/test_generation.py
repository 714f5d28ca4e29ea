"""Writing token by token: with and without a cache, and what is drawn."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from transformer_kernels.models import GeneratorConfig, TextGenerator
from transformer_kernels.models.generation import generate, sample
from transformer_kernels.nn import AttnImplementation, KeyValueCache

PATHS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)
CONFIG = GeneratorConfig(layers=2, width=16, heads=2, context=12)


def model(attn_implementation: AttnImplementation = "fused") -> TextGenerator:
    torch.manual_seed(0)
    return TextGenerator(CONFIG, attn_implementation=attn_implementation).double()


def written(generator: TextGenerator, *, cached: bool, temperature: float = 1.0) -> list[int]:
    """30 bytes after a prompt of 5: the context is full before the tenth."""
    draws = torch.Generator().manual_seed(2)
    return list(
        generate(
            generator, b"hello", 30, temperature=temperature, generator=draws, cached=cached
        )
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("path", PATHS)
def test_a_cache_changes_no_token(path: AttnImplementation, temperature: float) -> None:
    generator = model(path)
    tokens = written(generator, cached=True, temperature=temperature)
    assert tokens == written(generator, cached=False, temperature=temperature)
    assert tokens == written(model("eager"), cached=False, temperature=temperature)


def test_with_a_cache_each_step_reads_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the context is full: then positions move, and it reads all of it."""
    generator, lengths = model(), []
    plain = generator.forward

    def forward(tokens: Tensor, *, cache: KeyValueCache | None = None) -> Tensor:
        lengths.append(tokens.shape[1])
        return plain(tokens, cache=cache)

    monkeypatch.setattr(generator, "forward", forward)
    written(generator, cached=True)
    assert lengths == [5] + [1] * 7 + [12] * 22


def test_dropout_is_off_and_the_mode_stays() -> None:
    torch.manual_seed(0)
    generator = TextGenerator(GeneratorConfig(layers=1, width=16, heads=2, context=12, dropout=0.5))
    assert generator.training
    assert written(generator, cached=True) == written(generator, cached=True)
    assert generator.training


def test_draws_follow_the_weights() -> None:
    logits = torch.tensor([0.0, 1.0, -torch.inf]).double()
    draws = torch.Generator().manual_seed(0)
    share = sum(sample(logits, 0.5, draws) for _ in range(4000)) / 4000
    assert share == pytest.approx(torch.tensor(2.0).sigmoid().item(), abs=0.02)
    assert sample(logits, 0.0) == 1
    assert sample(logits, 1e-300, draws) == 1
