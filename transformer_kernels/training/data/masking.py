"""BERT's training input: pairs of segments with masked tokens (Devlin et al. 2018, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...nn.options import check_positive
from .dataset import Batch, RaggedTokens, digest_of, evenly_spaced
from .text import CorpusDataset, bytes_of
from .tokens import CLASS, MASK, SEPARATOR, Tokens

SELECTED = 0.15
"""Share of ordinary (not special) tokens that are selected for prediction."""

MASKED = 0.8
REPLACED = 0.1
"""Shares of the selected tokens that become MASK, and that become a random token. The rest stays
unchanged."""

IGNORE_INDEX = -100
"""Label of tokens that are not predicted; the default `ignore_index` of torch's cross_entropy."""

_LEAST_CONTEXT = 8


@dataclass(frozen=True)
class MaskedSentences(CorpusDataset):
    """Dataset of segment pairs of a corpus, with at most `context` tokens per pair.

    {"tokens": (B, T), "segments": (B, T), "lengths": (B,), "labels": (B, T), "is_next": (B,)}:

    - `tokens`: CLASS, first segment, SEPARATOR, second segment, SEPARATOR. A segment is as many
      rows lines of the text as fit, or the start of a line that is too long. Empty lines are
      skipped.
    - `segments`: 0 up to and including the first separator, 1 up to and including the second, 0 in
      the padding.
    - `is_next`: 1 for half of the examples, whose second segment follows the first one; 0 if it is
      a random segment with a different first line.
    - `labels`: the original token where a token is selected, IGNORE_INDEX elsewhere. Each ordinary
      token is selected with probability `SELECTED`, and at least one per example.

    Raises ValueError if a part of the corpus has too few lines.
    """

    tokens: Tokens
    """Tokenizer with special tokens; train it on the training part of the corpus only"""
    context: int

    def __post_init__(self) -> None:
        check_positive("context", self.context)
        self.tokens.check_special()
        if self.context < _LEAST_CONTEXT:
            raise ValueError(
                f"context must be at least {_LEAST_CONTEXT} for two segments and three special "
                f"tokens, got {self.context}"
            )
        for part, lines in (("training", self._train), ("validation", self._validation)):
            if len(lines) < self.context:
                raise ValueError(
                    f"{self.name} is too short: a context of {self.context} needs as many "
                    f"non-empty lines in each part, and the {part} part has {len(lines)}"
                )

    @cached_property
    def digest(self) -> str:
        return digest_of(
            "masked sentences", self.corpus.digest, self.tokens.to_json(), self.context
        )

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        firsts = torch.randint(len(self._train) - 1, (count,), generator=generator)
        return self._batch(self._train, firsts, generator)

    def held_out(self, count: int) -> Batch:
        """Evenly spaced first segments; the rest is drawn with a fixed seed."""
        firsts = evenly_spaced(len(self._validation) - 1, count)
        return self._batch(self._validation, firsts, torch.Generator().manual_seed(0))

    def _batch(self, lines: RaggedTokens, firsts: Tensor, generator: torch.Generator) -> Batch:
        is_next = torch.randint(2, (len(firsts),), generator=generator)
        rows: list[Tensor] = []
        second_starts: list[int] = []
        for first, follows in zip(firsts.tolist(), is_next.tolist(), strict=True):
            capacity = self.context - 3
            first_segment, end = _segment(lines, first, capacity // 2, len(lines) - 1)
            start = end if follows else _random_other_line(lines, first, end, generator)
            second_segment, _ = _segment(lines, start, capacity - len(first_segment), len(lines))
            rows.append(torch.cat([_CLASS, first_segment, _SEPARATOR, second_segment, _SEPARATOR]))
            second_starts.append(len(first_segment) + 2)
        tokens, lengths = RaggedTokens.of(rows).padded(torch.arange(len(rows)))
        positions = torch.arange(tokens.shape[1])
        second = torch.tensor(second_starts)[:, None]
        valid = positions < lengths[:, None]
        tokens, labels = mask_tokens(
            tokens, valid & (tokens >= self.tokens.first), self.tokens, generator
        )
        return {
            "tokens": tokens,
            "segments": (valid & (positions >= second)).long(),
            "lengths": lengths,
            "labels": labels,
            "is_next": is_next,
        }

    @cached_property
    def _train(self) -> RaggedTokens:
        return _lines(self.corpus.train, self.tokens)

    @cached_property
    def _validation(self) -> RaggedTokens:
        return _lines(self.corpus.validation, self.tokens)


def mask_tokens(
    tokens: Tensor, ordinary: Tensor, vocabulary: Tokens, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Selects tokens for prediction, and masks or replaces them.

    At least one token is selected in each row that has an ordinary token.

    Args:
        tokens: (B, T) int64.
        ordinary: (B, T) bool, the tokens that may be selected.
        vocabulary: tokenizer, for the range of random replacements.
        generator: source of all random numbers.

    Returns:
        the model's input and the labels, both (B, T) int64.
    """
    scores = torch.rand(tokens.shape, generator=generator).where(ordinary, 2.0)
    lowest = scores.amin(1, keepdim=True)
    selected = ordinary & ((scores < SELECTED) | (scores == lowest))
    kinds = torch.rand(tokens.shape, generator=generator)
    replacements = torch.randint(
        vocabulary.first, vocabulary.vocabulary, tokens.shape, generator=generator
    )
    masked = replacements.where(kinds < MASKED + REPLACED, tokens)
    masked = torch.where(kinds < MASKED, MASK, masked)
    return masked.where(selected, tokens), tokens.where(selected, IGNORE_INDEX)


_CLASS = torch.tensor([CLASS])
_SEPARATOR = torch.tensor([SEPARATOR])


def _lines(text: Tensor, tokens: Tokens) -> RaggedTokens:
    lines = bytes_of(text).splitlines(keepends=True)
    return RaggedTokens.of(tokens.encode_all(line for line in lines if line.strip()))


def _segment(lines: RaggedTokens, first: int, capacity: int, limit: int) -> tuple[Tensor, int]:
    """Up to `capacity` tokens of lines [first, limit), and the end of the lines used."""
    start = int(lines.starts[first])
    fitting_end = int(torch.searchsorted(lines.starts, start + capacity, right=True)) - 1
    end = min(max(fitting_end, first + 1), limit)
    return lines.values[start : min(int(lines.starts[end]), start + capacity)].long(), end


def _random_other_line(
    lines: RaggedTokens, first: int, end: int, generator: torch.Generator
) -> int:
    """A random line outside of `first` to `end` whose text differs from that of line `end`."""
    others = len(lines) - (end + 1 - first)
    drawn = int(torch.randint(others, (), generator=generator))
    next_line = lines[end]
    for step in range(others):
        line = (end + 1 + (drawn + step) % others) % len(lines)
        if not torch.equal(lines[line], next_line):
            return line
    raise ValueError("the text must have different lines, and too many are equal")
