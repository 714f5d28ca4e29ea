"""Data of the recall tasks: questions about a table of facts, and random texts whose second half
asks for the first one."""

from __future__ import annotations

import ast
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ...nn.options import check_positive
from .dataset import Batch, digest_of, pad_rows, read_lines
from .text import standard_library_folder

UNKNOWN = 0
"""Token of all words that occur in no key."""

SEPARATOR = 0
"""Token before each copy of a word"""

_HELD_OUT_EVERY = 10
"""Random texts whose symbols in the first half add up to a multiple of this number are held out."""

_WORD = re.compile(r"[a-z0-9]+")
_HELD_OUT_SEED = 1


@dataclass(frozen=True)
class Fact:
    """An entry of a table."""

    key: str
    """Text whose words identify the fact"""
    value: str


@dataclass(frozen=True)
class Facts:
    """Dataset of questions: {"words": (B, W), "lengths": (B,), "rows": (B,)}.

    A question is a random half of the distinct words of a key, and at least two if the key has
    them, in random order. Held-out questions are about the same facts, drawn with a separate
    generator; short keys can yield the same questions as in training.
    """

    name: str
    source: str | None
    digest: str
    facts: tuple[Fact, ...]
    vocabulary: tuple[str, ...]
    """The words of all keys; entry 0 is the unknown word"""

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        rows = torch.randint(len(self.facts), (count,), generator=generator)
        questions = []
        for row in rows.tolist():
            key = self._key_words[row]
            size = max(2, (len(key) + 1) // 2)
            questions.append(key[torch.randperm(len(key), generator=generator)[:size]])
        words, lengths = pad_rows(questions)
        return {"words": words, "lengths": lengths, "rows": rows}

    def held_out(self, count: int) -> Batch:
        return self.draw(count, torch.Generator().manual_seed(_HELD_OUT_SEED))

    def words(self, question: str) -> Tensor:
        """Tokenizes a question: (words,) int64, at least one."""
        tokens = [self._token_of_word.get(word, UNKNOWN) for word in words_of(question)]
        return torch.tensor(tokens or [UNKNOWN])

    @cached_property
    def _token_of_word(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.vocabulary)}

    @cached_property
    def _key_words(self) -> list[Tensor]:
        """The distinct words of each key, as tokens."""
        return [self.words(fact.key).unique() for fact in self.facts]


