"""Attention by definition, in the dtype of the inputs, and the errors that results may have.

Sums round relative to the magnitudes of their terms, and gradients cancel (Higham, Accuracy and
Stability of Numerical Algorithms, 2nd edition, section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

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
    keep_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attention by matmul, masked_fill, softmax and matmul, each rounded to q's dtype.

    Args:
        q: (B, H_q, M, D).
        k: (B, H_kv, N, D).
        v: (B, H_kv, N, D_v).
        keep_mask: bool (B, H_q, M, N), True = kept by dropout; required if `dropout_p` > 0.
        dropout_p: dropout probability that `keep_mask` was drawn with.
        options: those of `plain_weights`.

    Returns:
        o (B, H_q, M, D_v) and lse (B, H_q, M), natural log, both in q's dtype. A fully masked row
        gives o = 0 and lse = -inf.
    """
    p, lse = plain_weights(q, k, **options)
    if dropout_p > 0.0:
        assert keep_mask is not None
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

    Args:
        q: (B, H_q, M, D).
        k: (B, H_kv, N, D).
        visible: bool, broadcastable to (B, H_q, M, N); True = visible.
        bias: broadcastable to (B, H_q, M, N), or `alibi(slopes)`.
        relative: bias or keys by distance.
        scale: factor of the scores; 1/sqrt(D) by default.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: (H_q,) one logit per head, appended to the scores as an additional column.
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


def bucket_by_integers(
    distance: int, buckets: int, max_distance: int, *, bidirectional: bool
) -> int:
    """Bucket of a distance (query index minus key index), as `nn.distance_buckets` has it.

    Wide bucket n begins at the first distance d with d / single >= (max_distance / single) ** (n /
    wide), where `single` buckets hold one distance each and `wide` buckets more.
    """
    side = buckets // 2 if bidirectional else buckets
    single = side // 2
    wide = side - single
    first = side if bidirectional and distance < 0 else 0
    d = abs(distance) if bidirectional else max(distance, 0)
    if d < single:
        return first + d
    begun = [n for n in range(wide) if d**wide * single**n >= max_distance**n * single**wide]
    return first + single + max(begun)


