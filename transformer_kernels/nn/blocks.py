"""Transformer blocks with residual connections, stacks of blocks, and their initial weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..dispatch import division
from ..masks.mask import Mask
from ..scores.relative import Relative
from .attention import AttentionLayer, HeadForm, KVCache, LayerCache, MultiHeadAttention
from .options import AttnImplementation, check_choice, check_positive, check_probability

Norm = Literal["post", "pre"]
"""post: norm(x + layer(x)), the original order. pre: x + layer(norm(x)), easier to train."""

Activation = Literal["relu", "gelu", "gelu_tanh"]
"""gelu_tanh: the tanh approximation of GELU that GPT-2 was trained with."""

STD = 0.02
"""Standard deviation of the initial weights of GPT-2 and BERT."""

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
}


class FeedForward(nn.Module):
    """Position-wise feed-forward network: up_proj (width -> hidden), activation, down_proj."""

    def __init__(
        self,
        width: int,
        *,
        hidden: int | None = None,
        activation: Activation = "relu",
        dropout: float = 0.0,
    ) -> None:
        """`hidden` is 4 * width unless given; `dropout` follows the activation."""
        super().__init__()
        hidden = 4 * width if hidden is None else hidden
        check_positive("width", width)
        check_positive("hidden", hidden)
        check_choice("activation", activation, Activation)
        check_probability("dropout", dropout)
        self.up_proj = nn.Linear(width, hidden)
        self.activation = _ACTIVATIONS[activation]()
        self.dropout = nn.Dropout(dropout) if dropout > 0.0 else nn.Identity()
        self.down_proj = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> the same shape."""
        y: Tensor = self.down_proj(self.dropout(self.activation(self.up_proj(x))))
        return y


class ResidualBlock(nn.Module):
    """Base of the blocks: a residual branch with pre- or post-normalisation and dropout."""

    norm: Norm
    dropout: nn.Dropout

    def _residual(self, x: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor]) -> Tensor:
        y: Tensor
        if self.norm == "pre":
            y = x + self.dropout(layer(norm(x)))
        else:
            y = norm(x + self.dropout(layer(x)))
        return y


class SelfAttentionBlock(ResidualBlock):
    """Self-attention and a feed-forward network, each with normalisation, dropout and a residual.

    Args:
        attention: self-attention layer, from (B, T, width) to the same shape.
        width: size of the input and output vectors.
        norm: "post" normalises after each residual sum, "pre" before each layer. A stack of "pre"
            blocks needs one more normalisation at its end.
        hidden: inner width of the feed-forward network; 4 * width unless given.
        activation: activation of the feed-forward network.
        dropout: probability of dropping an element of a layer's output.
        hidden_dropout: probability of dropping an inner element of the feed-forward network.
        eps: epsilon of the layer normalisations.
    """

    def __init__(
        self,
        attention: nn.Module,
        width: int,
        *,
        norm: Norm = "post",
        hidden: int | None = None,
        activation: Activation = "relu",
        dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        check_choice("norm", norm, Norm)
        check_probability("dropout", dropout)
        self.norm = norm
        self.attention = attention
        self.feed_forward = FeedForward(
            width, hidden=hidden, activation=activation, dropout=hidden_dropout
        )
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.feed_forward_norm = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *inputs: Any, **options: Any) -> Tensor:
        """x (B, T, width) -> the same shape; further arguments are those of the attention layer."""
        x = self._residual(x, self.attention_norm, lambda y: self.attention(y, *inputs, **options))
        return self._residual(x, self.feed_forward_norm, self.feed_forward)


class TransformerBlock(SelfAttentionBlock):
    """`SelfAttentionBlock` with `MultiHeadAttention`; options are those of both.

    `dropout` is the probability of dropping an attention weight or an element of a layer's output.
    """

    attention: MultiHeadAttention

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
        attention = MultiHeadAttention(
            width, heads,
            form=form, bias=bias, dropout=dropout, attn_implementation=attn_implementation,
        )  # fmt: skip
        super().__init__(
            attention, width,
            norm=norm, hidden=hidden, activation=activation, dropout=dropout, eps=eps,
        )  # fmt: skip


