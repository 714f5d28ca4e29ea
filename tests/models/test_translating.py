"""Greedy translation: the cache, batching, and the end of a translation."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import get_args

import pytest
import torch
from torch import Tensor

from transformer_kernels.models import Translator, TranslatorConfig
from transformer_kernels.nn import AttnImplementation, DecoderBlock, KVCache, Norm
from transformer_kernels.training.losses import smoothed_cross_entropy

CONFIG = TranslatorConfig(
    source_vocabulary=13,
    target_vocabulary=11,
    shared=False,
    layers=2,
    width=12,
    hidden=20,
    heads=2,
    context=9,
    dropout=0.0,
)
IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)
PAD, BEGIN, END = 0, 1, 2
LENGTHS = torch.tensor([5, 1, 3, 4])
SOURCE = torch.randint(13, (4, 5), generator=torch.Generator().manual_seed(1))
TRANSLATIONS = [[3, 4, 3, 5, 6, 10, 4], [], [7, 7, 7, 9], [5, 8]]
"""Target of each source, which the model is trained to reproduce"""


@cache
def trained(order: Norm) -> dict[str, Tensor]:
    """Weights of a model overfitted to `TRANSLATIONS`."""
    torch.manual_seed(0)
    translator = Translator(replace(CONFIG, norm=order)).double()
    optimizer = torch.optim.Adam(translator.parameters(), lr=1e-2)
    rows = [[BEGIN, *text, END] + [PAD] * (7 - len(text)) for text in TRANSLATIONS]
    target = torch.tensor(rows)
    for _ in range(100):
        logits = translator(SOURCE, target[:, :-1], LENGTHS)
        total, count = smoothed_cross_entropy(logits, target[:, 1:], smoothing=0.0, pad=PAD)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    assert (total / count).item() < 0.1
    return translator.state_dict()


def model(
    order: Norm = "post", attn_implementation: AttnImplementation = "fused", dropout: float = 0.0
) -> Translator:
    config = replace(CONFIG, norm=order, dropout=dropout)
    translator = Translator(config, attn_implementation=attn_implementation).double()
    translator.load_state_dict(trained(order))
    return translator


def by_hand(translator: Translator, source: Tensor, end: int, most: int = 9) -> list[int]:
    """Greedy translation of one source, from `forward` on the whole text at each step."""
    translator.eval()
    text = [BEGIN]
    while len(text) <= most:
        text.append(int(translator(source[None], torch.tensor([text]))[0, -1].argmax()))
        if text[-1] == end:
            return text[1:-1]
    return text[1:]


@pytest.mark.parametrize("order", get_args(Norm))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_trained_translations_are_reproduced(
    implementation: AttnImplementation, order: Norm
) -> None:
    translator = model(order, implementation)
    for cached in (True, False):
        generated = translator.translate(
            SOURCE, LENGTHS, begin=BEGIN, end=END, most=9, cached=cached
        )
        assert generated == TRANSLATIONS


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_cache_and_batching_do_not_change_the_tokens(implementation: AttnImplementation) -> None:
    """For any end token, including translations that continue beyond the trained ones."""
    translator = model(attn_implementation=implementation)
    for end in (3, 4, 9):
        expected = [
            by_hand(translator, source[:length], end)
            for source, length in zip(SOURCE, LENGTHS.tolist(), strict=True)
        ]
        for cached in (True, False):
            generated = translator.translate(
                SOURCE, LENGTHS, begin=BEGIN, end=end, most=9, cached=cached
            )
            assert generated == expected
        for b, length in enumerate(LENGTHS.tolist()):
            source = SOURCE[b : b + 1, :length]
            assert translator.translate(source, begin=BEGIN, end=end, most=9) == expected[b : b + 1]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_autocast_does_not_change_the_translations(implementation: AttnImplementation) -> None:
    translator = model(attn_implementation=implementation).float()
    for cached in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            generated = translator.translate(
                SOURCE, LENGTHS, begin=BEGIN, end=END, most=9, cached=cached
            )
        assert generated == TRANSLATIONS


def test_shared_vocabularies_translate() -> None:
    torch.manual_seed(0)
    translator = Translator(replace(CONFIG, shared=True, target_vocabulary=13)).double()
    expected = [by_hand(translator, source, 3) for source in SOURCE]
    assert translator.translate(SOURCE, begin=BEGIN, end=3, most=9) == expected


def test_translations_have_at_most_the_given_number_of_tokens() -> None:
    translator = model()
    whole = translator.translate(SOURCE, LENGTHS, begin=BEGIN, end=PAD, most=9)
    for cached in (True, False):
        for most in (1, 4):
            part = translator.translate(
                SOURCE, LENGTHS, begin=BEGIN, end=PAD, most=most, cached=cached
            )
            assert part == [text[:most] for text in whole]


def steps(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the number of target tokens in each decoder call."""
    input_lengths: list[int] = []
    plain = translator.decode

    def decode(target: Tensor, memory: object, *, cache: KVCache | None = None) -> Tensor:
        input_lengths.append(target.shape[1])
        return plain(target, memory, cache=cache)  # type: ignore[arg-type]

    monkeypatch.setattr(translator, "decode", decode)
    return input_lengths


