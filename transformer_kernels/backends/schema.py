"""Operator schemas: the arguments of the operators and the shapes of their outputs.

Shared by the compiled operators, the Triton operators, and the fake implementations that
torch.compile and torch.export run. csrc/bindings/tensor_args.h and decode_args.h declare the same
schemas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from transformer_kernels.masks.resolved import ResolvedMask
from transformer_kernels.problem import AttentionProblem, TensorArgs

BLOCK_MASK_SIZE = 64
"""Queries and keys per block-mask entry; equals kBlockMaskSize in csrc/common/mask.h."""

OPTIONS = (
    ", ".join(f"Tensor? {name}" for name in TensorArgs._fields)
    + ", float scale, float softcap, float dropout_p, SymInt diagonal_low, SymInt diagonal_high, "
    "int block_size, SymInt alibi_offset, bool bottom_right, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k"
)
"""Schema fragment of every operator: the fields of `TensorArgs`, then those of `ScalarArgs`."""

ScalarArgs = tuple[float, float, float, int, int, int, int, bool, int, int]


def scalar_args(problem: AttentionProblem) -> ScalarArgs:
    """Returns the scalar arguments in schema order.

    M and N are included because the shapes of packed sequences do not give max_seqlen.
    """
    return (
        problem.scale,
        problem.softcap,
        problem.dropout_p,
        problem.diagonal_low,
        problem.diagonal_high,
        problem.block_size,
        problem.alibi_offset,
        problem.bottom_right,
        problem.M,
        problem.N,
    )


_BIAS_NEEDS_GRAD = len(TensorArgs._fields) - 1 + len(get_args(ScalarArgs))
"""Index of bias_needs_grad in the arguments of `backward_fake` after the bias."""


def decode_scalar_args(problem: AttentionProblem) -> tuple[float, float, int, int]:
    """Returns the scalar arguments of the decode operator in schema order."""
    return problem.scale, problem.softcap, problem.diagonal_low, problem.diagonal_high


def needs_block_mask(mask: TensorArgs | ResolvedMask) -> bool:
    """True if the mask has segments, a dense mask or a layout, which need a block mask."""
    return not (mask.q_segments is None and mask.dense is None and mask.layout is None)


def forward_fake(
    q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | float | int | None
) -> tuple[Tensor, Tensor, Tensor]:
    _, _, _, _, _, q_segments, _, dense, layout = rest[:9]
    B, H, M, _ = q.shape
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    o = empty_like_layout(q, v.shape[-1])
    lse = q.new_empty(B, H, M, dtype=statistics)
    shape = block_mask_shape(q, k, q_segments, dense, layout)
    return o, lse, q.new_empty(shape, dtype=torch.uint8)


def backward_fake(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    block_mask: Tensor | None,
    bias: Tensor | None,
    *rest: Tensor | float | int | bool | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (empty_like_layout(x, x.shape[-1]) for x in (q, k, v))
    bias_needs_grad = bool(rest[_BIAS_NEEDS_GRAD])
    dbias = bias.new_empty(bias.shape) if bias is not None and bias_needs_grad else q.new_empty(0)
    return dq, dk, dv, dbias


def decode_fake(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Tensor | float | int | None
) -> tuple[Tensor, Tensor]:
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_like_layout(q, v_cache.shape[-1]), q.new_empty(q.shape[:-1], dtype=statistics)


def empty_like_layout(x: Tensor, width: int) -> Tensor:
    """Allocates (B, H, L, width) with x's memory order of heads and sequence."""
    B, H, L, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(B, L, H, width).transpose(1, 2)
    return x.new_empty(B, H, L, width)


def block_mask_shape(
    q: Tensor,
    k: Tensor,
    q_segments: object,
    dense: object,
    layout: object,
) -> Sequence[int]:
    """Returns (B or 1, H_q or 1, row blocks, column blocks); (0,) if no block mask is needed."""
    if not any(isinstance(x, Tensor) for x in (q_segments, dense, layout)):
        return (0,)
    B = q.shape[0] if isinstance(q_segments, Tensor) else 1
    H = 1
    if isinstance(dense, Tensor):
        B, H = max(B, dense.shape[0]), dense.shape[1]
    if isinstance(layout, Tensor):
        H = max(H, layout.shape[0])
    return B, H, -(-q.shape[2] // BLOCK_MASK_SIZE), -(-k.shape[2] // BLOCK_MASK_SIZE)


def register_fakes(namespace: str) -> None:
    """Registers the fake implementations of the compiled operators in a namespace."""
    torch.library.register_fake(f"{namespace}::attention_forward", forward_fake)
    torch.library.register_fake(f"{namespace}::attention_backward", backward_fake)
    torch.library.register_fake(f"{namespace}::attention_decode", decode_fake)
