"""Base class of a backend of linear attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.namespace import NAMESPACE
from ..common.torch_private import below_autograd, transforms
from .operators import pack, pack_backward, pack_steps
from .types import BackwardCall, Gradients, Inputs, LinearProblem, LinearState, Options, Results


class Names(NamedTuple):
    """Names of the operators of a backend, with the schemas of linear/operators.py."""

    forward: str = "linear_forward"
    backward: str = "linear_backward"
    steps: str = "linear_steps"


class LinearKernels:
    """Calls of the operators of linear attention.

    torch differentiates and batches the operators by `linear.derivatives`. Calls that are not
    `differentiable` run the kernels alone.
    """

    names = Names()

    def operators(self, device: torch.device) -> Any:
        """Returns the operator namespace that runs on the device."""
        return getattr(torch.ops, NAMESPACE)

    def forward(self, x: Inputs, options: Options, *, differentiable: bool = False) -> Results:
        operator = getattr(self.operators(x.q.device), self.names.forward).default
        with nullcontext() if differentiable else below_autograd():
            return Results(*operator(*pack(x, options)))

    def backward(self, call: BackwardCall, *, differentiable: bool = False) -> Gradients:
        operator = getattr(self.operators(call.x.q.device), self.names.backward).default
        with nullcontext() if differentiable else below_autograd():
            return call.gradients(operator(*pack_backward(call)))


class LinearBackend(LinearKernels, ABC):
    """Kernels of linear attention for one kind of device, as torch operators."""

    name: str
    most_steps: int
    """Longest call of `steps` that the recurrence computes; chunks are faster for more tokens."""

    @abstractmethod
    def unsupported_reasons(self, problem: LinearProblem) -> list[str]:
        """Returns all reasons why the kernels do not support the problem; empty if they do."""

    @abstractmethod
    def kernel(self, problem: LinearProblem, q: Tensor, k: Tensor, v: Tensor) -> str:
        """Describes the kernel that would run, for `explain`."""

    def steps(self, x: Inputs, options: Options) -> Tensor:
        """Returns o, one token after another; overwrites the state x.S, x.z by the final one."""
        if x.q.shape[2] > self.most_steps or transforms():
            results = self.forward(x, options, differentiable=True)
            return overwrite_state(x, results.o, LinearState(results.S, results.z))
        operator = getattr(self.operators(x.q.device), self.names.steps).default
        with nullcontext() if torch.compiler.is_compiling() else below_autograd():
            o: Tensor = operator(*pack_steps(x, options))
        return o


def overwrite_state(x: Inputs, o: Tensor, state: LinearState) -> Tensor:
    """Copies the final state into x.S and x.z; returns o."""
    for own, end in zip((x.S, x.z), state, strict=True):
        assert own is not None
        own.copy_(end)
    return o
