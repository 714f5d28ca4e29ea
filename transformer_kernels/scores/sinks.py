"""Sinks: a logit a head that joins the softmax's denominator. They need no kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def join_sinks(o: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """A sink takes the share sigmoid(sink - lse) of each row's weights; lse grows by it.

    o is (B, H_q, M, D_v), lse (B, H_q, M), sinks (H_q,).
    """
    sink = sinks.to(lse.dtype)[None, :, None]
    # In an empty row o is 0, whatever the share; second derivatives of -inf would be NaN.
    empty = lse.isneginf()
    lse = lse.masked_fill(empty, 0.0)
    keep = torch.sigmoid(lse - sink)
    joined = torch.where(empty, sink, torch.logaddexp(lse, sink.expand_as(lse)))
    return (o * keep[..., None]).to(o.dtype), joined
