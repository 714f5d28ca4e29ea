"""Text pairs with checkable answers: numbers and dates in figures and in English words."""

from __future__ import annotations

import datetime
import hashlib

import torch

from ...nn.options import check_positive
from .pairs import Pairs, TextPair, pair_texts
from .tokens import Tokens
from .words import date_to_words, number_to_words

TO_WORDS = "words: "
TO_FIGURES = "figures: "
"""Prefix of a source: the requested form of the target"""

DIGITS = 6
"""Maximum number of digits of a number"""

FIRST_DAY = datetime.date(1900, 1, 1)
LAST_DAY = datetime.date(2099, 12, 31)

_ALWAYS_TRAINED = 100
"""Numbers below this are never held out, because longer numbers are composed of their words."""


def spoken_pairs(numbers: int = 10_000, dates: int = 10_000) -> Pairs:
    """Makes a dataset of numbers and dates, each in both directions.

        words: 1,204            one thousand two hundred and four
        figures: one thousand two hundred and four              1,204
        words: 2024-02-29       the twenty-ninth of February, twenty twenty-four
        figures: the twenty-ninth of February, twenty twenty-four       2024-02-29

    Numbers have 1 to 6 digits with equal probability, without duplicates, and include all below a
    hundred. Dates are in 1900 to 2099. About a tenth, selected by a hash of the figures, is held
    out in both directions, but no number below a hundred. Tokens are bytes. The pairs are the same
    at every call.

    Args:
        numbers: how many numbers to draw, at least 1.
        dates: how many dates to draw, at least 1.

    Raises:
        ValueError: a count is below 1.
    """
    check_positive("numbers", numbers)
    check_positive("dates", dates)
    train: list[TextPair] = []
    validation: list[TextPair] = []
    for number in _draw_numbers(numbers):
        held_out = number >= _ALWAYS_TRAINED and is_held_out(f"{number:,}")
        part = validation if held_out else train
        part.extend(both_ways(f"{number:,}", number_to_words(number)))
    for date in _draw_dates(dates):
        part = validation if is_held_out(date.isoformat()) else train
        part.extend(both_ways(date.isoformat(), date_to_words(date)))
    return pair_texts(
        train,
        validation,
        tokens=Tokens(special=True),
        longest=128,
        name="numbers and dates in words",
    )


def both_ways(figures: str, words: str) -> tuple[TextPair, TextPair]:
    """Both pairs of a number or a date: figures to words, and words to figures."""
    return (TO_WORDS + figures, words), (TO_FIGURES + words, figures)


def is_held_out(figures: str) -> bool:
    """True if a number or a date belongs to the held-out tenth."""
    return int.from_bytes(hashlib.sha256(figures.encode()).digest()[:8]) % 10 == 0


def _draw_numbers(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    digits = torch.randint(1, DIGITS + 1, (count,), generator=generator)
    shares = torch.rand(count, dtype=torch.float64, generator=generator)
    smallest = 10.0 ** (digits - 1)
    drawn = (smallest + shares * 9 * smallest).long()
    return sorted({*range(min(count, _ALWAYS_TRAINED)), *drawn.tolist()})


def _draw_dates(count: int) -> list[datetime.date]:
    generator = torch.Generator().manual_seed(1)
    days = (LAST_DAY - FIRST_DAY).days + 1
    drawn = torch.randperm(days, generator=generator)[:count]
    return [FIRST_DAY + datetime.timedelta(days=day) for day in sorted(drawn.tolist())]
