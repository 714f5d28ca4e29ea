"""Tests of the conversion of numbers and dates to words, and back."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiers import each
from transformer_kernels.training.data import (
    date_to_words,
    number_to_words,
    words_to_date,
    words_to_number,
)
from transformer_kernels.training.data.words import LARGEST, year_to_words

DATES = st.dates(datetime.date(1000, 1, 1), datetime.date(9999, 12, 31))
WORDS = st.sampled_from(["one", "ten", "twenty", "hundred", "thousand", "and"])


@given(st.integers(0, LARGEST) | st.integers(0, 10**6))
def test_numbers_round_trip(number: int) -> None:
    assert words_to_number(number_to_words(number)) == number


def test_small_numbers_round_trip_and_are_distinct() -> None:
    words = [number_to_words(number) for number in range(12_000)]
    assert len(set(words)) == 12_000
    assert [words_to_number(text) for text in words] == list(range(12_000))


@each(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (20, "twenty"),
        (40, "forty"),
        (99, "ninety-nine"),
        (100, "one hundred"),
        (101, "one hundred and one"),
        (118, "one hundred and eighteen"),
        (1000, "one thousand"),
        (1204, "one thousand two hundred and four"),
        (1_004, "one thousand and four"),
        (10_200, "ten thousand two hundred"),
        (205_017, "two hundred and five thousand and seventeen"),
        (1_000_000, "one million"),
        (2_000_300_001, "two billion three hundred thousand and one"),
        (
            LARGEST,
            "nine hundred and ninety-nine billion nine hundred and ninety-nine million "
            "nine hundred and ninety-nine thousand nine hundred and ninety-nine",
        ),
    ],
)
def test_numbers_in_words(number: int, words: str) -> None:
    assert number_to_words(number) == words
    assert words_to_number(words) == number


@each(
    "words",
    [
        "",
        "and",
        "hundred",
        "twenty one",
        "Twenty",
        " twenty",
        "twenty  one",
        "one hundred one",
        "one thousand one",
        "zero hundred",
        "ten hundred",
        "twenty-zero",
        "twenty-eleven",
        "one million million",
        "one thousand thousand thousand thousand",
        "one thousand million",
        "seven eight",
        "12",
        "one hundred and \u00e9",
    ],
)
def test_invalid_number_words_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match="words must be a number such as") as refused:
        words_to_number(words)
    assert repr(words) in str(refused.value)


@given(st.text(max_size=30) | st.lists(WORDS).map(" ".join))
def test_arbitrary_text_is_refused_or_round_trips(words: str) -> None:
    try:
        number = words_to_number(words)
    except ValueError:
        return
    assert number_to_words(number) == words


@pytest.mark.parametrize("number", [-1, LARGEST + 1])
def test_number_out_of_range_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"at most 999,999,999,999, got {number:,}"):
        number_to_words(number)


@given(DATES)
def test_dates_round_trip(date: datetime.date) -> None:
    assert words_to_date(date_to_words(date)) == date


def test_all_days_and_years_are_distinct() -> None:
    days = [datetime.date(2024, 1, 1) + datetime.timedelta(days=day) for day in range(366)]
    assert [words_to_date(date_to_words(day)) for day in days] == days
    assert len({year_to_words(year) for year in range(1000, 10_000)}) == 9000


@each(
    ("date", "words"),
    [
        ("2024-02-29", "the twenty-ninth of February, twenty twenty-four"),
        ("2000-01-01", "the first of January, two thousand"),
        ("2005-05-02", "the second of May, two thousand and five"),
        ("2010-08-03", "the third of August, twenty ten"),
        ("1900-12-12", "the twelfth of December, nineteen hundred"),
        ("1905-06-20", "the twentieth of June, nineteen oh five"),
        ("1984-07-31", "the thirty-first of July, nineteen eighty-four"),
        ("2099-09-08", "the eighth of September, twenty ninety-nine"),
        ("2100-03-05", "the fifth of March, twenty-one hundred"),
        ("1000-04-10", "the tenth of April, one thousand"),
        ("3009-11-11", "the eleventh of November, three thousand and nine"),
        ("1066-10-14", "the fourteenth of October, ten sixty-six"),
    ],
)
def test_dates_in_words(date: str, words: str) -> None:
    assert date_to_words(datetime.date.fromisoformat(date)) == words
    assert words_to_date(words).isoformat() == date


@each(
    "words",
    [
        "",
        "the twenty-ninth of February, twenty twenty-three",
        "the thirty-first of April, nineteen hundred",
        "twenty-ninth of February, twenty twenty-four",
        "the the first of May, two thousand",
        "the first of may, two thousand",
        "the first of May two thousand",
        "the first of May, two thousand ",
        "the first of May, twenty hundred",
        "the zeroth of May, two thousand",
        "the first of of May, two thousand",
        "the \u00bd of May, two thousand",
    ],
)
def test_invalid_date_words_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match="words must be a date such as") as refused:
        words_to_date(words)
    assert repr(words) in str(refused.value)


@pytest.mark.parametrize("year", [999, 10_000])
def test_year_out_of_range_is_refused(year: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1000 and at most 9999, got {year}"):
        year_to_words(year)
