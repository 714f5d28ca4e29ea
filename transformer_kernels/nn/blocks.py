"""The transformer block: attention, then a feed-forward layer, each with a residual connection."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from transformer_kernels.mask import Mask
from transformer_kernels.nn.attention import AttentionPath, HeadForm, MultiHeadAttention
from transformer_kernels.nn.options import check_choice, check_positive, check_probability

Norm = Literal["post", "pre"]
"""post: norm(x + layer(x)), the original order. pre: x + layer(norm(x)), easier to train deep."""

Activation = Literal["relu", "gelu"]


class FeedForward(nn.Module):
    """Each position by itself: width -> 4 width -> width, with a non-linearity between."""

    def __init__(self, width: int, *, activation: Activation = "relu") -> None:
        super().__init__()
        check_positive("width", width)
        check_choice("activation", activation, Activation)
        self.expand = nn.Linear(width, 4 * width)
        self.activation = nn.ReLU() if activation == "relu" else nn.GELU()
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> the same shape."""
        y: Tensor = self.contract(self.activation(self.expand(x)))
        return y


class TransformerBlock(nn.Module):
    """Self-attention and feed-forward, each normalised, with dropout on each one's result.

    `norm` places the layer normalisations: "post" after each residual sum, "pre" before each layer
    (a stack of "pre" blocks wants one more normalisation at its end). `form`, `attention` and the
    dropout of attention weights are those of `MultiHeadAttention`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        norm: Norm = "post",
        form: HeadForm = "narrow",
        activation: Activation = "relu",
        dropout: float = 0.0,
        attention: AttentionPath = "fused",
    ) -> None:
        super().__init__()
        check_choice("norm", norm, Norm)
        check_probability("dropout", dropout)
        self.norm = norm
        self.attention = MultiHeadAttention(
            width, heads, form=form, dropout=dropout, attention=attention
        )
        self.feed_forward = FeedForward(width, activation=activation)
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, mask: Mask | None = None) -> Tensor:
        """x (B, T, width) -> the same shape."""
        y: Tensor
        if self.norm == "pre":
            x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask))
            y = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        else:
            x = self.attention_norm(x + self.dropout(self.attention(x, mask=mask)))
            y = self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
        return y
