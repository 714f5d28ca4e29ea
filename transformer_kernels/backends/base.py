"""Interface of a backend with fused kernels."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from transformer_kernels.problem import Problem, Saved


class Outputs(NamedTuple):
    """Outputs of a forward kernel."""

    o: Tensor
    lse: Tensor
    block_mask: Tensor | None
    """Saved for the backward pass; None if the mask needs none."""


class Gradients(NamedTuple):
    """Outputs of a backward kernel."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None


class FusedBackend(Protocol):
    """Forward and backward kernels for one kind of device.

    The package `problem` validates calls; a backend declares which of them its kernels support.
    `dispatch.autograd` makes the kernels differentiable.
    """

    @property
    def name(self) -> str: ...

    def unavailable_reason(self) -> str | None:
        """Returns the reason why no kernel can run on this machine; None if one can."""

    def unsupported_reasons(self, problem: Problem) -> list[str]:
        """Returns all reasons why the kernels do not support the problem; empty if they do."""

    def kernel(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> str:
        """Describes the kernel that would run, which may depend on strides; for `explain`."""

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Outputs:
        """Runs a problem of any layout."""

    def backward(
        self,
        problem: Problem,
        saved: Saved,
        do: Tensor,
        dlse: Tensor | None,
        *,
        bias_needs_grad: bool,
    ) -> Gradients:
        """Returns the gradients; that of the bias is None unless `bias_needs_grad`."""


def slopes_reasons(problem: Problem) -> list[str]:
    """Returns the reason of all fused backends against ALiBi slopes that require grad."""
    slopes = problem.scores.alibi_slopes
    if slopes is None or not (slopes.requires_grad and torch.is_grad_enabled()):
        return []
    return ["ALiBi slopes that require grad: only plain torch differentiates them"]
