"""What the kernels take, as named tuples: a tensor that is absent is None, and costs nothing.

Triton passes a tuple field by field and compiles a kernel for which fields are None. Everything
here is a plain number or tensor, so kernels read `mask.dense` where C++ would read a params struct.
No tuple holds another: Triton 3.6 then loses fields that are None or 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels.problem import AttentionProblem, TensorArgs
from transformer_kernels.scores import philox

LOG2E = 1.0 / math.log(2.0)


class Rows(NamedTuple):
    """(B, H, L, width) in memory, a row's elements side by side."""

    data: Tensor
    stride_b: int
    stride_h: int
    stride_l: int


class Scalars(NamedTuple):
    """What changes from call to call. Kernels take these one by one, as `*scalars`: in a tuple
    Triton would compile a kernel anew where one is 1 or a multiple of 16."""

    rows: int
    """of q in memory: M, or those of all packed sequences"""
    M: int
    N: int
    low: int
    high: int
    """visible: i + low <= j <= i + high"""
    offset: int
    """of ALiBi"""


class Heads(NamedTuple):
    """How many query heads, and how many of them to a key head."""

    H_q: int
    group: int


class Sequences(NamedTuple):
    """Packed sequences: b has the rows cu_q[b] to cu_q[b + 1], and the keys likewise."""

    cu_q: Tensor | None
    cu_k: Tensor | None
    bottom_right: int
    """1: diagonals and ALiBi count from N - M of each sequence; else 0"""


class MaskTensors(NamedTuple):
    """See `bound_mask.ResolvedMask`. Flags are bytes."""

    key_start: Tensor | None
    key_end: Tensor | None
    q_segments: Tensor | None
    k_segments: Tensor | None
    dense: Tensor | None
    dense_b: int | None
    """strides, also below: 0 where a dimension is 1, None where the tensor is"""
    dense_h: int | None
    dense_i: int | None
    dense_j: int | None
    layout: Tensor | None
    layout_h: int | None
    layout_i: int | None
    layout_j: int | None
    block_size: int
    columns: int | None
    """N, if there are dense flags: here Triton compiles for whether it divides by 16, and then
    loads 16 bytes at a time"""


class Scores(NamedTuple):
    """How a product of q and k becomes a score."""

    scale: float
    plain_scale: float | None
    """log2(e) times the scale, where scores are products times the scale and nothing else"""
    softcap: float | None
    bias: Tensor | None
    bias_b: int | None
    bias_h: int | None
    bias_i: int | None
    bias_j: int | None
    columns: int | None
    """N, if there is a bias: see `MaskTensors`"""
    slopes: Tensor | None


class Dropout(NamedTuple):
    """Weights are kept where their 16 bits are at least `threshold`, and then times `factor`."""

    seed: Tensor | None
    threshold: int
    factor: float


class BlockLists(NamedTuple):
    """For each block of rows its partly visible blocks, first in `indices`, and the wholly visible
    ones, last in it; `counts` holds how many of each. None where diagonals and ranges say it all.
    """

    indices: Tensor | None
    counts: Tensor | None
    stride_b: int
    stride_h: int
    columns: int


NO_LISTS = BlockLists(None, None, 0, 0, 0)


def rows(x: Tensor) -> Rows:
    return Rows(x, *x.stride()[:3])


def scalars(q: Tensor, problem: AttentionProblem) -> Scalars:
    reach = problem.M + problem.N  # further out than any index, wherever it counts from
    return Scalars(
        rows=q.shape[2],
        M=problem.M,
        N=problem.N,
        low=min(max(problem.diagonal_low, -reach), reach),
        high=min(max(problem.diagonal_high, -reach), reach),
        offset=problem.alibi_offset,
    )


def mask_tensors(tensor_args: TensorArgs, problem: AttentionProblem) -> MaskTensors:
    dense, layout = _bytes(tensor_args.dense), _bytes(tensor_args.layout)
    dense_b, dense_h, dense_i, dense_j = _strides(dense, 4)
    layout_h, layout_i, layout_j = _strides(layout, 3)
    return MaskTensors(
        key_start=_contiguous(tensor_args.key_start),
        key_end=_contiguous(tensor_args.key_end),
        q_segments=_contiguous(tensor_args.q_segments),
        k_segments=_contiguous(tensor_args.k_segments),
        dense=dense,
        dense_b=dense_b,
        dense_h=dense_h,
        dense_i=dense_i,
        dense_j=dense_j,
        layout=layout,
        layout_h=layout_h,
        layout_i=layout_i,
        layout_j=layout_j,
        block_size=problem.block_size,
        columns=None if dense is None else problem.N,
    )


def scores(tensor_args: TensorArgs, problem: AttentionProblem, scale: float) -> Scores:
    plain = not problem.softcap and tensor_args.bias is None and tensor_args.alibi_slopes is None
    bias_b, bias_h, bias_i, bias_j = _strides(tensor_args.bias, 4)
    return Scores(
        scale=scale,
        plain_scale=scale * LOG2E if plain else None,
        softcap=problem.softcap or None,
        bias=tensor_args.bias,
        bias_b=bias_b,
        bias_h=bias_h,
        bias_i=bias_i,
        bias_j=bias_j,
        columns=None if tensor_args.bias is None else problem.N,
        slopes=_contiguous(tensor_args.alibi_slopes),
    )


def dropout(tensor_args: TensorArgs, problem: AttentionProblem) -> Dropout:
    if not problem.dropout_p:
        return Dropout(None, 0, 1.0)
    p = problem.dropout_p
    return Dropout(tensor_args.seed, philox.keep_threshold(p), 1.0 / (1.0 - p) if p < 1.0 else 0.0)


def score_bytes(tensor_args: TensorArgs) -> int:
    """What a tile loads for each of its scores, besides rows of q, k and v."""
    tensors = (tensor_args.bias, tensor_args.dense, tensor_args.layout)
    return sum(x.element_size() for x in tensors if x is not None)


def broadcast_strides(x: Tensor) -> tuple[int, ...]:
    """x's strides, 0 where a dimension is 1."""
    return tuple(
        0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)
    )


def _strides(x: Tensor | None, dimensions: int) -> Sequence[int | None]:
    return [None] * dimensions if x is None else broadcast_strides(x)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _bytes(flags: Tensor | None) -> Tensor | None:
    """bool as uint8, without a copy."""
    return None if flags is None else flags.view(torch.uint8)
