"""Text generator: causality, agreement of the attention implementations, and sampling."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models import SIZES, GeneratorConfig, TextGenerator
from transformer_kernels.nn import AttnImplementation, HeadForm, MultiHeadAttention, Norm

TINY = GeneratorConfig(layers=2, width=16, heads=2, context=12)
IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)


def model(
    config: GeneratorConfig = TINY, attn_implementation: AttnImplementation = "fused"
) -> TextGenerator:
    torch.manual_seed(0)
    return TextGenerator(config, attn_implementation=attn_implementation).double()


def tokens(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("form", get_args(HeadForm))
@pytest.mark.parametrize("order", get_args(Norm))
def test_implementations_agree_in_logits_and_gradients(order: Norm, form: HeadForm) -> None:
    results = []
    for implementation in IMPLEMENTATIONS:
        generator = model(replace(TINY, norm=order, form=form), implementation)
        logits = generator(tokens())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens().flatten())
        results.append((logits, torch.autograd.grad(loss, list(generator.parameters()))))
    assert results[0][0].shape == (2, 12, 256)
    assert_same_function(results[1], results[0])
    assert_same_function(results[2], results[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_later_bytes_do_not_change_earlier_predictions(
    implementation: AttnImplementation,
) -> None:
    generator = model(attn_implementation=implementation)
    text = tokens()
    changed = text.clone()
    changed[:, 7:] = 255 - changed[:, 7:]
    before, after = generator(text), generator(changed)
    assert_same_function(before[:, :7], after[:, :7])
    assert not torch.isclose(before[:, 7:], after[:, 7:]).all(dim=-1).any()


def test_byte_order_matters() -> None:
    generator = model(replace(TINY, layers=1))
    text = tokens(1, 5)
    swapped = text[:, [1, 0, 2, 3, 4]]
    assert not torch.allclose(generator(text)[:, -1], generator(swapped)[:, -1])


def test_new_model_predicts_uniformly() -> None:
    generator = TextGenerator(SIZES["nanogpt-cpu"])
    logits = generator(tokens(4, 64))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens(4, 64).flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.06)


def test_named_sizes_match_their_sources() -> None:
    seed, nano = SIZES["seed"], SIZES["nanogpt-cpu"]
    assert (seed.layers, seed.width, seed.heads, seed.context) == (12, 256, 8, 256)
    assert (seed.norm, seed.form, seed.activation) == ("post", "wide", "relu")
    assert (nano.layers, nano.width, nano.heads, nano.context) == (4, 128, 4, 64)
    assert SIZES["demo"].context >= 512


def test_initial_weights_are_small_and_smaller_at_residual_outputs() -> None:
    generator = TextGenerator(SIZES["nanogpt-cpu"])
    for name, module in generator.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            is_residual_output = name.endswith(("out_proj", "down_proj"))
            expected = 0.02 / math.sqrt(2 * 4) if is_residual_output else 0.02
            assert module.weight.std().item() == pytest.approx(expected, rel=0.05), name
        if isinstance(module, nn.Linear) and module.bias is not None:
            assert (module.bias == 0).all(), name


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
        TextGenerator(TINY, attn_implementation="fused").double(),
    )
    other.load_state_dict(trained.state_dict())
    assert_same_function(other(tokens()), trained(tokens()))


def test_text_longer_than_the_context_raises_value_error() -> None:
    with pytest.raises(ValueError, match=r"at most 12 positions long \(the context\), got 13"):
        model()(tokens(1, 13))


def greedy_by_hand(generator: TextGenerator, prompt: bytes, length: int) -> bytes:
    text = list(prompt)
    for _ in range(length):
        text.append(int(generator(torch.tensor([text[-12:]]))[0, -1].argmax()))
    return bytes(text[len(prompt) :])


def test_temperature_zero_selects_the_likeliest_byte_beyond_the_context() -> None:
    generator = model()
    expected = greedy_by_hand(generator, b"abc", 20)
    assert generator.generate(b"abc", 20, temperature=0) == expected
    assert generator.generate(b"abc", 20, temperature=5e-324) == expected


def test_generation_reads_the_end_of_a_long_prompt() -> None:
    generator = model()
    prompt = b"a prompt longer than twelve bytes"
    assert generator.generate(prompt, 5, temperature=0) == greedy_by_hand(generator, prompt, 5)
    assert generator.generate(prompt[-12:], 5, temperature=0) == greedy_by_hand(
        generator, prompt, 5
    )


def test_samples_follow_the_temperature() -> None:
    generator = model()
    with torch.no_grad():
        for parameter in generator.parameters():
            parameter.zero_()
        generator.logits.bias[:3] = torch.tensor([40.0, 41.0, 39.0], dtype=torch.float64)
    drawn = generator.generate(
        b"x", 300, temperature=0.5, generator=torch.Generator().manual_seed(0)
    )
    shares = torch.bincount(torch.tensor(list(drawn)), minlength=3) / len(drawn)
    expected = torch.tensor([80.0, 82.0, 78.0]).softmax(dim=0)
    torch.testing.assert_close(shares, expected, rtol=0, atol=0.06)


def test_seed_determines_the_text_and_stream_matches_generate() -> None:
    generator = model()

    def generated(seed: int) -> bytes:
        draws = torch.Generator().manual_seed(seed)
        return generator.generate(b"x", 15, temperature=1.0, generator=draws)

    assert generated(1) == generated(1) != generated(2)
    stream = generator.stream(b"x", 15, temperature=1.0, generator=torch.Generator().manual_seed(1))
    assert bytes(islice(stream, 4)) == generated(1)[:4]


def test_dropout_is_off_and_the_training_mode_is_restored() -> None:
    generator = model(replace(TINY, dropout=0.5))
    assert generator.training
    generator.generate(b"x", 1)
    assert generator.training
    assert generator.generate(b"x", 9, temperature=0) == generator.generate(b"x", 9, temperature=0)
    generator.eval()
    generator.generate(b"x", 1)
    assert not generator.training


@pytest.mark.parametrize(
    ("prompt", "length", "temperature", "message"),
    [
        (b"", 5, 1.0, "prompt must have at least one token"),
        (b"x", -1, 1.0, "length must be at least 0, got -1"),
        (b"x", 5, -0.5, "temperature must be at least 0 and finite, got -0.5"),
        (b"x", 5, math.nan, "temperature must be at least 0 and finite, got nan"),
    ],
)
def test_invalid_arguments_raise_before_the_first_byte(
    prompt: bytes, length: int, temperature: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        model().stream(prompt, length, temperature=temperature)


@each(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ({"context": -3}, "context must be a whole number of at least 1, got -3"),
        ({"heads": 3}, "width must be a multiple of heads in the narrow form, got 16 and 3"),
        ({"dropout": 2.0}, "dropout must be at least 0 and below 1, got 2.0"),
        ({"norm": "mid"}, "norm must be one of 'post', 'pre', got 'mid'"),
        ({"activation": "no"}, "activation must be one of 'relu', 'gelu', 'gelu_tanh', got 'no'"),
    ],
)
def test_invalid_configs_raise_value_error(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)  # type: ignore[arg-type]
