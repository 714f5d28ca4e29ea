"""Layers of the Reformer: attention by hashing with shared queries and keys, and its blocks.

Source: Reformer: The Efficient Transformer (Kitaev et al., 2020, arXiv:2001.04451).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..masks.mask import Mask
from .attention import MultiHeadAttention, head_size, merge_heads, split_heads
from .blocks import FeedForward
from .lsh_attention import lsh_attention
from .lsh_hashing import check_buckets, default_buckets, hash_buckets, sorted_by_bucket
from .options import AttnImplementation, check_choice, check_positive
from .reversible import Choices, ReversibleBlock


class LSHAttention(nn.Module):
    """Multi-head self-attention whose queries see the keys with their hash; see `lsh_attention`.

    One projection serves queries and keys. Linear layers have no biases, and attention
    probabilities no dropout.

    Args:
        width: size of the input and output vectors.
        heads: number of heads; divides `width`.
        chunk: number of tokens of a chunk.
        causal: True if a query sees earlier positions only.
        buckets: number of buckets, as even factors; `default_buckets` of the length unless given.
        scale: see `lsh_attention`.
        attn_implementation: "eager", "fused" or "sdpa"; see `lsh_attention`.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        chunk: int,
        causal: bool = True,
        buckets: tuple[int, ...] | None = None,
        scale: float | None = None,
        attn_implementation: AttnImplementation = "fused",
    ) -> None:
        super().__init__()
        check_choice("attn_implementation", attn_implementation, AttnImplementation)
        check_positive("chunk", chunk)
        head_size(width, heads, "narrow")
        if buckets is not None:
            check_buckets(buckets)
        self.heads = heads
        self.chunk = chunk
        self.causal = causal
        self.buckets = buckets
        self.scale = scale
        self.attn_implementation = attn_implementation
        self.queries = nn.Linear(width, width, bias=False)
        self.values = nn.Linear(width, width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(
        self,
        x: Tensor,
        order: Tensor | None = None,
        *,
        rounds: int,
        generator: torch.Generator | None = None,
        key_lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention from x to itself.

        Args:
            x: inputs (B, T, width).
            order: positions sorted by hash, (B, heads, rounds, T) integers; None to hash.
            rounds: number of hash rounds. More rounds come closer to full attention.
            generator: random generator of the hashes, on the CPU; torch's default generator unless
                given.
            key_lengths: integers (B,): tokens at and after the length are padding.

        Returns:
            (B, T, width), and the order.
        """
        q, v = (split_heads(f(x), self.heads) for f in (self.queries, self.values))
        if order is None:
            order = self._order(q, rounds, generator, key_lengths)
        o = lsh_attention(
            q, v, order,
            chunk=self.chunk, causal=self.causal, scale=self.scale, key_lengths=key_lengths,
            attn_implementation=self.attn_implementation,
        )  # fmt: skip
        y: Tensor = self.out_proj(merge_heads(o))
        return y, order

    def _order(
        self,
        q: Tensor,
        rounds: int,
        generator: torch.Generator | None,
        key_lengths: Tensor | None,
    ) -> Tensor:
        factors = self.buckets or default_buckets(q.shape[2], self.chunk)
        buckets = hash_buckets(q, rounds=rounds, buckets=factors, generator=generator)
        if key_lengths is not None:  # padding is sorted to the end
            position = torch.arange(q.shape[2], device=q.device)
            is_padding = position >= key_lengths[:, None, None, None]
            buckets = buckets.masked_fill(is_padding, math.prod(factors))
        return sorted_by_bucket(buckets)


class _TransformerBlock(ReversibleBlock):
    """Base of the blocks: g is a feed-forward network, behind a normalisation as f is."""

    def __init__(
        self, width: int, *, hidden: int | None = None, dropout: float = 0.0, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.feed_forward = FeedForward(width, hidden=hidden)
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.feed_forward_norm = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def g(self, x: Tensor) -> Tensor:
        """Feed-forward network: x (B, T, width) -> the same shape."""
        y: Tensor = self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return y


class ReformerBlock(_TransformerBlock):
    """Reversible block: f is attention by hashing, g a feed-forward network.

    Args:
        width: size of the input and output vectors.
        heads: number of attention heads.
        hidden: inner width of the feed-forward network; 4 * width unless given.
        dropout: probability of dropping an element of a layer's output.
        eps: epsilon of the layer normalisations.
        attention: options of `LSHAttention`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        hidden: int | None = None,
        dropout: float = 0.0,
        eps: float = 1e-5,
        **attention: Any,
    ) -> None:
        super().__init__(width, hidden=hidden, dropout=dropout, eps=eps)
        self.attention = LSHAttention(width, heads, **attention)

    def f(  # type: ignore[override]
        self,
        x: Tensor,
        choices: Choices | None = None,
        *,
        rounds: int,
        generator: torch.Generator,
        key_lengths: Tensor | None = None,
    ) -> tuple[Tensor, Choices]:
        """Attention, whose choice is the order; see `LSHAttention.forward`.

        Hashes have a generator of their own, so that dropout is the same with and without hashing.
        """
        y, order = self.attention(
            self.attention_norm(x), None if choices is None else choices[0],
            rounds=rounds, generator=generator, key_lengths=key_lengths,
        )  # fmt: skip
        return self.dropout(y), (order,)


class LocalBlock(_TransformerBlock):
    """Reversible block: f is causal attention to a window of keys, g a feed-forward network.

    Args:
        width: size of the input and output vectors.
        heads: number of attention heads.
        window: number of visible keys, the query's own included.
        hidden: inner width of the feed-forward network; 4 * width unless given.
        dropout: probability of dropping an element of a layer's output.
        eps: epsilon of the layer normalisations.
        attn_implementation: "eager", "fused" or "sdpa".
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        window: int,
        hidden: int | None = None,
        dropout: float = 0.0,
        eps: float = 1e-5,
        attn_implementation: AttnImplementation = "fused",
    ) -> None:
        super().__init__(width, hidden=hidden, dropout=dropout, eps=eps)
        check_positive("window", window)
        self.window = window
        self.attention = MultiHeadAttention(width, heads, attn_implementation=attn_implementation)

    def f(
        self, x: Tensor, choices: Choices | None = None, **options: Any
    ) -> tuple[Tensor, Choices]:
        """Attention; it has no choices, and no use for the options of `ReformerBlock.f`."""
        y = self.attention(self.attention_norm(x), mask=Mask.window(self.window - 1, 0))
        return self.dropout(y), ()