class MemoryBlock(ResidualBlock):
    """Base of a decoder's blocks: self-attention, cross-attention to a memory, and feed-forward."""

    attention: MultiHeadAttention
    attention_norm: nn.Module
    memory_attention: MultiHeadAttention | None
    memory_norm: nn.Module | None
    feed_forward: nn.Module
    feed_forward_norm: nn.Module

    def forward(
        self,
        x: Tensor,
        memory: tuple[Tensor, Tensor] | None = None,
        *,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        relative: Relative | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Runs the block.

        Args:
            x: inputs (B, T, width).
            memory: keys and values (B, heads, N, head_size) of the memory (B, N, width), from
                `self.memory_attention.keys_and_values`; None without cross-attention.
            mask: mask of the self-attention.
            memory_mask: mask of the cross-attention.
            relative: bias by distance of the self-attention, aligned "bottom_right".
            cache: key/value cache of the self-attention; see `MultiHeadAttention`.

        Returns:
            (B, T, width).
        """
        attend = partial(self.attention, mask=mask, relative=relative, cache=cache)
        x = self._residual(x, self.attention_norm, attend)
        if self.memory_attention is not None:
            assert self.memory_norm is not None
            assert memory is not None
            k, v = memory
            attend_to = partial(self.memory_attention.attend_to, k=k, v=v, mask=memory_mask)
            x = self._residual(x, self.memory_norm, attend_to)
        return self._residual(x, self.feed_forward_norm, self.feed_forward)


class DecoderBlock(MemoryBlock):
    """Decoder block: self-attention, cross-attention to an encoder's output, and feed-forward.

    The encoder's output (the memory) has the same width. Options are those of `TransformerBlock`.
    """

    memory_attention: MultiHeadAttention
    memory_norm: nn.LayerNorm
    feed_forward: FeedForward

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


class Stack(nn.ModuleList):
    """Sequence of blocks, optionally with activation checkpointing.

    If `recompute` is True, only the input of each block is saved in training mode. The backward
    pass recomputes the block with the same dropout, which takes about a third more time.
    """

    recompute = False

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Returns an empty cache of `capacity` positions for each of `batch` texts."""
        attention = self[0].attention
        assert isinstance(attention, AttentionLayer)
        weight = attention.out_proj.weight
        return KVCache(
            layers=len(self), batch=batch, heads=attention.heads, capacity=capacity,
            head_size=attention.head_size, dtype=weight.dtype, device=weight.device,
        )  # fmt: skip

    def forward(
        self, x: Tensor, *, mask: Mask | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """x (B, T, width) -> the same shape; mask and cache as in `MultiHeadAttention`.

        A cache must have been extended by T positions beforehand.
        """
        for n, block in enumerate(self):
            layer = None if cache is None else cache.layer(n)
            x = self.run(block, x, mask=mask, cache=layer)
        return x

    def run(self, block: nn.Module, *inputs: Any, **options: Any) -> Tensor:
        """Runs one block, checkpointed if `recompute` is set."""
        y: Tensor
        if self.recompute and self.training:
            y = checkpoint(block, *inputs, use_reentrant=False, **_contexts(), **options)
        else:
            y = block(*inputs, **options)
        return y


def _contexts() -> dict[str, Any]:
    """Argument of `checkpoint`: recomputation under the division that is in effect now."""
    if division.current is None or torch.compiler.is_compiling():
        return {}
    here = division.current
    return {"context_fn": lambda: (nullcontext(), division.divided(here))}


def recompute_blocks(model: nn.Module, wanted: bool = True) -> None:
    """Enables or disables activation checkpointing in every `Stack` of the model."""
    for module in model.modules():
        if isinstance(module, Stack):
            module.recompute = wanted


def normal_weights(model: nn.Module) -> None:
    """Draws linear and embedding weights from N(0, 0.02²), and sets biases to 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def smaller_branch_ends(model: nn.Module, *, layers: int) -> None:
    """Draws the output projections of residual branches with deviation 0.02 / sqrt(2 * layers).

    The variance of the residual sum then does not grow with depth. Source: GPT-2.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.out_proj.weight", "feed_forward.down_proj.weight")):
            nn.init.normal_(parameter, std=STD / (2 * layers) ** 0.5)
