"""Self-attention with relative positions and a memory, as in Transformer-XL.

For N = L + M keys (L of the memory, M of the segment), the score of query i and key j is

    a_ij = scale [(q_i + u) · k_j + (q_i + v) · r_e],    e = i + L - j >= 0,    r_e = W_r R_e

where R_e encodes the distance e, and u and v are learned vectors of each head. The kernels form the
products by distance tile by tile (`relative_keys`), with one query and a bias by distance:

    a_ij = scale (q_i + u) · (k_j + r_e) + t_e,    t_e = scale (v - u) · r_e

Source: Dai et al. 2019, arXiv:1901.02860.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..dispatch.division import check_undivided
from ..masks.mask import Mask
from ..scores.relative import relative_keys
from .attention import attend, merge_heads, split_heads
from .blocks import FeedForward, Norm, ResidualBlock
from .options import AttnImplementation, check_choice, check_positive, check_probability


class RelativeAttention(nn.Module):
    """Multi-head self-attention to a memory and to the segment, with scores by distance.

    Projections have no biases. u and v are arguments of `forward`, because layers may share them.

    Args:
        width: size of the input and output vectors.
        heads: number of heads.
        head_size: size of a head.
        dropout: probability of dropping an attention weight, in training mode only.
        attn_implementation: "eager", "fused" or "sdpa".

    Raises:
        ValueError: an option is out of range or not one of its choices.
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
        super().__init__()
        sizes = {"width": width, "heads": heads, "head_size": head_size}
        for name, size in sizes.items():
            check_positive(name, size)
        check_probability("dropout", dropout)
        check_choice("attn_implementation", attn_implementation, AttnImplementation)
        self.heads = heads
        self.head_size = head_size
        self.dropout = dropout
        self.attn_implementation = attn_implementation
        inner = heads * head_size
        self.queries = nn.Linear(width, inner, bias=False)
        self.keys = nn.Linear(width, inner, bias=False)
        self.values = nn.Linear(width, inner, bias=False)
        self.distance_keys = nn.Linear(width, inner, bias=False)
        self.out_proj = nn.Linear(inner, width, bias=False)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        encodings: Tensor,
        content_bias: Tensor,
        position_bias: Tensor,
        *,
        mask: Mask,
    ) -> Tensor:
        """Attention from x to the memory and x.

        Args:
            x: segment (B, M, width).
            memory: inputs of the layer at the L positions before the segment (B, L, width).
            encodings: encodings of the distances 0 to L + M - 1 (L + M, width).
            content_bias: u (heads, head_size), added to the queries of the keys.
            position_bias: v (heads, head_size), added to the queries of the distances.
            mask: visible pairs; it must hide the keys after each query.

        Returns:
            (B, M, width).
        """
        check_undivided("RelativeAttention")
        source = torch.cat([memory, x], dim=1)
        q = split_heads(self.queries(x), self.heads)
        k = split_heads(self.keys(source), self.heads)
        v = split_heads(self.values(source), self.heads)
        r = split_heads(self.distance_keys(encodings), self.heads)
        scale: float = self.head_size**-0.5
        difference = (position_bias - content_bias)[:, None]
        relative = relative_keys(
            r, table=(r * difference).sum(dim=-1) * scale, lowest=0, align="bottom_right"
        )
        # Under autocast, q is narrower than the parameters.
        o = attend(
            q + content_bias.to(q.dtype)[:, None], k, v,
            mask=mask, relative=relative, scale=scale,
            dropout_p=self.dropout if self.training else 0.0,
            attn_implementation=self.attn_implementation,
        )  # fmt: skip
        y: Tensor = self.out_proj(merge_heads(o))
        return y


class RelativeBlock(ResidualBlock):
    """Relative attention and a feed-forward network, each with normalisation and a residual.

    Args:
        width: size of the input and output vectors.
        heads: number of attention heads.
        head_size: size of a head.
        norm: "post" normalises after each residual sum, "pre" before each layer.
        hidden: inner width of the feed-forward network; 4 * width unless given.
        dropout: probability of dropping an element of a layer's output or of the feed-forward
            network's inner vectors.
        attention_dropout: probability of dropping an attention weight.
        attn_implementation: "eager", "fused" or "sdpa".
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_size: int,
        *,
        norm: Norm = "post",
        hidden: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        attn_implementation: AttnImplementation = "fused",
    ) -> None:
        super().__init__()
        check_choice("norm", norm, Norm)
        self.norm = norm
        self.attention = RelativeAttention(
            width,
            heads,
            head_size,
            dropout=attention_dropout,
            attn_implementation=attn_implementation,
        )
        self.feed_forward = FeedForward(width, hidden=hidden, dropout=dropout)
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        encodings: Tensor,
        content_bias: Tensor,
        position_bias: Tensor,
        *,
        mask: Mask,
    ) -> Tensor:
        """x (B, M, width) -> the same shape; arguments as in `RelativeAttention`.

        The memory holds inputs of the block: a "pre" block normalises it too.
        """
        if self.norm == "pre":
            memory = self.attention_norm(memory)
        x = self._residual(
            x,
            self.attention_norm,
            lambda y: self.attention(y, memory, encodings, content_bias, position_bias, mask=mask),
        )
        return self._residual(x, self.feed_forward_norm, self.feed_forward)
