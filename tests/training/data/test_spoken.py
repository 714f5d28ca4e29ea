"""Numbers and dates as pairs."""

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
    """Checks a pair, and gives the number or the date that it is of."""
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


def test_every_answer_is_right_and_every_question_is_asked_both_ways(pairs: Pairs) -> None:
    for part in ("train", "validation"):
        asked = [figures(pair) for pair in read(pairs, part)]
        assert len(asked) == 2 * len(set(asked))


def test_no_number_or_date_is_on_both_sides(pairs: Pairs) -> None:
    trained, held_out = (
        {figures(pair) for pair in read(pairs, part)} for part in ("train", "validation")
    )
    assert not trained & held_out
    for given in held_out:
        assert is_held_out(given)
    assert trained >= {str(number) for number in range(100)}
    count = len(trained) + len(held_out) - 100
    assert abs(len(held_out) - 0.1 * count) < 4 * (0.09 * count) ** 0.5


def test_numbers_have_all_lengths(pairs: Pairs) -> None:
    numbers = {figures(pair) for pair in read(pairs, "train")}
    digits = [len(given.replace(",", "")) for given in numbers if "-" not in given]
    assert [digits.count(length) for length in (1, 2)] == [10, 90]
    assert all(digits.count(length) > 150 for length in (3, 4, 5, 6))
    assert len(numbers) - len(digits) > 850


def test_tokens_are_bytes_and_nothing_is_left_out(pairs: Pairs) -> None:
    assert pairs.tokens == Tokens(special=True)
    assert pairs.left_out == 0
    assert pairs.source is None
    batch = pairs.draw(64, torch.Generator())
    assert batch["source"].shape[1] <= 96
    assert batch["target"].shape[1] <= 96


def test_longer_lists_hold_out_the_same() -> None:
    few, many = spoken_pairs(300, 50), spoken_pairs(2000, 2000)
    assert not set(read(few, "train")) & set(read(many, "validation"))
    assert not set(read(few, "validation")) & set(read(many, "train"))


@pytest.mark.parametrize("name", ["numbers", "dates"])
def test_counts_are_at_least_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got 0"):
        spoken_pairs(**{name: 0})
