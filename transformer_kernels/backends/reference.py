"""Naive attention in plain torch: bmm, softmax, bmm.

It is the specification of the operator and the float64 oracle of the tests. It stores the M x N
matrix; torch differentiates it to any order, in reverse and forward mode. Half-precision inputs are
computed in float32.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..masks.constraints import KeyRange
from ..masks.resolved import ResolvedMask
from ..problem import Problem
from ..problem.int8_cache import check_scale_values
from ..problem.layout import DENSE
from ..problem.pages import by_position
from ..scores import philox
from ..scores.options import ScoreOptions
from ..scores.relative import by_pair, products_by_pair


class ReferenceBackend:
    """Backend for any device, dtype and order of derivative, with M x N memory.

    `dispatch.autograd` calls `reference_attention`, which torch differentiates.
    """

    name = "reference"

    def unavailable_reason(self) -> str | None:
        return None

    def unsupported_reasons(self, problem: Problem) -> list[str]:
        return []

    def kernel(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> str:
        return "torch.matmul, softmax, torch.matmul"


def reference_attention(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (o, lse) by the formulas of docs/attention.md, section 2."""
    match problem.layout.kind:
        case "varlen":
            return _varlen(problem, q, k, v)
        case "cache":
            return _cached(problem, q, k, v)
    return _dense(problem, q, k, v)


