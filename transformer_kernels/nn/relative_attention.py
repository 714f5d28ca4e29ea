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
from .attention import AttentionLayer, attend
from .blocks import Norm, SelfAttentionBlock
from .options import AttnImplementation


class RelativeAttention(AttentionLayer):
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
        super().__init__(
            width, heads, head_size, dropout=dropout, attn_implementation=attn_implementation
        )
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
        (q,) = self._to_heads(x, self.queries)
        k, v = self._to_heads(source, self.keys, self.values)
        (r,) = self._to_heads(encodings, self.distance_keys)
        scale: float = self.head_size**-0.5
        difference = (position_bias - content_bias)[:, None]
        relative = relative_keys(
            r, table=(r * difference).sum(dim=-1) * scale, lowest=0, align="bottom_right"
        )
        # Under autocast, q is narrower than the parameters.
        o = attend(
            q + content_bias.to(q.dtype)[:, None], k, v,
            mask=mask, relative=relative, scale=scale, dropout_p=self._dropout_p,
            attn_implementation=self.attn_implementation,
        )  # fmt: skip
        return self._out_proj(o)


class RelativeBlock(SelfAttentionBlock):
    """`SelfAttentionBlock` with `RelativeAttention`; options are those of both.

    `attention_dropout` is the probability of dropping an attention weight, `dropout` that of
    dropping an element of a layer's output or of the feed-forward network's inner vectors.
    """

    attention: RelativeAttention

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
        attention = RelativeAttention(
            width, heads, head_size,
            dropout=attention_dropout, attn_implementation=attn_implementation,
        )  # fmt: skip
        super().__init__(
            attention, width, norm=norm, hidden=hidden, dropout=dropout, hidden_dropout=dropout
        )

    def forward(self, x: Tensor, memory: Tensor, *inputs: Tensor, mask: Mask) -> Tensor:
        """x (B, M, width) -> the same shape; arguments as in `RelativeAttention`.

        The memory holds inputs of the block: a "pre" block normalises it too.
        """
        if self.norm == "pre":
            memory = self.attention_norm(memory)
        return super().forward(x, memory, *inputs, mask=mask)
