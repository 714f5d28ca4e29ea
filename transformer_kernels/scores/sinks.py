"""Attention sinks: one logit per head, added to the softmax denominator. They need no kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..common.argument_checks import FLOATS, check_tensor, savable
from ..common.storage import check_storage


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Raises TypeError or ValueError unless sinks is None or fits q (B, H_q, M, D)."""
    if sinks is None:
        return
    check_storage((("sinks", sinks),))
    check_tensor("sinks", sinks, FLOATS, q.device, "a floating-point tensor")
    if sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks must be (H_q,) = ({q.shape[1]},), got {tuple(sinks.shape)}")


def join_sinks(o: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds sinks to a result: o * sigmoid(lse - sink), and lse = log(exp(lse) + exp(sink)).

    Shapes: o (B, H_q, M, D_v), lse (B, H_q, M), sinks (H_q,).
    """
    sink = savable(sinks).to(lse.dtype)[None, :, None]
    # A fully masked row has o = 0 in any case. With lse = -inf second derivatives would be NaN.
    empty = lse.isneginf()
    lse = lse.masked_fill(empty, 0.0)
    keep = torch.exp(logsigmoid(lse - sink))  # sigmoid, with a gradient exact for small sinks
    joined = torch.where(empty, sink, torch.logaddexp(lse, sink.expand_as(lse)))
    return (o * keep[..., None]).to(o.dtype), joined
