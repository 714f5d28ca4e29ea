"""Synthetic texts that repeat themselves: a word of random symbols, written twice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...nn.options import check_positive
from .dataset import Batch, digest_of

SEPARATOR = 0
"""Token before each copy of the word"""

_HELD_OUT_SEED = 1
_HELD_OUT_EVERY = 10
"""Words whose symbols add up to a multiple of this number are held out."""


@dataclass(frozen=True)
class Copies:
    """Dataset of texts 0 w 0 w: {"tokens": (B, context)}.

    The symbols of w are random numbers from 1 to vocabulary - 1. Only a model that finds the place
    in the first copy can predict the second one.

    Raises ValueError if the context is odd or below 4, or the vocabulary is below 11.

    Source: Reformer: The Efficient Transformer (Kitaev et al., 2020), section 5.
    """

    context: int
    vocabulary: int

    def __post_init__(self) -> None:
        check_positive("context", self.context)
        if self.context < 4 or self.context % 2:
            raise ValueError(f"context must be even and at least 4, got {self.context}")
        if self.vocabulary <= _HELD_OUT_EVERY:
            raise ValueError(
                f"vocabulary must be at least {_HELD_OUT_EVERY + 1}, got {self.vocabulary}"
            )

    @property
    def name(self) -> str:
        return f"copies of random words of {self.context // 2 - 1} symbols"

    @property
    def source(self) -> str | None:
        return None

    @cached_property
    def digest(self) -> str:
        return digest_of("copies", self.context, self.vocabulary)

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        return self._texts(count, generator, held_out=False)

    def held_out(self, count: int) -> Batch:
        generator = torch.Generator().manual_seed(_HELD_OUT_SEED)
        return self._texts(count, generator, held_out=True)

    def _texts(self, count: int, generator: torch.Generator, *, held_out: bool) -> Batch:
        found: list[Tensor] = []
        missing = count
        while missing > 0:
            words = torch.randint(
                1, self.vocabulary, (missing, self.context // 2 - 1), generator=generator
            )
            words = words[(words.sum(dim=1) % _HELD_OUT_EVERY == 0) == held_out]
            found.append(words)
            missing -= len(words)
        half = torch.nn.functional.pad(torch.cat(found), (1, 0), value=SEPARATOR)
        return {"tokens": torch.cat([half, half], dim=1)}
