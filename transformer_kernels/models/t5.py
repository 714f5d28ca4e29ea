"""T5: an encoder-decoder that reads and writes text, with positions as a bias by distance.

Each stack has one table of buckets (`nn.BucketedBias`), which all of its self-attentions share;
cross-attention has no positions. Source: Exploring the Limits of Transfer Learning with a Unified
Text-to-Text Transformer (Raffel et al., 2020, arXiv:1910.10683).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..masks.mask import Mask
from ..nn.blocks import Stack
from ..nn.cache import KVCache
from ..nn.options import AttnImplementation, check_choice, check_positive, check_probability
from ..nn.padding import check_lengths, clear_padding
from ..nn.relative_positions import BucketedBias, check_buckets
from ..nn.t5_blocks import T5Activation, T5Block
from .encoder_decoder import Memory, greedy_targets
from .published import Layout, PublishedWeights, open_weights, with_weights

PAD, END = 0, 1
"""Tokens of the published vocabulary: padding, which also begins every target, and its end."""


@dataclass(frozen=True, kw_only=True)
class T5Config:
    """Hyperparameters of a `T5`; defaults are those of the paper."""

    layers: int
    """Number of blocks of the encoder."""
    decoder_layers: int
    heads: int
    width: int
    head_size: int = 64
    hidden: int
    """Inner width of the feed-forward networks."""
    activation: T5Activation = "relu"
    tied_embeddings: bool = True
    """True if the embedding is also the projection to logits, of an input divided by sqrt(width).
    """
    vocabulary: int = 32128
    buckets: int = 32
    """Number of buckets of distances in each stack."""
    max_distance: int = 128
    """Distance from which on all distances share a bucket."""
    dropout: float = 0.1
    eps: float = 1e-6
    """Epsilon of the normalisations."""

    def __post_init__(self) -> None:
        for name in (
            "layers", "decoder_layers", "heads", "width", "head_size", "hidden", "vocabulary",
        ):  # fmt: skip
            check_positive(name, getattr(self, name))
        for bidirectional in (True, False):
            check_buckets(self.buckets, self.max_distance, bidirectional=bidirectional)
        check_choice("activation", self.activation, T5Activation)
        check_probability("dropout", self.dropout)
        if not self.eps > 0:
            raise ValueError(f"eps must be above 0, got {self.eps}")


def _size(layers: int, heads: int, width: int, hidden: int, head_size: int = 64) -> T5Config:
    return T5Config(
        layers=layers, decoder_layers=layers,
        heads=heads, width=width, head_size=head_size, hidden=hidden,
    )  # fmt: skip


def _size_v1_1(layers: int, heads: int, width: int, hidden: int) -> T5Config:
    return T5Config(
        layers=layers, decoder_layers=layers,
        heads=heads, width=width, hidden=hidden,
        activation="gated_gelu", tied_embeddings=False,
    )  # fmt: skip


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
            buckets=config.buckets,
            max_distance=config.max_distance,
            bidirectional=not decoder,
        )
        self.blocks = Stack(
            T5Block(
                config.width,
                config.heads,
                config.head_size,
                hidden=config.hidden,
                activation=config.activation,
                cross_attention=decoder,
                dropout=config.dropout,
                eps=config.eps,
                attn_implementation=attn_implementation,
            )
            for _ in range(config.decoder_layers if decoder else config.layers)
        )
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
        for n, block in enumerate(self.blocks):
            x = self.blocks.run(
                block,
                x,
                None if memory is None else memory.keys_and_values[n],
                mask=mask,
                memory_mask=None if memory is None else memory.mask,
                relative=relative,
                cache=None if cache is None else cache.layer(n),
            )
        y: Tensor = self.dropout(self.last_norm(x))
        return y


class T5(nn.Module):
    """T5: logits of the next target token at every position, given a source.

    Texts may have any length: distances beyond `max_distance` share a bucket.

    `attn_implementation` ("eager", "fused" or "sdpa") does not affect the result beyond rounding:
    weights trained with one implementation work with the others. "eager" and "sdpa" materialize the
    bias by distance, (heads, T, T) in each layer; "fused" does not.
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

        The config follows from the names and shapes in the file, except for `max_distance` and
        `dropout`. Embeddings are tied unless the file has a projection (lm_head) of its own.
        Weights are converted to torch's default dtype, and the model is in evaluation mode.

        Args:
            path: the file, as published by HuggingFace (model.safetensors).
            max_distance: distance from which on all distances share a bucket; 128 in every
                published model.
            dropout: dropout probability of the model in training mode.
            attn_implementation: "eager", "fused" or "sdpa".

        Raises:
            ImportError: the package safetensors is not installed.
            OSError: the file cannot be read.
            ValueError: it is not a valid safetensors file, or a tensor is missing, unexpected or
                of the wrong shape; the message names the tensor.
        """
        check_choice("attn_implementation", attn_implementation, AttnImplementation)
        with open_weights(path, _LAYOUT) as weights:
            config = _published_config(weights, max_distance, dropout)
            state = _published_state(weights, config)
            weights.check_all_used()
        return with_weights(lambda: cls(config, attn_implementation=attn_implementation), state)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Returns an empty decoder cache for `batch` targets of up to `capacity` tokens."""
        config, weight = self.config, self.embedding.weight
        return KVCache(
            layers=config.decoder_layers, batch=batch, heads=config.heads, capacity=capacity,
            head_size=config.head_size, dtype=weight.dtype, device=weight.device,
        )  # fmt: skip

    def forward(
        self, source: Tensor, target_in: Tensor, source_lengths: Tensor | None = None
    ) -> Tensor:
        """Computes logits of the next target token at every position.

        Args:
            source: (B, S) int64. Padding does not affect the result.
            target_in: (B, T) int64: a begin token (`PAD` in published models), then the target
                without its end token. Trailing padding needs no lengths, because self-attention is
                causal; exclude its rows from the loss.
            source_lengths: (B,) integers, the number of tokens in each source; S unless given.

        Returns:
            logits (B, T, vocabulary); row t depends on the whole source and on tokens 0 to t of
            `target_in`.

        Raises:
            TypeError, ValueError: `source_lengths` is invalid.
        """
        return self.decode(target_in, self.memory(source, source_lengths))

    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> Tensor:
        """Encodes source (B, S) int64 with source_lengths (B,) -> (B, S, width).

        Outputs at padding are unspecified, but never NaN.
        """
        B, S = source.shape
        check_lengths("source_lengths", source_lengths, batch=B, max_length=S)
        x = clear_padding(self.embedding(source), source_lengths)
        y: Tensor = self.encoder(x, mask=_padding(source_lengths))
        return y

    def memory(self, source: Tensor, source_lengths: Tensor | None = None) -> Memory:
        """Encodes the source and computes the decoder's cross-attention keys and values.

        Needed once per target; arguments are those of `encode`.
        """
        encoded = self.encode(source, source_lengths)
        keys_and_values = []
        for block in self.decoder.blocks:
            assert isinstance(block, T5Block)
            assert block.memory_attention is not None
            keys_and_values.append(block.memory_attention.keys_and_values(encoded))
        return Memory(tuple(keys_and_values), _padding(source_lengths))

    def decode(self, target_in: Tensor, memory: Memory, *, cache: KVCache | None = None) -> Tensor:
        """target_in (B, T), which follows the tokens in the cache -> logits (B, T, vocabulary)."""
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
        """Generates a target for each source by greedy decoding.

        The model is in evaluation mode during the call, and its mode is restored afterwards.

        Args:
            source: (B, S) int64.
            source_lengths: (B,) integers, the number of tokens in each source; S unless given.
            most: largest number of tokens in a target.
            begin: token that every target starts with, not included in the result.
            end: token that ends a target, not included in the result.
            cached: True to keep keys and values of previous tokens, which changes only the speed.

        Returns:
            the tokens of each target.

        Raises:
            TypeError, ValueError: `most`, `begin`, `end` or `source_lengths` is out of range.
        """
        check_positive("most", most)
        return greedy_targets(
            self, source, source_lengths,
            vocabulary=self.config.vocabulary,
            begin=begin, end=end, most=most, cached=cached,
        )  # fmt: skip


