"""Patterns of the Sparse Transformer: which keys each query sees, element by element.

Source: Generating Long Sequences with Sparse Transformers (Child et al., 2019, arXiv:1904.10509),
section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .options import check_choice, check_positive

PatternKind = Literal["local", "strided", "fixed"]
Combination = Literal["merged", "split"]


@dataclass(frozen=True, kw_only=True)
class SparsePattern:
    """A causal pattern of near keys, which every query i has, and far keys.

    | kind | near keys j <= i | far keys j <= i |
    |---|---|---|
    | local | i - j < stride | none |
    | strided | i - j < stride | i - j is a multiple of stride |
    | fixed | of i's group of `stride` positions | the summaries of every group |

    The summaries of a group are `subblocks` subblocks of `summaries` positions at its end. Head h
    sees subblock h modulo `subblocks`.

    The paper's strided pattern has stride + 1 near keys; this one has `stride`, as the authors'
    code (openai/sparse_attention).
    """

    kind: PatternKind
    stride: int
    """l in the paper: near the square root of the length"""
    summaries: int = 1
    """c in the paper: positions of a subblock, with kind "fixed" """
    subblocks: int = 1
    """Distinct subblocks of the heads, with kind "fixed"; divides the number of heads"""
    combination: Combination = "merged"
    """merged: every head sees near and far keys. split: the first half of the heads, rounded up,
    sees the near keys, and the others the far keys. A query without a key gets o = 0."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, PatternKind)
        check_positive("stride", self.stride)
        check_positive("summaries", self.summaries)
        check_positive("subblocks", self.subblocks)
        check_choice("combination", self.combination, Combination)
        if self.kind == "fixed" and self.summaries * self.subblocks > self.stride:
            raise ValueError(
                f"summaries * subblocks must be at most stride = {self.stride}, "
                f"got {self.summaries} * {self.subblocks}"
            )

    def check_heads(self, heads: int) -> None:
        """Raises ValueError unless the pattern suits a number of heads."""
        near, far = self.near_heads(heads), self.far_heads(heads)
        if self.kind != "local" and not (near and far):
            raise ValueError(f"split needs at least 2 heads, got {heads}")
        if self.kind == "fixed" and len(far) % self.subblocks:
            raise ValueError(
                f"the number of heads with far keys must be a multiple of subblocks = "
                f"{self.subblocks}, got {len(far)}"
            )

    def near_heads(self, heads: int) -> range:
        """Those of `heads` heads that see the near keys: the first ones."""
        return range((heads + 1) // 2 if self._is_split else heads)

    def far_heads(self, heads: int) -> range:
        """Those of `heads` heads that see the far keys: the last ones."""
        if self.kind == "local":
            return range(heads, heads)
        return range((heads + 1) // 2 if self._is_split else 0, heads)

    @property
    def _is_split(self) -> bool:
        return self.kind != "local" and self.combination == "split"

    def visible(
        self, heads: int, length: int, *, start: int = 0, device: torch.device | str | None = None
    ) -> Tensor:
        """The definition of the pattern, for tests and for attention with a dense mask.

        Args:
            heads: number of heads.
            length: number of keys.
            start: first query; the last is length - 1.
            device: device of the result.

        Returns:
            bool (heads, length - start, length): True where a head shows a key to a query.

        Raises:
            ValueError: the pattern does not suit the number of heads.
        """
        self.check_heads(heads)
        near_heads, far_heads = self.near_heads(heads), self.far_heads(heads)
        h = torch.arange(heads, device=device)[:, None, None]
        i = torch.arange(start, length, device=device)[:, None]
        j = torch.arange(length, device=device)
        if self.kind == "fixed":
            near = i // self.stride == j // self.stride
            first = self.first_summary() + (h - far_heads.start) % self.subblocks * self.summaries
            column = j % self.stride
            far = (first <= column) & (column < first + self.summaries)
        else:
            near = i - j < self.stride
            far = (i - j) % self.stride == 0
        return (j <= i) & (near & (h < near_heads.stop) | far & (h >= far_heads.start))

    def first_summary(self) -> int:
        """Position of the first summary in a group."""
        return self.stride - self.subblocks * self.summaries
