"""BERT: a bidirectional text encoder, with heads for pre-training and for classification.

Source: BERT: Pre-training of Deep Bidirectional Transformers (Devlin et al., 2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..dispatch.division import check_undivided, token_positions
from ..masks.mask import Mask
from ..nn.attention import head_size
from ..nn.blocks import Stack, TransformerBlock
from ..nn.initial import STD, normal_weights
from ..nn.options import AttnImplementation, check_choice, check_positive, check_probability
from ..nn.positions import LearnedPositions
from .published import Layout, PublishedWeights, open_weights, with_weights


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Hyperparameters of a `Bert`; defaults are those of the paper."""

    layers: int
    heads: int
    width: int
    hidden: int
    """Inner width of the feed-forward networks."""
    vocabulary: int = 30522
    context: int = 512
    segments: int = 2
    dropout: float = 0.1
    eps: float = 1e-12
    """Epsilon of the layer normalisations."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "vocabulary", "context", "segments"):
            check_positive(name, getattr(self, name))
        head_size(self.width, self.heads, "narrow")
        check_probability("dropout", self.dropout)
        if not self.eps > 0:
            raise ValueError(f"eps must be above 0, got {self.eps}")


SIZES = {
    "bert-base": BertConfig(layers=12, heads=12, width=768, hidden=3072),
    "bert-large": BertConfig(layers=24, heads=16, width=1024, hidden=4096),
}
"""Published sizes by name."""


class Bert(nn.Module):
    """BERT encoder: maps each token of a text to a vector that depends on the whole text.

    `attn_implementation` ("eager", "fused" or "sdpa") does not affect the result beyond rounding:
    weights trained with one implementation work with the others.
    """

    def __init__(
        self, config: BertConfig, *, attn_implementation: AttnImplementation = "fused"
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = LearnedPositions(config.context, config.width)
        self.segments = nn.Embedding(config.segments, config.width)
        self.embedding_norm = nn.LayerNorm(config.width, eps=config.eps)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = Stack(
            TransformerBlock(
                config.width,
                config.heads,
                norm="post",
                hidden=config.hidden,
                activation="gelu",
                bias=True,
                dropout=config.dropout,
                eps=config.eps,
                attn_implementation=attn_implementation,
            )
            for _ in range(config.layers)
        )
        self.pooler = nn.Linear(config.width, config.width)
        normal_weights(self)

    @classmethod
    def from_safetensors(
        cls,
        path: Path | str,
        *,
        heads: int | None = None,
        dropout: float = 0.1,
        attn_implementation: AttnImplementation = "fused",
    ) -> Bert:
        """Loads the encoder from a safetensors file of HuggingFace, ignoring any heads in it.

        The config follows from the shapes in the file, except for `heads` and `dropout`. Weights
        are converted to torch's default dtype, and the model is in evaluation mode.

        Args:
            path: the file, as published by HuggingFace (model.safetensors).
            heads: number of attention heads; width / 64 unless given.
            dropout: dropout probability of the model in training mode.
            attn_implementation: "eager", "fused" or "sdpa".

        Raises:
            ImportError: the package safetensors is not installed.
            OSError: the file cannot be read.
            ValueError: it is not a valid safetensors file, or a tensor is missing, unexpected or
                of the wrong shape; the message names the tensor.
        """
        check_choice("attn_implementation", attn_implementation, AttnImplementation)
        with open_weights(path, _layout("cls", "classifier")) as weights:
            config, state = _published_encoder(weights, heads, dropout)
            weights.check_all_used()
        return with_weights(lambda: cls(config, attn_implementation=attn_implementation), state)

    def forward(
        self, tokens: Tensor, *, segments: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """Encodes a batch of texts.

        Args:
            tokens: (B, T) int64, T up to the context.
            segments: (B, T) int64, the segment of each token; 0 for all unless given.
            lengths: (B,) integers, the number of tokens in each row; T unless given. Tokens after
                that are padding: they affect no other output, and their own output is unspecified.

        Returns:
            (B, T, width).

        Raises:
            ValueError: T is longer than the context, or a shape does not match `tokens`.
        """
        B, T = tokens.shape
        if segments is not None and segments.shape != tokens.shape:
            raise ValueError(
                f"segments must have the shape of tokens, ({B}, {T}), got {tuple(segments.shape)}"
            )
        x = self.embedding(tokens)
        x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        x = self.positions(x)
        mask = None
        if lengths is not None:
            mask = Mask.padding(lengths)
            x = x.masked_fill(_padding(lengths, B, T)[:, :, None], 0.0)
        y: Tensor = self.blocks(self.dropout(self.embedding_norm(x)), mask=mask)
        return y

    def pooled(self, x: Tensor) -> Tensor:
        """Pools an output of `forward` (B, T, width) to (B, width).

        Applies a linear layer and tanh to the first token, the class token.
        """
        check_undivided("Bert.pooled")
        y: Tensor = self.pooler(x[:, 0])
        return y.tanh()


def _padding(lengths: Tensor, B: int, T: int) -> Tensor:
    """(B, T) bool: True at padding."""
    if lengths.shape != (B,):
        raise ValueError(f"lengths must be (batch,) = ({B},), got {tuple(lengths.shape)}")
    return token_positions(T, lengths.device) >= lengths[:, None]


class PreTrainingLogits(NamedTuple):
    """Output of `BertForPreTraining`."""

    tokens: Tensor
    """(B, T, vocabulary): logits of the original token at each position"""
    next_sentence: Tensor
    """(B, 2): logits that the second text follows the first (0) or is a random one (1)"""


class BertForPreTraining(nn.Module):
    """BERT with its two pre-training heads: masked tokens and next-sentence prediction.

    The token embedding and the projection to token logits share one weight.
    """

    def __init__(
        self, config: BertConfig, *, attn_implementation: AttnImplementation = "fused"
    ) -> None:
        super().__init__()
        self.config = config
        self.encoder = Bert(config, attn_implementation=attn_implementation)
        self.transform = nn.Linear(config.width, config.width)
        self.activation = nn.GELU()
        self.transform_norm = nn.LayerNorm(config.width, eps=config.eps)
        self.token_bias = nn.Parameter(torch.zeros(config.vocabulary))
        self.next_sentence = nn.Linear(config.width, 2)
        normal_weights(self.transform)
        normal_weights(self.next_sentence)

    @classmethod
    def from_safetensors(
        cls,
        path: Path | str,
        *,
        heads: int | None = None,
        dropout: float = 0.1,
        attn_implementation: AttnImplementation = "fused",
    ) -> BertForPreTraining:
        """Same as `Bert.from_safetensors`, for a file that includes both pre-training heads."""
        check_choice("attn_implementation", attn_implementation, AttnImplementation)
        with open_weights(path, _layout("classifier")) as weights:
            config, encoder = _published_encoder(weights, heads, dropout)
            state = {f"encoder.{name}": tensor for name, tensor in encoder.items()}
            state |= _published_predictions(weights, config)
            weights.check_tied("cls.predictions.decoder.weight", encoder["embedding.weight"])
            weights.check_tied("cls.predictions.decoder.bias", state["token_bias"])
            weights.check_all_used()
        return with_weights(lambda: cls(config, attn_implementation=attn_implementation), state)

    def forward(
        self, tokens: Tensor, *, segments: Tensor | None = None, lengths: Tensor | None = None
    ) -> PreTrainingLogits:
        """Arguments are those of `Bert.forward`; logits at padding are unspecified."""
        x = self.encoder(tokens, segments=segments, lengths=lengths)
        y = self.transform_norm(self.activation(self.transform(x)))
        return PreTrainingLogits(
            nn.functional.linear(y, self.encoder.embedding.weight, self.token_bias),
            self.next_sentence(self.encoder.pooled(x)),
        )


class BertForClassification(nn.Module):
    """BERT with a linear classification head on the pooled output."""

    def __init__(
        self, config: BertConfig, classes: int, *, attn_implementation: AttnImplementation = "fused"
    ) -> None:
        super().__init__()
        check_positive("classes", classes)
        self.config = config
        self.encoder = Bert(config, attn_implementation=attn_implementation)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.width, classes)
        normal_weights(self.classifier)

    @classmethod
    def from_safetensors(
        cls,
        path: Path | str,
        *,
        classes: int | None = None,
        heads: int | None = None,
        dropout: float = 0.1,
        attn_implementation: AttnImplementation = "fused",
    ) -> BertForClassification:
        """Same as `Bert.from_safetensors`, plus the classification head.

        With `classes`, the head is newly initialised for that many classes. Without, it is loaded
        from the file, which must include one.
        """
        check_choice("attn_implementation", attn_implementation, AttnImplementation)
        if classes is not None:
            check_positive("classes", classes)
        unused = ("cls",) if classes is None else ("cls", "classifier")
        with open_weights(path, _layout(*unused)) as weights:
            config, encoder = _published_encoder(weights, heads, dropout)
            state = {f"encoder.{name}": tensor for name, tensor in encoder.items()}
            if classes is None:
                classes, _ = weights.matrix("classifier.weight")
                state |= weights.linear("classifier", "classifier", config.width, classes)
            else:
                state["classifier.weight"] = STD * torch.randn(classes, config.width)
                state["classifier.bias"] = torch.zeros(classes)
            weights.check_all_used()
        return with_weights(
            lambda: cls(config, classes, attn_implementation=attn_implementation), state
        )

    def forward(
        self, tokens: Tensor, *, segments: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """Arguments are those of `Bert.forward`; returns logits (B, classes)."""
        x = self.encoder(tokens, segments=segments, lengths=lengths)
        y: Tensor = self.classifier(self.dropout(self.encoder.pooled(x)))
        return y


def _layout(*unused_heads: str) -> Layout:
    return Layout(
        prefix="bert.",
        ignored="|".join([r"embeddings\.position_ids", *(rf"{head}\..*" for head in unused_heads)]),
        old_endings=(
            ("LayerNorm.gamma", "LayerNorm.weight"),
            ("LayerNorm.beta", "LayerNorm.bias"),
        ),
    )


def _published_encoder(
    weights: PublishedWeights, heads: int | None, dropout: float
) -> tuple[BertConfig, dict[str, Tensor]]:
    vocabulary, width = weights.matrix("embeddings.word_embeddings.weight")
    context, _ = weights.matrix("embeddings.position_embeddings.weight")
    segments, _ = weights.matrix("embeddings.token_type_embeddings.weight")
    hidden, _ = weights.matrix("encoder.layer.0.intermediate.dense.weight")
    config = BertConfig(
        layers=weights.layers("encoder.layer."),
        heads=weights.heads(width, heads),
        width=width,
        hidden=hidden,
        vocabulary=vocabulary,
        context=context,
        segments=segments,
        dropout=dropout,
    )
    state = {
        name: weights.load(f"embeddings.{hf_name}_embeddings.weight", (rows, width))
        for name, hf_name, rows in (
            ("embedding.weight", "word", vocabulary),
            ("positions.table", "position", context),
            ("segments.weight", "token_type", segments),
        )
    }
    state |= weights.norm("embeddings.LayerNorm", "embedding_norm", width)
    state |= weights.linear("pooler.dense", "pooler", width, width)
    for n in range(config.layers):
        state |= _published_block(weights, f"encoder.layer.{n}.", f"blocks.{n}.", config)
    return config, state


def _published_block(
    weights: PublishedWeights, hf_prefix: str, prefix: str, config: BertConfig
) -> dict[str, Tensor]:
    width, hidden = config.width, config.hidden
    state: dict[str, Tensor] = {}
    for name, layer, inputs, outputs in (
        ("attention.self.query", "attention.queries", width, width),
        ("attention.self.key", "attention.keys", width, width),
        ("attention.self.value", "attention.values", width, width),
        ("attention.output.dense", "attention.out_proj", width, width),
        ("intermediate.dense", "feed_forward.up_proj", width, hidden),
        ("output.dense", "feed_forward.down_proj", hidden, width),
    ):
        state |= weights.linear(hf_prefix + name, prefix + layer, inputs, outputs)
    state |= weights.norm(
        hf_prefix + "attention.output.LayerNorm", prefix + "attention_norm", width
    )
    state |= weights.norm(hf_prefix + "output.LayerNorm", prefix + "feed_forward_norm", width)
    return state


def _published_predictions(weights: PublishedWeights, config: BertConfig) -> dict[str, Tensor]:
    width = config.width
    hf_prefix = "cls.predictions."
    return (
        weights.linear(hf_prefix + "transform.dense", "transform", width, width)
        | weights.norm(hf_prefix + "transform.LayerNorm", "transform_norm", width)
        | {"token_bias": weights.load(hf_prefix + "bias", (config.vocabulary,))}
        | weights.linear("cls.seq_relationship", "next_sentence", width, 2)
    )