def test_with_a_cache_each_step_reads_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    translator = model()
    input_lengths = steps(translator, monkeypatch)
    translator.translate(SOURCE, LENGTHS, begin=BEGIN, end=PAD, most=6)
    assert input_lengths == [1] * 6
    input_lengths.clear()
    translator.translate(SOURCE, LENGTHS, begin=BEGIN, end=PAD, most=6, cached=False)
    assert input_lengths == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("cached", [True, False])
def test_decoding_stops_when_all_translations_have_ended(
    cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = model()
    input_lengths = steps(translator, monkeypatch)
    translator.translate(SOURCE, LENGTHS, begin=BEGIN, end=END, most=9, cached=cached)
    assert len(input_lengths) == len(TRANSLATIONS[0]) + 1


@pytest.mark.parametrize("cached", [True, False])
def test_source_is_projected_once(cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    translator = model()
    calls = []
    for block in translator.decoder:
        assert isinstance(block, DecoderBlock)
        plain = block.memory_attention.keys_and_values

        def record(source: Tensor, plain: object = plain) -> tuple[Tensor, Tensor]:
            calls.append(source.shape)
            k, v = plain(source)  # type: ignore[operator]
            return k, v

        monkeypatch.setattr(block.memory_attention, "keys_and_values", record)
    translator.translate(SOURCE, LENGTHS, begin=BEGIN, end=PAD, most=6, cached=cached)
    assert calls == [(4, 5, 12)] * 2


def test_dropout_is_off_and_the_training_mode_is_restored() -> None:
    translator = model(dropout=0.5)
    assert translator.training
    first, second = (
        translator.translate(SOURCE, LENGTHS, begin=BEGIN, end=PAD, most=9) for _ in range(2)
    )
    assert first == second
    assert translator.training
    with pytest.raises(ValueError, match="source_lengths must be"):
        translator.translate(SOURCE, LENGTHS + 5, begin=BEGIN, end=PAD, most=9)
    assert translator.training
    translator.eval()
    translator.translate(SOURCE, LENGTHS, begin=BEGIN, end=PAD, most=1)
    assert not translator.training


def test_empty_batch_has_no_translations() -> None:
    assert model().translate(SOURCE[:0], LENGTHS[:0], begin=BEGIN, end=PAD, most=9) == []


@pytest.mark.parametrize("cached", [True, False])
def test_source_of_length_0_is_translated(cached: bool) -> None:
    lengths = torch.tensor([0, 5, 5, 5])
    translator = model()
    generated = translator.translate(SOURCE, lengths, begin=BEGIN, end=PAD, most=9, cached=cached)
    assert generated[0] == by_hand(translator, SOURCE[0, :0], 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"most": 0}, "most must be a whole number of at least 1, got 0"),
        ({"most": 10}, "most must be at most 9, the context, got 10"),
        ({"begin": 11}, "begin must be a token from 0 to 10, got 11"),
        ({"end": -1}, "end must be a token from 0 to 10, got -1"),
    ],
)
def test_invalid_arguments_raise_value_error(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model().translate(SOURCE, **{"begin": 1, "end": 2, "most": 5} | changes)  # type: ignore[arg-type]
