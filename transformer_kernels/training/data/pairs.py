"""Text pairs for translation: files of two languages, or numbers and dates in words."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ...common.optional_deps import require
from ...nn.options import check_positive
from .dataset import Batch, RaggedTokens, digest_of, evenly_spaced, read_lines
from .tokens import BEGIN, END, Tokens, train_tokens

TextPair = tuple[str, str]
"""Source text and target text"""

TO_WORDS = "words: "
TO_FIGURES = "figures: "
"""Prefix of a source: the requested form of the target"""

DIGITS = 6
"""Maximum number of digits of a number"""

FIRST_DAY = datetime.date(1900, 1, 1)
LAST_DAY = datetime.date(2099, 12, 31)

_ALWAYS_TRAINED = 100
"""Numbers below this are never held out, because longer numbers are composed of their words."""

_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)

_BEGIN, _END = torch.tensor([BEGIN]), torch.tensor([END])


@dataclass(frozen=True)
class Pairs:
    """Dataset of source and target texts with a shared tokenizer.

    {"source": (B, S), "source_lengths": (B,), "target": (B, T), "target_lengths": (B,)}.

    A target is BEGIN, its text and END, all included in its length. A source is only its text.
    """

    name: str
    source: str | None
    digest: str
    tokens: Tokens
    train: tuple[RaggedTokens, RaggedTokens]
    """Sources and targets, one row of each per pair"""
    validation: tuple[RaggedTokens, RaggedTokens]
    skipped: int
    """Number of pairs that were skipped because a side is empty or too long"""

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        pairs = torch.randint(len(self.train[0]), (count,), generator=generator)
        return _batch(self.train, pairs)

    def held_out(self, count: int) -> Batch:
        return _batch(self.validation, evenly_spaced(len(self.validation[0]), count))


def load_pairs(
    folder: Path | str, *, vocabulary: int = 8000, tokens: Tokens | None = None, longest: int = 256
) -> Pairs:
    """Loads translations from a folder laid out as Multi30k.

    train.de and train.en are the training data, val.de and val.en are held out. The files are UTF-8
    with one text per line; line n of both files is a pair. White space around a line is stripped.
    Pairs with an empty or too long side are skipped.

    Args:
        folder: the folder.
        vocabulary: size of the tokenizer trained on both training files if `tokens` is None.
        tokens: tokenizer with special tokens.
        longest: maximum number of tokens of a side, including BEGIN and END of a target.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not UTF-8, two files differ in their number of lines, or no pair is
            left.
    """
    folder = Path(folder)
    train, validation = (
        _read(folder / f"{part}.de", folder / f"{part}.en") for part in ("train", "val")
    )
    if tokens is None:
        text = "\n".join(line for part in zip(*train, strict=True) for line in part)
        tokens = train_tokens(text, vocabulary, special=True)
    name, source = f"{folder / 'train.de'} and {folder / 'train.en'}", str(folder.resolve())
    return pair_texts(train, validation, tokens=tokens, longest=longest, name=name, source=source)


def pair_texts(
    train: Sequence[TextPair],
    validation: Sequence[TextPair],
    *,
    tokens: Tokens,
    longest: int,
    name: str,
    source: str | None = None,
) -> Pairs:
    """Makes a dataset of pairs. Skips pairs, and raises ValueError if none is left.

    The arguments are those of `load_pairs`. `source` is the absolute path of the files, if any.
    """
    check_positive("longest", longest)
    tokens.check_special()
    digest = digest_of("pairs", tokens.to_json(), longest)
    parts: list[tuple[RaggedTokens, RaggedTokens]] = []
    skipped = 0
    for part, pairs in (("training", train), ("validation", validation)):
        digest = digest_of(digest, *(text for pair in pairs for text in pair))
        non_empty = [pair for pair in pairs if pair[0].strip() and pair[1].strip()]
        sides = (tokens.encode_all(pair[side] for pair in non_empty) for side in (0, 1))
        kept = [
            (source, torch.cat([_BEGIN, target, _END]))
            for source, target in zip(*sides, strict=True)
            if len(source) <= longest and len(target) + 2 <= longest
        ]
        if not kept:
            raise ValueError(
                f"{name}: none of the {len(pairs)} pairs in the {part} part has text on both "
                f"sides and at most {longest} tokens"
            )
        sources, targets = map(RaggedTokens.of, zip(*kept, strict=True))
        parts.append((sources, targets))
        skipped += len(pairs) - len(kept)
    return Pairs(name, source, digest, tokens, parts[0], parts[1], skipped)


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
        ImportError: the package num2words is missing.
    """
    check_positive("numbers", numbers)
    check_positive("dates", dates)
    spoken = {f"{number:,}": number_to_words(number) for number in _draw_numbers(numbers)}
    spoken |= {date.isoformat(): date_to_words(date) for date in _draw_dates(dates)}
    train: list[TextPair] = []
    validation: list[TextPair] = []
    for figures, words in spoken.items():
        part = validation if is_held_out(figures) else train
        part += [(TO_WORDS + figures, words), (TO_FIGURES + words, figures)]
    name, tokens = "numbers and dates in words", Tokens(special=True)
    return pair_texts(train, validation, tokens=tokens, longest=128, name=name)


def number_to_words(number: int) -> str:
    """Converts a number to words: 1204 is "one thousand two hundred and four"."""
    return _words(number, "cardinal").replace(",", "")


def date_to_words(date: datetime.date) -> str:
    """Converts a date: 2024-02-29 is "the twenty-ninth of February, twenty twenty-four"."""
    year = _words(date.year, "year").replace("oh-", "oh ")
    return f"the {_words(date.day, 'ordinal')} of {_MONTHS[date.month - 1]}, {year}"


def is_held_out(figures: str) -> bool:
    """True if a number or a date belongs to the held-out tenth."""
    if figures.isdigit() and int(figures) < _ALWAYS_TRAINED:
        return False
    return int.from_bytes(hashlib.sha256(figures.encode()).digest()[:8]) % 10 == 0


def _batch(part: tuple[RaggedTokens, RaggedTokens], pairs: Tensor) -> Batch:
    source, source_lengths = part[0].padded(pairs)
    target, target_lengths = part[1].padded(pairs)
    lengths = {"source_lengths": source_lengths, "target_lengths": target_lengths}
    return {"source": source, "target": target} | lengths


def _read(*paths: Path) -> list[TextPair]:
    first, second = ([line.strip() for line in read_lines(path)] for path in paths)
    if len(first) != len(second):
        raise ValueError(
            f"both files must have the same number of lines, got {len(first)} in {paths[0]} and "
            f"{len(second)} in {paths[1]}"
        )
    return list(zip(first, second, strict=True))


@cache
def _words(number: int, form: str) -> str:
    require("num2words", extra="train")
    from num2words import num2words

    words: str = num2words(number, to=form)
    return words


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
