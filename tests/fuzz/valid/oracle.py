"""Attention in float64 by plain torch, and how much each element of a result may be off.

Sums round relative to the magnitudes of their terms, and gradients cancel (Higham, Accuracy and
Stability of Numerical Algorithms, 2nd edition, section 4.2). A bound is therefore a multiple of the
sum of the magnitudes of an element's terms. The tolerance rule of the other tests is stricter, but
has one bound per tensor, whose elements have similar sizes there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.support.plain import distances, plain_weights, repeat_heads, summed_by_distance
from transformer_kernels.scores.relative import Relative, RelativeKeys

_ROUNDINGS = 16.0
"""Errors of a sum or of a function in the accumulation dtype, in units of eps."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention: q (B, H_q, M, D), k (B, H_kv, N, D), v (B, H_kv, N, D_v), in float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    visible: Tensor
    """bool (B, H_q, M, N)"""
    bias: Tensor | None = None
    """broadcastable to (B, H_q, M, N)"""
    relative: Relative | None = None
    """with tables in float64"""
    scale: float
    softcap: float | None = None
    dropout: Tensor | None = None
    """(B, H_q, M, N): factors of the weights"""
    sinks: Tensor | None = None
    """(H_q,)"""
    differentiable: dict[str, Tensor] = field(default_factory=dict)
    """tensors of the problem by the names of their gradients"""


@dataclass(frozen=True)
class Rounding:
    """Unit roundings of the dtype under test."""

    stored: float
    accumulated: float
    exponential: float
    """of the weights; 2.6e-6 is that of half precision on AMX (docs/attention.md, section 8)"""
    underflow: float
    """the largest magnitude that may become 0"""

    @staticmethod
    def of(dtype: torch.dtype) -> Rounding:
        stored = torch.finfo(dtype)
        accumulated = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
        # AMX adds the products of six parts of two numbers, each of which may become 0.
        underflow = max(16 * accumulated.tiny, 2 * stored.tiny * stored.eps)
        exponential = 2.6e-6 if stored.bits == 16 else accumulated.eps
        return Rounding(stored.eps, accumulated.eps, exponential, underflow)


@dataclass(frozen=True)
class Expected:
    """Exact values of a result, and the allowed error of each element."""

    exact: Tensor
    allowed: Tensor


def solve(problem: Problem, rounding: Rounding) -> dict[str, Expected]:
    """Returns o, lse, and the gradients of `problem.differentiable`, for do and dlse."""
    x = problem
    p, lse = plain_weights(
        x.q, x.k, visible=x.visible, bias=x.bias, relative=x.relative,
        scale=x.scale, softcap=x.softcap, sinks=x.sinks,
    )  # fmt: skip
    o = _dropped(p, x) @ repeat_heads(x.v, x.q)
    loss = (o * problem.do).sum() + (lse.masked_fill(lse.isneginf(), 0.0) * problem.dlse).sum()
    exact = {"o": o, "lse": lse}
    if leaves := problem.differentiable:
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        exact |= dict(zip(leaves, gradients, strict=True))
    with torch.no_grad():
        allowed = _allowed(problem, rounding, p, lse, o)
        return {name: Expected(x.detach(), allowed[name]) for name, x in exact.items()}


