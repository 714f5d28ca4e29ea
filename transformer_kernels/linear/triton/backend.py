"""The triton backend of linear attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ...backends.triton import target
from ..base import LinearBackend
from ..types import LinearProblem
from . import operators, tiles


class TritonLinear(LinearBackend):
    """float16, bfloat16 and float32 on any GPU that Triton supports, or interpreted on the CPU."""

    name = "triton"
    names = operators.NAMES
    most_steps = 32  # not timed on a GPU
    is_interpreted = target.INTERPRETED
    """True if kernels are interpreted: much slower than plain torch, so "auto" skips them."""

    def unsupported_reasons(self, problem: LinearProblem) -> list[str]:
        shape = problem.shape
        unavailable = target.reason_against(shape.device)
        if unavailable is not None:
            return [unavailable]
        if shape.dtype == torch.float64:
            return ["float64: these kernels compute in float32"]
        columns = max(shape.D, shape.D_v)
        if columns > tiles.WIDTHS[-1]:
            return [f"rows of {columns} elements: tiles are up to {tiles.WIDTHS[-1]} wide"]
        return []

    def kernel(self, problem: LinearProblem, q: Tensor, k: Tensor, v: Tensor) -> str:
        chip, columns = target.chip(q.device), max(problem.shape.D, problem.shape.D_v)
        tile = tiles.tile(chip, columns, tiles.precision(chip, q.dtype))
        how = "interpreted by numpy" if self.is_interpreted else chip.name
        return f"linear/triton, {how}, chunks of {tile.chunk} tokens, {tile.slice} columns"
