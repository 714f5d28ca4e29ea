"""Classifier: padding, agreement of the attention implementations, and word order."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models import CLASSIFIER_SIZES, Classifier, ClassifierConfig
from transformer_kernels.nn import (
    AttnImplementation,
    HeadForm,
    MultiHeadAttention,
    Norm,
    Stack,
    TransformerBlock,
    recompute_blocks,
)

TINY = ClassifierConfig(vocabulary=19, layers=2, width=12, heads=2, classes=3, context=9)
IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)
PAD = 0
LENGTHS = torch.tensor([7, 1, 4])


def model(
    config: ClassifierConfig = TINY, attn_implementation: AttnImplementation = "fused"
) -> Classifier:
    """A model with larger weights than a new one, so that mistakes change the result."""
    torch.manual_seed(0)
    classifier = Classifier(config, attn_implementation=attn_implementation).double()
    with torch.no_grad():
        for parameter in classifier.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return classifier


def tokens() -> Tensor:
    """(3, 7): texts of `LENGTHS` tokens with trailing padding of 0."""
    text = torch.randint(1, 19, (3, 7), generator=torch.Generator().manual_seed(1))
    return text.where(torch.arange(7) < LENGTHS[:, None], PAD)


def gradients(classifier: Classifier, log_p: Tensor) -> tuple[Tensor, ...]:
    loss = nn.functional.nll_loss(log_p, torch.tensor([2, 0, 1]))
    return torch.autograd.grad(loss, list(classifier.parameters()))


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "padded"])
@pytest.mark.parametrize("form", get_args(HeadForm))
@pytest.mark.parametrize("order", get_args(Norm))
def test_implementations_agree_in_results_and_gradients(
    order: Norm, form: HeadForm, lengths: Tensor | None
) -> None:
    results = []
    for implementation in IMPLEMENTATIONS:
        classifier = model(replace(TINY, norm=order, form=form), implementation)
        log_p = classifier(tokens(), lengths)
        results.append((log_p, *gradients(classifier, log_p)))
    assert results[0][0].shape == (3, 3)
    assert_same_function(results[1], results[0])
    assert_same_function(results[2], results[0])


def test_results_are_log_probabilities() -> None:
    log_p = model()(tokens(), LENGTHS)
    assert_same_function(log_p.exp().sum(dim=-1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("order", get_args(Norm))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_is_neither_attended_to_nor_pooled(
    implementation: AttnImplementation, order: Norm
) -> None:
    """A padded text gives the same results and gradients as alone, for any padding token."""
    classifier = model(replace(TINY, norm=order), implementation)
    padded = classifier(tokens(), LENGTHS)
    alone = torch.cat(
        [classifier(tokens()[b : b + 1, :length]) for b, length in enumerate(LENGTHS.tolist())]
    )
    assert_same_function(padded, alone)
    assert_same_function(gradients(classifier, padded), gradients(classifier, alone))
    other = tokens().where(torch.arange(7) < LENGTHS[:, None], 5)
    assert torch.equal(classifier(other, LENGTHS), padded)
    assert not torch.isclose(classifier(tokens())[1:], padded[1:]).any()


def test_padding_is_not_pooled_without_attention() -> None:
    classifier = model()
    classifier.blocks = Stack()
    text = tokens()[2:, :4]
    x = classifier.embedding(text) + classifier.positions.table[:4]
    expected = classifier.classes(x.mean(dim=1)).log_softmax(dim=-1)
    assert_same_function(classifier(tokens(), LENGTHS)[2:], expected)


@pytest.mark.parametrize("order", get_args(Norm))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_in_padding_reaches_no_result_and_no_gradient(
    implementation: AttnImplementation, order: Norm
) -> None:
    classifier = model(replace(TINY, norm=order), implementation)
    clean = classifier(tokens(), LENGTHS)
    expected = (clean, *gradients(classifier, clean))
    with torch.no_grad():
        classifier.embedding.weight[PAD] = math.nan
    poisoned = classifier(tokens(), LENGTHS)
    assert_same_function((poisoned, *gradients(classifier, poisoned)), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_text_of_length_0_gives_the_prediction_of_the_bias(
    implementation: AttnImplementation,
) -> None:
    classifier = model(attn_implementation=implementation)
    lengths = torch.tensor([0, 7, 0])
    log_p = classifier(tokens(), lengths)
    expected = classifier.classes.bias.log_softmax(dim=-1)
    assert_same_function(log_p[[0, 2]], torch.stack([expected, expected]))
    assert all(gradient.isfinite().all() for gradient in gradients(classifier, log_p))
    assert_same_function(classifier(tokens()[:2, :0]), torch.stack([expected, expected]))


def test_word_order_matters() -> None:
    classifier = model()
    text = tokens()[:1]
    assert not torch.isclose(classifier(text[:, [1, 0, 2, 3, 4, 5, 6]]), classifier(text)).any()


@pytest.mark.parametrize("form", get_args(HeadForm))
@pytest.mark.parametrize("order", get_args(Norm))
def test_classifier_matches_its_layers_applied_in_sequence(order: Norm, form: HeadForm) -> None:
    """Blocks have the configured norm and form, and attention is not causal."""
    classifier = model(replace(TINY, norm=order, form=form))
    text = tokens()[:1]
    x = classifier.embedding(text) + classifier.positions.table[:7]
    for block in classifier.blocks:
        plain = TransformerBlock(12, 2, norm=order, form=form).double()
        plain.load_state_dict(block.state_dict())
        x = plain(x)
    x = classifier.last_norm(x)
    expected = classifier.classes(x.mean(dim=1)).log_softmax(dim=-1)
    assert_same_function(classifier(text), expected)
    assert_same_function(classifier(text, torch.tensor([7])), expected)


def test_positions_are_on_the_device_of_the_tokens() -> None:
    classifier = Classifier(TINY, attn_implementation="eager").to("meta")
    log_p = classifier(tokens().to("meta"), LENGTHS.to("meta"))
    assert log_p.device.type == "meta"


def test_recomputed_blocks_match_plain_blocks() -> None:
    results = []
    for recompute in (False, True):
        classifier = model(replace(TINY, dropout=0.3))
        recompute_blocks(classifier, recompute)
        torch.manual_seed(3)
        log_p = classifier(tokens(), LENGTHS)
        results.append((log_p, *gradients(classifier, log_p)))
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


def test_dropout_applies_to_embeddings_and_every_block_in_training_only() -> None:
    classifier = model(replace(TINY, dropout=0.5))
    rates = [each.p for each in classifier.modules() if isinstance(each, nn.Dropout)]
    assert rates == [0.5] * 3
    seen: list[Tensor] = []
    classifier.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert not torch.allclose(classifier(tokens()), classifier(tokens()))
    assert all(0.3 < (x == 0).double().mean() < 0.7 for x in seen)
    classifier.eval()
    assert torch.equal(classifier(tokens()), classifier(tokens()))


def test_new_model_predicts_uniformly() -> None:
    config = replace(CLASSIFIER_SIZES["demo"], classes=5)
    log_p = Classifier(config).eval()(torch.randint(config.vocabulary, (4, 50)))
    torch.testing.assert_close(log_p, torch.full_like(log_p, -math.log(5)), rtol=0, atol=0.3)


def test_initial_weights_are_small() -> None:
    for name, module in Classifier(CLASSIFIER_SIZES["demo"]).named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and name != "classes":
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.05), name
        if isinstance(module, nn.Linear) and module.bias is not None:
            assert (module.bias == 0).all(), name


def test_named_sizes_match_their_sources() -> None:
    seed = CLASSIFIER_SIZES["seed"]
    assert (seed.layers, seed.context, seed.classes, seed.norm, seed.form) == (
        6, 512, 2, "post", "wide",
    )  # fmt: skip
    assert (seed.width, seed.heads, seed.vocabulary) == (128, 8, 50_000)
    assert isinstance(model().last_norm, nn.Identity)
    assert isinstance(model(replace(TINY, norm="pre")).last_norm, nn.LayerNorm)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_block_uses_the_selected_implementation(implementation: AttnImplementation) -> None:
    modules = model(attn_implementation=implementation).modules()
    implementations = [
        each.attn_implementation for each in modules if isinstance(each, MultiHeadAttention)
    ]
    assert implementations == [implementation, implementation]


def test_weights_work_with_any_implementation() -> None:
    trained, other = (
        model(attn_implementation="eager"),
        Classifier(TINY, attn_implementation="fused").double(),
    )
    other.load_state_dict(trained.state_dict())
    assert_same_function(other(tokens(), LENGTHS), trained(tokens(), LENGTHS))


def test_text_longer_than_the_context_raises_value_error() -> None:
    with pytest.raises(ValueError, match=r"at most 9 positions long \(the context\), got 10"):
        model()(torch.zeros(1, 10, dtype=torch.int64))


def test_invalid_lengths_raise() -> None:
    with pytest.raises(ValueError, match=r"lengths must be \(batch,\) = \(3,\), got shape \(2,\)"):
        model()(tokens(), LENGTHS[:2])
    with pytest.raises(ValueError, match="lengths must be from 0 to 7, the padded length, got 8"):
        model()(tokens(), torch.tensor([7, 8, 1]))
    with pytest.raises(TypeError, match="lengths must be a tensor of int32 or int64"):
        model()(tokens(), LENGTHS.double())


@each(
    ("changes", "message"),
    [
        ({"vocabulary": 0}, "vocabulary must be a whole number of at least 1, got 0"),
        ({"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ({"classes": 1.5}, "classes must be a whole number of at least 1, got 1.5"),
        ({"context": -3}, "context must be a whole number of at least 1, got -3"),
        ({"heads": 5}, "width must be a multiple of heads in the narrow form, got 12 and 5"),
        ({"form": "tall"}, "form must be one of 'narrow', 'wide', got 'tall'"),
        ({"dropout": 2.0}, "dropout must be at least 0 and below 1, got 2.0"),
        ({"norm": "mid"}, "norm must be one of 'post', 'pre', got 'mid'"),
    ],
)
def test_invalid_configs_raise_value_error(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)  # type: ignore[arg-type]


def test_unknown_attn_implementation_raises_value_error() -> None:
    with pytest.raises(
        ValueError, match=r"attn_implementation must be one of 'eager'.*got 'flash'"
    ):
        Classifier(TINY, attn_implementation="flash")  # type: ignore[arg-type]
