"""Table of facts with learned keys and values, and question answering by lookup in it.

Source: the page "Transformers", sections "Information Lookup" and "Self Attention". In the source,
similarities are not scaled and nothing is learned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..dispatch.division import check_undivided
from ..masks.mask import Mask
from ..nn.attention import attend
from ..nn.blocks import STD
from ..nn.masking import check_lengths, clear_padding, masked_mean
from ..nn.options import AttnImplementation, check_choice, check_fields


@dataclass(frozen=True, kw_only=True)
class FactTableConfig:
    """Hyperparameters of a `FactTable`.

    The similarity of a query and a key is their dot product. Attention divides it by sqrt(width),
    so that the softmax does not saturate at large widths. Scaling does not affect hard lookup.
    """

    rows: int
    """Number of facts"""
    width: int
    """Width of keys and queries"""
    value_width: int
    """Width of the values"""
    scaled: bool = False
    """True if similarities are divided by sqrt(width)"""

    def __post_init__(self) -> None:
        check_fields(self)


class FactTable(nn.Module):
    """Table of `rows` learned keys and values.

    Hard lookup returns the value of the most similar key; the keys get no gradient. Soft lookup is
    attention: all values, weighted by the softmax of the similarities.
    """

    def __init__(
        self, config: FactTableConfig, *, attn_implementation: AttnImplementation = "fused"
    ) -> None:
        super().__init__()
        check_choice("attn_implementation", attn_implementation, AttnImplementation)
        self.config = config
        self.attn_implementation = attn_implementation
        self.keys = nn.Parameter(torch.randn(config.rows, config.width))
        self.values = nn.Parameter(torch.randn(config.rows, config.value_width))

    def hard(self, queries: Tensor) -> Tensor:
        """Hard lookup: the value of the key most similar to each query.

        Ties go to the first key. Only the values get a gradient, not the keys or the queries.

        Args:
            queries: (B, M, width) or (M, width).

        Returns:
            (B, M, value_width) or (M, value_width).

        Raises:
            ValueError: queries have another shape.
        """
        self._check(queries)
        with torch.no_grad():
            row = (queries @ self.keys.mT).argmax(dim=-1)
        return self.values[row]

    def soft(self, queries: Tensor, mask: Mask | None = None) -> Tensor:
        """Soft lookup: the values, weighted by the softmax of the similarities of their keys.

        Args:
            queries: (B, M, width) or (M, width).
            mask: the rows visible to each query, for example `Mask.dense` of a bool tensor
                (M, rows). A fully masked query gets 0.

        Returns:
            (B, M, value_width) or (M, value_width).

        Raises:
            ValueError: queries have another shape, or the mask does not match (M, rows).
        """
        check_undivided("FactTable.soft")
        self._check(queries)
        batch = queries if queries.dim() == 3 else queries[None]
        B = batch.shape[0]
        k, v = (x.expand(B, 1, -1, -1) for x in (self.keys, self.values))
        scale = None if self.config.scaled else 1.0
        o = attend(
            batch[:, None], k, v,
            mask=mask, scale=scale, attn_implementation=self.attn_implementation,
        )[:, 0]  # fmt: skip
        return o if queries.dim() == 3 else o[0]

    def forward(self, queries: Tensor, mask: Mask | None = None) -> Tensor:
        """Soft lookup."""
        return self.soft(queries, mask)

    def _check(self, queries: Tensor) -> None:
        if queries.dim() not in (2, 3) or queries.shape[-1] != self.config.width:
            width = self.config.width
            raise ValueError(
                f"queries must be (B, M, {width}) or (M, {width}), got shape {tuple(queries.shape)}"
            )


@dataclass(frozen=True, kw_only=True)
class LookupConfig:
    """Hyperparameters of a `Lookup`."""

    vocabulary: int
    """Number of words"""
    rows: int
    """Number of facts"""
    width: int
    """Model width (embedding dimension)"""

    def __post_init__(self) -> None:
        check_fields(self)


SIZES = {"demo": LookupConfig(vocabulary=1, rows=1, width=64)}
"""Named sizes; vocabulary and rows are placeholders that the data replaces."""


class Lookup(nn.Module):
    """Model that selects the row of a fact table that answers a question.

    The query is the mean of the question's word embeddings, and the values are the one-hot row
    numbers. Soft lookup thus gives the probability of each row, which trains keys and embeddings.
    Hard lookup gives the answer.
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
        nn.init.normal_(self.table.keys, std=STD)

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
