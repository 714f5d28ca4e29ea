"""Sparse Transformer: a language model for long texts, whose attention follows a sparse pattern.

Source: Generating Long Sequences with Sparse Transformers (Child et al., 2019, arXiv:1904.10509).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..nn.attention import KVCache, size_of_heads
from ..nn.blocks import Stack, normal_weights, smaller_branch_ends
from ..nn.options import AttnImplementation, check_fields
from ..nn.positions import RowColumnPositions
from ..nn.sparse_attention import (
    Combination,
    PatternKind,
    SparseAttention,
    SparseBlock,
    SparsePattern,
)


@dataclass(frozen=True, kw_only=True)
class SparseTransformerConfig:
    """Hyperparameters of a `SparseTransformer`. The last five are those of `SparsePattern`."""

    layers: int
    """Number of transformer blocks"""
    heads: int
    """Number of attention heads"""
    width: int
    """Model width (embedding dimension)"""
    vocabulary: int = 256
    """Number of tokens; 256 for bytes"""
    context: int
    """Length of training texts in tokens; texts may be longer, see `SparseTransformer`"""
    dropout: float = 0.0
    """Probability of dropping an element of an embedding or of a layer's output"""
    pattern: PatternKind = "fixed"
    """Kind of the pattern of visible keys"""
    stride: int
    """The paper's l: size of a window or group of near keys"""
    summaries: int = 1
    """The paper's c: summary positions of a head in each group"""
    subblocks: int = 1
    """Distinct summary positions of the heads"""
    combination: Combination = "merged"
    """Every head sees near and far keys (merged), or one of them (split)"""

    def __post_init__(self) -> None:
        check_fields(self)
        size_of_heads(self.width, self.heads)
        self.sparse_pattern().check_heads(self.heads)

    def sparse_pattern(self) -> SparsePattern:
        """The visible pairs of every layer."""
        return SparsePattern(
            kind=self.pattern, stride=self.stride, summaries=self.summaries,
            subblocks=self.subblocks, combination=self.combination,
        )  # fmt: skip


SIZES = {
    "demo": SparseTransformerConfig(
        layers=3, heads=4, width=96, context=12_288, stride=128, summaries=8, subblocks=2,
        combination="split",
    ),
    "enwik8": SparseTransformerConfig(
        layers=30, heads=8, width=512, context=12_288, dropout=0.4, stride=128, summaries=32,
    ),
}  # fmt: skip
"""Named sizes, whose tokens are bytes. "enwik8" is the paper's model of 95 million parameters; its
heads share one subblock of summaries. Split heads of "demo" learn faster in a short training."""


class SparseTransformer(nn.Module):
    """Sparse Transformer language model: logits of the next token at every position of a text.

    A text may be longer than the context in training: the rows of the position encodings repeat
    (`RowColumnPositions`). Time follows the pairs that the pattern shows, and memory the length.

    The implementations "eager" and "sdpa" store a mask of heads * T * T elements, and "eager" as
    many scores.
    """

    def __init__(
        self, config: SparseTransformerConfig, *, attn_implementation: AttnImplementation = "fused"
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        rows = -(-config.context // config.stride)
        self.positions = RowColumnPositions(rows, config.stride, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = Stack(
            SparseBlock(
                config.width, config.heads, config.sparse_pattern(),
                dropout=config.dropout, attn_implementation=attn_implementation,
            )
            for _ in range(config.layers)
        )  # fmt: skip
        self.last_norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, config.vocabulary)
        normal_weights(self)
        smaller_branch_ends(self, layers=config.layers)

    @property
    def context(self) -> int:
        return self.config.context

    def new_cache(self, batch: int) -> KVCache:
        """Returns an empty cache for `batch` texts, with the capacity of the context."""
        return self.blocks.new_cache(batch, self.context)

    def forward(self, tokens: Tensor, *, cache: KVCache | None = None) -> Tensor:
        """Computes logits of the next token at every position.

        Args:
            tokens: (B, T) int64; any T.
            cache: key/value cache of the preceding tokens; `tokens` are appended to it.

        Returns:
            logits (B, T, vocabulary); row t depends on tokens 0 to t only.

        Raises:
            ValueError: the text is longer than the cache's capacity.
        """
        T = tokens.shape[1]
        start = 0 if cache is None else cache.extend(T)
        x: Tensor = self.dropout(self.positions(self.embedding(tokens), start=start))
        layer = self.blocks[0].attention
        assert isinstance(layer, SparseAttention)
        mask = layer.dense_mask(start + T, start=start, device=tokens.device)
        x = self.blocks(x, mask=mask, cache=cache)
        y: Tensor = self.logits(self.last_norm(x))
        return y
