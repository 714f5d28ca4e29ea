"""Naive attention in plain torch: bmm, softmax, bmm.

It is the specification of the operator and the float64 oracle of the tests. It stores the M x N
matrix; torch differentiates it to any order, in reverse and forward mode. Half-precision inputs are
computed in float32.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from transformer_kernels.masks.constraints import UNBOUNDED, BlockSparse, KeyRange, Segments, Window
from transformer_kernels.problem import AttentionProblem, KVCache, TensorArgs
from transformer_kernels.scores import philox


class ReferenceBackend:
    """Backend for any device, dtype and order of derivative, with M x N memory.

    `dispatch.autograd` calls `reference_attention` and `reference_decode`, which torch
    differentiates.
    """

    name = "reference"

    def unavailable_reason(self) -> str | None:
        return None

    def unsupported_reasons(self, problem: AttentionProblem) -> list[str]:
        return []

    def kernel(
        self, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, tensor_args: TensorArgs
    ) -> str:
        return "torch.matmul, softmax, torch.matmul"


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, tensor_args: TensorArgs, problem: AttentionProblem
) -> tuple[Tensor, Tensor]:
    """Returns (o, lse) by the formulas of docs/attention.md, section 2."""
    if tensor_args.cu_seqlens_q is not None and tensor_args.cu_seqlens_k is not None:
        starts = tensor_args.cu_seqlens_q.tolist(), tensor_args.cu_seqlens_k.tolist()
        return _varlen(q, k, v, *starts, tensor_args, problem)
    return _dense(q, k, v, tensor_args, problem)


def reference_decode(q: Tensor, cache: KVCache, problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """Returns (o, lse) against a cache. Gathers the keys first, without device synchronisation."""
    device = problem.device
    cache_seqlens = cache.cache_seqlens[:, None, None]
    i, j = torch.arange(problem.M, device=device)[:, None], torch.arange(problem.N, device=device)
    distance = j - (i + cache_seqlens - problem.M)
    attn_mask = (
        (j < cache_seqlens)
        & (distance >= problem.diagonal_low)
        & (distance <= problem.diagonal_high)
    )
    bias: Tensor | None = None
    if cache.alibi_slopes is not None:
        bias = -cache.alibi_slopes[:, None, None] * distance.abs()[:, None]
    k, v = _gather_pages(cache.k, cache, problem), _gather_pages(cache.v, cache, problem)
    problem = replace(problem, diagonal_low=-UNBOUNDED, diagonal_high=UNBOUNDED)
    return _dense(q, k, v, TensorArgs(bias=bias, dense=attn_mask[:, None]), problem)


def _gather_pages(x: Tensor, cache: KVCache, problem: AttentionProblem) -> Tensor:
    """Returns (B, H_kv, N, width). Unused entries of the block table read page 0."""
    if cache.block_table is None:
        return x
    pages, heads, page_size, width = x.shape
    if pages == 0:
        return x.new_zeros(problem.B, heads, problem.N, width)
    first = torch.arange(cache.block_table.shape[1], device=x.device) * page_size
    used = first < cache.cache_seqlens[:, None]
    gathered = x[torch.where(used, cache.block_table, 0).long()]
    return gathered.transpose(1, 2).reshape(problem.B, heads, problem.N, width)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: list[int],
    k_starts: list[int],
    tensor_args: TensorArgs,
    problem: AttentionProblem,
) -> tuple[Tensor, Tensor]:
    """Runs the sequences one by one. Trailing padding is one more sequence, without keys."""
    q_rows = [*pairwise(q_starts), (q_starts[-1], q.shape[2])]
    k_rows = [*pairwise(k_starts), (k_starts[-1], k_starts[-1])]
    parts = [
        _dense(
            q[:, :, i0:i1], k[:, :, j0:j1], v[:, :, j0:j1],
            tensor_args, _one_sequence(problem, i1 - i0, j1 - j0), b,
        )
        for b, ((i0, i1), (j0, j1)) in enumerate(zip(q_rows, k_rows, strict=True))
    ]  # fmt: skip
    o, lse = zip(*parts, strict=True)
    return torch.cat(o, dim=2), torch.cat(lse, dim=2)


def _one_sequence(problem: AttentionProblem, M: int, N: int) -> AttentionProblem:
    d = N - M if problem.bottom_right else 0
    low, high = problem.diagonal_low, problem.diagonal_high
    return replace(
        problem,
        B=1,
        M=M,
        N=N,
        diagonal_low=low if low == -UNBOUNDED else low + d,
        diagonal_high=high if high == UNBOUNDED else high + d,
        alibi_offset=problem.alibi_offset + d,
    )


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_args: TensorArgs,
    problem: AttentionProblem,
    first_batch: int = 0,
) -> tuple[Tensor, Tensor]:
    q, k, v = (x.to(problem.accumulate_dtype) for x in (q, k, v))
    attn_mask = visible(tensor_args, problem)
    if attn_mask is not None:
        # Dead keys and fully masked queries may hold NaN; zero them so that 0 * NaN cannot occur.
        live = attn_mask.any(dim=2)
        if live.shape[1] > 1:  # visible to some query head that shares the key head
            live = live.unflatten(1, (problem.H_kv, -1)).any(dim=2)
        dead = ~live[..., None]
        q = q.masked_fill(~attn_mask.any(dim=3, keepdim=True), 0.0)
        k, v = k.masked_fill(dead, 0.0), v.masked_fill(dead, 0.0)
    group = problem.H_q // problem.H_kv
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))

    s = torch.matmul(q, k.transpose(-2, -1)) * problem.scale
    if problem.softcap:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    s = _add_bias(s, tensor_args, problem)
    empty: Tensor | None = None
    if attn_mask is not None or tensor_args.bias is not None or problem.N == 0:
        s = s if attn_mask is None else s.masked_fill(~attn_mask, float("-inf"))
        # Rows that are fully masked, or have a bias of -inf, are made finite here and zeroed below.
        # With N = 0 there is nothing to fill, but the tangent of logsumexp would be NaN.
        empty = (s == float("-inf")).all(dim=-1, keepdim=True)
        s = s.masked_fill(empty, 0.0)
    lse = torch.logsumexp(s, dim=-1)
    p = torch.softmax(s, dim=-1)
    if problem.dropout_p:
        p = _drop(p, tensor_args, problem, first_batch)
    o = torch.matmul(p, v)
    if empty is not None:
        o, lse = o.masked_fill(empty, 0.0), lse.masked_fill(empty[..., 0], float("-inf"))
    return o.to(problem.dtype), lse


def visible(tensor_args: TensorArgs, problem: AttentionProblem) -> Tensor | None:
    """Returns the resolved mask as bool (1 or B, 1 or H_q, M, N); None if everything is visible."""
    M, N, device = problem.M, problem.N, problem.device
    terms: list[Tensor] = []
    low, high = problem.diagonal_low, problem.diagonal_high
    if low != -UNBOUNDED or high != UNBOUNDED:
        terms.append(Window(-low, high, "top_left").visible(M, N, device))
    if tensor_args.key_end is not None:
        terms.append(KeyRange(tensor_args.key_start, tensor_args.key_end).visible(M, N, device))
    if tensor_args.q_segments is not None and tensor_args.k_segments is not None:
        terms.append(Segments(tensor_args.q_segments, tensor_args.k_segments).visible(M, N, device))
    if tensor_args.dense is not None:
        terms.append(tensor_args.dense)
    if tensor_args.layout is not None:
        terms.append(BlockSparse(tensor_args.layout, problem.block_size).visible(M, N, device))
    if not terms:
        return None
    conjunction = terms[0]
    for term in terms[1:]:
        conjunction = conjunction & term
    return conjunction.expand(-1, -1, M, N)


def _add_bias(s: Tensor, tensor_args: TensorArgs, problem: AttentionProblem) -> Tensor:
    if tensor_args.bias is not None:
        s = s + tensor_args.bias.to(s.dtype)
    if tensor_args.alibi_slopes is not None:
        i = torch.arange(problem.M, device=s.device)[:, None]
        j = torch.arange(problem.N, device=s.device)
        distance = (i + problem.alibi_offset - j).abs().to(s.dtype)
        s = s - tensor_args.alibi_slopes.to(s.dtype)[:, None, None] * distance
    return s


def _drop(
    p: Tensor, tensor_args: TensorArgs, problem: AttentionProblem, first_batch: int
) -> Tensor:
    if problem.dropout_p == 1.0:
        return p * 0.0
    assert tensor_args.seed is not None
    B, H, M, N = p.shape
    kept = philox.keep_mask(tensor_args.seed, B, H, M, N, problem.dropout_p, first_batch)
    return torch.where(kept, p * philox.keep_factor(problem.dropout_p), 0.0)
