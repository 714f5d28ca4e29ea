"""The validated call, which dispatch and the backends share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks.resolved import ALL_VISIBLE, ResolvedMask
from ..scores.options import PLAIN_SCORES, ScoreOptions
from .fields import GROUPS, split
from .layout import DENSE, Layout, LayoutKind


class Shape(NamedTuple):
    """Sizes of one call. Symbols as in docs/attention.md.

    Packed sequences: B is their number, M and N are upper bounds of their lengths, and indices
    count within a sequence. Caches: N is the capacity per sequence.
    """

    B: int
    H_q: int
    H_kv: int
    M: int
    N: int
    D: int
    D_v: int
    dtype: torch.dtype
    device: torch.device

    @property
    def accumulate_dtype(self) -> torch.dtype:
        return accumulate_dtype(self.dtype)

    def described(self, H_q: int, H_k: int, H_v: int) -> str:
        """Returns the shapes of q, k and v with these heads."""
        B, M, N, D = self.B, self.M, self.N, self.D
        return (
            f"q ({B}, {H_q}, {M}, {D})  k ({B}, {H_k}, {N}, {D})  v ({B}, {H_v}, {N}, {self.D_v})"
        )


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of softmax statistics, sums and states: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def shape_of(q: Tensor, k: Tensor, v: Tensor, layout: Layout = DENSE) -> Shape:
    """Returns the sizes of a call with these 4-D tensors."""
    B, H_q, M, D = q.shape
    _, H_kv, N, D_v = v.shape
    if layout.cu_seqlens_q is not None:
        B, M, N = layout.cu_seqlens_q.shape[0] - 1, layout.max_seqlen_q, layout.max_seqlen_k
    elif layout.block_table is not None:
        N *= layout.block_table.shape[1]
    return Shape(B, H_q, H_kv, M, N, D, D_v, q.dtype, q.device)


@dataclass(frozen=True, eq=False, slots=True)
class Problem:
    """One validated call, without q, k and v."""

    shape: Shape
    mask: ResolvedMask = ALL_VISIBLE
    scores: ScoreOptions = PLAIN_SCORES
    layout: Layout = DENSE

    @property
    def kind(self) -> LayoutKind:
        return self.layout.kind

    @property
    def described(self) -> str:
        return self.shape.described(self.shape.H_q, self.shape.H_kv, self.shape.H_kv)

    @property
    def scale(self) -> float:
        scale = self.scores.scale
        return 1.0 / math.sqrt(self.shape.D) if scale is None else scale

    def pack(self) -> tuple[Any, ...]:
        """Returns the options in the order of `problem.fields.FIELDS`."""
        return (*self.scores, *self.mask, *self.layout)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors among the options, by name."""
        given: dict[str, Tensor] = {}
        for group, default in (
            (self.scores, PLAIN_SCORES),
            (self.mask, ALL_VISIBLE),
            (self.layout, DENSE),
        ):
            if group is not default:
                for name, x in zip(group._fields, group, strict=True):
                    if isinstance(x, Tensor):
                        given[name] = x
        return given

    def with_tensors(self, tensors: Mapping[str, Tensor | None]) -> Problem:
        """Returns the problem with these tensors, by name, in place of its own."""

        def replaced(group: Any) -> Any:
            own = {name: tensors[name] for name in group._fields if name in tensors}
            return group._replace(**own) if own else group

        if not tensors:
            return self
        mask, scores, layout = replaced(self.mask), replaced(self.scores), replaced(self.layout)
        return Problem(self.shape, mask, scores, layout)


def unpack(q: Tensor, k: Tensor, v: Tensor, options: Sequence[Any]) -> Problem:
    """Returns the problem of an operator's arguments: the inverse of `Problem.pack`."""
    scores, mask, layout = split(options, *GROUPS)
    return Problem(shape_of(q, k, v, layout), mask, scores, layout)


class Saved(NamedTuple):
    """Tensors that a fused forward pass saves for its backward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    row_stats: Tensor
    block_mask: Tensor | None
