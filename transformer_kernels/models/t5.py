"""T5: an encoder-decoder that reads and writes text, with positions as a bias by distance.

Each stack has one table of buckets (`nn.BucketedBias`), which all of its self-attentions share;
cross-attention has no positions. Source: Exploring the Limits of Transfer Learning with a Unified
Text-to-Text Transformer (Raffel et al., 2020, arXiv:1910.10683).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..masks.mask import Mask
from ..nn.attention import KVCache
from ..nn.blocks import Stack
from ..nn.masking import check_lengths, clear_padding, padding_mask
from ..nn.options import AttnImplementation, check_choice, check_fields
from ..nn.t5_blocks import BucketedBias, T5Activation, T5Block, check_buckets
from .generation import EncoderDecoder, Memory
from .published import Layout, PublishedWeights, names_of_layers, open_weights

PAD, END = 0, 1
"""Tokens of the published vocabulary: padding, which also begins every target, and its end."""


@dataclass(frozen=True, kw_only=True)
class T5Config:
    """Hyperparameters of a `T5`; defaults are those of the paper."""

    layers: int
    """Number of blocks of the encoder"""
    decoder_layers: int
    """Number of blocks of the decoder"""
    heads: int
    """Number of attention heads"""
    width: int
    """Model width (embedding dimension)"""
    head_size: int = 64
    """Size of a head"""
    hidden: int
    """Inner width of the feed-forward networks"""
    activation: T5Activation = "relu"
    """Activation of the feed-forward networks: that of T5 (relu) or of v1.1 (gated_gelu)"""
    tied_embeddings: bool = True
    """True if the embedding is also the projection to logits, of an input divided by sqrt(width)"""
    vocabulary: int = 32128
    """Number of tokens"""
    buckets: int = 32
    """Number of buckets of distances in each stack"""
    max_distance: int = 128
    """Distance from which on all distances share a bucket"""
    dropout: float = 0.1
    """Dropout probability in training"""
    eps: float = 1e-6
    """Epsilon of the normalisations"""

    def __post_init__(self) -> None:
        check_fields(self)
        for bidirectional in (True, False):
            check_buckets(self.buckets, self.max_distance, bidirectional=bidirectional)


def _size(layers: int, heads: int, width: int, hidden: int, head_size: int = 64) -> T5Config:
    return T5Config(
        layers=layers, decoder_layers=layers,
        heads=heads, width=width, head_size=head_size, hidden=hidden,
    )  # fmt: skip


def _size_v1_1(layers: int, heads: int, width: int, hidden: int) -> T5Config:
    config = _size(layers, heads, width, hidden)
    return replace(config, activation="gated_gelu", tied_embeddings=False)


SIZES = {
    "t5-small": _size(6, 8, 512, 2048),
    "t5-base": _size(12, 12, 768, 3072),
    "t5-large": _size(24, 16, 1024, 4096),
    "t5-3b": _size(24, 32, 1024, 16384, head_size=128),
    "t5-11b": _size(24, 128, 1024, 65536, head_size=128),
    "t5-v1.1-small": _size_v1_1(8, 6, 512, 1024),
    "t5-v1.1-base": _size_v1_1(12, 12, 768, 2048),
    "t5-v1.1-large": _size_v1_1(24, 16, 1024, 2816),
    "t5-v1.1-xl": _size_v1_1(24, 32, 2048, 5120),
    "t5-v1.1-xxl": _size_v1_1(24, 64, 4096, 10240),
}
"""Published sizes by name. Flan-T5 has those of v1.1."""


class T5Stack(nn.Module):
    """Encoder or decoder of a T5: blocks, their bias by distance, and a last normalisation."""

    def __init__(
        self,
        config: T5Config,
        *,
        decoder: bool,
        attn_implementation: AttnImplementation = "fused",
    ) -> None:
        super().__init__()
        self.positions = BucketedBias(
            config.heads,
            buckets=config.buckets, max_distance=config.max_distance, bidirectional=not decoder,
        )  # fmt: skip
        self.blocks = Stack(
            T5Block(
                config.width, config.heads, config.head_size,
                hidden=config.hidden, activation=config.activation, cross_attention=decoder,
                dropout=config.dropout, eps=config.eps, attn_implementation=attn_implementation,
            )
            for _ in range(config.decoder_layers if decoder else config.layers)
        )  # fmt: skip
        self.last_norm = nn.RMSNorm(config.width, eps=config.eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        memory: Memory | None = None,
        *,
        mask: Mask | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Runs all blocks.

        Args:
            x: embeddings (B, T, width).
            memory: encoded source, for a decoder.
            mask: mask of the self-attentions; None with a cache, whose attention is causal.
            cache: key/value cache of the self-attentions, already extended by T positions.

        Returns:
            (B, T, width).
        """
        x = self.dropout(x)
        relative = self.positions()
        memory_mask = None if memory is None else memory.mask
        for n, block in enumerate(self.blocks):
            k_and_v = None if memory is None else memory.keys_and_values[n]
            layer = None if cache is None else cache.layer(n)
            x = self.blocks.run(
                block, x, k_and_v,
                mask=mask, memory_mask=memory_mask, relative=relative, cache=layer,
            )  # fmt: skip
        y: Tensor = self.dropout(self.last_norm(x))
        return y