ROUNDINGS = 16.0
"""Errors of a sum or of a function in the accumulation dtype, in units of eps."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Attention of batch entries with the same lengths: a whole dense call, or one sequence of
    others. The fields are the arguments of `plain_attention`, and the cotangents."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor | None = None
    visible: Tensor | None = None
    bias: Tensor | Alibi | None = None
    relative: Relative | None = None
    scale: float | None = None
    softcap: float | None = None
    keep_mask: Tensor | None = None
    dropout_p: float = 0.0
    sinks: Tensor | None = None

    def attention(self) -> tuple[Tensor, Tensor]:
        """Returns o and lse by plain torch, in the dtype of the inputs."""
        return plain_attention(
            self.q, self.k, self.v,
            keep_mask=self.keep_mask, dropout_p=self.dropout_p, **self._options(),
        )  # fmt: skip

    def weights(self) -> tuple[Tensor, Tensor]:
        return plain_weights(self.q, self.k, **self._options())

    def _options(self) -> dict[str, Any]:
        names = ("visible", "bias", "relative", "scale", "softcap", "sinks")
        return {name: getattr(self, name) for name in names}

    def dropped(self, weights: Tensor) -> Tensor:
        if self.keep_mask is None:
            return weights
        return weights * self.keep_mask * keep_factor(self.dropout_p)

    @property
    def abs_scale(self) -> float:
        scale: float = self.q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return abs(scale)


def gradient_sums(ds: Tensor, x: Part) -> dict[str, Tensor]:
    """Returns the sums of magnitudes of the terms of gradients, by name.

    `ds` (B, H_q, M, N) are magnitudes of the gradient of the scores, after scale and softcap.
    """
    q, k, scaled = x.q.abs(), repeat_heads(x.k.abs(), x.q), x.abs_scale * ds
    dk = torch.matmul(scaled.mT, q).unflatten(1, (x.k.shape[1], -1)).sum(dim=2)
    sums = {"dq": torch.matmul(scaled, k), "dk": dk}
    if isinstance(x.bias, Tensor):
        sums["dbias"] = ds.sum_to_size(x.bias.shape)
    if isinstance(x.bias, Alibi):
        steps = alibi_distances(x.bias, *ds.shape[-2:])
        sums["dslopes"] = (ds * steps).sum(dim=(2, 3)).sum_to_size(x.bias.slopes.shape)
    if x.relative is not None and x.relative.table is not None:
        by_entry = summed_by_distance(ds, x.relative)
        sums["dtable"] = by_entry.sum_to_size(x.relative.table.shape)
    if isinstance(x.relative, RelativeKeys):
        keys, entry = x.relative.keys, distances(x.relative, *ds.shape[-2:])
        by_entry = ds.new_zeros(*ds.shape[:3], keys.shape[1])
        by_entry = by_entry.scatter_add(3, entry.expand(ds.shape), scaled)
        sums["dkeys"] = torch.einsum("bhme,bhmd->hed", by_entry, q).sum_to_size(keys.shape)
        sums["dq"] = sums["dq"] + by_entry @ keys.abs()
    return sums


@torch.no_grad()
def gradient_terms(parts: Iterable[Part]) -> dict[str, float]:
    """Returns the largest sums of magnitudes of the terms of gradients, for the tolerance rule.

    The gradients are sums of ds = p (dp - delta + dlse). With identical keys, or a single one, dp
    and delta are equal and ds is exactly zero, but both are sums of products that round
    separately. The magnitude of ds is therefore taken as p (|do| |v| + |do| |o| + |dlse|).

    Args:
        parts: of one call, in float64.

    Returns:
        Values by name of the gradient: the largest of all parts, or for gradients that parts share,
        the sum. "dtable_spread" is the largest root of the sum of the squares of the terms of
        "dtable", "dtable_stored" that of p do o.
    """
    terms: dict[str, float] = {}
    for part in parts:
        for name, x in _part_terms(part).items():
            value = float(x.max()) if x.numel() else 0.0
            is_shared = name in _SHARED or name.startswith("dtable_")
            terms[name] = (
                terms.get(name, 0.0) + value if is_shared else max(terms.get(name, 0.0), value)
            )
    return terms


_SHARED = ("dsinks", "dslopes", "dtable", "dkeys")
"""Gradients of tensors that all parts of a call share."""


def _part_terms(x: Part) -> dict[str, Tensor]:
    p, _ = x.weights()
    o = torch.matmul(x.dropped(p), repeat_heads(x.v, x.q))
    dp = torch.matmul(x.do.abs(), repeat_heads(x.v.abs(), x.q).mT)
    if x.dropout_p < 1.0:
        dp = dp * keep_factor(x.dropout_p)
    delta = (x.do * o).abs().sum(dim=-1, keepdim=True)
    if x.dlse is not None:
        delta = delta + x.dlse.abs()[..., None]
    ds = p * (dp + delta)
    terms = gradient_sums(ds, x)
    if x.relative is not None and x.relative.table is not None:
        shape = x.relative.table.shape
        stored = p.square() * (x.do * o).square().sum(dim=-1, keepdim=True)
        for name, squares in (("spread", ds.square()), ("stored", stored)):
            sums = summed_by_distance(squares, x.relative).sum_to_size(shape)
            terms[f"dtable_{name}"] = sums.sqrt()
    return terms


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


@torch.no_grad()
def allowed_errors(x: Part, rounding: Rounding) -> dict[str, Tensor]:
    """Returns the allowed error of each element of o, lse and gradients, by name.

    It is a multiple of the sum of the magnitudes of the element's terms, and of terms that
    underflow. The tolerance rule is stricter, but has one bound per tensor, whose elements must
    have similar sizes.
    """
    p, lse = x.weights()
    q, do = x.q.abs(), x.do.abs()
    k, v = repeat_heads(x.k.abs(), x.q), repeat_heads(x.v.abs(), x.q)
    o = torch.matmul(x.dropped(p), repeat_heads(x.v, x.q)).abs()
    dlse = torch.zeros_like(lse) if x.dlse is None else x.dlse.abs()
    eps, tiny = rounding.accumulated, rounding.underflow
    sink = torch.zeros(()) if x.sinks is None else (x.sinks[None, :, None] - lse).exp()[..., None]
    lse = lse.masked_fill(lse.isneginf(), 0.0).abs()

    # Largest score of a row that takes part; its rounding error is a relative error of the weights.
    scores = x.abs_scale * (q @ k.mT) + _added_scores(x, p)
    hidden = scores.isinf() if x.visible is None else ~x.visible | scores.isinf()
    scores = scores.masked_fill(hidden, 0.0)
    score = scores.amax(-1) if scores.shape[-1] else lse * 0
    of_weight = (rounding.exponential + ROUNDINGS * eps * (1 + score + lse))[..., None]
    relative = 2 * of_weight + 2 * rounding.stored

    delta = (do * o).sum(-1, keepdim=True)
    gradient_of_sink = 3 * delta + dlse[..., None]
    if x.sinks is not None:  # o of the keys alone; the gradient of lse by the sink, twice
        delta = 3 * delta / (1 - sink).clamp(min=tiny)
    gradient = x.dropped(do @ v.mT) + delta + dlse[..., None]  # of the weights
    of_p = x.dropped(p * relative + tiny)
    dv = (of_p.mT @ do).unflatten(1, (x.v.shape[1], -1)).sum(2)
    sums = gradient_sums((p * relative + tiny) * gradient + tiny, x)
    sums["dsinks"] = (sink * relative * gradient_of_sink).sum((0, 2, 3))
    sums |= {"o": of_p @ v, "dv": dv}
    return {name: value + tiny for name, value in sums.items()} | {"lse": of_weight[..., 0]}


def _added_scores(x: Part, like: Tensor) -> Tensor:
    """Magnitudes that biases and relative keys add to the scores: (B, H_q, M, N), as `like`."""
    added = torch.zeros_like(like)
    if isinstance(x.bias, Alibi):
        added += x.bias.slopes[..., None, None].abs() * alibi_distances(x.bias, *like.shape[-2:])
    elif x.bias is not None:
        added += x.bias.abs()
    if x.relative is None:
        return added
    entry = distances(x.relative, *like.shape[-2:])
    if isinstance(x.relative, RelativeKeys):
        products = x.abs_scale * x.q.abs() @ x.relative.keys.abs().mT
        added += products.gather(3, entry.expand(like.shape))
    return added if x.relative.table is None else added + x.relative.table.abs()[:, entry]


@dataclass(frozen=True)
class Bound:
    """Exact values of a result, and the allowed error of each element."""

    exact: Tensor
    allowed: Tensor

    def check(self, name: str, got: Tensor) -> None:
        """Raises AssertionError if an element of `got` is off by more than allowed."""
        exact, allowed = self.exact, self.allowed
        if got.shape != exact.shape:
            raise AssertionError(f"{name}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
        wrong = ~((got.double() - exact).abs() <= allowed) & (got.double() != exact)
        overflows = exact.isfinite() & (exact.abs() > 0.9 * torch.finfo(got.dtype).max)
        wrong &= ~overflows
        wrong |= got.isnan()
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, first {at}: "
                f"got {float(got[at]):.9g}, expected {float(exact[at]):.9g} "
                f"+- {float(allowed[at]):.2g}"
            )
