"""Linear attention by its definition and by a matrix of weights, and the errors to allow."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.support.oracle import ROUNDINGS, Rounding
from transformer_kernels.linear.types import FEATURE_MAPS

_LEAVES = ("q", "k", "v", "log_decay", "S", "z")
Results = tuple[Tensor, Tensor, Tensor]
"""o, S and z."""


class LinearPart(NamedTuple):
    """Linear attention of batch entries with the same lengths."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    """(B, H_kv, N)"""
    S: Tensor | None
    z: Tensor | None
    hidden: Tensor
    """hidden keys, bool (B, N)"""
    feature_map: str
    causal: bool
    normalize: bool
    eps: float

    def by_loop(self) -> Results:
        """The definition: one token after another, with every key first if not causal."""
        q, k, v, decay, S = self._prepared()
        outputs = [q[:, :, :0] @ S]
        for j in range(k.shape[2]):
            if decay is not None:
                S = S * decay[:, :, j, None, None].exp()
            S = S + k[:, :, j, :, None] * v[:, :, j, None, :]
            if self.causal:
                outputs.append(q[:, :, j : j + 1] @ S)
        if not self.causal:
            outputs.append(q @ S)
        return self._finished(torch.cat(outputs, dim=2), S)

    def by_matrix(self) -> Results:
        """All weights at once."""
        q, k, v, decay, S = self._prepared()
        weights, start = q @ k.mT, q.new_ones(1, 1, 1, 1)
        end = start
        if self.causal and k.shape[2]:
            total = q.new_zeros(1, 1, k.shape[2], dtype=torch.float64)
            if decay is not None:
                total = decay.double().clamp(min=-800).cumsum(-1)
            later = torch.ones(weights.shape[-2:], dtype=torch.bool).triu(1)
            between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -math.inf)
            weights = weights * between.exp().to(q.dtype)
            start = total.exp().to(q.dtype)[..., None]
            end = (total[..., -1:] - total).exp().to(q.dtype)[..., None]
        o = weights @ v + (q * start) @ S
        return self._finished(o, S * start[..., -1:, :] + (k * end).mT @ v)

    def _prepared(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """phi(q), phi(k), v with a column of ones, decay, and S with z as its last column: of every
        query head, and without the hidden keys."""
        phi, hidden, dtype = FEATURE_MAPS[self.feature_map], self.hidden[:, None], self.q.dtype
        k = phi(self.k.masked_fill(hidden[..., None], 0)).masked_fill(hidden[..., None], 0)
        v = torch.cat([self.v, torch.ones_like(self.v[..., :1])], dim=3)
        v = v.masked_fill(hidden[..., None], 0)
        S = k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
        if self.S is not None and self.z is not None:
            S = torch.cat([self.S, self.z[..., None]], dim=3).to(dtype)
        decay = None if self.log_decay is None else self.log_decay.masked_fill(hidden, 0)
        heads = self._group
        k, v, S = (x.repeat_interleave(heads, dim=1) for x in (k, v, S))
        decay = None if decay is None else decay.repeat_interleave(heads, dim=1)
        return phi(self.q), k, v, decay, S

    def _finished(self, o: Tensor, S: Tensor) -> Results:
        S = S[:, :: self._group]
        o, weights = o[..., :-1], o[..., -1:]
        return o / (weights + self.eps) if self.normalize else o, S[..., :-1], S[..., -1]

    @property
    def _group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def magnitudes(self) -> LinearPart:
        """Returns the part with the magnitudes of features, values and states as leaves."""
        phi = FEATURE_MAPS[self.feature_map]
        S, z = self.S, self.z
        if S is None or z is None:
            B, H, _, D = self.k.shape
            S, z = self.q.new_zeros(B, H, D, self.v.shape[3]), self.q.new_zeros(B, H, D)
        decay = self.log_decay
        if decay is None:
            decay = self.q.new_zeros(self.k.shape[:3])
        k = self.k.masked_fill(self.hidden[:, None, :, None], 0)
        tensors = [phi(self.q).abs(), phi(k).abs(), self.v.abs(), decay, S.abs(), z.abs()]
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        named: dict[str, Any] = dict(zip(_LEAVES, leaves, strict=True))
        return self._replace(**named, feature_map="identity", normalize=False)


_STORED = 4.0
"""Roundings of a term to the stored dtype, in units of eps: of features, weights, decayed features,
states and results."""
_CHUNK = 64
"""Largest number of tokens whose products are summed for the gradient of a decay."""


def _chunk_sums(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """Sums of products (B, H_q, N) and (B, H_kv, N) from each token to the end of a chunk, which
    cancel in the gradient of a decay (docs/linear.md, section 3): (B, H_kv, N)."""
    of_queries = of_queries.unflatten(1, (of_keys.shape[1], -1)).sum(2)
    padded = pad((of_queries + of_keys).detach(), (0, _CHUNK))
    return padded.unfold(-1, _CHUNK, 1).sum(-1)[..., : of_keys.shape[2]]


def allowed_errors(x: LinearPart, cotangents: LinearPart, rounding: Rounding) -> dict[str, Tensor]:
    """Returns the allowed error of each element of a result, by name, in proportion to the sum of
    the magnitudes of its terms.

    The same computation on magnitudes has these sums as its results, and as its gradients for
    positive cotangents. Features must not be negative if outputs are normalized.

    Args:
        x: the part, in float64.
        cotangents: do, ds and dz in place of q, S and z.
        rounding: of the dtype under test.
    """
    part = x.magnitudes()
    o, S, z = part.by_loop()
    assert part.z is not None
    ones = part._replace(v=torch.ones_like(part.v[..., :1]), S=part.z[..., None])
    weights, _, _ = ones.by_loop()
    total = weights.detach() + x.eps if x.normalize else torch.ones_like(weights)
    terms = o.detach() / total
    do = cotangents.q.abs() / total
    assert cotangents.S is not None
    assert cotangents.z is not None
    loss = (o * do).sum() + (S * cotangents.S.abs()).sum() + (z * cotangents.z.abs()).sum()
    if x.normalize:
        loss = loss + (weights * (do * terms).sum(-1, keepdim=True)).sum()
    leaves = [getattr(part, name) for name in _LEAVES]
    gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
    sums = {"o": terms, "S_end": S, "z_end": z}
    sums |= {f"d{name}": one for name, one in zip(_LEAVES, gradients, strict=True)}
    products = [(one * sums[f"d{name}"]).sum(-1) for name, one in (("q", part.q), ("k", part.k))]
    if x.causal:
        sums["dlog_decay"] = sums["dlog_decay"] + _chunk_sums(*products)
    for name, one in (("dq", x.q), ("dk", x.k)):
        inputs = one.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(FEATURE_MAPS[x.feature_map](inputs).sum(), inputs)
        sums[name] = (sums[name] * slope.abs()).nan_to_num()
    decay = x.hidden.new_zeros((), dtype=torch.float64)
    if x.log_decay is not None and x.log_decay.numel():
        # Sums of log_decay are in float64, where one that clears the state counts as -800.
        reset = -800.0 if rounding.accumulated < 1e-9 else 0.0
        finite = x.log_decay.detach().masked_fill(x.hidden[:, None], 0).nan_to_num(neginf=reset)
        decay = finite.abs().sum(-1).max()
    eps = _STORED * rounding.stored + ROUNDINGS * rounding.accumulated * (1 + decay)
    # Outputs and gradients are quotients, or products with such: both sides of them round.
    return {
        name: (1.0 if name in ("S_end", "z_end") else 2.0) * eps * one.detach() + rounding.underflow
        for name, one in sums.items()
    }
