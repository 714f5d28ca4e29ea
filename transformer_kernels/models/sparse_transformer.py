"""Sparse Transformer: a language model for long texts, whose attention follows a sparse pattern.

Source: Generating Long Sequences with Sparse Transformers (Child et al., 2019, arXiv:1904.10509).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..nn.attention import head_size
from ..nn.blocks import Stack
from ..nn.cache import KVCache
from ..nn.initial import normal_weights, smaller_branch_ends
from ..nn.options import AttnImplementation, check_positive, check_probability
from ..nn.positions import RowColumnPositions
from ..nn.sparse_blocks import SparseAttention, SparseBlock
from ..nn.sparse_patterns import Combination, PatternKind, SparsePattern


@dataclass(frozen=True, kw_only=True)
class SparseTransformerConfig:
    """Hyperparameters of a `SparseTransformer`. The last five are those of `SparsePattern`."""

    layers: int
    heads: int
    width: int
    vocabulary: int = 256
    context: int
    """Length of training texts; texts may be longer, see `SparseTransformer`"""
    dropout: float = 0.0
    """Probability of dropping an element of an embedding or of a layer's output"""
    pattern: PatternKind = "fixed"
    stride: int
    summaries: int = 1
    subblocks: int = 1
    combination: Combination = "merged"

    def __post_init__(self) -> None:
        check_positive("layers", self.layers)
        check_positive("vocabulary", self.vocabulary)
        check_positive("context", self.context)
        check_probability("dropout", self.dropout)
        head_size(self.width, self.heads, "narrow")
        self.sparse_pattern().check_heads(self.heads)

    def sparse_pattern(self) -> SparsePattern:
        """The visible pairs of every layer."""
        return SparsePattern(
            kind=self.pattern,
            stride=self.stride,
            summaries=self.summaries,
            subblocks=self.subblocks,
            combination=self.combination,
        )


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

    `attn_implementation` ("eager", "fused" or "sdpa") does not affect the result beyond rounding:
    weights trained with one implementation work with the others. "eager" and "sdpa" store a mask of
    heads * T * T elements, and "eager" as many scores.
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
                config.width,
                config.heads,
                config.sparse_pattern(),
                dropout=config.dropout,
                attn_implementation=attn_implementation,
            )
            for _ in range(config.layers)
        )
        self.last_norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, config.vocabulary)
        normal_weights(self)
        smaller_branch_ends(self, layers=config.layers)

    @property
    def context(self) -> int:
        return self.config.context

    def new_cache(self, batch: int) -> KVCache:
        """Returns an empty cache for `batch` texts, with the capacity of the context."""
        config, weight = self.config, self.embedding.weight
        return KVCache(
            layers=config.layers, batch=batch, heads=config.heads, capacity=config.context,
            head_size=config.width // config.heads, dtype=weight.dtype, device=weight.device,
        )  # fmt: skip

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
