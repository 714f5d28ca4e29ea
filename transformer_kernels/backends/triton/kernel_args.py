"""Kernel arguments as named tuples, the counterpart of a C++ params struct.

Triton passes a tuple field by field and specializes the kernel on the fields that are None, so an
absent tensor costs nothing at run time. Tuples are not nested: Triton 3.6 loses fields of nested
tuples that are None or 1.
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
    """(B, H, L, width) tensor with unit-stride rows; strides in elements."""

    data: Tensor
    stride_b: int
    stride_h: int
    stride_l: int


class Scalars(NamedTuple):
    """Arguments that change from call to call, passed to kernels as `*scalars`. In a tuple Triton
    would specialize on values of 1 and multiples of 16."""

    rows: int
    """rows of q in memory: M, or the total of a varlen call"""
    M: int
    N: int
    low: int
    high: int
    """band: i + low <= j <= i + high is visible"""
    offset: int
    """added to i in the ALiBi distance |i + offset - j|"""
    rows_k: int
    """rows of k and v in memory: N, or the total of a varlen call"""


class Heads(NamedTuple):
    """Number of query heads, and of query heads per key head."""

    H_q: int
    group: int


class Sequences(NamedTuple):
    """Varlen sequences: b has query rows cu_q[b]..cu_q[b + 1] and key rows cu_k[b]..cu_k[b + 1]."""

    cu_q: Tensor | None
    cu_k: Tensor | None
    bottom_right: int
    """1 if the band and ALiBi are aligned to the bottom right corner of each sequence, else 0"""


class MaskTensors(NamedTuple):
    """Tensors of a `ResolvedMask`; bool tensors are viewed as uint8."""

    key_start: Tensor | None
    key_end: Tensor | None
    q_segments: Tensor | None
    k_segments: Tensor | None
    dense: Tensor | None
    dense_b: int | None
    """strides (also below): 0 for a dimension of size 1, None if the tensor is None"""
    dense_h: int | None
    dense_i: int | None
    dense_j: int | None
    layout: Tensor | None
    layout_h: int | None
    layout_i: int | None
    layout_j: int | None
    block_size: int
    columns: int | None
    """N if there is a dense mask, else None. Triton specializes on its divisibility by 16, which
    enables 16-byte loads."""


class Scores(NamedTuple):
    """Parameters that turn a product q k^T into a score."""

    scale: float
    plain_scale: float | None
    """log2(e) * scale; None if there is a softcap, a bias or ALiBi, or if the scale is near the
    limits of float32: a scale that rounds to 0 would turn masked scores (-inf) into NaN"""
    softcap: float | None
    bias: Tensor | None
    bias_b: int | None
    bias_h: int | None
    bias_i: int | None
    bias_j: int | None
    columns: int | None
    """N if there is a bias, else None: see `MaskTensors`"""
    slopes: Tensor | None


class Dropout(NamedTuple):
    """A weight is kept, and multiplied by `factor`, if its 16 random bits are >= `threshold`."""

    seed: Tensor | None
    threshold: int
    factor: float


class BlockLists(NamedTuple):
    """Blocks that each row block visits. `indices` holds partial blocks from the front and full
    blocks from the back, `counts` the number of each. None if no block mask is needed.
    """

    indices: Tensor | None
    counts: Tensor | None
    stride_b: int
    stride_h: int
    columns: int


NO_LISTS = BlockLists(None, None, 0, 0, 0)


def rows(x: Tensor) -> Rows:
    return Rows(x, *x.stride()[:3])


def scalars(q: Tensor, k: Tensor, problem: AttentionProblem) -> Scalars:
    limit = problem.M + problem.N  # beyond every index, with either alignment
    return Scalars(
        rows=q.shape[2],
        M=problem.M,
        N=problem.N,
        low=min(max(problem.diagonal_low, -limit), limit),
        high=min(max(problem.diagonal_high, -limit), limit),
        offset=problem.alibi_offset,
        rows_k=k.shape[2],
    )


def mask_tensors(tensor_args: TensorArgs, problem: AttentionProblem) -> MaskTensors:
    dense, layout = _as_uint8(tensor_args.dense), _as_uint8(tensor_args.layout)
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
    plain = plain and 1e-37 < scale < 1e37
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
    return Dropout(tensor_args.seed, philox.keep_threshold(p), philox.keep_factor(p))


def score_bytes(tensor_args: TensorArgs) -> int:
    """Bytes loaded per score, for a bias, a dense mask and a layout."""
    tensors = (tensor_args.bias, tensor_args.dense, tensor_args.layout)
    return sum(x.element_size() for x in tensors if x is not None)


def broadcast_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of x, 0 for dimensions of size 1."""
    return tuple(
        0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)
    )


def _strides(x: Tensor | None, dimensions: int) -> Sequence[int | None]:
    return [None] * dimensions if x is None else broadcast_strides(x)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _as_uint8(x: Tensor | None) -> Tensor | None:
    """View of a bool tensor as uint8."""
    return None if x is None else x.view(torch.uint8)
