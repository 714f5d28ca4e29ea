"""Tests of numbers and dates as text pairs."""

from __future__ import annotations

import datetime

import pytest
import torch

from transformer_kernels.training.data import (
    Pairs,
    Tokens,
    date_to_words,
    number_to_words,
    spoken_pairs,
    words_to_date,
    words_to_number,
)
from transformer_kernels.training.data.spoken import is_held_out


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    return spoken_pairs(1500, 1000)


def read(pairs: Pairs, part: str) -> list[tuple[str, str]]:
    sources, targets = getattr(pairs, part)
    return [
        (pairs.tokens.decode(sources[row]).decode(), pairs.tokens.decode(targets[row]).decode())
        for row in range(len(sources))
    ]


def figures(pair: tuple[str, str]) -> str:
    """Checks a pair, and returns its number or date in figures."""
    source, target = pair
    asked, question = source.split(": ", 1)
    given, words = (question, target) if asked == "words" else (target, question)
    assert asked in ("words", "figures")
    if "-" in given:
        date = datetime.date.fromisoformat(given)
        assert date_to_words(date) == words
        assert words_to_date(words) == date
        assert 1900 <= date.year <= 2099
    else:
        number = int(given.replace(",", ""))
        assert given == f"{number:,}"
        assert number_to_words(number) == words
        assert words_to_number(words) == number < 10**6
    return given


def test_every_pair_is_correct_and_present_in_both_directions(pairs: Pairs) -> None:
    for part in ("train", "validation"):
        asked = [figures(pair) for pair in read(pairs, part)]
        assert len(asked) == 2 * len(set(asked))


def test_no_number_or_date_is_in_training_and_validation(pairs: Pairs) -> None:
    trained, held_out = (
        {figures(pair) for pair in read(pairs, part)} for part in ("train", "validation")
    )
    assert not trained & held_out
    for given in held_out:
        assert is_held_out(given)
    assert trained >= {str(number) for number in range(100)}
    count = len(trained) + len(held_out) - 100
    assert abs(len(held_out) - 0.1 * count) < 4 * (0.09 * count) ** 0.5


def test_numbers_have_one_to_six_digits(pairs: Pairs) -> None:
    numbers = {figures(pair) for pair in read(pairs, "train")}
    digits = [len(given.replace(",", "")) for given in numbers if "-" not in given]
    assert [digits.count(length) for length in (1, 2)] == [10, 90]
    assert all(digits.count(length) > 150 for length in (3, 4, 5, 6))
    assert len(numbers) - len(digits) > 850


def test_tokens_are_bytes_and_no_pair_is_skipped(pairs: Pairs) -> None:
    assert pairs.tokens == Tokens(special=True)
    assert pairs.skipped == 0
    assert pairs.source is None
    batch = pairs.draw(64, torch.Generator())
    assert batch["source"].shape[1] <= 96
    assert batch["target"].shape[1] <= 96


def test_held_out_pairs_do_not_depend_on_the_counts() -> None:
    few, many = spoken_pairs(300, 50), spoken_pairs(2000, 2000)
    assert not set(read(few, "train")) & set(read(many, "validation"))
    assert not set(read(few, "validation")) & set(read(many, "train"))


@pytest.mark.parametrize("name", ["numbers", "dates"])
def test_count_below_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got 0"):
        spoken_pairs(**{name: 0})
