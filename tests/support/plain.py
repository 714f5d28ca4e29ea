"""Attention as a textbook writes it, in the inputs' own dtype: the yardstick for errors."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.scores.alibi import Alibi


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    shown: Tensor | None = None,
    bias: Tensor | Alibi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    kept: Tensor | None = None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(o, lse) by matmul, masked_fill, softmax, matmul, each rounded to q's own dtype.

    Args:
        q: (B, H_q, M, D).
        k: (B, H_kv, N, D).
        v: (B, H_kv, N, D_v).
        shown: bool, broadcastable to (B, H_q, M, N); True = visible.
        bias: broadcastable to (B, H_q, M, N), or `alibi(slopes)`.
        scale: 1/sqrt(D) unless given.
        softcap: scores become softcap * tanh(score / softcap).
        kept: bool (B, H_q, M, N): the weights that dropout keeps, where `dropout_p` > 0.
        dropout_p: what share of the weights `kept` drops.
        sinks: (H_q,) a logit a head, appended to the scores as one more column.

    Returns:
        o (B, H_q, M, D_v) and lse (B, H_q, M), natural log, both in q's dtype. A row with no
        visible key gives o = 0 and lse = -inf.
    """
    p, lse = plain_weights(q, k, shown=shown, bias=bias, scale=scale, softcap=softcap, sinks=sinks)
    if dropout_p > 0.0:
        if kept is None:
            raise ValueError(f"dropout_p = {dropout_p} needs kept, the weights that stay; got None")
        p = torch.where(kept, p / (1.0 - dropout_p), 0.0) if dropout_p < 1.0 else p * 0.0
    return torch.matmul(p, repeat_heads(v, q)), lse


def plain_weights(
    q: Tensor,
    k: Tensor,
    *,
    shown: Tensor | None = None,
    bias: Tensor | Alibi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(p, lse): the weights (B, H_q, M, N) before dropout, and lse (B, H_q, M), natural log.

    Arguments are those of `plain_attention`. A row with no visible key has p = 0 and lse = -inf.
    """
    s = torch.matmul(q, repeat_heads(k, q).mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if isinstance(bias, Alibi):
        bias = bias.dense(*s.shape[-2:])
    if bias is not None:
        s = s + bias.to(s.dtype)
    if shown is not None:
        s = s.masked_fill(~shown, float("-inf"))
    if sinks is not None:
        column = sinks.to(s.dtype)[None, :, None, None].expand(*s.shape[:-1], 1)
        s = torch.cat([s, column], dim=-1)
    empty = (s == float("-inf")).all(dim=-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)
    lse = torch.logsumexp(s, dim=-1).masked_fill(empty[..., 0], float("-inf"))
    p = torch.softmax(s, dim=-1)[..., : k.shape[-2]].masked_fill(empty, 0.0)
    return p, lse


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values (B, H_kv, N, width), once for each head of q that shares them."""
    group = q.shape[1] // x.shape[1]
    return x.repeat_interleave(group, dim=1) if group > 1 else x
