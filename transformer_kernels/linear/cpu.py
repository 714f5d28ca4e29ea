"""The cpu backend of linear attention: operators of the compiled extension."""

from __future__ import annotations

from torch import Tensor

from ..backends.native import extension
from ..backends.native.cpu import reasons_against
from .base import LinearBackend
from .types import LinearProblem


class CpuLinear(LinearBackend):
    """csrc/cpu/linear: all four dtypes on any CPU."""

    name = "cpu"
    most_steps = 32
    """At (1, 8, S, 64), float32, two cores with AVX-512, chunks take as long for 32 tokens and 0.78
    of the time for 64."""

    def unsupported_reasons(self, problem: LinearProblem) -> list[str]:
        return reasons_against(problem.shape.device)

    def kernel(self, problem: LinearProblem, q: Tensor, k: Tensor, v: Tensor) -> str:
        computing = str(problem.shape.accumulate_dtype).removeprefix("torch.")
        return f"csrc/cpu/linear, {extension.compiled.isa()}, computing in {computing}"
