"""The cpu backend of linear attention: operators of the compiled extension."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.backends.native import extension
from transformer_kernels.backends.native.cpu import reasons_against
from transformer_kernels.linear import operators
from transformer_kernels.linear.base import StateGradient, overwrite_state
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


class CpuLinear:
    """csrc/cpu/linear: all four dtypes on any CPU."""

    name = "cpu"

    def unsupported_reasons(self, problem: LinearProblem) -> list[str]:
        return reasons_against(problem.shape.device)

    def kernel(self, problem: LinearProblem, q: Tensor, k: Tensor, v: Tensor) -> str:
        computing = str(problem.shape.accumulate_dtype).removeprefix("torch.")
        return f"csrc/cpu/linear, {extension.compiled.isa()}, computing in {computing}"

    def forward(self, x: Inputs, options: Options) -> Results:
        operator = torch.ops.transformer_kernels.linear_forward.default
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
    ) -> Gradients:
        operator = torch.ops.transformer_kernels.linear_backward.default
        outputs = operator(
            do, *state, saved.o, saved.normalizer, *x, *options.pack(), log_decay_needs_grad
        )
        return Gradients.of(outputs, x, log_decay_needs_grad=log_decay_needs_grad)

    def steps(self, x: Inputs, options: Options) -> Tensor:
        if x.q.shape[2] > MOST_STEPS:
            results = self.forward(x, options)
            return overwrite_state(x, results.o, LinearState(results.S, results.z))
        feature_map, _, normalize, eps = options.pack()
        operator = torch.ops.transformer_kernels.linear_steps.default
        o: Tensor = operator(*x[:6], feature_map, normalize, eps)
        return o
