"""Interface of a backend of linear attention."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from transformer_kernels.linear.types import (
    Gradients,
    Inputs,
    LinearProblem,
    LinearState,
    Options,
    Results,
    Saved,
)

StateGradient = tuple[Tensor | None, Tensor | None]
"""Gradients of the final state; None is zero."""


class LinearBackend(Protocol):
    """Forward and backward kernels of linear attention for one kind of device."""

    @property
    def name(self) -> str: ...

    def unsupported_reasons(self, problem: LinearProblem) -> list[str]:
        """Returns all reasons why the kernels do not support the problem; empty if they do."""

    def kernel(self, problem: LinearProblem, q: Tensor, k: Tensor, v: Tensor) -> str:
        """Describes the kernel that would run, for `explain`."""

    def forward(self, x: Inputs, options: Options) -> Results: ...

    def backward(
        self,
        x: Inputs,
        options: Options,
        saved: Saved,
        do: Tensor,
        state: StateGradient,
        *,
        log_decay_needs_grad: bool,
    ) -> Gradients:
        """Returns the gradients; `saved` are results of `forward`."""

    def steps(self, x: Inputs, options: Options) -> Tensor:
        """Returns o, one token after another; overwrites the state x.S, x.z by the final one."""


def overwrite_state(x: Inputs, o: Tensor, state: LinearState) -> Tensor:
    """Copies the final state into x.S and x.z; returns o."""
    for own, end in zip((x.S, x.z), state, strict=True):
        assert own is not None
        own.copy_(end)
    return o
