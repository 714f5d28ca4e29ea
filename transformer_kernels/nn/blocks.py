"""Blocks of transformers, each layer of which has a residual connection; and stacks of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer_kernels.masks.mask import Mask
from transformer_kernels.nn.attention import HeadForm, MultiHeadAttention
from transformer_kernels.nn.cache import KeyValueCache, LayerCache
from transformer_kernels.nn.options import (
    AttnImplementation,
    check_choice,
    check_positive,
    check_probability,
)

Norm = Literal["post", "pre"]
"""post: norm(x + layer(x)), the original order. pre: x + layer(norm(x)), easier to train deep."""

Activation = Literal["relu", "gelu", "gelu_tanh"]
"""gelu_tanh: the approximation that GPT-2 was trained with."""

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
}


class FeedForward(nn.Module):
    """Each position by itself: width -> hidden -> width, with a non-linearity between."""

    def __init__(
        self, width: int, *, hidden: int | None = None, activation: Activation = "relu"
    ) -> None:
        """`hidden` is 4 width unless given."""
        super().__init__()
        hidden = 4 * width if hidden is None else hidden
        check_positive("width", width)
        check_positive("hidden", hidden)
        check_choice("activation", activation, Activation)
        self.up_proj = nn.Linear(width, hidden)
        self.activation = _ACTIVATIONS[activation]()
        self.down_proj = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> the same shape."""
        y: Tensor = self.down_proj(self.activation(self.up_proj(x)))
        return y


class _Block(nn.Module):
    """What blocks share: where a layer's normalisation and dropout are."""

    norm: Norm
    dropout: nn.Dropout

    def _residual(self, x: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor]) -> Tensor:
        y: Tensor
        if self.norm == "pre":
            y = x + self.dropout(layer(norm(x)))
        else:
            y = norm(x + self.dropout(layer(x)))
        return y


class TransformerBlock(_Block):
    """Self-attention and feed-forward, each normalised, with dropout on each one's result.

    `norm` places the layer normalisations: "post" after each residual sum, "pre" before each layer
    (a stack of "pre" blocks wants one more normalisation at its end). `form`, `attention`, `bias`
    and the dropout of attention weights are those of `MultiHeadAttention`; `hidden` and
    `activation` those of `FeedForward`; `eps` is that of the normalisations.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        norm: Norm = "post",
        form: HeadForm = "narrow",
        hidden: int | None = None,
        activation: Activation = "relu",
        bias: bool = False,
        dropout: float = 0.0,
        eps: float = 1e-5,
        attn_implementation: AttnImplementation = "fused",
    ) -> None:
        super().__init__()
        check_choice("norm", norm, Norm)
        check_probability("dropout", dropout)
        self.norm = norm
        self.attention = MultiHeadAttention(
            width,
            heads,
            form=form,
            bias=bias,
            dropout=dropout,
            attn_implementation=attn_implementation,
        )
        self.feed_forward = FeedForward(width, hidden=hidden, activation=activation)
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.feed_forward_norm = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, *, mask: Mask | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """x (B, T, width) -> the same shape; mask and cache as in `MultiHeadAttention`."""
        x = self._residual(
            x, self.attention_norm, lambda y: self.attention(y, mask=mask, cache=cache)
        )
        return self._residual(x, self.feed_forward_norm, self.feed_forward)


class DecoderBlock(_Block):
    """As `TransformerBlock`, and between its two layers attention to a memory: an encoder's output,
    of the same width."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        norm: Norm = "post",
        hidden: int | None = None,
        activation: Activation = "relu",
        bias: bool = False,
        dropout: float = 0.0,
        eps: float = 1e-5,
        attn_implementation: AttnImplementation = "fused",
    ) -> None:
        super().__init__()
        check_choice("norm", norm, Norm)
        check_probability("dropout", dropout)
        self.norm = norm
        self.attention, self.memory_attention = (
            MultiHeadAttention(
                width, heads, bias=bias, dropout=dropout, attn_implementation=attn_implementation
            )
            for _ in range(2)
        )
        self.feed_forward = FeedForward(width, hidden=hidden, activation=activation)
        self.attention_norm, self.memory_norm, self.feed_forward_norm = (
            nn.LayerNorm(width, eps=eps) for _ in range(3)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        memory: tuple[Tensor, Tensor],
        *,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """x (B, T, width) -> the same shape.

        `memory` is `self.memory_attention.keys_and_values` of the memory (B, N, width), of which
        `memory_mask` says what may be attended to; mask and cache are those of the self-attention.
        """
        x = self._residual(
            x, self.attention_norm, lambda y: self.attention(y, mask=mask, cache=cache)
        )
        x = self._residual(
            x,
            self.memory_norm,
            lambda y: self.memory_attention.attend_to(y, *memory, mask=memory_mask),
        )
        return self._residual(x, self.feed_forward_norm, self.feed_forward)


class Stack(nn.ModuleList):
    """Blocks one after the other.

    With `recompute` set, only what goes into a block is kept for the backward pass, which computes
    the rest again, with the same dropout: memory for a third more time.
    """

    recompute = False

    def forward(
        self, x: Tensor, *, mask: Mask | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """x (B, T, width) -> the same shape. With a cache x follows what was there before its
        `extend`; see `MultiHeadAttention`."""
        for n, block in enumerate(self):
            layer = None if cache is None else cache.layer(n)
            x = self.run(block, x, mask=mask, cache=layer)
        return x

    def run(self, block: nn.Module, *inputs: Any, **options: Any) -> Tensor:
        """The block, recomputed where that is set."""
        y: Tensor
        if self.recompute and self.training:
            y = checkpoint(block, *inputs, use_reentrant=False, **options)
        else:
            y = block(*inputs, **options)
        return y


def recompute_blocks(model: nn.Module, wanted: bool = True) -> None:
    """Sets `Stack.recompute` of every stack in the model."""
    for module in model.modules():
        if isinstance(module, Stack):
            module.recompute = wanted