def words_of(text: str) -> list[str]:
    """Lower-case words of a text; camelCase and snake_case names are split."""
    return _WORD.findall(re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", text).lower())


def as_facts(facts: Sequence[Fact], name: str, source: str | None = None) -> Facts:
    """Makes a dataset; raises ValueError if there are no facts, or a key has no words."""
    if not facts:
        raise ValueError(f"{name} must have at least one fact, got none")
    for fact in facts:
        if not words_of(fact.key):
            raise ValueError(f"every key in {name} must have a word, got {fact.key!r}")
    known = sorted({word for fact in facts for word in words_of(fact.key)})
    digest = digest_of("facts", *(part for fact in facts for part in (fact.key, fact.value)))
    return Facts(name, source, digest, tuple(facts), ("", *known))


def load_facts(path: Path | str | None = None) -> Facts:
    """Loads a table of facts.

    Args:
        path: UTF-8 file with one fact per line: key, tab, value. None uses the modules of the
            standard library, with name and first paragraph of the documentation as key.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not UTF-8, a line has no tab, a key has no words, or there are no
            facts.
    """
    if path is None:
        return as_facts(list(_modules()), "the modules of the Python standard library")
    path = Path(path)
    facts = []
    for number, line in enumerate(read_lines(path), 1):
        key, tab, value = line.partition("\t")
        if not tab:
            raise ValueError(f"line {number} of {path} must have a tab between key and value")
        facts.append(Fact(key, value))
    return as_facts(facts, str(path), str(path.resolve()))


def _modules() -> Iterator[Fact]:
    for path in sorted(standard_library_folder().iterdir()):
        file = path / "__init__.py" if path.is_dir() else path
        if path.name.startswith("_") or file.suffix != ".py" or not file.is_file():
            continue
        documentation = ast.get_docstring(ast.parse(file.read_bytes()))
        if documentation:
            first = " ".join(documentation.split("\n\n")[0].split())
            yield Fact(f"{path.stem} {first}", f"{path.stem}: {first}")


@dataclass(frozen=True)
class RandomTexts(ABC):
    """Base of the datasets of random texts whose second half asks for the first one:
    {"tokens": (B, context)}.

    Raises ValueError if the vocabulary is below 11.
    """

    context: int
    vocabulary: int

    def __post_init__(self) -> None:
        check_positive("context", self.context)
        if self.vocabulary <= _HELD_OUT_EVERY:
            raise ValueError(
                f"vocabulary must be at least {_HELD_OUT_EVERY + 1}, got {self.vocabulary}"
            )

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    def source(self) -> str | None:
        return None

    @property
    def digest(self) -> str:
        return digest_of(type(self).__name__.lower(), self.context, self.vocabulary)

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        return self._texts(count, generator, held_out=False)

    def held_out(self, count: int) -> Batch:
        generator = torch.Generator().manual_seed(_HELD_OUT_SEED)
        return self._texts(count, generator, held_out=True)

    def _texts(self, count: int, generator: torch.Generator, *, held_out: bool) -> Batch:
        texts = torch.empty(0, self.context, dtype=torch.int64)
        while (missing := count - len(texts)) > 0:
            drawn = self._random(missing, generator, held_out=held_out)
            sums = drawn[:, : self.context // 2].sum(dim=1)
            texts = torch.cat([texts, drawn[(sums % _HELD_OUT_EVERY == 0) == held_out]])
        return {"tokens": texts}

    @abstractmethod
    def _random(self, count: int, generator: torch.Generator, *, held_out: bool) -> Tensor:
        """Random texts, (count, context) int64."""


class Copies(RandomTexts):
    """Texts 0 w 0 w.

    The symbols of w are random numbers from 1 to vocabulary - 1. Only a model that finds the place
    in the first copy can predict the second one.

    Raises ValueError if the context is odd or below 4, or the vocabulary is below 11.

    Source: Reformer: The Efficient Transformer (Kitaev et al., 2020), section 5.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context < 4 or self.context % 2:
            raise ValueError(f"context must be even and at least 4, got {self.context}")

    @property
    def name(self) -> str:
        return f"copies of random words of {self.context // 2 - 1} symbols"

    def _random(self, count: int, generator: torch.Generator, *, held_out: bool) -> Tensor:
        length = self.context // 2 - 1
        words = torch.randint(1, self.vocabulary, (count, length), generator=generator)
        half = torch.nn.functional.pad(words, (1, 0), value=SEPARATOR)
        return torch.cat([half, half], dim=1)


class Associations(RandomTexts):
    """Texts of keys, each followed by its value, and once more in another order.

    Keys are random numbers below vocabulary // 2, values are random numbers from there on. Only a
    model that stores each pair can predict the values in the second half. All keys of a held-out
    text are distinct. A text for training has a random number of distinct keys and repeats their
    pairs, because few keys are easier to learn.

    Raises ValueError if the context is no multiple of 4, or the vocabulary is below 11 or has fewer
    keys than a text.

    Source: multi-query associative recall (Arora et al., 2023, arXiv:2312.04927), with a query for
    each key and no gaps.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context % 4:
            raise ValueError(f"context must be a multiple of 4, got {self.context}")
        if self.vocabulary // 2 < self.pairs:
            raise ValueError(
                f"vocabulary must be at least {2 * self.pairs}, twice the number of keys in a "
                f"text, got {self.vocabulary}"
            )

    @property
    def pairs(self) -> int:
        """Number of keys in a text."""
        return self.context // 4

    @property
    def name(self) -> str:
        return f"random texts of {self.pairs} keys and values"

    def _random(self, count: int, generator: torch.Generator, *, held_out: bool) -> Tensor:
        first = self.vocabulary // 2
        keys = _permutations(count, first, generator)[:, : self.pairs]
        values = torch.randint(first, self.vocabulary, keys.shape, generator=generator)
        told = torch.stack([keys, values], dim=2)
        if not held_out:
            distinct = torch.randint(self.pairs, (count, 1), generator=generator) + 1
            repeated = torch.arange(self.pairs) % distinct
            told = told.take_along_dim(repeated[:, :, None], dim=1)
        order = _permutations(count, self.pairs, generator)
        asked = told.take_along_dim(order[:, :, None], dim=1)
        return torch.cat([told, asked], dim=1).flatten(1)


def _permutations(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Random permutations of 0 to size - 1: (count, size)."""
    return torch.rand(count, size, generator=generator).argsort(dim=1)
