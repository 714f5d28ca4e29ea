"""Transformer for text classification.

Token embeddings and learned positions, a stack of blocks, the mean over the text, and a projection
to the classes. Source: Transformers from scratch (P. Bloem, 2019), "Classification transformer".
Unlike in the source, padding is excluded from attention and from the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..nn.attention import HeadForm, size_of_heads
from ..nn.blocks import Norm, Stack, TransformerBlock, normal_weights
from ..nn.masking import check_lengths, clear_padding, masked_mean, padding_mask
from ..nn.options import AttnImplementation, check_fields
from ..nn.positions import LearnedPositions


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """Hyperparameters of a `Classifier`."""

    vocabulary: int
    """Number of tokens; byte pairs are merged up to this size"""
    layers: int
    """Number of transformer blocks"""
    width: int
    """Model width (embedding dimension)"""
    heads: int
    """Number of attention heads"""
    classes: int = 2
    """Number of classes"""
    context: int = 512
    """Largest number of tokens of a text; longer texts are cut"""
    dropout: float = 0.0
    """Dropout probability in training"""
    norm: Norm = "post"
    """Normalisation after each residual sum (post) or before each layer (pre)"""
    form: HeadForm = "narrow"
    """Heads of width // heads (narrow), or each of the full width (wide)"""

    def __post_init__(self) -> None:
        check_fields(self)
        size_of_heads(self.width, self.heads, self.form)


SIZES = {
    "demo": ClassifierConfig(
        vocabulary=4096, layers=2, width=64, heads=4, context=256, dropout=0.1, norm="pre"
    ),
    "seed": ClassifierConfig(vocabulary=50_000, layers=6, width=128, heads=8, form="wide"),
}
"""Named sizes. "demo" trains in minutes on two cores. "seed" is the model of the source for film
reviews, with the width, heads and vocabulary of the experiment it links to. For other data, set the
vocabulary and the classes with `dataclasses.replace`."""


class Classifier(nn.Module):
    """Classification transformer: maps a text to log-probabilities of its class."""

    def __init__(
        self, config: ClassifierConfig, *, attn_implementation: AttnImplementation = "fused"
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = LearnedPositions(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = Stack(
            TransformerBlock(
                config.width, config.heads,
                norm=config.norm, form=config.form, dropout=config.dropout,
                attn_implementation=attn_implementation,
            )
            for _ in range(config.layers)
        )  # fmt: skip
        self.last_norm = nn.LayerNorm(config.width) if config.norm == "pre" else nn.Identity()
        self.classes = nn.Linear(config.width, config.classes)
        normal_weights(self)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Classifies a batch of texts.

        Args:
            tokens: (B, T) int64, T up to the context.
            lengths: (B,) integers, the number of tokens in each row; T unless given. Tokens after
                that are padding and do not affect the result. Length 0 is allowed: the mean of an
                empty text is 0.

        Returns:
            log-probabilities (B, classes), natural log.

        Raises:
            TypeError, ValueError: T is longer than the context, or `lengths` is invalid.
        """
        B, T = tokens.shape
        check_lengths("lengths", lengths, batch=B, max_length=T)
        x: Tensor = self.dropout(self.positions(self.embedding(tokens)))
        x = clear_padding(x, lengths)
        x = self.blocks(x, mask=padding_mask(lengths))
        x = masked_mean(self.last_norm(x), lengths)
        return self.classes(x).log_softmax(dim=-1)  # type: ignore[no-any-return]
