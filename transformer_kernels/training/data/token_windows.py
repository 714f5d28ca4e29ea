"""Dataset of token windows of a text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...nn.options import check_positive
from .corpus import Corpus, bytes_of
from .dataset import Batch, digest_of
from .tokens import Tokens
from .windows import draw_windows, even_windows


@dataclass(frozen=True)
class TokenWindows:
    """Dataset of windows of a tokenized corpus: {"tokens": (B, context + 1)}.

    Holds out the same bytes as `ByteWindows`, so that bits per byte are comparable. Raises
    ValueError if a part of the corpus is shorter than a window.
    """

    corpus: Corpus
    tokens: Tokens
    """Tokenizer; train it on the training part of the corpus only"""
    context: int

    def __post_init__(self) -> None:
        check_positive("context", self.context)
        for part, encoded in (("training", self._train), ("validation", self._validation)):
            if len(encoded) <= self.context:
                raise ValueError(
                    f"{self.name} is too short: a context of {self.context} needs "
                    f"{self.context + 1} tokens in each part, and the {part} part has "
                    f"{len(encoded)}"
                )

    @property
    def name(self) -> str:
        return self.corpus.name

    @property
    def source(self) -> str | None:
        return self.corpus.source

    @cached_property
    def digest(self) -> str:
        return digest_of("token windows", self.corpus.digest, self.tokens.to_json(), self.context)

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes per token of the held-out text, to convert nats per token to bits per byte."""
        return len(self.corpus.validation) / len(self._validation)

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        windows = draw_windows(self._train, count=count, size=self.context + 1, generator=generator)
        return {"tokens": windows}

    def held_out(self, count: int) -> Batch:
        return {"tokens": even_windows(self._validation, count=count, size=self.context + 1)}

    @cached_property
    def _train(self) -> Tensor:
        """int32, (tokens,)."""
        return self.tokens.encode(bytes_of(self.corpus.train)).int()

    @cached_property
    def _validation(self) -> Tensor:
        """int32, (tokens,)."""
        return self.tokens.encode(bytes_of(self.corpus.validation)).int()
