"""Layers of T5: a bias by buckets of distances, and pre-norm blocks without bias vectors.

Source: Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer (Raffel et
al., 2020, arXiv:1910.10683).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from ..scores.relative import RelativeBias, relative_bias
from .attention import MultiHeadAttention
from .blocks import MemoryBlock
from .options import AttnImplementation, check_choice, check_positive, check_probability

T5Activation = Literal["relu", "gated_gelu"]
"""relu: T5. gated_gelu: gelu(gate(x)) * up_proj(x) by the tanh approximation of GELU, T5 v1.1."""


class BucketedBias(nn.Module):
    """Learned attention bias of each head by the bucket of a distance; see `distance_buckets`.

    All distances beyond `max_distance` share a bucket. The result is therefore a table of
    2 * max_distance + 1 distances (max_distance + 1 if not bidirectional) for texts of any length.
    One instance serves every layer of a stack.
    """

    bucket: Tensor

    def __init__(
        self, heads: int, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool
    ) -> None:
        """Creates the parameter `table` (buckets, heads), drawn from N(0, 1) as an embedding is.

        Args:
            heads: number of attention heads.
            buckets: number of buckets.
            max_distance: distance from which on all distances share a bucket.
            bidirectional: True if future keys have buckets of their own, as in an encoder. False if
                they share the bucket of distance 0, for causal attention.

        Raises:
            ValueError: an argument is out of range; see `check_buckets`.
        """
        super().__init__()
        check_positive("heads", heads)
        check_buckets(buckets, max_distance, bidirectional=bidirectional)
        self.table = nn.Parameter(torch.randn(buckets, heads))
        self.lowest = -max_distance if bidirectional else 0
        # On the CPU even where the default device is "meta": a loader assigns parameters only.
        distance = torch.arange(self.lowest, max_distance + 1, device="cpu")
        bucket = distance_buckets(
            distance, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional
        )
        self.register_buffer("bucket", bucket, persistent=False)

    def forward(self) -> RelativeBias:
        """Returns the bias (heads, distances), aligned "bottom_right", which serves caches too."""
        return relative_bias(self.table[self.bucket].T, lowest=self.lowest, align="bottom_right")


def distance_buckets(
    distance: Tensor, *, buckets: int, max_distance: int, bidirectional: bool
) -> Tensor:
    """Bucket of each distance, query index minus key index: the same shape, from 0 to buckets - 1.

    The first half of the buckets hold one distance each: 0, 1, 2, ... The widths of the others grow
    geometrically up to `max_distance`; the last one holds all larger distances. If `bidirectional`,
    past keys have the first buckets // 2 buckets, and future keys as many after them. Otherwise
    future keys share the bucket of distance 0.

    Raises:
        ValueError: `buckets` or `max_distance` is out of range; see `check_buckets`.

    Source: mesh_tensorflow, transformer_layers.py; a positive distance is a negative
    `relative_position` there.
    """
    check_buckets(buckets, max_distance, bidirectional=bidirectional)
    side = buckets // 2 if bidirectional else buckets
    single = side // 2
    apart = distance.abs() if bidirectional else distance.clamp(min=0)
    # float32 as in the source: another precision might round differently where a bucket begins.
    growth = (apart.clamp(min=single).float() / single).log() / math.log(max_distance / single)
    wide = single + (growth * (side - single)).long()
    bucket = torch.where(apart < single, apart, wide.clamp(max=side - 1))
    return torch.where(distance < 0, side + bucket, bucket) if bidirectional else bucket


def check_buckets(buckets: int, max_distance: int, *, bidirectional: bool) -> None:
    """Raises ValueError unless each side has 2 buckets and max_distance is beyond the single ones.

    A side is one direction of a bidirectional bias, or all of the others.
    """
    check_positive("buckets", buckets)
    check_positive("max_distance", max_distance)
    least = 4 if bidirectional else 2
    if buckets < least:
        kind = "bidirectional" if bidirectional else "unidirectional"
        raise ValueError(f"buckets must be at least {least} for a {kind} bias, got {buckets}")
    single = buckets // least
    if max_distance <= single:
        raise ValueError(
            f"max_distance must be above {single}, the number of distances with a bucket of their "
            f"own among {buckets} buckets, got {max_distance}"
        )


class T5Attention(MultiHeadAttention):
    """`MultiHeadAttention` with scores q kᵀ, without a scale, and projections without a bias."""

    def __init__(
        self,
        width: int,
        heads: int,
        head_size: int,
        *,
        dropout: float = 0.0,
        attn_implementation: AttnImplementation = "fused",
    ) -> None:
        super().__init__(
            width, heads,
            head_size=head_size, out_bias=False, dropout=dropout,
            attn_implementation=attn_implementation,
        )  # fmt: skip
        self._scale = 1.0


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


class T5Block(MemoryBlock):
    """Block of T5: self-attention, cross-attention in a decoder, and a feed-forward network.

    Each layer's input is divided by its root mean square and scaled (nn.RMSNorm); its output passes
    dropout and is added to the residual stream.

    Options are those of its layers. `cross_attention` is True for a decoder's block, which attends
    to an encoder's output. `dropout` is the probability of dropping an attention weight, an inner
    element of the feed-forward network or an element of a layer's output.
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
        self.norm = "pre"
        attention = partial(
            T5Attention, width, heads, head_size,
            dropout=dropout, attn_implementation=attn_implementation,
        )  # fmt: skip
        self.attention = attention()
        self.attention_norm = nn.RMSNorm(width, eps=eps)
        self.memory_attention = attention() if cross_attention else None
        self.memory_norm = nn.RMSNorm(width, eps=eps) if cross_attention else None
        self.feed_forward = T5FeedForward(width, hidden, activation=activation, dropout=dropout)
        self.feed_forward_norm = nn.RMSNorm(width, eps=eps)
        self.dropout = nn.Dropout(dropout)
