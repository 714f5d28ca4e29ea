"""The gated delta rule in plain torch, token by token, as docs/delta.md defines it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...common.argument_checks import values_are_readable
from ...problem.types import accumulate_dtype
from ..packed import by_sequence, inside
from ..reference import SMALLEST_LOG_DECAY
from .types import NORM_EPS, Inputs, Options, Results


def reference_delta_rule(x: Inputs, options: Options) -> Results:
    """Returns o and the final state."""
    if x.cu_seqlens is None:
        return _dense(x, options)
    if values_are_readable(x.cu_seqlens):
        return Results(*by_sequence(x, lambda one: _dense(one, options)))
    # Every sequence over the rows of all, in B times the memory: no length is read. Zeros in the
    # rows of others leave the state as it is.
    outside = ~inside(x)
    q, k, v, log_decay = (t.masked_fill(outside, 0) for t in x[:4])
    beta = x.beta.masked_fill(outside[..., 0], 0)
    o, S = _dense(Inputs(q, k, v, log_decay, beta, x.S), options)
    return Results(o.sum(0, keepdim=True), S)


def _dense(x: Inputs, options: Options) -> Results:
    dtype = accumulate_dtype(x.q.dtype)
    B, H_v, _, D_v = x.v.shape
    q, k = (_rows(t.to(dtype), H_v, options) for t in (x.q, x.k))
    v, decay = x.v.to(dtype), x.log_decay.clamp(min=SMALLEST_LOG_DECAY[dtype]).exp()
    S = x.q.new_zeros(B, H_v, q.shape[3], D_v, dtype=dtype) if x.S is None else x.S
    outputs = [v[:, :, :0]]
    tokens = (t.unsqueeze(-2).unbind(2) for t in (q, k, v, decay, x.beta[..., None]))
    for q_t, k_t, v_t, decay_t, beta_t in zip(*tokens, strict=True):
        S = decay_t.mT * S
        S = S + k_t.mT * (beta_t * (v_t - k_t @ S))
        outputs.append(q_t @ S)
    return Results(torch.cat(outputs, dim=2).mul(options.scale).to(x.v.dtype), S)


def _rows(x: Tensor, H_v: int, options: Options) -> Tensor:
    """Returns q or k, normalised, for every value head."""
    if options.l2norm:
        x = x / (x.square().sum(-1, keepdim=True) + NORM_EPS).sqrt()
    return x.repeat_interleave(H_v // x.shape[1], dim=1)
