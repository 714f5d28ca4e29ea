"""Classifier, BERT, translator and fact table: what the contract of all models leaves out."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tests.models.zoo import (
    BERT,
    IMPLEMENTATIONS,
    LENGTHS,
    TARGET,
    TRANSLATOR,
    VOCABULARY,
    entry_of,
    randn,
    tokens,
)
from tests.support.tiers import each
from transformer_kernels import Mask
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models import (
    BertForClassification,
    FactTable,
    FactTableConfig,
    Lookup,
    LookupConfig,
    Translator,
    lookup,
)
from transformer_kernels.nn import (
    AttnImplementation,
    DecoderBlock,
    HeadForm,
    Norm,
    TransformerBlock,
    sinusoids,
)

# Classifier and BERT

CLASSIFIER = entry_of("classifier")


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


def test_invalid_segments_and_classes_raise_value_error() -> None:
    with pytest.raises(ValueError, match=r"shape of tokens, \(3, 9\), got \(1, 9\)"):
        entry_of("bert").build()(tokens(), segments=torch.zeros(1, 9).long())
    with pytest.raises(ValueError, match="classes must be a whole number of at least 1, got 0"):
        BertForClassification(BERT, 0)


# Encoder-decoder Transformer


def model(implementation: AttnImplementation = "fused", **changes: Any) -> Translator:
    translator = entry_of("translator").build(implementation, **changes)
    assert isinstance(translator, Translator)
    return translator


@pytest.mark.parametrize("order", get_args(Norm))
def test_translator_matches_its_layers_applied_in_sequence(order: Norm) -> None:
    translator = model(norm=order)
    positions = sinusoids(9, 16).double()
    weight = translator.embedding.weight
    encoded = weight[tokens()] * math.sqrt(16) + positions
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
    assert_same_function(translator.encode(tokens()), encoded)
    assert_same_function(translator(tokens(), TARGET), translator.decoder_norm(x) @ weight.T)
    norm = nn.LayerNorm if order == "pre" else nn.Identity
    assert isinstance(translator.encoder_norm, norm)
    assert isinstance(translator.decoder_norm, norm)


def test_vocabularies_may_differ_and_widths_be_odd() -> None:
    translator = model(shared=False, target_vocabulary=23, width=15, heads=3)
    logits = translator(tokens(), TARGET, LENGTHS)
    assert logits.shape == (3, 7, 23)
    assert logits.isfinite().all()


def test_matrices_are_initialised_as_xavier_uniform() -> None:
    translator = Translator(replace(TRANSLATOR, width=64, hidden=200, shared=False))
    for name, parameter in translator.named_parameters():
        if parameter.dim() > 1:
            bound = math.sqrt(6 / sum(parameter.shape))
            assert parameter.abs().max().item() == pytest.approx(bound, rel=0.02), name
            assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name
        else:
            assert (parameter == (1.0 if "norm.weight" in name else 0.0)).all(), name


def test_translations_are_greedy_targets_within_the_context() -> None:
    translator = model()
    options: dict[str, Any] = {"begin": 1, "end": 2}
    expected = translator.greedy_targets(tokens(), vocabulary=VOCABULARY, most=5, **options)
    assert translator.translate(tokens(), most=5, **options) == expected
    with pytest.raises(ValueError, match="most must be at most 21, the context, got 22"):
        translator.translate(tokens(), most=22, **options)
    with pytest.raises(ValueError, match=r"at most 21 positions long \(the context\), got 22"):
        translator(tokens(), tokens(22))


def test_a_shared_matrix_needs_one_vocabulary() -> None:
    with pytest.raises(ValueError, match="must be equal if shared is True, got 17 and 18"):
        replace(TRANSLATOR, target_vocabulary=18)


# Fact table and lookup

SMALL = FactTableConfig(rows=7, width=5, value_width=3)


def table(
    config: FactTableConfig = SMALL, attn_implementation: AttnImplementation = "fused"
) -> FactTable:
    torch.manual_seed(0)
    return FactTable(config, attn_implementation=attn_implementation).double()


def random_mask(*shape: int) -> Tensor:
    """A random mask with about two thirds of the pairs; the second query is fully masked."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 2 / 3
    mask[..., 1, :] = False
    return mask


def by_hand(facts: FactTable, queries: Tensor, mask: Tensor | None) -> Tensor:
    s = queries @ facts.keys.T
    if facts.config.scaled:
        s = s / math.sqrt(facts.config.width)
    weights = s.exp() if mask is None else s.exp() * mask
    p = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-300)
    return p @ facts.values


WIDTHS = [(1, 1, 1), (7, 5, 3), (6, 4, 6), (8, 8, 8), (3, 2, 9), (13, 600, 2), (2, 3, 601)]


