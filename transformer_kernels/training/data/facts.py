"""Facts to be asked for: the modules of the standard library, or any table of two columns."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from transformer_kernels.training.data.dataset import Batch, digest_of
from transformer_kernels.training.data.ragged_tokens import RaggedTokens
from transformer_kernels.training.data.standard_library import standard_library_folder

UNKNOWN = 0
"""The word that stands for all that no key has."""

_WORD = re.compile(r"[a-z0-9]+")
_HELD_OUT_SEED = 1


@dataclass(frozen=True)
class Fact:
    key: str
    """What it may be asked for by, in words"""
    value: str


@dataclass(frozen=True)
class Facts:
    """A dataset of questions: {"words": (B, W), "lengths": (B,), "rows": (B,)}.

    A question has half of the different words of a key, and at least two if there are as many; they
    are in no order. All facts are learned, and held-out questions are drawn as the others are, by a
    generator of their own: of a short key the same ones.
    """

    name: str
    source: str | None
    digest: str
    facts: tuple[Fact, ...]
    vocabulary: tuple[str, ...]
    """The words of all keys; the first stands for any other"""

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        rows = torch.randint(len(self.facts), (count,), generator=generator)
        questions = []
        for row in rows.tolist():
            known = self._known[row]
            size = max(2, (len(known) + 1) // 2)
            questions.append(known[torch.randperm(len(known), generator=generator)[:size]])
        words, lengths = RaggedTokens.of(questions).padded(torch.arange(count))
        return {"words": words, "lengths": lengths, "rows": rows}

    def held_out(self, count: int) -> Batch:
        return self.draw(count, torch.Generator().manual_seed(_HELD_OUT_SEED))

    def words(self, question: str) -> Tensor:
        """(words,) int64, at least one."""
        numbers = [self._numbers.get(word, UNKNOWN) for word in words_of(question)]
        return torch.tensor(numbers or [UNKNOWN])

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.vocabulary)}

    @cached_property
    def _known(self) -> list[Tensor]:
        """The different words of each key."""
        return [self.words(fact.key).unique() for fact in self.facts]


def words_of(text: str) -> list[str]:
    """In lower case; a name is the words that it is made of."""
    return _WORD.findall(re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", text).lower())


def as_facts(facts: Sequence[Fact], name: str, source: str | None = None) -> Facts:
    """The dataset of these; ValueError where there are none, or a key has no words."""
    if not facts:
        raise ValueError(f"{name} must have at least one fact, and has none")
    for fact in facts:
        if not words_of(fact.key):
            raise ValueError(f"every key in {name} must have a word, got {fact.key!r}")
    known = sorted({word for fact in facts for word in words_of(fact.key)})
    digest = digest_of("facts", *(part for fact in facts for part in (fact.key, fact.value)))
    return Facts(name, source, digest, tuple(facts), ("", *known))


def load_facts(path: Path | str | None = None) -> Facts:
    """The lines of a file, a key and its value with a tab between; by default the modules of the
    standard library, each asked for by its name and the first paragraph of its documentation.

    OSError where the file cannot be read, ValueError where a line is not as above.
    """
    if path is None:
        return as_facts(list(_modules()), "the modules of the Python standard library")
    path = Path(path)
    facts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
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
