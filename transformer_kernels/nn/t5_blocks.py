"""Layers of T5: pre-norm blocks without bias vectors, with a shared bias by distance."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from ..masks.mask import Mask
from ..scores.relative import RelativeBias
from .attention import attend, merge_heads, split_heads
from .cache import LayerCache
from .options import AttnImplementation, check_choice, check_positive, check_probability

T5Activation = Literal["relu", "gated_gelu"]
"""relu: T5. gated_gelu: gelu(gate(x)) * up_proj(x) by the tanh approximation of GELU, T5 v1.1."""


class T5Attention(nn.Module):
    """Multi-head attention of T5: scores are q kᵀ without a scale, and projections have no bias.

    Heads have any size. Source: Raffel et al. 2020, arXiv:1910.10683.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_size: int,
        *,
        dropout: float = 0.0,
        attn_implementation: AttnImplementation = "fused",
    ) -> None:
        """Creates the four projections.

        Args:
            width: size of the input and output vectors.
            heads: number of heads.
            head_size: size of one head.
            dropout: probability of dropping an attention weight, in training mode only.
            attn_implementation: "eager", "fused" or "sdpa".

        Raises:
            ValueError: an option is out of range or not one of its choices.
        """
        super().__init__()
        for name, size in {"width": width, "heads": heads, "head_size": head_size}.items():
            check_positive(name, size)
        check_probability("dropout", dropout)
        check_choice("attn_implementation", attn_implementation, AttnImplementation)
        self.heads = heads
        self.dropout = dropout
        self.attn_implementation = attn_implementation
        self.queries, self.keys, self.values = (
            nn.Linear(width, heads * head_size, bias=False) for _ in range(3)
        )
        self.out_proj = nn.Linear(heads * head_size, width, bias=False)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        relative: RelativeBias | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Self-attention.

        Args:
            x: inputs (B, T, width).
            mask: the visible pairs; None shows all.
            relative: bias by distance, aligned "bottom_right".
            cache: the layer's key/value cache, already extended by T positions. Keys and values of
                x are stored in it, attention is causal, and neither dropout nor autograd applies.

        Returns:
            (B, T, width).

        Raises:
            ValueError: both `mask` and `cache` are given.
        """
        k, v = self.keys_and_values(x)
        if cache is None:
            return self.attend_to(x, k, v, mask=mask, relative=relative)
        if mask is not None:
            raise ValueError(
                f"mask must be None with a cache, whose attention is causal, got {mask}"
            )
        q = split_heads(self.queries(x), self.heads)
        o = cache.attend(
            q, k, v, scale=1.0, relative=relative, attn_implementation=self.attn_implementation
        )
        return self._out_proj(o)

    def keys_and_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `source` (B, N, width), each (B, heads, N, head_size)."""
        return (
            split_heads(self.keys(source), self.heads),
            split_heads(self.values(source), self.heads),
        )

    def attend_to(
        self,
        x: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | None = None,
        relative: RelativeBias | None = None,
    ) -> Tensor:
        """`forward` for keys and values computed before by `keys_and_values`."""
        o = attend(
            split_heads(self.queries(x), self.heads), k, v,
            mask=mask, relative=relative, scale=1.0,
            dropout_p=self.dropout if self.training else 0.0,
            attn_implementation=self.attn_implementation,
        )  # fmt: skip
        return self._out_proj(o)

    def _out_proj(self, o: Tensor) -> Tensor:
        y: Tensor = self.out_proj(merge_heads(o))
        return y


class T5FeedForward(nn.Module):
    """Feed-forward network of T5, without bias vectors, with dropout after the activation."""

    def __init__(
        self, width: int, hidden: int, *, activation: T5Activation = "relu", dropout: float = 0.0
    ) -> None:
        super().__init__()
        check_positive("width", width)
        check_positive("hidden", hidden)
        check_choice("activation", activation, T5Activation)
        check_probability("dropout", dropout)
        gated = activation == "gated_gelu"
        self.gate = nn.Linear(width, hidden, bias=False) if gated else None
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> the same shape."""
        hidden = self.up_proj(x)
        if self.gate is None:
            hidden = hidden.relu()
        else:
            hidden = nn.functional.gelu(self.gate(x), approximate="tanh") * hidden
        y: Tensor = self.down_proj(self.dropout(hidden))
        return y


class T5Block(nn.Module):
    """Block of T5: self-attention, cross-attention in a decoder, and a feed-forward network.

    Each layer's input is divided by its root mean square and scaled (nn.RMSNorm); its output passes
    dropout and is added to the residual stream.

    Args:
        width: size of the input and output vectors.
        heads: number of attention heads.
        head_size: size of one head.
        hidden: inner width of the feed-forward network.
        activation: "relu" or "gated_gelu".
        cross_attention: True for a decoder's block, which attends to an encoder's output.
        dropout: probability of dropping an attention weight, an inner element of the feed-forward
            network or an element of a layer's output.
        eps: epsilon of the normalisations.
        attn_implementation: "eager", "fused" or "sdpa".
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_size: int,
        *,
        hidden: int,
        activation: T5Activation = "relu",
        cross_attention: bool = False,
        dropout: float = 0.0,
        eps: float = 1e-6,
        attn_implementation: AttnImplementation = "fused",
    ) -> None:
        super().__init__()

        def attention() -> T5Attention:
            return T5Attention(
                width, heads, head_size, dropout=dropout, attn_implementation=attn_implementation
            )

        self.attention = attention()
        self.attention_norm = nn.RMSNorm(width, eps=eps)
        self.memory_attention = attention() if cross_attention else None
        self.memory_norm = nn.RMSNorm(width, eps=eps) if cross_attention else None
        self.feed_forward = T5FeedForward(width, hidden, activation=activation, dropout=dropout)
        self.feed_forward_norm = nn.RMSNorm(width, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        memory: tuple[Tensor, Tensor] | None = None,
        *,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        relative: RelativeBias | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Runs the block.

        Args:
            x: inputs (B, T, width).
            memory: keys and values (B, heads, N, head_size) of the encoder's output, from
                `self.memory_attention.keys_and_values`; None without cross-attention.
            mask: mask of the self-attention.
            memory_mask: mask of the cross-attention.
            relative: bias by distance of the self-attention.
            cache: key/value cache of the self-attention; see `T5Attention`.

        Returns:
            (B, T, width).
        """
        y = self.attention(self.attention_norm(x), mask=mask, relative=relative, cache=cache)
        x = x + self.dropout(y)
        if self.memory_attention is not None:
            assert self.memory_norm is not None
            assert memory is not None
            y = self.memory_attention.attend_to(self.memory_norm(x), *memory, mask=memory_mask)
            x = x + self.dropout(y)
        out: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out
