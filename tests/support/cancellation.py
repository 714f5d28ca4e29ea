"""Magnitude sums of gradients whose terms cancel, for the tolerance rule."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.plain import (
    distances,
    plain_weights,
    products_by_distance,
    repeat_heads,
    summed_by_distance,
)
from transformer_kernels.scores.alibi import Alibi
from transformer_kernels.scores.philox import keep_factor
from transformer_kernels.scores.relative import Relative, RelativeKeys


@torch.no_grad()
def gradient_terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    do: Tensor,
    dlse: Tensor | None = None,
    *,
    visible: Tensor | None = None,
    bias: Tensor | Alibi | None = None,
    relative: Relative | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
) -> dict[str, float]:
    """Returns the largest sum of the magnitudes of the terms of dq, dk and dbias, in float64.

    The gradients are sums of ds = p (dp - delta + dlse). With identical keys, or a single one, dp
    and delta are equal and ds is exactly zero, but both are sums of products that round
    separately. The magnitude of ds is therefore taken as p (|do| |v| + |do| |o| + |dlse|).

    Args:
        q: (B, H_q, M, D).
        k: (B, H_kv, N, D).
        v: (B, H_kv, N, D_v).
        o: (B, H_q, M, D_v), the output of the forward pass.
        do: (B, H_q, M, D_v).
        dlse: (B, H_q, M).
        visible: bool, broadcastable to (B, H_q, M, N); True = visible.
        bias: broadcastable to (B, H_q, M, N), or `alibi(slopes)`.
        relative: bias or keys by distance.
        scale: factor of the scores; 1/sqrt(D) by default.
        softcap: scores become softcap * tanh(score / softcap).
        dropout_p: dropout probability.
        sinks: (H_q,) one logit per head.

    Returns:
        Values for "dq" and "dk", for "dbias" if the bias is a tensor or "dslopes" if it is ALiBi,
        and for "dtable" and "dkeys" with tables by distance. "dtable_spread" is the largest root of
        the sum of the squares of the terms of "dtable", "dtable_stored" that of p do o.
    """
    q, k, v, o, do = (x.double() for x in (q, k, v, o, do))
    group = q.shape[1] // k.shape[1]
    p, _ = plain_weights(
        q, k,
        visible=visible, bias=bias, relative=relative, scale=scale, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    k, v = (repeat_heads(x.abs(), q) for x in (k, v))
    dp = torch.matmul(do.abs(), v.mT) * (keep_factor(dropout_p) if dropout_p < 1.0 else 1.0)
    delta = (do * o).abs().sum(dim=-1, keepdim=True)
    if dlse is not None:
        delta = delta + dlse.double().abs()[..., None]
    ds = p * (dp + delta)
    scale = abs(q.shape[-1] ** -0.5 if scale is None else scale)
    dk = torch.matmul(scale * ds.mT, q.abs()).unflatten(1, (-1, group)).sum(dim=2)
    terms = {"dq": torch.matmul(scale * ds, k), "dk": dk}
    if isinstance(bias, Tensor):
        terms["dbias"] = ds.sum_to_size(bias.shape)
    if isinstance(bias, Alibi):
        steps = bias.dense(*ds.shape[-2:]).double() / bias.slopes.double()[..., None, None]
        terms["dslopes"] = (ds * steps.abs()).sum(dim=(0, 2, 3))
    if relative is not None and relative.table is not None:
        shape = relative.table.shape
        terms["dtable"] = summed_by_distance(ds, relative).sum_to_size(shape)
        squares = summed_by_distance(ds.square(), relative).sum_to_size(shape)
        terms["dtable_spread"] = squares.sqrt()
        stored = p.square() * (do * o).square().sum(dim=-1, keepdim=True)
        terms["dtable_stored"] = summed_by_distance(stored, relative).sum_to_size(shape).sqrt()
    if isinstance(relative, RelativeKeys):
        by_entry = products_by_distance(scale * ds, q.abs(), relative)
        terms["dkeys"] = by_entry.sum_to_size(relative.keys.shape)
        keys = relative.keys.double().abs()[:, distances(relative, *ds.shape[-2:])]
        terms["dq"] += torch.einsum(
            "bhmn,hmnd->bhmd", scale * ds, keys.expand(q.shape[1], -1, -1, -1)
        )
    return {name: float(x.max()) if x.numel() else 0.0 for name, x in terms.items()}
