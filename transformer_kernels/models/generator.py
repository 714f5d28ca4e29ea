"""Transformer for text generation, byte by byte.

Byte embeddings and learned positions, a stack of causal blocks, and a projection to the 256 values
of the next byte. Source: Transformers from scratch (P. Bloem, 2019), "Text generation transformer".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..masks.mask import Mask
from ..nn.attention import HeadForm, KVCache, size_of_heads
from ..nn.blocks import (
    Activation,
    Norm,
    Stack,
    TransformerBlock,
    normal_weights,
    smaller_branch_ends,
)
from ..nn.options import AttnImplementation, check_fields
from ..nn.positions import LearnedPositions
from .generation import generate

VOCABULARY = 256
"""Number of tokens; a token is a byte."""


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """Hyperparameters of a `TextGenerator`."""

    layers: int
    """Number of transformer blocks"""
    width: int
    """Model width (embedding dimension)"""
    heads: int
    """Number of attention heads"""
    context: int
    """Context length in bytes"""
    dropout: float = 0.0
    """Dropout probability in training"""
    norm: Norm = "pre"
    """Normalisation after each residual sum (post) or before each layer (pre)"""
    form: HeadForm = "narrow"
    """Heads of width // heads (narrow), or each of the full width (wide)"""
    activation: Activation = "relu"
    """Activation of the feed-forward networks"""

    def __post_init__(self) -> None:
        check_fields(self)
        size_of_heads(self.width, self.heads, self.form)


SIZES = {
    "demo": GeneratorConfig(layers=2, width=128, heads=4, context=512),
    "nanogpt-cpu": GeneratorConfig(layers=4, width=128, heads=4, context=64, activation="gelu"),
    "seed": GeneratorConfig(layers=12, width=256, heads=8, context=256, norm="post", form="wide"),
}
"""Named sizes. "demo" is small, with a context long enough for attention to matter. "nanogpt-cpu"
is nanoGPT's configuration for a laptop. "seed" is the model of the source: post-norm, wide heads.
"""


class TextGenerator(nn.Module):
    """Byte-level language model: logits of the next byte at every position of a text."""

    def __init__(
        self, config: GeneratorConfig, *, attn_implementation: AttnImplementation = "fused"
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.positions = LearnedPositions(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = Stack(
            TransformerBlock(
                config.width, config.heads,
                norm=config.norm, form=config.form, activation=config.activation,
                dropout=config.dropout, attn_implementation=attn_implementation,
            )
            for _ in range(config.layers)
        )  # fmt: skip
        self.last_norm = nn.LayerNorm(config.width) if config.norm == "pre" else nn.Identity()
        self.logits = nn.Linear(config.width, VOCABULARY)
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
            tokens: (B, T) int64, T up to the context.
            cache: key/value cache of the preceding tokens; `tokens` are appended to it.

        Returns:
            logits (B, T, 256); row t depends on tokens 0 to t only.

        Raises:
            ValueError: the text is longer than the context or the cache's capacity.
        """
        start = 0 if cache is None else cache.extend(tokens.shape[1])
        x: Tensor = self.dropout(self.positions(self.embedding(tokens), start=start))
        x = self.blocks(x, mask=Mask.causal() if cache is None else None, cache=cache)
        y: Tensor = self.logits(self.last_norm(x))
        return y

    def generate(
        self,
        prompt: bytes,
        length: int,
        *,
        temperature: float = 0.5,
        generator: torch.Generator | None = None,
    ) -> bytes:
        """Returns `length` bytes that continue `prompt`; see `models.generation.generate`."""
        return bytes(self.stream(prompt, length, temperature=temperature, generator=generator))

    def stream(
        self,
        prompt: bytes,
        length: int,
        *,
        temperature: float = 0.5,
        generator: torch.Generator | None = None,
    ) -> Iterator[int]:
        """Yields `length` bytes that continue `prompt`, one by one.

        Arguments and errors are those of `models.generation.generate`.
        """
        return generate(self, prompt, length, temperature=temperature, generator=generator)
