"""A table of facts that is asked in words.

The mean of a question's word embeddings is the query; values are the rows themselves, one-hot, so
that the soft way gives the odds of each row, from which keys and embeddings learn, and the hard way
the answer. See `fact_table`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from transformer_kernels.models.fact_table import FactTable, FactTableConfig
from transformer_kernels.nn.options import AttnImplementation, check_positive
from transformer_kernels.nn.padding import check_lengths, clear_padding, mean_of_text


@dataclass(frozen=True, kw_only=True)
class LookupConfig:
    """What decides the weights and the function of a `Lookup`."""

    vocabulary: int
    rows: int
    width: int

    def __post_init__(self) -> None:
        check_positive("vocabulary", self.vocabulary)
        check_positive("rows", self.rows)
        check_positive("width", self.width)


SIZES = {"demo": LookupConfig(vocabulary=1, rows=1, width=64)}
"""By name; the data says how many words and rows there are."""


class Lookup(nn.Module):
    """Which fact of a table answers a question.

    `attn_implementation` selects how the soft lookup is computed, not its result.
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
        """words (B, W) int64, of which the first lengths (B,) are there, all by default -> the log
        odds of each row (B, rows), natural log."""
        odds = self.table.soft(self._queries(words, lengths))
        return odds.clamp_min(torch.finfo(odds.dtype).tiny).log()

    @torch.no_grad()
    def answer(self, words: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The row that answers each question, (B,) int64, the hard way."""
        return self.table.hard(self._queries(words, lengths)).argmax(dim=-1)

    def _queries(self, words: Tensor, lengths: Tensor | None) -> Tensor:
        check_lengths("lengths", lengths, batch=words.shape[0], room=words.shape[1])
        return mean_of_text(clear_padding(self.embedding(words), lengths), lengths)
