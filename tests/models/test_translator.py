"""Encoder-decoder Transformer: visibility of source and target, shared weights, and the paper."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tests.models.zoo import (
    IMPLEMENTATIONS,
    LENGTHS,
    TARGET,
    TRANSLATOR,
    VOCABULARY,
    entry_of,
    gradients,
    tokens,
)
from transformer_kernels import Mask
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models import TRANSLATOR_SIZES, Translator
from transformer_kernels.nn import (
    AttnImplementation,
    DecoderBlock,
    Norm,
    TransformerBlock,
    sinusoids,
)
from transformer_kernels.training.task import smoothed_cross_entropy

SOURCE = tokens()


def model(implementation: AttnImplementation = "fused", **changes: Any) -> Translator:
    translator = entry_of("translator").build(implementation, **changes)
    assert isinstance(translator, Translator)
    return translator


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_row_depends_on_the_whole_source(implementation: AttnImplementation) -> None:
    translator = model(implementation)
    changed = SOURCE.clone()
    changed[torch.arange(3), LENGTHS - 1] = SOURCE[torch.arange(3), LENGTHS - 1] % 16 + 1
    before, after = (translator(source, TARGET, LENGTHS) for source in (SOURCE, changed))
    assert not torch.isclose(before, after).all(dim=-1).any()
    before, after = (translator.encode(source, LENGTHS) for source in (SOURCE, changed))
    assert not torch.isclose(before[:, 0], after[:, 0]).all(dim=-1).any()


def test_memory_at_source_padding_is_not_attended_to() -> None:
    """NaN in the padding of the memory's keys and values changes no logit."""
    translator = model()
    memory = translator.memory(SOURCE, LENGTHS)
    expected = translator.decode(TARGET, memory)
    padding = (torch.arange(9) >= LENGTHS[:, None])[:, None, :, None]
    poisoned = tuple(
        (k.masked_fill(padding, math.nan), v.masked_fill(padding, math.nan))
        for k, v in memory.keys_and_values
    )
    found = translator.decode(TARGET, replace(memory, keys_and_values=poisoned))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_target_padding_changes_neither_loss_nor_gradients(
    implementation: AttnImplementation,
) -> None:
    translator, results = model(implementation), []
    is_target = torch.arange(7) < torch.tensor([[3], [7], [1]])
    targets = TARGET.masked_fill(~is_target, 0)
    for pad in (0, 9):
        logits = translator(SOURCE, TARGET.where(is_target, pad)[:, :-1], LENGTHS)
        loss, _ = smoothed_cross_entropy(logits, targets[:, 1:], smoothing=0.1, pad=0)
        results.append((loss, *gradients(translator, loss)))
    assert_same_function(results[1], results[0])


def test_gradient_of_the_shared_matrix_is_the_sum_over_its_three_uses() -> None:
    shared, apart = model(), model(shared=False)
    weights, names = shared.state_dict(), ("source_embedding.weight", "projection.weight")
    apart.load_state_dict(weights | dict.fromkeys(names, weights["embedding.weight"]))
    logits = [translator(SOURCE, TARGET, LENGTHS) for translator in (shared, apart)]
    assert_same_function(logits[0], logits[1])
    found, uses = (
        {
            name: gradient
            for (name, _), gradient in zip(
                translator.named_parameters(), gradients(translator, y), strict=True
            )
        }
        for translator, y in zip((shared, apart), logits, strict=True)
    )
    three = [uses[name] for name in ("embedding.weight", *names)]
    assert all(use.any() for use in three)
    assert_same_function(found["embedding.weight"], three[0] + three[1] + three[2])


@pytest.mark.parametrize("order", get_args(Norm))
def test_translator_matches_its_layers_applied_in_sequence(order: Norm) -> None:
    translator = model(norm=order)
    positions = sinusoids(9, 16).double()
    weight = translator.embedding.weight
    encoded = weight[SOURCE] * math.sqrt(16) + positions
    for block in translator.encoder:
        encoder = TransformerBlock(16, 2, norm=order, hidden=20).double()
        encoder.load_state_dict(block.state_dict())
        encoded = encoder(encoded)
    encoded = translator.encoder_norm(encoded)
    x = weight[TARGET] * math.sqrt(16) + positions[:7]
    for block in translator.decoder:
        decoder = DecoderBlock(16, 2, norm=order, hidden=20).double()
        decoder.load_state_dict(block.state_dict())
        x = decoder(x, decoder.memory_attention.keys_and_values(encoded), mask=Mask.causal())
    assert_same_function(translator.encode(SOURCE), encoded)
    assert_same_function(translator(SOURCE, TARGET), translator.decoder_norm(x) @ weight.T)
    norm = nn.LayerNorm if order == "pre" else nn.Identity
    assert isinstance(translator.encoder_norm, norm)
    assert isinstance(translator.decoder_norm, norm)


def test_vocabularies_may_differ_and_widths_be_odd() -> None:
    translator = model(shared=False, target_vocabulary=23, width=15, heads=3)
    logits = translator(SOURCE, TARGET, LENGTHS)
    assert logits.shape == (3, 7, 23)
    assert logits.isfinite().all()


def test_base_model_has_the_options_of_the_paper() -> None:
    base = TRANSLATOR_SIZES["base"]
    assert (base.layers, base.width, base.hidden, base.heads) == (6, 512, 2048, 8)
    assert (base.dropout, base.norm, base.shared) == (0.1, "post", True)


def test_matrices_are_initialised_as_xavier_uniform() -> None:
    translator = Translator(replace(TRANSLATOR, width=64, hidden=200, shared=False))
    for name, parameter in translator.named_parameters():
        if parameter.dim() > 1:
            bound = math.sqrt(6 / sum(parameter.shape))
            assert parameter.abs().max().item() == pytest.approx(bound, rel=0.02), name
            assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name
        else:
            assert (parameter == (1.0 if "norm.weight" in name else 0.0)).all(), name


def translate(source: Tensor, **changes: Any) -> list[list[int]]:
    return model().translate(source, **{"begin": 1, "end": 2, "most": 5} | changes)


def test_translations_are_greedy_targets() -> None:
    expected = model().greedy_targets(SOURCE, vocabulary=VOCABULARY, begin=1, end=2, most=5)
    assert translate(SOURCE) == expected


def test_texts_beyond_the_context_raise_value_error() -> None:
    with pytest.raises(ValueError, match="most must be at most 21, the context, got 22"):
        translate(SOURCE, most=22)
    for source, target in ((tokens(22), TARGET), (SOURCE, tokens(22))):
        with pytest.raises(ValueError, match=r"at most 21 positions long \(the context\), got 22"):
            model()(source, target)


def test_a_shared_matrix_needs_one_vocabulary() -> None:
    with pytest.raises(ValueError, match="must be equal if shared is True, got 17 and 18"):
        replace(TRANSLATOR, target_vocabulary=18)
