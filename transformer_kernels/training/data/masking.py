"""BERT's training input: pairs of segments, with tokens to be guessed (Devlin et al. 2018, 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from transformer_kernels.nn.options import check_positive
from transformer_kernels.training.data.corpus import Corpus, bytes_of
from transformer_kernels.training.data.dataset import Batch, digest_of, evenly
from transformer_kernels.training.data.ragged_tokens import RaggedTokens
from transformer_kernels.training.data.tokens import CLASS, MASK, SEPARATOR, Tokens

CHOSEN = 0.15
"""The share of ordinary tokens that are to be guessed."""

MASKED = 0.8
REPLACED = 0.1
"""Of the chosen tokens, the shares that are hidden, and that become another token at random. The
rest is left as it is."""

NOT_ASKED = -100
"""The label of a token that is not to be guessed: what torch's cross_entropy ignores."""

_LEAST_CONTEXT = 8


@dataclass(frozen=True)
class MaskedSentences:
    """A dataset of pairs of segments of a corpus, of at most `context` tokens together.

    {"tokens": (B, T), "segments": (B, T), "lengths": (B,), "labels": (B, T), "is_next": (B,)}.

    Tokens are CLASS, the first segment, SEPARATOR, the second segment, SEPARATOR. A segment is
    whole lines of the text, as many as fit, or the beginning of one that does not; empty lines are
    left out. `segments` is 0 up to the first separator, 1 up to the second, and 0 behind. `is_next`
    is 1 where the second segment follows the first one, half the time, and else 0: it then comes
    from elsewhere, and its first line is another than the one that follows.

    Of the ordinary tokens each is chosen with the probability `CHOSEN`, and at least one an
    example: `labels` has what it was, and NOT_ASKED for all others.

    ValueError where a part of the corpus has too few lines for that.
    """

    corpus: Corpus
    tokens: Tokens
    """With special tokens; best trained on the corpus's part for training alone"""
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
                    f"{self.name} is too short: a context of {self.context} needs as many lines "
                    f"that are not empty in each part, and the {part} part has {len(lines)}"
                )

    @property
    def name(self) -> str:
        return self.corpus.name

    @property
    def source(self) -> str | None:
        return self.corpus.source

    @cached_property
    def digest(self) -> str:
        return digest_of(
            "masked sentences", self.corpus.digest, self.tokens.to_json(), self.context
        )

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        firsts = torch.randint(len(self._train) - 1, (count,), generator=generator)
        return self._batch(self._train, firsts, generator)

    def held_out(self, count: int) -> Batch:
        """What follows, and what is masked, is drawn by a generator of its own."""
        firsts = evenly(len(self._validation) - 1, count)
        return self._batch(self._validation, firsts, torch.Generator().manual_seed(0))

    def _batch(self, lines: RaggedTokens, firsts: Tensor, generator: torch.Generator) -> Batch:
        is_next = torch.randint(2, (len(firsts),), generator=generator)
        whole: list[Tensor] = []
        second_at: list[int] = []
        for first, follows in zip(firsts.tolist(), is_next.tolist(), strict=True):
            room = self.context - 3
            one, end = _segment(lines, first, room // 2, len(lines) - 1)
            start = end if follows else _elsewhere(lines, first, end, generator)
            two, _ = _segment(lines, start, room - len(one), len(lines))
            whole.append(torch.cat([_CLASS, one, _SEPARATOR, two, _SEPARATOR]))
            second_at.append(len(one) + 2)
        tokens, lengths = RaggedTokens.of(whole).padded(torch.arange(len(whole)))
        positions = torch.arange(tokens.shape[1])
        second = torch.tensor(second_at)[:, None]
        there = positions < lengths[:, None]
        tokens, labels = mask_tokens(
            tokens, there & (tokens >= self.tokens.first), self.tokens, generator
        )
        return {
            "tokens": tokens,
            "segments": (there & (positions >= second)).long(),
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
    """Chooses among the tokens (B, T) where `ordinary` (B, T, bool) is true: what a model gets to
    see, and labels, both (B, T) int64. In a row with any ordinary token, at least one is chosen."""
    scores = torch.rand(tokens.shape, generator=generator).where(ordinary, 2.0)
    lowest = scores.amin(1, keepdim=True)
    chosen = ordinary & ((scores < CHOSEN) | (scores == lowest))
    kinds = torch.rand(tokens.shape, generator=generator)
    others = torch.randint(
        vocabulary.first, vocabulary.vocabulary, tokens.shape, generator=generator
    )
    seen = others.where(kinds < MASKED + REPLACED, tokens)
    seen = torch.where(kinds < MASKED, MASK, seen)
    return seen.where(chosen, tokens), tokens.where(chosen, NOT_ASKED)


_CLASS = torch.tensor([CLASS])
_SEPARATOR = torch.tensor([SEPARATOR])


def _lines(text: Tensor, tokens: Tokens) -> RaggedTokens:
    lines = bytes_of(text).splitlines(keepends=True)
    return RaggedTokens.of(tokens.encode_all(line for line in lines if line.strip()))


def _segment(lines: RaggedTokens, first: int, room: int, limit: int) -> tuple[Tensor, int]:
    """At most `room` tokens, from line `first` on and before line `limit`, and the line after."""
    start = int(lines.starts[first])
    fitting = int(torch.searchsorted(lines.starts, start + room, right=True)) - 1
    end = min(max(fitting, first + 1), limit)
    return lines.values[start : min(int(lines.starts[end]), start + room)].long(), end


def _elsewhere(lines: RaggedTokens, first: int, end: int, generator: torch.Generator) -> int:
    """A line at random, none of `first` to `end`, and not the same as line `end`."""
    others = len(lines) - (end + 1 - first)
    drawn = int(torch.randint(others, (), generator=generator))
    following = lines[end]
    for step in range(others):
        line = (end + 1 + (drawn + step) % others) % len(lines)
        if not torch.equal(lines[line], following):
            return line
    raise ValueError("the text must have lines that differ, and too many are the same")
