"""Linear attention in plain torch, chunk by chunk.

It is the specification of the kernels, runs on any device and in any dtype, and torch
differentiates it to any order. A loop over tokens would be the shorter definition; chunks compute
the same (the tests compare both) in a sixty-fourth of the steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.argument_checks import values_are_readable
from ..problem.types import accumulate_dtype
from .packed import by_sequence, inside
from .types import CHUNK, FEATURE_MAPS, Inputs, LinearState, Options, Results

SMALLEST_LOG_DECAY = {torch.float32: -200.0, torch.float64: -800.0}
"""exp() of these is 0, also as a factor of the largest number. Smaller ones, such as -inf, count as
these: differences of their sums are finite. As kSmallestLogDecay in csrc/cpu/linear/decay.h."""


def reference_linear_attention(x: Inputs, options: Options) -> Results:
    """Returns o and the final state by the formulas of docs/linear.md. The normalizer is 0."""
    o, *state = _outputs(x, options)
    normalizer = x.q.shape[:3] if options.normalize else (0,)
    return Results(o, o.new_zeros(normalizer, dtype=accumulate_dtype(o.dtype)), *state)


def _outputs(x: Inputs, options: Options) -> tuple[Tensor, ...]:
    if x.cu_seqlens is None:
        return _dense(x, options)
    if not values_are_readable(x.cu_seqlens):
        return _together(x, x.cu_seqlens, options)
    return by_sequence(x, lambda one: _dense(one, options))


def _together(x: Inputs, cu_seqlens: Tensor, options: Options) -> tuple[Tensor, ...]:
    """Runs every sequence over the rows of all, in B times the memory: no length is read."""
    outside = ~inside(x)
    q = x.q.masked_fill(outside, 0)
    k, v, decay = (None if t is None else t.expand(len(q), *t.shape[1:]) for t in x[1:4])
    assert k is not None
    assert v is not None
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    o, *state = _dense(Inputs(q, k, v, decay, x.S, x.z, None, starts, ends), options)
    return o.masked_fill(outside, 0).sum(0, keepdim=True), *state


def _initial_state(x: Inputs) -> LinearState:
    """The initial state of a call; zeros if it has none."""
    if x.S is not None and x.z is not None:
        return LinearState(x.S, x.z)
    B, H_kv, _, D = x.k.shape
    dtype = accumulate_dtype(x.q.dtype)
    S = x.q.new_zeros(B, H_kv, D, x.v.shape[3], dtype=dtype)
    return LinearState(S, x.q.new_zeros(B, H_kv, D, dtype=dtype))


def _dense(x: Inputs, options: Options) -> tuple[Tensor, ...]:
    """The heads of q that share a key head are a dimension of their own, after that of k."""
    dtype = accumulate_dtype(x.q.dtype)
    phi = FEATURE_MAPS[options.feature_map]
    _, H_kv, N, _ = x.k.shape
    q = phi(x.q.to(dtype)).unflatten(1, (H_kv, -1))
    k, v, decay = x.k, x.v, x.log_decay
    if x.key_end is not None:
        j = torch.arange(N, device=k.device)
        hidden = (j >= x.key_end[:, None])[:, None]  # (B, 1, N)
        if x.key_start is not None:
            hidden = hidden | (j < x.key_start[:, None])[:, None]
        k = phi(k.masked_fill(hidden[..., None], 0).to(dtype)).masked_fill(hidden[..., None], 0)
        v = v.masked_fill(hidden[..., None], 0).to(dtype)
        decay = None if decay is None else decay.masked_fill(hidden, 0)
    else:
        k, v = phi(k.to(dtype)), v.to(dtype)
    state = _initial_state(x)
    if options.causal:
        o, state = _causal(q, k, v, decay, state, options)
    else:
        S, z = state.S + k.mT @ v, state.z + k.sum(-2)
        o, state = _attend(q, S, z, options), LinearState(S, z)
    return o.flatten(1, 2).to(x.q.dtype), *state


def _attend(q: Tensor, S: Tensor, z: Tensor, options: Options) -> Tensor:
    numerator, normalizer = q @ S[:, :, None], q @ z[:, :, None, :, None]
    return numerator / (normalizer + options.eps) if options.normalize else numerator


def _causal(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: LinearState, options: Options
) -> tuple[Tensor, LinearState]:
    S, z = state
    outputs = [q[..., :0, :] @ S[:, :, None]]
    chunks = zip(*(x.split(CHUNK, dim=-2) for x in (q, k, v)), strict=True)
    for n, (q_n, k_n, v_n) in enumerate(chunks if k.shape[2] else ()):
        weights = q_n @ k_n[:, :, None].mT
        tokens = k_n.shape[2]
        is_later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        if decay is not None:
            total = _sums(decay[:, :, n * CHUNK :][:, :, :CHUNK], q.dtype)  # (B, H_kv, tokens)
            between = (total[..., :, None] - total[..., None, :]).masked_fill(is_later, 0)
            weights = weights * between.exp().to(q.dtype)[:, :, None]
            q_n = q_n * total.exp().to(q.dtype)[:, :, None, :, None]
            k_n = k_n * (total[..., -1:] - total).exp().to(q.dtype)[..., None]
            kept = total[..., -1].exp().to(q.dtype)[..., None]
        weights = weights.masked_fill(is_later, 0)
        o = weights @ v_n[:, :, None] + q_n @ S[:, :, None]
        if options.normalize:
            normalizer = weights.sum(-1, keepdim=True) + q_n @ z[:, :, None, :, None]
            o = o / (normalizer + options.eps)
        outputs.append(o)
        if decay is not None:
            S, z = S * kept[..., None], z * kept
        S, z = S + k_n.mT @ v_n, z + k_n.sum(-2)
    return torch.cat(outputs, dim=-2), LinearState(S, z)


def _sums(decay: Tensor, dtype: torch.dtype) -> Tensor:
    """Running sums of log-decays, in float64: only their differences matter."""
    return decay.clamp(min=SMALLEST_LOG_DECAY[dtype]).double().cumsum(-1)
