"""Calls of a backend's operators, which have the schemas of `backends.schema`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends.base import Gradients, Outputs
from transformer_kernels.namespace import NAMESPACE
from transformer_kernels.problem import Problem, Saved
from transformer_kernels.scores.options import DIFFERENTIABLE
from transformer_kernels.torch_private import below_autograd


class OperatorBackend:
    """Common part of the backends; subclasses declare which calls they support.

    torch differentiates and batches the operators by `dispatch.operators`. `forward` and `backward`
    run the kernels alone and save the time in which torch asks whether it has to.
    """

    forward_name = "attention_forward"
    backward_name = "attention_backward"

    def operators(self, device: torch.device) -> Any:
        """Returns the operator namespace that runs on the device."""
        return getattr(torch.ops, NAMESPACE)

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Outputs:
        with below_autograd():
            return self.differentiable_forward(problem, q, k, v)

    def backward(
        self,
        problem: Problem,
        saved: Saved,
        do: Tensor,
        dlse: Tensor | None,
        *,
        wanted: Collection[str] = (),
    ) -> Gradients:
        with below_autograd():
            return self.differentiable_backward(problem, saved, do, dlse, wanted=wanted)

    def differentiable_forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Outputs:
        operator = getattr(self.operators(q.device), self.forward_name).default
        o, row_stats, block_mask = operator(q, k, v, *problem.pack())
        return Outputs(o, row_stats, block_mask if problem.mask.has_element_mask else None)

    def differentiable_backward(
        self,
        problem: Problem,
        saved: Saved,
        do: Tensor,
        dlse: Tensor | None,
        *,
        wanted: Collection[str] = (),
    ) -> Gradients:
        operator = getattr(self.operators(do.device), self.backward_name).default
        flags = [name in wanted for name in DIFFERENTIABLE]
        deterministic = torch.are_deterministic_algorithms_enabled()
        gradients = operator(do, dlse, *saved, *problem.pack(), *flags, deterministic)
        return Gradients.of(gradients, wanted)
