"""`generate`, `sample` and greedy targets: what is read at each step, sampling, and errors."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.zoo import ENCODER_DECODERS, LENGTHS, VOCABULARY, entry_of, tokens
from tests.support.tiers import each
from transformer_kernels.models import Memories, TextGenerator
from transformer_kernels.models.generation import generate, sample
from transformer_kernels.nn import KVCache


def generator() -> TextGenerator:
    model = entry_of("generator").build()
    assert isinstance(model, TextGenerator)
    return model


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Sampling


@pytest.mark.parametrize("prompt", [b"abc", b"a prompt longer than twelve bytes"])
def test_temperature_zero_selects_the_likeliest_byte_of_the_last_context(prompt: bytes) -> None:
    model, text = generator(), list(prompt)
    for _ in range(20):
        text.append(int(model(torch.tensor([text[-12:]]))[0, -1].argmax()))
    expected = bytes(text[len(prompt) :])
    assert model.generate(prompt, 20, temperature=0) == expected
    assert model.generate(prompt, 20, temperature=5e-324) == expected
    assert model.generate(prompt[-12:], 20, temperature=0) == expected


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, -torch.inf]).double()
    draws = drawn(0)
    share = sum(sample(logits, 0.5, draws) for _ in range(4000)) / 4000
    assert share == pytest.approx(torch.tensor(2.0).sigmoid().item(), abs=0.02)
    assert sample(logits, 0.0) == 1
    assert sample(logits, 1e-300, draws) == 1


def test_seed_determines_the_text_and_evaluation_mode_is_kept() -> None:
    model = generator()
    texts = [model.generate(b"x", 15, temperature=1.0, generator=drawn(n)) for n in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    stream = model.eval().stream(b"x", 15, temperature=1.0, generator=drawn(1))
    assert bytes(islice(stream, 4)) == texts[0][:4]
    model.generate(b"x", 1)
    assert not model.training


@each(
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
        generator().stream(prompt, length, temperature=temperature)


# Tokens that each step reads


def test_with_a_cache_each_step_reads_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the context is full, positions shift, and each step reads the whole window."""
    model, lengths = generator(), []
    plain = model.forward

    def forward(tokens: Tensor, *, cache: KVCache | None = None) -> Tensor:
        lengths.append(tokens.shape[1])
        return plain(tokens, cache=cache)

    monkeypatch.setattr(model, "forward", forward)
    list(generate(model, b"hello", 30, temperature=1.0))
    assert lengths == [5] + [1] * 7 + [12] * 22


def test_state_advances_by_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of 3 is shorter than a segment: the prompt, then every token, is read once."""
    model, calls, expected = entry_of("xl").build(memory=3), [], []
    state, again = model.new_state(1), drawn(2)
    plain = model.forward

    def forward(tokens: Tensor, memories: Memories) -> tuple[Tensor, Memories]:
        nonlocal state
        calls.append(tokens[0].tolist())
        torch.testing.assert_close(memories, state, rtol=0, atol=0)
        logits, state = plain(tokens, memories)
        if len(calls) > 1:
            expected.append(sample(logits[0, -1], 2.0, again))
        return logits, state

    monkeypatch.setattr(model, "forward", forward)
    found = list(generate(model, [1, 2, 3, 4, 5, 6], 6, temperature=2.0, generator=drawn(2)))
    assert calls == [[1, 2, 3, 4, 5], [6], *([token] for token in found[:-1])]
    assert found == expected


@pytest.mark.parametrize("name", ["gpt2", "sparse-fixed"])
def test_a_text_beyond_the_capacity_of_the_cache_raises_value_error(name: str) -> None:
    model = entry_of(name).build()
    with pytest.raises(ValueError, match="count must be at most 12"):
        model(tokens(13), cache=model.new_cache(3))


# Greedy targets of an encoder-decoder

both_models = pytest.mark.parametrize("entry", ENCODER_DECODERS, ids=str)
cached_or_not = pytest.mark.parametrize("cached", [True, False])
OPTIONS = {"vocabulary": VOCABULARY, "begin": 2, "end": 0, "most": 6}


def target_lengths(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the number of target tokens in each call of `decode`."""
    lengths: list[int] = []
    plain = model.decode

    def decode(target: Tensor, *arguments: Any, **options: Any) -> Any:
        lengths.append(target.shape[1])
        return plain(target, *arguments, **options)

    monkeypatch.setattr(model, "decode", decode)
    return lengths


@both_models
@cached_or_not
def test_targets_grow_by_one_token_a_step(
    entry: Any, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = entry.build()
    lengths = target_lengths(model, monkeypatch)
    whole = model.greedy_targets(tokens(), LENGTHS, **OPTIONS, cached=cached)
    assert lengths == ([1] * 6 if cached else [1, 2, 3, 4, 5, 6])
    for most in (1, 4):
        part = model.greedy_targets(tokens(), LENGTHS, **OPTIONS | {"most": most}, cached=cached)
        assert part == [target[:most] for target in whole]
    assert model.greedy_targets(tokens()[:0], LENGTHS[:0], **OPTIONS, cached=cached) == []


@both_models
@cached_or_not
def test_decoding_stops_when_all_targets_have_ended(
    entry: Any, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = entry.build()
    with torch.no_grad():
        first = model(tokens()[:1], torch.tensor([[2]]))[0, -1].argmax()
    lengths = target_lengths(model, monkeypatch)
    options = OPTIONS | {"end": int(first)}
    assert model.greedy_targets(tokens()[:1], **options, cached=cached) == [[]]
    assert len(lengths) == 1


@both_models
@cached_or_not
def test_source_is_projected_once(
    entry: Any, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = entry.build(), []
    for block in model.decoder_blocks:
        plain = block.memory_attention.keys_and_values

        def record(source: Tensor, plain: Any = plain) -> Any:
            calls.append(source.shape[:2])
            return plain(source)

        monkeypatch.setattr(block.memory_attention, "keys_and_values", record)
    model.greedy_targets(tokens(), LENGTHS, **OPTIONS, cached=cached)
    assert calls == [(3, 9)] * len(model.decoder_blocks)


@both_models
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"most": 0}, "most must be a whole number of at least 1, got 0"),
        ({"begin": VOCABULARY}, "begin must be a token from 0 to 16, got 17"),
        ({"end": -1}, "end must be a token from 0 to 16, got -1"),
        ({"source_lengths": LENGTHS + 1}, "source_lengths must be from 0 to 9, .* got 10 at"),
    ],
)
def test_invalid_options_raise_value_error_and_restore_the_mode(
    entry: Any, changes: dict[str, Any], message: str
) -> None:
    model = entry.build()
    with pytest.raises(ValueError, match=message):
        model.greedy_targets(tokens(), **OPTIONS | changes)
    assert model.training
    model.eval().greedy_targets(tokens(), **OPTIONS | {"most": 1})
    assert not model.training
