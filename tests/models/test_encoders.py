"""Classifier and BERT: what they compute, beside the contract of all models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from tests.models.zoo import BERT, IMPLEMENTATIONS, LENGTHS, entry_of, tokens
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models import CLASSIFIER_SIZES, BertForClassification, Classifier
from transformer_kernels.nn import AttnImplementation, HeadForm, Norm, TransformerBlock

CLASSIFIER = entry_of("classifier")


def test_classes_have_log_probabilities() -> None:
    log_p = CLASSIFIER.build()(tokens(), LENGTHS)
    assert_same_function(log_p.exp().sum(dim=-1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_text_of_length_0_gives_the_prediction_of_the_bias(
    implementation: AttnImplementation,
) -> None:
    classifier = CLASSIFIER.build(implementation)
    log_p = classifier(tokens(), torch.tensor([0, 7, 0]))
    expected = classifier.classes.bias.log_softmax(dim=-1)
    assert_same_function(log_p[[0, 2]], torch.stack([expected, expected]))


@pytest.mark.parametrize("form", get_args(HeadForm))
@pytest.mark.parametrize("order", get_args(Norm))
def test_classifier_matches_its_layers_applied_in_sequence(order: Norm, form: HeadForm) -> None:
    """Blocks have the configured norm and form, and attention is not causal."""
    classifier, text = CLASSIFIER.build(norm=order, form=form), tokens(7, batch=1)
    x = classifier.embedding(text) + classifier.positions.table[:7]
    for block in classifier.blocks:
        plain = TransformerBlock(16, 2, norm=order, form=form).double()
        plain.load_state_dict(block.state_dict())
        x = plain(x)
    x = classifier.last_norm(x)
    expected = classifier.classes(x.mean(dim=1)).log_softmax(dim=-1)
    assert_same_function(classifier(text), expected)
    assert_same_function(classifier(text, torch.tensor([7])), expected)


def test_positions_are_on_the_device_of_the_tokens() -> None:
    classifier = Classifier(CLASSIFIER.config, attn_implementation="eager").to("meta")
    log_p = classifier(tokens().to("meta"), LENGTHS.to("meta"))
    assert log_p.device.type == "meta"


def test_size_of_the_source() -> None:
    seed = CLASSIFIER_SIZES["seed"]
    assert (seed.layers, seed.width, seed.heads, seed.vocabulary) == (6, 128, 8, 50_000)
    assert (seed.context, seed.classes, seed.norm, seed.form) == (512, 2, "post", "wide")


def test_every_token_is_visible_to_the_class_token() -> None:
    bert, text = entry_of("bert").build(), tokens()
    full = bert(text, lengths=torch.full((3,), 9))
    assert_same_function(bert(text), full)
    changed = text.clone()
    changed[:, -1] = text[:, -1] % 16 + 1
    assert not torch.isclose(bert(changed)[:, 0], full[:, 0]).all(dim=-1).any()


def test_segments_matter_and_segment_0_is_the_default() -> None:
    bert, text = entry_of("bert").build(), tokens()
    x = bert(text)
    torch.testing.assert_close(bert(text, segments=torch.zeros_like(text)), x)
    for segment in (1, 2):
        other = bert(text, segments=torch.full_like(text, segment))
        assert not torch.isclose(other, x).all(dim=-1).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": tokens(10)}, "at most 9 positions long .* got 10"),
        ({"segments": torch.zeros(1, 9).long()}, r"shape of tokens, \(3, 9\), got \(1, 9\)"),
    ],
)
def test_invalid_inputs_raise_value_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        entry_of("bert").build()(**{"tokens": tokens()} | arguments)


def test_zero_classes_raise_value_error() -> None:
    with pytest.raises(ValueError, match="classes must be a whole number of at least 1, got 0"):
        BertForClassification(BERT, 0)
    with pytest.raises(ValueError, match=r"classes must be a whole .* got 1\.5"):
        replace(CLASSIFIER.config, classes=1.5)