def _padding(lengths: Tensor | None) -> Mask | None:
    return None if lengths is None else Mask.padding(lengths)


_CROSS_TABLE = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
"""In old files, and unused: cross-attention has no positions."""

_LAYOUT = Layout(prefix="", ignored=_CROSS_TABLE.replace(".", r"\."))

_UP_PROJS = {"relu": {"up_proj": "wi"}, "gated_gelu": {"gate": "wi_0", "up_proj": "wi_1"}}

_TABLE = "{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def _published_config(weights: PublishedWeights, max_distance: int, dropout: float) -> T5Config:
    vocabulary, width = weights.matrix("shared.weight")
    buckets, heads = weights.matrix(_TABLE.format(stack="encoder"))
    inner, _ = weights.matrix("encoder.block.0.layer.0.SelfAttention.q.weight")
    feed_forward = "encoder.block.0.layer.1.DenseReluDense"
    gated = f"{feed_forward}.wi_0.weight" in weights
    hidden, _ = weights.matrix(f"{feed_forward}.{'wi_0' if gated else 'wi'}.weight")
    return T5Config(
        layers=weights.layers("encoder.block."),
        decoder_layers=weights.layers("decoder.block."),
        heads=heads,
        width=width,
        head_size=max(inner // heads, 1),
        hidden=hidden,
        activation="gated_gelu" if gated else "relu",
        tied_embeddings=_is_tied(weights, (vocabulary, width)),
        vocabulary=vocabulary,
        buckets=buckets,
        max_distance=max_distance,
        dropout=dropout,
    )


def _is_tied(weights: PublishedWeights, shape: tuple[int, int]) -> bool:
    if "lm_head.weight" not in weights:
        return True
    projection = weights.load("lm_head.weight", shape)
    return torch.equal(projection, weights.load("shared.weight", shape))


def _published_state(weights: PublishedWeights, config: T5Config) -> dict[str, Tensor]:
    width, shape = config.width, (config.vocabulary, config.width)
    embedding = weights.load("shared.weight", shape)
    state = {"embedding.weight": embedding}
    if not config.tied_embeddings:
        state["projection.weight"] = weights.load("lm_head.weight", shape)
    for stack, layers in (("encoder", config.layers), ("decoder", config.decoder_layers)):
        weights.check_tied(f"{stack}.embed_tokens.weight", embedding)
        table = weights.load(_TABLE.format(stack=stack), (config.buckets, config.heads))
        state[f"{stack}.positions.table"] = table
        state[f"{stack}.last_norm.weight"] = weights.load(
            f"{stack}.final_layer_norm.weight", (width,)
        )
        for n in range(layers):
            block = _published_block(weights, f"{stack}.block.{n}.", config, stack == "decoder")
            state |= {f"{stack}.blocks.{n}.{name}": tensor for name, tensor in block.items()}
    return state


def _published_block(
    weights: PublishedWeights, hf_prefix: str, config: T5Config, decoder: bool
) -> dict[str, Tensor]:
    """Parameters of one block, by their names in `T5Block`."""
    width, hidden = config.width, config.hidden
    state = _published_attention(weights, hf_prefix + "layer.0.SelfAttention", "attention", config)
    norms = ["attention_norm", "feed_forward_norm"]
    if decoder:
        name = hf_prefix + "layer.1.EncDecAttention"
        state |= _published_attention(weights, name, "memory_attention", config)
        norms.insert(1, "memory_norm")
    for n, norm in enumerate(norms):
        state[f"{norm}.weight"] = weights.load(f"{hf_prefix}layer.{n}.layer_norm.weight", (width,))
    feed_forward = f"{hf_prefix}layer.{len(norms) - 1}.DenseReluDense"
    for layer, hf_layer in _UP_PROJS[config.activation].items():
        state[f"feed_forward.{layer}.weight"] = weights.load(
            f"{feed_forward}.{hf_layer}.weight", (hidden, width)
        )
    state["feed_forward.down_proj.weight"] = weights.load(
        f"{feed_forward}.wo.weight", (width, hidden)
    )
    return state


def _published_attention(
    weights: PublishedWeights, hf_name: str, name: str, config: T5Config
) -> dict[str, Tensor]:
    width, inner = config.width, config.heads * config.head_size
    return {
        f"{name}.{layer}.weight": weights.load(f"{hf_name}.{hf_layer}.weight", shape)
        for layer, hf_layer, shape in (
            ("queries", "q", (inner, width)),
            ("keys", "k", (inner, width)),
            ("values", "v", (inner, width)),
            ("out_proj", "o", (width, inner)),
        )
    }
