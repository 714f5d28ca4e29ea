"""Calls of the compiled operators, which the CPU and CUDA kernels share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends.base import Gradients, Outputs
from transformer_kernels.namespace import NAMESPACE
from transformer_kernels.problem import Problem, Saved
from transformer_kernels.scores.options import DIFFERENTIABLE


class NativeBackend:
    """Common part of the cpu and cuda backends; subclasses declare which calls they support."""

    def operators(self, device: torch.device) -> Any:
        """Returns the operator namespace that runs on the device."""
        return getattr(torch.ops, NAMESPACE)

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Outputs:
        operator = self.operators(q.device).attention_forward.default
        o, lse, block_mask = operator(q, k, v, *problem.pack())
        return Outputs(o, lse, block_mask if problem.mask.has_element_mask else None)

    def backward(
        self,
        problem: Problem,
        saved: Saved,
        do: Tensor,
        dlse: Tensor | None,
        *,
        wanted: Collection[str] = (),
    ) -> Gradients:
        operator = self.operators(do.device).attention_backward.default
        flags = [name in wanted for name in DIFFERENTIABLE]
        deterministic = torch.are_deterministic_algorithms_enabled()
        gradients = operator(do, dlse, *saved, *problem.pack(), *flags, deterministic)
        return Gradients.of(gradients, wanted)
