"""The triton backend of linear attention."""

from __future__ import annotations

from torch import Tensor

from ...backends.triton import target
from ..backends import TritonBackend
from ..family import FamilyProblem
from . import tiles


class TritonLinear(TritonBackend):
    """The kernels of this folder."""

    widest = tiles.WIDTHS[-1]

    def kernel(self, problem: FamilyProblem, q: Tensor, k: Tensor, v: Tensor) -> str:
        chip, columns = target.chip(q.device), max(problem.shape.D, problem.shape.D_v)
        tile = tiles.tile(chip, columns, tiles.precision(chip, q.dtype))
        how = "interpreted by numpy" if self.is_interpreted else chip.name
        return f"linear/triton, {how}, chunks of {tile.chunk} tokens, {tile.slice} columns"
