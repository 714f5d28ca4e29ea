"""Interface of a backend with fused kernels."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from transformer_kernels.problem import AttentionProblem, KVCache, SavedForBackward, TensorArgs


class FusedBackend(Protocol):
    """Forward, backward and decoding kernels for one kind of device.

    `problem` says what a call means, the backend which calls its kernels support;
    `dispatch.autograd` makes them differentiable.
    """

    @property
    def name(self) -> str: ...

    def unavailable_reason(self) -> str | None:
        """Why no kernel can run on this machine; None where one can."""

    def unsupported_reasons(self, problem: AttentionProblem) -> list[str]:
        """Why the kernels do not support the problem; empty where they do."""

    def kernel(
        self, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, tensor_args: TensorArgs
    ) -> str:
        """The kernel that would run, for `explain`. It may depend on the strides of q, k and v."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tensor_args: TensorArgs, problem: AttentionProblem
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(o, lse, block_mask); a block mask is kept for the backward pass."""

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
        """(dq, dk, dv, dbias); dbias is None unless `bias_needs_grad`."""

    def decode(self, q: Tensor, cache: KVCache, problem: AttentionProblem) -> tuple[Tensor, Tensor]:
        """(o, lse) of queries against a cache, where `problem.is_cached`."""
