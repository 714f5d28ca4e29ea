"""Interface of a backend with fused kernels."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from transformer_kernels.problem import AttentionProblem, KVCache, SavedForBackward, TensorArgs


class FusedBackend(Protocol):
    """Forward, backward and decoding kernels for one kind of device.

    The package `problem` validates calls; a backend declares which of them its kernels support.
    `dispatch.autograd` makes the kernels differentiable.
    """

    @property
    def name(self) -> str: ...

    def unavailable_reason(self) -> str | None:
        """Returns the reason why no kernel can run on this machine; None if one can."""

    def unsupported_reasons(self, problem: AttentionProblem) -> list[str]:
        """Returns all reasons why the kernels do not support the problem; empty if they do."""

    def kernel(
        self, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, tensor_args: TensorArgs
    ) -> str:
        """Describes the kernel that would run, which may depend on strides; for `explain`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tensor_args: TensorArgs, problem: AttentionProblem
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns (o, lse, block_mask). The block mask, if any, is saved for the backward pass."""

    def backward(
        self,
        do: Tensor,
        dlse: Tensor | None,
        saved: SavedForBackward,
        tensor_args: TensorArgs,
        problem: AttentionProblem,
        *,
        bias_needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns (dq, dk, dv, dbias); dbias is None unless `bias_needs_grad`."""

    def decode(self, q: Tensor, cache: KVCache, problem: AttentionProblem) -> tuple[Tensor, Tensor]:
        """Returns (o, lse) of queries against a cache. Requires `problem.is_cached`."""