class T5(EncoderDecoder):
    """T5: logits of the next target token at every position, given a source.

    Texts may have any length: distances beyond `max_distance` share a bucket. The implementations
    "eager" and "sdpa" materialize the bias by distance, (heads, T, T) in each layer; "fused" does
    not.
    """

    def __init__(
        self, config: T5Config, *, attn_implementation: AttnImplementation = "fused"
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        """Embedding of source and target; if tied, also the projection to logits."""
        self.encoder, self.decoder = (
            T5Stack(config, decoder=decoder, attn_implementation=attn_implementation)
            for decoder in (False, True)
        )
        self.projection: nn.Linear | None = None
        if not config.tied_embeddings:
            self.projection = nn.Linear(config.width, config.vocabulary, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """Draws embeddings from N(0, 1), and matrices and buckets so that sums have unit variance.

        Initial queries are smaller by sqrt(head_size), because attention has no scale.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                scale = self.config.head_size if name.endswith("queries") else 1
                nn.init.normal_(module.weight, std=(module.in_features * scale) ** -0.5)
            elif isinstance(module, BucketedBias):
                nn.init.normal_(module.table, std=self.config.width**-0.5)

    @property
    def decoder_blocks(self) -> Stack:
        return self.decoder.blocks

    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> Tensor:
        B, S = source.shape
        check_lengths("source_lengths", source_lengths, batch=B, max_length=S)
        x = clear_padding(self.embedding(source), source_lengths)
        y: Tensor = self.encoder(x, mask=padding_mask(source_lengths))
        return y

    def decode(self, target_in: Tensor, memory: Memory, *, cache: KVCache | None = None) -> Tensor:
        mask: Mask | None = Mask.causal()
        if cache is not None:
            cache.extend(target_in.shape[1])
            mask = None
        y = self.decoder(self.embedding(target_in), memory, mask=mask, cache=cache)
        if self.projection is None:
            return nn.functional.linear(y * self.config.width**-0.5, self.embedding.weight)
        logits: Tensor = self.projection(y)
        return logits

    def generate(
        self,
        source: Tensor,
        source_lengths: Tensor | None = None,
        *,
        most: int,
        begin: int = PAD,
        end: int = END,
        cached: bool = True,
    ) -> list[list[int]]:
        """Generates a target for each source; see `EncoderDecoder.greedy_targets`.

        `begin` and `end` are those of published models unless given.
        """
        return self.greedy_targets(
            source, source_lengths,
            vocabulary=self.config.vocabulary,
            begin=begin, end=end, most=most, cached=cached,
        )  # fmt: skip

    @classmethod
    def from_safetensors(
        cls,
        path: Path | str,
        *,
        max_distance: int = 128,
        dropout: float = 0.1,
        attn_implementation: AttnImplementation = "fused",
    ) -> T5:
        """Loads the model from a safetensors file of HuggingFace, of T5, T5 v1.1 or Flan-T5.

        The config follows from the names and shapes in the file, except for `max_distance` (128 in
        every published model) and `dropout`. Embeddings are tied unless the file has a projection
        (lm_head) of its own. Other arguments and errors are those of `GPT2.from_safetensors`.
        """
        check_choice("attn_implementation", attn_implementation, AttnImplementation)
        with open_weights(path, _LAYOUT) as weights:
            config = _published_config(weights, max_distance, dropout)
            copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
            if config.tied_embeddings:
                copies.append("lm_head.weight")
            return weights.model(
                lambda: cls(config, attn_implementation=attn_implementation),
                _names("encoder", config) | _names("decoder", config),
                tied=dict.fromkeys(copies, "embedding.weight"),
            )


_TABLE = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"

_CROSS_TABLE = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
"""In old files, and unused: cross-attention has no positions."""

_LAYOUT = Layout(prefix="", ignored=_CROSS_TABLE.replace(".", r"\."))

_UP_PROJS = {"relu": {"up_proj": "wi"}, "gated_gelu": {"gate": "wi_0", "up_proj": "wi_1"}}


def _published_config(weights: PublishedWeights, max_distance: int, dropout: float) -> T5Config:
    vocabulary, width = weights.matrix("shared.weight")
    buckets, heads = weights.matrix(f"encoder.{_TABLE}")
    inner, _ = weights.matrix("encoder.block.0.layer.0.SelfAttention.q.weight")
    feed_forward = "encoder.block.0.layer.1.DenseReluDense"
    gated = f"{feed_forward}.wi_0.weight" in weights
    hidden, _ = weights.matrix(f"{feed_forward}.{'wi_0' if gated else 'wi'}.weight")
    tied, shape = "lm_head.weight" not in weights, (vocabulary, width)
    if not tied:
        projection = weights.load("lm_head.weight", shape)
        tied = torch.equal(projection, weights.load("shared.weight", shape))
    return T5Config(
        layers=weights.layers("encoder.block."), decoder_layers=weights.layers("decoder.block."),
        heads=heads, width=width, head_size=max(inner // heads, 1), hidden=hidden,
        activation="gated_gelu" if gated else "relu", tied_embeddings=tied, vocabulary=vocabulary,
        buckets=buckets, max_distance=max_distance, dropout=dropout,
    )  # fmt: skip


def _names(stack: str, config: T5Config) -> dict[str, str]:
    """Names in a file of the parameters outside of the stacks and in one of them."""
    layers = {"attention": "SelfAttention", "memory_attention": "EncDecAttention"}
    norms = ["attention_norm", "memory_norm", "feed_forward_norm"]
    if stack == "encoder":
        del layers["memory_attention"], norms[1]
    block = {norm: f"{n}.layer_norm" for n, norm in enumerate(norms)}
    for n, (layer, stored) in enumerate(layers.items()):
        for ours, theirs in {"queries": "q", "keys": "k", "values": "v", "out_proj": "o"}.items():
            block[f"{layer}.{ours}"] = f"{n}.{stored}.{theirs}"
    for ours, theirs in {**_UP_PROJS[config.activation], "down_proj": "wo"}.items():
        block[f"feed_forward.{ours}"] = f"{len(layers)}.DenseReluDense.{theirs}"
    blocks = {
        f"{stack}.blocks.*.{ours}": f"{stack}.block.*.layer.{theirs}"
        for ours, theirs in block.items()
    }
    return {
        "embedding": "shared",
        "projection": "lm_head",
        f"{stack}.positions.table": f"{stack}.{_TABLE}",
        f"{stack}.last_norm": f"{stack}.final_layer_norm",
    } | names_of_layers(max(config.layers, config.decoder_layers), blocks)
