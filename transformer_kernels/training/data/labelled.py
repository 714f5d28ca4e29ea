"""Texts that each belong to one of some classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_kernels.training.data.dataset import Batch, digest_of, evenly
from transformer_kernels.training.data.ragged_tokens import RaggedTokens
from transformer_kernels.training.data.tokens import Tokens


@dataclass(frozen=True)
class LabelledTexts:
    """A dataset of texts and their classes: {"tokens": (B, T), "lengths": (B,), "labels": (B,)}.

    Each example that is drawn has a class at random, all alike, and is one of its texts at random.
    Held-out examples are as many of each class, as far as there are, and the classes take turns.
    """

    name: str
    source: str | None
    digest: str
    classes: tuple[str, ...]
    """The name of each label, from 0 on"""
    tokens: Tokens
    train: tuple[RaggedTokens, ...]
    """For each class, at least one row"""
    validation: tuple[RaggedTokens, ...]
    """The same"""

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        labels = torch.randint(len(self.classes), (count,), generator=generator)
        sizes = torch.tensor([len(rows) for rows in self.train])
        numbers = torch.randint(2**62, (count,), generator=generator)
        return _batch(self.train, labels, numbers % sizes[labels])

    def held_out(self, count: int) -> Batch:
        classes = len(self.classes)
        chosen = [
            (turn, label, int(row))
            for label, rows in enumerate(self.validation)
            for turn, row in enumerate(evenly(len(rows), (count + classes - 1 - label) // classes))
        ]
        _, labels, rows = torch.tensor(sorted(chosen)).view(-1, 3).unbind(1)
        return _batch(self.validation, labels, rows)


def label_texts(
    train: Sequence[Sequence[bytes]],
    validation: Sequence[Sequence[bytes]],
    *,
    classes: tuple[str, ...],
    tokens: Tokens,
    longest: int,
    name: str,
    source: str | None = None,
) -> LabelledTexts:
    """The dataset of these texts, for each class a sequence of at least one, none empty; each is
    cut to its first `longest` tokens."""
    digest = digest_of("labelled texts", *classes, tokens.to_json(), longest)
    parts: list[tuple[RaggedTokens, ...]] = []
    for part in (train, validation):
        for texts in part:
            digest = digest_of(digest, *texts)
        parts.append(
            tuple(
                RaggedTokens.of([row[:longest].clone() for row in tokens.encode_all(texts)])
                for texts in part
            )
        )
    return LabelledTexts(name, source, digest, classes, tokens, parts[0], parts[1])


def _batch(part: Sequence[RaggedTokens], labels: Tensor, rows: Tensor) -> Batch:
    picked = RaggedTokens.of(
        [part[label][row] for label, row in zip(labels.tolist(), rows.tolist(), strict=True)]
    )
    tokens, lengths = picked.padded(torch.arange(len(labels)))
    return {"tokens": tokens, "lengths": lengths, "labels": labels}
