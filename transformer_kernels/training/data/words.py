"""Conversion of numbers and dates to English words, and back."""

from __future__ import annotations

import datetime
from functools import cache

LARGEST = 10**12 - 1
"""The largest supported number"""

_BELOW_TWENTY = (
    *("zero", "one", "two", "three", "four"),
    *("five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen"),
    *("fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_GROUPS = (("billion", 10**9), ("million", 10**6), ("thousand", 10**3))
_VALUES = {word: value for value, word in enumerate(_BELOW_TWENTY)} | {
    word: 10 * tens for tens, word in enumerate(_TENS, 2)
}
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_IRREGULAR = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}


def number_to_words(number: int) -> str:
    """Converts a number to words: 1204 is "one thousand two hundred and four".

    "and" precedes the part below a hundred, unless that is the whole number.

    Raises:
        ValueError: unless 0 <= number <= LARGEST.
    """
    if not 0 <= number <= LARGEST:
        raise ValueError(f"number must be at least 0 and at most {LARGEST:,}, got {number:,}")
    parts: list[str] = []
    rest = number
    for name, size in _GROUPS:
        if rest >= size:
            parts.append(f"{_below_thousand(rest // size)} {name}")
            rest %= size
    if parts and 0 < rest < 100:
        parts.append(f"and {_below_hundred(rest)}")
    elif rest or not parts:
        parts.append(_below_thousand(rest))
    return " ".join(parts)


def words_to_number(words: str) -> int:
    """Inverse of `number_to_words`; ValueError for any other text."""
    total = group = 0
    for word in words.replace("-", " ").split():
        size = dict(_GROUPS).get(word)
        if size is not None:
            total, group = total + group * size, 0
        elif word == "hundred":
            group *= 100
        elif word != "and":
            group += _VALUES.get(word, 0)
    number = total + group
    if not 0 <= number <= LARGEST or number_to_words(number) != words:
        raise ValueError(
            f'words must be a number such as "one thousand two hundred and four", got {words!r}'
        )
    return number


def date_to_words(date: datetime.date) -> str:
    """Converts a date: 2024-02-29 is "the twenty-ninth of February, twenty twenty-four"."""
    day = _ordinal(date.day)
    return f"the {day} of {_MONTHS[date.month - 1]}, {year_to_words(date.year)}"


def words_to_date(words: str) -> datetime.date:
    """Inverse of `date_to_words`; ValueError for any other text."""
    day, _, rest = words.removeprefix("the ").partition(" of ")
    month, _, year = rest.partition(", ")
    try:
        date = datetime.date(_years()[year], _MONTHS.index(month) + 1, _days()[day])
    except (KeyError, ValueError):
        date = None
    if date is None or date_to_words(date) != words:
        raise ValueError(
            'words must be a date such as "the twenty-ninth of February, twenty twenty-four", '
            f"got {words!r}"
        )
    return date


def year_to_words(year: int) -> str:
    """Converts a year: "nineteen hundred", "nineteen oh five", "nineteen eighty-four".

    The first ten years of a millennium are numbers: "two thousand", "two thousand and five".

    Raises:
        ValueError: unless 1000 <= year <= 9999.
    """
    if not 1000 <= year <= 9999:
        raise ValueError(f"year must be at least 1000 and at most 9999, got {year}")
    century, rest = divmod(year, 100)
    if century % 10 == 0 and rest < 10:
        return number_to_words(year)
    if rest == 0:
        return f"{_below_hundred(century)} hundred"
    if rest < 10:
        return f"{_below_hundred(century)} oh {_below_hundred(rest)}"
    return f"{_below_hundred(century)} {_below_hundred(rest)}"


def _below_hundred(number: int) -> str:
    if number < 20:
        return _BELOW_TWENTY[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_BELOW_TWENTY[ones]}" if ones else "")


def _below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    if not hundreds:
        return _below_hundred(rest)
    words = f"{_below_hundred(hundreds)} hundred"
    return f"{words} and {_below_hundred(rest)}" if rest else words


def _ordinal(number: int) -> str:
    tens, dash, last = _below_hundred(number).rpartition("-")
    if last in _IRREGULAR:
        return tens + dash + _IRREGULAR[last]
    return tens + dash + (f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th")


@cache
def _years() -> dict[str, int]:
    return {year_to_words(year): year for year in range(1000, 10_000)}


@cache
def _days() -> dict[str, int]:
    return {_ordinal(day): day for day in range(1, 32)}
