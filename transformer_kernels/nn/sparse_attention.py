"""Attention by the patterns of the Sparse Transformer, as views and dense kernels.

The far keys of a query are few and apart, so that a mask over all keys would touch most of its
blocks. Here each pattern becomes attention with dense blocks:

- near keys of "local" and "strided": a window;
- near keys of "fixed": each group is a sequence of a packed batch;
- far keys of "strided": the positions of one remainder modulo the stride are a sequence of its own,
  and the remainders more heads: a causal mask;
- far keys of "fixed": queries see the gathered summaries, masked by position.

Results over near and far keys are merged by lse (docs/attention.md, section 5). Time follows the
number of visible pairs, and memory the length.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..dispatch.division import check_undivided
from ..functional.attention import attention
from ..functional.varlen import attention_varlen
from ..masks.mask import Mask
from .sparse_patterns import SparsePattern

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
    if pattern.combination == "merged":
        return _merged(_near(q, k, v, pattern), _far(q, k, v, pattern))
    near = len(pattern.near_heads(q.shape[1]))
    first = _near(q[:, :near], k[:, :near], v[:, :near], pattern)[0]
    last = _far(q[:, near:], k[:, near:], v[:, near:], pattern)[0]
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
        packed(q),
        packed(k),
        packed(v),
        cu_seqlens_q=nn.functional.pad(ends.flatten(), (1, 0)),
        max_seqlen_q=min(pattern.stride, T),
        mask=Mask.causal(),
        return_lse=True,
    )
    return o.view(B, T, *o.shape[1:]).transpose(1, 2), lse.view(H, B, T).transpose(0, 1)


def _far(q: Tensor, k: Tensor, v: Tensor, pattern: SparsePattern) -> Partial:
    """Attention to the far keys; with merged heads, to those that are not near keys as well."""
    far = _far_strided if pattern.kind == "strided" else _far_fixed
    return far(q, k, v, pattern)


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
