"""Textbook attention in the dtype of the inputs: the reference error of the tolerance rule."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.masks.constraints import Align
from transformer_kernels.scores.alibi import Alibi
from transformer_kernels.scores.philox import keep_factor
from transformer_kernels.scores.relative import Relative, RelativeKeys


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None = None,
    bias: Tensor | Alibi | None = None,
    relative: Relative | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    keep_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention by matmul, masked_fill, softmax and matmul, each rounded to q's dtype.

    Args:
        q: (B, H_q, M, D).
        k: (B, H_kv, N, D).
        v: (B, H_kv, N, D_v).
        visible: bool, broadcastable to (B, H_q, M, N); True = visible.
        bias: broadcastable to (B, H_q, M, N), or `alibi(slopes)`.
        relative: bias or keys by distance.
        scale: factor of the scores; 1/sqrt(D) by default.
        softcap: scores become softcap * tanh(score / softcap).
        keep_mask: bool (B, H_q, M, N), True = keep_mask by dropout; required if `dropout_p` > 0.
        dropout_p: dropout probability that `keep_mask` was drawn with.
        sinks: (H_q,) one logit per head, appended to the scores as an additional column.

    Returns:
        o (B, H_q, M, D_v) and lse (B, H_q, M), natural log, both in q's dtype. A fully masked row
        gives o = 0 and lse = -inf.
    """
    p, lse = plain_weights(
        q, k,
        visible=visible, bias=bias, relative=relative, scale=scale, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    if dropout_p > 0.0:
        if keep_mask is None:
            raise ValueError(f"keep_mask: dropout_p = {dropout_p} needs a bool tensor, got None")
        p = torch.where(keep_mask, p * keep_factor(dropout_p), 0.0) if dropout_p < 1.0 else p * 0.0
    return torch.matmul(p, repeat_heads(v, q)), lse


def plain_weights(
    q: Tensor,
    k: Tensor,
    *,
    visible: Tensor | None = None,
    bias: Tensor | Alibi | None = None,
    relative: Relative | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the weights p (B, H_q, M, N) before dropout, and lse (B, H_q, M), natural log.

    Arguments are those of `plain_attention`. A fully masked row has p = 0 and lse = -inf.
    """
    s = torch.matmul(q, repeat_heads(k, q).mT)
    if isinstance(relative, RelativeKeys):
        by_entry = torch.matmul(q, relative.keys.to(q.dtype).mT)
        entry = distances(relative, *s.shape[-2:])
        s = s + by_entry.gather(3, entry.expand(s.shape))
    s = s * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if isinstance(bias, Alibi):
        bias = -bias.slopes[..., None, None] * alibi_distances(bias, *s.shape[-2:])
    if bias is not None:
        s = s + bias.to(s.dtype)
    if relative is not None and relative.table is not None:
        s = s + relative.table[:, distances(relative, *s.shape[-2:])].to(s.dtype)
    if visible is not None:
        s = s.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.to(s.dtype)[None, :, None, None].expand(*s.shape[:-1], 1)
        s = torch.cat([s, column], dim=-1)
    empty = (s == float("-inf")).all(dim=-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)
    lse = torch.logsumexp(s, dim=-1).masked_fill(empty[..., 0], float("-inf"))
    p = torch.softmax(s, dim=-1)[..., : k.shape[-2]].masked_fill(empty, 0.0)
    return p, lse


def distances(relative: Relative, M: int, N: int) -> Tensor:
    """Returns the entry of the table that each pair (M, N) reads."""
    entry = _offsets(relative.align, M, N) - relative.lowest
    return entry.clamp(0, relative.tensors()[0].shape[1] - 1)


def alibi_distances(alibi: Alibi, M: int, N: int) -> Tensor:
    """Returns the distance of each pair (M, N) that the slopes are multiplied by."""
    return _offsets(alibi.align, M, N).abs()


def _offsets(align: Align, M: int, N: int) -> Tensor:
    d = N - M if align == "bottom_right" else 0
    return torch.arange(M)[:, None] + d - torch.arange(N)


def summed_by_distance(ds: Tensor, relative: Relative) -> Tensor:
    """Sums (B, H_q, M, N) over the pairs that read each entry of the table: (H_q, E)."""
    rows = ds.sum(dim=0).flatten(1)
    entries = distances(relative, *ds.shape[-2:]).flatten().expand(rows.shape)
    return rows.new_zeros(rows.shape[0], relative.tensors()[0].shape[1]).scatter_add(
        1, entries, rows
    )


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeats keys or values (B, H_kv, N, width) for each query head that shares them."""
    group = q.shape[1] // x.shape[1]
    return x.repeat_interleave(group, dim=1) if group > 1 else x
