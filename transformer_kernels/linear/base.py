"""Base class of a backend of linear attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.torch_private import below_autograd, transforms
from .types import Gradients, Inputs, LinearProblem, LinearState, Options, Results, Saved

StateGradient = tuple[Tensor | None, Tensor | None]
"""Gradients of the final state; None is zero."""


class LinearOperators(NamedTuple):
    """Torch operators of a backend, with the schemas of linear/operators.py."""

    forward: Any
    backward: Any
    steps: Any

    @classmethod
    def of(cls, namespace: Any) -> LinearOperators:
        """The compiled operators of a namespace of torch.ops."""
        return cls(
            namespace.linear_forward.default,
            namespace.linear_backward.default,
            namespace.linear_steps.default,
        )


class LinearKernels(ABC):
    """Calls of the operators of linear attention.

    torch differentiates and batches the operators by `linear.derivatives`. Calls that are not
    `differentiable` run the kernels alone.
    """

    @abstractmethod
    def operators(self, device: torch.device) -> LinearOperators:
        """Returns the operators for tensors on the device."""

    def forward(self, x: Inputs, options: Options, *, differentiable: bool = False) -> Results:
        operator = self.operators(x.q.device).forward
        with nullcontext() if differentiable else below_autograd():
            return Results(*operator(*x, *options.pack()))

    def backward(
        self,
        x: Inputs,
        options: Options,
        saved: Saved,
        do: Tensor,
        state: StateGradient,
        *,
        log_decay_needs_grad: bool,
        differentiable: bool = False,
    ) -> Gradients:
        """Returns the gradients; `saved` are results of `forward`."""
        operator = self.operators(x.q.device).backward
        with nullcontext() if differentiable else below_autograd():
            outputs = operator(do, *state, *saved, *x, *options.pack(), log_decay_needs_grad)
        return Gradients.of(outputs, x, log_decay_needs_grad=log_decay_needs_grad)


class LinearBackend(LinearKernels):
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
        feature_map, _, normalize, eps = options.pack()
        operator = self.operators(x.q.device).steps
        with nullcontext() if torch.compiler.is_compiling() else below_autograd():
            o: Tensor = operator(*x[:6], feature_map, normalize, eps)
        return o


def overwrite_state(x: Inputs, o: Tensor, state: LinearState) -> Tensor:
    """Copies the final state into x.S and x.z; returns o."""
    for own, end in zip((x.S, x.z), state, strict=True):
        assert own is not None
        own.copy_(end)
    return o
