"""Question answering by lookup in a table of facts.

The query is the mean of the question's word embeddings, and the values are the one-hot row numbers.
Soft lookup thus gives the probability of each row, which trains keys and embeddings. Hard lookup
gives the answer. See `fact_table`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..nn.options import AttnImplementation, check_positive
from ..nn.padding import check_lengths, clear_padding, masked_mean
from .fact_table import FactTable, FactTableConfig


@dataclass(frozen=True, kw_only=True)
class LookupConfig:
    """Hyperparameters of a `Lookup`."""

    vocabulary: int
    rows: int
    width: int

    def __post_init__(self) -> None:
        check_positive("vocabulary", self.vocabulary)
        check_positive("rows", self.rows)
        check_positive("width", self.width)


SIZES = {"demo": LookupConfig(vocabulary=1, rows=1, width=64)}
"""Named sizes; vocabulary and rows are placeholders that the data replaces."""


class Lookup(nn.Module):
    """Model that selects the row of a fact table that answers a question.

    `attn_implementation` ("eager", "fused" or "sdpa") does not affect the result of soft lookup
    beyond rounding.
    """

    def __init__(
        self, config: LookupConfig, *, attn_implementation: AttnImplementation = "fused"
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        sizes = FactTableConfig(rows=config.rows, width=config.width, value_width=config.rows)
        self.table = FactTable(sizes, attn_implementation=attn_implementation)
        self.table.values = nn.Parameter(torch.eye(config.rows), requires_grad=False)
        nn.init.normal_(self.table.keys, std=0.02)

    def forward(self, words: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Computes the log-probability that each row answers the question.

        Args:
            words: (B, W) int64.
            lengths: (B,) integers, the number of words in each question; W unless given.

        Returns:
            log-probabilities (B, rows), natural log.

        Raises:
            TypeError, ValueError: `lengths` is invalid.
        """
        p = self.table.soft(self._queries(words, lengths))
        return p.clamp_min(torch.finfo(p.dtype).tiny).log()

    @torch.no_grad()
    def answer(self, words: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Row that answers each question by hard lookup, (B,) int64; arguments as in `forward`."""
        return self.table.hard(self._queries(words, lengths)).argmax(dim=-1)

    def _queries(self, words: Tensor, lengths: Tensor | None) -> Tensor:
        check_lengths("lengths", lengths, batch=words.shape[0], max_length=words.shape[1])
        return masked_mean(clear_padding(self.embedding(words), lengths), lengths)
