"""GPT-2: agreement with HuggingFace for every implementation, causality and generation."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from tests.models import huggingface
from tests.support.tiers import each
from transformer_kernels import Mask
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models import GPT2, GPT2_SIZES, GPT2Config
from transformer_kernels.models.generation import generate
from transformer_kernels.nn import AttnImplementation, MultiHeadAttention, Stack, TransformerBlock

TINY = GPT2Config(layers=2, heads=2, width=16, vocabulary=31, context=12, dropout=0.0)
IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)


def model(config: GPT2Config = TINY, attn_implementation: AttnImplementation = "fused") -> GPT2:
    """A model with large weights, because a new model's attention is almost uniform."""
    torch.manual_seed(0)
    gpt2 = GPT2(config, attn_implementation=attn_implementation).double()
    with torch.no_grad():
        for parameter in gpt2.parameters():
            parameter.normal_(std=0.4)
    return gpt2


def tokens(batch: int = 2, length: int = 12, vocabulary: int = 31) -> Tensor:
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def loss_of(logits: Tensor, text: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())


@pytest.mark.exhaustive
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)], ids=str
)
def test_logits_and_gradients_match_huggingface(
    implementation: AttnImplementation, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    theirs, text = huggingface.gpt2(dtype), tokens(2, 20, 61)
    expected = theirs(text).logits
    loss_of(expected, text).backward()
    with huggingface.default_dtype(dtype):
        ours = GPT2.from_safetensors(
            huggingface.saved(theirs, tmp_path), attn_implementation=implementation
        )
        gradients = GPT2.from_safetensors(huggingface.saved_gradients(theirs, tmp_path))
    logits = ours(text)
    loss_of(logits, text).backward()
    assert logits.dtype == dtype
    huggingface.assert_same(logits, expected, tolerance=tolerance)
    huggingface.assert_same_gradients(ours, gradients, tolerance=tolerance)


@pytest.mark.exhaustive
def test_other_head_sizes_match_huggingface(tmp_path: Path) -> None:
    theirs, text = huggingface.gpt2(n_embd=48, n_head=3), tokens(1, 9, 61)
    with huggingface.default_dtype(torch.float64):
        ours = GPT2.from_safetensors(huggingface.saved(theirs, tmp_path), heads=3)
    assert_same_function(ours(text), theirs(text).logits)


def test_implementations_agree_in_logits_and_gradients() -> None:
    results = []
    for implementation in IMPLEMENTATIONS:
        gpt2 = model(attn_implementation=implementation)
        logits = gpt2(tokens())
        gradients = torch.autograd.grad(loss_of(logits, tokens()), list(gpt2.parameters()))
        results.append((logits, gradients))
    assert results[0][0].shape == (2, 12, 31)
    assert_same_function(results[1], results[0])
    assert_same_function(results[2], results[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_block_uses_the_selected_implementation(implementation: AttnImplementation) -> None:
    modules = model(attn_implementation=implementation).modules()
    implementations = [
        each.attn_implementation for each in modules if isinstance(each, MultiHeadAttention)
    ]
    assert implementations == [implementation, implementation]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_named_sizes_have_the_published_parameter_counts(name: str, count: int) -> None:
    with torch.device("meta"):
        gpt2 = GPT2(GPT2_SIZES[name])
    assert sum(parameter.numel() for parameter in gpt2.parameters()) == count
    assert gpt2.config.width == 64 * gpt2.config.heads
    assert gpt2.context == 1024


def test_embedding_and_projection_share_one_parameter() -> None:
    """Its gradient is the sum over both uses."""
    gpt2, text = model(), tokens()
    assert [name for name, p in gpt2.named_parameters() if 31 in p.shape] == ["embedding.weight"]
    assert [name for name, p in gpt2.state_dict().items() if 31 in p.shape] == ["embedding.weight"]
    (together,) = torch.autograd.grad(loss_of(gpt2(text), text), gpt2.embedding.weight)

    embedding = gpt2.embedding.weight.detach().clone().requires_grad_()
    projection = gpt2.embedding.weight.detach().clone().requires_grad_()
    x = gpt2.blocks(gpt2.positions(embedding[text]), mask=Mask.causal())
    logits = gpt2.last_norm(x) @ projection.T
    apart = torch.autograd.grad(loss_of(logits, text), (embedding, projection))
    assert all(gradient.abs().max() > 1e-3 for gradient in apart)
    assert_same_function(together, apart[0] + apart[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_later_tokens_do_not_change_earlier_predictions(
    implementation: AttnImplementation,
) -> None:
    gpt2, text = model(attn_implementation=implementation), tokens()
    changed = text.clone()
    changed[:, 7:] = 30 - changed[:, 7:]
    changed[:, 7] = (text[:, 7] + 1) % 31
    before, after = gpt2(text), gpt2(changed)
    assert_same_function(before[:, :7], after[:, :7])
    assert not torch.isclose(before[:, 7:], after[:, 7:]).all(dim=-1).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_cache_does_not_change_logits_or_tokens(implementation: AttnImplementation) -> None:
    gpt2, text = model(attn_implementation=implementation), tokens()
    cache = gpt2.new_cache(2)
    parts = [gpt2(part, cache=cache) for part in text.split([5, 1, 4, 2], dim=1)]
    assert_same_function(torch.cat(parts, dim=1), gpt2(text))

    prompt = text[0, :5].tolist()
    cached, plain = (
        list(
            generate(
                gpt2, prompt, 15,
                temperature=1.0, generator=torch.Generator().manual_seed(2), cached=cached,
            )
        )
        for cached in (True, False)
    )  # fmt: skip
    assert cached == plain
    assert len(set(cached)) > 3


@pytest.mark.exhaustive
def test_greedy_text_matches_huggingface(tmp_path: Path) -> None:
    theirs, prompt = huggingface.gpt2(), tokens(1, 4, 61)
    with huggingface.default_dtype(torch.float64):
        ours = GPT2.from_safetensors(huggingface.saved(theirs, tmp_path))
    text = prompt
    for _ in range(12):
        text = torch.cat([text, theirs(text).logits[:, -1:].argmax(dim=-1)], dim=1)
    assert list(generate(ours, prompt[0].tolist(), 12, temperature=0.0)) == text[0, 4:].tolist()


def test_new_model_predicts_uniformly() -> None:
    torch.manual_seed(0)
    gpt2 = GPT2(GPT2Config(layers=2, heads=2, width=128, vocabulary=500, context=64))
    text = tokens(4, 64, 500)
    assert loss_of(gpt2(text), text).item() == pytest.approx(math.log(500), abs=0.1)


def test_initial_weights_are_small_and_smaller_at_residual_outputs() -> None:
    torch.manual_seed(0)
    gpt2 = GPT2(GPT2Config(layers=4, heads=2, width=128, vocabulary=500, context=64))
    for name, module in gpt2.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            is_residual_output = name.endswith(("out_proj", "down_proj"))
            expected = 0.02 / math.sqrt(2 * 4) if is_residual_output else 0.02
            assert module.weight.std().item() == pytest.approx(expected, rel=0.05), name
        if isinstance(module, nn.Linear):
            assert (module.bias == 0).all(), name
    assert gpt2.positions.table.std().item() == pytest.approx(0.01, rel=0.05)


def test_dropout_applies_in_training_only() -> None:
    gpt2 = model(replace(TINY, dropout=0.5))
    assert not torch.allclose(gpt2(tokens()), gpt2(tokens()))
    gpt2.eval()
    torch.testing.assert_close(gpt2(tokens()), model()(tokens()))


def test_dropout_applies_to_embeddings_and_every_block() -> None:
    gpt2 = model(replace(TINY, dropout=0.5))
    for block in gpt2.blocks:
        assert isinstance(block, TransformerBlock)
        assert block.dropout.p == block.attention.dropout == 0.5
    gpt2.blocks = Stack()
    assert not torch.allclose(gpt2(tokens()), gpt2(tokens()))


def test_text_longer_than_the_context_raises_value_error() -> None:
    with pytest.raises(ValueError, match=r"at most 12 positions long \(the context\), got 13"):
        model()(tokens(1, 13))


@each(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ({"vocabulary": 0}, "vocabulary must be a whole number of at least 1, got 0"),
        ({"context": -3}, "context must be a whole number of at least 1, got -3"),
        ({"heads": 3}, "width must be a multiple of heads in the narrow form, got 16 and 3"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
    ],
)
def test_invalid_configs_raise_value_error(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)  # type: ignore[arg-type]
