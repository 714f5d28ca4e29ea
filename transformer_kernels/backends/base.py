"""Interface of a backend with fused kernels."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from transformer_kernels.problem import Problem, Saved
from transformer_kernels.scores.options import DIFFERENTIABLE


class Outputs(NamedTuple):
    """Outputs of a forward kernel."""

    o: Tensor
    row_stats: Tensor
    """(2, B, H_q, M): lse and its rounding error; from a cache (1, B, H_q, M), lse alone."""
    block_mask: Tensor | None
    """Saved for the backward pass; None if the mask needs none."""


class Gradients(NamedTuple):
    """Outputs of a backward kernel: those of q, k and v, and of the options that are wanted."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    relative_bias: Tensor | None = None
    relative_keys: Tensor | None = None

    @classmethod
    def of(cls, outputs: Sequence[Tensor], wanted: Collection[str]) -> Gradients:
        """The outputs of a backward operator; those that are not wanted become None."""
        if not wanted:
            return cls(*outputs[:3])
        options = zip(DIFFERENTIABLE, outputs[3:], strict=True)
        return cls(*outputs[:3], *(x if name in wanted else None for name, x in options))


class Kernels(Protocol):
    """Forward and backward kernels. `dispatch.autograd` makes them differentiable."""

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Outputs:
        """Runs the kernel for a problem of any layout; the outputs have no derivative."""

    def backward(
        self,
        problem: Problem,
        saved: Saved,
        do: Tensor,
        dlse: Tensor | None,
        *,
        wanted: Collection[str] = (),
    ) -> Gradients:
        """Returns the gradients; `wanted` are names of `DIFFERENTIABLE` options."""

    def differentiable_forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Outputs:
        """Calls the operator, which torch differentiates: for compiled code and torch.func."""

    def differentiable_backward(
        self,
        problem: Problem,
        saved: Saved,
        do: Tensor,
        dlse: Tensor | None,
        *,
        wanted: Collection[str] = (),
    ) -> Gradients:
        """Like `backward`, by the operator, which torch differentiates."""


class FusedBackend(Kernels, Protocol):
    """Forward and backward kernels for one kind of device.

    The package `problem` validates calls; a backend declares which of them its kernels support.
    """

    @property
    def name(self) -> str: ...

    def unavailable_reason(self) -> str | None:
        """Returns the reason why no kernel can run on this machine; None if one can."""

    def unsupported_reasons(self, problem: Problem) -> list[str]:
        """Returns all reasons why the kernels do not support the problem; empty if they do."""

    def kernel(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> str:
        """Describes the kernel that would run, which may depend on strides; for `explain`."""
