"""Pairs whose answer can be checked: numbers and dates, in figures and in English words."""

from __future__ import annotations

import datetime
import hashlib

import torch

from transformer_kernels.nn.options import check_positive
from transformer_kernels.training.data.pairs import Pairs, TextPair, pair_texts
from transformer_kernels.training.data.tokens import Tokens
from transformer_kernels.training.data.words import date_to_words, number_to_words

TO_WORDS = "words: "
TO_FIGURES = "figures: "
"""What a source begins with: what is asked for."""

DIGITS = 6
"""Numbers have up to so many."""

FIRST_DAY = datetime.date(1900, 1, 1)
LAST_DAY = datetime.date(2099, 12, 31)

_ALWAYS_TRAINED = 100
"""Numbers below this are words that longer ones are made of: none is held out."""


def spoken_pairs(numbers: int = 10_000, dates: int = 10_000) -> Pairs:
    """Four pairs of a number and of a date, for up to `numbers` numbers and `dates` dates.

        words: 1,204            one thousand two hundred and four
        figures: one thousand two hundred and four              1,204
        words: 2024-02-29       the twenty-ninth of February, twenty twenty-four
        figures: the twenty-ninth of February, twenty twenty-four       2024-02-29

    Numbers are drawn with 1 to 6 digits, each as often, the same one once, and with all below a
    hundred; dates lie in 1900 to 2099. About a tenth, chosen by a hash of the figures, is held out,
    in both directions; of the numbers below a hundred, none. Tokens are bytes. The pairs are always
    the same.
    """
    check_positive("numbers", numbers)
    check_positive("dates", dates)
    train: list[TextPair] = []
    validation: list[TextPair] = []
    for number in _some_numbers(numbers):
        held_out = number >= _ALWAYS_TRAINED and is_held_out(f"{number:,}")
        part = validation if held_out else train
        part.extend(both_ways(f"{number:,}", number_to_words(number)))
    for date in _some_dates(dates):
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
    """The two pairs of a number or a date."""
    return (TO_WORDS + figures, words), (TO_FIGURES + words, figures)


def is_held_out(figures: str) -> bool:
    """Whether a number, or a date, is one of the tenth that is not trained on."""
    return int.from_bytes(hashlib.sha256(figures.encode()).digest()[:8]) % 10 == 0


def _some_numbers(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    digits = torch.randint(1, DIGITS + 1, (count,), generator=generator)
    shares = torch.rand(count, dtype=torch.float64, generator=generator)
    least = 10.0 ** (digits - 1)
    drawn = (least + shares * 9 * least).long()
    return sorted({*range(min(count, _ALWAYS_TRAINED)), *drawn.tolist()})


def _some_dates(count: int) -> list[datetime.date]:
    generator = torch.Generator().manual_seed(1)
    days = (LAST_DAY - FIRST_DAY).days + 1
    drawn = torch.randperm(days, generator=generator)[:count]
    return [FIRST_DAY + datetime.timedelta(days=day) for day in sorted(drawn.tolist())]
