"""Encoder-decoder Transformer: visibility and padding, shared weights, and sizes."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from transformer_kernels import Mask
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models import TRANSLATOR_SIZES, Translator, TranslatorConfig
from transformer_kernels.nn import (
    AttnImplementation,
    DecoderBlock,
    Norm,
    TransformerBlock,
    sinusoids,
)
from transformer_kernels.training.losses import smoothed_cross_entropy

TINY = TranslatorConfig(
    source_vocabulary=17,
    target_vocabulary=17,
    layers=2,
    width=12,
    hidden=20,
    heads=2,
    context=9,
    dropout=0.0,
)
IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)
PAD, BEGIN, END = 0, 1, 2
LENGTHS = torch.tensor([5, 1, 3])
TARGET_LENGTHS = torch.tensor([3, 7, 1])


def model(
    config: TranslatorConfig = TINY, attn_implementation: AttnImplementation = "fused"
) -> Translator:
    """A model with noise on biases and norms, so that mistakes change the result."""
    torch.manual_seed(0)
    translator = Translator(config, attn_implementation=attn_implementation).double()
    with torch.no_grad():
        for parameter in translator.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return translator


def texts(lengths: Tensor, seed: int) -> Tensor:
    """(3, longest): random texts with trailing padding of 0."""
    longest = int(lengths.max())
    text = torch.randint(3, 17, (3, longest), generator=torch.Generator().manual_seed(seed))
    return text.where(torch.arange(longest) < lengths[:, None], PAD)


SOURCE, TARGET = texts(LENGTHS, 1), texts(TARGET_LENGTHS, 2)


def loss(logits: Tensor) -> Tensor:
    """Loss of predicting TARGET[:, 1:] from TARGET[:, :-1]."""
    total, _ = smoothed_cross_entropy(logits, TARGET[:, 1:], smoothing=0.1, pad=PAD)
    return total


def gradients(translator: Translator, logits: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(logits), list(translator.parameters()))


# Visibility and padding


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_row_depends_on_the_whole_source(implementation: AttnImplementation) -> None:
    translator = model(attn_implementation=implementation)
    changed = SOURCE.clone()
    changed[torch.arange(3), LENGTHS - 1] = 2
    before, after = (translator(source, TARGET, LENGTHS) for source in (SOURCE, changed))
    assert not torch.isclose(before, after).all(dim=-1).any()
    before, after = (translator.encode(source, LENGTHS) for source in (SOURCE, changed))
    assert not torch.isclose(before[:, 0], after[:, 0]).all(dim=-1).any()


def test_memory_at_source_padding_is_not_attended_to() -> None:
    """NaN in the padding of the memory's keys and values changes no logit."""
    translator = model()
    memory = translator.memory(SOURCE, LENGTHS)
    expected = translator.decode(TARGET, memory)
    padding = (torch.arange(5) >= LENGTHS[:, None])[:, None, :, None]
    poisoned = tuple(
        (k.masked_fill(padding, math.nan), v.masked_fill(padding, math.nan))
        for k, v in memory.keys_and_values
    )
    assert torch.equal(
        translator.decode(TARGET, replace(memory, keys_and_values=poisoned)), expected
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_target_padding_changes_neither_loss_nor_gradients(
    implementation: AttnImplementation,
) -> None:
    translator = model(attn_implementation=implementation)
    inputs = TARGET[:, :-1]
    other = inputs.where(torch.arange(6) < TARGET_LENGTHS[:, None], 9)
    results = []
    for target_in in (inputs, other):
        logits = translator(SOURCE, target_in, LENGTHS)
        results.append((loss(logits), *gradients(translator, logits)))
    assert not torch.equal(inputs, other)
    assert_same_function(results[1], results[0])


# Embeddings and the last projection


def test_shared_embeddings_are_one_parameter() -> None:
    """Its gradient is the sum over its three uses; copies and casts keep it shared."""
    shared, apart = model(), model(replace(TINY, shared=False))
    assert apart.source_embedding is not None
    assert apart.projection is not None
    weights = shared.state_dict()
    apart.load_state_dict(
        weights
        | {
            f"{name}.weight": weights["embedding.weight"]
            for name in ("source_embedding", "projection")
        }
    )
    logits = [translator(SOURCE, TARGET[:, :-1], LENGTHS) for translator in (shared, apart)]
    assert_same_function(logits[0], logits[1])
    loss(logits[0]).backward()
    loss(logits[1]).backward()
    uses = [
        apart.embedding.weight.grad,
        apart.source_embedding.weight.grad,
        apart.projection.weight.grad,
    ]
    assert all(use is not None and use.any() for use in uses)
    assert_same_function(shared.embedding.weight.grad, sum(use for use in uses if use is not None))

    for translator in (copy.deepcopy(shared), shared.float(), shared.to("meta")):
        of_vocabulary = [p for p in translator.parameters() if p.shape == (17, 12)]
        assert len(of_vocabulary) == 1
        assert [name for name, p in translator.state_dict().items() if p.shape == (17, 12)] == [
            "embedding.weight"
        ]


@pytest.mark.parametrize("order", get_args(Norm))
def test_translator_matches_its_layers_applied_in_sequence(order: Norm) -> None:
    translator = model(replace(TINY, norm=order))
    positions = sinusoids(9, 12).double()
    weight = translator.embedding.weight
    encoded = weight[SOURCE] * math.sqrt(12) + positions[:5]
    for block in translator.encoder:
        encoder = TransformerBlock(12, 2, norm=order, hidden=20).double()
        encoder.load_state_dict(block.state_dict())
        encoded = encoder(encoded)
    encoded = translator.encoder_norm(encoded)
    x = weight[TARGET] * math.sqrt(12) + positions[:7]
    for block in translator.decoder:
        decoder = DecoderBlock(12, 2, norm=order, hidden=20).double()
        decoder.load_state_dict(block.state_dict())
        x = decoder(x, decoder.memory_attention.keys_and_values(encoded), mask=Mask.causal())
    assert_same_function(translator.encode(SOURCE), encoded)
    assert_same_function(translator(SOURCE, TARGET), translator.decoder_norm(x) @ weight.T)


def test_vocabularies_may_differ() -> None:
    translator = model(replace(TINY, shared=False, target_vocabulary=23))
    assert translator(SOURCE, TARGET).shape == (3, 7, 23)


def test_odd_width_gives_finite_results() -> None:
    translator = model(replace(TINY, width=15, heads=3))
    assert translator(SOURCE, TARGET, LENGTHS).isfinite().all()


# Agreement with the paper


def test_base_model_matches_the_paper() -> None:
    """Post-norm without a final normalisation, and the paper's sizes."""
    base = TRANSLATOR_SIZES["base"]
    assert (base.layers, base.width, base.hidden, base.heads) == (6, 512, 2048, 8)
    assert (base.dropout, base.norm, base.shared) == (0.1, "post", True)
    with torch.device("meta"):
        translator = Translator(base)
    assert isinstance(translator.encoder_norm, nn.Identity)
    assert isinstance(translator.decoder_norm, nn.Identity)
    attention, norm = 4 * 512**2 + 512, 2 * 512
    feed_forward = 2 * 512 * 2048 + 2048 + 512
    layer = 3 * attention + 2 * feed_forward + 5 * norm
    assert sum(p.numel() for p in translator.parameters()) == 37_000 * 512 + 6 * layer


def test_pre_norm_stacks_end_in_a_normalisation() -> None:
    translator = model(replace(TINY, norm="pre"))
    assert isinstance(translator.decoder_norm, nn.LayerNorm)
    x = translator.encode(SOURCE)
    before = translator.encoder(translator._embed(SOURCE, translator.embedding))
    assert_same_function(x, translator.encoder_norm(before))
    assert not torch.allclose(x, before)


def test_matrices_are_initialised_as_xavier_uniform() -> None:
    translator = Translator(replace(TINY, width=64, hidden=200, shared=False))
    for name, parameter in translator.named_parameters():
        if parameter.dim() > 1:
            bound = math.sqrt(6 / sum(parameter.shape))
            assert parameter.abs().max().item() == pytest.approx(bound, rel=0.02), name
            assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name
        else:
            assert (parameter == (1.0 if "norm.weight" in name else 0.0)).all(), name
