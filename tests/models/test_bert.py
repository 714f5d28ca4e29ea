"""BERT: agreement with HuggingFace on the same weights for every implementation, and padding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tests.models import huggingface
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models import (
    BERT_SIZES,
    Bert,
    BertConfig,
    BertForClassification,
    BertForPreTraining,
    PreTrainingLogits,
)
from transformer_kernels.nn import AttnImplementation, MultiHeadAttention, Stack, TransformerBlock

TINY = BertConfig(
    layers=2, heads=2, width=16, hidden=24, vocabulary=31, context=12, segments=3, dropout=0.0
)
IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)
LENGTHS = torch.tensor([12, 7, 1])
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)], ids=str
)


def widen(model: nn.Module) -> None:
    """Redraws parameters with a large deviation.

    Initial biases are 0 and attention is almost uniform, which would hide swapped weights.
    """
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)


def bert(config: BertConfig = TINY, attn_implementation: AttnImplementation = "fused") -> Bert:
    model = Bert(config, attn_implementation=attn_implementation).double()
    widen(model)
    return model


def pre_training(attn_implementation: AttnImplementation = "fused") -> BertForPreTraining:
    model = BertForPreTraining(TINY, attn_implementation=attn_implementation).double()
    widen(model)
    return model


def tokens(batch: int = 3, length: int = 12, vocabulary: int = 31) -> Tensor:
    """Random tokens, never 0: HuggingFace gives its padding index 0 no gradient."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, vocabulary, (batch, length), generator=generator)


def two_segments(length: int = 12) -> Tensor:
    """(3, length): segments whose second text starts at a different position in each row."""
    return (torch.arange(length) >= torch.tensor([[3], [5], [9]])).long()


def not_padding(lengths: Tensor, length: int = 12) -> Tensor:
    """(B, T) bool: False at padding."""
    return torch.arange(length) < lengths[:, None]


def loss_of(logits: PreTrainingLogits, visible: Tensor) -> Tensor:
    targets = tokens(3, visible.shape[1]).roll(1, dims=1)
    masked = nn.functional.cross_entropy(logits.tokens[visible], targets[visible])
    return masked + nn.functional.cross_entropy(logits.next_sentence, torch.tensor([0, 1, 1]))


# Agreement with HuggingFace


