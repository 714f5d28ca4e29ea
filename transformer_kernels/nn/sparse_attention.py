"""Attention by the patterns of the Sparse Transformer, as views and dense kernels, and its block.

The far keys of a query are few and apart, so that a mask over all keys would touch most of its
blocks. Here each pattern becomes attention with dense blocks:

- near keys of "local" and "strided": a window;
- near keys of "fixed": each group is a sequence of a packed batch;
- far keys of "strided": the positions of one remainder modulo the stride are a sequence of its own,
  and the remainders more heads: a causal mask;
- far keys of "fixed": queries see the gathered summaries, masked by position.

Results over near and far keys are merged by lse (docs/attention.md, section 5). Time follows the
number of visible pairs, and memory the length.

Source: Generating Long Sequences with Sparse Transformers (Child et al., 2019, arXiv:1904.10509),
sections 4 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..dispatch.division import check_undivided
from ..functional.attention import attention
from ..functional.varlen import attention_varlen
from ..masks.mask import Mask
from .attention import AttentionLayer, LayerCache, attend, size_of_heads
from .blocks import SelfAttentionBlock
from .options import AttnImplementation, check_fields

PatternKind = Literal["local", "strided", "fixed"]
"""Kinds of `SparsePattern`."""
Combination = Literal["merged", "split"]
"""How heads see near and far keys (`SparsePattern.combination`)."""


@dataclass(frozen=True, kw_only=True)
class SparsePattern:
    """A causal pattern of near keys, which every query i has, and far keys.

    | kind | near keys j <= i | far keys j <= i |
    |---|---|---|
    | local | i - j < stride | none |
    | strided | i - j < stride | i - j is a multiple of stride |
    | fixed | of i's group of `stride` positions | the summaries of every group |

    The summaries of a group are `subblocks` subblocks of `summaries` positions at its end. Head h
    sees subblock h modulo `subblocks`.

    The paper's strided pattern has stride + 1 near keys; this one has `stride`, as the authors'
    code (openai/sparse_attention).
    """

    kind: PatternKind
    stride: int
    """l in the paper: near the square root of the length"""
    summaries: int = 1
    """c in the paper: positions of a subblock, with kind "fixed" """
    subblocks: int = 1
    """Distinct subblocks of the heads, with kind "fixed"; divides the number of heads"""
    combination: Combination = "merged"
    """merged: every head sees near and far keys. split: the first half of the heads, rounded up,
    sees the near keys, and the others the far keys. A query without a key gets o = 0."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind == "fixed" and self.summaries * self.subblocks > self.stride:
            raise ValueError(
                f"summaries * subblocks must be at most stride = {self.stride}, "
                f"got {self.summaries} * {self.subblocks}"
            )

    def check_heads(self, heads: int) -> None:
        """Raises ValueError unless the pattern suits a number of heads."""
        near, far = self.near_heads(heads), self.far_heads(heads)
        if self.kind != "local" and not (near and far):
            raise ValueError(f"split needs at least 2 heads, got {heads}")
        if self.kind == "fixed" and len(far) % self.subblocks:
            raise ValueError(
                f"the number of heads with far keys must be a multiple of subblocks = "
                f"{self.subblocks}, got {len(far)}"
            )

    def near_heads(self, heads: int) -> range:
        """Those of `heads` heads that see the near keys: the first ones."""
        return range((heads + 1) // 2 if self._is_split else heads)

    def far_heads(self, heads: int) -> range:
        """Those of `heads` heads that see the far keys: the last ones."""
        if self.kind == "local":
            return range(heads, heads)
        return range((heads + 1) // 2 if self._is_split else 0, heads)

    @property
    def _is_split(self) -> bool:
        return self.kind != "local" and self.combination == "split"

    def visible(
        self, heads: int, length: int, *, start: int = 0, device: torch.device | str | None = None
    ) -> Tensor:
        """The definition of the pattern, for tests and for attention with a dense mask.

        Args:
            heads: number of heads.
            length: number of keys.
            start: first query; the last is length - 1.
            device: device of the result.

        Returns:
            bool (heads, length - start, length): True where a head shows a key to a query.

        Raises:
            ValueError: the pattern does not suit the number of heads.
        """
        self.check_heads(heads)
        near_heads, far_heads = self.near_heads(heads), self.far_heads(heads)
        h = torch.arange(heads, device=device)[:, None, None]
        i = torch.arange(start, length, device=device)[:, None]
        j = torch.arange(length, device=device)
        if self.kind == "fixed":
            near = i // self.stride == j // self.stride
            first = self.first_summary() + (h - far_heads.start) % self.subblocks * self.summaries
            column = j % self.stride
            far = (first <= column) & (column < first + self.summaries)
        else:
            near = i - j < self.stride
            far = (i - j) % self.stride == 0
        return (j <= i) & (near & (h < near_heads.stop) | far & (h >= far_heads.start))

    def first_summary(self) -> int:
        """Position of the first summary in a group."""
        return self.stride - self.subblocks * self.summaries


Partial = tuple[Tensor, Tensor]
"""o (B, H, T, D_v) and lse (B, H, T) over some of the keys"""


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, pattern: SparsePattern) -> Tensor:
    """Self-attention over the keys that a pattern shows, by the fused kernels.

    Equals `attention` with the mask `Mask.dense(pattern.visible(H, T))`, to rounding.

    Args:
        q: queries (B, H, T, D); any T.
        k: keys (B, H, T, D).
        v: values (B, H, T, D_v).
        pattern: the visible pairs.

    Returns:
        o (B, H, T, D_v) in q's dtype.

    Raises:
        TypeError, ValueError: a tensor is invalid for `attention`, or has other sizes.
        ValueError: the pattern does not suit the number of heads.
    """
    check_undivided("sparse_attention")
    if not (q.dim() == k.dim() == v.dim() == 4 and q.shape[:3] == k.shape[:3] == v.shape[:3]):
        raise ValueError(
            f"q, k and v must be (B, H, T, D) of one B, H and T, "
            f"got shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    pattern.check_heads(q.shape[1])
    if pattern.kind == "local":
        return _near(q, k, v, pattern)[0]
    # With merged heads, the far keys are those that are not near keys as well.
    far = _far_strided if pattern.kind == "strided" else _far_fixed
    if pattern.combination == "merged":
        return _merged(_near(q, k, v, pattern), far(q, k, v, pattern))
    near = len(pattern.near_heads(q.shape[1]))
    first = _near(q[:, :near], k[:, :near], v[:, :near], pattern)[0]
    last = far(q[:, near:], k[:, near:], v[:, near:], pattern)[0]
    return torch.cat([first, last], dim=1)


def _merged(near: Partial, far: Partial) -> Tensor:
    """o over both sets of keys; the near keys of a query are never none."""
    (o, lse), (other, other_lse) = near, far
    share = torch.sigmoid(lse - other_lse).to(o.dtype)[..., None]
    if not torch.is_grad_enabled():
        return torch.lerp(other, o, share)
    # The gradient of lerp is slower: its weight is not broadcast by vector instructions.
    merged = (o - other) * share
    return merged.add_(other)


def _near(q: Tensor, k: Tensor, v: Tensor, pattern: SparsePattern) -> Partial:
    if pattern.kind != "fixed":
        return attention(q, k, v, mask=Mask.window(pattern.stride - 1, 0), return_lse=True)
    B, H, T, _ = q.shape
    starts = torch.arange(0, T, pattern.stride, device=q.device)
    ends = (starts + pattern.stride).clamp(max=T) + T * torch.arange(B, device=q.device)[:, None]

    def packed(x: Tensor) -> Tensor:
        """(B, H, T, D) -> (B * T, H, D), a view if the heads are one projection's."""
        return x.transpose(1, 2).flatten(0, 1)

    o, lse = attention_varlen(
        packed(q), packed(k), packed(v),
        cu_seqlens_q=nn.functional.pad(ends.flatten(), (1, 0)),
        max_seqlen_q=min(pattern.stride, T),
        mask=Mask.causal(),
        return_lse=True,
    )  # fmt: skip
    return o.view(B, T, *o.shape[1:]).transpose(1, 2), lse.view(H, B, T).transpose(0, 1)


def _far_strided(q: Tensor, k: Tensor, v: Tensor, pattern: SparsePattern) -> Partial:
    _, H, T, _ = q.shape
    remainders = pattern.stride
    rows = -(-T // remainders)

    def by_remainder(x: Tensor) -> Tensor:
        """(B, H, T, D) -> (B, remainders * H, rows, D), a view if the heads are one projection's
        and T is a multiple of the stride."""
        y: Tensor = _padded(x, remainders).unflatten(2, (rows, remainders))
        return y.permute(0, 3, 1, 2, 4).flatten(1, 2)

    def by_position(x: Tensor) -> Tensor:
        """The inverse, of (B, remainders * H, rows, ...)."""
        y: Tensor = x.unflatten(1, (remainders, H))
        return y.movedim(1, 3).flatten(2, 3)[:, :, :T]

    o, lse = attention(
        *map(by_remainder, (q, k, v)),
        mask=Mask.window(None, 0 if pattern.combination == "split" else -1),
        return_lse=True,
    )
    return by_position(o), by_position(lse)


def _far_fixed(q: Tensor, k: Tensor, v: Tensor, pattern: SparsePattern) -> Partial:
    _, H, T, _ = q.shape
    stride, subblocks, summaries = pattern.stride, pattern.subblocks, pattern.summaries
    if pattern.combination == "split":
        k, v = _padded(k, stride), _padded(v, stride)
    groups = k.shape[2] // stride  # merged heads see no summaries of the last group

    def gathered(x: Tensor) -> Tensor:
        """The summaries of each head: (B, H, groups * summaries, D)."""
        every: Tensor = x[:, :, : groups * stride].unflatten(2, (groups, stride))
        ends: Tensor = every[:, :, :, -columns:]
        each: Tensor = ends.unflatten(3, (subblocks, summaries)).unflatten(1, (-1, subblocks))
        return each.diagonal(dim1=2, dim2=4).movedim(-1, 2).flatten(1, 2).flatten(2, 3)

    columns = subblocks * summaries
    i = torch.arange(T, device=q.device)
    position = torch.arange(groups * stride, device=q.device).expand(1, H, -1)[..., None]
    return attention(
        q,
        gathered(k),
        gathered(v),
        mask=Mask.positions(
            (i if pattern.combination == "split" else i - i % stride - 1)[None],
            gathered(position)[..., 0],
        ),
        return_lse=True,
    )


def _padded(x: Tensor, multiple: int) -> Tensor:
    """x (B, H, T, D) with zeros up to a multiple of some length. Causality hides them."""
    missing = -x.shape[2] % multiple
    return nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


class SparseAttention(AttentionLayer):
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
        size = size_of_heads(width, heads)
        super().__init__(width, heads, size, attn_implementation=attn_implementation)
        pattern.check_heads(heads)
        self.pattern = pattern
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
        q, k, v = self._to_heads(x, self.queries, self.keys, self.values)
        if cache is None:
            return self._out_proj(self._attend(q, k, v, mask))
        k, v = cache.append(k, v)
        with torch.no_grad():
            o = self._attend(q.to(k.dtype), k, v, mask)
        return self._out_proj(o)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        if mask is None:
            return sparse_attention(q, k, v, self.pattern)
        return attend(q, k, v, mask=mask, attn_implementation=self.attn_implementation)


class SparseBlock(SelfAttentionBlock):
    """Pre-norm `SelfAttentionBlock` with `SparseAttention`; options are those of both.

    The activation is the exact GELU, which the paper approximates by x sigmoid(1.702 x).
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
