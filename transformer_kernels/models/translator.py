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
from ..nn.attention import head_size
from ..nn.blocks import DecoderBlock, Norm, Stack, TransformerBlock
from ..nn.cache import KVCache
from ..nn.options import AttnImplementation, check_choice, check_positive, check_probability
from ..nn.padding import check_lengths, clear_padding
from ..nn.positions import SinusoidalPositions
from .encoder_decoder import Memory, greedy_targets


@dataclass(frozen=True, kw_only=True)
class TranslatorConfig:
    """Hyperparameters of a `Translator`.

    Encoder and decoder have `layers` blocks each. If `shared` is True, source and target have one
    vocabulary, and both embeddings and the last projection share one matrix.
    """

    source_vocabulary: int
    target_vocabulary: int
    layers: int
    width: int
    hidden: int
    heads: int
    context: int
    shared: bool = True
    dropout: float = 0.1
    norm: Norm = "post"

    def __post_init__(self) -> None:
        check_positive("source_vocabulary", self.source_vocabulary)
        check_positive("target_vocabulary", self.target_vocabulary)
        check_positive("layers", self.layers)
        check_positive("hidden", self.hidden)
        check_positive("context", self.context)
        head_size(self.width, self.heads, "narrow")
        check_probability("dropout", self.dropout)
        check_choice("norm", self.norm, Norm)
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


class Translator(nn.Module):
    """Encoder-decoder Transformer: logits of the next token of a translation.

    `attn_implementation` ("eager", "fused" or "sdpa") does not affect the result beyond rounding:
    weights trained with one implementation work with the others.
    """

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

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Returns an empty decoder cache for `batch` translations of up to `capacity` tokens."""
        config, weight = self.config, self.embedding.weight
        return KVCache(
            layers=config.layers, batch=batch, heads=config.heads, capacity=capacity,
            head_size=config.width // config.heads, dtype=weight.dtype, device=weight.device,
        )  # fmt: skip

    def forward(
        self, source: Tensor, target_in: Tensor, source_lengths: Tensor | None = None
    ) -> Tensor:
        """Computes logits of the next target token at every position.

        Args:
            source: (B, S) int64, S up to the context. Padding does not affect the result.
            target_in: (B, T) int64, T up to the context: a begin token, then the target without its
                end token. Trailing padding needs no lengths, because self-attention is causal;
                exclude its rows from the loss.
            source_lengths: (B,) integers, the number of tokens in each source; S unless given.

        Returns:
            logits (B, T, target vocabulary); row t depends on the whole source and on tokens 0 to t
            of `target_in`.

        Raises:
            TypeError, ValueError: a text is longer than the context, or `source_lengths` is
                invalid.
        """
        return self.decode(target_in, self.memory(source, source_lengths))

    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> Tensor:
        """Encodes source (B, S) int64 with source_lengths (B,) -> (B, S, width).

        Outputs at padding are unspecified, but never NaN.
        """
        B, S = source.shape
        check_lengths("source_lengths", source_lengths, batch=B, max_length=S)
        embedding = self.embedding if self.source_embedding is None else self.source_embedding
        x = clear_padding(self._embed(source, embedding), source_lengths)
        y: Tensor = self.encoder_norm(self.encoder(x, mask=_padding(source_lengths)))
        return y

    def memory(self, source: Tensor, source_lengths: Tensor | None = None) -> Memory:
        """Encodes the source and computes the decoder's cross-attention keys and values.

        Needed once per translation; arguments are those of `encode`.
        """
        encoded = self.encode(source, source_lengths)
        keys_and_values = []
        for block in self.decoder:
            assert isinstance(block, DecoderBlock)
            keys_and_values.append(block.memory_attention.keys_and_values(encoded))
        return Memory(tuple(keys_and_values), _padding(source_lengths))

    def decode(self, target_in: Tensor, memory: Memory, *, cache: KVCache | None = None) -> Tensor:
        """target_in (B, T), which follows the tokens in the cache -> logits (B, T, vocabulary)."""
        start = 0 if cache is None else cache.extend(target_in.shape[1])
        x = self._embed(target_in, self.embedding, start)
        for n, (block, keys_and_values) in enumerate(
            zip(self.decoder, memory.keys_and_values, strict=True)
        ):
            x = self.decoder.run(
                block,
                x,
                keys_and_values,
                mask=Mask.causal() if cache is None else None,
                memory_mask=memory.mask,
                cache=None if cache is None else cache.layer(n),
            )
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
        """Translates a batch of texts by greedy decoding.

        The model is in evaluation mode during the call, and its mode is restored afterwards.

        Args:
            source: (B, S) int64, S up to the context.
            source_lengths: (B,) integers, the number of tokens in each source; S unless given.
            begin: token that every translation starts with, not included in the result.
            end: token that ends a translation, not included in the result.
            most: largest number of tokens in a translation.
            cached: True to keep keys and values of previous tokens, which changes only the speed.

        Returns:
            the tokens of each translation.

        Raises:
            TypeError, ValueError: `most`, `begin`, `end` or `source_lengths` is out of range, or
                the source is longer than the context.
        """
        check_positive("most", most)
        if most > self.context:
            raise ValueError(f"most must be at most {self.context}, the context, got {most}")
        return greedy_targets(
            self, source, source_lengths,
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
            config.width,
            config.heads,
            norm=config.norm,
            hidden=config.hidden,
            dropout=config.dropout,
            attn_implementation=attn_implementation,
        )
        for _ in range(config.layers)
    )


def _padding(lengths: Tensor | None) -> Mask | None:
    return None if lengths is None else Mask.padding(lengths)
