"""Reformer: a language model for long texts, with attention by hashing and reversible layers.

Source: Reformer: The Efficient Transformer (Kitaev et al., 2020, arXiv:2001.04451).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.attention import KVCache, size_of_heads
from ..nn.blocks import normal_weights, smaller_branch_ends
from ..nn.options import AttnImplementation, check_fields
from ..nn.positions import RowColumnPositions
from ..nn.reformer_blocks import LocalBlock, ReformerBlock, ReversibleBlock, ReversibleStack


@dataclass(frozen=True, kw_only=True)
class ReformerConfig:
    """Hyperparameters of a `Reformer`. `rounds` does not affect the parameters."""

    layers: int
    """Number of transformer blocks"""
    heads: int
    """Number of attention heads"""
    width: int
    """Model width (embedding dimension)"""
    hidden: int | None = None
    """Inner width of the feed-forward networks; 4 * width if None"""
    vocabulary: int = 256
    """Number of tokens; 256 for bytes"""
    context: int
    """Length of training texts in tokens; texts may be longer, see `Reformer`"""
    dropout: float = 0.0
    """Probability of dropping an element of an embedding or of a layer's output"""
    chunk: int
    """Tokens of a chunk, which sees itself and the chunk before"""
    rounds: int
    """Hash rounds of each attention; evaluation may have more than training"""
    hash_every: int = 1
    """The last of every so many layers hashes; the others see a window of two chunks"""
    columns: int | None = None
    """Positions of a row in the table of row and column encodings; None for one row"""
    scale: float | None = None
    """Factor of the scores of normalised keys; None for the paper's 1/sqrt(head size)"""

    def __post_init__(self) -> None:
        check_fields(self)
        size_of_heads(self.width, self.heads)


SIZES = {
    "copy": ReformerConfig(
        layers=1, heads=1, width=128, vocabulary=128, context=64, chunk=16, rounds=4,
    ),
    "demo": ReformerConfig(
        layers=4, heads=4, width=96, context=4096, columns=64, chunk=32, rounds=2, hash_every=2,
    ),
    "enwik8": ReformerConfig(
        layers=12, heads=8, width=1024, context=65_536, columns=256, dropout=0.1, chunk=64,
        rounds=4,
    ),
}  # fmt: skip
"""Named sizes. Tokens of "demo" and "enwik8" are bytes. "enwik8" has the paper's layers, widths and
context; chunk and rounds are ours, as the paper gives none. "copy" is for texts of two copies."""


class Reformer(nn.Module):
    """Reformer language model: logits of the next token at every position of a text.

    Both streams of the reversible layers start as the embedding; their concatenation is normalised
    and projected to logits. A text may be longer than the context in training: the rows of the
    position encodings repeat (`RowColumnPositions`).

    Hashes are random. In training mode they follow torch's default generator; in evaluation mode
    they are the same for every call. A later token never enters an earlier result, but it moves the
    borders of the chunks, and so changes which earlier keys a query sees.

    To evaluate with other rounds than in training, replace the config, which is read by each call:

        model.config = dataclasses.replace(model.config, rounds=8)

    The implementations "eager" and "sdpa" store a bias of heads * T * T elements.
    """

    def __init__(
        self, config: ReformerConfig, *, attn_implementation: AttnImplementation = "fused"
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        columns = config.columns or config.context
        rows = -(-config.context // columns)
        self.positions = RowColumnPositions(rows, columns, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = ReversibleStack(
            _block(config, n, attn_implementation) for n in range(config.layers)
        )
        self.last_norm = nn.LayerNorm(2 * config.width)
        self.logits = nn.Linear(2 * config.width, config.vocabulary)
        normal_weights(self)
        smaller_branch_ends(self, layers=config.layers)

    @property
    def context(self) -> int:
        return self.config.context

    def new_cache(self, batch: int) -> None:
        """Returns None: generation reads the whole context for each token."""

    def forward(self, tokens: Tensor, *, cache: KVCache | None = None) -> Tensor:
        """Computes logits of the next token at every position.

        Args:
            tokens: (B, T) int64; any T.
            cache: None; the model has no cache.

        Returns:
            logits (B, T, vocabulary).

        Raises:
            ValueError: a cache is given.
        """
        if cache is not None:
            raise ValueError(f"cache must be None, a Reformer has none, got {type(cache).__name__}")
        x: Tensor = self.dropout(self.positions(self.embedding(tokens)))
        y1, y2 = self.blocks(x, x, rounds=self.config.rounds, generator=self._hash_generator())
        y: Tensor = self.logits(self.last_norm(torch.cat([y1, y2], dim=-1)))
        return y

    def _hash_generator(self) -> torch.Generator:
        seed = int(torch.randint(2**63 - 1, (), device="cpu")) if self.training else 0
        return torch.Generator().manual_seed(seed)


def _block(
    config: ReformerConfig, layer: int, attn_implementation: AttnImplementation
) -> ReversibleBlock:
    options: dict[str, Any] = {
        "hidden": config.hidden,
        "dropout": config.dropout,
        "attn_implementation": attn_implementation,
    }
    if (layer + 1) % config.hash_every:
        return LocalBlock(config.width, config.heads, window=2 * config.chunk, **options)
    return ReformerBlock(
        config.width, config.heads, chunk=config.chunk, scale=config.scale, **options
    )