@pytest.mark.exhaustive
@PRECISIONS
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pre_training_matches_huggingface(
    implementation: AttnImplementation, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    theirs = huggingface.bert("BertForPreTraining", dtype)
    text, segments, lengths = tokens(3, 20, 61), two_segments(20), torch.tensor([20, 9, 1])
    visible = not_padding(lengths, 20)
    outputs = theirs(text, attention_mask=visible.long(), token_type_ids=segments)
    expected = PreTrainingLogits(outputs.prediction_logits, outputs.seq_relationship_logits)
    loss_of(expected, visible).backward()
    with huggingface.default_dtype(dtype):
        file = huggingface.saved(theirs, tmp_path)
        ours = BertForPreTraining.from_safetensors(file, attn_implementation=implementation)
        gradients = BertForPreTraining.from_safetensors(
            huggingface.saved_gradients(theirs, tmp_path)
        )
    logits = ours(text, segments=segments, lengths=lengths)
    loss_of(logits, visible).backward()
    huggingface.assert_same(logits.tokens[visible], expected.tokens[visible], tolerance=tolerance)
    huggingface.assert_same(logits.next_sentence, expected.next_sentence, tolerance=tolerance)
    huggingface.assert_same_gradients(ours, gradients, tolerance=tolerance)


@pytest.mark.exhaustive
@PRECISIONS
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_classification_matches_huggingface(
    implementation: AttnImplementation, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    theirs = huggingface.bert("BertForSequenceClassification", dtype, num_labels=5)
    text, lengths, classes = tokens(3, 20, 61), torch.tensor([20, 9, 1]), torch.tensor([4, 0, 2])
    expected = theirs(text, attention_mask=not_padding(lengths, 20).long()).logits
    nn.functional.cross_entropy(expected, classes).backward()
    with huggingface.default_dtype(dtype):
        file = huggingface.saved(theirs, tmp_path)
        ours = BertForClassification.from_safetensors(file, attn_implementation=implementation)
        gradients = BertForClassification.from_safetensors(
            huggingface.saved_gradients(theirs, tmp_path)
        )
    logits = ours(text, lengths=lengths)
    nn.functional.cross_entropy(logits, classes).backward()
    huggingface.assert_same(logits, expected, tolerance=tolerance)
    huggingface.assert_same_gradients(ours, gradients, tolerance=tolerance)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["BertModel", "BertForPreTraining"])
def test_encoder_matches_huggingface(kind: str, tmp_path: Path) -> None:
    """Loaded from a file with heads, or from one without, whose names have no prefix."""
    theirs = huggingface.bert(kind)
    encoder = theirs if kind == "BertModel" else theirs.bert
    with huggingface.default_dtype(torch.float64):
        ours = Bert.from_safetensors(huggingface.saved(theirs, tmp_path))
    expected = encoder(tokens(), token_type_ids=two_segments())
    x = ours(tokens(), segments=two_segments())
    huggingface.assert_same(x, expected.last_hidden_state, tolerance=1e-11)
    huggingface.assert_same(ours.pooled(x), expected.pooler_output, tolerance=1e-11)


# Agreement of the attention implementations


def test_implementations_agree_in_logits_and_gradients() -> None:
    results = []
    for implementation in IMPLEMENTATIONS:
        model = pre_training(implementation)
        logits = model(tokens(), segments=two_segments(), lengths=LENGTHS)
        loss = loss_of(logits, not_padding(LENGTHS))
        visible = (logits.tokens[not_padding(LENGTHS)], logits.next_sentence)
        results.append((visible, torch.autograd.grad(loss, list(model.parameters()))))
    assert_same_function(results[1], results[0])
    assert_same_function(results[2], results[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_block_uses_the_selected_implementation(implementation: AttnImplementation) -> None:
    for model in (
        pre_training(implementation),
        BertForClassification(TINY, 2, attn_implementation=implementation),
    ):
        modules = model.modules()
        implementations = [
            each.attn_implementation for each in modules if isinstance(each, MultiHeadAttention)
        ]
        assert implementations == [implementation, implementation]


# Padding


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padded_rows_match_unpadded_rows(implementation: AttnImplementation) -> None:
    """Each row gives the same result as alone, for any padding token."""
    model, text, segments = pre_training(implementation), tokens(), two_segments()
    other = torch.where(not_padding(LENGTHS), text, 30 - text)
    for padded in (text, other):
        logits = model(padded, segments=segments, lengths=LENGTHS)
        for row, length in enumerate(LENGTHS.tolist()):
            alone = model(text[row, None, :length], segments=segments[row, None, :length])
            for together, expected in (
                (logits.tokens[row, :length], alone.tokens[0]),
                (logits.next_sentence[row], alone.next_sentence[0]),
            ):
                assert_same_function(together, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_in_padding_reaches_no_result_and_no_gradient(
    implementation: AttnImplementation,
) -> None:
    model = pre_training(implementation)
    text = tokens().masked_fill(~not_padding(LENGTHS), 0)
    results = []
    for poison in (0.0, float("nan")):
        with torch.no_grad():
            model.encoder.embedding.weight[0] = poison
        x = model.encoder(text, lengths=LENGTHS)
        loss = x[not_padding(LENGTHS)].square().sum() + model.encoder.pooled(x).sum()
        results.append((x, torch.autograd.grad(loss, list(model.encoder.parameters()))))
    assert results[0][0].isfinite().all()
    assert all(gradient.isfinite().all() for gradient in results[0][1])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_without_lengths_every_token_is_visible() -> None:
    model, text = bert(), tokens()
    full = model(text, lengths=torch.full((3,), 12))
    assert_same_function(model(text), full)
    changed = text.clone()
    changed[:, -1] = text[:, -1] % 30 + 1
    assert not torch.isclose(model(changed)[:, 0], full[:, 0]).all(dim=-1).any()


# Embeddings and sizes


def test_segments_and_order_matter_and_segment_0_is_the_default() -> None:
    model, text = bert(), tokens()
    x = model(text)
    torch.testing.assert_close(model(text, segments=torch.zeros_like(text)), x)
    assert not torch.isclose(model(text, segments=two_segments()), x).all(dim=-1).any()
    swapped = text[:, [0, 2, 1, *range(3, 12)]]
    assert not torch.isclose(model(swapped)[:, 0], x[:, 0]).all(dim=-1).any()


def test_embedding_and_projection_share_one_parameter() -> None:
    """Its gradient is the sum over both uses."""
    model, text, visible = pre_training(), tokens(), not_padding(LENGTHS)
    names = ["token_bias", "encoder.embedding.weight"]
    assert [name for name, p in model.named_parameters() if 31 in p.shape] == names
    assert [name for name, p in model.state_dict().items() if 31 in p.shape] == names
    weight = model.encoder.embedding.weight
    (together,) = torch.autograd.grad(loss_of(model(text), visible), weight)

    projection = weight.detach().clone().requires_grad_()
    x = model.encoder(text)
    y = model.transform_norm(nn.functional.gelu(model.transform(x)))
    logits = y @ projection.T + model.token_bias
    next_sentence = model.next_sentence(model.encoder.pooled(x))
    apart = torch.autograd.grad(
        loss_of(PreTrainingLogits(logits, next_sentence), visible), (weight, projection)
    )
    assert all(gradient.abs().max() > 1e-3 for gradient in apart)
    assert_same_function(together, apart[0] + apart[1])


@pytest.mark.parametrize(
    ("name", "count"), [("bert-base", 109_482_240), ("bert-large", 335_141_888)]
)
def test_named_sizes_have_the_published_parameter_counts(name: str, count: int) -> None:
    config = BERT_SIZES[name]
    with torch.device("meta"):
        encoder, both = Bert(config), BertForPreTraining(config)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == count
    heads = config.width * (config.width + 1) + 2 * config.width + config.vocabulary
    heads += 2 * (config.width + 1)
    assert sum(parameter.numel() for parameter in both.parameters()) == count + heads
    assert config.width == 64 * config.heads


def test_initial_weights_are_small() -> None:
    torch.manual_seed(0)
    config = BertConfig(layers=2, heads=2, width=128, hidden=256, vocabulary=500, context=64)
    for model in (BertForPreTraining(config), BertForClassification(config, 200)):
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding) and module.weight.numel() > 1000:
                assert module.weight.std().item() == pytest.approx(0.02, rel=0.05), name
            if isinstance(module, nn.Linear):
                assert (module.bias == 0).all(), name
        table = model.encoder.positions.table
        assert table.std().item() == pytest.approx(0.02, rel=0.05)


def test_dropout_applies_in_training_only() -> None:
    model = BertForClassification(replace(TINY, dropout=0.5), 4).double()
    widen(model)
    assert not torch.allclose(model(tokens()), model(tokens()))
    model.encoder.eval()
    assert not torch.allclose(model(tokens()), model(tokens()))
    model.eval()
    torch.testing.assert_close(model(tokens()), model(tokens()), rtol=0, atol=0)


def test_dropout_applies_to_embeddings_and_every_block() -> None:
    model = bert(replace(TINY, dropout=0.5))
    for block in model.blocks:
        assert isinstance(block, TransformerBlock)
        assert block.dropout.p == block.attention.dropout == 0.5
    model.blocks = Stack()
    assert not torch.allclose(model(tokens()), model(tokens()))


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": torch.ones(3, 13, dtype=torch.long)}, "at most 12 positions long .* got 13"),
        ({"segments": torch.zeros(1, 12).long()}, r"shape of tokens, \(3, 12\), got \(1, 12\)"),
        ({"lengths": torch.tensor([5])}, r"lengths must be \(batch,\) = \(3,\), got shape \(1,\)"),
    ],
)
def test_invalid_inputs_raise_value_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bert()(**{"tokens": tokens()} | arguments)


@each(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ({"hidden": 0}, "hidden must be a whole number of at least 1, got 0"),
        ({"vocabulary": 0}, "vocabulary must be a whole number of at least 1, got 0"),
        ({"context": -3}, "context must be a whole number of at least 1, got -3"),
        ({"segments": 0}, "segments must be a whole number of at least 1, got 0"),
        ({"heads": 3}, "width must be a multiple of heads in the narrow form, got 16 and 3"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"eps": 0.0}, "eps must be above 0, got 0.0"),
    ],
)
def test_invalid_configs_raise_value_error(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)  # type: ignore[arg-type]


def test_zero_classes_raise_value_error() -> None:
    with pytest.raises(ValueError, match="classes must be a whole number of at least 1, got 0"):
        BertForClassification(TINY, 0)
