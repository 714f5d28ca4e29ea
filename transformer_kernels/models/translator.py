"""Encoder-decoder Transformer for translation.

The encoder processes the source text. The decoder generates the target token by token, with
self-attention to the target so far and cross-attention to the encoder's output. Source: Attention
Is All You Need (Vaswani et al. 2017), where all embeddings and the last projection share one matrix
and blocks are post-norm.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..masks.mask import Mask
from ..nn.attention import KVCache, size_of_heads
from ..nn.blocks import DecoderBlock, Norm, Stack, TransformerBlock
from ..nn.masking import check_lengths, clear_padding, padding_mask
from ..nn.options import AttnImplementation, check_fields
from ..nn.positions import SinusoidalPositions
from .generation import EncoderDecoder, Memory


@dataclass(frozen=True, kw_only=True)
class TranslatorConfig:
    """Hyperparameters of a `Translator`."""

    source_vocabulary: int
    """Number of source tokens"""
    target_vocabulary: int
    """Number of target tokens"""
    layers: int
    """Number of blocks of the encoder, and of the decoder"""
    width: int
    """Model width (embedding dimension)"""
    hidden: int
    """Inner width of the feed-forward networks"""
    heads: int
    """Number of attention heads"""
    context: int
    """Largest number of tokens of a text"""
    shared: bool = True
    """True if source and target have one vocabulary, and one matrix serves both embeddings and the
    last projection"""
    dropout: float = 0.1
    """Dropout probability in training"""
    norm: Norm = "post"
    """Normalisation after each residual sum (post) or before each layer (pre)"""

    def __post_init__(self) -> None:
        check_fields(self)
        size_of_heads(self.width, self.heads)
        if self.shared and self.source_vocabulary != self.target_vocabulary:
            raise ValueError(
                "source_vocabulary and target_vocabulary must be equal if shared is True, "
                f"got {self.source_vocabulary} and {self.target_vocabulary}"
            )


SIZES = {
    "base": TranslatorConfig(
        source_vocabulary=37_000, target_vocabulary=37_000,
        layers=6, width=512, hidden=2048, heads=8, context=5000,
    ),
    "demo": TranslatorConfig(
        source_vocabulary=1024, target_vocabulary=1024,
        layers=2, width=128, hidden=512, heads=4, context=256, norm="pre",
    ),
}  # fmt: skip
"""Named sizes. "base" is the base model of the paper, with its vocabulary for English and German.
"demo" is small and trains in minutes on two cores. For other data, set the vocabularies with
`dataclasses.replace`."""


class Translator(EncoderDecoder):
    """Encoder-decoder Transformer: logits of the next token of a translation."""

    def __init__(
        self, config: TranslatorConfig, *, attn_implementation: AttnImplementation = "fused"
    ) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.embedding = nn.Embedding(config.target_vocabulary, width)
        """Target embedding; if shared, also the source embedding and the last projection."""
        self.source_embedding: nn.Embedding | None = None
        self.projection: nn.Linear | None = None
        if not config.shared:
            self.source_embedding = nn.Embedding(config.source_vocabulary, width)
            self.projection = nn.Linear(width, config.target_vocabulary, bias=False)
        self.positions = SinusoidalPositions(config.context, width)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = _stack(TransformerBlock, config, attn_implementation)
        self.decoder = _stack(DecoderBlock, config, attn_implementation)
        self.encoder_norm, self.decoder_norm = (
            nn.LayerNorm(width) if config.norm == "pre" else nn.Identity() for _ in range(2)
        )
        self._initialise()

    def _initialise(self) -> None:
        """Initialises every matrix, embeddings included, as Xavier uniform; biases are 0."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    @property
    def context(self) -> int:
        return self.config.context

    @property
    def decoder_blocks(self) -> Stack:
        return self.decoder

    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> Tensor:
        B, S = source.shape
        check_lengths("source_lengths", source_lengths, batch=B, max_length=S)
        embedding = self.embedding if self.source_embedding is None else self.source_embedding
        x = clear_padding(self._embed(source, embedding), source_lengths)
        y: Tensor = self.encoder_norm(self.encoder(x, mask=padding_mask(source_lengths)))
        return y

    def decode(self, target_in: Tensor, memory: Memory, *, cache: KVCache | None = None) -> Tensor:
        start = 0 if cache is None else cache.extend(target_in.shape[1])
        x = self._embed(target_in, self.embedding, start)
        mask = Mask.causal() if cache is None else None
        for n, (block, k_and_v) in enumerate(
            zip(self.decoder, memory.keys_and_values, strict=True)
        ):
            layer = None if cache is None else cache.layer(n)
            x = self.decoder.run(block, x, k_and_v, mask=mask, memory_mask=memory.mask, cache=layer)
        weight = self.embedding.weight if self.projection is None else self.projection.weight
        return nn.functional.linear(self.decoder_norm(x), weight)

    def _embed(self, tokens: Tensor, embedding: nn.Embedding, start: int = 0) -> Tensor:
        scale: float = self.config.width**0.5
        x: Tensor = self.dropout(self.positions(embedding(tokens) * scale, start=start))
        return x

    def translate(
        self,
        source: Tensor,
        source_lengths: Tensor | None = None,
        *,
        begin: int,
        end: int,
        most: int,
        cached: bool = True,
    ) -> list[list[int]]:
        """Translates a batch of texts; see `EncoderDecoder.greedy_targets`.

        `most`, the largest number of tokens in a translation, is at most the context.
        """
        if most > self.context:
            raise ValueError(f"most must be at most {self.context}, the context, got {most}")
        return self.greedy_targets(
            source, source_lengths,
            vocabulary=self.config.target_vocabulary,
            begin=begin, end=end, most=most, cached=cached,
        )  # fmt: skip


def _stack(
    block: type[TransformerBlock | DecoderBlock],
    config: TranslatorConfig,
    attn_implementation: AttnImplementation,
) -> Stack:
    return Stack(
        block(
            config.width, config.heads,
            norm=config.norm, hidden=config.hidden, dropout=config.dropout,
            attn_implementation=attn_implementation,
        )
        for _ in range(config.layers)
    )  # fmt: skip
