"""Layers of the Sparse Transformer: self-attention by a sparse pattern, and its block.

Source: Generating Long Sequences with Sparse Transformers (Child et al., 2019, arXiv:1904.10509),
section 5.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..masks.mask import Mask
from .attention import attend, head_size, merge_heads, split_heads
from .blocks import SelfAttentionBlock
from .cache import LayerCache
from .options import AttnImplementation, check_choice
from .sparse_attention import sparse_attention
from .sparse_patterns import SparsePattern


class SparseAttention(nn.Module):
    """Multi-head self-attention over the keys that a pattern shows, without dropout inside.

    Args:
        width: size of the input and output vectors.
        heads: number of heads; divides `width`.
        pattern: the visible pairs.
        attn_implementation: "eager", "fused" or "sdpa". Only "fused" uses `sparse_attention`; the
            others need a dense mask.

    Raises:
        ValueError: an option is out of range, or the pattern does not suit the number of heads.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        pattern: SparsePattern,
        *,
        attn_implementation: AttnImplementation = "fused",
    ) -> None:
        super().__init__()
        check_choice("attn_implementation", attn_implementation, AttnImplementation)
        head_size(width, heads, "narrow")
        pattern.check_heads(heads)
        self.heads = heads
        self.pattern = pattern
        self.attn_implementation = attn_implementation
        self.queries = nn.Linear(width, width)
        self.keys = nn.Linear(width, width)
        self.values = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def dense_mask(
        self, length: int, *, start: int = 0, device: torch.device | str | None = None
    ) -> Mask | None:
        """The mask that `forward` needs for the queries `start` to `length - 1`.

        Returns:
            None if the fused kernels compute them without a mask: all queries, from position 0 on.
            Otherwise `SparsePattern.visible` as a mask, whose memory is heads * queries * length.
        """
        if start == 0 and self.attn_implementation == "fused":
            return None
        return Mask.dense(self.pattern.visible(self.heads, length, start=start, device=device))

    def forward(
        self, x: Tensor, *, mask: Mask | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """Attention from x to itself, and to the keys in the cache.

        Args:
            x: inputs (B, T, width).
            mask: result of `dense_mask`.
            cache: the layer's key/value cache, already extended by T positions. Keys and values of
                x are stored in it, and autograd does not apply.

        Returns:
            (B, T, width).
        """
        q, k, v = (split_heads(f(x), self.heads) for f in (self.queries, self.keys, self.values))
        if cache is None:
            o = self._attend(q, k, v, mask)
        else:
            k, v = cache.append(k, v)
            with torch.no_grad():
                o = self._attend(q.to(k.dtype), k, v, mask)
        y: Tensor = self.out_proj(merge_heads(o))
        return y

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        if mask is None:
            return sparse_attention(q, k, v, self.pattern)
        return attend(q, k, v, mask=mask, attn_implementation=self.attn_implementation)


class SparseBlock(SelfAttentionBlock):
    """Sparse attention and a feed-forward network, each with normalisation before and a residual.

    The activation is the exact GELU, which the paper approximates by x sigmoid(1.702 x).

    Args:
        width: size of the input and output vectors.
        heads: number of attention heads.
        pattern: the visible pairs.
        dropout: probability of dropping an element of a layer's output.
        attn_implementation: "eager", "fused" or "sdpa"; see `SparseAttention`.
    """

    attention: SparseAttention

    def __init__(
        self,
        width: int,
        heads: int,
        pattern: SparsePattern,
        *,
        dropout: float = 0.0,
        attn_implementation: AttnImplementation = "fused",
    ) -> None:
        attention = SparseAttention(width, heads, pattern, attn_implementation=attn_implementation)
        super().__init__(attention, width, norm="pre", activation="gelu", dropout=dropout)