def _varlen(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Pads the sequences to one length. Trailing padding is one more sequence, without keys."""
    shape, layout = problem.shape, problem.layout
    assert layout.cu_seqlens_q is not None
    assert layout.cu_seqlens_k is not None
    q_starts, k_starts = layout.cu_seqlens_q.long(), layout.cu_seqlens_k.long()
    q_lengths, k_lengths = (pad(starts.diff(), (0, 1)) for starts in (q_starts, k_starts))
    M = min(max(shape.M, 1), q.shape[2])
    N = min(shape.N, k.shape[2])
    padded = (_padded(q, q_starts, M), _padded(k, k_starts, N), _padded(v, k_starts, N))
    d = k_lengths - q_lengths if problem.mask.bottom_right else torch.zeros_like(q_lengths)
    slopes = problem.scores.alibi_slopes
    if slopes is not None and slopes.shape[0] != 1:
        slopes = pad(slopes, (0, 0, 0, 1))
    o, lse = _by_lengths(problem, *padded, q_lengths, k_lengths, d, slopes)
    row = torch.arange(q.shape[2], device=q.device)
    sequence = (row[:, None] >= q_starts[1:]).sum(1)
    i = torch.where(sequence < shape.B, row - q_starts[sequence], 0)
    return o[sequence, :, i].transpose(0, 1)[None], lse[sequence, :, i].T[None]


def _padded(x: Tensor, starts: Tensor, length: int) -> Tensor:
    """Returns (S + 1, H, length, width) of packed sequences; rows in excess hold any values."""
    rows = starts[:, None] + torch.arange(length, device=x.device)
    return x[0, :, rows.clamp(max=x.shape[2] - 1)].transpose(0, 1)


def _cached(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gathers the keys first, and multiplies int8 caches by their scales."""
    check_scale_values(problem)
    layout, N = problem.layout, problem.shape.N
    assert layout.cache_seqlens is not None
    k, v = by_position(layout, N, k), by_position(layout, N, v)
    if layout.k_scale is not None and layout.v_scale is not None:
        dtype = problem.shape.accumulate_dtype
        k = k.to(dtype) * by_position(layout, N, layout.k_scale[..., None])
        v = v.to(dtype) * by_position(layout, N, layout.v_scale[..., None])
    k_lengths = layout.cache_seqlens
    q_lengths = torch.full_like(k_lengths, problem.shape.M)
    d = k_lengths - problem.shape.M
    return _by_lengths(problem, q, k, v, q_lengths, k_lengths, d, problem.scores.alibi_slopes)


def _by_lengths(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lengths: Tensor,
    k_lengths: Tensor,
    d: Tensor,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Runs batch entries of different lengths, whose diagonals have the origins d.

    Masks and biases are dense: no length is read on the host.
    """
    shape, mask = problem.shape, problem.mask
    (B, _, M, _), N = q.shape, k.shape[2]
    i = torch.arange(M, device=shape.device)[:, None]
    j = torch.arange(N, device=shape.device)
    distance = j - i - d[:, None, None]
    attn_mask = (i < q_lengths[:, None, None]) & (j < k_lengths[:, None, None])
    attn_mask = attn_mask & (distance >= mask.diagonal_low) & (distance <= mask.diagonal_high)
    if mask.key_end is not None:
        key_range = KeyRange(mask.key_start, mask.key_end)
        attn_mask = attn_mask & key_range.visible(M, N, shape.device)[:, 0]
    # Pairs beyond the lengths have no distance.
    last = max(shape.M + shape.N - 2, 0)
    entry = ((shape.M if mask.bottom_right else shape.N) - 1 - distance).clamp(0, last)
    visible = attn_mask[:, None]
    scores, products = _with_one_bias(problem, visible, q, slopes, distance, entry)
    shape = shape._replace(B=B, M=M, N=N)
    dense = replace(
        problem, shape=shape, mask=ResolvedMask(dense=visible), scores=scores, layout=DENSE
    )
    return _dense(dense, q, k, v, products)


def _with_one_bias(
    problem: Problem,
    visible: Tensor | None,
    q: Tensor,
    slopes: Tensor | None,
    distance: Tensor,
    entry: Tensor,
) -> tuple[ScoreOptions, Tensor | None]:
    """Returns the scores with all biases in one, and the products of queries and relative keys.

    Args:
        problem: its tables are read; of its biases only `bias` is part of the result as it is.
        visible: the pairs that are visible, (1 or B, 1 or H_q, M, N).
        q: (B, H_q, M, D).
        slopes: of ALiBi.
        distance: of each pair, with either sign, (1 or B, M, N).
        entry: of each pair in the tables, (1 or B, M, N).
    """
    scores, products = problem.scores, None
    biases = [] if scores.bias is None else [scores.bias]
    if slopes is not None:
        biases.append(-slopes[:, :, None, None] * distance.abs()[:, None])
    if scores.relative_bias is not None:
        biases.append(scores.relative_bias[:, entry].transpose(0, 1))
    if scores.relative_keys is not None:
        live = q if visible is None else q.masked_fill(~visible.any(3, keepdim=True), 0.0)
        by_distance = live.to(problem.shape.accumulate_dtype) @ _live_distances(problem).mT
        products = by_distance.gather(3, entry[:, None].expand(*q.shape[:2], -1, -1))
    return scores._replace(
        alibi_slopes=None,
        relative_bias=None,
        relative_keys=None,
        bias=sum(biases[1:], biases[0]) if biases else None,
    ), products


def reference_weights(
    problem: Problem, rows: Tensor, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the weights (B, H_q, R, N) of R rows of a dense problem, and their lse (B, H_q, R).

    There is no dropout. `rows` (R,) counts the queries; q (B, H_q, R, D) holds them.
    """
    visible = problem.mask.of_rows(rows, problem.shape.M, problem.shape.N)
    part, products = _of_rows(problem, visible, rows, q)
    q, k, _, attn_mask = _prepared(part, q, k, k)
    p, lse, empty = _weights(part, q, k, attn_mask, products)
    if empty is not None:
        p, lse = p.masked_fill(empty, 0.0), lse.masked_fill(empty[..., 0], float("-inf"))
    return p.to(problem.shape.dtype), lse


def _of_rows(
    problem: Problem, mask: ResolvedMask, rows: Tensor, q: Tensor
) -> tuple[Problem, Tensor | None]:
    """The problem of some rows, with one bias, and their products with the relative keys."""
    shape, bias = problem.shape, problem.scores.bias
    entry = rows[:, None] - torch.arange(shape.N, device=shape.device) + (shape.N - 1)
    origin = shape.N - shape.M if problem.mask.bottom_right else 0
    distance = entry - (shape.N - 1) + origin + problem.scores.alibi_offset
    if bias is not None and bias.shape[2] != 1:
        problem = problem.with_tensors({"bias": bias.index_select(2, rows)})
    shape, slopes = shape._replace(M=rows.shape[0]), problem.scores.alibi_slopes
    visible = mask.visible(shape.M, shape.N, shape.device)
    scores, products = _with_one_bias(problem, visible, q, slopes, distance[None], entry[None])
    return replace(problem, shape=shape, mask=mask, scores=scores), products


def _dense(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    products: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`products` (B, H_q, M, N) of queries and relative keys take the place of the problem's."""
    q, k, v, attn_mask = _prepared(problem, q, k, v)
    p, lse, empty = _weights(problem, q, k, attn_mask, products)
    if problem.scores.dropout_p:
        p = _drop(problem, p)
    o = torch.matmul(p, v)
    if empty is not None:
        o, lse = o.masked_fill(empty, 0.0), lse.masked_fill(empty[..., 0], float("-inf"))
    return o.to(problem.shape.dtype), lse


def _prepared(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns q, k and v with H_q heads in the dtype of sums, and the mask; dead rows are 0."""
    shape = problem.shape
    q, k, v = (x.to(shape.accumulate_dtype) for x in (q, k, v))
    attn_mask = problem.mask.visible(shape.M, shape.N, shape.device)
    if attn_mask is None and shape.N == 0:
        attn_mask = torch.ones(1, 1, shape.M, 0, dtype=torch.bool, device=shape.device)
    if attn_mask is not None:
        q, k, v = _zero_dead_rows(q, k, v, attn_mask)
    group = shape.H_q // shape.H_kv
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    return q, k, v, attn_mask


def _weights(
    problem: Problem, q: Tensor, k: Tensor, attn_mask: Tensor | None, products: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns (p, lse, empty), finite also in the rows (B, H_q, M, 1) that are empty."""
    scores = problem.scores
    s = torch.matmul(q, k.transpose(-2, -1))
    if scores.relative_keys is not None:
        products = products_by_pair(q, _live_distances(problem), problem.shape.N)
    s = (s if products is None else s + products) * problem.scale
    if scores.softcap:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    s = _add_bias(problem, s)
    empty: Tensor | None = None
    may_be_empty = not scores.bias is scores.relative_bias is None
    if attn_mask is not None or may_be_empty:
        s = s if attn_mask is None else s.masked_fill(~attn_mask, float("-inf"))
        # Rows that are fully masked, or have a bias of -inf, are made finite here and zeroed later.
        # With N = 0 there is nothing to fill, but the tangent of logsumexp would be NaN.
        empty = (s == float("-inf")).all(dim=-1, keepdim=True)
        s = s.masked_fill(empty, 0.0)
    p = torch.softmax(s, dim=-1)
    return p, _log_sum_exp(s, p), empty


def _log_sum_exp(s: Tensor, p: Tensor) -> Tensor:
    """lse = s_j - log p_j, for the largest s_j: its derivative is p by way of the softmax.

    That of torch.logsumexp is exp(s - lse), which is wrong where lse is large and rounded.
    """
    if s.shape[-1] == 0:
        return torch.logsumexp(s, dim=-1)
    largest = s.argmax(dim=-1, keepdim=True)
    return (s.gather(-1, largest) - p.gather(-1, largest).log()).squeeze(-1)


def _zero_dead_rows(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Zeroes dead keys and fully masked queries: they may hold NaN, and 0 * NaN is NaN."""
    live = attn_mask.any(dim=2)
    if live.shape[1] > 1:  # visible to some query head that shares the key head
        live = live.unflatten(1, (k.shape[1], -1)).any(dim=2)
    dead = ~live[..., None]
    q = q.masked_fill(~attn_mask.any(dim=3, keepdim=True), 0.0)
    return q, k.masked_fill(dead, 0.0), v.masked_fill(dead, 0.0)


def _live_distances(problem: Problem) -> Tensor:
    """Returns the relative keys, with zeros at the distances that the mask's diagonals hide."""
    shape, mask, keys = problem.shape, problem.mask, problem.scores.relative_keys
    assert keys is not None
    shift = shape.N - shape.M if mask.bottom_right else 0
    offset = shape.N - 1 - shift - torch.arange(keys.shape[1], device=keys.device)
    live = (mask.diagonal_low <= offset) & (offset <= mask.diagonal_high)
    return keys.masked_fill(~live[:, None], 0.0).to(shape.accumulate_dtype)


def _add_bias(problem: Problem, s: Tensor) -> Tensor:
    M, N, scores = problem.shape.M, problem.shape.N, problem.scores
    if scores.bias is not None:
        s = s + scores.bias.to(s.dtype)
    if scores.alibi_slopes is not None:
        i, j = torch.arange(M, device=s.device)[:, None], torch.arange(N, device=s.device)
        offset = scores.alibi_offset + (N - M if problem.mask.bottom_right else 0)
        distance = (i + offset - j).abs().to(s.dtype)
        s = s - scores.alibi_slopes.to(s.dtype)[:, :, None, None] * distance
    if scores.relative_bias is not None:
        s = s + by_pair(scores.relative_bias, M, N).to(s.dtype)
    return s


def _drop(problem: Problem, p: Tensor) -> Tensor:
    scores, dropout_p = problem.scores, problem.scores.dropout_p
    if dropout_p == 1.0:
        return p * 0.0
    assert scores.seed is not None
    B, H, M, N = p.shape
    first = (0, scores.dropout_head, scores.dropout_row, scores.dropout_column)
    keep = philox.keep_mask(scores.seed, B, H, M, N, dropout_p, first)
    return torch.where(keep, p * philox.keep_factor(dropout_p), 0.0)
