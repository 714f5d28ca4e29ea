"""Run of a validated call: choice of the backend, kernels."""

from __future__ import annotations

from torch import Tensor

from ..dispatch.autocast import without_autocast
from ..dispatch.choose import choose
from . import derivatives  # noqa: F401 - torch then differentiates them
from .autograd import run_kernels
from .backends import LINEAR_BACKENDS, STEP_BACKENDS
from .types import LinearProblem, LinearState


def run(problem: LinearProblem, backend: str) -> tuple[Tensor, LinearState]:
    """Returns o and the final state, differentiable.

    Raises ValueError if the named backend does not support the problem.
    """
    chosen = choose(problem, backend, LINEAR_BACKENDS)
    with without_autocast(problem.shape.device.type):
        return run_kernels(chosen, problem.inputs, problem.options)


def run_steps(problem: LinearProblem, backend: str) -> Tensor:
    """Returns o and overwrites the state in `problem.inputs` by the final one."""
    chosen = choose(problem, backend, STEP_BACKENDS)
    with without_autocast(problem.shape.device.type):
        return chosen.steps(problem.inputs, problem.options)
