"""The encoder-decoder Transformer, which translates.

An encoder reads the source; a decoder writes the target, token by token, attending to what it wrote
and to what the encoder made of the source. Source: Attention Is All You Need (Vaswani et al. 2017);
there embeddings and the last projection are one matrix, and normalisations follow the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from transformer_kernels.masks.mask import Mask
from transformer_kernels.nn.attention import head_size
from transformer_kernels.nn.blocks import DecoderBlock, Norm, Stack, TransformerBlock
from transformer_kernels.nn.cache import KeyValueCache
from transformer_kernels.nn.options import (
    AttnImplementation,
    check_choice,
    check_positive,
    check_probability,
)
from transformer_kernels.nn.padding import check_lengths, clear_padding
from transformer_kernels.nn.positions import SinusoidalPositions


@dataclass(frozen=True, kw_only=True)
class TranslatorConfig:
    """What decides the weights and the function of a `Translator`.

    `layers` are those of the encoder, and as many of the decoder. With `shared` source and target
    have one vocabulary, and one matrix for both embeddings and the last projection.
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
                "source_vocabulary and target_vocabulary must be equal to be shared, "
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
"""By name: the base model of the source, with its vocabulary for English and German; and a small
one that trains in minutes on two cores. For other data `dataclasses.replace` the vocabularies."""


@dataclass(frozen=True)
class Memory:
    """What a decoder attends to: keys and values (B, heads, S, head_size) for each of its blocks,
    and the mask of their padding."""

    keys_and_values: tuple[tuple[Tensor, Tensor], ...]
    mask: Mask | None


class Translator(nn.Module):
    """Logits of the next token of a translation.

    `attn_implementation` selects how attention is computed, not its result: weights trained with
    one run with the others.
    """

    def __init__(
        self, config: TranslatorConfig, *, attn_implementation: AttnImplementation = "fused"
    ) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.embedding = nn.Embedding(config.target_vocabulary, width)
        """Of target tokens; if shared, of source tokens too, and the last projection."""
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
        """Xavier (uniform) for every matrix, embeddings too; biases 0."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    @property
    def context(self) -> int:
        return self.config.context

    def new_cache(self, batch: int, room: int) -> KeyValueCache:
        """Of the decoder, for `batch` translations of up to `room` tokens."""
        config, weight = self.config, self.embedding.weight
        return KeyValueCache(
            layers=config.layers, batch=batch, heads=config.heads, room=room,
            head_size=config.width // config.heads, dtype=weight.dtype, device=weight.device,
        )  # fmt: skip

    def forward(
        self, source: Tensor, target_in: Tensor, source_lengths: Tensor | None = None
    ) -> Tensor:
        """source (B, S) and target_in (B, T) int64, each up to the context long, source_lengths
        (B,), S by default -> logits (B, T, target vocabulary) of the tokens that follow.

        `target_in` is a beginning token and the target but for its end. Row t depends on all of
        the source and on target tokens 0 to t. Padding of the source changes nothing, whatever
        tokens it is. Padding behind a target needs no lengths: no row before it sees it, and its
        own rows are for the loss to leave out.
        """
        memory = self.memory(source, source_lengths)
        return self._logits(self._decode(target_in, memory))

    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> Tensor:
        """source (B, S) int64, source_lengths (B,) -> (B, S, width); padding gives numbers that
        mean nothing, but never NaN."""
        B, S = source.shape
        check_lengths("source_lengths", source_lengths, batch=B, room=S)
        embedding = self.embedding if self.source_embedding is None else self.source_embedding
        x = clear_padding(self._embed(source, embedding), source_lengths)
        y: Tensor = self.encoder_norm(self.encoder(x, mask=_padding(source_lengths)))
        return y

    def memory(self, source: Tensor, source_lengths: Tensor | None = None) -> Memory:
        """The encoded source, as the decoder needs it; computed once for a whole translation."""
        encoded = self.encode(source, source_lengths)
        keys_and_values = []
        for block in self.decoder:
            assert isinstance(block, DecoderBlock)
            keys_and_values.append(block.memory_attention.keys_and_values(encoded))
        return Memory(tuple(keys_and_values), _padding(source_lengths))

    def _decode(
        self, target_in: Tensor, memory: Memory, cache: KeyValueCache | None = None
    ) -> Tensor:
        """target_in (B, T), the tokens after what the cache has -> (B, T, width)."""
        start = 0 if cache is None else cache.extend(target_in.shape[1])
        x = self._embed(target_in, self.embedding, start)
        for n, (block, keys_and_values) in enumerate(
            zip(self.decoder, memory.keys_and_values, strict=True)
        ):
            x = self.decoder.run(
                block, x, keys_and_values,
                mask=Mask.causal() if cache is None else None,
                memory_mask=memory.mask,
                cache=None if cache is None else cache.layer(n),
            )  # fmt: skip
        y: Tensor = self.decoder_norm(x)
        return y

    def _embed(self, tokens: Tensor, embedding: nn.Embedding, start: int = 0) -> Tensor:
        scale: float = self.config.width**0.5
        x: Tensor = self.dropout(self.positions(embedding(tokens) * scale, start=start))
        return x

    def _logits(self, x: Tensor) -> Tensor:
        weight = self.embedding.weight if self.projection is None else self.projection.weight
        return nn.functional.linear(x, weight)

    @torch.no_grad()
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
        """The translation of each row of source (B, S), whose lengths are source_lengths (B,).

        After the token `begin` always the likeliest token follows, until that is `end`, or `most`
        tokens stand there; neither `begin` nor `end` is in the result. Keys and values are kept
        unless `cached` is False, which changes nothing but the time. Dropout is off meanwhile.
        """
        check_positive("most", most)
        if most > self.context:
            raise ValueError(f"most must be at most {self.context}, the context, got {most}")
        for name, token in (("begin", begin), ("end", end)):
            if not 0 <= token < self.config.target_vocabulary:
                last = self.config.target_vocabulary - 1
                raise ValueError(f"{name} must be a token from 0 to {last}, got {token}")
        was_training = self.training
        self.eval()
        try:
            written = self._write(self.memory(source, source_lengths), begin, end, most, cached)
        finally:
            self.train(was_training)
        return [row[: row.index(end)] if end in row else row for row in written.tolist()]

    def _write(self, memory: Memory, begin: int, end: int, most: int, cached: bool) -> Tensor:
        """(B, up to most): what follows `begin`; behind an end it means nothing."""
        keys, _ = memory.keys_and_values[0]
        B = keys.shape[0]
        cache = self.new_cache(B, most) if cached else None
        text = torch.full((B, 1), begin, device=keys.device)
        ended = torch.zeros(B, dtype=torch.bool, device=keys.device)
        while text.shape[1] <= most and not bool(ended.all()):
            x = self._decode(text if cache is None else text[:, -1:], memory, cache)
            token = self._logits(x[:, -1]).argmax(dim=-1)
            text = torch.cat([text, token[:, None]], dim=1)
            ended |= token == end
        return text[:, 1:]


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