def _allowed(
    x: Problem, rounding: Rounding, p: Tensor, lse: Tensor, o: Tensor
) -> dict[str, Tensor]:
    """Allowed errors: relative ones of every term, and those of terms that underflow."""
    q, k, v, do, dlse = (t.abs() for t in (x.q, x.k, x.v, x.do, x.dlse))
    k, v = repeat_heads(k, q), repeat_heads(v, q)
    eps, tiny = rounding.accumulated, rounding.underflow
    sink = torch.zeros(()) if x.sinks is None else (x.sinks[None, :, None] - lse).exp()[..., None]
    lse = lse.masked_fill(lse.isneginf(), 0.0).abs()

    # Largest score of a row that takes part; its rounding error is a relative error of the weights.
    scores = abs(x.scale) * (q @ k.mT) + (0.0 if x.bias is None else x.bias.abs())
    scores = scores + _relative_scores(x, scores.shape)
    scores = scores.masked_fill(~x.visible | scores.isinf(), 0.0)
    score = scores.amax(-1) if scores.shape[-1] else lse * 0
    of_weight = (rounding.exponential + _ROUNDINGS * eps * (1 + score + lse))[..., None]
    relative = 2 * of_weight + 2 * rounding.stored

    dp = _dropped(do @ v.mT, x)
    delta = (do * o.abs()).sum(-1, keepdim=True)
    if x.sinks is not None:  # o of the keys alone; the gradient of lse by the sink, twice
        delta = 3 * delta / (1 - sink).clamp(min=tiny)
    gradient_of_sink = 3 * (do * o.abs()).sum(-1, keepdim=True) + dlse[..., None]
    gradient = dp + delta + dlse[..., None]  # of the weights
    of_p = _dropped(p * relative + tiny, x)
    ds = (p * relative + tiny) * gradient + tiny
    scale = abs(x.scale)
    allowed = {
        "o": of_p @ v + tiny,
        "lse": of_weight[..., 0],
        "dq": scale * (ds @ k) + tiny,
        "dk": scale * (ds.mT @ q) + tiny,
        "dv": of_p.mT @ do + tiny,
        "dsinks": (sink * relative * gradient_of_sink).sum((0, 2, 3)) + tiny,
    }
    if x.bias is not None:
        allowed["dbias"] = ds.sum_to_size(x.bias.shape)
    if x.relative is not None and x.relative.table is not None:
        summed = summed_by_distance(ds, x.relative)
        allowed["dtable"] = summed.sum_to_size(x.relative.table.shape)
    if isinstance(x.relative, RelativeKeys):
        by_entry = scale * _scattered(ds, x.relative)
        allowed["dq"] = allowed["dq"] + by_entry @ x.relative.keys.abs()
        summed = torch.einsum("bhme,bhmd->hed", by_entry, q) + tiny
        allowed["dkeys"] = summed.sum_to_size(x.relative.keys.shape)
    for name in ("dk", "dv"):
        allowed[name] = allowed[name].unflatten(1, (x.k.shape[1], -1)).sum(2)
    return allowed


def _relative_scores(x: Problem, shape: torch.Size) -> Tensor:
    """Magnitudes that relative keys and biases add to scores of this shape (B, H_q, M, N)."""
    added = x.q.new_zeros(shape)
    if x.relative is None:
        return added
    entry = distances(x.relative, *shape[-2:])
    if isinstance(x.relative, RelativeKeys):
        products = abs(x.scale) * x.q.abs() @ x.relative.keys.abs().mT
        added = added + products.gather(3, entry.expand(shape))
    return added if x.relative.table is None else added + x.relative.table.abs()[:, entry]


def _scattered(ds: Tensor, relative: RelativeKeys) -> Tensor:
    """Sums (B, H_q, M, N) over the keys of each query that read the same entry: (B, H_q, M, E)."""
    entry = distances(relative, *ds.shape[-2:]).expand(ds.shape)
    return ds.new_zeros(*ds.shape[:3], relative.keys.shape[1]).scatter_add(3, entry, ds)


def _dropped(weights: Tensor, x: Problem) -> Tensor:
    return weights if x.dropout is None else weights * x.dropout


def check(name: str, got: Tensor, expected: Expected) -> None:
    """Raises AssertionError if an element of `got` is off by more than allowed."""
    exact, allowed = expected.exact, expected.allowed
    if got.shape != exact.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
    wrong = ~((got.double() - exact).abs() <= allowed) & (got.double() != exact)
    overflows = exact.isfinite() & (exact.abs() > 0.9 * torch.finfo(got.dtype).max)
    wrong &= ~overflows
    wrong |= got.isnan()
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, first {at}: got "
            f"{float(got[at]):.9g}, expected {float(exact[at]):.9g} +- {float(allowed[at]):.2g}"
        )
