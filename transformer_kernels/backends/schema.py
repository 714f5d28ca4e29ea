"""Operator schemas, and the fake implementations that torch.compile and torch.export run.

The compiled operators and the Triton operators share them; csrc/bindings declares the same schemas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..problem import unpack
from ..problem.fields import SCHEMA
from ..scores.options import DIFFERENTIABLE

FORWARD = (
    f"(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor o, Tensor row_stats, Tensor block_mask)"
)
BACKWARD = (
    "(Tensor d_o, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor row_stats, "
    f"Tensor? block_mask, {SCHEMA}"
    + "".join(f", bool {name}_needs_grad" for name in DIFFERENTIABLE)
    + ", bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv"
    + "".join(f", Tensor d{name}" for name in DIFFERENTIABLE)
    + ")"
)
"""The gradient of an option that is not wanted has no elements."""


def forward_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem = unpack(q, k, v, options)
    o = empty_like_layout(q, v.shape[-1])
    count = 1 if problem.kind == "cache" else 2
    row_stats = q.new_empty(count, *q.shape[:-1], dtype=problem.shape.accumulate_dtype)
    block_mask = problem.mask.block_mask_shape(problem.shape.M, problem.shape.N)
    return o, row_stats, q.new_empty(block_mask, dtype=torch.uint8)


def backward_fake(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    row_stats: Tensor,
    block_mask: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    options, wanted = unpack_backward(rest)
    scores = unpack(q, k, v, options).scores
    gradients = [empty_like_layout(x, x.shape[-1]) for x in (q, k, v)]
    for name in DIFFERENTIABLE:
        x = getattr(scores, name)
        gradients.append(x.new_empty(x.shape) if name in wanted else q.new_empty(0))
    return tuple(gradients)


def unpack_backward(rest: Sequence[Any]) -> tuple[Sequence[Any], list[str]]:
    """Returns the options, and the names of those whose gradients are wanted, of the arguments of
    `BACKWARD` after block_mask."""
    end = -1 - len(DIFFERENTIABLE)
    return rest[:end], [
        name for name, wants in zip(DIFFERENTIABLE, rest[end:-1], strict=True) if wants
    ]


def empty_like_layout(x: Tensor, *width: int) -> Tensor:
    """Allocates (B, H, L, *width) with x's memory order of heads and sequence."""
    B, H, L, *_ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(B, L, H, *width).transpose(1, 2)
    return x.new_empty(B, H, L, *width)


def register_fakes(namespace: str) -> None:
    """Registers the fake implementations of the compiled operators in a namespace."""
    torch.library.register_fake(f"{namespace}::attention_forward", forward_fake)
    torch.library.register_fake(f"{namespace}::attention_backward", backward_fake)
