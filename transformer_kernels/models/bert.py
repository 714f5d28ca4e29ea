"""BERT: a bidirectional text encoder, with heads for pre-training and for classification.

Source: BERT: Pre-training of Deep Bidirectional Transformers (Devlin et al., 2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..dispatch.division import check_undivided
from ..nn.attention import size_of_heads
from ..nn.blocks import STD, Stack, TransformerBlock, normal_weights
from ..nn.masking import check_lengths, clear_padding, padding_mask
from ..nn.options import AttnImplementation, check_choice, check_fields, check_positive
from ..nn.positions import LearnedPositions
from .published import Layout, PublishedWeights, names_of_layers, open_weights


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Hyperparameters of a `Bert`; defaults are those of the paper."""

    layers: int
    """Number of transformer blocks"""
    heads: int
    """Number of attention heads"""
    width: int
    """Model width (embedding dimension)"""
    hidden: int
    """Inner width of the feed-forward networks"""
    vocabulary: int = 30522
    """Number of tokens; byte pairs are merged up to this size"""
    context: int = 512
    """Largest number of tokens of both segments together"""
    segments: int = 2
    """Number of segments that have an embedding"""
    dropout: float = 0.1
    """Dropout probability in training"""
    eps: float = 1e-12
    """Epsilon of the layer normalisations"""

    def __post_init__(self) -> None:
        check_fields(self)
        size_of_heads(self.width, self.heads)


SIZES = {
    "bert-base": BertConfig(layers=12, heads=12, width=768, hidden=3072),
    "bert-large": BertConfig(layers=24, heads=16, width=1024, hidden=4096),
}
"""Published sizes by name."""


class Bert(nn.Module):
    """BERT encoder: maps each token of a text to a vector that depends on the whole text."""

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
                config.width, config.heads,
                norm="post", hidden=config.hidden, activation="gelu", bias=True,
                dropout=config.dropout, eps=config.eps, attn_implementation=attn_implementation,
            )
            for _ in range(config.layers)
        )  # fmt: skip
        self.pooler = nn.Linear(config.width, config.width)
        normal_weights(self)

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
            TypeError, ValueError: T is longer than the context, a shape does not match `tokens`, or
                `lengths` is invalid.
        """
        B, T = tokens.shape
        if segments is not None and segments.shape != tokens.shape:
            raise ValueError(
                f"segments must have the shape of tokens, ({B}, {T}), got {tuple(segments.shape)}"
            )
        check_lengths("lengths", lengths, batch=B, max_length=T)
        x = self.embedding(tokens)
        x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        x = clear_padding(self.positions(x), lengths)
        y: Tensor = self.blocks(self.dropout(self.embedding_norm(x)), mask=padding_mask(lengths))
        return y

    def pooled(self, x: Tensor) -> Tensor:
        """Pools an output of `forward` (B, T, width) to (B, width).

        Applies a linear layer and tanh to the first token, the class token.
        """
        check_undivided("Bert.pooled")
        y: Tensor = self.pooler(x[:, 0])
        return y.tanh()

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

        Arguments and errors are those of `GPT2.from_safetensors`.
        """
        check_choice("attn_implementation", attn_implementation, AttnImplementation)
        with open_weights(path, _layout("cls", "classifier")) as weights:
            config = _published_config(weights, heads, dropout)
            return weights.model(
                lambda: cls(config, attn_implementation=attn_implementation), _names(config, "")
            )


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
            config = _published_config(weights, heads, dropout)
            return weights.model(
                lambda: cls(config, attn_implementation=attn_implementation),
                _names(config, "encoder.") | _PRE_TRAINING_NAMES,
                tied={
                    "cls.predictions.decoder.weight": "encoder.embedding.weight",
                    "cls.predictions.decoder.bias": "token_bias",
                },
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

    def forward(
        self, tokens: Tensor, *, segments: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """Arguments are those of `Bert.forward`; returns logits (B, classes)."""
        x = self.encoder(tokens, segments=segments, lengths=lengths)
        y: Tensor = self.classifier(self.dropout(self.encoder.pooled(x)))
        return y

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
            config = _published_config(weights, heads, dropout)
            new_head: dict[str, Tensor] = {}
            if classes is None:
                classes, _ = weights.matrix("classifier.weight")
            else:
                new_head["classifier.weight"] = STD * torch.randn(classes, config.width)
                new_head["classifier.bias"] = torch.zeros(classes)
            return weights.model(
                lambda: cls(config, classes, attn_implementation=attn_implementation),
                _names(config, "encoder.") | {"classifier": "classifier"},
                given=new_head,
            )


def _layout(*unused_heads: str) -> Layout:
    return Layout(
        prefix="bert.",
        ignored="|".join([r"embeddings\.position_ids", *(rf"{head}\..*" for head in unused_heads)]),
        old_endings=(
            ("LayerNorm.gamma", "LayerNorm.weight"),
            ("LayerNorm.beta", "LayerNorm.bias"),
        ),
    )


def _published_config(weights: PublishedWeights, heads: int | None, dropout: float) -> BertConfig:
    vocabulary, width = weights.matrix("embeddings.word_embeddings.weight")
    context, _ = weights.matrix("embeddings.position_embeddings.weight")
    segments, _ = weights.matrix("embeddings.token_type_embeddings.weight")
    hidden, _ = weights.matrix("encoder.layer.0.intermediate.dense.weight")
    return BertConfig(
        layers=weights.layers("encoder.layer."), heads=weights.heads(width, heads), width=width,
        hidden=hidden, vocabulary=vocabulary, context=context, segments=segments, dropout=dropout,
    )  # fmt: skip


def _names(config: BertConfig, prefix: str) -> dict[str, str]:
    """Names in a file of the encoder's parameters, which have a prefix in our models."""
    names = _ENCODER_NAMES | names_of_layers(config.layers, _BLOCK_NAMES)
    return {prefix + name: stored for name, stored in names.items()}


_ENCODER_NAMES = {
    "embedding": "embeddings.word_embeddings",
    "positions.table": "embeddings.position_embeddings.weight",
    "segments": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "pooler": "pooler.dense",
}
_BLOCK_NAMES = {
    f"blocks.*.{name}": f"encoder.layer.*.{stored}"
    for name, stored in {
        "attention.queries": "attention.self.query",
        "attention.keys": "attention.self.key",
        "attention.values": "attention.self.value",
        "attention.out_proj": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "feed_forward.up_proj": "intermediate.dense",
        "feed_forward.down_proj": "output.dense",
        "feed_forward_norm": "output.LayerNorm",
    }.items()
}
_PRE_TRAINING_NAMES = {
    "transform": "cls.predictions.transform.dense",
    "transform_norm": "cls.predictions.transform.LayerNorm",
    "token_bias": "cls.predictions.bias",
    "next_sentence": "cls.seq_relationship",
}
