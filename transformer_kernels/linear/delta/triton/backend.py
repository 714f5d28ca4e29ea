"""The triton backend of the gated delta rule."""

from __future__ import annotations

from torch import Tensor

from ....backends.triton import target
from ...backends import TritonBackend
from ...family import FamilyProblem
from . import tiles


class TritonDelta(TritonBackend):
    """The kernels of this folder."""

    widest = tiles.WIDTHS[-1]

    def kernel(self, problem: FamilyProblem, q: Tensor, k: Tensor, v: Tensor) -> str:
        chip, columns = target.chip(q.device), max(problem.shape.D, problem.shape.D_v)
        channels = problem.inputs.log_decay.shape[3] > 1
        tile = tiles.tile(chip, columns, tiles.precision(chip, q.dtype), channels=channels)
        how = "interpreted by numpy" if self.is_interpreted else chip.name
        return f"linear/delta/triton, {how}, chunks of {tile.chunk} tokens, {tile.slice} columns"
