"""Dataset of labelled texts for classification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .dataset import Batch, digest_of, evenly_spaced
from .ragged_tokens import RaggedTokens
from .tokens import Tokens


@dataclass(frozen=True)
class LabelledTexts:
    """Dataset of labelled texts: {"tokens": (B, T), "lengths": (B,), "labels": (B,)}.

    A random training example has a uniformly random class, then a random text of that class.
    Held-out examples cycle through the classes, with as many of each class as available.
    """

    name: str
    source: str | None
    digest: str
    classes: tuple[str, ...]
    """Class names; the index is the label"""
    tokens: Tokens
    train: tuple[RaggedTokens, ...]
    """Texts of each class, at least one"""
    validation: tuple[RaggedTokens, ...]
    """Texts of each class, at least one"""

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        labels = torch.randint(len(self.classes), (count,), generator=generator)
        sizes = torch.tensor([len(rows) for rows in self.train])
        numbers = torch.randint(2**62, (count,), generator=generator)
        return _batch(self.train, labels, numbers % sizes[labels])

    def held_out(self, count: int) -> Batch:
        classes = len(self.classes)
        chosen = [
            (position, label, int(row))
            for label, rows in enumerate(self.validation)
            for position, row in enumerate(
                evenly_spaced(len(rows), (count + classes - 1 - label) // classes)
            )
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
    """Makes a dataset of labelled texts.

    Args:
        train: training texts of each class, at least one per class, none empty.
        validation: held-out texts of each class, at least one per class, none empty.
        classes: class names.
        tokens: tokenizer.
        longest: maximum number of tokens; longer texts are cut.
        name: display name.
        source: absolute path of the files, or None.
    """
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