@pytest.mark.parametrize(("rows", "width", "value_width"), WIDTHS)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_soft_lookup_is_a_weighted_mean(
    implementation: AttnImplementation, scaled: bool, rows: int, width: int, value_width: int
) -> None:
    config = FactTableConfig(rows=rows, width=width, value_width=value_width, scaled=scaled)
    facts = table(config, implementation)
    queries = randn(2, 4, width).requires_grad_()
    do = randn(2, 4, value_width, seed=3)
    for mask in (None, random_mask(4, rows), random_mask(2, 1, 4, rows)):
        o = facts.soft(queries, None if mask is None else Mask.dense(mask))
        dense = mask[:, 0] if mask is not None and mask.dim() == 4 else mask
        expected = by_hand(facts, queries, dense)
        assert_same_function(o, expected)
        inputs = [queries, facts.keys, facts.values]
        gradients = torch.autograd.grad(o, inputs, do)
        assert_same_function(gradients, torch.autograd.grad(expected, inputs, do))
        assert_same_function(facts(queries, None if mask is None else Mask.dense(mask)), o)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_soft_lookup_uses_the_selected_implementation(
    implementation: AttnImplementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    implementations = []

    def record(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        implementations.append(options["attn_implementation"])
        return v

    monkeypatch.setattr(lookup, "attend", record)
    table(attn_implementation=implementation).soft(randn(4, 5))
    assert implementations == [implementation]


@each(("rows", "width", "value_width"), WIDTHS)
def test_hard_lookup_returns_the_value_of_the_most_similar_key(
    rows: int, width: int, value_width: int
) -> None:
    facts = table(FactTableConfig(rows=rows, width=width, value_width=value_width))
    queries = randn(2, 4, width)
    values = facts.hard(queries)
    for b in range(2):
        for i in range(4):
            similarities = [(key @ queries[b, i]).item() for key in facts.keys]
            row = similarities.index(max(similarities))
            assert_same_function(values[b, i], facts.values[row])


def test_hard_lookup_resolves_ties_to_the_first_key() -> None:
    """Products of small integers are exact in any order: the similarities are equal."""
    facts = table()
    with torch.no_grad():
        facts.keys[:] = torch.arange(5.0)
    assert_same_function(facts.hard(randn(4, 5).round()), facts.values[:1].expand(4, 3))


def test_hard_lookup_has_gradients_of_the_values_only() -> None:
    facts = table()
    queries = randn(4, 5).requires_grad_()
    inputs = [facts.keys, queries, facts.values]
    hard = torch.autograd.grad(facts.hard(queries).sum(), inputs, allow_unused=True)
    assert [gradient is None for gradient in hard] == [True, True, False]
    row = (queries @ facts.keys.T).argmax(dim=-1)
    assert_same_function(hard[2], torch.bincount(row, minlength=7).double()[:, None].expand(7, 3))


def test_keys_and_values_are_parameters() -> None:
    """Plain tensor attributes would not be trained, saved or moved with the module."""
    facts = table()
    assert {name: tuple(p.shape) for name, p in facts.named_parameters()} == {
        "keys": (7, 5),
        "values": (7, 3),
    }
    assert facts.keys.dtype == torch.float64


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_unbatched_and_empty_queries(implementation: AttnImplementation) -> None:
    facts = table(attn_implementation=implementation)
    queries = randn(3, 4, 5)
    assert_same_function(facts.soft(queries[1]), facts.soft(queries)[1])
    assert_same_function(facts.hard(queries[1]), facts.hard(queries)[1])
    assert facts.soft(queries[:, :0]).shape == (3, 0, 3)
    assert facts.hard(queries[:0]).shape == (0, 4, 3)


@each("shape", [(5,), (4, 6), (2, 2, 4, 5), (4, 0)])
def test_queries_of_a_wrong_shape_raise_value_error(shape: tuple[int, ...]) -> None:
    message = f"queries must be (B, M, 5) or (M, 5), got shape {shape}"
    for look_up in (table().hard, table().soft):
        with pytest.raises(ValueError, match=re.escape(message)):
            look_up(randn(*shape))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_mask_larger_than_the_table_raises_value_error(implementation: AttnImplementation) -> None:
    mask = Mask.dense(torch.ones(4, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\(1, 1, 4, 7\), got \(1, 1, 4, 8\)"):
        table(attn_implementation=implementation).soft(randn(4, 5), mask)


def test_answer_is_the_row_of_the_key_nearest_to_the_mean_word() -> None:
    model = Lookup(LookupConfig(vocabulary=11, rows=7, width=5)).double()
    nn.init.normal_(model.embedding.weight)
    words, lengths = torch.tensor([[3, 4, 1], [5, 9, 10]]), torch.tensor([3, 2])
    query = torch.stack(
        [model.embedding(words[0]).mean(dim=0), model.embedding(words[1, :2]).mean(0)]
    )
    similarities = query @ model.table.keys.T
    assert torch.equal(model.answer(words, lengths), similarities.argmax(dim=1))
    assert_same_function(model(words, lengths), similarities.log_softmax(dim=1))
