"""The backends of linear attention, in the order in which backend="auto" tries them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from transformer_kernels.backends.native import extension
from transformer_kernels.backends.native.cpu import reasons_against
from transformer_kernels.linear import operators
from transformer_kernels.linear.reference import reference_linear_attention
from transformer_kernels.linear.types import (
    Gradients,
    Inputs,
    LinearProblem,
    LinearState,
    Options,
    Results,
    Saved,
)

if extension.unavailable_reason() is None:
    operators.register_fakes("transformer_kernels")


MOST_STEPS = 32
"""Longest call of `steps` that the recurrence computes. Chunks are faster for more tokens: at
(1, 8, S, 64), float32, two cores with AVX-512, 32 take as long and 64 take 0.78 of the time."""


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


StateGradient = tuple[Tensor | None, Tensor | None]
"""Gradients of the final state; None is zero."""


class CpuLinear:
    """csrc/cpu/linear: all four dtypes on any CPU."""

    name = "cpu"

    def unsupported_reasons(self, problem: LinearProblem) -> list[str]:
        return reasons_against(problem.shape.device)

    def kernel(self, problem: LinearProblem, q: Tensor, k: Tensor, v: Tensor) -> str:
        computing = str(problem.shape.accumulate_dtype).removeprefix("torch.")
        return f"csrc/cpu/linear, {extension.compiled.isa()}, computing in {computing}"

    def forward(self, x: Inputs, options: Options) -> Results:
        return Results(*torch.ops.transformer_kernels.linear_forward.default(*x, *options.pack()))

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
        operator = torch.ops.transformer_kernels.linear_backward.default
        wanted = (log_decay_needs_grad, x.S is not None, x.z is not None)
        gradients = operator(
            do, *state, saved.o, saved.normalizer, *x, *options.pack(), log_decay_needs_grad
        )
        optional = zip(gradients[3:], wanted, strict=True)
        return Gradients(*gradients[:3], *(g if wants else None for g, wants in optional))

    def steps(self, x: Inputs, options: Options) -> Tensor:
        if x.q.shape[2] > MOST_STEPS:
            results = self.forward(x, options)
            return _overwrite_state(x, results.o, LinearState(results.S, results.z))
        feature_map, _, normalize, eps = options.pack()
        operator = torch.ops.transformer_kernels.linear_steps.default
        o: Tensor = operator(*x[:6], feature_map, normalize, eps)
        return o


class ReferenceLinear:
    """Plain torch on any device, in any dtype, to any order of derivative."""

    name = "reference"

    def unsupported_reasons(self, problem: LinearProblem) -> list[str]:
        return []

    def kernel(self, problem: LinearProblem, q: Tensor, k: Tensor, v: Tensor) -> str:
        return "torch.matmul, chunks of 64 tokens"

    def steps(self, x: Inputs, options: Options) -> Tensor:
        return _overwrite_state(x, *reference_linear_attention(x, options))


def _overwrite_state(x: Inputs, o: Tensor, state: LinearState) -> Tensor:
    for own, end in zip((x.S, x.z), state, strict=True):
        assert own is not None
        own.copy_(end)
    return o


Backend = CpuLinear | ReferenceLinear

LINEAR_BACKENDS: tuple[Backend, ...] = (CpuLinear(), ReferenceLinear())
