"""Sparse Transformer: agreement, causality, long texts, the cache, recomputation, sizes, errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models import (
    SPARSE_TRANSFORMER_SIZES,
    SparseTransformer,
    SparseTransformerConfig,
)
from transformer_kernels.models.generation import generate
from transformer_kernels.nn import AttnImplementation, recompute_blocks

TINY = SparseTransformerConfig(
    layers=2, heads=4, width=16, vocabulary=17, context=12, stride=4, summaries=1, subblocks=2
)
PATTERNS: tuple[dict[str, Any], ...] = (
    {"pattern": "local"},
    {"pattern": "strided"},
    {"pattern": "strided", "combination": "split"},
    {"pattern": "fixed"},
    {"pattern": "fixed", "combination": "split"},
)
IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)

every_pattern = pytest.mark.parametrize("options", PATTERNS, ids=str)
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def model(
    config: SparseTransformerConfig = TINY, implementation: AttnImplementation = "fused"
) -> SparseTransformer:
    torch.manual_seed(0)
    transformer = SparseTransformer(config, attn_implementation=implementation).double()
    for parameter in transformer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return transformer


def tokens(length: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(TINY.vocabulary, (batch, length), generator=generator)


@every_pattern
@pytest.mark.parametrize("length", [1, 12, 30])
def test_implementations_agree_in_logits_and_gradients(
    options: dict[str, Any], length: int
) -> None:
    results = []
    for implementation in IMPLEMENTATIONS:
        transformer = model(replace(TINY, **options), implementation)
        logits = transformer(tokens(length))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens(length).flatten())
        results.append((logits, torch.autograd.grad(loss, list(transformer.parameters()))))
    assert results[0][0].shape == (2, length, 17)
    assert_same_function(results[1], results[0])
    assert_same_function(results[2], results[0])


@every_pattern
@every_implementation
def test_later_tokens_do_not_change_earlier_logits(
    options: dict[str, Any], implementation: AttnImplementation
) -> None:
    transformer = model(replace(TINY, **options), implementation)
    text = tokens(15)
    changed = text.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % TINY.vocabulary
    before, after = transformer(text), transformer(changed)
    assert_same_function(before[:, :7], after[:, :7])
    assert not torch.isclose(before[:, 7:], after[:, 7:]).all(dim=-1).any()


def test_a_summary_carries_the_first_token_to_later_groups() -> None:
    """With stride 4 and 1 summary, position 0 reaches group 2 through position 3 only."""
    config = replace(TINY, subblocks=1)
    for layers, reaches in ((1, False), (2, True)):
        transformer = model(replace(config, layers=layers))
        text = tokens(12)
        changed = text.clone()
        changed[:, 0] = (changed[:, 0] + 1) % TINY.vocabulary
        same = torch.isclose(transformer(text)[:, 8:], transformer(changed)[:, 8:]).all()
        assert same.item() != reaches


@every_pattern
@every_implementation
@pytest.mark.parametrize("counts", [[12], [5, 1, 1, 4], [1] * 12], ids=str)
def test_logits_with_a_cache_equal_those_of_the_whole_text(
    options: dict[str, Any], implementation: AttnImplementation, counts: list[int]
) -> None:
    transformer = model(replace(TINY, **options), implementation)
    text = tokens(sum(counts))
    cache = transformer.new_cache(2)
    logits = [transformer(each, cache=cache) for each in text.split(counts, dim=1)]
    assert cache.length == len(text[0])
    assert_same_function(torch.cat(logits, 1), transformer(text))


@every_pattern
def test_generated_tokens_are_the_same_without_a_cache(options: dict[str, Any]) -> None:
    transformer = model(replace(TINY, **options))
    written = [
        list(
            generate(
                transformer, [1, 2, 3], 20,
                temperature=1.0, generator=torch.Generator().manual_seed(0), cached=cached,
            )
        )
        for cached in (True, False)
    ]  # fmt: skip
    assert written[0] == written[1]
    assert len(set(written[0])) > 5


def test_a_text_beyond_the_capacity_of_the_cache_raises_value_error() -> None:
    transformer = model()
    with pytest.raises(ValueError, match="count must be at most 12"):
        transformer(tokens(13), cache=transformer.new_cache(2))


@every_implementation
def test_recomputed_blocks_have_the_same_loss_and_gradients(
    implementation: AttnImplementation,
) -> None:
    transformer = model(replace(TINY, dropout=0.3), implementation)
    results = []
    for wanted in (False, True):
        recompute_blocks(transformer, wanted)
        torch.manual_seed(3)
        loss = transformer(tokens(14)).square().mean()
        results.append((loss, torch.autograd.grad(loss, list(transformer.parameters()))))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_dropout_applies_to_the_embedding_and_to_each_layer_in_training_only() -> None:
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


def test_sizes_are_those_of_the_paper() -> None:
    """Section 7.1: 30 layers, 8 heads, d = 512, stride 128, c = 32; 95 million parameters."""
    with torch.device("meta"):
        transformer = SparseTransformer(SPARSE_TRANSFORMER_SIZES["enwik8"])
    assert sum(x.numel() for x in transformer.parameters()) == pytest.approx(95e6, rel=0.005)
    pattern = transformer.config.sparse_pattern()
    assert (pattern.kind, pattern.combination) == ("fixed", "merged")
    assert (pattern.stride, pattern.summaries) == (128, 32)


@each(
    ("options", "message"),
    [
        ({"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ({"heads": 3}, "width must be a multiple of heads in the narrow form, got 16 and 3"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"pattern": "dense"}, "pattern must be one of 'local', 'strided', 'fixed', got 'dense'"),
        ({"subblocks": 3}, "must be a multiple of subblocks = 3, got 4"),
        ({"combination": "split", "heads": 1, "subblocks": 1}, "split needs at least 2 heads"),
    ],
)
def test_invalid_options_raise_value_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **options)
