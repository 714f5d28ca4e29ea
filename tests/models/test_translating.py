"""Greedy translation: with and without a cache, in a batch and one by one, and where it ends."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import get_args

import pytest
import torch
from torch import Tensor

from transformer_kernels.models import Translator, TranslatorConfig
from transformer_kernels.nn import AttnImplementation, DecoderBlock, KeyValueCache, Norm
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
PATHS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)
PAD, BEGIN, END = 0, 1, 2
LENGTHS = torch.tensor([5, 1, 3, 4])
SOURCE = torch.randint(13, (4, 5), generator=torch.Generator().manual_seed(1))
TRANSLATIONS = [[3, 4, 3, 5, 6, 10, 4], [], [7, 7, 7, 9], [5, 8]]
"""What the model learns to say of each."""


@cache
def learnt(order: Norm) -> dict[str, Tensor]:
    """The weights of a model that knows the translations by heart."""
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
    translator.load_state_dict(learnt(order))
    return translator


def by_hand(translator: Translator, source: Tensor, end: int, most: int = 9) -> list[int]:
    """Of one source, from the logits of the whole model."""
    translator.eval()
    text = [BEGIN]
    while len(text) <= most:
        text.append(int(translator(source[None], torch.tensor([text]))[0, -1].argmax()))
        if text[-1] == end:
            return text[1:-1]
    return text[1:]


@pytest.mark.parametrize("order", get_args(Norm))
@pytest.mark.parametrize("path", PATHS)
def test_it_says_what_it_has_learnt(path: AttnImplementation, order: Norm) -> None:
    translator = model(order, path)
    for cached in (True, False):
        written = translator.translate(SOURCE, LENGTHS, begin=BEGIN, end=END, most=9, cached=cached)
        assert written == TRANSLATIONS


@pytest.mark.parametrize("path", PATHS)
def test_a_cache_and_a_batch_change_no_token(path: AttnImplementation) -> None:
    """Whatever token ends a text, also where it goes on beyond what it has learnt."""
    translator = model(attn_implementation=path)
    for end in (3, 4, 9):
        expected = [
            by_hand(translator, source[:length], end)
            for source, length in zip(SOURCE, LENGTHS.tolist(), strict=True)
        ]
        for cached in (True, False):
            written = translator.translate(
                SOURCE, LENGTHS, begin=BEGIN, end=end, most=9, cached=cached
            )
            assert written == expected
        for b, length in enumerate(LENGTHS.tolist()):
            source = SOURCE[b : b + 1, :length]
            assert translator.translate(source, begin=BEGIN, end=end, most=9) == expected[b : b + 1]


@pytest.mark.parametrize("path", PATHS)
def test_it_says_the_same_under_autocast(path: AttnImplementation) -> None:
    translator = model(attn_implementation=path).float()
    for cached in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            written = translator.translate(
                SOURCE, LENGTHS, begin=BEGIN, end=END, most=9, cached=cached
            )
        assert written == TRANSLATIONS


def test_shared_vocabularies_translate_too() -> None:
    torch.manual_seed(0)
    translator = Translator(replace(CONFIG, shared=True, target_vocabulary=13)).double()
    expected = [by_hand(translator, source, 3) for source in SOURCE]
    assert translator.translate(SOURCE, begin=BEGIN, end=3, most=9) == expected


def test_a_translation_has_at_most_so_many_tokens() -> None:
    translator = model()
    whole = translator.translate(SOURCE, LENGTHS, begin=BEGIN, end=PAD, most=9)
    for cached in (True, False):
        for most in (1, 4):
            part = translator.translate(
                SOURCE, LENGTHS, begin=BEGIN, end=PAD, most=most, cached=cached
            )
            assert part == [text[:most] for text in whole]


def steps(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of what the decoder will be shown."""
    shown: list[int] = []
    plain = translator._decode

    def decode(target: Tensor, memory: object, cache: KeyValueCache | None = None) -> Tensor:
        shown.append(target.shape[1])
        return plain(target, memory, cache)  # type: ignore[arg-type]

    monkeypatch.setattr(translator, "_decode", decode)
    return shown


def test_with_a_cache_each_step_reads_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    translator = model()
    shown = steps(translator, monkeypatch)
    translator.translate(SOURCE, LENGTHS, begin=BEGIN, end=PAD, most=6)
    assert shown == [1] * 6
    shown.clear()
    translator.translate(SOURCE, LENGTHS, begin=BEGIN, end=PAD, most=6, cached=False)
    assert shown == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("cached", [True, False])
def test_it_stops_when_all_have_ended(cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    translator = model()
    shown = steps(translator, monkeypatch)
    translator.translate(SOURCE, LENGTHS, begin=BEGIN, end=END, most=9, cached=cached)
    assert len(shown) == len(TRANSLATIONS[0]) + 1


@pytest.mark.parametrize("cached", [True, False])
def test_the_source_is_read_once(cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_dropout_is_off_and_the_mode_stays() -> None:
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


def test_no_sources_have_no_translations() -> None:
    assert model().translate(SOURCE[:0], LENGTHS[:0], begin=BEGIN, end=PAD, most=9) == []


@pytest.mark.parametrize("cached", [True, False])
def test_a_source_of_length_0_is_translated(cached: bool) -> None:
    lengths = torch.tensor([0, 5, 5, 5])
    translator = model()
    written = translator.translate(SOURCE, lengths, begin=BEGIN, end=PAD, most=9, cached=cached)
    assert written[0] == by_hand(translator, SOURCE[0, :0], 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"most": 0}, "most must be a whole number of at least 1, got 0"),
        ({"most": 10}, "most must be at most 9, the context, got 10"),
        ({"begin": 11}, "begin must be a token from 0 to 10, got 11"),
        ({"end": -1}, "end must be a token from 0 to 10, got -1"),
    ],
)
def test_wrong_requests_are_named(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model().translate(SOURCE, **{"begin": 1, "end": 2, "most": 5} | changes)  # type: ignore[arg-type]
